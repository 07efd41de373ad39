"""The clips as Optax transformations: thresholds of every kind, and drop-in for Optax's own."""

import functools
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import compat
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
FLOATS = ("float32", "float16", "bfloat16")
NORM_CLIPS = {
    "global": gcx.clip_by_global_norm,
    "group": lambda t, **kw: gcx.clip_by_group_norm({"all": t}, "all", **kw),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", ["32 bit", "64 bit"])
def test_threshold_may_be_traced(dtype, width):
    with compat.strict():
        if width == "64 bit":
            with compat.x64():
                updates = traced_clip(dtype)
        else:
            updates = traced_clip(dtype)
    assert_close(updates, {"a": np.float32([1.5, 2.0]), "b": np.float32([6.0])})


def traced_clip(dtype):
    def update(threshold, grads):
        return gcx.clip_by_global_norm(threshold).update(grads, None)[0]

    return jax.jit(update)(jnp.asarray(6.5, dtype), GRADS)


@pytest.mark.parametrize(
    "make",
    [
        gcx.clip_by_global_norm,
        gcx.clip_by_leaf_norm,
        gcx.clip_by_block_rms,
        gcx.clip,
        NORM_CLIPS["group"],
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


# --- without a state ------------------------------------------------------------------------

STATELESS = {
    "global": gcx.clip_by_global_norm(1.0),
    "leaf": gcx.clip_by_leaf_norm(1.0),
    "group": gcx.clip_by_group_norm({"all": 1.0}, "all"),
    "block rms": gcx.clip_by_block_rms(0.5),
    "value": gcx.clip(0.5),
    "unit": gcx.adaptive_grad_clip(0.1),
    "zero": gcx.zero_large_norm(1.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("clip", STATELESS.values(), ids=STATELESS)
def test_update_without_a_state_is_the_same(clip):
    grads = trees.build("dense")
    with_state, _ = step(clip, grads, grads)
    without, _ = jax.jit(lambda g: clip.update(g, None, g))(grads)
    assert_same_bits(with_state, without)


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
def test_same_training_as_optax_in_a_chain(ours, theirs):
    def train(clip):
        tx = optax.named_chain(("clip", clip), ("opt", optax.adamw(1e-2)))

        def one(carry, seed):
            params, state = carry
            grads = jax.tree.map(lambda p: p * 3 + jnp.sin(seed), params)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        params = ordinary(seed=50)
        return jax.lax.scan(one, (params, tx.init(params)), jnp.arange(5.0))[0][0]

    assert_close(train(ours(0.1)), train(theirs(0.1)), rtol=1e-5)


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


INJECTED = {
    "global": (gcx.clip_by_global_norm, optax.clip_by_global_norm, "max_norm"),
    "leaf": (gcx.clip_by_leaf_norm, None, "max_norm"),
    "block rms": (gcx.clip_by_block_rms, optax.clip_by_block_rms, "threshold"),
    "unit": (gcx.adaptive_grad_clip, optax.adaptive_grad_clip, "clipping"),
    "value": (gcx.clip_by_value, None, "max_value"),
    "zero": (gcx.zero_large_norm, None, "max_norm"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("ours", "theirs", "name"), INJECTED.values(), ids=INJECTED)
def test_threshold_may_be_injected_and_changed(ours, theirs, name):
    params, grads = ordinary(seed=50), ordinary()
    static = {"ord", "num_layer_axes"} & set(inspect.signature(ours).parameters)
    tx = optax.inject_hyperparams(ours, static_args=static)(**{name: 0.3})
    update = jax.jit(tx.update)
    state = tx.init(params)
    for threshold in (0.3, 0.1):
        state.hyperparams[name] = jnp.asarray(threshold, jnp.float32)
        updates, state = update(grads, state, params)
        other = ours if theirs is None else theirs
        plain = other(threshold)
        assert_close(updates, plain.update(grads, plain.init(params), params)[0])
    assert float(state.hyperparams[name]) == np.float32(0.1)


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


# --- errors when built ----------------------------------------------------------------------


# --- errors when traced ---------------------------------------------------------------------
