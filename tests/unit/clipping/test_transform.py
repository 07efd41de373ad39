"""The clips as Optax transformations: thresholds of every kind, and drop-in for Optax's own."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradclip_jax as gcx
import trees
from clip_cases import assert_same_bits, step

# --- what a threshold may be ----------------------------------------------------------------

GRADS = {"a": jnp.float32([3.0, 4.0]), "b": jnp.bfloat16([12.0])}  # norm 13


@pytest.mark.parametrize(
    "make",
    [
        gcx.clip_by_global_norm,
        gcx.clip_by_leaf_norm,
        gcx.clip_by_block_rms,
        gcx.clip_by_value,
        lambda threshold: gcx.clip_by_group_norm(threshold, "all"),
        functools.partial(gcx.clip_by_norm, reaction="zero"),
    ],
    ids=["global", "leaf", "block rms", "value", "group", "zero"],
)
def test_traced_threshold_out_of_range_never_raises_and_never_flips_a_sign(make):
    def update(threshold, grads):
        return make(threshold).update(grads, None)[0]

    update = jax.jit(update)
    grads = {"a": jnp.float32([3.0, -4.0]), "b": jnp.float16([-12.0, 0.0])}
    for threshold in (0.0, -0.0, -1.0, -math.inf):
        for x in jax.tree.leaves(update(jnp.float32(threshold), grads)):
            np.testing.assert_array_equal(np.float32(x), np.zeros(2))
    nan = update(jnp.float32(math.nan), grads)
    assert not any((np.float32(nan[name]) * np.float32(x) < 0).any() for name, x in grads.items())
    assert_same_bits(update(jnp.float32(math.inf), grads), grads)


# --- drop-in for Optax ----------------------------------------------------------------------

PAIRS = {
    "global": (gcx.clip_by_global_norm, optax.clip_by_global_norm),
    "value": (gcx.clip_by_value, optax.clip),
    "block rms": (gcx.clip_by_block_rms, optax.clip_by_block_rms),
    "unit": (gcx.adaptive_grad_clip, optax.adaptive_grad_clip),
}
SHAPES = [(), (7,), (1, 1, 7), (6, 7), (6, 2, 3), (3, 3, 2, 4)]  # all that Optax's units know


def ordinary(seed):
    return [trees.normal(shape, seed=seed + i) for i, shape in enumerate(SHAPES)]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS.values(), ids=PAIRS)
def test_same_numbers_as_optax_on_ordinary_gradients(ours, theirs):
    params = ordinary(50)

    @jax.jit
    def both(threshold, grads):
        clips = ours(threshold), theirs(threshold)
        return [clip.update(grads, clip.init(params), params)[0] for clip in clips]

    for threshold in (0.05, 1.0, 1e3):
        for seed in (0, 10):
            chex.assert_trees_all_close(*both(threshold, ordinary(seed)), rtol=1e-6, atol=1e-30)


def test_an_injected_order_may_be_static():
    inject = optax.inject_hyperparams(gcx.clip_by_global_norm, static_args=("ord",))
    updates, _ = step(inject(max_norm=1.0, ord=1.0), jnp.float32([3.0, 4.0]))
    np.testing.assert_allclose(np.abs(updates).sum(), 1.0, rtol=1e-6)


def test_a_reaction_of_zero_drops_a_large_gradient_and_keeps_nan_for_a_guard():
    clip = optax.chain(gcx.clip_by_norm(6.0, reaction="zero"), optax.zero_nans())
    for scale in (1.0, 1e20, math.inf, math.nan):
        grads = jax.tree.map(lambda x, s=scale: x * jnp.asarray(s, x.dtype), GRADS)
        updates, (state, _) = clip.update(grads, clip.init(grads))
        assert_same_bits(updates, jax.tree.map(jnp.zeros_like, grads))
        np.testing.assert_equal(float(state.clip_factor), 0.0 if np.isfinite(scale) else np.nan)
        assert state.clip_fraction == 1
