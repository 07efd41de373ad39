"""Norms of trees, groups, leaves and slices, and their derivative."""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import check_axis_name, check_bound, check_ord, is_traced
from .._devices import fusion_barrier, joined, map_arrays
from .._errors import public, value_error
from .._leaves import flatten, is_measured
from .._mesh import max_over, replica_count, shard_axes, sum_over
from .._types import Array, AxisName, Number, Order, Scalar, Tree
from ._formula import wide_dtype

Axes: TypeAlias = tuple[int, ...]
Norms: TypeAlias = list[Array]
"""An array for each unit, or for all units within one leaf; it broadcasts against its leaves."""

SCALE = 2.0**-20
"""Elements are multiplied by this before they are squared. A norm in float32 is therefore correct
from 1e-12 to 1e25 and infinite above; elements below 1e-13 count as zero."""


class Groups(NamedTuple):
    """Units of whole leaves: the tree, or the leaves that share a label. Their norms are scalars.

    Attributes:
        entries: for each measured leaf the index of its unit; None if it belongs to no unit.
        size: the number of units.
        names: the labels of the units; empty for the whole tree.
    """

    entries: tuple[int | None, ...]
    size: int
    names: tuple[Any, ...] = ()

    is_local = False


class Slices(NamedTuple):
    """Units within one leaf: the whole leaf, its layers, its rows. Their norms are one array.

    Attributes:
        axes: for each measured leaf the axes that a norm runs over. They stay with size 1, unless
            they are all axes: then the norm is a scalar.
        is_local: whether no unit is spread over the devices of a `shard_map`.
        is_rms: whether a threshold applies to the root mean square of a unit instead of its norm.
    """

    axes: tuple[Axes, ...]
    is_local: bool = False
    is_rms: bool = False

    names = ()
    size = property(lambda self: len(self.axes))
    entries = property(lambda self: tuple(range(len(self.axes))))


Units: TypeAlias = Groups | Slices


def tree_units(leaves: Sequence[Any], tree: Tree = None) -> Groups:
    """One unit: the whole tree."""
    return Groups((0,) * len(leaves), 1)


def leaf_units(leaves: Sequence[Any]) -> Slices:
    """A unit for each leaf."""
    return Slices(tuple(tuple(range(np.ndim(x))) for x in leaves))


@public
def global_norm(tree: Tree, *, ord: Order | None = None, axis_name: AxisName = None) -> Scalar:
    """Compute the norm of all elements of a tree as one vector.

    `(sum |x|^ord)^(1/ord)`; the largest magnitude for `ord=inf`.

    | tree | norm |
    | --- | --- |
    | float16 `[300, 400]` | 500, although its squares overflow float16 |
    | float32 `[1e20, 1e20]`, `[3e-10, 4e-10]` | 1.4142e20, 5e-10 |
    | float32, a 2-norm from 1e-12 to 1e25 | correct to 1e-6 |
    | float32, a 2-norm above 1e25 | inf |
    | float32, elements below 1e-13 | may count as zero in a 2-norm |
    | empty, or only `None`, masked or zero-size leaves | 0 |
    | any NaN | NaN; inf for `ord=inf` |
    | an infinity and no NaN | inf |
    | sharded | the norm of the whole tree, see `axis_name` |

    The derivative is zero where the norm is zero or not finite.

    Args:
        tree: floating or complex leaves of any shape, in the unit of the gradients.
        ord: order of the norm: 1, 2, inf or any number > 0. None means 2.
        axis_name: mapped axes over which every leaf is sharded, where the type of an array does
            not carry the sharding (`pmap`, or `shard_map` with `check_vma=False`).

    Returns:
        The norm, float32[], or float64[] if a leaf is float64 or complex128.

    Raises:
        TypeError: a leaf is an integer or a boolean; the message contains its path.
        ValueError: `ord` is not > 0.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> float(gcx.global_norm({"w": jnp.float16([300, 0]), "b": jnp.float16([400])}))
        500.0
    """
    leaves = flatten("tree", tree)
    order, axes = check_ord(ord), check_axis_name(axis_name)
    check_bound(axes)
    return norm_of_leaves(leaves.arrays, order, axes)


@public
def leaf_norms(tree: Tree, *, ord: Order | None = None, axis_name: AxisName = None) -> Tree:
    """Compute the norm of each leaf; see `global_norm`.

    Args:
        tree: floating or complex leaves of any shape, in the unit of the gradients.
        ord: order of the norm: 1, 2, inf or any number > 0. None means 2.
        axis_name: as for `global_norm`.

    Returns:
        A tree of the same structure. Each leaf is a scalar; all have the same dtype, float32, or
        float64 if a leaf is float64 or complex128. The norm of a float0 leaf is 0.

    Raises:
        TypeError: a leaf is an integer or a boolean; the message contains its path.
        ValueError: `ord` is not > 0.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> norms = gcx.leaf_norms({"w": jnp.array([3.0, 4.0]), "b": jnp.array(-2.0)})
        >>> float(norms["w"]), float(norms["b"])
        (5.0, 2.0)
    """
    leaves = flatten("tree", tree).arrays
    order, axes = check_ord(ord), check_axis_name(axis_name)
    check_bound(axes)
    norms = iter(unit_norms(leaves, leaf_units(leaves), order, axes))
    return jax.tree.map(lambda x: next(norms) if is_measured(x) else jnp.float32(0), tree)


@public
def combine_norms(norms: Sequence[Number], *, ord: Order | None = None) -> Scalar:
    """Combine the norms of disjoint parts into the norm of the whole.

    `(sum norm_i^ord)^(1/ord)`; the largest for `ord=inf`. Use it for a model that no single program
    holds, such as pipeline stages in separate processes: each process computes `global_norm` of
    its part, the processes exchange these scalars, and each clips its part with
    `clip_grad_norm(grads, max_norm, norm=whole)`. Count a parameter that two stages share once.

    | norms | whole |
    | --- | --- |
    | none | 0 |
    | one is NaN | NaN; inf for `ord=inf` |
    | one is infinite, none is NaN | inf |

    Args:
        norms: the norms of the parts, scalars or arrays, all of the same order.
        ord: their order: 1, 2, inf or any number > 0. None means 2.

    Returns:
        The norm, float32[], or float64[] if one of them is float64.

    Raises:
        TypeError: a norm is not a floating number.
        ValueError: `ord` is not > 0, or a norm that is not traced is negative.

    Examples:
        >>> import gradclip_jax as gcx
        >>> float(gcx.combine_norms([3.0, 4.0]))
        5.0
    """
    leaves = flatten("norms", norms, real=True).arrays
    for i, norm in enumerate(leaves):
        if not is_traced(norm) and (norm < 0).any():
            raise value_error(f"norms[{i}]", ">= 0", norm, "Pass norms, as `global_norm` returns.")
    return norm_of_leaves(leaves, check_ord(ord), None)


def norm_of_leaves(leaves: Sequence[Array], ord: float, axis_name: AxisName) -> Scalar:
    """The norm of all leaves together."""
    return unit_norms(list(leaves), tree_units(leaves), ord, axis_name)[0]


def norm_dtype(leaves: Iterable[Any]) -> Any:
    """float32, or float64 if a leaf is float64 or complex128."""
    for x in leaves:
        if jnp.finfo(x.dtype).bits == 64:
            return jnp.float64
    return jnp.float32


def magnitude(x: Array, dtype: Any) -> Array:
    """`|x|` in float32 or float64."""
    if jnp.iscomplexobj(x):
        return jnp.abs(x.astype(wide_dtype(x.dtype, dtype))).astype(dtype)
    return jnp.abs(x.astype(dtype))


def reduce_axes(reduce: Callable[..., Array], x: Array, axes: Sequence[int]) -> Array:
    """Reduce some axes and keep them with size 1; reduce all axes to a scalar."""
    return reduce(x, axis=tuple(axes), keepdims=len(axes) < x.ndim)


def squares(x: Array, dtype: Any, scale: float | Array = SCALE) -> Array:
    """`(scale * |x|)^2`."""
    # XLA regroups products of scalars and constants to `x^2 * scale^2`, which overflows from 1.8e19
    # on, also where a scalar was broadcast. Behind a barrier the scale is no constant. (A minimum
    # between the products would do as well, but keeps XLA on a GPU from fusing them with the
    # backward pass: 7 % more bytes for PPO. `x * (x * scale^2)` is regrouped by LLVM. JAX 0.10.2.)
    scale = fusion_barrier(jnp.asarray(scale, dtype)) if isinstance(scale, float) else scale
    return jnp.square(magnitude(x, dtype) * scale)


@functools.partial(jax.jit, static_argnums=(1, 2))
def sum_of_squares(
    x: Array, axes: Sequence[int], dtype: Any, scale: float | Array = SCALE
) -> Array:
    """`sum((scale * |x|)^2)` over some axes, which stay with size 1; over all axes a scalar."""
    return reduce_axes(jnp.sum, squares(x, dtype, scale), axes)


@jax.jit
def norm_of_squares(total: Array, scale: float | Array = SCALE) -> Array:
    """The norm, given a sum of `squares`."""
    return jnp.sqrt(total) / scale


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3, 4))
@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def unit_norms(
    leaves: list[Array], units: Units, ord: float, axis_name: AxisName, scale: float = SCALE
) -> Norms:
    """The norm of each unit, with one all-reduce.

    Orders 1, 2 and inf read the leaves once. Other orders read them twice: powers are computed
    relative to the largest magnitude.
    """
    dtype = norm_dtype(leaves)
    if ord == 2:
        once = fusion_barrier(jnp.asarray(scale, dtype))

        def terms(x: Array, axes: Axes) -> Array:
            return sum_of_squares(x, axes, dtype, once)

        sums = totals(leaves, units, axis_name, terms)
        # XLA:CPU would repeat a division by a constant in every kernel that reads the norm.
        return map_arrays(functools.partial(norm_of_squares, scale=once), sums)

    def magnitudes(x: Array, axes: Axes) -> Array:
        return reduce_axes(jnp.sum, magnitude(x, dtype), axes)

    def largest(x: Array, axes: Axes) -> Array:
        sizes = magnitude(x, dtype)
        # A maximum on a GPU, or an all-reduce, may drop a NaN.
        sizes = jnp.where(jnp.isnan(sizes), jnp.inf, sizes)
        return reduce_axes(functools.partial(jnp.max, initial=0), sizes, axes)

    def powers(x: Array, axes: Axes, base: Array) -> Array:
        return reduce_axes(jnp.sum, (magnitude(x, dtype) / base) ** ord, axes)

    if ord == 1:
        return totals(leaves, units, axis_name, magnitudes)
    tops = totals(leaves, units, axis_name, largest, is_sum=False)
    if math.isinf(ord):
        return tops
    info = jnp.finfo(dtype)
    # XLA multiplies by the reciprocal of a base. A subnormal reciprocal would be flushed to zero.
    bases = [
        jnp.where((top >= info.tiny) & (top < jnp.inf), jnp.minimum(top, info.max / 4), 1)
        for top in tops
    ]
    sums = totals(leaves, units, axis_name, powers, _of_leaves(bases, units))
    return [base * total ** (1 / ord) for base, total in zip(bases, sums, strict=True)]


@unit_norms.defjvp
def _unit_norms_jvp(
    units: Units, ord: float, axis_name: AxisName, scale: float, primals: Any, tangents: Any
) -> tuple[Norms, Norms]:
    """The derivative is zero where a norm is zero or not finite, so that no NaN is left behind."""
    (leaves,), (directions,) = primals, tangents
    norms, dtype = unit_norms(leaves, units, ord, axis_name, scale), norm_dtype(leaves)
    of_leaves = _of_leaves(norms, units)

    def num_tops(x: Array, axes: Axes, norm: Array) -> Array:
        return reduce_axes(jnp.sum, (magnitude(x, dtype) == norm).astype(dtype), axes)

    ties = of_leaves
    if math.isinf(ord):
        counts = totals(leaves, units, axis_name, num_tops, of_leaves)
        ties = _of_leaves(counts, units)

    def slope(x: Array, norm: Array, ties: Array) -> Array:
        is_regular = (norm > 0) & jnp.isfinite(norm)
        divisor = jnp.where(is_regular, norm, 1)
        if ord == 2:  # differentiable where an element is zero
            return jnp.where(is_regular, x / divisor.astype(x.dtype), 0)
        if math.isinf(ord):
            weight = (jnp.abs(x) == norm) / jnp.maximum(ties, 1)
        elif ord == 1:
            weight = jnp.ones_like(norm)
        else:
            is_regular &= x != 0
            # The reciprocal of a norm above 8.5e37 is subnormal and would be flushed to zero.
            unit = jnp.where(divisor > 1, jnp.asarray(2.0**-8, dtype), 1)
            ratio = (jnp.abs(x) * unit) / (divisor * unit)
            weight = jnp.where(is_regular, ratio, 1) ** (ord - 1)
        return jnp.where(is_regular, jnp.sign(x) * weight.astype(x.dtype), 0)

    def along(x: Array, axes: Axes, norm: Array, ties: Array, direction: Array) -> Array:
        wide = wide_dtype(x.dtype, dtype)
        product = jnp.conj(slope(x.astype(wide), norm, ties)) * direction.astype(wide)
        return reduce_axes(jnp.sum, jnp.real(product).astype(dtype), axes)

    return norms, totals(leaves, units, axis_name, along, of_leaves, ties, directions)


def _of_leaves(values: Norms, units: Units) -> Norms:
    """For each leaf the value of its unit; the first one for a leaf without a unit."""
    return [values[i or 0] for i in units.entries]


def totals(
    leaves: Sequence[Array],
    units: Units,
    axis_name: AxisName,
    terms: Callable[..., Array],
    *columns: Sequence[Array],
    is_sum: bool = True,
) -> Norms:
    """For each unit the sum, or the maximum, over its leaves, with one all-reduce over devices.

    `terms(leaf, axes, *columns)` is the contribution of a leaf to its unit.
    """
    shards: list[frozenset[str]] = []
    for x in leaves:
        shards.append(frozenset() if units.is_local else shard_axes(x, axis_name))
    everywhere = frozenset[str]().union(*shards)
    parts: dict[int, list[Array]] = {}
    rows = zip(units.entries, shards, leaves, *columns, strict=True)
    for place, (i, axes, x, *others) in enumerate(rows):
        if i is None:
            continue
        over = units.axes[place] if isinstance(units, Slices) else tuple(range(x.ndim))
        part = terms(x, over, *others)
        if is_sum and everywhere:  # a replicated leaf counts once
            part /= replica_count(axes, everywhere)
        parts.setdefault(i, []).append(part)
    entries: Norms = []
    for i in range(units.size):
        of_unit = parts.get(i) or [jnp.zeros((), norm_dtype(leaves))]
        entries.append(joined(of_unit, is_sum=is_sum))
    if not everywhere:
        return entries
    vector = jnp.concatenate([x.reshape(-1) for x in entries])
    vector = sum_over(vector, everywhere) if is_sum else max_over(vector, everywhere)
    return split(vector, entries)


def split(vector: Array, like: Sequence[Array]) -> list[Array]:
    """The parts of a vector, in the shapes of the given arrays."""
    parts: list[Array] = []
    start = 0
    for x in like:
        parts.append(vector.reshape(-1)[start : start + x.size].reshape(x.shape))
        start += x.size
    return parts
