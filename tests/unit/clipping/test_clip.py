"""The clips as functions and as Optax transformations: right, cheap, and drop-in for Optax's own."""

import functools
import inspect
import math

import chex
import hypothesis
import hypothesis.extra.numpy
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st

import compat
import gradclip_jax as gcx
import hlo
import oracles
import trees
from clip_cases import assert_close, assert_same_bits
from marks import slow
from public import FUNCTIONS

# --- clip_grad_norm -------------------------------------------------------------------------


@pytest.mark.parametrize("ord", [1.0, 2.0, math.inf])
def test_clip_grad_norm_is_right(ord):
    names = ("mixed_dtypes", "masked", "stacked", "numpy")
    grads = {name: trees.build(name) for name in names}
    clipped, norm = jax.jit(lambda g: gcx.clip_grad_norm(g, 0.5, ord=ord))(grads)
    leaves = trees.leaves(grads)
    assert float(norm) == pytest.approx(oracles.global_norm(leaves, ord), rel=1e-6)
    assert jax.tree.structure(clipped) == jax.tree.structure(grads)
    assert_close(trees.leaves(clipped), oracles.clip_by_global_norm(leaves, 0.5, ord))


def test_known_norm_is_used_and_not_computed_again():
    grads = {"a": jnp.float32([3.0]), "b": jnp.float32([4.0])}
    clipped, norm = gcx.clip_grad_norm(grads, 1.0, norm=10.0)
    assert norm == 10.0 and norm.dtype == jnp.float32
    np.testing.assert_allclose(clipped["b"], [0.4], rtol=1e-6)
    for bad in (math.nan, math.inf):
        clipped, norm = gcx.clip_grad_norm(grads, 1.0, norm=bad)
        assert np.isnan(clipped["a"]).all()
        np.testing.assert_equal(float(norm), bad)
    text = hlo.compiled(lambda g, n: gcx.clip_grad_norm(g, 1.0, norm=n), big(), 10.0)
    assert hlo.reductions_of(text, SIZE) == 0


@pytest.mark.slow
def test_64_bit_trees_are_clipped_in_64_bits():
    grads = {"a": np.float64([3.0, 4.0]), "b": np.complex128([12.0j]), "c": np.float16([0.0])}
    clip = gcx.clip_by_global_norm(0.1)
    exact = oracles.clip_by_global_norm(list(grads.values()), 0.1)
    with compat.x64(), compat.strict():
        tree = jax.tree.map(jnp.asarray, grads)
        clipped, norm = gcx.clip_grad_norm(tree, 0.1)
        assert norm.dtype == jnp.float64 and norm == 13.0
        transformed, state = clip.update(tree, clip.init(tree))
        assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(state))
        for found in (clipped, transformed):
            for got, wanted, given in zip(found.values(), exact, grads.values(), strict=True):
                assert got.dtype == given.dtype
                np.testing.assert_allclose(got, wanted, rtol=1e-15)
        # A float32 tree stays one, whatever the threshold.
        clipped, norm = gcx.clip_grad_norm(jnp.float32([3.0, 4.0]), np.float64(1.0))
        assert clipped.dtype == norm.dtype == jnp.float32


# --- costs ----------------------------------------------------------------------------------


def big():
    return {"a": jnp.ones((500, 300)), "b": jnp.ones((200_000,))}


SIZE = 149_900  # of the smaller leaf of `big`, whose last few older JAX adds up apart


@pytest.mark.parametrize(
    "clip",
    [
        gcx.clip_by_global_norm(1.0),
        gcx.clip_by_group_norm({"x": 1.0, "y": 1.0}, {"a": "x", "b": "y"}),
        gcx.clip_by_block_rms(1.0),
        gcx.adagc(),
    ],
    ids=["global", "group", "block rms", "adagc"],
)
def test_clipping_and_reading_the_norms_of_the_state_take_each_norm_once(clip):
    def step(grads, state):
        updates, state = clip.update(grads, state)
        return updates, gcx.metrics(state)

    text = hlo.compiled(step, big(), clip.init(big()))
    assert hlo.reductions_of(text, SIZE) == 2  # one for each leaf


def test_a_second_eager_call_compiles_nothing(caplog):
    grads = {"a": jnp.ones((3, 5)), "b": jnp.ones(7, jnp.bfloat16)}
    clip = gcx.clip_by_group_norm({"a": 1.0, "b": 1.0}, {"a": "a", "b": "b"})
    state = clip.init(grads)
    for _ in range(2):
        caplog.clear()
        with jax.log_compiles(), caplog.at_level("DEBUG", logger="jax"):
            gcx.clip_grad_norm(grads, 1.0)
            clip.update(grads, state)
    assert not [r for r in caplog.records if "XLA compil" in r.getMessage()]


# --- transformations ------------------------------------------------------------------------


def test_state_before_the_first_step_tells_of_no_clipping():  # later ones: test_grid.py
    first = gcx.clip_by_global_norm(2.0).init(jnp.zeros(2))
    assert first == (0.0, float(np.finfo(np.float32).max), 1.0, 0.0, ())
    assert all(x.dtype == jnp.float32 and x.shape == () for x in jax.tree.leaves(first))


def test_traced_threshold_out_of_range_never_raises_and_never_flips_a_sign():
    makes = [
        gcx.clip_by_global_norm,
        gcx.clip_by_leaf_norm,
        gcx.clip_by_block_rms,
        gcx.clip_by_value,
        lambda threshold: gcx.clip_by_group_norm(threshold, "all"),
        functools.partial(gcx.clip_by_norm, reaction="zero"),
    ]

    @jax.jit
    def updates(threshold, grads):
        return [make(threshold).update(grads, None)[0] for make in makes]

    grads = {"a": jnp.float32([3.0, -4.0]), "b": jnp.float16([-12.0, 0.0])}
    for threshold in (0.0, -1.0, -math.inf):
        assert not any(x.any() for x in jax.tree.leaves(updates(threshold, grads)))
    for nan in updates(math.nan, grads):
        assert not any((nan[name] * x < 0).any() for name, x in grads.items())
    assert_same_bits(updates(math.inf, grads), [grads] * len(makes))


PAIRS = {
    "global": (gcx.clip_by_global_norm, optax.clip_by_global_norm),
    "value": (gcx.clip_by_value, optax.clip),
    "block rms": (gcx.clip_by_block_rms, optax.clip_by_block_rms),
    "unit": (gcx.adaptive_grad_clip, optax.adaptive_grad_clip),
}
SHAPES = [(), (7,), (1, 1, 7), (6, 7), (6, 2, 3), (3, 3, 2, 4)]  # all that Optax's units know


@pytest.mark.parametrize(("ours", "theirs"), PAIRS.values(), ids=PAIRS)
def test_same_numbers_as_optax_on_ordinary_gradients(ours, theirs):
    grads, params = ([trees.normal(x, seed=seed) for x in SHAPES] for seed in (1, 2))

    @jax.jit
    def both(threshold):
        clips = ours(threshold), theirs(threshold)
        return [clip.update(grads, clip.init(params), params)[0] for clip in clips]

    for threshold in (0.05, 1.0, 1e3):
        chex.assert_trees_all_close(*both(threshold), rtol=1e-6, atol=1e-30)


# Every public clip that takes a number alone.
CLIPS = [
    clip
    for name, clip in FUNCTIONS.items()
    if inspect.signature(clip, eval_str=True).return_annotation is optax.GradientTransformation
    and name not in ("clip_by_group_norm", "round_stochastically")
]


@pytest.mark.slow
@pytest.mark.parametrize("make", CLIPS, ids=lambda make: make.__name__)
def test_a_clip_under_plain_inject_hyperparams_does_what_it_does_alone(make):
    first = next(iter(inspect.signature(make).parameters))
    value = {first: 50.0 if first == "percentile" else 0.5}
    plain, injected = make(**value), optax.inject_hyperparams(make)(**value)
    grads = {"a": jnp.array([3.0, 4.0]), "b": jnp.ones((2, 2))}
    state, injected_state = plain.init(grads), injected.init(grads)
    for scaled in (grads, jax.tree.map(lambda x: 2 * x, grads)):
        expected, state = plain.update(scaled, state, grads)
        found, injected_state = jax.jit(injected.update)(scaled, injected_state, grads)
        chex.assert_trees_all_close(found, expected, rtol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 1e18, math.inf, math.nan])
def test_zero_nans_after_a_reaction_of_zero_drops_every_large_or_nonfinite_gradient(scale):
    clip = optax.chain(gcx.clip_by_norm(6.0, reaction="zero"), optax.zero_nans())
    grads = scale * jnp.float32([3.0, 4.0, 12.0])
    updates, (state, _) = clip.update(grads, clip.init(grads))
    assert_same_bits(updates, jnp.zeros(3))
    np.testing.assert_equal(float(state.clip_factor), 0.0 if math.isfinite(scale) else math.nan)
    assert state.clip_fraction == 1


# --- any gradient ---------------------------------------------------------------------------

EPS = float(np.finfo(np.float32).eps)

# Numbers within the range of invariant 4, elements from 1e-18 and norms up to 1.8e19.
sizes = st.floats(2.0**-59, 2.0**62, width=32) | st.floats(2.0**-10, 4.0, width=32)
numbers = sizes | sizes.map(lambda x: -x) | st.sampled_from([0.0, 1.0, -1.0])
thresholds = st.floats(2.0**-50, 2.0**60, width=32)


def vectors(shape):
    return hypothesis.extra.numpy.arrays(np.float32, shape, elements=numbers)


gradients = st.fixed_dictionaries({"w": vectors((3, 2)), "b": vectors((4,)), "s": vectors(())})

EXACT = {
    "global": (gcx.clip_by_global_norm, oracles.clip_by_global_norm),
    "leaf": (gcx.clip_by_leaf_norm, oracles.clip_by_leaf_norm),
    "block rms": (gcx.clip_by_block_rms, oracles.clip_by_block_rms),
}
_COMPILED = {
    make: jax.jit(lambda g, t, make=make: make(t).update(g, None)[0]) for make, _ in EXACT.values()
}


@pytest.mark.slow
@pytest.mark.parametrize(("clip", "exact"), EXACT.values(), ids=EXACT)
@hypothesis.given(grads=gradients, threshold=thresholds)
def test_clip_is_exact_and_small_gradients_are_unchanged(clip, exact, grads, threshold):
    """That clips are idempotent, keep the direction and commute with scaling follows from this."""
    leaves, found = list(grads.values()), _COMPILED[clip](grads, jnp.float32(threshold))
    clipped = [np.asarray(found[name]) for name in grads]  # JAX sorts the keys
    for found, wanted in zip(clipped, exact(leaves, threshold), strict=True):
        # A component below the smallest normal number may be taken for zero.
        np.testing.assert_allclose(found, wanted, rtol=8 * EPS, atol=1.2e-38)
    for found, wanted in zip(clipped, exact(clipped, threshold), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2 * EPS + 1e-6, atol=1.2e-38)  # invariant 3
    within = exact(leaves, threshold * (1 - 4 * EPS))
    if all(np.array_equal(x, oracles.wide(given)) for x, given in zip(within, leaves, strict=True)):
        assert all(x.tobytes() == given.tobytes() for x, given in zip(clipped, leaves, strict=True))


@pytest.mark.parametrize("bad", [math.nan, *slow(math.inf, 3e38)], ids=["nan", "inf", "overflow"])
@pytest.mark.parametrize("name", ["global", "leaf", "agc"])
def test_forward_derivatives_of_a_bad_step_are_zero_as_reverse_ones(name, bad):
    clips = {"leaf": gcx.clip_by_leaf_norm, "agc": gcx.adaptive_grad_clip}
    clip, ones = clips.get(name, gcx.clip_by_global_norm)(0.1), jnp.ones(3)

    def clipped(grads):
        return clip.update(grads, clip.init(ones), ones)[0]

    grads = jnp.array([bad, bad, 1.0])
    assert not jax.jvp(clipped, (grads,), (ones,))[1].any()
    assert not jax.grad(lambda g: clipped(g).sum())(grads).any()
