"""From threshold to factor, and from factor to the scaled tree."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._checks import is_float0
from .._types import Array

# Splits a factor below the smallest normal float32 into two that are not.
_COARSE = 2.0**-96


class Factor(NamedTuple):
    """A factor as the product of two, so that threshold / norm cannot underflow.

    Attributes:
        keep: whether nothing is scaled; the factor is then one.
        coarse: a power of two.
        fine: the rest; zero drops the update, NaN poisons it.
    """

    keep: Array
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
    is_small = (threshold > 0) & (threshold / safe_norm < jnp.finfo(norm.dtype).tiny)
    coarse = jnp.where(is_small & ~within, jnp.asarray(_COARSE, norm.dtype), 1)
    fine = jnp.where(within, 1, threshold / (safe_norm * coarse))
    return _poisoned(norm, Factor(within, coarse, fine))


def drop_factor(norm: Array, threshold: Array) -> Factor:
    """One up to the threshold, zero above it: NaN for a NaN of either."""
    within = norm <= jnp.maximum(threshold, 0)
    fine = jnp.where(within, 1, jnp.where(jnp.isnan(threshold), jnp.nan, 0)).astype(norm.dtype)
    return _poisoned(norm, Factor(within, jnp.ones_like(norm), fine))


def scaled_to(norm: Array, wanted: Array) -> Factor:
    """`wanted / norm`, up or down; one for a norm of zero."""
    fine = wanted / jnp.where(norm > 0, norm, 1)
    zero = norm == 0
    return _poisoned(norm, Factor(zero, jnp.ones_like(norm), jnp.where(zero, 1, fine)))


def _poisoned(norm: Array, factor: Factor) -> Factor:
    return replace_factor(factor, ~jnp.isfinite(norm), jnp.nan)


def replace_factor(factor: Factor, where: Array, value: float) -> Factor:
    """Another factor where the update is not to be trusted: NaN, or zero."""
    return Factor(
        factor.keep & ~where,
        jnp.where(where, 1, factor.coarse),
        jnp.where(where, value, factor.fine),
    )


@jax.jit
def fusion_barrier(factor: Factor) -> Factor:
    """The same factor, its arithmetic not compiled anew into the scaling of every leaf.

    XLA on CPU drops an optimization barrier before it fuses, but keeps a branch (JAX 0.7, 0.10).
    """

    def in_a_branch(factor: Factor) -> Factor:
        unscaled = jax.tree.map(jnp.ones_like, factor)
        return lax.cond(jnp.all(factor.keep), lambda: unscaled, lambda: factor)

    return lax.platform_dependent(factor, cpu=in_a_branch, default=lax.optimization_barrier)


@functools.partial(jax.jit, static_argnames="drops")
def scale_leaf(x: Any, factor: Factor, *, drops: bool = False) -> Any:
    """`x * factor`, multiplied in at least float32 and rounded once.

    Unchanged bit for bit where the factor is one; with `drops`, zero where the factor is zero,
    even for an infinite x.
    """
    x = jnp.asarray(x)
    wide = _wide(x.dtype, factor.fine.dtype)
    if wide != x.dtype:
        # XLA on CPU would write down the widened leaf, to share it with the norm.
        x = lax.platform_dependent(x, cpu=lax.optimization_barrier, default=lambda x: x)
    scaled = x.astype(wide) * factor.coarse.astype(wide) * factor.fine.astype(wide)
    scaled = _rounded(scaled, x.dtype)
    if drops:
        scaled = _select(factor.fine == 0, jnp.zeros_like(x), scaled)
    return _select(factor.keep, x, scaled)


def _select(where: Array, x: Array, y: Array) -> Array:
    # `lax.select` takes a scalar as it is: a third of the trace of `jnp.where`.
    return lax.select(where, x, y) if where.ndim == 0 else jnp.where(where, x, y)


def clamp_leaf(x: Any, low: Any, high: Any) -> Any:
    """X within [low, high], compared in at least float32; a NaN stays NaN."""
    if is_float0(x):
        return x
    x = jnp.asarray(x)
    wide = _wide(x.dtype, jnp.float32)
    low, high = (jnp.asarray(bound).astype(wide) for bound in (low, high))
    clamped = _rounded(jnp.clip(x.astype(wide), low, high), x.dtype)
    return jnp.where((x.astype(wide) < low) | (x.astype(wide) > high), clamped, x)


def _wide(dtype: Any, other: Any) -> Any:
    """The dtype of 32 bit or more that holds both; JAX promotes no float8, and strict, nothing."""
    bits = max(jnp.finfo(dtype).bits, jnp.finfo(other).bits)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jnp.complex128 if bits == 64 else jnp.complex64
    return jnp.float64 if bits == 64 else jnp.float32


def _rounded(x: Array, dtype: Any) -> Array:
    """X in a narrower dtype; toward zero among its subnormals.

    There rounding to nearest could nearly double a value, and a norm of many such values.
    """
    info = jnp.finfo(dtype)
    if float(info.tiny) <= float(jnp.finfo(x.dtype).tiny):
        return x.astype(dtype)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        parts = (_rounded(part, info.dtype) for part in (x.real, x.imag))
        return lax.complex(*parts)
    spacing = float(info.tiny) * float(info.eps)
    coarse = lax.mul(jnp.trunc(x / spacing), jnp.asarray(spacing, x.dtype))
    return jnp.where(jnp.abs(x) < float(info.tiny), coarse, x).astype(dtype)
