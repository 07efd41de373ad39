"""Convert states of Optax and of an earlier version of this package to `WrapperState`, and back.

| state | converted to | back |
| --- | --- | --- |
| `optax.MultiSteps` | an accumulation | yes |
| `optax.apply_if_finite` | a guard with the cause "nonfinite" | yes |
| a guard or an accumulation of the version that had one state for each | the same | no |

States are recognized by their fields, because a restored checkpoint may contain other types. A
field without a counterpart becomes None, so that `convert_state` keeps the initial value of the new
optimizer.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._states import is_own_state
from .._types import Path, Tree
from .._weighted_sum import WeightedSum
from ..guarding._loss_scale import LossScaleState
from ..guarding._skip_spikes import SpikeState
from ..wrappers._accumulation import AccumulationState
from ..wrappers._state import GuardState, WrapperState


def to_wrapper_states(state: Tree) -> Tree:
    """Replace every guard and accumulation of another type in a state by a `WrapperState`."""

    def convert(node: Tree) -> Tree:
        if conversion := _conversion_of(node):
            inner_state = to_wrapper_states(getattr(node, conversion.inner))
            return conversion.to_wrapper(node)._replace(inner_state=inner_state)
        if is_own_state(node) and hasattr(node, "inner_state"):
            return node._replace(inner_state=to_wrapper_states(node.inner_state))
        return node

    return jax.tree.map(convert, state, is_leaf=_is_convertible)


def from_wrapper_states(like: Tree, state: Tree) -> Tree:
    """Convert the result of `to_wrapper_states` to the types in `like`."""

    def convert(node: Tree, converted: Tree) -> Tree:
        conversion = _conversion_of(node)
        name = conversion.inner if conversion else "inner_state"
        if not hasattr(node, name):
            return converted
        inner_state = from_wrapper_states(getattr(node, name), converted.inner_state)
        if conversion is None or conversion.from_wrapper is None:
            return converted._replace(inner_state=inner_state)
        return conversion.from_wrapper(node, converted)._replace(**{name: inner_state})

    return jax.tree.map(convert, like, state, is_leaf=_is_convertible)


def partial_state(kind: Any, **fields: Any) -> Any:
    """Return a state of a type with the given fields; the other fields are None."""
    return kind(**dict.fromkeys(kind._fields) | fields)


def accumulation_state(**fields: Any) -> WrapperState:
    """Return the state of an accumulation, with the given fields of `AccumulationState`."""
    window = partial_state(AccumulationState, **fields)
    return partial_state(WrapperState, outer_guards=(), accumulation=window, inner_guards=())


# Optax


def _from_multi_steps(old: optax.MultiStepsState) -> WrapperState:
    """Convert the state of `optax.MultiSteps`, in which each micro-batch has the weight 1."""
    weight = jnp.asarray(old.mini_step, jnp.float32)
    return accumulation_state(
        mini_step=old.mini_step,
        gradient_step=old.gradient_step,
        gradient=WeightedSum(total=old.acc_grads, weight=weight),
    )


def _to_multi_steps(like: optax.MultiStepsState, state: WrapperState) -> optax.MultiStepsState:
    """Return a state of `optax.MultiSteps` with the window of an accumulation."""
    return like._replace(
        mini_step=state.accumulation.mini_step,
        gradient_step=state.accumulation.gradient_step,
        acc_grads=state.accumulation.gradient.total,
    )


def _from_apply_if_finite(old: optax.ApplyIfFiniteState) -> WrapperState:
    """Convert the state of `optax.apply_if_finite`."""
    return partial_state(
        WrapperState,
        consecutive_skips=old.notfinite_count,
        outer_guards=(),
        inner_guards=(GuardState(skipped={"nonfinite": old.total_notfinite}, rule_state=()),),
    )


def _to_apply_if_finite(
    like: optax.ApplyIfFiniteState, state: WrapperState
) -> optax.ApplyIfFiniteState:
    """Return a state of `optax.apply_if_finite` with the counts of a guard."""
    return like._replace(
        notfinite_count=state.consecutive_skips,
        last_finite=jnp.asarray(state.consecutive_skips) == 0,
        total_notfinite=state.inner_guards[0].skipped["nonfinite"],
    )


# The earlier version of this package, in which each guard and accumulation had its own state


def _from_old_accumulation(old: Any) -> WrapperState:
    """Convert the state of `accumulate_gradients`."""
    return accumulation_state(
        mini_step=old.mini_step,
        gradient_step=old.gradient_step,
        accumulation_steps=old.accumulation_steps,
        micro_batch_count=old.micro_batch_count,
        empty_windows=old.empty_windows,
        gradient=WeightedSum(total=old.acc_grads, weight=old.total_weight),
        loss=WeightedSum(total=old.loss_sum, weight=old.loss_weight),
    )


def _from_old_guard(old: Any) -> WrapperState:
    """Convert the state of a guard, which contained the counts and the fields of its rule."""
    fields = {name: value for name, value in old._asdict().items() if value is not None}
    counts = {name: count for name, count in fields.items() if name.startswith("skipped_")}
    rule_state = fields.get("rule_state", ())  # of `skip_if`
    if "loss_scale" in fields:
        rule_state = LossScaleState(old.loss_scale, old.good_steps)
    if "rule_states" in fields:  # of `skip_spikes`, without a threshold that is None
        names = {"skip_threshold": "norm", "loss_threshold": "loss"}
        thresholds = {names[name]: x for name, x in fields.items() if name in names}
        rule_state = SpikeState(thresholds, old.rule_states)
    skipped = {name.removeprefix("skipped_"): count for name, count in counts.items()}
    return partial_state(
        WrapperState,
        consecutive_skips=old.consecutive_skips,
        guard_failed=old.guard_failed,
        outer_guards=(),
        inner_guards=(GuardState(skipped, rule_state),),
        grad_norm=old.grad_norm,
    )


def with_rule_names(like: Tree, state: Tree) -> Tree:
    """Add the names of rules to the state of a clip or guard of the earlier version.

    That version did not store the names of rules. If a state has the same fields as `like`, it
    receives the names in `like`. Other states are returned unchanged.
    """
    values = dict(jax.tree.leaves_with_path(state))
    rules, rule_state = map(jax.tree_util.GetAttrKey, ("rules", "rule_state"))

    def without_name(path: Path) -> Path:
        # The name follows the index or key of a rule, or the field with the state of a `SkipRule`.
        field, distance = (rules, 2) if rules in path else (rule_state, 1)
        place = path.index(field) + distance if field in path else len(path)
        return path if path in values else (*path[:place], *path[place + 1 :])

    if {without_name(path) for path, _ in jax.tree.leaves_with_path(like)} != set(values):
        return state
    return jax.tree.map_with_path(lambda path, _: values[without_name(path)], like)


# Types of states


class _Conversion(NamedTuple):
    """Conversion of a type of state to a `WrapperState` and back.

    Attributes:
        fields: Names of fields that identify the type.
        inner: Name of the field that contains the inner state.
        to_wrapper: Function `state -> WrapperState`, without the inner state.
        from_wrapper: Function `(like, WrapperState) -> state`, without the inner state; None for
            states of the earlier version.
    """

    fields: set[str]
    inner: str
    to_wrapper: Callable[[Any], WrapperState]
    from_wrapper: Callable[[Any, WrapperState], Any] | None = None


_CONVERSIONS: Final = (
    _Conversion(
        set(optax.MultiStepsState._fields), "inner_opt_state", _from_multi_steps, _to_multi_steps
    ),
    _Conversion(
        set(optax.ApplyIfFiniteState._fields),
        "inner_state",
        _from_apply_if_finite,
        _to_apply_if_finite,
    ),
    _Conversion({"acc_grads", "total_weight"}, "inner_opt_state", _from_old_accumulation),
    _Conversion({"grad_norm", "guard_failed", "inner_state"}, "inner_state", _from_old_guard),
)


def _conversion_of(node: object) -> _Conversion | None:
    """Return the conversion of a state, which is recognized by its fields."""
    fields = set() if is_own_state(node) else set(getattr(type(node), "_fields", ()))
    return next((x for x in _CONVERSIONS if x.fields <= fields), None)


def _is_convertible(node: object) -> bool:
    """Return whether a node is a state of this package, or is converted to one."""
    return is_own_state(node) or _conversion_of(node) is not None
