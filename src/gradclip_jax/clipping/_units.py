"""Units: what one norm is taken of, and which part of a tree counts to which.

`Units` is data, known when a tree is traced. Norm, threshold and factor are vectors with one
entry for each unit; nothing here knows them.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import error_message, is_float0
from .._mesh import constrain_replicated, replica_count, shard_axes, varying_axes
from .._types import Array, AxisName, Tree
from .._xla import READ_TOGETHER, rows_on_cpu


class Units(NamedTuple):
    """The units of a tree; static and hashable. Sequences have an entry for each measured leaf.

    Attributes:
        axes: the axes that the norm runs over; the other axes index the units of the leaf. None
            for a leaf that is left alone.
        first: the index of the first unit of the leaf; the others follow.
        size: how many units there are.
        names: a name for each unit, where metrics tell them apart.
        is_scalar: whether a threshold rule sees each unit by itself, as an array of shape ().
        is_rms: whether thresholds are compared with the root mean square of a unit.
        is_local: whether a unit is never spread over the devices of a `shard_map`.
    """

    axes: tuple[tuple[int, ...] | None, ...]
    first: tuple[int, ...]
    size: int
    names: tuple[Any, ...] = ()
    is_scalar: bool = False
    is_rms: bool = False
    is_local: bool = False


def select_groups(function: str, argument: str, units: Units, keys: Sequence[Any]) -> Units:
    """The groups that a mapping names; other leaves are left alone.

    A key is a label, or a tuple of labels that become one unit.
    """
    known = set(units.names)
    group_of: dict[Any, int] = {}
    for index, key in enumerate(keys):
        members = key if isinstance(key, tuple) and key not in known else (key,)
        group_of |= dict.fromkeys(members, index)
    unused = [label for label in group_of if label not in known]
    if unused and known:
        hint = f"The labels of the tree are {', '.join(sorted(map(repr, known)))}."
        rule = "a mapping from labels of the tree to thresholds"
        raise ValueError(error_message(function, argument, rule, repr(unused[0]), hint))
    groups = [group_of.get(units.names[unit]) for unit in units.first]
    return units._replace(
        axes=tuple(
            None if index is None else axes for index, axes in zip(groups, units.axes, strict=True)
        ),
        first=tuple(index or 0 for index in groups),
        size=len(keys),
        names=tuple(keys),
    )


class Part(NamedTuple):
    """Units that can share a vector.

    Attributes:
        positions: the positions of their leaves.
        units: the units.
    """

    positions: list[int]
    units: Units

    def pick(self, leaves: Sequence[Array]) -> list[Array]:
        """The leaves of this part."""
        return [leaves[i] for i in self.positions]


def split_by_sharding(units: Units, leaves: Sequence[Array]) -> list[Part]:
    """The units in parts that can share a vector: one, unless units stay on their device.

    Such units vary over the mesh axes of their leaf, and in one vector over the axes of all.
    """
    positions: dict[frozenset[str], list[int]] = {}
    for i, x in enumerate(leaves):
        positions.setdefault(varying_axes(x) if units.is_local else frozenset(), []).append(i)
    if len(positions) < 2:
        return [Part(list(range(len(leaves))), units)]
    parts: list[Part] = []
    for chosen in positions.values():
        axes = [units.axes[i] or () for i in chosen]
        part = units_within_leaves([leaves[i] for i in chosen], axes)
        parts.append(Part(chosen, part._replace(is_local=True)))
    return parts


def named_units(keys: Sequence[Any]) -> Units:
    """The groups that a mapping names, before a tree is known."""
    return Units((), (), len(keys), tuple(keys), is_scalar=True)


def unit_sizes(units: Units, leaves: Sequence[Array], axis_name: AxisName) -> Array:
    """By what a norm is divided: the root of the number of elements for an RMS, else one."""
    if not units.is_rms:
        return jnp.ones(())
    sizes = np.ones(units.size)
    for x, axes, first in zip(leaves, units.axes, units.first, strict=True):
        rows = math.prod(unit_shape(x, axes or ()))
        shards = replica_count(frozenset(), shard_axes(x, axis_name))
        sizes[first : first + rows] = max(x.size * shards // max(rows, 1), 1)
    return jnp.asarray(np.sqrt(sizes))


def is_measured(leaf: Any) -> bool:
    """Whether a leaf has a norm: a float0, or the integer parameter it belongs to, has none."""
    if is_float0(leaf):
        return False
    try:
        return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
    except TypeError:  # what `optax.tree.map_params` puts in the place of a parameter
        return True


def tree_units(leaves: Sequence[Any]) -> Units:
    """All leaves together are one unit: the global norm."""
    return Units(tuple(map(all_axes, leaves)), (0,) * len(leaves), 1, is_scalar=True)


def leaf_units(leaves: Sequence[Any]) -> Units:
    """Each leaf is a unit."""
    return units_within_leaves(leaves, list(map(all_axes, leaves)))


def take_units(vector: Array, wanted: Sequence[Sequence[int]]) -> list[Array]:
    """The entries of some units, each time a scalar if all are one, else a vector."""
    return [_taken(vector, units) for units in wanted]


def take_units_on_cpu(vector: Array, wanted: Sequence[Sequence[int]]) -> list[Array]:
    """As `take_units`, compiled more quickly on a CPU where much is taken."""
    by_length: dict[int, dict[tuple[int, ...], None]] = {}
    for units in wanted:
        by_length.setdefault(len(units), {})[tuple(units)] = None
    is_much = sum(map(len, by_length.values())) > 8
    found: dict[tuple[int, ...], Array] = {}
    for length, alike in by_length.items():
        if is_much and length and len(alike) > 1:
            index = np.asarray(list(alike), np.int32)
            table = vector[index[:, 0] if length == 1 else index]
            found |= zip(alike, rows_on_cpu(table), strict=True)
        else:
            found |= {units: _taken(vector, units) for units in alike}
    return [found[tuple(units)] for units in wanted]


def take_units_on_accelerators(vector: Array, wanted: Sequence[Sequence[int]]) -> list[Array]:
    """As `take_units`, compiled more quickly on a GPU; units in ascending order."""
    return take_units_in_parts(vector, wanted, READ_TOGETHER)


def take_units_in_parts(
    vector: Array, wanted: Sequence[Sequence[int]], together: int
) -> list[Array]:
    """As `take_units`, so many at a time from a vector of their own; units in ascending order."""
    taken: list[Array] = []
    for start in range(0, len(wanted), together):
        part = wanted[start : start + together]
        low = min((units[0] for units in part if units), default=0)
        high = max((units[-1] + 1 for units in part if units), default=0)
        own = lax.optimization_barrier(lax.slice(vector, (low,), (high,)))
        taken += take_units(own, [[unit - low for unit in units] for units in part])
    return taken


def _taken(vector: Array, units: Sequence[int]) -> Array:
    if not units:
        return vector[:0]
    first, last = units[0], units[-1]
    if all(unit == first for unit in units):
        return lax.index_in_dim(vector, first, keepdims=False)
    if list(units) == list(range(first, last + 1)):
        return lax.slice(vector, (first,), (last + 1,))
    return vector[np.asarray(units)]


def entries(vector: Array) -> list[Array]:
    """The entries of a vector as scalars."""
    wanted = [(unit,) for unit in range(vector.size)]

    def on_accelerators(vector: Array) -> list[Array]:
        # XLA on a GPU merges kernels that multiply, not those that only read an entry: 33 in
        # place of 229 for the norms of 200 leaves on an H100.
        one = lax.optimization_barrier(jnp.ones((), vector.dtype))
        return [x * one for x in take_units_on_accelerators(vector, wanted)]

    on_cpu = functools.partial(take_units_on_cpu, wanted=wanted)
    return lax.platform_dependent(vector, cpu=on_cpu, default=on_accelerators)


def spread_over_leaves(
    vector: Array,
    units: Units,
    leaves: Sequence[Array],
    take: Callable[..., list[Array]] = take_units,
) -> list[Array]:
    """The entries of the units of each leaf, shaped to broadcast; ones where it is left alone."""
    taken = take(vector, [_units_of(x, units, i) for i, x in enumerate(leaves)])
    spread: list[Array] = []
    for x, axes, of_leaf in zip(leaves, units.axes, taken, strict=True):
        if axes is None:
            spread.append(jnp.ones((), vector.dtype))
            continue
        shape = () if of_leaf.size == 1 else spread_shape(x, axes)
        spread.append(constrain_replicated(of_leaf, x).reshape(shape))
    return spread


def spread_over_stack(vector: Array, units: Units, positions: Sequence[int], leaf: Array) -> Array:
    """As `spread_over_leaves`, for the stack of leaves that are alike, one of which is given."""
    axes = units.axes[positions[0]]
    if axes is None:
        return jnp.ones((), vector.dtype)
    wanted = [unit for i in positions for unit in _units_of(leaf, units, i)]
    of_stack = constrain_replicated(_taken(vector, wanted), leaf)
    shape = (len(positions), *spread_shape(leaf, axes))
    return of_stack.reshape(() if of_stack.size == 1 else shape)


def _units_of(x: Any, units: Units, position: int) -> range:
    axes, first = units.axes[position], units.first[position]
    return range(first, first + (0 if axes is None else math.prod(unit_shape(x, axes))))


def spread_shape(x: Any, axes: Sequence[int]) -> tuple[int, ...]:
    """The shape in which one number for each unit of a leaf broadcasts against it."""
    return tuple(1 if axis in axes else size for axis, size in enumerate(np.shape(x)))


def unit_shape(x: Any, axes: Sequence[int]) -> tuple[int, ...]:
    """The shape that indexes the units of a leaf."""
    return tuple(n for i, n in enumerate(np.shape(x)) if i not in axes)


def measured_shapes(tree: Tree) -> list[Any]:
    """The measured leaves for their shapes; in `init` they may be placeholders."""
    return [x for x in jax.tree.leaves(tree) if is_measured(x)]


def all_axes(x: Any) -> tuple[int, ...]:
    return tuple(range(np.ndim(x)))


def units_within_leaves(leaves: Sequence[Any], axes: Sequence[tuple[int, ...]]) -> Units:
    """Each leaf has units of its own, the norms running over the given axes."""
    counts = [math.prod(unit_shape(x, over)) for x, over in zip(leaves, axes, strict=True)]
    bounds = np.cumsum([0, *counts], dtype=int).tolist()
    return Units(tuple(axes), tuple(bounds[:-1]), bounds[-1])
