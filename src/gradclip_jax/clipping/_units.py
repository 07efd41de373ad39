"""Granularity: which unit each part of a tree counts to. A unit is what one norm is taken of.

`Units` is data, known when a tree is traced. Norm, threshold and factor are vectors with one
entry for each unit; nothing here knows them.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import (
    broadcast_prefix,
    check_axis,
    check_choice,
    check_count,
    check_static,
    describe,
    error_message,
    is_float0,
    leaf_path,
)
from .._mesh import constrain_replicated, replica_count, shard_axes, varying_axes
from .._types import Array, AxisName, Labels, Tree


class Units(NamedTuple):
    """The units of a tree; static and hashable. Sequences have an entry for each measured leaf.

    Attributes:
        axes: the axes that the norm runs over; the other axes index the units of the leaf. None
            for a leaf that is left alone.
        first: the index of the first unit of the leaf; the others follow.
        count: how many units there are.
        names: a name for each unit, where metrics tell them apart.
        is_scalar: whether a threshold rule sees each unit by itself, as an array of shape ().
        is_rms: whether thresholds are compared with the root mean square of a unit.
        is_local: whether a unit is never spread over the devices of a `shard_map`.
    """

    axes: tuple[tuple[int, ...] | None, ...]
    first: tuple[int, ...]
    count: int
    names: tuple[Any, ...] = ()
    is_scalar: bool = False
    is_rms: bool = False
    is_local: bool = False


@dataclasses.dataclass(frozen=True)
class Granularity:
    """Of what norms are taken: cuts a tree into units.

    Attributes:
        cut: `(function, tree) -> Units`, run when the tree is traced; `function` is the name
            that errors begin with.
        is_group: whether units have names, which a mapping of thresholds can use.
    """

    cut: Callable[[str, Tree], Units]
    is_group: bool = False


def as_granularity(function: str, granularity: Any) -> Granularity:
    """A granularity by name, or as it is."""
    if isinstance(granularity, Granularity):
        return granularity
    check_choice(function, "granularity", granularity, ("global", "leaf"))
    whole = Granularity(lambda function, tree: tree_units(_measured(tree)))
    return whole if granularity == "global" else layer(0)


def group(param_labels: Labels) -> Granularity:
    """The leaves that share a label are one unit.

    With a mapping from label to threshold, leaves with another label are left alone, and a key
    that is a tuple of labels makes these labels one unit.

    Args:
        param_labels: a prefix tree of labels, or a function `params -> labels`. By path:
            `lambda params: jax.tree_util.tree_map_with_path(label_of_path, params)`.

    Returns:
        A granularity for `clip_by_norm`.

    Raises:
        TypeError: when traced, `param_labels` is no prefix tree of the updates.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> parts = gcx.granularities.group({"enc": "body", "dec": "body", "out": "head"})
        >>> clip = gcx.clip_by_norm({"body": 1.0, "head": 0.5}, granularity=parts)
        >>> grads = {"enc": jnp.array([3.0]), "dec": jnp.array([4.0]), "out": jnp.array([0.5])}
        >>> updates, _ = clip.update(grads, clip.init(grads))
        >>> [round(updates[key].item(), 2) for key in ("enc", "dec", "out")]
        [0.6, 0.8, 0.5]
    """

    def cut(function: str, tree: Tree) -> Units:
        label_tree = param_labels(tree) if callable(param_labels) else param_labels
        labels = broadcast_prefix(function, "param_labels", label_tree, "updates", tree)
        names = tuple(dict.fromkeys(labels))
        pairs = [
            (names.index(label), _all_axes(x))
            for label, x in zip(labels, jax.tree.leaves(tree), strict=True)
            if is_measured(x)
        ]
        first, axes = zip(*pairs, strict=True) if pairs else ((), ())
        return Units(axes, first, len(names), names, is_scalar=True)

    return Granularity(cut, is_group=True)


def layer(stack_axes: Any = 1, *, rms: bool = False) -> Granularity:
    """Each leaf is a unit, or each layer of a leaf in which layers are stacked for `lax.scan`.

    Args:
        stack_axes: how many leading axes of a leaf index layers, 0 for an ordinary leaf; an
            integer >= 0 or a prefix tree of integers. These axes must not be sharded inside
            `shard_map`.
        rms: compares thresholds with the root mean square of a unit, not with its norm.

    Returns:
        A granularity for `clip_by_norm`.

    Raises:
        ValueError: when traced, `stack_axes` exceeds the rank of a leaf.
        TypeError: when traced, `stack_axes` holds no static integers.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> clip = gcx.clip_by_norm(1.0, granularity=gcx.granularities.layer(1))
        >>> grads = jnp.array([[0.0, 4.0], [0.5, 0.0]])  # two layers
        >>> clip.update(grads, clip.init(grads))[0].tolist()
        [[0.0, 1.0], [0.5, 0.0]]
    """

    def cut(function: str, tree: Tree) -> Units:
        leaves = _measured(tree)
        depths = _stack_depths(function, stack_axes, tree)
        axes = [tuple(range(n, np.ndim(x))) for n, x in zip(depths, leaves, strict=True)]
        return _units_within_leaves(leaves, axes)._replace(is_rms=rms)

    return Granularity(cut)


def axis(axis: int | Sequence[int] | None = None) -> Granularity:
    """Each row, column or filter of a leaf is a unit.

    Args:
        axis: the axes that a norm runs over. None takes the axes that `optax.adaptive_grad_clip`
            takes: all of a scalar or vector, 0 of rank 2 and 3, all but the last of rank 4 and
            5. Inside `shard_map` these axes must not be sharded.

    Returns:
        A granularity for `clip_by_norm`.

    Raises:
        TypeError: `axis` is neither None, an integer, nor a sequence of integers.
        ValueError: when traced, `axis` does not fit a leaf.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> clip = gcx.clip_by_norm(1.0, granularity=gcx.granularities.axis(-1))
        >>> grads = jnp.array([[3.0, 4.0], [0.5, 0.0]])
        >>> [[round(x, 4) for x in row] for row in clip.update(grads, None)[0].tolist()]
        [[0.6, 0.8], [0.5, 0.0]]
    """
    check_axis("axis", axis)

    def cut(function: str, tree: Tree) -> Units:
        pairs = [
            (_unit_axes(function, path, x, axis), x)
            for path, x in jax.tree_util.tree_leaves_with_path(tree)
            if is_measured(x)
        ]
        axes, leaves = zip(*pairs, strict=True) if pairs else ((), ())
        return _units_within_leaves(leaves, axes)._replace(is_local=True)

    return Granularity(cut)


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
        count=len(keys),
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
        """The leaves of this part; none of an empty list."""
        return [leaves[i] for i in self.positions] if leaves else []


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
        part = _units_within_leaves([leaves[i] for i in chosen], axes)
        parts.append(Part(chosen, part._replace(is_local=True)))
    return parts


def named_units(keys: Sequence[Any]) -> Units:
    """The groups that a mapping names, before a tree is known."""
    return Units((), (), len(keys), tuple(keys), is_scalar=True)


def unit_sizes(units: Units, leaves: Sequence[Array], axis_name: AxisName) -> Array:
    """By what a norm is divided: the root of the number of elements for an RMS, else one."""
    if not units.is_rms:
        return jnp.ones(())
    sizes = np.ones(units.count)
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
    return Units(tuple(map(_all_axes, leaves)), (0,) * len(leaves), 1, is_scalar=True)


def leaf_units(leaves: Sequence[Any]) -> Units:
    """Each leaf is a unit."""
    return _units_within_leaves(leaves, list(map(_all_axes, leaves)))


def take_units(vector: Array, units: Sequence[int]) -> Array:
    """The entries of some units: a scalar if all are one, else a vector."""
    first, last = units[0], units[-1]
    if all(unit == first for unit in units):
        return vector[first]
    if list(units) == list(range(first, last + 1)):
        return lax.slice(vector, (first,), (last + 1,))
    return vector[np.asarray(units)]


def spread_over_leaves(vector: Array, units: Units, leaves: Sequence[Array]) -> list[Array]:
    """The entries of the units of each leaf, shaped to broadcast; ones where it is left alone."""
    spread: list[Array] = []
    for x, axes, first in zip(leaves, units.axes, units.first, strict=True):
        if axes is None:
            spread.append(jnp.ones((), vector.dtype))
            continue
        shape = [1 if axis in axes else n for axis, n in enumerate(np.shape(x))]
        rows = math.prod(shape)
        entries = take_units(vector, range(first, first + rows)) if rows else vector[:0]
        entries = constrain_replicated(entries, x)
        spread.append(entries.reshape(shape if rows != 1 else ()))
    return spread


def unit_shape(x: Any, axes: Sequence[int]) -> tuple[int, ...]:
    """The shape that indexes the units of a leaf."""
    return tuple(n for i, n in enumerate(np.shape(x)) if i not in axes)


def _measured(tree: Tree) -> list[Any]:
    """The measured leaves for their shapes; in `init` they may be placeholders."""
    return [x for x in jax.tree.leaves(tree) if is_measured(x)]


def _all_axes(x: Any) -> tuple[int, ...]:
    return tuple(range(np.ndim(x)))


def _units_within_leaves(leaves: Sequence[Any], axes: Sequence[tuple[int, ...]]) -> Units:
    """Each leaf has units of its own, their norms running over the given axes."""
    counts = [math.prod(unit_shape(x, over)) for x, over in zip(leaves, axes, strict=True)]
    bounds = np.cumsum([0, *counts], dtype=int).tolist()
    return Units(tuple(axes), tuple(bounds[:-1]), bounds[-1])


def _stack_depths(function: str, stack_axes: Any, tree: Tree) -> list[int]:
    hint = "Give the number of leading axes that index layers, 0 for an ordinary leaf."
    per_leaf = broadcast_prefix(function, "stack_axes", stack_axes, "updates", tree)
    depths: list[int] = []
    for depth, (path, x) in zip(per_leaf, jax.tree_util.tree_leaves_with_path(tree), strict=True):
        check_static(function, "stack_axes", depth)
        check_count(function, "stack_axes", depth, hint, low=0)
        if is_measured(x):
            if int(depth) > np.ndim(x):
                got = f"{depth} for {describe(x)} at {leaf_path('updates', path)}"
                raise ValueError(error_message(function, "stack_axes", "<= the rank", got, hint))
            depths.append(int(depth))
    return depths


def _unit_axes(function: str, path: Any, x: Any, axis: Any) -> tuple[int, ...]:
    """The axes that the norm of a unit runs over."""
    rank = np.ndim(x)
    if axis is not None:
        axes = (axis,) if np.ndim(axis) == 0 else tuple(axis)
        if any(not -rank <= a < rank for a in axes) or len({a % rank for a in axes}) < len(axes):
            rule = f"distinct axes of every leaf, in [{-rank}, {rank})"
            got = f"{axis} for {describe(x)} at {leaf_path('updates', path)}"
            hint = "Treat leaves of another rank apart, with `optax.masked` or `optax.partition`."
            raise ValueError(error_message(function, "axis", rule, got, hint))
        return tuple(sorted(int(a) % rank for a in axes))
    if sum(n != 1 for n in np.shape(x)) <= 1:  # scalars and vectors: the whole leaf
        return tuple(range(rank))
    # Input axes of linear layers (IO), of attention projections, of HWIO and DHWIO filters.
    known = {2: (0,), 3: (0,), 4: (0, 1, 2), 5: (0, 1, 2, 3)}
    if rank not in known:
        rule = "given for leaves of more than 5 axes"
        got = f"None for {describe(x)} at {leaf_path('updates', path)}"
        hint = "Pass the axes that the norm of a unit runs over."
        raise ValueError(error_message(function, "axis", rule, got, hint))
    return known[rank]
