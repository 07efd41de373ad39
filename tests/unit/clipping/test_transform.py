"""The clips as Optax transformations: thresholds of every kind, and drop-in for Optax's own."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradclip_jax as gcx
import trees


def bits(x) -> bytes:
    return np.asarray(x).tobytes()


def assert_same_bits(updates, grads):
    for got, wanted in zip(jax.tree.leaves(updates), jax.tree.leaves(grads), strict=True):
        assert bits(got) == bits(wanted)


def assert_close(updates, exact, rtol=1e-6):
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=rtol, atol=1e-30), updates, exact
    )


def step(tx, grads, params=None, state=None):
    state = tx.init(grads if params is None else params) if state is None else state
    return jax.jit(tx.update)(grads, state, params)


# --- what a threshold may be ----------------------------------------------------------------

GRADS = {"a": jnp.float32([3.0, 4.0]), "b": jnp.bfloat16([12.0])}  # norm 13


@pytest.mark.parametrize(
    "make",
    [
        gcx.clip_by_global_norm,
        gcx.clip_by_leaf_norm,
        gcx.clip_by_block_rms,
        gcx.clip,
        lambda threshold: gcx.clip_by_group_norm({"all": threshold}, "all"),
        gcx.zero_large_norm,
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
    "global": (lambda c: gcx.clip_by_global_norm(c), lambda c: optax.clip_by_global_norm(c)),
    "value": (lambda c: gcx.clip(c), lambda c: optax.clip(c)),
    "block rms": (lambda c: gcx.clip_by_block_rms(c), lambda c: optax.clip_by_block_rms(c)),
    "unit": (lambda c: gcx.adaptive_grad_clip(c), lambda c: optax.adaptive_grad_clip(c)),
}
pairs = pytest.mark.parametrize(("ours", "theirs"), PAIRS.values(), ids=PAIRS)


def ordinary(seed=0, scale=1.0):
    """Ordinary float32 gradients, with every rank that Optax's unit-wise norm knows."""
    shapes = {
        "scalar": (),
        "bias": (7,),
        "bias of three axes": (1, 1, 7),
        "dense": (6, 7),
        "attention": (6, 2, 3),
        "conv": (3, 3, 2, 4),
    }
    return {
        name: trees.normal(shape, seed=seed + i, scale=scale)
        for i, (name, shape) in enumerate(shapes.items())
    }


@pairs
def test_same_numbers_as_optax_on_ordinary_gradients(ours, theirs):
    params = ordinary(seed=50)

    @jax.jit
    def both(threshold, grads):
        clips = ours(threshold), theirs(threshold)
        return [clip.update(grads, clip.init(params), params)[0] for clip in clips]

    for threshold in (0.05, 1.0, 1e3):
        for seed in (0, 10):
            assert_close(*both(threshold, ordinary(seed)))


@pairs
def test_same_numbers_as_optax_masked_and_partitioned(ours, theirs):
    params, grads = ordinary(seed=50), ordinary()
    mask = {name: name != "dense" for name in params}
    labels = {name: "yes" if flag else "no" for name, flag in mask.items()}
    for wrap in (
        lambda clip: optax.masked(clip, mask),
        lambda clip: optax.partition({"yes": clip, "no": optax.identity()}, labels),
    ):
        us, them = wrap(ours(0.1)), wrap(theirs(0.1))
        updates, _ = step(us, grads, params)
        expected, _ = step(them, grads, params)
        assert_close(updates, expected)
        assert bits(updates["dense"]) == bits(grads["dense"])


def test_injected_order_must_be_static():
    inject = optax.inject_hyperparams(gcx.clip_by_global_norm, static_args=("ord",))
    updates, _ = step(inject(max_norm=1.0, ord=1.0), jnp.float32([3.0, 4.0]))
    np.testing.assert_allclose(np.abs(updates).sum(), 1.0, rtol=1e-6)
    with pytest.raises(TypeError, match="^clip_by_global_norm: `ord`"):
        tx = optax.inject_hyperparams(gcx.clip_by_global_norm)(max_norm=1.0, ord=1.0)
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))


# --- reactions ------------------------------------------------------------------------------


def test_zero_large_norm():
    drop = gcx.zero_large_norm(6.0)
    update = jax.jit(drop.update)
    state = drop.init(GRADS)
    small = jax.tree.map(lambda x: x / 4, GRADS)
    updates, state = update(small, state)
    assert_same_bits(updates, small)
    assert float(state.clip_fraction) == 0.0
    for scale in (1.0, 1e30, math.inf, math.nan):
        updates, state = update(
            jax.tree.map(lambda x, s=scale: x * jnp.asarray(s, x.dtype), GRADS), state
        )
        for x in jax.tree.leaves(updates):
            np.testing.assert_array_equal(np.float32(x), np.zeros(x.shape))
        assert float(state.clip_factor) == 0.0 and float(state.clip_fraction) == 1.0
    updates, _ = update(small, state)
    assert_same_bits(updates, small)
