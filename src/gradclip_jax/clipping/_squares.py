"""2-norms whose squares neither overflow nor underflow, for any normal number of the dtype.

Squares are added up at three scales: numbers as they are, scaled down and scaled up by a power of
two. One of the sums is within range (the idea of Blue 1978, and of Anderson 2017, ACM TOMS
algorithm 978). On a GPU and a TPU all three are taken in one read. On a CPU, where that would be
computed 30 times slower than the plain sum, the others are taken only where the plain one is out
of range.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from .._mesh import device_count, is_joinable
from .._types import Array
from .._xla import LONG_ROW, ROW
from ._blocks import Block, elements_of_units, pool_sums
from ._units import Units, take_units_on_cpu

Sums: TypeAlias = Callable[[Sequence[Array], tuple[int, ...]], Sequence[Array]]
"""Sums of several arrays over the same axes."""


def norms_in_one_read(blocks: Sequence[Block], units: Units, dtype: Any, *, on_tpu: bool) -> Array:
    """The norm of each unit, without a branch, on a GPU or a TPU."""
    down, up = _scales(dtype)
    scales = (down, 1.0, up)
    sums = [
        _sums_at_scales(b.values, b.axes, scales, dtype, _sums if on_tpu else _sums_on_gpu(b))
        for b in blocks
    ]
    totals = pool_sums(sums, blocks, units, dtype)
    return _norms_in_range(totals, elements_of_units(blocks, units), dtype)


def norms_over_axes(x: Array, axes: tuple[int, ...], dtype: Any) -> Array:
    """The norms over some axes of one real array, which stay as 1; without a branch."""
    wide, (down, up) = x.astype(dtype), _scales(dtype)
    squares = (_scaled_square(wide, scale) for scale in (down, 1.0, up))
    totals = [jnp.sum(square, axes, keepdims=True) for square in squares]
    return _norms_in_range(totals, math.prod(x.shape[a] for a in axes), dtype)


def _norms_in_range(totals_at_scales: Any, elements: Any, dtype: Any) -> Array:
    """The root of that sum which has neither overflowed nor underflowed, scaled back."""
    totals_down, totals, totals_up = totals_at_scales
    is_large, is_small = _is_out_of_range(totals, elements)
    in_range = jnp.where(is_large, totals_down, jnp.where(is_small, totals_up, totals))
    return jnp.sqrt(in_range) / _scales_where(is_large, is_small, dtype)


def norms_on_cpu(blocks: Sequence[Block], units: Units, dtype: Any) -> Array:
    """The norm of each unit, with a second read only if the sum of a unit is out of range."""

    def sums_of(values: Sequence[Array]) -> list[Array]:
        pairs = zip(values, blocks, strict=True)
        return [jnp.sum(x * x, block.axes) for x, block in pairs]

    def totals_of(sums: Sequence[Array]) -> Array:
        return pool_sums([[x.reshape(-1)] for x in sums], blocks, units, dtype)[0]

    sums = sums_of([block.values.astype(dtype) for block in blocks])
    totals = totals_of(sums)
    is_large, is_small = _is_out_of_range(totals, elements_of_units(blocks, units))

    def read_again() -> Array:
        scales = _scales_where(is_large, is_small, dtype)
        of_blocks = take_units_on_cpu(scales, [block.units for block in blocks])
        scaled: list[Array] = []
        for block, of_rows, own_sums in zip(blocks, of_blocks, sums, strict=True):
            own = jnp.expand_dims(own_sums, block.axes)
            scale, zero = _not_shared(block.per_row(of_rows), own), _not_shared(0, own)
            scaled.append(_scaled(block.values.astype(dtype), scale, zero))
        return jnp.sqrt(totals_of(sums_of(scaled))) / scales

    return lax.cond(jnp.any(is_large | is_small), read_again, lambda: jnp.sqrt(totals))


def _not_shared(numbers: Any, own_sums: Array) -> Array:
    """The same numbers, one for each row of a block, though XLA cannot know it.

    What is spread over two blocks alike XLA on a CPU writes down, in the size of a block: 0.25 N of
    scratch for eight equal leaves. No sum of squares is below 0.
    """
    return jnp.where(own_sums < 0, 1, numbers).astype(own_sums.dtype)


def _scales(dtype: Any) -> tuple[float, float]:
    """Powers of two by which numbers are scaled down and up: 2^-78 and 2^64 for float32.

    Scaled down, 2^27 squares of the largest number do not overflow; scaled up, the square of the
    smallest normal number is normal.
    """
    bits = int(jnp.finfo(dtype).maxexp)
    return 2.0 ** -((bits + 28) // 2), 2.0 ** (bits // 2)


def _scales_where(is_large: Array, is_small: Array, dtype: Any) -> Array:
    """By what the numbers of each unit are scaled so that their squares are in range."""
    down, up = _scales(dtype)
    return jnp.where(is_large, down, jnp.where(is_small, up, 1)).astype(dtype)


def _is_out_of_range(totals: Array, elements: Any) -> tuple[Array, Array]:
    """Where the plain sum has overflowed, and where squares that underflowed may count.

    Of a sum above the bound they are less than 2^-36. A NaN is neither.
    """
    lowest = elements * float(jnp.finfo(totals.dtype).tiny) * 2.0**36
    return totals == jnp.inf, totals < jnp.asarray(lowest, totals.dtype)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))  # leaves of one shape are traced once
def _sums_at_scales(
    values: Array, axes: tuple[int, ...], scales: tuple[float, ...], dtype: Any, sums_of: Sums
) -> list[Array]:
    """For each scale the sums of squares of the rows of a block, shape (rows,)."""
    wide = values.astype(dtype)
    squares = [_scaled_square(wide, scale) for scale in scales]
    return [x.reshape(-1) for x in sums_of(squares, axes)]


def _sums_on_gpu(block: Block) -> Sums:
    """How the rows of a block are best added up."""
    if block.is_small:
        return _sums_of_joined
    return _sums_in_one_kernel if block.values.ndim - 1 in block.axes else _sums_of_columns


def _sums(terms: Sequence[Array], axes: tuple[int, ...]) -> list[Array]:
    """Sums of several arrays: one read on an H100 and a TPU if they come from one."""
    return [jnp.sum(x, axes) for x in terms]


def _sums_in_one_kernel(terms: Sequence[Array], axes: tuple[int, ...]) -> Sequence[Array]:
    """Sums of several arrays on a GPU: one variadic reduction ends in one kernel, not in three.

    Of a sharded leaf XLA gathers the sums of all devices for it, in place of an all-reduce
    (JAX 0.10.2).
    """
    return (_sums if device_count(terms[0]) > 1 else _variadic_sum)(terms, axes)


def _sums_of_joined(terms: Sequence[Array], axes: tuple[int, ...]) -> Sequence[Array]:
    """Sums of joined leaves on a GPU: of a long row in parts."""
    if terms[0].shape[1] < LONG_ROW:
        return _sums_in_one_kernel(terms, axes)
    padded = [jnp.pad(x, ((0, 0), (0, -x.shape[1] % ROW))) for x in terms]
    parts = _variadic_sum([x.reshape(x.shape[0], -1, ROW) for x in padded], (2,))
    return _variadic_sum(parts, (1,))


def _sums_of_columns(terms: Sequence[Array], axes: tuple[int, ...]) -> Sequence[Array]:
    """Sums of columns on a GPU: one read.

    XLA writes the squares down on an H100, but not those of a stack: `adaptive_grad_clip` moves 4 N
    instead of 12, if a leaf is in the cache when read again.
    """
    stack, together = jnp.stack(terms), _rows_together(terms[0], axes)
    if together:
        parts = jnp.sum(stack.reshape(len(terms), -1, together, stack.shape[-1]), 2)
        return jnp.unstack(jnp.sum(lax.optimization_barrier(parts), 1))
    return jnp.unstack(jnp.sum(stack, tuple(axis + 1 for axis in axes)))


def _rows_together(x: Array, axes: tuple[int, ...]) -> int:
    """How many rows of a matrix with few columns are added up before the rest; 0 for all.

    Of less than 2,048 columns XLA may write the stack down as well, unless it is summed in two
    steps (H100, [3072, 768]: 6 N in one, 1.01 N in two; in bfloat16 13 and 1.03). A group of rows
    must lie on one device: a leaf may be sharded where its type does not show it.
    """
    if axes != (0,) or x.ndim != 2 or x.shape[1] >= 2048 or not is_joinable(x):
        return 0
    devices = device_count(x)
    rows = x.shape[0] // devices if x.shape[0] % devices == 0 else 0
    return max((n for n in range(64, min(rows // 2, 512) + 1) if rows % n == 0), default=0)


def _scaled_square(x: Array, scale: float) -> Array:
    return jnp.square(x if scale == 1 else _scaled(x, scale))


def _scaled(x: Array, scale: float | Array, zero: float | Array = 0) -> Array:
    """`|x| * scale`, to be squared.

    XLA makes `x^2 * scale^2` of the square of a single element, and of zeros that are known when
    compiled, as those of a flush: inf * 0. It does not look behind a maximum (JAX 0.10.2, CPU, H100
    and TPU v5e).
    """
    return jnp.maximum(jnp.abs(x) * scale, zero)


def _variadic_sum(terms: Sequence[Array], axes: tuple[int, ...]) -> tuple[Array, ...]:
    """Sums of several arrays by one reduction: on an H100 as many launches as for one of them."""
    zeros = tuple(jnp.zeros((), x.dtype) for x in terms)
    return lax.reduce(tuple(terms), zeros, lambda x, y: tuple(map(operator.add, x, y)), axes)
