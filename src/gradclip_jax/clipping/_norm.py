"""Norms at any granularity: right for every dtype, magnitude, tree and mesh.

A tree is cut into units, and `pooled_norms` returns the norm of each as one vector, whether a
unit is the whole tree, a group of leaves, a leaf, a layer stacked in a leaf, or a row of one.
How a sum of powers survives overflow and underflow is the business of `_power_sum.py`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import check_axis_name, check_inexact, check_ord, is_float0
from .._mesh import is_joinable, max_over, replication, shard_axes, sum_over
from .._types import Array, AxisName, Scalar, Tree
from ._power_sum import magnitude_rank, power, robust_norms

# Up to this many elements a leaf is cheaper to copy into one long vector, and to reduce there,
# than to compile and launch a reduction of its own.
_SMALL = 65_536


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


def global_norm(tree: Tree, *, ord: float = 2.0, axis_name: AxisName = None) -> Scalar:
    """Measures a whole tree: the norm of all its elements as one vector.

    `(sum |x|^ord)^(1/ord)`; the largest magnitude for `ord=inf`.

    | tree | norm |
    | --- | --- |
    | float16 `[300, 400]` | 500, though its squares overflow float16 |
    | float32 `[1e20, 1e20]`, `[3e-23, 4e-23]` | 1.4142e20, 5e-23 |
    | empty, or only `None`, masked or zero-size leaves | 0 |
    | any NaN | NaN |
    | an infinity and no NaN | inf |
    | sharded | that of the whole, see `axis_name` |

    Args:
        tree: floating or complex leaves of any shape, in the unit of the gradients.
        ord: order of the norm, 1, 2, inf or any number > 0.
        axis_name: mapped axes over which every leaf is a shard, where types cannot tell (inside
            `pmap`, or `shard_map` with `check_vma=False`). Elsewhere leave it out.

    Returns:
        The norm, float32[], or float64[] when a leaf is float64 or complex128.

    Raises:
        TypeError: a leaf is an integer or a boolean; the message names its path.
        ValueError: `ord` is not > 0.

    Example:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> float(gcx.global_norm({"w": jnp.float16([300, 0]), "b": jnp.float16([400])}))
        500.0
    """
    check_inexact("global_norm", "tree", tree)
    leaves = counted_leaves(tree)
    return pooled_norms(
        leaves,
        one_slot(leaves),
        check_ord("global_norm", ord),
        check_axis_name("global_norm", axis_name),
    )[0]


def leaf_norms(tree: Tree, *, ord: float = 2.0, axis_name: AxisName = None) -> Tree:
    """Measures each leaf by itself: `global_norm` of every leaf, all in one pass.

    Args:
        tree: floating or complex leaves of any shape, in the unit of the gradients.
        ord: order of the norm, 1, 2, inf or any number > 0.
        axis_name: as for `global_norm`.

    Returns:
        A tree of the same structure, each leaf a scalar of one common dtype: float32, or
        float64 when a leaf is float64 or complex128. A float0 leaf has norm 0.

    Raises:
        TypeError: a leaf is an integer or a boolean; the message names its path.
        ValueError: `ord` is not > 0.

    Example:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> norms = gcx.leaf_norms({"w": jnp.array([3.0, 4.0]), "b": jnp.array(-2.0)})
        >>> float(norms["w"]), float(norms["b"])
        (5.0, 2.0)
    """
    check_inexact("leaf_norms", "tree", tree)
    leaves = counted_leaves(tree)
    slots = leaf_slots(leaves)
    norms = iter(
        pooled_norms(
            leaves,
            slots,
            check_ord("leaf_norms", ord),
            check_axis_name("leaf_norms", axis_name),
        )
    )
    return jax.tree.map(lambda x: next(norms) if has_norm(x) else jnp.float32(0), tree)


def has_norm(leaf: Any) -> bool:
    """Whether a leaf is measured: a float0, or the integer parameter it belongs to, is not."""
    return not is_float0(leaf) and jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def counted_leaves(tree: Tree) -> list[Array]:
    """The leaves that are measured, in order."""
    return [jnp.asarray(x) for x in jax.tree.leaves(tree) if has_norm(x)]


def norm_dtype(leaves: Iterable[Any]) -> Any:
    """float32, or float64 when a leaf is float64 or complex128."""
    return jnp.float64 if any(jnp.finfo(x.dtype).bits == 64 for x in leaves) else jnp.float32


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def pooled_norms(leaves: list[Array], slots: Slots, ord: float, axis_name: AxisName) -> Array:
    """The norms of all units: one pass over the leaves, and one all-reduce."""
    dtype = norm_dtype(leaves)
    blocks = _joined(list(_blocks(leaves, slots, ord, axis_name)), dtype)
    if not blocks:
        return jnp.zeros(slots.size, dtype)
    everywhere = frozenset[str]()
    if not slots.within_device:
        everywhere = everywhere.union(*(block.shard_axes for block in blocks))
    rows_of = _rows_of_slots([block.slots for block in blocks], slots.size)

    def pool(totals: list[Array], combine: Any) -> Array:
        rows = jnp.concatenate([total.reshape(-1) for total in totals])
        if slots.size == 1:
            return combine(rows, keepdims=True)
        padded = jnp.concatenate([rows, jnp.zeros(1, rows.dtype)])
        return combine(padded[rows_of], axis=1)

    def largest(of: Callable[[Array], Array]) -> Array:
        tops = [jnp.max(of(block.values), axis=block.over, initial=0) for block in blocks]
        return max_over(pool(tops, jnp.max), everywhere)

    def power_sums(exponents: Array | None) -> Array:
        totals: list[Array] = []
        for block in blocks:
            exponent = None if exponents is None else block.entries(exponents)
            total = jnp.sum(power(block.values, ord, dtype, exponent), axis=block.over)
            copies = replication(block.shard_axes, everywhere)
            totals.append(total if copies == 1 else total / copies)
        return sum_over(pool(totals, jnp.sum), everywhere)

    if math.isinf(ord):
        return largest(lambda x: jnp.abs(x.astype(dtype)))
    elements = np.zeros(slots.size)
    for block in blocks:
        np.add.at(elements, block.slots, block.values.size / len(block.slots))
    peak_ranks = functools.partial(largest, lambda x: magnitude_rank(x, dtype))
    return robust_norms(power_sums, peak_ranks, ord, elements)


class _Block(NamedTuple):
    """Real values whose rows count towards slots, by the axes that are not reduced.

    Attributes:
        values: the values.
        over: the axes a row runs over.
        slots: the slot of each row, in the order of the remaining axes.
        shard_axes: the mapped axes over which the values are a shard of the whole.
        is_small: whether it may be joined with others: two axes, rows first.
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


def _blocks(
    leaves: Sequence[Array], slots: Slots, ord: float, axis_name: AxisName
) -> Iterable[_Block]:
    for x, first, over in zip(leaves, slots.first, slots.axes, strict=True):
        rows = math.prod(unit_shape(x, over))
        if rows == 0:
            continue
        values = _real(x, ord)
        over = (*over, *range(x.ndim, values.ndim))
        kept = tuple(axis for axis in range(values.ndim) if axis not in over)
        joinable = is_joinable(x)
        is_small = joinable and values.size <= _SMALL
        # A flat reduction is the most exact one; but a shard must not be moved for it.
        if is_small or (joinable and kept == tuple(range(len(kept)))):
            values = values.transpose(*kept, *over).reshape(rows, -1)
            over = (1,)
        places = list(range(first, first + rows))
        yield _Block(values, over, places, shard_axes(x, axis_name), is_small)


def _real(x: Array, ord: float) -> Array:
    """Real values with the norms of x: parts on a last axis, or magnitudes."""
    if not jnp.issubdtype(x.dtype, jnp.complexfloating):
        return x
    return jnp.stack([x.real, x.imag], axis=-1) if ord == 2.0 else jnp.abs(x)


def _joined(blocks: list[_Block], dtype: Any) -> list[_Block]:
    """The same rows in fewer blocks, because a reduction per block is most of compile time.

    Small blocks of one slot are put end to end, then small ones with rows of like lengths under
    one another, padded with zeros.
    """

    def same_slot(block: _Block) -> Any:
        is_one = block.is_small and len(block.slots) == 1
        return (block.slots[0], block.shard_axes) if is_one else None

    def like_length(block: _Block) -> Any:
        is_small = block.is_small and block.values.size <= _SMALL
        return (_rounded_up(block.values.shape[1]), block.shard_axes) if is_small else None

    blocks = [_concatenated(group, 1, dtype) for group in _grouped(blocks, same_slot)]
    return [_concatenated(group, 0, dtype) for group in _grouped(blocks, like_length)]


def _grouped(blocks: list[_Block], key: Callable[[_Block], Any]) -> list[list[_Block]]:
    """Blocks with a key together, those without one by themselves."""
    groups: dict[Any, list[_Block]] = {}
    for place, block in enumerate(blocks):
        found = key(block)
        groups.setdefault(("alone", place) if found is None else found, []).append(block)
    return list(groups.values())


def _rounded_up(length: int) -> int:
    """The next of four lengths in each octave: a quarter of padding at most."""
    step = max(1 << max(length.bit_length() - 3, 0), 1)
    return -(-length // step) * step


def _concatenated(group: list[_Block], axis: int, dtype: Any) -> _Block:
    if len(group) == 1:
        return group[0]
    values = [block.values.astype(dtype) for block in group]
    if axis == 0:
        length = _rounded_up(values[0].shape[1])
        values = [lax.pad(x, x.dtype.type(0), _to_length(x, length)) for x in values]
    slots = group[0].slots if axis == 1 else [slot for block in group for slot in block.slots]
    return group[0]._replace(values=jnp.concatenate(values, axis), slots=slots)


def _to_length(x: Array, length: int) -> list[tuple[int, int, int]]:
    return [(0, 0, 0), (0, length - x.shape[1], 0)]


def _rows_of_slots(slots: list[list[int]], size: int) -> np.ndarray[Any, Any]:
    """For each slot its rows, filled up with the number of a row of zero."""
    rows: list[list[int]] = [[] for _ in range(size)]
    flat = [slot for block in slots for slot in block]
    for row, slot in enumerate(flat):
        rows[slot].append(row)
    width = max(map(len, rows), default=0)
    return np.asarray([row + [len(flat)] * (width - len(row)) for row in rows], np.int32)
