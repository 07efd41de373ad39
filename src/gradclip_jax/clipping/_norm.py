"""Norms of any units: right for every dtype, magnitude, tree and mesh, in one read of the data.

`unit_norms` returns the norm of each unit of a tree as one vector. The sums behind a 2-norm, that
neither overflow nor underflow, are in `_squares.py`.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._checks import check_axis_name, check_ord
from .._tree_checks import check_inexact
from .._types import TWO, Array, AxisName, Order, Scalar, Tree
from .._xla import JOINED, JOINED_ON_CPU
from ._blocks import Block, blocks_of_leaves, pack, pool_largest, pool_sums
from ._scale import wide_dtype
from ._squares import norms_in_one_read, norms_on_cpu, norms_over_axes
from ._units import Units, entries, is_measured, leaf_units, spread_over_leaves, tree_units


def global_norm(tree: Tree, *, ord: Order = TWO, axis_name: AxisName = None) -> Scalar:
    """Measures a whole tree: the norm of all its elements as one vector.

    `(sum |x|^ord)^(1/ord)`; the largest magnitude for `ord=inf`.

    | tree | norm |
    | --- | --- |
    | float16 `[300, 400]` | 500, though its squares overflow float16 |
    | float32 `[1e20, 1e20]`, `[3e-23, 4e-23]` | 1.4142e20, 5e-23 |
    | empty, or only `None`, masked or zero-size leaves | 0 |
    | subnormal numbers | may count as zero |
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
    check_inexact("global_norm", "tree", tree)
    order, axes = check_ord("global_norm", ord), check_axis_name("global_norm", axis_name)
    return norm_of_leaves(measured_leaves(tree), order, axes)


def leaf_norms(tree: Tree, *, ord: Order = TWO, axis_name: AxisName = None) -> Tree:
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
    check_inexact("leaf_norms", "tree", tree)
    order, axes = check_ord("leaf_norms", ord), check_axis_name("leaf_norms", axis_name)
    leaves = measured_leaves(tree)
    norms = iter(entries(unit_norms(leaves, leaf_units(leaves), order, axes)))
    return jax.tree.map(lambda x: next(norms) if is_measured(x) else jnp.float32(0), tree)


def measured_leaves(tree: Tree) -> list[Array]:
    """The leaves that have a norm, in order."""
    return [jnp.asarray(x) for x in jax.tree.leaves(tree) if is_measured(x)]


def norm_dtype(leaves: Iterable[Any]) -> Any:
    """float32, or float64 when a leaf is float64 or complex128."""
    return jnp.float64 if any(jnp.finfo(x.dtype).bits == 64 for x in leaves) else jnp.float32


def norm_of_leaves(leaves: list[Array], ord: float, axis_name: AxisName) -> Scalar:
    """The norm of all leaves as one unit."""
    return unit_norms(leaves, tree_units(leaves), ord, axis_name)[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def unit_norms(leaves: list[Array], units: Units, ord: float, axis_name: AxisName) -> Array:
    """The norms of all units: one read of the leaves for ord 1, 2 and inf, and one all-reduce."""
    if ord == 2.0:
        return _by_squares(leaves, units, axis_name)
    if math.isinf(ord):
        return _largest(leaves, units, axis_name)
    if ord == 1.0:
        return unit_sums([jnp.abs(x) for x in leaves], units, axis_name)
    return _by_powers(leaves, units, ord, axis_name)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def axis_norms(x: Array, axes: tuple[int, ...]) -> Array:
    """The 2-norms over some axes of one array, which stay as 1.

    For activations: nothing is flattened or joined, so each axis stays as it is sharded, and no
    device asks another for the norms of its tokens.
    """
    parts, dtype = _real_parts(x), norm_dtype([x])
    if parts.ndim == x.ndim:
        return norms_over_axes(parts, axes, dtype)
    return norms_over_axes(parts, (*axes, x.ndim), dtype)[..., 0]


@axis_norms.defjvp
def _axis_norms_jvp(axes: tuple[int, ...], primals: Any, tangents: Any) -> tuple[Array, Array]:
    (x,), (direction,) = primals, tangents
    norms = axis_norms(x, axes)
    regular = (norms > 0) & jnp.isfinite(norms)
    wide = wide_dtype(x.dtype)
    slope = jnp.where(regular, x.astype(wide) / jnp.where(regular, norms, 1).astype(wide), 0)
    along = jnp.real(jnp.conj(slope) * direction.astype(wide))
    return norms, jnp.sum(along, axes, keepdims=True)


def unit_sums(leaves: list[Array], units: Units, axis_name: AxisName) -> Array:
    """The sums of all units, linear in the leaves."""
    dtype = norm_dtype(leaves)
    blocks = pack(blocks_of_leaves(leaves, units, axis_name), JOINED)
    sums = [[jnp.sum(block.values.astype(dtype), block.axes).reshape(-1)] for block in blocks]
    return pool_sums(sums, blocks, units, dtype)[0]


def _by_squares(leaves: list[Array], units: Units, axis_name: AxisName) -> Array:
    blocks, dtype = blocks_of_leaves(leaves, units, axis_name, _real_parts), norm_dtype(leaves)
    if not blocks:
        return jnp.zeros(units.size, dtype)

    def with_values(values: Sequence[Array]) -> list[Block]:
        return [b._replace(values=x) for b, x in zip(blocks, values, strict=True)]

    def on_cpu(values: Sequence[Array]) -> Array:
        packed = pack(with_values(values), JOINED_ON_CPU, flatten=True)
        return norms_on_cpu(packed, units, dtype)

    def on_tpu(values: Sequence[Array]) -> Array:
        packed = pack(with_values(values), JOINED, stack=True)
        return norms_in_one_read(packed, units, dtype, on_tpu=True)

    def on_gpu(values: Sequence[Array]) -> Array:
        packed = pack(with_values(values), JOINED)
        return norms_in_one_read(packed, units, dtype, on_tpu=False)

    values = [block.values for block in blocks]
    return lax.platform_dependent(values, cpu=on_cpu, tpu=on_tpu, default=on_gpu)


def _largest(leaves: list[Array], units: Units, axis_name: AxisName) -> Array:
    """The largest magnitude of each unit; NaN counts as infinite.

    An all-reduce may drop a NaN, and XLA on a CPU drops it from a maximum of many elements.
    """
    dtype = norm_dtype(leaves)
    sizes = [_magnitude(x, dtype) for x in leaves]
    sizes = [jnp.where(jnp.isnan(x), jnp.inf, x) for x in sizes]
    blocks = pack(blocks_of_leaves(sizes, units, axis_name), JOINED)
    tops = [[jnp.max(block.values, block.axes).reshape(-1)] for block in blocks]
    return pool_largest(tops, blocks, units, dtype)[0]


def _by_powers(leaves: list[Array], units: Units, ord: float, axis_name: AxisName) -> Array:
    """Norms of any order, in two reads: powers are of magnitudes relative to the largest."""
    tops = _largest(leaves, units, axis_name)
    scales = jnp.where((tops > 0) & (tops < jnp.inf), tops, 1)
    # Not `x / scale`: XLA makes it `x * (1 / scale)`, and 1 / 3e38 is no normal number.
    roots = spread_over_leaves(1 / jnp.sqrt(scales), units, leaves)
    shares = [_magnitude(x, tops.dtype) * r * r for x, r in zip(leaves, roots, strict=True)]
    powers = [share**ord for share in shares]
    return scales * unit_sums(powers, units, axis_name) ** (1 / ord)


def _real_parts(x: Array) -> Array:
    """Real numbers with the 2-norm of x: real and imaginary parts on one more axis."""
    if not jnp.issubdtype(x.dtype, jnp.complexfloating):
        return x
    return jnp.stack([x.real, x.imag], axis=-1)


def _magnitude(x: Array, dtype: Any) -> Array:
    if dtype == jnp.float64 and jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = x.astype(jnp.complex128)
    return jnp.abs(x).astype(dtype)


@unit_norms.defjvp
def _unit_norms_jvp(
    units: Units, ord: float, axis_name: AxisName, primals: Any, tangents: Any
) -> tuple[Array, Array]:
    (leaves,), (directions,) = primals, tangents
    norms = unit_norms(leaves, units, ord, axis_name)
    slopes = _slopes(leaves, norms, units, ord, axis_name)
    pairs = zip(slopes, directions, strict=True)
    return norms, unit_sums([jnp.real(jnp.conj(s) * d) for s, d in pairs], units, axis_name)


def _slopes(
    leaves: list[Array], norms: Array, units: Units, ord: float, axis_name: AxisName
) -> list[Array]:
    """The derivative of the norm of its unit by each element.

    Zero where the norm is zero or not finite: a step that is dropped must leave no NaN behind.
    """
    per_leaf = spread_over_leaves(norms, units, leaves)
    pairs = list(zip(leaves, per_leaf, strict=True))
    regular = [(x != 0) & jnp.isfinite(norm) for x, norm in pairs]
    if math.isinf(ord):
        tied = [(jnp.abs(x) == norm).astype(norms.dtype) for x, norm in pairs]
        ties = spread_over_leaves(unit_sums(tied, units, axis_name), units, leaves)
        weights = [is_top / jnp.maximum(n, 1) for is_top, n in zip(tied, ties, strict=True)]
    else:
        shares = [
            _magnitude(x, norm.dtype) / jnp.where(ok, norm, 1)
            for (x, norm), ok in zip(pairs, regular, strict=True)
        ]
        weights = shares if ord == 2.0 else [share ** (ord - 1) for share in shares]
    return [
        jnp.where(ok, jnp.sign(x) * weight, 0)
        for x, ok, weight in zip(leaves, regular, weights, strict=True)
    ]
