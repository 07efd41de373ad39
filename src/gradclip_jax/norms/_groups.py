"""Norm groups, which are sets of elements that share a norm, and numbers for each group."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .._devices import broadcast_scalar, map_arrays, reduce_arrays
from .._types import Array, Scalar, Tree
from ._mesh import replicated, reshard_like

Axes: TypeAlias = tuple[int, ...]


class NormGroups(NamedTuple):
    """A partition of the elements of a tree into groups; one norm is computed for each group.

    Attributes:
        group_of_leaf: For each leaf, the index of its norms in `PerGroup.arrays`; None if the leaf
            has no norm.
        num_arrays: Number of arrays in `PerGroup.arrays`.
        labels: Labels of groups of leaves.
        axes: If groups are slices, the axes of each leaf over which a norm is computed. None if
            groups consist of whole leaves.
        is_local: Whether norms are computed without communication inside `shard_map`.
    """

    group_of_leaf: tuple[int | None, ...]
    num_arrays: int
    labels: tuple[Hashable, ...] = ()
    axes: tuple[Axes, ...] | None = None
    is_local: bool = False

    def num_norms(self, leaves: Sequence[Array]) -> int:
        """Return the number of norm groups of a tree with these inexact leaves."""
        if self.axes is None:
            return self.num_arrays
        return sum(map(num_slices, leaves, self.axes))

    def of_stacks(self, stacks: Sequence[Sequence[int]]) -> NormGroups:
        """Return the norm groups after stacking leaves.

        `stacks` contains the indices of the leaves in each stack.

        The leaves of a stack belong to the same norm group, or have the same slices.
        """
        if self.axes is None:
            group_of_stack = tuple([self.group_of_leaf[first] for first, *_ in stacks])
            return self._replace(group_of_leaf=group_of_stack)
        # A stack has a new axis 0 that indexes its leaves.
        axes = [tuple(a + (len(rest) > 0) for a in self.axes[first]) for first, *rest in stacks]
        return slice_groups(axes, is_local=self.is_local)


def tree_groups(leaves: Sequence[Array], tree: Tree = None) -> NormGroups:
    """Define one norm group with all leaves."""
    return NormGroups((0,) * len(leaves), 1)


def leaf_groups(leaves: Sequence[Array], tree: Tree = None) -> NormGroups:
    """Define one norm group for each leaf."""
    return slice_groups([tuple(range(np.ndim(x))) for x in leaves])


def slice_groups(axes: Sequence[Axes], *, is_local: bool = False) -> NormGroups:
    """Define one norm group for each slice of each leaf, such as its layers or rows."""
    index = tuple(range(len(axes)))
    return NormGroups(index, len(axes), axes=tuple(axes), is_local=is_local)


def num_slices(x: Array, axes: Axes) -> int:
    """Return the number of norms of a leaf if each norm is computed over the given axes."""
    return math.prod(n for i, n in enumerate(np.shape(x)) if i not in axes)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["groups"])
@dataclasses.dataclass(frozen=True)
class PerGroup:
    """One number for each norm group, such as its norm, threshold or factor.

    Attributes:
        arrays: One scalar per group, if groups consist of whole leaves. Otherwise one array per
            leaf, with a number per slice, which broadcasts against the leaf.
        groups: The norm groups.
    """

    arrays: list[Array]
    groups: NormGroups

    def map(self, fun: Callable[..., Array], *others: PerGroup | Scalar) -> PerGroup:
        """Apply an elementwise function to the numbers.

        A scalar in `others` is used for every group.
        """
        columns = [x.arrays if isinstance(x, PerGroup) else [x] * len(self.arrays) for x in others]
        return PerGroup(map_arrays(fun, self.arrays, *columns), self.groups)

    def min(self, initial: float) -> Scalar:
        """Return the smallest number of all groups, or `initial` if that is smaller."""
        least = functools.partial(jnp.min, initial=initial)
        return reduce_arrays(least, jnp.minimum, self.arrays or [jnp.zeros(0)])

    def count(self, condition: Callable[[Array], Array]) -> Scalar:
        """Count the numbers that satisfy a condition; the count has the dtype of the numbers."""

        def count(numbers: Array) -> Array:
            return jnp.sum(condition(numbers), dtype=numbers.dtype)

        return reduce_arrays(count, jnp.add, self.arrays or [jnp.zeros(0)])

    @property
    def is_scalar(self) -> bool:
        """Whether there is only one norm group, whose number is a scalar."""
        return len(self.arrays) == 1 and not self.arrays[0].ndim

    def for_leaves(self, leaves: Sequence[Array]) -> Sequence[Array | None]:
        """Return, for each leaf, an array that can be broadcast to its shape.

        None if it has no group.
        """
        index = self.groups.group_of_leaf
        if len(self.arrays) != 1:
            return [None if group is None else self.arrays[group] for group in index]
        copies = broadcast_scalar(self.arrays[0], leaves)
        return [None if group is None else x for group, x in zip(index, copies, strict=True)]

    def by_label(self) -> dict[str, Scalar]:
        """Return a dictionary from the label of each group to its number."""
        return dict(zip(map(str, self.groups.labels), self.arrays, strict=False))

    def vector(self) -> Array:
        """Return all numbers as a vector, or a single number as a scalar."""
        flat = [replicated(x).reshape(-1) for x in self.arrays] or [jnp.zeros(0)]
        vector = jnp.concatenate(flat)
        return vector.reshape(()) if vector.size == 1 else vector


def split(vector: Array, like: Sequence[Array]) -> list[Array]:
    """Split a vector, such as the result of `PerGroup.vector`, into arrays shaped like `like`."""
    parts = jnp.split(vector.reshape(-1), np.cumsum([x.size for x in like], dtype=int)[:-1])
    # If there are no arrays, `jnp.split` returns one empty part.
    return [reshard_like(part.reshape(x.shape), x) for part, x in zip(parts, like, strict=False)]
