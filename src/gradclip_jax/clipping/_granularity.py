"""From tree to units: of what the norm is taken, and which leaf each unit's factor scales.

A granularity is a function `tree -> Units`, run when the tree is traced.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import broadcast_prefix, check_count, describe, error_message, leaf_path
from .._mesh import constrain_replicated, replica_count, shard_axes, varying_axes
from .._types import Array, AxisName, Tree
from ._layout import Slots, unit_slots
from ._norm import is_measured, measured_leaves, norm_of_leaves, unit_norms
from ._rule import Rule, as_rule, constant
from ._scale import Factor


class Units(NamedTuple):
    """A tree cut into units, for one call.

    Attributes:
        norms: the measured leaves to norms, one array of units for each rule.
        rules: what sets the threshold of each array.
        spread: factors, one for each array, to one that broadcasts against each leaf; None for
            a leaf that is left alone.
        shapes: the shape of each array; known where `axis_name` is not bound, as in `init`.
        seen: what the rules see of the norms: themselves, or the RMS.
        names: a name for each array, where metrics tell them apart.
    """

    norms: Callable[[list[Array]], list[Array]]
    rules: Sequence[Rule]
    spread: Callable[[Sequence[Factor]], list[Factor | None]]
    shapes: Sequence[tuple[int, ...]]
    seen: Callable[[list[Array]], list[Array]] = list
    names: Sequence[str] = ()


Granularity = Callable[[Tree], Units]


def global_units(rule: Rule, ord: float, axis_name: AxisName) -> Granularity:
    """All leaves are one unit."""

    def units(tree: Tree) -> Units:
        count = len(measured_leaves(tree))

        def norms(leaves: list[Array]) -> list[Array]:
            return [norm_of_leaves(leaves, ord, axis_name)]

        return Units(norms, [rule], lambda factors: [factors[0]] * count, [()])

    return units


def group_units(
    function: str, max_norms: dict[Any, Rule], param_labels: Any, ord: float, axis_name: AxisName
) -> Granularity:
    """All leaves of a label, or of the labels in a tuple, are one unit; others are left alone."""
    group_of = {
        label: group
        for group, key in enumerate(max_norms)
        for label in (key if isinstance(key, tuple) else (key,))
    }

    def units(tree: Tree) -> Units:
        label_tree = param_labels(tree) if callable(param_labels) else param_labels
        per_leaf = broadcast_prefix(function, "param_labels", label_tree, "updates", tree)
        unused = [label for label in group_of if label not in per_leaf]
        if unused and per_leaf:
            known = ", ".join(sorted({repr(label) for label in per_leaf}))
            hint = f"The labels of the tree are {known}."
            rule = "a mapping from labels of the tree to thresholds"
            raise ValueError(error_message(function, "max_norms", rule, repr(unused[0]), hint))
        measured = zip(per_leaf, jax.tree.leaves(tree), strict=True)
        groups = [group_of.get(label) for label, x in measured if is_measured(x)]
        slots = tuple(group for group in groups if group is not None)

        def norms(leaves: list[Array]) -> list[Array]:
            chosen = [x for x, group in zip(leaves, groups, strict=True) if group is not None]
            axes = tuple(tuple(range(x.ndim)) for x in chosen)
            where = Slots(slots, axes, len(max_norms))
            vector = unit_norms(chosen, where, ord, axis_name)
            return [vector[group] for group in range(len(max_norms))]

        def spread(factors: Sequence[Factor]) -> list[Factor | None]:
            return [None if group is None else factors[group] for group in groups]

        names = ["+".join(map(str, k)) if isinstance(k, tuple) else str(k) for k in max_norms]
        return Units(norms, list(max_norms.values()), spread, [()] * len(names), names=names)

    return units


def leaf_units(
    function: str,
    argument: str,
    thresholds: Any,
    ord: float,
    axis_name: AxisName,
    stack_axes: Any,
    *,
    rms: bool = False,
) -> Granularity:
    """Each leaf is a unit, or each layer stacked along its leading `stack_axes`."""
    for path, threshold in jax.tree_util.tree_leaves_with_path(thresholds, is_leaf=_is_rule):
        as_rule(function, leaf_path(argument, path), threshold)

    def units(tree: Tree) -> Units:
        leaves = measured_leaves(tree)
        stacked = _stack_axes(function, stack_axes, tree)
        axes = [tuple(range(n, x.ndim)) for x, n in zip(leaves, stacked, strict=True)]
        prefix = broadcast_prefix(function, argument, thresholds, "updates", tree, _is_rule)
        entries = [t for t, x in zip(prefix, jax.tree.leaves(tree), strict=True) if is_measured(x)]
        slots = unit_slots(leaves, axes)
        rules, members = _distinct_rules(function, argument, entries, _spans(slots))
        return _vector_units(leaves, slots, rules, members, ord, axis_name, rms=rms)

    return units


def inner_units(function: str, rule: Rule, ord: float, axis: Any) -> Granularity:
    """Rows or filters: the norm runs over `axis` of each leaf, or over Optax's choice by rank.

    Leaves that vary over different axes of a `shard_map` are kept apart, or all would seem to
    vary over all of them. The rule must have no state, which would depend on that.
    """

    def units(tree: Tree) -> Units:
        leaves = measured_leaves(tree)
        axes = [
            _unit_axes(function, path, x, axis)
            for path, x in jax.tree_util.tree_leaves_with_path(tree)
            if is_measured(x)
        ]
        groups: dict[frozenset[str], list[int]] = {}
        for i, x in enumerate(leaves):
            groups.setdefault(varying_axes(x), []).append(i)
        parts = [
            _own_units([leaves[i] for i in group], [axes[i] for i in group], rule, ord)
            for group in groups.values()
        ]

        def norms(leaves: list[Array]) -> list[Array]:
            pairs = zip(groups.values(), parts, strict=True)
            return [part.norms([leaves[i] for i in group])[0] for group, part in pairs]

        def spread(factors: Sequence[Factor]) -> list[Factor | None]:
            by_leaf: dict[int, Factor | None] = {}
            for group, part, factor in zip(groups.values(), parts, factors, strict=True):
                by_leaf |= dict(zip(group, part.spread([factor]), strict=True))
            return [by_leaf[i] for i in range(len(leaves))]

        shapes = [part.shapes[0] for part in parts]
        return Units(norms, [rule] * len(parts), spread, shapes, list)

    return units


def _own_units(
    leaves: Sequence[Array], axes: Sequence[tuple[int, ...]], rule: Rule, ord: float
) -> Units:
    slots = unit_slots(leaves, axes, within_device=True)
    return _vector_units(leaves, slots, [rule], [list(range(slots.size))], ord, None)


def _vector_units(
    leaves: Sequence[Array],
    slots: Slots,
    rules: Sequence[Rule],
    members: Sequence[list[int]],
    ord: float,
    axis_name: AxisName,
    *,
    rms: bool = False,
) -> Units:
    """Units with a slot each; `members` are the slots of each rule."""
    counts = [len(span) for span in _spans(slots)]
    places = [np.asarray(slots_of_rule, int) for slots_of_rule in members]
    order = np.argsort(np.concatenate(places)) if len(rules) > 1 else None

    def norms(leaves: list[Array]) -> list[Array]:
        vector = unit_norms(leaves, slots, ord, axis_name)
        return [vector] if len(rules) == 1 else [vector[at] for at in places]

    def spread(factors: Sequence[Factor]) -> list[Factor | None]:
        if not leaves:
            return []
        columns = [jnp.concatenate(column) for column in zip(*factors, strict=True)]
        if order is not None:
            columns = [column[order] for column in columns]
        parts = [lax.split(column, counts) for column in columns]
        return [
            Factor(*(_against(x, over, part) for part in pieces))
            for x, over, *pieces in zip(leaves, slots.axes, *parts, strict=True)
        ]

    def root_mean_squares(norms: list[Array]) -> list[Array]:
        shards = [replica_count(frozenset(), shard_axes(x, axis_name)) for x in leaves]
        whole = [x.size * n / max(c, 1) for x, n, c in zip(leaves, shards, counts, strict=True)]
        roots = np.sqrt(np.maximum(np.repeat(whole, counts), 1))
        return [x / roots[at].astype(x.dtype) for x, at in zip(norms, places, strict=True)]

    shapes = [(len(at),) for at in places]
    return Units(norms, rules, spread, shapes, root_mean_squares if rms else list)


def _spans(slots: Slots) -> list[range]:
    """The slots of each leaf."""
    return [range(*ends) for ends in itertools.pairwise((*slots.first, slots.size))]


def _against(x: Any, axes: Sequence[int], units: Array) -> Array:
    """One value for each unit of x, shaped to broadcast against x."""
    units = constrain_replicated(units, x)
    if units.size == 1:
        return units.reshape(())
    return units.reshape([1 if axis in axes else n for axis, n in enumerate(x.shape)])


def _is_rule(entry: Any) -> bool:
    return isinstance(entry, Rule)


def _distinct_rules(
    function: str, argument: str, entries: Sequence[Any], spans: Sequence[range]
) -> tuple[list[Rule], list[list[int]]]:
    """Rules without repetition, and the slots of each; all numbers together are one rule."""
    numbers: list[tuple[Any, range]] = []
    rules: dict[int, tuple[Rule, list[int]]] = {}
    for entry, span in zip(entries, spans, strict=True):
        if isinstance(entry, Rule) or callable(entry):
            found = rules.setdefault(id(entry), (as_rule(function, argument, entry), []))
            found[1].extend(span)
        else:
            as_rule(function, argument, entry)
            numbers.append((entry, span))
    distinct = list(rules.values())
    if numbers:
        same = all(entry is numbers[0][0] for entry, _ in numbers)
        wide = [jnp.full(len(span), entry, float) for entry, span in numbers if not same]
        value = numbers[0][0] if same else jnp.concatenate(wide)
        distinct.append((constant(value), [slot for _, span in numbers for slot in span]))
    return [rule for rule, _ in distinct], [slots for _, slots in distinct]


def _stack_axes(function: str, stack_axes: Any, tree: Tree) -> list[int]:
    hint = "Give the number of leading axes that index layers, 0 for an ordinary leaf."
    per_leaf = broadcast_prefix(function, "stack_axes", stack_axes, "updates", tree)
    checked: list[int] = []
    for axes, (path, x) in zip(per_leaf, jax.tree_util.tree_leaves_with_path(tree), strict=True):
        check_count(function, "stack_axes", axes, hint, low=0)
        if is_measured(x):
            if int(axes) > np.ndim(x):
                got = f"{axes} for {describe(x)} at {leaf_path('updates', path)}"
                raise ValueError(error_message(function, "stack_axes", "<= the rank", got, hint))
            checked.append(int(axes))
    return checked


def _unit_axes(function: str, path: Any, x: Any, axis: Any) -> tuple[int, ...]:
    """The axes a unit's norm runs over."""
    rank = np.ndim(x)
    if axis is not None:
        axes = (axis,) if np.ndim(axis) == 0 else tuple(axis)
        if any(not -rank <= a < rank for a in axes) or len({a % rank for a in axes}) < len(axes):
            rule = f"distinct axes of every leaf, in [{-rank}, {rank})"
            got = f"{axis} for {describe(x)} at {leaf_path('updates', path)}"
            hint = "Treat leaves of another rank apart, with `optax.masked` or `optax.partition`."
            raise ValueError(error_message(function, "axis", rule, got, hint))
        return tuple(sorted(a % rank for a in axes))
    if sum(n != 1 for n in np.shape(x)) <= 1:  # scalars and vectors: the whole leaf
        return tuple(range(rank))
    # Input axes of linear layers (IO), of attention projections, of HWIO and DHWIO filters.
    known = {2: (0,), 3: (0,), 4: (0, 1, 2), 5: (0, 1, 2, 3)}
    if rank not in known:
        rule = "given for leaves of more than 5 axes"
        got = f"None for {describe(x)} at {leaf_path('updates', path)}"
        hint = "Pass the axes the unit-wise norm runs over."
        raise ValueError(error_message(function, "axis", rule, got, hint))
    return known[rank]
