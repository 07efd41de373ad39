"""Granularity: of what norms are taken. Each cuts a tree into units, which are data."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import (
    axes_within,
    check_axis,
    check_choice,
    check_count,
    check_static,
    describe,
    is_float0,
    leaf_path,
)
from .._errors import public, value_error
from .._mesh import replica_count, shard_axes
from .._tree_checks import broadcast_prefix
from .._types import Array, AxisName, Labels, Tree

_DEPTH = "Give the number of leading axes that index layers, 0 for an ordinary leaf."

Norms: TypeAlias = Any
"""A number for each unit: Array[units], or where units lie within leaves a list of arrays.

`norms[i]` broadcasts against the leaves whose `entry` in `Units` is i.
"""


class Units(NamedTuple):
    """Of what norms are taken: static, with an entry for each measured leaf.

    Attributes:
        axes: the axes that the norm runs over, which stay as 1 unless they are all; None for a
            leaf that is left alone.
        entry: which entry of `Norms` is of the leaf.
        size: how many entries `Norms` has.
        names: a name for each, where metrics report them by name.
        by_leaf: whether each leaf has an entry of its own.
        is_vector: whether `Norms` is a vector: no unit is a part of a leaf, and none is local.
        is_rms: whether thresholds are compared with the root mean square of a unit.
        is_local: whether a unit is never spread over the devices of a `shard_map`.
    """

    axes: tuple[tuple[int, ...] | None, ...]
    entry: tuple[int, ...]
    size: int
    names: tuple[Any, ...] = ()
    by_leaf: bool = False
    is_vector: bool = True
    is_rms: bool = False
    is_local: bool = False


def tree_units(leaves: Sequence[Any]) -> Units:
    """All leaves together have one norm."""
    return Units(tuple(map(all_axes, leaves)), (0,) * len(leaves), 1)


def leaf_units(leaves: Sequence[Any]) -> Units:
    """Each leaf has one norm."""
    return units_within_leaves(leaves, list(map(all_axes, leaves)))


def units_within_leaves(leaves: Sequence[Any], axes: Sequence[tuple[int, ...]]) -> Units:
    """Each leaf has norms of its own, over the given axes."""
    is_vector = all(len(over) == np.ndim(x) for x, over in zip(leaves, axes, strict=True))
    count = len(axes)
    return Units(tuple(axes), tuple(range(count)), count, by_leaf=True, is_vector=is_vector)


def norm_shapes(units: Units, leaves: Sequence[Any]) -> list[tuple[int, ...]]:
    """The shape of each entry of `Norms`: () or that of the leaf with its axes as 1."""
    shapes: list[tuple[int, ...]] = [()] * units.size
    for x, axes, i in zip(leaves, units.axes, units.entry, strict=True):
        if axes is not None and len(axes) < np.ndim(x):
            shapes[i] = tuple(1 if a in axes else n for a, n in enumerate(np.shape(x)))
    return shapes


def root_mean_squares(
    norms: Norms, units: Units, leaves: Sequence[Any], axis_name: AxisName
) -> Norms:
    """The norms, where they are compared as such; else each over the root of its elements."""
    if norms is None or not units.is_rms:
        return norms
    roots = np.ones(units.size, np.float32)
    for x, axes, i in zip(leaves, units.axes, units.entry, strict=True):
        elements = math.prod(np.shape(x)[axis] for axis in axes or ())
        shards = replica_count(frozenset(), shard_axes(x, axis_name))
        roots[i] = math.sqrt(max(elements * shards, 1))
    if units.is_vector:
        return norms / roots.astype(norms.dtype)
    return [norm / float(root) for norm, root in zip(norms, roots, strict=True)]


def split(vector: Array, like: Sequence[Array]) -> list[Array]:
    """The entries of a vector in the shapes of some arrays."""
    ends = np.cumsum([x.size for x in like])
    parts = jnp.split(vector.reshape(-1), ends[:-1]) if like else []
    return [part.reshape(x.shape) for part, x in zip(parts, like, strict=True)]


def alike(norms: Sequence[Array]) -> list[list[int]]:
    """The places of norms of one type: stacked they are one array, which is cheaper than many."""
    of_type: dict[Any, list[int]] = {}
    for i, norm in enumerate(norms):
        of_type.setdefault(jax.typeof(norm), []).append(i)
    return list(of_type.values())


def stack(norms: Sequence[Array], places: Sequence[Sequence[int]]) -> list[Array]:
    """One array for the norms at places that go together."""
    return [jnp.stack([norms[i] for i in own]) for own in places]


def map_norms(fun: Callable[..., Array], norms: Norms, *others: Norms) -> Norms:
    """An elementwise function of norms; of a list, it sees those of one type as one array."""
    if not isinstance(norms, list):
        return fun(norms, *others)
    places = alike(norms)
    stacks = map(fun, *(stack(x, places) for x in (norms, *others)))
    rows = itertools.chain(*map(jnp.unstack, stacks))
    by_place = dict(zip(itertools.chain(*places), rows, strict=True))
    return [by_place[i] for i in range(len(norms))]


def is_measured(leaf: Any) -> bool:
    """Whether a leaf has a norm: a float0, or the integer parameter it belongs to, has none."""
    if is_float0(leaf):
        return False
    try:
        return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
    except TypeError:  # what `optax.tree.map_params` puts in the place of a parameter
        return True


def measured_shapes(tree: Tree) -> list[Any]:
    """The measured leaves for their shapes; in `init` they may be placeholders."""
    return [x for x in jax.tree.leaves(tree) if is_measured(x)]


def all_axes(x: Any) -> tuple[int, ...]:
    """All axes of an array."""
    return tuple(range(np.ndim(x)))


def select_groups(argument: str, units: Units, keys: Sequence[Any]) -> Units:
    """The groups that a mapping names; other leaves are left alone.

    A key is a label, or a tuple of labels that become one group.
    """
    known = set(units.names)
    group_of: dict[Any, int] = {}
    for position, key in enumerate(keys):
        members = key if isinstance(key, tuple) and key not in known else (key,)
        group_of |= dict.fromkeys(members, position)
    unknown = [label for label in group_of if label not in known]
    if unknown and known:
        hint = f"The labels of the tree are {', '.join(sorted(map(repr, known)))}."
        rule = "a mapping from labels of the tree to thresholds"
        raise value_error(argument, rule, repr(unknown[0]), hint)
    groups = [group_of.get(units.names[i]) for i in units.entry]
    pairs = list(zip(groups, units.axes, strict=True))
    axes = tuple(None if group is None else axes for group, axes in pairs)
    return Units(axes, tuple(group or 0 for group in groups), len(keys), tuple(keys))


@dataclasses.dataclass(frozen=True)
class Granularity:
    """Of what norms are taken: cuts a tree into units.

    Attributes:
        cut: `tree -> Units`, called when the tree is traced.
        is_group: whether units have names, which a mapping of thresholds can use.
    """

    cut: Callable[[Tree], Units]
    is_group: bool = False


def as_granularity(granularity: Any) -> Granularity:
    """A granularity by name, or as it is."""
    if isinstance(granularity, Granularity):
        return granularity
    check_choice("granularity", granularity, ("global", "leaf"))
    whole = Granularity(lambda tree: tree_units(measured_shapes(tree)))
    return whole if granularity == "global" else layers(0)


@public
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

    def cut(tree: Tree) -> Units:
        label_tree = param_labels(tree) if callable(param_labels) else param_labels
        labels = broadcast_prefix("param_labels", label_tree, "updates", tree)
        names = tuple(dict.fromkeys(labels))
        pairs = [
            (names.index(label), all_axes(x))
            for label, x in zip(labels, jax.tree.leaves(tree), strict=True)
            if is_measured(x)
        ]
        index, axes = zip(*pairs, strict=True) if pairs else ((), ())
        return Units(axes, index, len(names), names)

    return Granularity(cut, is_group=True)


@public
def layer(num_layer_axes: Any = 1, *, rms: bool = False) -> Granularity:
    """Each leaf is a unit, or each layer of a leaf in which layers are stacked for `lax.scan`.

    Args:
        num_layer_axes: how many leading axes of a leaf index layers, 0 for an ordinary leaf; an
            integer >= 0 or a prefix tree of integers. These axes must not be sharded inside
            `shard_map`.
        rms: compares thresholds with the root mean square of a unit, not with its norm.

    Returns:
        A granularity for `clip_by_norm`.

    Raises:
        ValueError: when traced, `num_layer_axes` exceeds the rank of a leaf.
        TypeError: when traced, `num_layer_axes` holds no static integers.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> clip = gcx.clip_by_norm(1.0, granularity=gcx.granularities.layer(1))
        >>> grads = jnp.array([[0.0, 4.0], [0.5, 0.0]])  # two layers
        >>> clip.update(grads, clip.init(grads))[0].tolist()
        [[0.0, 1.0], [0.5, 0.0]]
    """
    return layers(num_layer_axes, rms=rms)


@public
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
    check_axis(axis)

    def cut(tree: Tree) -> Units:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        axes = [_unit_axes(path, x, axis) for path, x in leaves if is_measured(x)]
        units = units_within_leaves(measured_shapes(tree), axes)
        # No vector, for norms of leaves that are sharded differently vary over different devices.
        return units._replace(is_local=True, is_vector=False)

    return Granularity(cut)


def layers(num_layer_axes: Any, *, rms: bool = False) -> Granularity:
    """`layer`, under the name of the function that takes `num_layer_axes`."""
    for depth in jax.tree.leaves(num_layer_axes):
        check_static("num_layer_axes", depth)
        check_count("num_layer_axes", depth, _DEPTH, low=0)

    def cut(tree: Tree) -> Units:
        depths = broadcast_prefix("num_layer_axes", num_layer_axes, "updates", tree)
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        measured = [
            (*leaf, n) for leaf, n in zip(leaves, depths, strict=True) if is_measured(leaf[1])
        ]
        for path, x, n in measured:
            if n > np.ndim(x):
                got = f"{n} for {describe(x)} at {leaf_path('updates', path)}"
                raise value_error("num_layer_axes", "<= the rank", got, _DEPTH)
        axes = [tuple(range(n, np.ndim(x))) for _, x, n in measured]
        return units_within_leaves(measured_shapes(tree), axes)._replace(is_rms=rms)

    return Granularity(cut)


def _unit_axes(path: Any, x: Any, axis: Any) -> tuple[int, ...]:
    """The axes that the norm of a unit runs over."""
    rank = np.ndim(x)
    if axis is not None:
        hint = "Treat leaves of another rank separately, with `optax.masked` or `optax.partition`."
        return axes_within(axis, x, "every leaf", leaf_path("updates", path), hint)
    if sum(n != 1 for n in np.shape(x)) <= 1:  # scalars and vectors: the whole leaf
        return tuple(range(rank))
    # Input axes of linear layers (IO), of attention projections, of HWIO and DHWIO filters.
    known = {2: (0,), 3: (0,), 4: (0, 1, 2), 5: (0, 1, 2, 3)}
    if rank not in known:
        rule = "given for leaves of more than 5 axes"
        got = f"None for {describe(x)} at {leaf_path('updates', path)}"
        hint = "Pass the axes that the norm of a unit runs over."
        raise value_error("axis", rule, got, hint)
    return known[rank]
