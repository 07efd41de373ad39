"""From a threshold as the user gives it to rules, and which units each of them serves."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import check_state, error_message, leaf_path
from .._tree_checks import broadcast_prefix
from .._types import Array, Threshold, Tree
from ._rule import Rule, apply_rules, as_rule, check_params, constant, first_state
from ._units import Units, is_measured, unit_shape


class Assignment(NamedTuple):
    """A rule and the units that it serves.

    Attributes:
        rule: the rule.
        units: the index of a unit, whose norm the rule sees as an array of shape (), or a vector
            of indices.
    """

    rule: Rule
    units: Any


Served: TypeAlias = list[Assignment]


def check_thresholds(function: str, argument: str, threshold: Any) -> None:
    """Refuses what is no threshold, and no tree of thresholds."""
    if isinstance(threshold, Mapping):  # its keys may be of several types, and have no order
        for key, entry in threshold.items():
            check_thresholds(function, f"{argument}[{key!r}]", entry)
        return
    for path, entry in jax.tree_util.tree_leaves_with_path(threshold, is_leaf=_is_rule):
        as_rule(function, leaf_path(argument, path), entry)


def assign_rules(
    function: str, argument: str, threshold: Threshold, units: Units, tree: Tree
) -> Served:
    """The rules of a tree; every unit is served by one of them."""
    if _is_single(threshold):
        rule = as_rule(function, argument, threshold)
        is_one = units.is_scalar and units.size == 1 and not units.names
        return [Assignment(rule, 0 if is_one else np.arange(units.size))]
    if units.size == 0:
        return []
    if units.names and isinstance(threshold, Mapping) and set(threshold) == set(units.names):
        return [
            Assignment(as_rule(function, argument, threshold[name]), i)
            for i, name in enumerate(units.names)
        ]
    entries = broadcast_prefix(function, argument, threshold, "updates", tree, _is_rule)
    leaves = jax.tree.leaves(tree)
    kept = [entry for entry, x in zip(entries, leaves, strict=True) if is_measured(x)]
    shapes = [x for x in leaves if is_measured(x)]
    return _by_leaf(function, argument, kept, units, shapes)


def assign_to_part(function: str, served: Served, units: Units, *, alone: bool) -> Served:
    """The rules of one of several parts of a tree that are sharded in different ways."""
    if alone:
        return served
    rule = served[0].rule
    if len(served) > 1 or jax.tree.leaves(first_states(served)):
        hint = "Treat leaves that are sharded alike together, with `optax.partition`."
        rule_text = "without a state where leaves are sharded along different mesh axes"
        got = "one that keeps a history, or a tree of thresholds"
        raise ValueError(error_message(function, "threshold", rule_text, got, hint))
    return [Assignment(rule, np.arange(units.size))]


def check_labels(function: str, argument: str, thresholds: Mapping[Any, Any]) -> None:
    """Refuses a mapping in which a label, or the name of a group in the metrics, stands twice."""
    labels = [x for key in thresholds for x in (key if isinstance(key, tuple) else (key,))]
    for names in (list(map(str, labels)), list(map(group_name, thresholds))):
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            hint = "A label has one threshold, and a group a name of its own in the metrics."
            rule = "a mapping in which each label stands once"
            raise ValueError(error_message(function, argument, rule, f"{twice!r} twice", hint))


def group_name(key: Any) -> str:
    """The name of a group in the metrics."""
    return "+".join(map(str, key)) if isinstance(key, tuple) else str(key)


def first_states(served: Served) -> tuple[Any, ...]:
    """The states of all rules before the first norm; () if none has one."""
    states = tuple(first_state(rule, np.shape(units)) for rule, units in served)
    return states if jax.tree.leaves(states) else ()


def current_states(function: str, served: Served, state: Any, kind: type) -> tuple[Any, ...]:
    """The states of all rules; refuses no state where one of them remembers something."""
    if not first_states(served):
        return tuple(first_state(rule, np.shape(units)) for rule, units in served)
    check_state(function, state, kind)
    return state.rules


def needed_params(
    function: str, served: Served, updates: Tree, params: Tree | None
) -> list[Array] | None:
    """The leaves of the parameters, if a rule is relative to them."""
    if not any(rule.uses_params for rule, _ in served):
        return None
    check_params(function, updates, params)
    measured = zip(jax.tree.leaves(updates), jax.tree.leaves(params), strict=True)
    return [jnp.asarray(param) for x, param in measured if is_measured(x)]


def apply_assigned(
    served: Served, norms: Array, states: Sequence[Any], param_norms: Array | None
) -> tuple[Array, tuple[Any, ...]]:
    """One vector with the threshold of each unit, in the order of units, and the next states."""
    rules = [rule for rule, _ in served]
    of_params = None if param_norms is None else [param_norms[units] for _, units in served]
    thresholds, states = apply_rules(rules, [norms[i] for _, i in served], states, of_params)
    order = np.concatenate([np.atleast_1d(units) for _, units in served] or [np.arange(0)])
    vector = jnp.concatenate([jnp.atleast_1d(x) for x in thresholds] or [norms])
    is_in_order = np.array_equal(order, np.arange(order.size))
    return vector if is_in_order else vector[np.argsort(order)], states


def _by_leaf(
    function: str, argument: str, entries: Sequence[Any], units: Units, leaves: Sequence[Any]
) -> Served:
    """Rules without repetition; all numbers together are one rule."""
    entry_of: dict[int, Any] = {}
    for entry, x, axes, first in zip(entries, leaves, units.axes, units.first, strict=True):
        rows = 0 if axes is None else int(np.prod(unit_shape(x, axes), dtype=int))
        for unit in range(first, first + rows):
            known = entry_of.setdefault(unit, entry)
            if known is not entry and not _same_number(known, entry):
                rule = "the same for all leaves of a unit"
                got = f"{known!r} and {entry!r}"
                hint = "Give one threshold, or clip such leaves apart: another granularity."
                raise ValueError(error_message(function, argument, rule, got, hint))
    served: dict[int, tuple[Rule, list[int]]] = {}
    numbers: list[tuple[int, Any]] = []
    for unit, entry in sorted(entry_of.items()):
        if isinstance(entry, Rule) or callable(entry):
            rule = as_rule(function, argument, entry)
            served.setdefault(id(entry), (rule, []))[1].append(unit)
        else:
            numbers.append((unit, entry))
    assignments = [Assignment(rule, np.asarray(chosen)) for rule, chosen in served.values()]
    if numbers:
        chosen, values = zip(*numbers, strict=True)
        assignments.append(Assignment(constant(_vector(values)), np.asarray(chosen)))
    return assignments


def _vector(values: Sequence[Any]) -> Any:
    first = values[0]
    if all(_same_number(value, first) for value in values):
        return first
    return jnp.stack([jnp.asarray(value, float) for value in values])


def _same_number(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, (int, float)) and isinstance(b, (int, float)) and a == b)


def _is_single(threshold: Any) -> bool:
    return _is_rule(threshold) or jax.tree.structure(threshold) == jax.tree.structure(0)


def _is_rule(entry: Any) -> bool:
    return isinstance(entry, Rule)
