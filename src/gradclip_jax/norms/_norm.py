"""Norms of trees, groups, leaves and slices, and their derivative."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Final, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .._checks import check_ord
from .._devices import MAX_STACKED_SIZE, fusion_barrier, groups_of_type, joined, map_arrays, stack
from .._errors import public
from .._types import Array, AxisName, HostArray, Number, Order, Scalar, Tree
from ._leaves import checked_leaves, is_measured, wide_dtype
from ._mesh import max_over, replica_count, shard_axes, sum_over

Axes: TypeAlias = tuple[int, ...]
Norms: TypeAlias = list[Array]
"""One array per unit, or per leaf with several units; each broadcasts against its leaves."""

SCALE: Final = 2.0**-8
"""Scale by which elements are multiplied before they are squared.

A float32 norm up to 4e21 is therefore finite, and elements below 3e-17 may count as zero. The norm
of N elements is correct to 1e-6 if it is above 2e-14 sqrt(N), or if no element is below 3e-17.
"""


class Units(NamedTuple):
    """Assignment of elements to norms. A unit is a set of elements that share one norm.

    Attributes:
        entries: For each measured leaf, the index of its norms; None if it belongs to no unit.
        size: Number of arrays of norms.
        names: Labels of groups of leaves.
        axes: Axes of each leaf over which one norm is computed. They are kept with size 1, except
            that the norm over all axes is a scalar. None if all units consist of whole leaves.
        is_local: Whether norms are computed without communication inside `shard_map`.
        is_rms: Whether thresholds limit root mean squares instead of norms.
    """

    entries: tuple[int | None, ...]
    size: int
    names: tuple[Hashable, ...] = ()
    axes: tuple[Axes, ...] | None = None
    is_local: bool = False
    is_rms: bool = False


def tree_units(leaves: Sequence[Array], tree: Tree = None) -> Units:
    """Define one norm over all leaves."""
    return Units((0,) * len(leaves), 1)


def leaf_units(leaves: Sequence[Array], tree: Tree = None) -> Units:
    """Define one norm for each leaf."""
    return slice_units([tuple(range(np.ndim(x))) for x in leaves])


def slice_units(axes: Sequence[Axes], *, is_local: bool = False, is_rms: bool = False) -> Units:
    """Define one norm for each slice of each leaf, such as its layers or rows."""
    entries = tuple(range(len(axes)))
    return Units(entries, len(axes), axes=tuple(axes), is_local=is_local, is_rms=is_rms)


def num_slices(x: Array, axes: Axes) -> int:
    """Return the number of norms of a leaf that is reduced over the given axes."""
    return math.prod(n for i, n in enumerate(np.shape(x)) if i not in axes)


@public
@jax.named_scope("global_norm")
def global_norm(tree: Tree, *, ord: Order | None = None, axis_name: AxisName = None) -> Scalar:
    """Compute the norm of all elements of a tree as one vector.

    The norm is the root of the sum of squares, the sum of magnitudes for `ord=1`, or the largest
    magnitude for `ord=inf`.

    | tree | norm |
    | --- | --- |
    | float16 `[300, 400]` | 500, although its squares overflow float16 |
    | float32 `[1e20, 1e20]`, `[3e-16, 4e-16]` | 1.4142e20, 5e-16 |
    | float32, a 2-norm up to 4e21, no element below 3e-17 | correct to 1e-6 |
    | float32, a 2-norm of N elements from 2e-14 sqrt(N) to 4e21 | correct to 1e-6 |
    | float32, elements below 3e-17 | may count as zero in a 2-norm |
    | float32, a 2-norm above 5e21 | inf |
    | empty, or only `None`, masked or zero-size leaves | 0 |
    | any NaN | NaN; inf for `ord=inf` |
    | an infinity and no NaN | inf |
    | sharded | the norm of the whole tree; see `axis_name` |
    | sharded, `axis_name=()` | the norm of the shards on this device |

    The derivative is zero where the norm is zero or not finite.

    Args:
        tree: Pytree of floating-point or complex leaves, in the units of the gradients.
        ord: Order of the norm: 1, 2 or inf. None means 2.
        axis_name: Mapped axes over which every leaf is sharded, required where the array's type
            does not carry the sharding (`pmap`, or `shard_map` with `check_vma=False`). `()`
            computes the norm on each device alone, without communication.

    Returns:
        The norm, float32[], or float64[] if a leaf is float64 or complex128.

    Raises:
        TypeError: If a leaf has an integer or boolean dtype; the message contains its path.
        ValueError: If `ord` is not 1, 2 or inf.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> float(gcx.global_norm({"w": jnp.float16([300, 0]), "b": jnp.float16([400])}))
        500.0
    """
    leaves = checked_leaves("tree", tree).arrays
    return norm_of_leaves(leaves, check_ord(ord), axis_name)


@public
@jax.named_scope("leaf_norms")
def leaf_norms(tree: Tree, *, ord: Order | None = None, axis_name: AxisName = None) -> Tree:
    """Compute the norm of each leaf; see `global_norm`.

    Args:
        tree: Pytree of floating-point or complex leaves, in the units of the gradients.
        ord: Order of the norm: 1, 2 or inf. None means 2.
        axis_name: See `global_norm`.

    Returns:
        A tree of scalars with the same structure. All scalars are float32, or float64 if any leaf
        is float64 or complex128. The norm of a float0 leaf is 0.

    Raises:
        TypeError: If a leaf has an integer or boolean dtype; the message contains its path.
        ValueError: If `ord` is not 1, 2 or inf.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> norms = gcx.leaf_norms({"w": jnp.array([3.0, 4.0]), "b": jnp.array(-2.0)})
        >>> float(norms["w"]), float(norms["b"])
        (5.0, 2.0)
    """
    leaves = checked_leaves("tree", tree).arrays
    norms = iter(unit_norms(leaves, leaf_units(leaves), check_ord(ord), axis_name))
    return jax.tree.map(lambda x: next(norms) if is_measured(x) else jnp.float32(0), tree)


@public
@jax.named_scope("combine_norms")
def combine_norms(norms: Sequence[Number], *, ord: Order | None = None) -> Scalar:
    """Combine the norms of disjoint parts of a model into the norm of the whole model.

    The result is the root of the sum of squares, the sum for `ord=1`, or the largest norm for
    `ord=inf`. Use this function if a model is distributed over several programs, such as pipeline
    stages in separate processes. Each process computes `global_norm` of its part, the processes
    exchange these scalars, and each process clips its part with
    `clip_grad_norm(grads, max_norm, norm=whole)`. A parameter that two stages share must be
    included only once.

    | norms | whole |
    | --- | --- |
    | none | 0 |
    | one is NaN | NaN; inf for `ord=inf` |
    | one is infinite, none is NaN | inf |

    Args:
        norms: Norms of the parts, scalars or arrays, all of the same order.
        ord: Order of the norms: 1, 2 or inf. None means 2.

    Returns:
        The norm, float32[], or float64[] if a norm is float64.

    Raises:
        TypeError: If a norm is not a floating-point number.
        ValueError: If `ord` is not 1, 2 or inf.

    Examples:
        >>> import gradclip_jax as gcx
        >>> float(gcx.combine_norms([3.0, 4.0]))
        5.0
    """
    leaves = checked_leaves("norms", norms, real=True).arrays
    return norm_of_leaves(leaves, check_ord(ord), None)


def norm_of_leaves(leaves: Sequence[Array], ord: float, axis_name: AxisName) -> Scalar:
    """Compute one norm of all leaves."""
    return unit_norms(list(leaves), tree_units(leaves), ord, axis_name)[0]


def norm_dtype(leaves: Iterable[Array]) -> DTypeLike:
    """float32, or float64 if a leaf is float64 or complex128."""
    return jnp.float64 if any(jnp.finfo(x.dtype).bits == 64 for x in leaves) else jnp.float32


def magnitude(x: Array, dtype: DTypeLike) -> Array:
    """`|x|` in float32 or float64."""
    return jnp.abs(x.astype(wide_dtype(x.dtype, dtype))).astype(dtype)


def reduce_axes(reduce: Callable[..., Array], x: Array, axes: Sequence[int]) -> Array:
    """Reduce the given axes with `keepdims=True`; return a scalar if these are all axes."""
    return reduce(x, axis=tuple(axes), keepdims=len(axes) < x.ndim)


def squares(x: Array, dtype: DTypeLike, scale: float | Array = SCALE) -> Array:
    """Return `(scale * |x|)^2`."""
    # XLA rewrites the product to `x^2 * scale^2`, which overflows above 1.8e19, if `scale` is a
    # constant or a broadcast scalar. The barrier hides the constant. (Alternatives in JAX 0.10.2: a
    # minimum between the products prevents XLA on GPU from fusing them with the backward pass,
    # which moves 7 % more bytes for PPO; LLVM also rewrites `x * (x * scale^2)`.)
    scale = fusion_barrier(jnp.asarray(scale, dtype)) if isinstance(scale, float) else scale
    x = magnitude(x, dtype) if jnp.iscomplexobj(x) else x.astype(dtype)
    return jnp.square(x * scale)


@functools.partial(jax.jit, static_argnums=(1, 2))
def sum_of_squares(
    x: Array, axes: Sequence[int], dtype: DTypeLike, scale: float | Array = SCALE
) -> Array:
    """Return `sum((scale * |x|)^2)` over the given axes; see `reduce_axes`."""
    return reduce_axes(jnp.sum, squares(x, dtype, scale), axes)


@jax.jit
def norm_of_squares(total: Array, scale: float | Array = SCALE) -> Array:
    """Compute a norm from a sum of `squares`."""
    return jnp.sqrt(total) / scale


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def unit_norms(leaves: list[Array], units: Units, ord: float, axis_name: AxisName) -> Norms:
    """Compute all norms with a single all-reduce, and read each large leaf once."""
    dtype = norm_dtype(leaves)
    if units.axes is None:  # the norms of slices of a stack would have to be separated again
        units, (leaves,), _ = stack_small(units, leaves)
    total = functools.partial(totals, units=units, axis_name=axis_name)
    if ord == 2:
        once = fusion_barrier(jnp.asarray(SCALE, dtype))
        sums = total(functools.partial(sum_of_squares, dtype=dtype, scale=once), leaves)
        # XLA:CPU would repeat a division by a constant in every kernel that reads the norm.
        return map_arrays(functools.partial(norm_of_squares, scale=once), sums)

    def of_leaf(x: Array, axes: Axes) -> Array:
        sizes = magnitude(x, dtype)
        if ord == 1:
            return reduce_axes(jnp.sum, sizes, axes)
        # A maximum on GPU and an all-reduce may drop NaN.
        sizes = jnp.where(jnp.isnan(sizes), jnp.inf, sizes)
        return reduce_axes(functools.partial(jnp.max, initial=0), sizes, axes)

    return total(of_leaf, leaves, is_sum=ord == 1)


@unit_norms.defjvp
def _unit_norms_jvp(
    units: Units, ord: float, axis_name: AxisName, primals: Tree, tangents: Tree
) -> tuple[Norms, Norms]:
    """Set the derivative to zero where a norm is zero or not finite, to avoid NaN."""
    (leaves,), (directions,) = primals, tangents
    norms, dtype = unit_norms(leaves, units, ord, axis_name), norm_dtype(leaves)
    total = functools.partial(totals, units=units, axis_name=axis_name)

    def by_leaf(values: Norms) -> Norms:  # a leaf without a norm receives any value
        return [values[i or 0] for i in units.entries]

    def num_largest(x: Array, axes: Axes, norm: Array) -> Array:
        return reduce_axes(jnp.sum, (magnitude(x, dtype) == norm).astype(dtype), axes)

    ties = total(num_largest, leaves, by_leaf(norms)) if math.isinf(ord) else norms

    def along(x: Array, axes: Axes, norm: Array, ties: Array, direction: Array) -> Array:
        wide = wide_dtype(x.dtype, dtype)
        x, is_regular = x.astype(wide), (norm > 0) & jnp.isfinite(norm)
        if ord == 2:
            slope = x / jnp.where(is_regular, norm, 1).astype(wide)
        else:
            slope = jnp.sign(x)
            if math.isinf(ord):
                slope *= ((jnp.abs(x) == norm) / jnp.maximum(ties, 1)).astype(wide)
        product = jnp.conj(jnp.where(is_regular, slope, 0)) * direction.astype(wide)
        return reduce_axes(jnp.sum, jnp.real(product).astype(dtype), axes)

    return norms, total(along, leaves, by_leaf(norms), by_leaf(ties), directions)


def unit_sizes(norms: Norms, leaves: list[Array], units: Units, axis_name: AxisName) -> Norms:
    """Convert the norms of all units to root mean squares if `units.is_rms`."""

    def mean(norm: Array, x: Array, axes: Axes) -> Array:
        num_shards = replica_count(frozenset(), shard_axes(x, axis_name))
        root = math.sqrt(max(num_shards * math.prod(x.shape[i] for i in axes), 1))
        # XLA:CPU would repeat a division by a constant in every kernel that reads the result.
        return norm / fusion_barrier(jnp.asarray(root, norm.dtype))

    return list(map(mean, norms, leaves, units.axes or ())) if units.is_rms else norms


def stack_small(
    units: Units, *columns: Sequence[Array]
) -> tuple[Units, list[list[Array]], HostArray | slice]:
    """Stack small leaves that contribute to the same norm, or that have a norm for each slice.

    Returns the units of the stacks, the stacks of each column, and the index that sorts the norms
    of slices in the order of the leaves.
    """
    leaves = columns[0]
    sizes = (i if x.size > MAX_STACKED_SIZE else None for i, x in enumerate(leaves))
    labels = list(zip(units.axes or units.entries, sizes, strict=True))
    groups = groups_of_type(*columns, labels=labels)
    stacks = [[stack([x[i] for i in group]) for group in groups] for x in columns]
    if units.axes is None:
        entries = tuple(units.entries[group[0]] for group in groups)
        return units._replace(entries=entries), stacks, slice(None)
    axes = [tuple(a + (len(group) > 1) for a in units.axes[group[0]]) for group in groups]
    counts = list(map(num_slices, leaves, units.axes))
    rows = np.split(np.arange(sum(counts)), np.cumsum(counts)[:-1])
    order = np.argsort([row for group in groups for i in group for row in rows[i]])
    return slice_units(axes, is_local=units.is_local), stacks, order


def rows_of_sums(
    terms: Callable[..., Array], *columns: Sequence[Array], units: Units, axis_name: AxisName
) -> Array:
    """Compute sums like `totals`, with small leaves as stacks; return a row for each norm.

    `terms(leaf, axes, *columns)` returns rows of two sums.
    """
    stacked, stacks, order = stack_small(units, *columns)
    rows = totals(terms, *stacks, units=stacked, axis_name=axis_name)
    zeros = jnp.zeros((1, 2), norm_dtype(columns[0]))  # of a unit without leaves
    return jnp.concatenate([zeros[:0], *(x if x.ndim else zeros for x in rows)])[order]


def totals(
    terms: Callable[..., Array],
    leaves: Sequence[Array],
    *columns: Sequence[Array],
    units: Units,
    axis_name: AxisName,
    is_sum: bool = True,
) -> Norms:
    """Compute the sum or the maximum over the leaves that share each norm, with one all-reduce.

    `terms(leaf, axes, *columns)` is the contribution of a leaf to its unit.
    """
    shards = [shard_axes(x, () if units.is_local else axis_name) for x in leaves]
    everywhere = frozenset[str]().union(*shards)
    axes = units.axes or [tuple(range(x.ndim)) for x in leaves]
    parts: list[list[Array]] = [[] for _ in range(units.size)]
    rows = zip(units.entries, shards, map(terms, leaves, axes, *columns), strict=True)
    for i, shard, part in rows:
        if i is not None:  # count a replicated leaf once
            is_repeated = is_sum and shard != everywhere
            parts[i].append(part / replica_count(shard, everywhere) if is_repeated else part)
    zero = jnp.zeros((), norm_dtype(leaves))
    entries = [joined(of_unit or [zero], is_sum=is_sum) for of_unit in parts]
    if not everywhere:
        return entries
    vector = jnp.concatenate([x.reshape(-1) for x in entries])
    vector = sum_over(vector, everywhere) if is_sum else max_over(vector, everywhere)
    return split(vector, entries)


def split(vector: Array, like: Sequence[Array]) -> list[Array]:
    """Split a vector into parts with the shapes of the given arrays."""
    parts = jnp.split(vector.reshape(-1), np.cumsum([x.size for x in like], dtype=int)[:-1])
    return [part.reshape(x.shape) for part, x in zip(parts, like, strict=False)]
