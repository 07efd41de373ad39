"""Clipping by the global norm as a pure function."""

import jax.numpy as jnp

from .._checks import check_axis_name, check_number, check_ord
from .._tree_checks import check_inexact
from .._types import TWO, AxisName, Number, Order, Scalar, Tree
from ._clip import scale_tree
from ._norm import measured_leaves, norm_dtype, norm_of_leaves
from ._scale import root_of_norms
from ._units import split_by_sharding, tree_units


def clip_grad_norm(
    grads: Tree,
    max_norm: Number,
    *,
    ord: Order = TWO,
    norm: Number | None = None,
    axis_name: AxisName = None,
) -> tuple[Tree, Scalar]:
    """Scales a gradient tree so that its norm is at most `max_norm`, and returns the norm.

    The pure function behind `clip_by_global_norm`, with the same edge cases.

    Args:
        grads: floating or complex leaves of any shape.
        max_norm: the threshold in the unit of the gradients, > 0; may be traced.
        ord: order of the norm, 1, 2, inf or any number > 0.
        norm: the norm if it is already known; then it is not computed again.
        axis_name: mapped axes over which every leaf is a shard, where types cannot tell (inside
            `pmap`, or `shard_map` with `check_vma=False`).

    Returns:
        The clipped gradients, as they came in if the norm is within bounds, and the norm before
        clipping: float32[], or float64[] when a leaf is float64 or complex128.

    Raises:
        ValueError: `max_norm` or `ord` is not > 0.
        TypeError: a leaf is an integer or a boolean; the message names its path.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> clipped, norm = gcx.clip_grad_norm({"w": jnp.array([3.0, 4.0])}, 1.0)
        >>> float(norm), [round(x, 4) for x in clipped["w"].tolist()]
        (5.0, [0.6, 0.8])
    """
    name = "clip_grad_norm"
    check_number(name, "max_norm", max_norm, "Pass inf to only measure.")
    order, axes = check_ord(name, ord), check_axis_name(name, axis_name)
    check_inexact(name, "grads", grads)
    leaves = measured_leaves(grads)
    if norm is None:
        total = norm_of_leaves(leaves, order, axes)
    else:
        check_number(name, "norm", norm, "Pass the norm of `grads`.", closed=True, or_nan=True)
        total = jnp.asarray(norm).astype(norm_dtype(leaves))
    root = root_of_norms(total, jnp.asarray(max_norm).astype(total.dtype), jnp.nan)
    parts = split_by_sharding(tree_units(leaves), leaves)
    return scale_tree(grads, parts, [root[None]], drops=False), total
