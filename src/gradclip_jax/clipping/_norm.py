"""Norms of a tree: of which leaves together, over which devices, and their derivative."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._checks import check_axis_name, check_bound, check_ord
from .._devices import joined, sums_of_two
from .._errors import public
from .._mesh import max_over, on_device, replica_count, shard_axes, sum_over, varying_axes
from .._tree_checks import check_inexact
from .._types import Array, AxisName, Number, Order, Scalar, Tree
from ._formula import (
    SCALE,
    magnitude,
    norm_dtype,
    norm_of_squares,
    reduce_axes,
    squares,
    sum_of_squares,
    wide_dtype,
)
from ._granularity import Norms, Units, is_measured, leaf_units, map_norms, split, tree_units


@public
def global_norm(tree: Tree, *, ord: Order = 2.0, axis_name: AxisName = None) -> Scalar:
    """Measures a whole tree: the norm of all its elements as one vector.

    `(sum |x|^ord)^(1/ord)`; the largest magnitude for `ord=inf`.

    | tree | norm |
    | --- | --- |
    | float16 `[300, 400]` | 500, though its squares overflow float16 |
    | float32 `[1e20, 1e20]`, `[3e-10, 4e-10]` | 1.4142e20, 5e-10 |
    | float32, a 2-norm above 1e25 | inf |
    | float32 elements below 1e-13 | may count as zero in a 2-norm |
    | empty, or only `None`, masked or zero-size leaves | 0 |
    | any NaN | NaN; inf for `ord=inf` |
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

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> float(gcx.global_norm({"w": jnp.float16([300, 0]), "b": jnp.float16([400])}))
        500.0
    """
    check_inexact("tree", tree)
    order, axes = check_ord(ord), check_axis_name(axis_name)
    check_bound(axes)
    return norm_of_leaves(measured_leaves(tree), order, axes)


@public
def leaf_norms(tree: Tree, *, ord: Order = 2.0, axis_name: AxisName = None) -> Tree:
    """Measures each leaf by itself: `global_norm` of every leaf, all in one pass.

    Args:
        tree: floating or complex leaves of any shape, in the unit of the gradients.
        ord: order of the norm, 1, 2, inf or any number > 0.
        axis_name: mapped axes over which every leaf is a shard, where types cannot tell (inside
            `pmap`, or `shard_map` with `check_vma=False`).

    Returns:
        A tree of the same structure, each leaf a scalar of one common dtype (float32, or
        float64 when a leaf is float64 or complex128). A float0 leaf has norm 0.

    Raises:
        TypeError: a leaf is an integer or a boolean; the message names its path.
        ValueError: `ord` is not > 0.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> norms = gcx.leaf_norms({"w": jnp.array([3.0, 4.0]), "b": jnp.array(-2.0)})
        >>> float(norms["w"]), float(norms["b"])
        (5.0, 2.0)
    """
    check_inexact("tree", tree)
    order, axes = check_ord(ord), check_axis_name(axis_name)
    check_bound(axes)
    leaves = measured_leaves(tree)
    norms = iter(unit_norms(leaves, leaf_units(leaves), order, axes))
    return jax.tree.map(lambda x: next(norms) if is_measured(x) else jnp.float32(0), tree)


@public
def combine_norms(norms: Sequence[Number], *, ord: Order = 2.0) -> Scalar:
    """The norm of a whole, from the norms of parts that share no element.

    `(sum norm_i^ord)^(1/ord)`, the largest for `ord=inf`. For a model in pieces that no one program
    holds, such as pipeline stages in processes of their own: each measures its piece with
    `global_norm`, the few numbers are exchanged, and each piece is clipped with
    `clip_grad_norm(grads, max_norm, norm=whole)`. What two stages share counts in one of them.

    | norms | whole |
    | --- | --- |
    | none | 0 |
    | one is NaN | NaN; inf for `ord=inf` |
    | one is infinite, none is NaN | inf |

    Args:
        norms: the norms of the parts, each a scalar or an array of several, in the unit of the
            gradients, all of the same order.
        ord: their order, 1, 2, inf or any number > 0.

    Returns:
        The norm, float32[], or float64[] when one of them is float64.

    Raises:
        TypeError: a norm is no floating number.
        ValueError: `ord` is not > 0.

    Examples:
        >>> import gradclip_jax as gcx
        >>> float(gcx.combine_norms([3.0, 4.0]))
        5.0
    """
    check_inexact("norms", norms, real=True)
    return norm_of_leaves(measured_leaves(norms), check_ord(ord), None)


def measured_leaves(tree: Tree) -> list[Array]:
    """The leaves that have a norm, in order."""
    return [jnp.asarray(x) for x in jax.tree.leaves(tree) if is_measured(x)]


def norm_of_leaves(leaves: list[Array], ord: float, axis_name: AxisName) -> Scalar:
    """The norm of all leaves together."""
    return unit_norms(leaves, tree_units(leaves), ord, axis_name)[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3, 4))
@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def unit_norms(
    leaves: list[Array], units: Units, ord: float, axis_name: AxisName, scale: float = SCALE
) -> Norms:
    """The norms of all units: one read of the leaves for ord 1, 2 and inf, and one all-reduce."""
    dtype = norm_dtype(leaves)
    total = functools.partial(totals, leaves, units, axis_name)
    if ord == 2.0:
        sums = total(lambda x, axes, i: sum_of_squares(x, axes, dtype, scale))
        return map_norms(lambda x: norm_of_squares(x, scale), sums)
    if ord == 1.0:
        return total(lambda x, axes, i: reduce_axes(jnp.sum, magnitude(x, dtype), axes))
    tops = total(lambda x, axes, i: _largest(x, axes, dtype), is_sum=False)
    if math.isinf(ord):
        return tops
    # Powers are of magnitudes relative to the largest: a second read.
    bases = jax.tree.map(lambda top: jnp.where((top > 0) & (top < jnp.inf), top, 1), tops)
    powers = total(
        lambda x, axes, i: reduce_axes(jnp.sum, (magnitude(x, dtype) / bases[i]) ** ord, axes)
    )
    return jax.tree.map(lambda base, power: base * power ** (1 / ord), bases, powers)


@unit_norms.defjvp
def _unit_norms_jvp(
    units: Units, ord: float, axis_name: AxisName, scale: float, primals: Any, tangents: Any
) -> tuple[Norms, Norms]:
    """The slope is zero where a norm is zero or not finite: a bad step leaves no NaN behind."""
    (leaves,), (directions,) = primals, tangents
    norms, dtype = unit_norms(leaves, units, ord, axis_name, scale), norm_dtype(leaves)
    total = functools.partial(totals, leaves, units, axis_name)
    ties = norms

    def is_top(x: Array, i: int) -> Array:
        return (magnitude(x, dtype) == norms[i]).astype(dtype)

    if math.isinf(ord):
        ties = total(lambda x, axes, i: reduce_axes(jnp.sum, is_top(x, i), axes))

    def slope(x: Array, i: int) -> Array:
        regular = (x != 0) & (norms[i] > 0) & jnp.isfinite(norms[i])
        if math.isinf(ord):
            weight = is_top(x, i) / jnp.maximum(ties[i], 1)
        else:
            share = magnitude(x, dtype) / jnp.where(regular, norms[i], 1)
            weight = share if ord == 2.0 else share ** (ord - 1)
        return jnp.where(regular, jnp.sign(x) * weight, 0)

    def along(x: Array, axes: tuple[int, ...], i: int, direction: Array) -> Array:
        product = jnp.real(jnp.conj(slope(x, i)) * direction.astype(wide_dtype(x.dtype, dtype)))
        return reduce_axes(jnp.sum, product.astype(dtype), axes)

    return norms, total(along, directions)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4))
@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def norms_of_two(
    leaves: list[Array], others: list[Array], units: Units, ord: float, axis_name: AxisName
) -> tuple[Norms, Norms]:
    """`unit_norms` of two trees: for ord 2 one reduction of both for each leaf, if placed alike."""
    ours, theirs = (
        [(varying_axes(x), jax.typeof(x).sharding) for x in xs] for xs in (leaves, others)
    )
    if ord != 2.0 or ours != theirs:
        return tuple(unit_norms(x, units, ord, axis_name) for x in (leaves, others))
    dtype = norm_dtype([*leaves, *others])

    def share_of(x: Array, axes: tuple[int, ...], i: int, y: Array) -> Array:
        return sums_of_two(squares(x, dtype), squares(y, dtype), axes)

    sums = totals(leaves, units, axis_name, share_of, others)
    of_leaves = map_norms(lambda x: norm_of_squares(x.real), sums)
    return of_leaves, map_norms(lambda x: norm_of_squares(x.imag), sums)


@norms_of_two.defjvp
def _norms_of_two_jvp(
    units: Units, ord: float, axis_name: AxisName, primals: Any, tangents: Any
) -> Any:
    pairs = zip(primals, tangents, strict=True)
    norms_of = functools.partial(unit_norms, units=units, ord=ord, axis_name=axis_name)
    return tuple(zip(*(jax.jvp(norms_of, (x,), (dx,)) for x, dx in pairs), strict=True))


def _largest(x: Array, axes: tuple[int, ...], dtype: Any) -> Array:
    """The largest magnitude; a NaN counts as infinite, because a maximum may drop it."""
    sizes = magnitude(x, dtype)
    finite = jnp.where(jnp.isnan(sizes), jnp.inf, sizes)
    return reduce_axes(functools.partial(jnp.max, initial=0), finite, axes)


def totals(
    leaves: Sequence[Array],
    units: Units,
    axis_name: AxisName,
    share_of: Callable[..., Array],
    *columns: Sequence[Array],
    is_sum: bool = True,
) -> Norms:
    """For each unit the sum, or the maximum, over its leaves; one all-reduce over devices.

    `share_of(leaf, axes, i, *columns)` is what a leaf has in unit i. What lies on the host is
    measured on the device.
    """
    leaves, *others = ([on_device(x) for x in xs] for xs in (leaves, *columns))
    shards = [frozenset[str]() if units.is_local else shard_axes(x, axis_name) for x in leaves]
    everywhere = frozenset[str]().union(*shards)
    shares: list[list[Array]] = [[] for _ in range(units.size)]
    for x, axes, i, over, *of_leaf in zip(
        leaves, units.axes, units.entry, shards, *others, strict=True
    ):
        if axes is not None:
            share, copies = share_of(x, axes, i, *of_leaf), replica_count(over, everywhere)
            shares[i].append(share / copies if is_sum and copies > 1 else share)
    zero = jnp.zeros((), norm_dtype(leaves))
    entries = [joined(of_unit or [zero], is_sum=is_sum) for of_unit in shares]
    if not (units.is_vector or everywhere):
        return entries
    vector = jnp.concatenate([x.reshape(-1) for x in entries] or [zero[None][:0]])
    vector = sum_over(vector, everywhere) if is_sum else max_over(vector, everywhere)
    return vector if units.is_vector else split(vector, entries)
