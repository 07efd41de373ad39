"""From threshold to factor, and the scaled leaf: one, rounded once, never above the threshold."""

import math
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradclip_jax as gcx
import oracles
import trees

DTYPES = ("float32", "complex64", *trees.LOW)


def scale_from(x, norm, max_norm):
    """x scaled from its norm to `max_norm`."""
    return gcx.clip_grad_norm(x, max_norm, norm=norm)[0]


def factor_of(norm, threshold, reaction):
    clip = gcx.clip_by_norm(threshold, ord=1, reaction=reaction)  # of one number, the number itself
    return clip.update(norm, None)[1].clip_factor


# --- the factor ---------------------------------------------------------------------------

SCALE = [
    (2.0, 1.0, 0.5),
    (1.0, 1.0, 1.0),
    (0.0, 1.0, 1.0),
    (4e21, math.inf, 1.0),
    (3.0, 0.0, 0.0),
    (3.0, -1.0, 0.0),
    (0.0, -1.0, 0.0),  # zero stays zero either way
    (0.0, math.nan, math.nan),
]
ZERO = [(0.5, 1, 1), (1, 1, 1), (2, 1, 0), (2, -1, 0), (2, math.nan, math.nan)]


@pytest.mark.parametrize(
    ("reaction", "table", "above"), [("scale", SCALE, -0.25), ("zero", ZERO, 0)]
)
@pytest.mark.sampled
def test_factor_table_and_its_slope(reaction, table, above):
    norms, thresholds, factors = np.float32(table).T
    factor = jax.vmap(lambda *row: factor_of(*row, reaction))(norms, thresholds)
    np.testing.assert_allclose(factor, factors, rtol=1e-6)
    slope = jax.vmap(jax.grad(lambda norm: factor_of(norm, 1.0, reaction)))
    np.testing.assert_allclose(slope(jnp.float32([0, 0.5, 1, 2])), [0, 0, 0, above], rtol=1e-6)


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
    kept = scale_from(jnp.asarray(x), 1.0, 1.0)
    assert kept.dtype == x.dtype
    # A subnormal number of float32 may become zero.
    wide = oracles.wide(x)
    parts = np.abs([wide.real, wide.imag])
    same = ~np.isnan(wide) & ((parts >= 2.0**-126) | (parts == 0)).all(axis=0)
    bits = np.dtype(f"V{size}")
    np.testing.assert_array_equal(np.asarray(kept)[same].view(bits), x[same].view(bits))


@pytest.mark.parametrize("dtype", DTYPES)
def test_scaled_norm_is_at_most_the_threshold_in_every_dtype(dtype):
    """Invariant 3, up to the rounding of subnormal numbers."""
    largest = float(jnp.finfo(dtype).max)
    bound = 1 + 2 * oracles.eps(dtype)
    step = float(jnp.finfo(dtype).tiny) * oracles.eps(dtype)
    subnormal = 0 if dtype in ("float32", "complex64") else step * 2_000**0.5
    scale = jax.jit(scale_from)
    for spread in (1.0, 1e-3):
        base = np.random.default_rng(0).standard_normal(2_000) * spread
        x = np.clip(base, -largest, largest).astype(np.dtype(dtype))
        norm = oracles.vector_norm(x)
        for ratio in (0.9999, 0.5, 1 / 3, 1e-2, 1e-4, 1e-6, 1e-9):
            scaled = np.array(scale(jnp.asarray(x), jnp.float32(norm), jnp.float32(norm * ratio)))
            assert scaled.dtype == x.dtype
            if dtype.endswith("fnuz") and not os.environ.get("FULL_COMPILE"):
                # Without its fusion emitters, XLA rounds negative numbers to NaN instead of 0.
                scaled[np.abs(oracles.wide(x)) * ratio < float(jnp.finfo(dtype).tiny)] = 0
            assert oracles.vector_norm(scaled) <= norm * ratio * bound + subnormal, (spread, ratio)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_scaling_rounds_once(dtype):
    x = trees.normal((4_000,), dtype)
    factor = np.float32(0.25)
    scaled = np.asarray(scale_from(x, 1.0, factor))
    exact = oracles.wide(x) * np.float64(factor)
    once = (np.asarray(x).astype(np.float32) * factor).astype(np.dtype(dtype))
    normal = np.abs(exact) >= float(jnp.finfo(dtype).tiny)
    np.testing.assert_array_equal(oracles.wide(scaled)[normal], oracles.wide(once)[normal])
    step = float(jnp.finfo(dtype).tiny) * oracles.eps(dtype)  # of subnormal numbers
    below = oracles.wide(scaled)[~normal]
    assert (np.abs(below - exact[~normal]) <= step / 2).all()


def test_poisoned_leaf_is_nan_even_where_it_is_zero():
    for dtype in ("float32", "complex64", "float8_e4m3fn"):
        poisoned = scale_from(jnp.zeros((3,), dtype), math.nan, 1.0)
        assert np.isnan(oracles.wide(poisoned)).all()


# --- the clamped leaf -----------------------------------------------------------------------


def test_clamp_of_every_leaf_is_right():
    grads = {name: trees.build(name) for name in ("masked", "float8", "extreme", "scalars")}
    clamped = jax.jit(gcx.clip_grad_value)(grads, 0.5)
    assert jax.tree.structure(clamped) == jax.tree.structure(grads)
    for got, x in zip(trees.leaves(clamped), trees.leaves(grads), strict=True):
        assert got.dtype == x.dtype
        np.testing.assert_array_equal(oracles.wide(got), np.clip(oracles.wide(x), -0.5, 0.5))


def test_clamp_keeps_nan_and_zero_bounds_infinity_and_never_flips_a_sign():
    x = jnp.float32([math.nan, math.inf, -math.inf, -2.0, 0.25, -0.0])
    clamped = np.asarray(jax.jit(gcx.clip_grad_value)(x, 1.0))
    np.testing.assert_array_equal(clamped, [math.nan, 1.0, -1.0, -1.0, 0.25, 0.0])
    assert np.signbit(clamped[-1])


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
def test_bounds_of_a_value_need_not_be_symmetric_positive_or_numbers_of_the_dtype(dtype):
    x = jnp.asarray([-3.0, 0.25, 0.5, 3.0], dtype)
    clamp = jax.jit(lambda low, high: gcx.clip_by_value(high, min_value=low).update(x, ())[0])
    # 0.3 lies between two numbers of float8.
    for low, high in ((-2.0, 1.0), (0.0, 1.0), (0.25, 1.0), (-math.inf, 1.0), (-0.3, 0.3)):
        exact = np.clip(oracles.wide(x), low, high)
        found = oracles.wide(clamp(low, high))
        np.testing.assert_allclose(found, exact, rtol=2 * oracles.eps(dtype))


def test_traced_bounds_of_a_value_that_are_both_negative_give_zeros_or_values_within_them():
    grads = jnp.float32([-3.0, 0.0, 3.0])
    clamp = jax.jit(lambda high, low: gcx.clip_by_value(high, min_value=low).update(grads, ())[0])
    found = clamp(-1.0, -2.0)
    assert not np.any(found) or np.all((found >= -2) & (found <= -1))
