"""The formula of every clip by norm, leaf by leaf. It runs as it stands on every device.

    norm    = sqrt(sum of squares)
    factor  = min(1, threshold / norm)
    clipped = factor * x

Numbers are multiplied by one fixed power of two before they are squared, so that the squares of
gradients that explode stay in range: a float32 norm is right up to 1e25 and infinite beyond, and
elements below 1e-13 count as zero.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._devices import fusion_barrier
from .._mesh import in_memory_of, on_device
from .._types import Array

SCALE = 2.0**-20
"""By what numbers are multiplied before they are squared."""


def norm_dtype(leaves: Iterable[Any]) -> Any:
    """float32, or float64 when a leaf is float64 or complex128."""
    return jnp.float64 if any(jnp.finfo(x.dtype).bits == 64 for x in leaves) else jnp.float32


def wide_dtype(dtype: Any, other: Any = jnp.float32) -> Any:
    """The dtype of 32 bit or more that holds both; JAX promotes no float8, and strict, nothing."""
    bits = max(jnp.finfo(dtype).bits, jnp.finfo(other).bits)
    if any(jnp.issubdtype(kind, jnp.complexfloating) for kind in (dtype, other)):
        return jnp.complex128 if bits == 64 else jnp.complex64
    return jnp.float64 if bits == 64 else jnp.float32


def magnitude(x: Array, dtype: Any) -> Array:
    """|x|, in float32 or float64."""
    return jnp.abs(x.astype(wide_dtype(x.dtype, dtype))).astype(dtype)


def reduce_axes(reduce: Callable[..., Array], x: Array, axes: Sequence[int]) -> Array:
    """A reduction over some axes, which stay as 1; over all of them to a scalar."""
    return reduce(x, axis=tuple(axes), keepdims=len(axes) < x.ndim)


def squares(x: Array, dtype: Any, scale: float = SCALE) -> Array:
    """`(|x| * scale)^2`."""
    sizes = magnitude(x, dtype) if jnp.iscomplexobj(x) else x.astype(dtype)
    # So grouped, no compiler takes the square first: that of 1e20 is infinite.
    return sizes * (sizes * scale**2)


def sum_of_squares(x: Array, axes: Sequence[int], dtype: Any, scale: float = SCALE) -> Array:
    """`sum (|x| * scale)^2` over some axes."""
    return reduce_axes(jnp.sum, squares(x, dtype, scale), axes)


def norm_of_squares(total: Array, scale: float = SCALE) -> Array:
    """The norm, from the sum of the squares of scaled numbers."""
    return jnp.sqrt(total) / scale


def scale_factor(norm: Array, threshold: Array) -> Array:
    """`min(1, threshold / norm)`: 0 for a threshold below 0, NaN for a threshold of NaN."""
    is_above = norm > threshold
    # Double `where`: the slope of the quotient is infinite at a norm of zero.
    factor = jnp.where(is_above, threshold / jnp.where(is_above, norm, 1), 1)
    return _where_positive(threshold, factor)


def zero_factor(norm: Array, threshold: Array) -> Array:
    """1 up to the threshold, 0 above it or if it is below 0, NaN for a threshold of NaN."""
    return _where_positive(threshold, (norm <= threshold).astype(norm.dtype))


def _where_positive(threshold: Array, factor: Array) -> Array:
    return jnp.where(threshold > 0, factor, jnp.where(jnp.isnan(threshold), jnp.nan, 0))


def scale_leaf(x: Any, factor: Array, *, drops: bool = False) -> Array:
    """`factor * x`, multiplied in float32 or wider and rounded once.

    With `drops` a factor of zero gives zero also where x is not finite. What lies on the host is
    scaled on the device, or the host would compute, also what comes after.
    """
    place = jnp.asarray(x)
    x = on_device(place)
    wide = wide_dtype(x.dtype, factor.dtype)
    if wide != x.dtype:
        x = fusion_barrier(x)  # not the wide copy of it that the norm was taken of
    scaled = _product(x, factor)
    if drops:
        scaled = jnp.where(factor == 0, jnp.zeros_like(scaled), scaled)
    return in_memory_of(scaled, place)


@jax.custom_jvp
def _product(x: Array, factor: Array) -> Array:
    wide = wide_dtype(x.dtype, factor.dtype)
    return round_to(x.astype(wide) * factor.astype(wide), x.dtype)


@_product.defjvp
def _product_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    """Zero where the factor is NaN: a later step then has a derivative, and not 0 * NaN."""
    (x, factor), (dx, dfactor) = primals, tangents
    wide = wide_dtype(x.dtype, factor.dtype)
    is_bad = jnp.isnan(factor)
    safe, x_safe = jnp.where(is_bad, 0, factor), jnp.where(is_bad, jnp.zeros_like(x), x)
    slope = dx.astype(wide) * safe.astype(wide) + x_safe.astype(wide) * dfactor.astype(wide)
    return _product(x, factor), slope.astype(x.dtype)


def clamp_leaf(x: Any, low: Any, high: Any) -> Array:
    """X within [low, high], compared in float32 or wider; a NaN stays NaN."""
    place = jnp.asarray(x)
    x = on_device(place)
    wide = x.astype(wide_dtype(x.dtype))
    low, high = (jnp.asarray(bound).astype(wide.dtype) for bound in (low, high))
    clamped = round_to(jnp.clip(wide, low, high), x.dtype)
    return in_memory_of(jnp.where((wide < low) | (wide > high), clamped, x), place)


def round_to(x: Array, dtype: Any) -> Array:
    """X in a narrower dtype; toward zero among its subnormals.

    There rounding to nearest could nearly double a value, and a norm of many such values.
    """
    info = jnp.finfo(dtype)
    if float(info.tiny) <= float(jnp.finfo(x.dtype).tiny):
        return x.astype(dtype)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return lax.complex(*(round_to(part, info.dtype) for part in (x.real, x.imag)))
    spacing = float(info.tiny) * float(info.eps)
    coarse = lax.mul(jnp.trunc(x / spacing), jnp.asarray(spacing, x.dtype))
    return jnp.where(jnp.abs(x) < float(info.tiny), coarse, x).astype(dtype)
