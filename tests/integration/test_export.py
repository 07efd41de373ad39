"""Lowering for platforms that are not here, by exporting the jitted transformations."""

import jax
import jax.numpy as jnp
import pytest
from jax import export
from registry import TRANSFORMATIONS

import gradclip_jax as gcx

PLATFORMS = ("tpu", "cuda", "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("name", list(TRANSFORMATIONS))
def test_transformation_lowers_for_all_platforms(name, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    tx = TRANSFORMATIONS[name]()
    params = {"w": jnp.ones((4, 3), jnp.bfloat16), "b": jnp.ones(3), "v": jnp.ones((1024, 1024))}

    def step(params, grads):
        return gcx.apply_gradients(tx, grads, tx.init(params), params)[0]

    exported = export.export(jax.jit(step), platforms=PLATFORMS)(params, params)
    assert exported.platforms == PLATFORMS


def test_micro_batching_lowers_for_all_platforms():
    run = gcx.microbatched_value_and_grad(lambda w, x: jnp.mean((x @ w) ** 2), 2)
    exported = export.export(jax.jit(run), platforms=PLATFORMS)(jnp.ones(3), jnp.ones((4, 3)))
    assert exported.platforms == PLATFORMS
