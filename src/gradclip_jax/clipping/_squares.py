"""2-norms whose squares neither overflow nor underflow, for any normal number of the dtype.

The squares of large, ordinary and small numbers are added up apart, the large ones scaled down
and the small ones up by a power of two (Blue 1978; Anderson 2017, ACM TOMS algorithm 978). On a
GPU and a TPU all three sums are taken in one read. XLA on a CPU does not vectorise that, so there
all numbers are scaled alike, and added up again only if the sum was out of range.
"""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from .._mesh import vary, varying_axes
from .._types import Array
from ._blocks import Block, elements_of_units, pool_sums
from ._units import Units

# Rows in which a long vector is added up on a GPU. XLA writes the terms of a sum down if it adds
# up 4,096 to 16,384 of them at once (H100, JAX 0.10.2: 7 N moved; 1.05 N in rows of 128).
_ROW = 128


class _Ranges(NamedTuple):
    """Where numbers are large or small, and by what they are scaled; powers of two.

    2^27 squares of scaled numbers, more than 1e8, stay within the range of the dtype, and their
    largest and smallest ones among its normal numbers.
    """

    large_above: float
    small_below: float
    large_scale: float
    small_scale: float


def _ranges(dtype: Any) -> _Ranges:
    bits = int(jnp.finfo(dtype).maxexp)
    return _Ranges(
        large_above=2.0 ** ((bits - 30) // 2),
        small_below=2.0 ** -((bits - 28) // 2),
        large_scale=2.0 ** -((bits + 28) // 2),
        small_scale=2.0 ** (bits // 2),
    )


def norms_in_one_read(blocks: Sequence[Block], units: Units, dtype: Any) -> Array:
    """The norm of each unit, without a branch."""
    if not blocks:
        return jnp.zeros(units.count, dtype)
    sums = [_three_sums(block, dtype) for block in blocks]
    large, ordinary, small = pool_sums(sums, blocks, units, dtype)
    ranges = _ranges(dtype)
    norms = jnp.stack(
        [
            jnp.sqrt(large) / ranges.large_scale,
            jnp.sqrt(ordinary),
            jnp.sqrt(small) / ranges.small_scale,
        ]
    )
    largest = jnp.max(norms, axis=0)
    unit = jnp.where((largest > 0) & (largest < jnp.inf), largest, 1)
    return unit * jnp.sqrt(jnp.sum((norms / unit) ** 2, axis=0))


def norms_rescaled(blocks: Sequence[Block], units: Units, dtype: Any) -> Array:
    """The norm of each unit, read again only where the sum of squares was out of range."""
    if not blocks:
        return jnp.zeros(units.count, dtype)
    ranges, info = _ranges(dtype), jnp.finfo(dtype)
    # A lower sum may have lost more than 2^-36 of it to squares that underflowed.
    lowest = elements_of_units(blocks, units) * float(info.tiny) * 2.0**36
    lowest = jnp.asarray(lowest, dtype)

    def sums(scales: Array) -> Array:
        scaled = [block.values.astype(dtype) * block.per_row(scales) for block in blocks]
        squares = [jnp.sum(x * x, b.axes).reshape(-1) for x, b in zip(scaled, blocks, strict=True)]
        return pool_sums(squares, blocks, units, dtype)

    def is_due(carry: tuple[Array, Array, Array]) -> Array:
        reads, scales, totals = carry
        return (reads == 0) | ((reads == 1) & jnp.any(scales_for(totals) != scales))

    def scales_for(totals: Array) -> Array:
        up = jnp.where(totals < lowest, ranges.small_scale, 1)
        return jnp.where(totals == jnp.inf, ranges.large_scale, up).astype(dtype)

    def read(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        reads, scales, totals = carry
        scales = jnp.where(reads == 0, scales, scales_for(totals))
        return reads + 1, scales, sums(scales)

    # A loop and not a branch: XLA compiles the sums once, and reserves no scratch for a branch.
    first = jnp.ones(units.count, dtype)
    if units.is_local:
        first = vary(first, varying_axes(blocks[0].values))
    start = (jnp.zeros((), jnp.int32), first, jnp.zeros_like(first))
    _, scales, totals = lax.while_loop(is_due, read, start)
    return jnp.sqrt(totals) / scales


def _three_sums(block: Block, dtype: Any) -> Array:
    """Sums of the squares of large, ordinary and small numbers: the rows on a last axis."""
    values, axes = block.values, block.axes
    if values.ndim == 2 and values.shape[0] == 1 and axes == (1,) and values.size > _ROW:
        values = jnp.pad(values[0], (0, -values.size % _ROW)).reshape(-1, _ROW)
        rows = _variadic_sum(_three_squares(values, dtype), (1,))
        return jnp.stack([jnp.sum(x, keepdims=True) for x in rows])
    sums = _variadic_sum(_three_squares(values, dtype), axes)
    return jnp.stack([x.reshape(-1) for x in sums])


def _three_squares(x: Array, dtype: Any) -> tuple[Array, Array, Array]:
    ranges, x = _ranges(dtype), x.astype(dtype)
    is_large, is_small = jnp.abs(x) > ranges.large_above, jnp.abs(x) < ranges.small_below
    parts = (
        jnp.where(is_large, x * ranges.large_scale, 0),
        jnp.where(is_large | is_small, 0, x),
        jnp.where(is_small, x * ranges.small_scale, 0),
    )
    large, ordinary, small = (part * part for part in parts)
    return large, ordinary, small


def _variadic_sum(terms: tuple[Array, ...], axes: tuple[int, ...]) -> tuple[Array, ...]:
    """Sums of several arrays at once: as many launches on an H100 as for one of them."""
    zeros = tuple(jnp.zeros((), x.dtype) for x in terms)
    return lax.reduce(terms, zeros, lambda x, y: tuple(map(operator.add, x, y)), axes)
