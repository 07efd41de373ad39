"""From threshold to factor, and from factor to the scaled tree."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from .._checks import is_float0
from .._types import Array

# Splits a factor below the smallest normal float32 into two that are not.
_COARSE = 2.0**-96


class Factor(NamedTuple):
    """A factor as the product of two, so that threshold / norm cannot underflow.

    Exactly one where nothing is clipped, exactly zero where the update is dropped.
    """

    coarse: Array
    fine: Array

    @property
    def value(self) -> Array:
        """The product, for people to read."""
        return self.coarse * self.fine


def clip_factor(norm: Array, threshold: Array) -> Factor:
    """`min(1, threshold / norm)`: NaN for a NaN of either, 0 for a threshold below 0."""
    threshold = jnp.maximum(threshold, 0)
    within = norm <= threshold
    safe_norm = jnp.where(within, 1, norm)
    is_small = threshold / safe_norm < jnp.finfo(norm.dtype).tiny
    coarse = jnp.where(is_small & ~within, jnp.asarray(_COARSE, norm.dtype), 1)
    fine = jnp.where(within, 1, threshold / (safe_norm * coarse))
    return Factor(coarse, jnp.where(jnp.isfinite(norm), fine, jnp.nan))


def drop_factor(norm: Array, threshold: Array) -> Factor:
    """One up to the threshold, zero above it: NaN for a NaN of either."""
    within = jnp.where(norm <= jnp.maximum(threshold, 0), 1.0, 0.0).astype(norm.dtype)
    is_number = jnp.isfinite(norm) & ~jnp.isnan(threshold)
    return Factor(jnp.ones_like(norm), jnp.where(is_number, within, jnp.nan))


def replace_factor(factor: Factor, where: Array, value: float) -> Factor:
    """Another factor where the update is not to be trusted: NaN, or zero."""
    return Factor(jnp.where(where, 1, factor.coarse), jnp.where(where, value, factor.fine))


def scale_leaf(x: Any, factor: Factor) -> Any:
    """`x * factor`, multiplied in at least float32 and rounded once.

    Unchanged bit for bit where the factor is one, zero even for an infinite x where it is zero.
    """
    wide = jnp.promote_types(x.dtype, factor.fine.dtype)
    scaled = x.astype(wide) * factor.coarse.astype(wide) * factor.fine.astype(wide)
    scaled = jnp.where(factor.fine == 0, jnp.zeros_like(x), _rounded(scaled, x.dtype))
    return jnp.where((factor.fine == 1) & (factor.coarse == 1), x, scaled)


def clamp_leaf(x: Any, low: Any, high: Any) -> Any:
    """X within [low, high], compared in at least float32; a NaN stays NaN."""
    if is_float0(x):
        return x
    wide = jnp.promote_types(x.dtype, jnp.float32)
    low, high = (jnp.asarray(bound).astype(wide) for bound in (low, high))
    clamped = _rounded(jnp.clip(x.astype(wide), low, high), x.dtype)
    return jnp.where((x.astype(wide) < low) | (x.astype(wide) > high), clamped, x)


def _rounded(x: Array, dtype: Any) -> Array:
    """X in a narrower dtype; toward zero among its subnormals.

    There rounding to nearest could nearly double a value, and a norm of many such values.
    """
    info = jnp.finfo(dtype)
    if float(info.tiny) <= float(jnp.finfo(x.dtype).tiny):
        return x.astype(dtype)
    spacing = float(info.tiny) * float(info.eps)
    coarse = lax.mul(jnp.trunc(x / spacing), jnp.asarray(spacing, x.dtype))
    return jnp.where(jnp.abs(x) < float(info.tiny), coarse, x).astype(dtype)
