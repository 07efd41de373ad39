"""Granularity: of what norms are taken. Each cuts a tree into units, which are data."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from .._checks import (
    axes_within,
    check_axis,
    check_choice,
    check_count,
    check_static,
    describe,
    error_message,
    leaf_path,
)
from .._tree_checks import broadcast_prefix
from .._types import Labels, Tree
from ._units import Units, all_axes, is_measured, measured_shapes, tree_units, units_within_leaves


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
    whole = Granularity(lambda function, tree: tree_units(measured_shapes(tree)))
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
            (names.index(label), all_axes(x))
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
        leaves = measured_shapes(tree)
        depths = _stack_depths(function, stack_axes, tree)
        axes = [tuple(range(n, np.ndim(x))) for n, x in zip(depths, leaves, strict=True)]
        return units_within_leaves(leaves, axes)._replace(is_rms=rms)

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
        return units_within_leaves(leaves, axes)._replace(is_local=True)

    return Granularity(cut)


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
        hint = "Treat leaves of another rank apart, with `optax.masked` or `optax.partition`."
        return axes_within(function, axis, x, "every leaf", leaf_path("updates", path), hint)
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
