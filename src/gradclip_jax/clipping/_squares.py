"""2-norms whose squares neither overflow nor underflow, for any normal number of the dtype.

Squares are added up at three scales: numbers as they are, scaled down and scaled up by a power of
two. One of the sums is within range (the idea of Blue 1978, and of Anderson 2017, ACM TOMS
algorithm 978). On a GPU and a TPU all three are taken in one read. On a CPU, where that would be
computed 30 times slower than the plain sum, the others are taken only where the plain one is out
of range.
"""

import operator
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from .._mesh import vary, varying_axes
from .._types import Array
from .._xla import ROW
from ._blocks import Block, elements_of_units, pool_sums
from ._units import Units, take_units_on_cpu


def norms_in_one_read(blocks: Sequence[Block], units: Units, dtype: Any) -> Array:
    """The norm of each unit, without a branch."""
    down, up = _scales(dtype)
    sums = [_sums_at_scales(block, (down, 1.0, up), dtype) for block in blocks]
    totals_down, totals, totals_up = pool_sums(sums, blocks, units, dtype)
    is_large, is_small = _is_out_of_range(totals, blocks, units)
    in_range = jnp.where(is_large, totals_down, jnp.where(is_small, totals_up, totals))
    return jnp.sqrt(in_range) / _scale_where(is_large, is_small, dtype)


def norms_read_again(blocks: Sequence[Block], units: Units, dtype: Any) -> Array:
    """The norm of each unit, with a second read only if the sum of a unit was out of range."""

    def sums(scales: Array) -> Array:
        take = take_units_on_cpu(scales)
        scaled = [block.values.astype(dtype) * block.per_row(take) for block in blocks]
        squares = [jnp.sum(x * x, b.axes).reshape(-1) for x, b in zip(scaled, blocks, strict=True)]
        return pool_sums(squares, blocks, units, dtype)

    def is_due(carry: tuple[Array, Array, Array]) -> Array:
        reads, _, totals = carry
        is_large, is_small = _is_out_of_range(totals, blocks, units)
        return (reads == 0) | ((reads == 1) & jnp.any(is_large | is_small))

    def read(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        reads, scales, totals = carry
        rescaled = _scale_where(*_is_out_of_range(totals, blocks, units), dtype)
        scales = jnp.where(reads == 0, scales, rescaled)
        return reads + 1, scales, sums(scales)

    # A loop and not a branch: XLA compiles the sums once, and reserves no scratch for a branch.
    first = jnp.ones(units.size, dtype)
    if units.is_local and blocks:
        first = vary(first, varying_axes(blocks[0].values))
    start = (jnp.zeros((), jnp.int32), first, jnp.zeros_like(first))
    _, scales, totals = lax.while_loop(is_due, read, start)
    return jnp.sqrt(totals) / scales


def _scales(dtype: Any) -> tuple[float, float]:
    """Powers of two by which numbers are scaled down and up: 2^-78 and 2^64 for float32.

    Scaled down, 2^27 squares of the largest number do not overflow; scaled up, the square of the
    smallest normal number is normal.
    """
    bits = int(jnp.finfo(dtype).maxexp)
    return 2.0 ** -((bits + 28) // 2), 2.0 ** (bits // 2)


def _is_out_of_range(totals: Array, blocks: Sequence[Block], units: Units) -> tuple[Array, Array]:
    """Where the plain sum has overflowed, and where squares that underflowed may count.

    Of a sum above the bound they are less than 2^-36. A NaN is neither.
    """
    lowest = elements_of_units(blocks, units) * float(jnp.finfo(totals.dtype).tiny) * 2.0**36
    return totals == jnp.inf, totals < jnp.asarray(lowest, totals.dtype)


def _scale_where(is_large: Array, is_small: Array, dtype: Any) -> Array:
    down, up = _scales(dtype)
    return jnp.where(is_large, down, jnp.where(is_small, up, 1)).astype(dtype)


def _sums_at_scales(block: Block, scales: tuple[float, ...], dtype: Any) -> Array:
    """The sums of squares at each scale; the rows of the block on a last axis."""
    values, axes = block.values.astype(dtype), block.axes
    if block.is_small and values.shape[1] > ROW:
        rows = values.shape[0]
        values = jnp.pad(values, ((0, 0), (0, -values.shape[1] % ROW))).reshape(rows, -1, ROW)
        partial = _variadic_sum([jnp.square(values * scale) for scale in scales], (2,))
        return jnp.stack([jnp.sum(x, axis=1) for x in partial])
    squares = [jnp.square(values * scale) for scale in scales]
    if len(axes) < values.ndim:
        # XLA does not fuse a variadic sum of rows or columns (H100: 16 N moved in place of 4 N).
        return jnp.sum(jnp.stack(squares), [axis + 1 for axis in axes]).reshape(len(scales), -1)
    return jnp.stack(_variadic_sum(squares, axes)).reshape(len(scales), -1)


def _variadic_sum(terms: Sequence[Array], axes: tuple[int, ...]) -> tuple[Array, ...]:
    """Sums of several arrays at once: on an H100 as many launches as for one of them."""
    zeros = tuple(jnp.zeros((), x.dtype) for x in terms)
    return lax.reduce(tuple(terms), zeros, lambda x, y: tuple(map(operator.add, x, y)), axes)
