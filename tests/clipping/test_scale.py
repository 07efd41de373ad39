"""From threshold to factor, and the scaled leaf: one, rounded once, never above the threshold."""

import math
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import compat
import oracles
import trees
from gradclip_jax.clipping._scale import as_root, clamp_leaf, root_to, scale_leaf, scale_root

DTYPES = ("float32", "complex64", *trees.LOW)


def to_norm(x, norm, max_norm):
    """x scaled from its norm to `max_norm`."""
    return scale_leaf(x, scale_root(jnp.float32(norm), jnp.float32(max_norm)))


# --- the factor, held as its root -----------------------------------------------------------

SCALE = [
    (2.0, 1.0, 0.5),
    (1.0, 1.0, 1.0),
    (0.5, 1.0, 1.0),
    (0.0, 1.0, 1.0),
    (1e38, math.inf, 1.0),
    (3.0, 0.0, 0.0),
    (3.0, -1.0, 0.0),
    (0.0, 0.0, 1.0),  # zero is within any bound; it stays zero either way
    (0.0, -1.0, 1.0),
    (3.0, math.nan, math.nan),
]
ZERO = [(0.5, 1, 1), (1, 1, 1), (2, 1, 0), (2, -1, 0), (2, math.nan, math.nan)]
TO = [(2, 1, 0.5), (1, 3, 3), (0, 1, 1), (math.inf, 1, math.nan)]


@pytest.mark.parametrize(
    ("root", "table"),
    [(scale_root, SCALE), (as_root("test", "zero"), ZERO), (root_to, TO)],
    ids=["scale", "zero", "to a norm"],
)
def test_factor_table(root, table):
    norms, thresholds, factors = np.float32(table).T
    np.testing.assert_allclose(jax.jit(root)(norms, thresholds) ** 2, factors, rtol=1e-6)


def test_reaction_of_a_user_is_a_factor():
    root = as_root("test", lambda norm, threshold: jnp.where(norm > threshold, 0.25, 1.0))
    np.testing.assert_array_equal(root(np.float32([2.0, 0.5]), np.float32([1.0, 1.0])), [0.5, 1.0])


def test_factor_below_the_smallest_number_does_not_underflow():
    scaled = to_norm(jnp.float32([2e38]), 2e38, 1e-6)  # a factor of 5e-45
    assert float(scaled[0]) == pytest.approx(1e-6, rel=1e-6)


@pytest.mark.parametrize("norm", [0.0, 0.5, 1.0, 2.0])
def test_slope_of_the_factor_is_finite(norm):
    for root in (scale_root, as_root("test", "zero")):
        slope = jax.grad(lambda n, root=root: root(n, jnp.float32(1)) ** 2)(jnp.float32(norm))
        assert float(slope) == pytest.approx(-0.25 if norm == 2 and root is scale_root else 0)


# --- the scaled leaf ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_kept_leaf_is_unchanged_bit_for_bit(dtype):
    if dtype == "float8_e5m2fnuz" and not os.environ.get("FULL_COMPILE"):
        pytest.skip("without its fusion emitters XLA rounds subnormal numbers of this type")
    # All bit patterns of a one-byte type, many of the others; a tree with a NaN is never kept.
    size = np.dtype(dtype).itemsize
    rng = np.random.default_rng(0)
    raw = np.arange(256, dtype="uint8") if size == 1 else rng.bytes(4_096 * size)
    x = np.frombuffer(bytes(raw), dtype=np.dtype(dtype))
    isnan = np.isnan(oracles.wide(x))
    kept = scale_leaf(jnp.asarray(x), jnp.float32(1))
    assert kept.dtype == x.dtype
    bits = np.dtype(f"V{size}")
    np.testing.assert_array_equal(np.asarray(kept)[~isnan].view(bits), x[~isnan].view(bits))


@pytest.mark.parametrize("dtype", DTYPES)
def test_scaled_norm_is_at_most_the_threshold_in_every_dtype(dtype):
    """Invariant 3, down to where all results are subnormal."""
    largest = float(jnp.finfo(dtype).max)
    bound = 1 + 2 * oracles.eps(dtype)
    scale = jax.jit(to_norm)
    for spread in (1.0, 1e-3):
        base = np.random.default_rng(0).standard_normal(2_000) * spread
        x = np.clip(base, -largest, largest).astype(np.dtype(dtype))
        norm = oracles.vector_norm(x)
        for ratio in (0.9999, 0.5, 1 / 3, 1e-2, 1e-4, 1e-6, 1e-9):
            scaled = np.asarray(scale(jnp.asarray(x), jnp.float32(norm), jnp.float32(norm * ratio)))
            assert scaled.dtype == x.dtype
            assert oracles.vector_norm(scaled) <= norm * ratio * bound, (spread, ratio)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scaled_norm_is_at_most_a_threshold_near_the_smallest_number(dtype):
    # 0.6 of the smallest subnormal number would be rounded up to a whole one.
    smallest = 2.0**-149 if dtype == "float32" else 2.0**-133
    x = jnp.ones((1_000,), dtype)
    max_norm = np.float32(0.6 * smallest * math.sqrt(1_000))
    scaled = to_norm(x, math.sqrt(1_000), max_norm)
    assert oracles.vector_norm(scaled) <= max_norm * (1 + 2 * oracles.eps(dtype))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_scaling_rounds_once(dtype):
    x = trees.normal((4_000,), dtype)
    factor = np.float32(0.25)
    scaled = np.asarray(scale_leaf(x, jnp.float32(0.5)))
    exact = oracles.wide(x) * np.float64(factor)
    once = (np.asarray(x).astype(np.float32) * factor).astype(np.dtype(dtype))
    normal = np.abs(exact) >= float(jnp.finfo(dtype).tiny)
    np.testing.assert_array_equal(oracles.wide(scaled)[normal], oracles.wide(once)[normal])
    # Among subnormal numbers toward zero, and there by less than one step.
    step = float(jnp.finfo(dtype).tiny) * oracles.eps(dtype)
    below = oracles.wide(scaled)[~normal]
    assert (np.abs(below) <= np.abs(exact[~normal])).all()
    assert (np.abs(below - exact[~normal]) < step).all()


def test_dropped_leaf_is_zero_even_where_it_is_not_finite():
    x = np.float32([math.inf, -math.inf, math.nan, 1.0])
    np.testing.assert_array_equal(scale_leaf(x, jnp.float32(0)), np.zeros(4))


def test_poisoned_leaf_is_nan_even_where_it_is_zero():
    for dtype in ("float32", "float16", "complex64", "float8_e4m3fn"):
        assert np.isnan(
            oracles.wide(scale_leaf(jnp.zeros((3,), dtype), jnp.float32(math.nan)))
        ).all()


def test_float64_leaf_is_scaled_in_float64():
    with compat.x64():
        x = np.random.default_rng(0).standard_normal(100)
        norm = jnp.asarray(oracles.vector_norm(x))
        scaled = scale_leaf(jnp.asarray(x), scale_root(norm, jnp.asarray(1e-3)))
        assert scaled.dtype == jnp.float64
        assert oracles.vector_norm(scaled) == pytest.approx(1e-3, rel=1e-14)


# --- the clamped leaf -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", *trees.LOW])
def test_clamp_is_right_and_leaves_the_rest_alone(dtype):
    x = trees.normal((500,), dtype, scale=3.0)
    clamped = np.asarray(clamp_leaf(x, -1.0, 0.5))
    assert clamped.dtype == x.dtype
    np.testing.assert_array_equal(oracles.wide(clamped), np.clip(oracles.wide(x), -1.0, 0.5))


def test_clamp_bound_that_the_dtype_lacks():
    # 0.3 lies between two numbers of float8; the nearest is within invariant 3.
    clamped = np.asarray(clamp_leaf(jnp.asarray([1.0, -1.0, 0.25], "float8_e4m3fn"), -0.3, 0.3))
    assert np.abs(oracles.wide(clamped)).max() <= 0.3 * (1 + 2 * 0.125)
    assert oracles.wide(clamped)[2] == 0.25


def test_clamp_keeps_nan_bounds_infinity_and_signed_zero():
    x = jnp.float32([math.nan, math.inf, -math.inf, -0.0])
    clamped = np.asarray(clamp_leaf(x, -1.0, 2.0))
    np.testing.assert_array_equal(clamped, [math.nan, 2.0, -1.0, 0.0])
    assert np.signbit(clamped[3])


def test_clamp_passes_float0_through():
    x = np.zeros((2,), jax.dtypes.float0)
    assert clamp_leaf(x, -1.0, 1.0) is x


def test_strict_promotion_of_dtypes_and_ranks():
    with compat.strict():
        for dtype in DTYPES:
            x = trees.normal((2, 3), dtype)
            for shape in ((), (2, 1)):
                jax.eval_shape(scale_leaf, x, jnp.ones(shape))
        for bound in (1.0, np.float64(1.0), jnp.bfloat16(1.0)):
            clamp_leaf(trees.normal((2, 3), "float16"), -bound, bound)
