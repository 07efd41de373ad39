"""The code for a GPU and for a TPU, run on a CPU, returns the same values as the code for a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradclip_jax as gcx
import hlo
from accumulation_cases import collectives
from trees import normal

pytestmark = pytest.mark.slow

ADAM = optax.adam(0.1)
OPTIMIZERS = {
    "watch": gcx.watch(optax.chain(gcx.clip_by_global_norm(1.0), ADAM)),
    "leaf": gcx.clip_by_leaf_norm(1.0),
    "unit": gcx.skip_nonfinite(optax.chain(gcx.adaptive_grad_clip(0.01), ADAM)),
    "window": gcx.skip_nonfinite(
        gcx.accumulate_gradients(optax.chain(gcx.clip_by_global_norm(1.0), ADAM), 2)
    ),
    "row": optax.chain(gcx.clip_by_norm(1.0, granularity=gcx.granularities.axis(-1)), ADAM),
}


def tree(seed):
    shapes = {"stack": (3, 8, 80), "w": (256, 70), "v": (256, 70), "s": ()}
    arrays = {name: normal(shape, seed=seed) for name, shape in shapes.items()}
    return arrays | {"b": normal(7, jnp.bfloat16, seed=seed)}


def outputs(tx):
    jax.clear_caches()
    params, grads = tree(0), tree(1)

    @jax.jit
    def step(element):
        changed = grads | {"stack": grads["stack"].at[1, 2, 3].set(element)}
        updates, state = tx.update(changed, tx.init(params), params)
        later, state = tx.update(grads, state, params)
        return updates, later, gcx.metrics(state)

    return [step(element) for element in (1.0, 1e30, np.nan)]


def choose(platform, monkeypatch):
    """Run the code for a platform; return whether each choice differed from that for a CPU."""
    used = []

    def chosen(*args, default, **variants):
        variant = variants.get(platform, default)
        used.append(variant is not variants.get("cpu", default))
        return variant(*args)

    jax.clear_caches()
    monkeypatch.setattr(lax, "platform_dependent", chosen)
    return used


@pytest.mark.parametrize(("platform", "num_devices"), [("cuda", 1), ("tpu", 1), ("cuda", 8)])
@pytest.mark.parametrize("name", ["watch", "leaf", "unit", "window"])
def test_variants_agree(name, platform, num_devices, monkeypatch):
    expected = outputs(OPTIMIZERS[name])
    used = choose(platform, monkeypatch)
    monkeypatch.setattr(jax, "device_count", lambda: num_devices)
    found = outputs(OPTIMIZERS[name])
    jax.clear_caches()
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), found, expected)
    assert any(used)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("name", ["watch", "unit", "row"])
def test_leaves_of_one_shape_and_several_shardings_are_not_gathered(name, platform, monkeypatch):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    specs = {"a": P("x"), "b": P(), "c": P("x"), "u": P(), "v": P(None, "x"), "w": P("x")}
    params = {
        key: jax.device_put(jnp.ones(4096 if key < "d" else (512, 512)), NamedSharding(mesh, spec))
        for key, spec in specs.items()
    }
    tx = OPTIMIZERS[name]
    state = jax.jit(tx.init)(params)
    choose(platform, monkeypatch)
    text = hlo.compiled(lambda *args: gcx.apply_gradients(tx, *args), params, state, params)
    assert collectives(text).keys() == collectives(text, branches=True).keys() == {"all-reduce"}
    jax.clear_caches()
