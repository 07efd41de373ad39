"""Compute norms and other reductions for groups of elements."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .._devices import MAX_STACKED_SIZE, map_arrays, stack, stackable, tree_reduce
from .._types import Array, AxisName, Scalar, Tree
from ._groups import Axes, NormGroups, PerGroup, split, tree_groups
from ._leaves import norm_dtype, wide_dtype
from ._mesh import max_over, num_devices, shard_axes, sum_over


def norm_of_leaves(leaves: Sequence[Array], ord: float, axis_name: AxisName) -> Scalar:
    """Compute one norm of all leaves."""
    return group_norms(list(leaves), tree_groups(leaves), ord, axis_name).arrays[0]


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def group_norms(
    leaves: list[Array], groups: NormGroups, ord: float, axis_name: AxisName
) -> PerGroup:
    """Compute the norm of each group with at most one all-reduce, and read each leaf once."""
    if ord == 2:
        return _l2_norms(leaves, groups, axis_name)
    is_sum = ord == 1
    reduce = sum_of_magnitudes if is_sum else largest_magnitude
    terms = functools.partial(reduce, dtype=norm_dtype(leaves))
    return PerGroup(_reduce_stacked(terms, leaves, groups, axis_name, is_sum=is_sum), groups)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _l2_norms(leaves: list[Array], groups: NormGroups, axis_name: AxisName) -> PerGroup:
    """Compute the L2 norm of each group."""
    terms = functools.partial(sum_of_squares, dtype=norm_dtype(leaves))
    sums = _reduce_stacked(terms, leaves, groups, axis_name)
    return PerGroup(map_arrays(jnp.sqrt, sums), groups)


@_l2_norms.defjvp
def _l2_norms_jvp(
    groups: NormGroups, axis_name: AxisName, primals: Tree, tangents: Tree
) -> tuple[PerGroup, PerGroup]:
    """Set the derivative to zero where a norm is zero or not finite, to avoid NaN."""
    (leaves,), (directions,) = primals, tangents
    norms, dtype = _l2_norms(leaves, groups, axis_name), norm_dtype(leaves)
    by_leaf = [None if i is None else norms.arrays[i] for i in groups.group_of_leaf]

    def along(x: Array, axes: Axes, norm: Array, direction: Array) -> Array:
        wide = wide_dtype(x.dtype, dtype)
        is_regular = (norm > 0) & jnp.isfinite(norm)
        slope = x.astype(wide) / jnp.where(is_regular, norm, 1).astype(wide)
        product = jnp.conj(jnp.where(is_regular, slope, 0)) * direction.astype(wide)
        return reduce_axes(jnp.sum, jnp.real(product).astype(dtype), axes)

    columns = leaves, by_leaf, directions
    slopes = reduce_groups(along, *columns, groups=groups, axis_name=axis_name)
    return norms, PerGroup(slopes, groups)


@functools.partial(jax.jit, static_argnums=(1, 2))
def sum_of_squares(x: Array, axes: Sequence[int], dtype: DTypeLike) -> Array:
    """Return `sum(|x|^2)` over the given axes; see `reduce_axes`."""
    return reduce_axes(jnp.sum, squares(x, dtype), axes)


def sum_of_magnitudes(x: Array, axes: Sequence[int], dtype: DTypeLike) -> Array:
    """Return `sum(|x|)` over the given axes; see `reduce_axes`."""
    return reduce_axes(jnp.sum, magnitude(x, dtype), axes)


def largest_magnitude(x: Array, axes: Sequence[int], dtype: DTypeLike) -> Array:
    """Return `max(|x|)` over the given axes, or infinity for NaN; see `reduce_axes`."""
    sizes = magnitude(x, dtype)
    # A maximum on GPU and an all-reduce may drop NaN.
    sizes = jnp.where(jnp.isnan(sizes), jnp.inf, sizes)
    return reduce_axes(functools.partial(jnp.max, initial=0), sizes, axes)


def squares(x: Array, dtype: DTypeLike) -> Array:
    """Return `|x|^2` in float32 or float64."""
    return jnp.square(magnitude(x, dtype) if jnp.iscomplexobj(x) else x.astype(dtype))


def magnitude(x: Array, dtype: DTypeLike) -> Array:
    """Return `|x|` in float32 or float64."""
    return jnp.abs(x.astype(wide_dtype(x.dtype, dtype))).astype(dtype)


def reduce_axes(reduce: Callable[..., Array], x: Array, axes: Sequence[int]) -> Array:
    """Reduce the given axes with `keepdims=True`; return a scalar if these are all axes."""
    return reduce(x, axis=tuple(axes), keepdims=len(axes) < x.ndim)


def reduce_groups(
    terms: Callable[..., Array],
    leaves: Sequence[Array],
    *columns: Sequence[Any],
    groups: NormGroups,
    axis_name: AxisName,
    is_sum: bool = True,
) -> list[Array]:
    """Compute the sum or maximum over the leaves of each norm group, with at most one all-reduce.

    Args:
        terms: Function `(leaf, axes, *others)` that reduces a leaf over axes to one number for each
            slice, or to several numbers along a last axis.
        leaves: Inexact leaves.
        *columns: Other values for each leaf, which are passed to `terms`.
        groups: The norm groups of the leaves.
        axis_name: Mapped axes over which every leaf is sharded.
        is_sum: Whether to sum the terms of the leaves instead of returning the largest one.

    Returns:
        One array for each entry of `PerGroup.arrays`.
    """
    leaf_axes = groups.axes or [tuple(range(x.ndim)) for x in leaves]
    mesh_axes = [shard_axes(x, () if groups.is_local else axis_name) for x in leaves]
    all_mesh_axes = frozenset[str]().union(*mesh_axes)
    parts: list[list[Array]] = [[] for _ in range(groups.num_arrays)]
    rows = zip(groups.group_of_leaf, leaf_axes, mesh_axes, leaves, *columns, strict=True)
    for group, axes, own_mesh_axes, x, *others in rows:
        if group is None:
            continue
        part = terms(x, axes, *others)
        if is_sum and own_mesh_axes != all_mesh_axes:  # the all-reduce adds all replicas
            part = part / num_devices(all_mesh_axes - own_mesh_axes)
        parts[group].append(part)
    zero = jnp.zeros((), norm_dtype(leaves))  # for a group without leaves
    reduce = jnp.sum if is_sum else jnp.max
    totals = [tree_reduce(reduce, group_parts or [zero]) for group_parts in parts]
    if not all_mesh_axes:
        return totals
    all_reduce = sum_over if is_sum else max_over
    vector = jnp.concatenate([x.reshape(-1) for x in totals])
    return split(all_reduce(vector, all_mesh_axes), totals)


def _reduce_stacked(
    terms: Callable[..., Array],
    leaves: list[Array],
    groups: NormGroups,
    axis_name: AxisName,
    *,
    is_sum: bool = True,
) -> list[Array]:
    """Reduce each norm group as `reduce_groups` does; small leaves of a group are stacked first."""
    # Slices are not stacked, because their norms would have to be unstacked again.
    if groups.axes is None:
        stacks = stackable(leaves, labels=groups.group_of_leaf, max_size=MAX_STACKED_SIZE)
        groups, leaves = groups.of_stacks(stacks), stack(leaves, stacks)
    return reduce_groups(terms, leaves, groups=groups, axis_name=axis_name, is_sum=is_sum)


def root_mean_squares(norms: PerGroup, leaves: Sequence[Array], axis_name: AxisName) -> PerGroup:
    """Divide the norm of each slice by the square root of its number of elements."""
    roots: list[Array] = []
    for x, axes, norm in zip(leaves, norms.groups.axes or (), norms.arrays, strict=True):
        num_shards = num_devices(shard_axes(x, axis_name))
        size = num_shards * math.prod(x.shape[i] for i in axes)
        roots.append(jnp.asarray(math.sqrt(max(size, 1)), norm.dtype))
    return norms.map(jnp.divide, PerGroup(roots, norms.groups))
