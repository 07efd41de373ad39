"""One clipping step: `clip_grad_norm`, `clip_grad_value`, and what the state has to tell."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import compat
import gradclip_jax as gcx
import hlo
import oracles
import trees

clip_jitted = jax.jit(gcx.clip_grad_norm, static_argnames=("ord", "axis_name"))


def bits(x) -> bytes:
    return np.asarray(x).tobytes()


def big():
    return {"a": jnp.ones((500, 300)), "b": jnp.ones((200_000,))}


SIZE = 149_900  # of the smaller leaf of `big`, whose last few older JAX adds up apart


# --- clip_grad_norm -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["array", "dense", "mixed_dtypes", "masked", "stacked", "float0", "numpy"]
)
def test_clip_grad_norm_is_right(name):
    grads = trees.build(name)
    clipped, norm = gcx.clip_grad_norm(grads, 0.5)
    leaves = trees.leaves(grads)
    assert oracles.ulps(norm, oracles.global_norm(leaves)) <= 8
    assert jax.tree.structure(clipped) == jax.tree.structure(grads)
    for got, exact in zip(
        trees.leaves(clipped), oracles.clip_by_global_norm(leaves, 0.5), strict=True
    ):
        eps = oracles.eps(got.dtype)
        step = float(jnp.finfo(got.dtype).tiny) * eps
        np.testing.assert_allclose(oracles.wide(got), exact, rtol=max(eps, 1e-6), atol=step)


@pytest.mark.parametrize("ord", [0.5, 1.0, 3.0, math.inf])
def test_clip_grad_norm_of_any_order(ord):
    grads = trees.build("dense")
    clipped, norm = gcx.clip_grad_norm(grads, 0.5, ord=ord)
    assert float(norm) == pytest.approx(oracles.global_norm(trees.leaves(grads), ord), rel=1e-6)
    assert oracles.global_norm(trees.leaves(clipped), ord) <= 0.5 * (1 + 1e-6)


def test_gradients_within_bounds_come_back_as_they_are():
    grads = trees.build("mixed_dtypes")
    clipped, norm = clip_jitted(grads, 1e3)
    for got, wanted in zip(jax.tree.leaves(clipped), jax.tree.leaves(grads), strict=True):
        assert bits(got) == bits(wanted)
    # The threshold itself is within bounds.
    at_bound, _ = clip_jitted(grads, norm)
    assert all(
        bits(a) == bits(b) for a, b in zip(*map(jax.tree.leaves, (at_bound, grads)), strict=True)
    )


@pytest.mark.parametrize("max_norm", [0.0, -1.0, -math.inf])
def test_traced_threshold_of_zero_or_below_gives_zeros(max_norm):
    clipped, norm = clip_jitted(jnp.float32([3.0, -4.0]), jnp.float32(max_norm))
    np.testing.assert_array_equal(clipped, [0.0, 0.0])
    assert norm == 5.0


def test_known_norm_is_used_and_not_computed_again():
    grads = {"a": jnp.float32([3.0]), "b": jnp.float32([4.0])}
    clipped, norm = gcx.clip_grad_norm(grads, 1.0, norm=10.0)
    assert norm == 10.0 and norm.dtype == jnp.float32
    np.testing.assert_allclose(clipped["b"], [0.4], rtol=1e-6)
    text = hlo.compiled(lambda g, n: gcx.clip_grad_norm(g, 1.0, norm=n), big(), 10.0)
    for operation in ("reduce", "reduce-window", "dot"):
        assert hlo.count(text, operation, branches=True) == 0
    # That of the factor on CPU, none of a norm that is taken again.
    assert hlo.count(text, "conditional", branches=True) <= 1


def test_a_second_eager_call_compiles_nothing(caplog):
    grads = {"a": jnp.ones((3, 5)), "b": jnp.ones(7, jnp.bfloat16)}
    transformation = gcx.clip_by_group_norm({"a": 1.0, "b": 1.0}, {"a": "a", "b": "b"})
    state = transformation.init(grads)
    for call in (
        lambda: gcx.clip_grad_norm(grads, 1.0),
        lambda: transformation.update(grads, state),
    ):
        call()
        with jax.log_compiles(), caplog.at_level("DEBUG", logger="jax"):
            caplog.clear()
            call()
            compiled = [r.getMessage() for r in caplog.records if "XLA compil" in r.getMessage()]
        assert not compiled


def test_norm_and_clip_read_the_gradients_twice_at_most():
    text = hlo.compiled(lambda g: gcx.clip_grad_norm(g, 1.0), big())
    assert hlo.reductions_of(text, SIZE) == 2  # one for each leaf


def test_adagc_takes_the_norm_of_the_whole_from_those_of_the_leaves():
    clip = gcx.adagc()
    text = hlo.compiled(clip.update, big(), clip.init(big()))
    assert hlo.reductions_of(text, SIZE) == 2  # one for each leaf


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_threshold_of_any_dtype(dtype):
    grads = {"a": jnp.float32([3.0, 4.0]), "b": jnp.bfloat16([12.0])}
    with compat.strict():
        for make in (lambda x: x, float, np.asarray, lambda x: np.asarray(x)[()]):
            for norm in (None, jnp.asarray(13.0, dtype)):
                clipped, _ = gcx.clip_grad_norm(grads, make(jnp.asarray(6.5, dtype)), norm=norm)
                np.testing.assert_allclose(clipped["a"], [1.5, 2.0], rtol=1e-6)
                assert clipped["a"].dtype == jnp.float32 and clipped["b"].dtype == jnp.bfloat16
        clipped, _ = clip_jitted(grads, jnp.asarray(6.5, dtype))
        np.testing.assert_allclose(clipped["a"], [1.5, 2.0], rtol=1e-6)


@pytest.mark.slow
def test_64_bit_trees_are_clipped_in_64_bits():
    grads = {"a": np.float64([3.0, 4.0]), "b": np.complex128([12.0j])}
    with compat.x64(), compat.strict():
        for max_norm in (0.1, jnp.float32(0.1), np.float64(0.1)):
            clipped, norm = gcx.clip_grad_norm(jax.tree.map(jnp.asarray, grads), max_norm)
            assert norm.dtype == jnp.float64 and norm == 13.0
            exact = oracles.clip_by_global_norm(list(grads.values()), float(max_norm))
            for got, wanted in zip(clipped.values(), exact, strict=True):
                np.testing.assert_allclose(got, wanted, rtol=1e-15)
        # A float32 tree stays one, whatever the threshold; a mixed one keeps each dtype.
        clipped, norm = gcx.clip_grad_norm(jnp.float32([3.0, 4.0]), np.float64(1.0))
        assert clipped.dtype == norm.dtype == jnp.float32
        mixed = {name: trees.normal((4,), name) for name in ("float64", *trees.REAL, "complex64")}
        clipped, norm = gcx.clip_grad_norm(mixed, 0.5)
        assert {name: str(x.dtype) for name, x in clipped.items()} == {name: name for name in mixed}
        assert oracles.global_norm(trees.leaves(clipped)) <= 0.5 * 1.25


# --- clip_grad_value ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["dense", "masked", "stacked", "zero_size", "float0", "extreme", "scalars"]
)
def test_clip_grad_value_is_right(name):
    grads = trees.build(name)
    clipped = gcx.clip_grad_value(grads, 0.5)
    assert jax.tree.structure(clipped) == jax.tree.structure(grads)
    for got, x in zip(trees.leaves(clipped), trees.leaves(grads), strict=True):
        assert got.dtype == x.dtype
        exact = np.clip(oracles.wide(x), -0.5, 0.5).astype(got.dtype)
        np.testing.assert_array_equal(got, exact)


@pytest.mark.parametrize(
    "function", [gcx.clip_grad_value, lambda g, v: gcx.clip(v).update(g, None)[0]]
)
def test_clip_value_edges(function):
    x = jnp.float32([math.nan, math.inf, -math.inf, -2.0, 0.25])
    jitted = jax.jit(function)
    np.testing.assert_array_equal(jitted(x, 1.0), [math.nan, 1.0, -1.0, -1.0, 0.25])
    np.testing.assert_array_equal(jitted(x[1:], math.inf), x[1:])
    for threshold in (0.0, -1.0):
        np.testing.assert_array_equal(jitted(x[1:], threshold), np.zeros(4))


# --- the state ------------------------------------------------------------------------------


def test_state_tells_of_the_last_step():
    clip = gcx.clip_by_global_norm(2.0)
    first = clip.init(jnp.zeros(2))
    State = type(first)
    expected = State(0.0, float(np.finfo(np.float32).max), 1.0, 0.0, first.rules)
    assert jax.tree.map(float, first) == jax.tree.map(float, expected)
    _, state = clip.update(jnp.float32([3.0, 4.0]), first)
    told = State(5.0, 2.0, np.float32(0.4), 1.0, first.rules)
    chex.assert_trees_all_close(state, told, rtol=1e-6)
    _, state = clip.update(jnp.float32([0.3, 0.4]), state)
    assert float(state.clip_factor) == 1.0 and float(state.clip_fraction) == 0.0
    assert float(state.clip_threshold) == 2.0
    assert all(x.dtype == jnp.float32 and x.shape == () for x in jax.tree.leaves(state))


@pytest.mark.slow
def test_state_of_64_bit_gradients_is_in_32_bits():
    with compat.x64():
        clip = gcx.clip_by_global_norm(2.0)
        _, state = clip.update(jnp.asarray(np.float64([3.0, 4.0])), clip.init(jnp.zeros(2)))
        assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(state))


@pytest.mark.parametrize(
    "make",
    [
        lambda: gcx.clip_by_global_norm(1.0),
        lambda: gcx.clip_by_leaf_norm(1.0),
        lambda: gcx.clip_by_group_norm({"x": 1.0, "y": 1.0}, {"a": "x", "b": "y"}),
        lambda: gcx.clip_by_block_rms(1.0),
    ],
    ids=["global", "leaf", "group", "block rms"],
)
def test_reading_the_norm_from_the_state_costs_no_second_reduction(make):
    clip = make()
    state = clip.init(big())
    silent = hlo.compiled(lambda g, s: clip.update(g, s)[0], big(), state)
    told = hlo.compiled(
        lambda g, s: (clip.update(g, s)[0], gcx.metrics(clip.update(g, s)[1])), big(), state
    )
    assert hlo.reductions_of(told, SIZE) == hlo.reductions_of(silent, SIZE) == 2


# --- errors ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_known_norm_may_be_what_global_norm_returned(bad):
    """Whatever `global_norm` gives can be handed on, also outside jit."""
    grads = jnp.float32([1.0, bad])
    clipped, norm = gcx.clip_grad_norm(grads, 1.0, norm=gcx.global_norm(grads))
    assert np.isnan(clipped).all()
    np.testing.assert_equal(float(norm), bad)


def test_bounds_of_a_value_need_not_be_symmetric_or_positive():
    x = jnp.float32([-3.0, 0.5, 3.0])
    for low, high in ((-2.0, 1.0), (0.0, 1.0), (0.25, 1.0), (-math.inf, 1.0)):
        clipped, _ = gcx.clip_by_value(high, min_value=low).update(x, optax.EmptyState())
        np.testing.assert_array_equal(clipped, oracles.clip([x], low, high)[0])


def test_a_clip_by_value_built_inside_jit_works_outside():
    built = []

    def build(x):
        built.append(gcx.clip(0.5))
        return x

    jax.jit(build)(1.0)
    assert built[0].update(jnp.ones(1), built[0].init(None))[0].tolist() == [0.5]
