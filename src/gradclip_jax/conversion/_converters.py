"""Convert states of Optax and of an earlier version of this package to `WrapperState`.

| state | converted to |
| --- | --- |
| `optax.MultiSteps` | an accumulation |
| `optax.apply_if_finite` | a guard with the cause "nonfinite" |
| a guard or an accumulation of the version that had one state for each | the same |

States are recognized by their fields, because a restored checkpoint may contain other types. A
conversion only moves arrays to other fields, so it also converts a state that contains indices
instead of arrays. A field without a counterpart is None.
"""

from collections.abc import Callable
from typing import Any, Final

import jax
import optax

from .._states import is_own_state, with_structure_of
from .._types import Path, Tree
from .._weighted_sum import WeightedSum
from ..guarding._loss_scale import LossScaleState
from ..guarding._skip_spikes import SpikeState
from ..wrappers._accumulation import AccumulationState
from ..wrappers._state import GuardState, WrapperState


def to_wrapper_states(state: Tree) -> Tree:
    """Replace every guard and accumulation of another type in a state by a `WrapperState`."""

    def convert(node: Tree) -> Tree:
        conversion = _conversion_of(node)
        node = conversion(node) if conversion else node
        if not hasattr(node, "inner_state"):
            return node
        return node._replace(inner_state=to_wrapper_states(node.inner_state))

    def is_convertible(node: Tree) -> bool:
        return is_own_state(node) or _conversion_of(node) is not None

    return jax.tree.map(convert, state, is_leaf=is_convertible)


def _partial_state(kind: Any, **fields: Any) -> Any:
    """Return a state of a type with the given fields; the other fields are None."""
    return kind(**dict.fromkeys(kind._fields) | fields)


def _accumulation(inner_state: Tree, **fields: Any) -> WrapperState:
    """Return the state of an accumulation, with the given fields of `AccumulationState`."""
    return _partial_state(
        WrapperState,
        outer_guards=(),
        accumulation=_partial_state(AccumulationState, **fields),
        inner_guards=(),
        inner_state=inner_state,
    )


def _guard(state: GuardState, inner_state: Tree, **fields: Any) -> WrapperState:
    """Return the state of a guard, with the given fields of `WrapperState`."""
    return _partial_state(
        WrapperState, outer_guards=(), inner_guards=(state,), inner_state=inner_state, **fields
    )


# Optax


def _from_multi_steps(old: optax.MultiStepsState) -> WrapperState:
    """Convert the state of `optax.MultiSteps`, which does not contain a sum of weights."""
    return _accumulation(
        old.inner_opt_state,
        mini_step=old.mini_step,
        gradient_step=old.gradient_step,
        gradient=_partial_state(WeightedSum, total=old.acc_grads),
    )


def _from_apply_if_finite(old: optax.ApplyIfFiniteState) -> WrapperState:
    """Convert the state of `optax.apply_if_finite`."""
    guard = GuardState(skipped={"nonfinite": old.total_notfinite}, rule_state=())
    return _guard(guard, old.inner_state, consecutive_skips=old.notfinite_count)


# The earlier version of this package, in which each guard and accumulation had its own state


def _from_old_accumulation(old: Any) -> WrapperState:
    """Convert the state of `accumulate_gradients`."""
    names = set(old._fields) & set(AccumulationState._fields)
    return _accumulation(
        old.inner_opt_state,
        **{name: getattr(old, name) for name in names},
        gradient=WeightedSum(total=old.acc_grads, weight=old.total_weight),
        loss=WeightedSum(total=old.loss_sum, weight=old.loss_weight),
    )


def _from_old_guard(old: Any) -> WrapperState:
    """Convert the state of a guard, which contained the counts and the fields of its rule."""
    fields = {name: value for name, value in old._asdict().items() if value is not None}
    skipped = {
        name.removeprefix("skipped_"): count
        for name, count in fields.items()
        if name.startswith("skipped_")
    }
    rule_state = fields.get("rule_state", ())  # of `skip_if`
    if "loss_scale" in fields:
        rule_state = LossScaleState(old.loss_scale, old.good_steps)
    if "rule_states" in fields:  # of `skip_spikes`, without a threshold that is None
        names = {"skip_threshold": "norm", "loss_threshold": "loss"}
        thresholds = {names[name]: x for name, x in fields.items() if name in names}
        rule_state = SpikeState(thresholds, old.rule_states)
    return _guard(
        GuardState(skipped, rule_state),
        old.inner_state,
        consecutive_skips=old.consecutive_skips,
        guard_failed=old.guard_failed,
        grad_norm=old.grad_norm,
    )


def with_rule_names(like: Tree, state: Tree) -> Tree:
    """Add the names of rules to the state of a clip or guard of the earlier version.

    That version did not store the names of rules. A state whose paths are those of `like` without
    one key receives the structure of `like`. Other states are returned unchanged.
    """
    paths = [[path for path, _ in jax.tree.leaves_with_path(x)] for x in (like, state)]

    def is_without_one_key(new: Path, old: Path) -> bool:
        return new == old or any(old == (*new[:i], *new[i + 1 :]) for i in range(len(new)))

    if len(paths[0]) == len(paths[1]) and all(map(is_without_one_key, *paths)):
        return with_structure_of(like, state)
    return state


_CONVERSIONS: Final[dict[frozenset[str], Callable[[Any], WrapperState]]] = {
    frozenset(optax.MultiStepsState._fields): _from_multi_steps,
    frozenset(optax.ApplyIfFiniteState._fields): _from_apply_if_finite,
    frozenset({"acc_grads", "total_weight"}): _from_old_accumulation,
    frozenset({"grad_norm", "guard_failed", "inner_state"}): _from_old_guard,
}
"""A mapping from names of fields that identify a type of state to its conversion."""


def _conversion_of(node: object) -> Callable[[Any], WrapperState] | None:
    """Return the conversion of a state, or None for a state that needs no conversion."""
    fields = set() if is_own_state(node) else set(getattr(type(node), "_fields", ()))
    return next((x for names, x in _CONVERSIONS.items() if names <= fields), None)
