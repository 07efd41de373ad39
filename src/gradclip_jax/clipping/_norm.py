"""Norms at any granularity: right for every dtype, magnitude, tree and mesh.

A tree is cut into units, and `unit_norms` returns the norm of each as one vector, whether a
unit is the whole tree, a group of leaves, a leaf, a layer stacked in a leaf, or a row of one.
How a sum of powers survives overflow and underflow is the business of `_power_sum.py`.
"""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import check_axis_name, check_inexact, check_ord, is_float0
from .._mesh import max_over, replica_count, reshard_replicated, sum_over
from .._types import Array, AxisName, Scalar, Tree
from ._layout import Slots, blocks_of, leaf_slots, one_slot, rows_of_slots
from ._power_sum import exact_sum, magnitude_rank, power, robust_norms, robust_peaks


def global_norm(tree: Tree, *, ord: float = 2.0, axis_name: AxisName = None) -> Scalar:
    """Measures a whole tree: the norm of all its elements as one vector.

    `(sum |x|^ord)^(1/ord)`; the largest magnitude for `ord=inf`.

    | tree | norm |
    | --- | --- |
    | float16 `[300, 400]` | 500, though its squares overflow float16 |
    | float32 `[1e20, 1e20]`, `[3e-23, 4e-23]` | 1.4142e20, 5e-23 |
    | empty, or only `None`, masked or zero-size leaves | 0 |
    | any NaN | NaN; inf for `ord=inf` over several devices |
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

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> norms = gcx.leaf_norms({"w": jnp.array([3.0, 4.0]), "b": jnp.array(-2.0)})
        >>> float(norms["w"]), float(norms["b"])
        (5.0, 2.0)
    """
    check_inexact("leaf_norms", "tree", tree)
    leaves = measured_leaves(tree)
    slots = leaf_slots(leaves)
    norms = iter(
        unit_norms(
            leaves,
            slots,
            check_ord("leaf_norms", ord),
            check_axis_name("leaf_norms", axis_name),
        )
    )
    return jax.tree.map(lambda x: next(norms) if is_measured(x) else jnp.float32(0), tree)


def is_measured(leaf: Any) -> bool:
    """Whether a leaf is measured: a float0, or the integer parameter it belongs to, is not."""
    return not is_float0(leaf) and jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def measured_leaves(tree: Tree) -> list[Array]:
    """The leaves that are measured, in order."""
    return [jnp.asarray(x) for x in jax.tree.leaves(tree) if is_measured(x)]


def norm_dtype(leaves: Iterable[Any]) -> Any:
    """float32, or float64 when a leaf is float64 or complex128."""
    return jnp.float64 if any(jnp.finfo(x.dtype).bits == 64 for x in leaves) else jnp.float32


def norm_of_leaves(leaves: list[Array], ord: float, axis_name: AxisName) -> Scalar:
    """The norm of all leaves as one unit."""
    return unit_norms(leaves, one_slot(leaves), ord, axis_name)[0]


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def unit_norms(leaves: list[Array], slots: Slots, ord: float, axis_name: AxisName) -> Array:
    """The norms of all units: one pass over the leaves, and one all-reduce."""
    dtype = norm_dtype(leaves)
    blocks = blocks_of(leaves, slots, ord, axis_name, dtype)
    if not blocks:
        return jnp.zeros(slots.size, dtype)
    everywhere = frozenset[str]()
    if not slots.within_device:
        everywhere = everywhere.union(*(block.shard_axes for block in blocks))
    rows_of = rows_of_slots([block.slots for block in blocks], slots.size)

    def pool(totals: list[Array], combine: Any) -> Array:
        rows = jnp.concatenate([reshard_replicated(total).reshape(-1) for total in totals])
        if slots.size == 1:
            return combine(rows, axis=0, keepdims=True)
        padded = jnp.concatenate([rows, jnp.zeros(1, rows.dtype)])
        return combine(padded[rows_of], axis=1)

    def largest(of: Callable[[Array], Array]) -> Array:
        tops = [jnp.max(of(block.values), axis=block.over, initial=0) for block in blocks]
        return max_over(pool(tops, jnp.max), everywhere)

    def power_sums(exponents: Array | None) -> Array:
        totals: list[Array] = []
        for block in blocks:
            exponent = None if exponents is None else block.entries(exponents)
            total = exact_sum(power(block.values, ord, dtype, exponent), block.over)
            copies = replica_count(block.shard_axes, everywhere)
            totals.append(total if copies == 1 else total / copies)
        return sum_over(pool(totals, exact_sum), everywhere)

    peak_ranks = functools.partial(largest, lambda x: magnitude_rank(x, dtype))
    if math.isinf(ord):
        # XLA on CPU drops a NaN from a maximum over many elements, an infinity it keeps.
        tops = largest(lambda x: jnp.where(jnp.isnan(x), jnp.inf, jnp.abs(x)).astype(dtype))
        return robust_peaks(tops, peak_ranks)
    elements = np.zeros(slots.size)
    for block in blocks:
        np.add.at(elements, block.slots, block.values.size / len(block.slots))
    return robust_norms(power_sums, peak_ranks, ord, elements)
