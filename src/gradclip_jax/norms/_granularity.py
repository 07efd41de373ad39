"""Granularities specify for which groups of elements norms are computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Literal

import jax
import numpy as np

from .._checks import check_axis, check_callable, check_choice, check_flag, check_length
from .._errors import public, type_error, value_error
from .._format import describe, distinct, leaf_name, leaf_path, shortened
from .._types import Array, Labels, Path, Tree, as_pytree
from ._groups import Axes, NormGroups, leaf_groups, slice_groups, tree_groups
from ._leaves import inexact_leaves_or_placeholders, is_inexact
from ._prefix import broadcast_prefix, labels_of


@as_pytree
@dataclasses.dataclass(frozen=True)
class Granularity:
    """Which elements share a norm.

    Attributes:
        partition: Function `(leaves, tree) -> NormGroups`, called at trace time; `leaves` are the
            inexact leaves of `tree`.
        is_group: Whether leaves are grouped by labels, which can be the keys of a mapping of
            thresholds.
        is_rms: Whether thresholds limit root mean squares instead of norms. `partition` must then
            return groups of slices.
    """

    partition: Callable[[Sequence[Array], Tree], NormGroups]
    is_group: bool = False
    is_rms: bool = False

    @public
    def __post_init__(self) -> None:
        check_flag("is_group", self.is_group)
        check_flag("is_rms", self.is_rms)
        hint = "Use a function of `gcx.granularities`."
        check_callable("partition", self.partition, hint)


def as_granularity(granularity: Literal["global", "leaf"] | Granularity) -> Granularity:
    """Convert a name to a granularity; return a granularity unchanged."""
    if isinstance(granularity, Granularity):
        return granularity
    if callable(granularity):
        rule = "'global', 'leaf' or a granularity"
        name = getattr(granularity, "__name__", "granularity")
        hint = f"Call the function: `gcx.granularities.{name}(...)`."
        raise type_error("granularity", rule, shortened(granularity), hint)
    check_choice("granularity", granularity, ("global", "leaf"))
    return Granularity(tree_groups if granularity == "global" else leaf_groups)


def select_labels(argument: str, groups: NormGroups, labels: Sequence[Hashable]) -> NormGroups:
    """Select the norm groups whose labels have a threshold; other leaves are not clipped."""
    unknown = [label for label in labels if label not in groups.labels]
    if unknown and groups.labels:
        hint = f"The labels of `param_labels` are {', '.join(sorted(map(repr, groups.labels)))}."
        rule = "a mapping from labels of the tree to thresholds"
        raise value_error(argument, rule, f"the unknown label {unknown[0]!r}", hint)
    index_of = {label: i for i, label in enumerate(labels)}
    index = tuple(i if i is None else index_of.get(groups.labels[i]) for i in groups.group_of_leaf)
    return NormGroups(index, len(labels), tuple(labels))


def group_names(granularity: Literal["global", "leaf"] | Granularity, tree: Tree) -> list[str]:
    """Return the names of all norm groups of a tree, in the order of their norms."""
    groups = as_granularity(granularity).partition(inexact_leaves_or_placeholders(tree), tree)
    names = [str(label) for label in groups.labels]
    leaves = [entry for entry in jax.tree.leaves_with_path(tree) if is_inexact(entry[1])]
    for (path, x), axes in zip(leaves, groups.axes or (), strict=False):
        names += [leaf_name(path, i) for i in np.ndindex(*np.delete(np.shape(x), axes))]
    return distinct(names)


@public
def group(param_labels: Labels) -> Granularity:
    """Compute one norm for all leaves that share a label.

    If the threshold is a mapping, leaves whose label is not a key are not clipped.

    Args:
        param_labels: Prefix tree of labels, or a function `params -> labels`. To label by path, use
            `lambda params: jax.tree_util.tree_map_with_path(label_of_path, params)`.

    Returns:
        A granularity for `clip_by_norm`.

    Raises:
        TypeError: If `param_labels` is not a prefix tree of the updates; raised at trace time.
        ValueError: If two labels have the same `str`, which is their name in the metrics.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> parts = gcx.granularities.group({"enc": "body", "dec": "body", "out": "head"})
        >>> clip = gcx.clip_by_norm({"body": 1.0, "head": 0.5}, granularity=parts)
        >>> grads = {"enc": jnp.array([3.0]), "dec": jnp.array([4.0]), "out": jnp.array([0.5])}
        >>> updates, _ = clip.update(grads, clip.init(grads))
        >>> [round(updates[key].item(), 2) for key in ("enc", "dec", "out")]
        [0.6, 0.8, 0.5]
    """

    def partition(leaves: Sequence[Array], tree: Tree) -> NormGroups:
        labels = labels_of(param_labels, "updates", tree)
        # `optax.tree.map_params` calls `init` with a placeholder that has no leaves.
        is_known = labels or callable(param_labels)
        names = tuple(dict.fromkeys(labels if is_known else jax.tree.leaves(param_labels)))
        if len({*map(str, names)}) < len(names):
            hint = "Rename one of them."
            raise value_error("param_labels", "labels that print differently", names, hint)
        pairs = zip(labels, jax.tree.leaves(tree), strict=True)
        index = tuple(names.index(label) for label, x in pairs if is_inexact(x))
        return NormGroups(index, len(names), names)

    return Granularity(partition, is_group=True)


@public
def layer(num_layer_axes: Tree = 1, *, rms: bool = False) -> Granularity:
    """Compute one norm per leaf, or per layer if layers are stacked for `lax.scan`.

    Args:
        num_layer_axes: Number of leading axes of a leaf that index layers, 0 for an ordinary leaf;
            an integer >= 0 or a prefix tree of integers. None means 0. These axes must not be
            sharded inside `shard_map`.
        rms: Whether thresholds limit root mean squares instead of norms.

    Returns:
        A granularity for `clip_by_norm`.

    Raises:
        ValueError: If `num_layer_axes` exceeds the rank of a leaf; raised at trace time.
        TypeError: If `num_layer_axes` contains a value that is not a static integer.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> clip = gcx.clip_by_norm(1.0, granularity=gcx.granularities.layer(1))
        >>> grads = jnp.array([[0.0, 4.0], [0.5, 0.0]])  # two layers
        >>> clip.update(grads, clip.init(grads))[0].tolist()
        [[0.0, 1.0], [0.5, 0.0]]
    """
    name = "num_layer_axes"
    hint = "Pass the number of leading axes that index layers, 0 for an ordinary leaf."
    for depth in jax.tree.leaves(num_layer_axes):
        check_length(name, depth, hint, low=0)
    check_flag("rms", rms)

    def partition(leaves: Sequence[Array], tree: Tree) -> NormGroups:
        depths = broadcast_prefix(name, num_layer_axes, "updates", tree, lambda x: x is None)
        axes: list[Axes] = []
        for (path, x), depth in zip(jax.tree.leaves_with_path(tree), depths, strict=True):
            if is_inexact(x):
                axes.append(tuple(range(depth or 0, np.ndim(x))))
                if (depth or 0) > np.ndim(x):
                    got = f"{depth} for {describe(x)} at {leaf_path('updates', path)}"
                    raise value_error(name, "at most the rank of the leaf", got, hint)
        return slice_groups(axes)

    return Granularity(partition, is_rms=rms)


@public
def axis(axis: int | Sequence[int] | None = None) -> Granularity:
    """Compute one norm for each row, column or filter of a leaf.

    Args:
        axis: Axes over which one norm is computed. None chooses the axes of
            `optax.adaptive_grad_clip`: all axes of a scalar or vector, axis 0 for rank 2 and 3, and
            all axes but the last for higher ranks. Inside `shard_map` these axes must not be
            sharded.

    Returns:
        A granularity for `clip_by_norm`.

    Raises:
        TypeError: If `axis` is neither None nor an integer nor a sequence of integers.
        ValueError: If `axis` is invalid for a leaf; raised at trace time.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> clip = gcx.clip_by_norm(1.0, granularity=gcx.granularities.axis(-1))
        >>> grads = jnp.array([[3.0, 4.0], [0.5, 0.0]])
        >>> [[round(x, 4) for x in row] for row in clip.update(grads, None)[0].tolist()]
        [[0.6, 0.8], [0.5, 0.0]]
    """
    axes = check_axis(axis)

    def partition(leaves: Sequence[Array], tree: Tree) -> NormGroups:
        paths = jax.tree.leaves_with_path(tree)
        of_leaves = [_default_axes(path, x, axes) for path, x in paths if is_inexact(x)]
        return slice_groups(of_leaves, is_local=True)

    return Granularity(partition)


def axes_within(axes: tuple[int, ...], x: Array, at: str = "") -> tuple[int, ...]:
    """Normalize axes to sorted, nonnegative integers, or raise if the array does not have them."""
    rank = np.ndim(x)
    found = tuple(sorted({a % rank for a in axes if -rank <= a < rank}))
    if len(found) < len(axes):
        hint = "Clip arrays of other ranks separately, for example with `optax.partition`."
        got = f"{axes} for {describe(x)}{at}"
        raise value_error("axis", f"distinct axes in [-{rank}, {rank})", got, hint)
    return found


def _default_axes(path: Path, x: Array, axes: Axes | None) -> Axes:
    """Return the axes over which each norm of a leaf is computed; None chooses them by rank."""
    rank = np.ndim(x)
    if axes is not None:
        return axes_within(axes, x, f" at {leaf_path('updates', path)}")
    if sum(n != 1 for n in np.shape(x)) <= 1:  # compute one norm for a scalar or vector
        return tuple(range(rank))
    # These are the input axes of linear layers (IO), attention projections, and HWIO and DHWIO
    # filters.
    return (0,) if rank < 4 else tuple(range(rank - 1))
