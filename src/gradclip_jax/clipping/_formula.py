"""Computation of clipping factors from norms, and scaling of leaves.

factor  = min(1, threshold / norm)
clipped = factor * x
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from .._devices import fusion_barrier
from .._types import Array, Number, Tree
from ..norms._leaves import wide_dtype


@jax.jit
def scale_factor(norm: Array, threshold: Array) -> Array:
    """Return `min(1, threshold / norm)`; 0 for a threshold <= 0, and NaN for a NaN threshold."""
    # `lax.select` is 0.3 s faster than `jnp.where` to trace and lower for 300 leaves. It requires
    # equal shardings, so the zeros have the sharding of the norm.
    threshold = jnp.maximum(threshold, jnp.zeros_like(norm))
    is_above = norm > threshold
    # Without the inner selection, the derivative at a norm of zero would be NaN.
    # Divide last, because XLA:CPU recomputes cheaper operations in every kernel that reads them.
    numerator = lax.select(is_above, threshold, jnp.sign(threshold))
    return numerator / lax.select(is_above, norm, jnp.ones_like(norm))


def factor_of(
    reaction: str | Callable[[Array, Array], Array], norm: Array, threshold: Array
) -> Array:
    """Return the factor of a reaction: 1 without a threshold, and 0 for a threshold <= 0.

    A user-defined reaction receives only finite norms, and positive, finite thresholds.
    """
    if reaction == "scale":
        return scale_factor(norm, threshold)
    is_limit = (threshold > 0) & (threshold < jnp.finfo(threshold.dtype).max)
    norm, limit = jnp.where(jnp.isfinite(norm), norm, 1), jnp.where(is_limit, threshold, 1)
    factor = norm <= limit if isinstance(reaction, str) else reaction(norm, limit)
    factor = jnp.asarray(factor).astype(norm.dtype)
    return jnp.where(is_limit, factor, jnp.sign(jnp.maximum(threshold, 0)))


@jax.jit
def scale_leaf(x: Array, factor: Array) -> Array:
    """Return `factor * x`, computed in at least float32 and rounded once to the dtype of `x`."""
    if wide_dtype(x.dtype, factor.dtype) != x.dtype:
        # Without the barrier, XLA keeps the float32 copy that was made to compute the norm.
        x = fusion_barrier(x)
    return _product(x, factor)


@jax.custom_jvp
def _product(x: Array, factor: Array) -> Array:
    wide = wide_dtype(x.dtype, factor.dtype)
    product = x.astype(wide) * factor.astype(wide)
    return product if wide == x.dtype else round_to(product, x.dtype)


@_product.defjvp
def _product_jvp(primals: Tree, tangents: Tree) -> tuple[Array, Array]:
    """Set the derivative to zero where the factor is NaN, so that later steps remain finite."""
    (x, factor), (dx, dfactor) = primals, tangents
    wide = wide_dtype(x.dtype, factor.dtype)
    is_nan = jnp.isnan(factor)
    safe_factor, safe_x = jnp.where(is_nan, 0, factor), jnp.where(is_nan, jnp.zeros_like(x), x)
    slope = dx.astype(wide) * safe_factor.astype(wide)
    slope += safe_x.astype(wide) * dfactor.astype(wide)
    return _product(x, factor), slope.astype(x.dtype)


def clamp_leaf(x: Array, high: Number, low: Number | None) -> Array:
    """Clamp to [low, high] or [-high, high] in at least float32; NaN remains NaN."""
    wide = x.astype(wide_dtype(x.dtype))
    high = jnp.maximum(jnp.asarray(high, wide.dtype), 0)
    low = -high if low is None else jnp.asarray(low, wide.dtype)
    clamped = round_to(jnp.clip(wide, low, high), x.dtype)
    return jnp.where((wide < low) | (wide > high), clamped, x)


def round_to(x: Array, dtype: DTypeLike) -> Array:
    """Round to a narrower dtype, with rounding toward zero for subnormal results.

    Rounding subnormal numbers to nearest could nearly double the norm of the clipped leaf.
    """
    info = jnp.finfo(dtype)
    if info.tiny <= jnp.finfo(x.dtype).tiny or jnp.iscomplexobj(x):
        return x.astype(dtype)
    spacing = float(info.tiny) * float(info.eps)
    coarse = lax.mul(jnp.trunc(x / spacing), jnp.asarray(spacing, x.dtype))
    return jnp.where(jnp.abs(x) < float(info.tiny), coarse, x).astype(dtype)
