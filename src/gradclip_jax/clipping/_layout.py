"""How leaves are laid out for measuring: units as slots of a vector, rows in few blocks.

A reduction for each block is most of the compile time of a norm, so small rows share blocks.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from .._mesh import is_joinable, shard_axes
from .._types import Array, AxisName

# Up to this many elements a leaf is cheaper to copy into one long vector, and to reduce there,
# than to compile and launch a reduction of its own. Measured on CPU: from 10,000 on the copy
# costs more than it saves, up to twice the time of the norm.
_SMALL = 8_192

# So many are joined at once: XLA's time for one concatenation grows with the square of their
# number, and each more costs the reductions of a block. Least, at 1,000 leaves, from 384 to 512.
_MANY = 512


@dataclasses.dataclass(frozen=True)
class Slots:
    """Which entries of the norm vector the leaves of a tree count towards.

    Attributes:
        first: for each leaf, the entry of its first unit; the others follow.
        axes: for each leaf, the axes its norms run over; the remaining ones index its units.
        size: how many entries there are.
        within_device: whether a unit is never spread over the devices of a `shard_map`.
    """

    first: tuple[int, ...]
    axes: tuple[tuple[int, ...], ...]
    size: int
    within_device: bool = False


def one_slot(leaves: Sequence[Any]) -> Slots:
    """All leaves are one unit: the global norm."""
    return Slots((0,) * len(leaves), tuple(tuple(range(np.ndim(x))) for x in leaves), 1)


def unit_slots(
    leaves: Sequence[Any], axes: Sequence[tuple[int, ...]], *, within_device: bool = False
) -> Slots:
    """Each leaf has units of its own, norms running over the given axes."""
    counts = [math.prod(unit_shape(x, over)) for x, over in zip(leaves, axes, strict=True)]
    bounds = [0, *np.cumsum(counts, dtype=int).tolist()]
    return Slots(tuple(bounds[:-1]), tuple(axes), bounds[-1], within_device)


def leaf_slots(leaves: Sequence[Any]) -> Slots:
    """Each leaf is a unit."""
    return unit_slots(leaves, [tuple(range(np.ndim(x))) for x in leaves])


def unit_shape(x: Any, axes: Sequence[int]) -> tuple[int, ...]:
    """The shape that indexes the units of a leaf."""
    return tuple(n for axis, n in enumerate(np.shape(x)) if axis not in axes)


class Block(NamedTuple):
    """Real values whose rows count towards slots, by the axes that are not reduced.

    Attributes:
        values: the values.
        over: the axes a row runs over.
        slots: the slot of each row, in the order of the remaining axes.
        shard_axes: the mapped axes over which the values are a shard of the whole.
        is_small: whether it may be joined with others: one row, or two axes, rows first.
    """

    values: Array
    over: tuple[int, ...]
    slots: list[int]
    shard_axes: frozenset[str]
    is_small: bool

    def entries(self, vector: Array) -> Array:
        """This block's entries of a vector with one entry a slot, shaped to broadcast."""
        shape = [1 if axis in self.over else n for axis, n in enumerate(self.values.shape)]
        return vector[np.asarray(self.slots)].reshape(shape)


def blocks_of(
    leaves: Sequence[Array], slots: Slots, ord: float, axis_name: AxisName, dtype: Any
) -> list[Block]:
    """The rows of all leaves, in as few blocks as can be reduced without moving a shard."""
    return _joined(list(_by_leaf(leaves, slots, ord, axis_name)), dtype)


def _by_leaf(
    leaves: Sequence[Array], slots: Slots, ord: float, axis_name: AxisName
) -> Iterable[Block]:
    for x, first, over in zip(leaves, slots.first, slots.axes, strict=True):
        rows = math.prod(unit_shape(x, over))
        if rows == 0:
            continue
        values = _real(x, ord)
        over = (*over, *range(x.ndim, values.ndim))
        kept = tuple(axis for axis in range(values.ndim) if axis not in over)
        joinable = is_joinable(x)
        is_small = joinable and values.size <= _SMALL
        # A flat reduction is the most exact one, and on CPU ten times faster than one row of
        # two axes; but a shard must not be moved for it.
        if joinable and rows == 1:
            values, over = values.reshape(-1), (0,)
        elif is_small or (joinable and kept == tuple(range(len(kept)))):
            values, over = values.transpose(*kept, *over).reshape(rows, -1), (1,)
        places = list(range(first, first + rows))
        yield Block(values, over, places, shard_axes(x, axis_name), is_small)


def _real(x: Array, ord: float) -> Array:
    """Real values with the norms of x: parts on a last axis, or magnitudes."""
    if not jnp.issubdtype(x.dtype, jnp.complexfloating):
        return x
    return jnp.stack([x.real, x.imag], axis=-1) if ord == 2.0 else jnp.abs(x)


def _joined(blocks: list[Block], dtype: Any) -> list[Block]:
    """The same rows in fewer blocks, because a reduction per block is most of compile time.

    Small blocks of one slot are put end to end, then small ones with rows of like lengths under
    one another, padded with zeros.
    """

    def same_slot(block: Block) -> Any:
        is_one = block.is_small and len(block.slots) == 1
        return (block.slots[0], block.shard_axes) if is_one else None

    def like_length(block: Block) -> Any:
        is_small = block.is_small and block.values.size <= _SMALL
        return (_rounded_up(block.values.shape[-1]), block.shard_axes) if is_small else None

    blocks = [_end_to_end(group, dtype) for group in _grouped(blocks, same_slot)]
    return [_stacked(group, dtype) for group in _grouped(blocks, like_length)]


def _grouped(blocks: list[Block], key: Callable[[Block], Any]) -> list[list[Block]]:
    """Blocks with a key together, `_MANY` at most, and those without one by themselves."""
    groups: dict[Any, list[Block]] = {}
    for place, block in enumerate(blocks):
        found = key(block)
        groups.setdefault(("alone", place) if found is None else found, []).append(block)
    return [group[i : i + _MANY] for group in groups.values() for i in range(0, len(group), _MANY)]


def _rounded_up(length: int) -> int:
    """The next of four lengths in each octave: a quarter of padding at most."""
    step = max(1 << max(length.bit_length() - 3, 0), 1)
    return -(-length // step) * step


def _end_to_end(group: list[Block], dtype: Any) -> Block:
    if len(group) == 1:
        return group[0]
    values = [block.values.astype(dtype) for block in group]
    return group[0]._replace(values=jnp.concatenate(values))


def _stacked(group: list[Block], dtype: Any) -> Block:
    if len(group) == 1:
        return group[0]
    length = _rounded_up(group[0].values.shape[-1])
    rows: list[Array] = []
    for block in group:
        x = block.values.astype(dtype).reshape(len(block.slots), -1)
        rows.append(lax.pad(x, dtype(0), [(0, 0, 0), (0, length - x.shape[1], 0)]))
    slots = [slot for block in group for slot in block.slots]
    return group[0]._replace(values=jnp.concatenate(rows), over=(1,), slots=slots)


def rows_of_slots(slots: list[list[int]], size: int) -> np.ndarray[Any, Any]:
    """For each slot its rows, bias_correction up with the number of a row of zero."""
    rows: list[list[int]] = [[] for _ in range(size)]
    flat = [slot for block in slots for slot in block]
    for row, slot in enumerate(flat):
        rows[slot].append(row)
    width = max(map(len, rows), default=0)
    return np.asarray([row + [len(flat)] * (width - len(row)) for row in rows], np.int32)
