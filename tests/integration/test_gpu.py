"""What must hold on a GPU as on a CPU; skipped where JAX finds none."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradclip_jax as gcx
import oracles

pytestmark = pytest.mark.gpu

SIZES = (1, 1_000, 300_000, 5_000_000)


def on_gpu(x):
    return jax.device_put(x, jax.devices("gpu")[0])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_norm_is_right(dtype):
    rng = np.random.default_rng(0)
    tree = [on_gpu(jnp.asarray(rng.standard_normal(size), dtype)) for size in SIZES]
    exact = oracles.global_norm([np.asarray(x, np.float64) for x in tree])
    assert oracles.ulps(jax.jit(gcx.global_norm)(tree), exact) <= 2


@pytest.mark.parametrize("values", [[1e20, 1e20], [3e-23, 4e-23], [3e38, 3e-38]])
def test_overflow_and_underflow_are_retaken(values):
    exact = oracles.global_norm([np.float32(values).astype(np.float64)])
    assert oracles.ulps(jax.jit(gcx.global_norm)(on_gpu(jnp.float32(values))), exact) <= 2


def test_a_hold_step_needs_no_scratch_and_a_bad_step_changes_nothing():
    tx = gcx.skip_nonfinite(gcx.accumulate_gradients(optax.adam(0.1), 4))
    params = on_gpu({"w": jnp.ones((512, 512)), "b": jnp.zeros(512)})
    step = jax.jit(lambda g, s, p: gcx.apply_gradients(tx, g, s, p), donate_argnums=(1, 2))
    hold = gcx.accumulate_gradients(optax.adam(0.1), 4)
    lowered = jax.jit(
        lambda g, s, p: gcx.apply_gradients(hold, g, s, p), donate_argnums=(1, 2)
    ).lower(params, hold.init(params), params)
    scratch = lowered.compile().memory_analysis().temp_size_in_bytes
    assert scratch <= 1.05 * sum(x.nbytes for x in jax.tree.leaves(params))

    bad = jax.tree.map(lambda x: x * jnp.nan, params)
    before = jax.tree.map(np.asarray, params)
    after, state = step(bad, tx.init(params), jax.tree.map(jnp.copy, params))
    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert int(state.skipped_nonfinite) == 1
