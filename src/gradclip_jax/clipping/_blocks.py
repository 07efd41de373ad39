"""Packs the leaves of a tree into blocks that XLA reduces well, and pools rows to units.

For speed and compile time alone: which unit a row counts to is said in `_units.py`.
"""

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import lax

from .._mesh import is_joinable, max_over, replica_count, reshard_replicated, shard_axes, sum_over
from .._types import Array, AxisName
from .._xla import SMALL, STACKED, SUMS_TOGETHER, barrier_on_gpu
from ._units import Units, spread_shape, unit_shape

T = TypeVar("T")


class Block(NamedTuple):
    """Real values whose rows count to units; the axes that are not reduced index the rows.

    Attributes:
        values: the values.
        axes: the axes that a row runs over.
        units: the unit of each row, in the order of the remaining axes.
        shard_axes: the mapped axes over which the values are a shard of the whole.
        is_small: whether it is made of small leaves: two axes, rows first.
    """

    values: Array
    axes: tuple[int, ...]
    units: tuple[int, ...]
    shard_axes: frozenset[str]
    is_small: bool

    @property
    def may_grow(self) -> bool:
        """Whether it may be joined with others: a stack of leaves of one unit may not."""
        return self.is_small and self.axes == (1,)

    def per_row(self, of_rows: Array) -> Array:
        """One number, or one for each row, shaped to broadcast against the values."""
        shape = () if of_rows.ndim == 0 else spread_shape(self.values, self.axes)
        return of_rows.reshape(shape)


def blocks_of_leaves(
    leaves: Sequence[Array],
    units: Units,
    axis_name: AxisName,
    values_of: Callable[[Array], Array] = lambda x: x,
) -> list[Block]:
    """A block for each leaf that is measured; `values_of` may add axes at the end."""
    blocks: list[Block] = []
    for x, first, axes in zip(leaves, units.first, units.axes, strict=True):
        if axes is None or x.size == 0:
            continue
        values = values_of(x)
        axes = (*axes, *range(x.ndim, values.ndim))
        row_units = tuple(range(first, first + math.prod(unit_shape(x, axes))))
        block = Block(values, axes, row_units, shard_axes(x, axis_name), is_small=False)
        # A shard must not be moved for it.
        blocks.append(_rows_first(block) if is_joinable(x) and values.size <= SMALL else block)
    return blocks


def pack(
    blocks: Sequence[Block], joined: int, *, flatten: bool = False, stack: bool = False
) -> list[Block]:
    """The rows of all leaves in few blocks; at most `joined` small leaves share one.

    Small leaves of one unit are put end to end, small leaves with rows of one length under one
    another. No shard is moved to another device for it. With `flatten` large leaves have at most
    two axes as well, one row has one: on a CPU their sums are then more exact, and up to ten times
    faster; on a TPU it would be a copy. With `stack` leaves of one length are not put end to end.
    """
    blocks = [_flattened(block) for block in blocks] if flatten else list(blocks)
    if stack:
        groups = grouped(blocks, _unit_and_length, joined)
        blocks = [block for group in groups for block in _as_stack(group)]
    blocks = [_end_to_end(group) for group in grouped(blocks, _shared_unit, joined)]
    return [_under_one_another(group) for group in grouped(blocks, _row_length, joined)]


def pool_sums(
    sums: Sequence[Sequence[Array]], blocks: Sequence[Block], units: Units, dtype: Any
) -> Array:
    """Adds up the sums of rows: one for each unit, alike on all devices.

    Args:
        sums: for each block its sums, of one kind or more, each with an entry for each row.
        blocks: the blocks.
        units: the units of the tree.
        dtype: of the result where there is no block.

    Returns:
        The sums of each kind, one under the other.
    """
    if not blocks:
        return jnp.zeros((1, units.size), dtype)
    everywhere = _all_shard_axes(blocks, units)
    copies = [replica_count(block.shard_axes, everywhere) for block in blocks]
    shares = [
        kinds if n == 1 else [x / n for x in kinds] for kinds, n in zip(sums, copies, strict=True)
    ]
    return sum_over(_by_unit(shares, blocks, units, jnp.add), everywhere)


def pool_largest(
    tops: Sequence[Sequence[Array]], blocks: Sequence[Block], units: Units, dtype: Any
) -> Array:
    """As `pool_sums`, the largest of values >= 0."""
    if not blocks:
        return jnp.zeros((1, units.size), dtype)
    return max_over(_by_unit(tops, blocks, units, jnp.maximum), _all_shard_axes(blocks, units))


def elements_of_units(blocks: Sequence[Block], units: Units) -> np.ndarray[Any, Any]:
    """How many elements each unit has on this device."""
    elements = np.zeros(units.size)
    for block in blocks:
        np.add.at(elements, list(block.units), block.values.size / len(block.units))
    return elements


def _all_shard_axes(blocks: Sequence[Block], units: Units) -> frozenset[str]:
    if units.is_local:
        return frozenset()
    return frozenset[str]().union(*(block.shard_axes for block in blocks))


def _by_unit(
    totals: Sequence[Sequence[Array]], blocks: Sequence[Block], units: Units, combine: Any
) -> Array:
    """Combines what belongs to a unit by a ufunc, each kind in a row of its own."""
    totals = [[reshard_replicated(x) for x in kinds] for kinds in totals]
    order = [unit for block in blocks for unit in block.units]
    if order == list(range(units.size)):
        return _side_by_side(totals)
    if units.size == 1:
        return lax.platform_dependent(
            totals,
            tpu=functools.partial(_in_pairs, combine=combine),
            default=functools.partial(_in_parts, combine=combine),
        )
    # A gather and not a scatter: that of a GPU adds in another order at each run.
    rows_of: list[list[int]] = [[] for _ in range(units.size)]
    for row, unit in enumerate(order):
        rows_of[unit].append(row)
    width = max(map(len, rows_of))
    index = [of_unit + [len(order)] * (width - len(of_unit)) for of_unit in rows_of]
    rows = _side_by_side(totals)
    padded = jnp.concatenate([rows, jnp.zeros_like(rows[:, :1])], axis=1)
    return combine.reduce(padded[:, np.asarray(index)], axis=-1)


def _side_by_side(totals: Sequence[Sequence[Array]]) -> Array:
    """All there is of each kind, one kind under the other."""
    parts = [
        jnp.stack([_one_row(of_kind) for of_kind in zip(*part, strict=True)])
        for part in _parts(totals)
    ]
    return parts[0] if len(parts) == 1 else jnp.concatenate(barrier_on_gpu(parts), axis=1)


def _one_row(arrays: Sequence[Array]) -> Array:
    """Vectors end to end; from a stack a TPU v5e puts them so at once, not one at a time.

    `adaptive_grad_clip` of 200 matrices of 768 x 768 then launches 717 kernels, not 1,833.
    """
    if len({x.size for x in arrays}) > 1:
        return jnp.concatenate(arrays)
    return jnp.stack(arrays).reshape(-1)


def _in_parts(totals: Sequence[Sequence[Array]], combine: Any) -> Array:
    """All there is of each kind combined, a part at a time."""
    columns = [jnp.stack(kinds) for kinds in totals]
    while True:
        joined = [jnp.concatenate(part, axis=1) for part in _parts(columns)]
        columns = [combine.reduce(x, axis=1, keepdims=True) for x in joined]
        if len(columns) == 1:
            return columns[0]
        columns = barrier_on_gpu(columns)


def _in_pairs(totals: Sequence[Sequence[Array]], combine: Any) -> Array:
    """As `_in_parts`, two and two: on a TPU operations on scalars are no kernels."""
    totals = [[combine.reduce(x, keepdims=True) for x in kinds] for kinds in totals]
    while len(totals) > 1:
        pairs = zip(totals[::2], totals[1::2], strict=False)
        odd = totals[-1:] if len(totals) % 2 else []
        totals = [*(list(map(combine, x, y)) for x, y in pairs), *odd]
    return jnp.stack(totals[0])


def _parts(totals: Sequence[Any]) -> list[Sequence[Any]]:
    starts = range(0, len(totals), SUMS_TOGETHER)
    return [totals[i : i + SUMS_TOGETHER] for i in starts]


def _rows_first(block: Block) -> Block:
    """A small leaf with two axes."""
    values, rows = block.values, len(block.units)
    order = (*_kept_axes(block), *block.axes)
    if order != tuple(range(values.ndim)):
        values = values.transpose(order)
    # `lax` is traced in a quarter of the time, of every leaf.
    values = lax.reshape(values, (rows, values.size // rows))
    return block._replace(values=values, axes=(1,), is_small=True)


def _flattened(block: Block) -> Block:
    """The same rows with the axes of a kind joined, where that moves nothing."""
    values, axes, kept = block.values, block.axes, _kept_axes(block)
    if block.is_small or not is_joinable(values):
        return block
    if not kept:
        # As [1, n] the sum of a bfloat16 leaf takes 15 times as long on a CPU (JAX 0.10.2).
        return block._replace(values=values.reshape(-1), axes=(0,))
    if kept == tuple(range(len(kept))):
        return block._replace(values=values.reshape(len(block.units), -1), axes=(1,))
    if axes == tuple(range(len(axes))):
        return block._replace(values=values.reshape(-1, len(block.units)), axes=(0,))
    return block


def _kept_axes(block: Block) -> tuple[int, ...]:
    return tuple(axis for axis in range(block.values.ndim) if axis not in block.axes)


def _unit_and_length(block: Block) -> Hashable:
    shared = _shared_unit(block)
    return None if shared is None else (shared, block.values.shape)


def _shared_unit(block: Block) -> Hashable:
    is_joined = block.may_grow and len(block.units) == 1
    return (block.units, block.values.dtype, block.shard_axes) if is_joined else None


def _row_length(block: Block) -> Hashable:
    is_joined = block.may_grow and block.values.size <= SMALL
    return (block.values.shape[1], block.values.dtype, block.shard_axes) if is_joined else None


def grouped(items: Sequence[T], key: Callable[[T], Hashable], size: int) -> list[list[T]]:
    """Items that share a key together, `size` at most; those without a key by themselves."""
    groups: dict[Hashable, list[T]] = {}
    for i, item in enumerate(items):
        found = key(item)
        groups.setdefault((i,) if found is None else (found,), []).append(item)
    return [part for group in groups.values() for part in _evenly(group, size)]


def _evenly(group: list[T], size: int) -> list[list[T]]:
    """Parts of like length, `size` at most: XLA compiles parts that are alike once."""
    parts = -(-len(group) // size)
    length = -(-len(group) // parts)
    return [group[i : i + length] for i in range(0, len(group), length)]


def _as_stack(group: list[Block]) -> list[Block]:
    """Leaves of one unit and one length as one block, if there are enough.

    End to end a TPU puts them one at a time: 184 launches for the norm of 200 leaves of 512 on a
    TPU v5e, 14 where they are stacked. Stacked for an H100 as well, `skip_nonfinite(clip + AdamW)`
    of GPT-2 124M would launch 427 kernels in place of 344.
    """
    if len(group) < STACKED:
        return group
    values = jnp.concatenate([block.values for block in group])
    return [group[0]._replace(values=values, axes=(0, 1))]


def _end_to_end(group: list[Block]) -> Block:
    if len(group) == 1:
        return group[0]
    return group[0]._replace(values=jnp.concatenate([block.values for block in group], axis=1))


def _under_one_another(group: list[Block]) -> Block:
    if len(group) == 1:
        return group[0]
    units = tuple(unit for block in group for unit in block.units)
    return group[0]._replace(values=jnp.concatenate([b.values for b in group]), units=units)
