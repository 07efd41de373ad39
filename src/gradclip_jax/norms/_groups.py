"""Norm groups, which are sets of elements that share a norm, and one number for each of them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .._devices import (
    MAX_STACKED_SIZE,
    broadcast_scalar,
    map_arrays,
    reduce_arrays,
    stack,
    stackable,
    tree_reduce,
)
from .._types import Array, AxisName, Scalar, Tree
from ._leaves import norm_dtype
from ._mesh import max_over, replica_count, replicated, reshard_like, shard_axes, sum_over

Axes: TypeAlias = tuple[int, ...]


class NormGroups(NamedTuple):
    """Which elements of the inexact leaves of a tree share a norm.

    Attributes:
        group_of_leaf: For each leaf, the index of its groups in `PerGroup.arrays`; None if the leaf
            belongs to no group.
        size: Number of arrays in `PerGroup.arrays`.
        labels: Labels of groups of leaves.
        axes: The axes of each leaf over which the norm of a slice is computed, if groups are
            slices; None if groups consist of whole leaves.
        is_local: Whether norms are computed without communication inside `shard_map`.
        is_rms: Whether thresholds limit root mean squares instead of norms.
    """

    group_of_leaf: tuple[int | None, ...]
    size: int
    labels: tuple[Hashable, ...] = ()
    axes: tuple[Axes, ...] | None = None
    is_local: bool = False
    is_rms: bool = False

    def count(self, leaves: Sequence[Array]) -> int:
        """Return the number of norm groups of a tree with these inexact leaves."""
        if self.axes is None:
            return self.size
        return sum(map(num_slices, leaves, self.axes))

    def axes_of(self, index: int, leaf: Array) -> Axes:
        """Return the axes over which each norm of the leaf with this index is computed."""
        return tuple(range(leaf.ndim)) if self.axes is None else self.axes[index]


def tree_groups(leaves: Sequence[Array], tree: Tree = None) -> NormGroups:
    """Define one norm group with all leaves."""
    return NormGroups((0,) * len(leaves), 1)


def leaf_groups(leaves: Sequence[Array], tree: Tree = None) -> NormGroups:
    """Define one norm group for each leaf."""
    return slice_groups([tuple(range(np.ndim(x))) for x in leaves])


def slice_groups(
    axes: Sequence[Axes], *, is_local: bool = False, is_rms: bool = False
) -> NormGroups:
    """Define one norm group for each slice of each leaf, such as its layers or rows."""
    index = tuple(range(len(axes)))
    return NormGroups(index, len(axes), axes=tuple(axes), is_local=is_local, is_rms=is_rms)


def num_slices(x: Array, axes: Axes) -> int:
    """Return the number of norms of a leaf that is reduced over the given axes."""
    return math.prod(n for i, n in enumerate(np.shape(x)) if i not in axes)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["groups"])
@dataclasses.dataclass(frozen=True)
class PerGroup:
    """One number for each norm group, such as its norm, threshold or factor.

    Attributes:
        arrays: One scalar for each group of whole leaves, or for each leaf an array with one number
            for each slice, which broadcasts against the leaf.
        groups: The norm groups.
    """

    arrays: list[Array]
    groups: NormGroups

    def map(self, fun: Callable[..., Array], *others: PerGroup | Scalar) -> PerGroup:
        """Apply an elementwise function to the numbers of each group.

        All groups share those of `others` that are scalars.
        """
        columns = [x.arrays if isinstance(x, PerGroup) else [x] * len(self.arrays) for x in others]
        return PerGroup(map_arrays(fun, self.arrays, *columns), self.groups)

    def min(self, initial: float) -> Scalar:
        """Return the smallest number, at most `initial`."""
        if self.is_scalar:
            return jnp.minimum(self.arrays[0], initial)
        least = functools.partial(jnp.min, initial=initial)
        return reduce_arrays(least, jnp.minimum, self.arrays or [jnp.zeros(0)])

    def count(self, condition: Callable[[Array], Array]) -> Scalar:
        """Return how many numbers satisfy a condition, as a number of the same dtype."""

        def count(numbers: Array) -> Array:
            return jnp.sum(condition(numbers), dtype=numbers.dtype)

        return reduce_arrays(count, jnp.add, self.arrays or [jnp.zeros(0)])

    @property
    def is_scalar(self) -> bool:
        """Whether there is one norm group, whose number is a scalar."""
        return len(self.arrays) == 1 and not self.arrays[0].ndim

    def for_leaves(self, leaves: Sequence[Array]) -> Sequence[Array | None]:
        """Return the numbers of each leaf, which broadcast against it; None without a group."""
        index = self.groups.group_of_leaf
        if len(self.arrays) != 1:
            return [None if group is None else self.arrays[group] for group in index]
        copies = broadcast_scalar(self.arrays[0], leaves)
        return [None if group is None else x for group, x in zip(index, copies, strict=True)]

    def by_label(self) -> dict[str, Scalar]:
        """Return the number of each group with a label."""
        return dict(zip(map(str, self.groups.labels), self.arrays, strict=False))

    def vector(self) -> Array:
        """Return all numbers as a vector, or a single number as a scalar."""
        flat = [replicated(x).reshape(-1) for x in self.arrays] or [jnp.zeros(0)]
        vector = jnp.concatenate(flat)
        return vector.reshape(()) if vector.size == 1 else vector

    def with_vector(self, vector: Array) -> PerGroup:
        """Replace all numbers by those of a vector in the order of `vector()`."""
        return PerGroup(split(vector, self.arrays), self.groups)


def split(vector: Array, like: Sequence[Array]) -> list[Array]:
    """Split a vector into parts with the shapes and shardings of the given arrays."""
    parts = jnp.split(vector.reshape(-1), np.cumsum([x.size for x in like], dtype=int)[:-1])
    return [reshard_like(part.reshape(x.shape), x) for part, x in zip(parts, like, strict=False)]


def reduce_axes(reduce: Callable[..., Array], x: Array, axes: Sequence[int]) -> Array:
    """Reduce the given axes with `keepdims=True`; return a scalar if these are all axes."""
    return reduce(x, axis=tuple(axes), keepdims=len(axes) < x.ndim)


def reduce_groups(
    terms: Callable[..., Array],
    leaves: Sequence[Array],
    *columns: Sequence[Array],
    groups: NormGroups,
    axis_name: AxisName,
    is_sum: bool = True,
) -> list[Array]:
    """Compute the sum or maximum over the leaves of each norm group, with at most one all-reduce.

    Args:
        terms: Function `(leaf, axes, *others)` that reduces a leaf over axes to one number for each
            slice, or to several numbers along a last axis.
        leaves: Inexact leaves.
        *columns: Other arrays for each leaf, which are passed to `terms`.
        groups: The norm groups of the leaves.
        axis_name: Mapped axes over which every leaf is sharded.
        is_sum: Whether to sum the terms of the leaves instead of returning the largest one.

    Returns:
        An array like `PerGroup.arrays` for the norm groups.
    """
    leaf_axes = () if groups.is_local else axis_name
    shards = [shard_axes(x, leaf_axes) for x in leaves]
    all_axes = frozenset[str]().union(*shards)
    parts: list[list[Array]] = [[] for _ in range(groups.size)]
    for i, (x, *others) in enumerate(zip(leaves, *columns, strict=True)):
        group = groups.group_of_leaf[i]
        if group is None:
            continue
        part = terms(x, groups.axes_of(i, x), *others)
        if is_sum and shards[i] != all_axes:  # each replica of this leaf is part of the sum
            part = part / replica_count(shards[i], all_axes)
        parts[group].append(part)
    zero = jnp.zeros((), norm_dtype(leaves))  # for a group without leaves
    reduce = jnp.sum if is_sum else jnp.max
    totals = [tree_reduce(reduce, terms_of_group or [zero]) for terms_of_group in parts]
    if not all_axes:
        return totals
    vector = jnp.concatenate([x.reshape(-1) for x in totals])
    return split(sum_over(vector, all_axes) if is_sum else max_over(vector, all_axes), totals)


class Stacks(NamedTuple):
    """Leaves that are reduced by one kernel, because they are small and have the same type.

    Attributes:
        members: Indices of the leaves in each stack. A large leaf is alone.
        groups: Norm groups of the stacks.
        columns: For each column of arrays, its stacks.
    """

    members: list[list[int]]
    groups: NormGroups
    columns: list[list[Array]]


def stack_small(groups: NormGroups, *columns: Sequence[Array]) -> Stacks:
    """Stack small leaves of one type that belong to the same norm group, or have the same slices.

    Each column contains an array for each leaf.
    """
    labels = groups.group_of_leaf if groups.axes is None else groups.axes
    members = stackable(*columns, labels=labels, max_size=MAX_STACKED_SIZE)
    stacks = [stack(column, members) for column in columns]
    if groups.axes is None:
        group_of_stack = tuple([groups.group_of_leaf[first] for first, *_ in members])
        return Stacks(members, groups._replace(group_of_leaf=group_of_stack), stacks)
    # The leaves of a stack are indexed by a new axis 0.
    axes = [tuple(a + (len(x) > 1) for a in groups.axes[x[0]]) for x in members]
    return Stacks(members, slice_groups(axes, is_local=groups.is_local), stacks)


def table_of_sums(
    terms: Callable[..., Array], *columns: Sequence[Array], groups: NormGroups, axis_name: AxisName
) -> Array:
    """Return a table with two sums over the leaves of each norm group, float[groups, 2].

    `terms(leaf, axes, *others)` returns two sums for each slice of a leaf, float[slices, 2]. The
    first column contains the leaves.
    """
    leaves = columns[0]
    stacks = stack_small(groups, *columns)
    parts = reduce_groups(terms, *stacks.columns, groups=stacks.groups, axis_name=axis_name)
    zeros = jnp.zeros((1, 2), norm_dtype(leaves))  # for a group without leaves
    table = jnp.concatenate([zeros[:0], *(x if x.ndim else zeros for x in parts)])
    if groups.axes is None or not leaves:
        return table
    # A leaf has one row for each slice. Sort the rows, which are in the order of the stacks.
    ends = np.cumsum([num_slices(x, axes) for x, axes in zip(leaves, groups.axes, strict=True)])
    rows_of_leaf = np.split(np.arange(ends[-1]), ends[:-1])
    order = np.concatenate([rows_of_leaf[i] for leaves in stacks.members for i in leaves])
    return table[np.argsort(order)]
