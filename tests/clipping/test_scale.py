"""From threshold to factor, and the scaled leaf: one, rounded once, never above the threshold."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import compat
import oracles
import trees
from gradclip_jax.clipping._scale import (
    Factor,
    clamp_leaf,
    clip_factor,
    drop_factor,
    replace_factor,
    scale_leaf,
    scaled_to,
)

TINY = float(np.finfo(np.float32).tiny)
DTYPES = ("float32", "complex64", *trees.LOW)


def factor_of(norm, threshold) -> float:
    return float(clip_factor(jnp.float32(norm), jnp.float32(threshold)).value)


def to_norm(x, max_norm):
    """x scaled from its exact norm to `max_norm`."""
    norm = jnp.float32(oracles.vector_norm(x))
    return scale_leaf(x, clip_factor(norm, jnp.float32(max_norm)))


# --- the factor -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("norm", "threshold", "factor"),
    [
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
        (math.nan, 1.0, math.nan),
        (math.inf, 1.0, math.nan),
        (math.inf, math.inf, math.nan),
        (math.nan, math.inf, math.nan),
    ],
)
def test_factor_table(norm, threshold, factor):
    np.testing.assert_equal(factor_of(norm, threshold), factor)


def test_factor_below_the_smallest_number_does_not_underflow():
    factor = clip_factor(jnp.float32(2e38), jnp.float32(1e-6))  # 5e-45
    exact = float(factor.coarse) * float(factor.fine)
    assert exact == pytest.approx(1e-6 / 2e38, rel=1e-6)
    scaled = scale_leaf(jnp.float32([2e38]), factor)
    assert float(scaled[0]) == pytest.approx(1e-6, rel=1e-6)


def test_factor_works_elementwise():
    factor = clip_factor(jnp.float32([0.5, 2.0, math.nan]), jnp.float32([1.0, 1.0, 1.0]))
    np.testing.assert_array_equal(factor.value, [1.0, 0.5, math.nan])
    np.testing.assert_array_equal(factor.keep, [True, False, False])


@pytest.mark.parametrize(
    ("norm", "threshold", "factor"),
    [
        (0.5, 1, 1),
        (1, 1, 1),
        (2, 1, 0),
        (2, -1, 0),
        (math.nan, 1, math.nan),
        (2, math.nan, math.nan),
    ],
)
def test_drop_factor_table(norm, threshold, factor):
    value = drop_factor(jnp.float32(norm), jnp.float32(threshold)).value
    np.testing.assert_equal(float(value), float(factor))


@pytest.mark.parametrize(
    ("norm", "wanted", "factor"), [(2, 1, 0.5), (1, 3, 3), (0, 1, 1), (math.inf, 1, math.nan)]
)
def test_scaled_to_table(norm, wanted, factor):
    value = scaled_to(jnp.float32(norm), jnp.float32(wanted)).value
    np.testing.assert_equal(float(value), float(factor))


@pytest.mark.parametrize("value", [0.0, math.nan])
def test_replaced_factor_keeps_nothing(value):
    factor = clip_factor(jnp.float32(0.5), jnp.float32(1.0))
    replaced = replace_factor(factor, jnp.array(True), value)
    np.testing.assert_equal(float(replaced.value), value)
    assert not replaced.keep
    assert replace_factor(factor, jnp.array(False), value) == factor


# --- the scaled leaf ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_kept_leaf_is_unchanged_bit_for_bit(dtype):
    # All bit patterns of a one-byte type, many of the others; a tree with a NaN is never kept.
    size = np.dtype(dtype).itemsize
    rng = np.random.default_rng(0)
    raw = np.arange(256, dtype="uint8") if size == 1 else rng.bytes(4_096 * size)
    x = np.frombuffer(bytes(raw), dtype=np.dtype(dtype))
    isnan = np.isnan(oracles.wide(x))
    kept = scale_leaf(jnp.asarray(x), clip_factor(jnp.float32(0.5), jnp.float32(1.0)))
    assert kept.dtype == x.dtype
    bits = np.dtype(f"V{size}")
    np.testing.assert_array_equal(np.asarray(kept)[~isnan].view(bits), x[~isnan].view(bits))


@pytest.mark.parametrize("dtype", DTYPES)
def test_scaled_norm_is_at_most_the_threshold_in_every_dtype(dtype):
    """Invariant 3, down to where all results are subnormal."""
    largest = float(jnp.finfo(dtype).max)
    bound = 1 + 2 * oracles.eps(dtype)
    scale = jax.jit(to_norm_traced)
    for spread in (1.0, 1e-3):
        base = np.random.default_rng(0).standard_normal(2_000) * spread
        x = np.clip(base, -largest, largest).astype(np.dtype(dtype))
        norm = oracles.vector_norm(x)
        for ratio in (0.9999, 0.5, 1 / 3, 1e-2, 1e-4, 1e-6, 1e-9):
            scaled = np.asarray(scale(jnp.asarray(x), jnp.float32(norm), jnp.float32(norm * ratio)))
            assert scaled.dtype == x.dtype
            assert oracles.vector_norm(scaled) <= norm * ratio * bound, (spread, ratio)


def to_norm_traced(x, norm, max_norm):
    return scale_leaf(x, clip_factor(norm, max_norm))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scaled_norm_is_at_most_a_threshold_near_the_smallest_number(dtype):
    # 0.6 of the smallest subnormal number would be rounded up to a whole one.
    smallest = 2.0**-149 if dtype == "float32" else 2.0**-133
    x = jnp.ones((1_000,), dtype)
    max_norm = np.float32(0.6 * smallest * math.sqrt(1_000))
    scaled = to_norm(x, max_norm)
    assert oracles.vector_norm(scaled) <= max_norm * (1 + 2 * oracles.eps(dtype))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_scaling_rounds_once(dtype):
    x = trees.normal((4_000,), dtype)
    factor = np.float32(0.3)
    scaled = np.asarray(
        scale_leaf(x, Factor(jnp.array(False), jnp.float32(1), jnp.asarray(factor)))
    )
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
    x = jnp.float32([math.inf, -math.inf, math.nan, 1.0])
    zero = Factor(jnp.array(False), jnp.float32(1), jnp.float32(0))
    np.testing.assert_array_equal(scale_leaf(x, zero, drops=True), np.zeros(4))


def test_poisoned_leaf_is_nan_even_where_it_is_zero():
    poison = Factor(jnp.array(False), jnp.float32(1), jnp.float32(math.nan))
    for dtype in ("float32", "float16", "complex64", "float8_e4m3fn"):
        assert np.isnan(oracles.wide(scale_leaf(jnp.zeros((3,), dtype), poison))).all()


def test_float64_leaf_is_scaled_in_float64():
    with compat.x64():
        x = np.random.default_rng(0).standard_normal(100)
        norm = jnp.asarray(oracles.vector_norm(x))
        scaled = scale_leaf(jnp.asarray(x), clip_factor(norm, jnp.asarray(1e-3)))
        assert scaled.dtype == jnp.float64
        assert oracles.vector_norm(scaled) == pytest.approx(1e-3, rel=1e-14)


def test_slope_through_the_scaled_leaf_is_finite_at_zero():
    def scaled(x):
        return jnp.sum(scale_leaf(x, clip_factor(jnp.sqrt(jnp.sum(x * x) + 0.0), jnp.float32(1))))

    assert np.isfinite(jax.jvp(scaled, (jnp.float32([1.0, 2.0]),), (jnp.ones(2),))[1])
    slope = jax.grad(lambda n: clip_factor(n, jnp.float32(1)).value)(jnp.float32(0.0))
    assert slope == 0


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
            scale_leaf(x, clip_factor(jnp.float32(2), jnp.float32(1)))
            scale_leaf(x, clip_factor(jnp.ones((2, 1)), jnp.ones((2, 1))))
        for bound in (1.0, np.float64(1.0), jnp.bfloat16(1.0)):
            clamp_leaf(trees.normal((2, 3), "float16"), -bound, bound)
