"""Converters from states of Optax and of an earlier version of this package to `WrapperState`.

| state | converted to and from |
| --- | --- |
| `optax.MultiSteps` | an accumulation |
| `optax.apply_if_finite` | a guard with the cause "nonfinite" |
| a guard or an accumulation of the version that had one state for each | the same; not back |

States are recognized by their fields, because a restored checkpoint may contain other types.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ._states import is_own_state
from ._types import Tree
from ._weighted_sum import WeightedSum
from .guarding._loss_scale import LossScaleState
from .guarding._skip_spikes import SpikeState
from .wrappers._accumulation import AccumulationState
from .wrappers._state import GuardState, WrapperState


def to_own(state: Tree) -> Tree:
    """Convert all guards and accumulations inside a state to states of this package."""

    def convert(node: Tree) -> Tree:
        if converter := _converter_of(node):
            inner_state = to_own(getattr(node, converter.inner))
            return converter.to_own(node)._replace(inner_state=inner_state)
        if is_own_state(node) and hasattr(node, "inner_state"):
            return node._replace(inner_state=to_own(node.inner_state))
        return node

    return jax.tree.map(convert, state, is_leaf=_is_convertible)


def from_own(like: Tree, own: Tree) -> Tree:
    """Convert states of this package to the types in `like`; the inverse of `to_own`."""

    def convert(node: Tree, own: Tree) -> Tree:
        converter = _converter_of(node)
        name = converter.inner if converter else "inner_state"
        if not hasattr(node, name):
            return own
        inner = from_own(getattr(node, name), own.inner_state)
        if converter is None or converter.from_own is None:
            return own._replace(inner_state=inner)
        return converter.from_own(node, own)._replace(**{name: inner})

    return jax.tree.map(convert, like, own, is_leaf=_is_convertible)


class _Converter(NamedTuple):
    """Conversion of a type of state to a `WrapperState` and back.

    Attributes:
        fields: Names of the fields of the state, by which it is recognized.
        inner: Name of the field that contains the inner state.
        to_own: Function `state -> WrapperState`, without the inner state.
        from_own: Function `(like, WrapperState) -> state`, or None for states of earlier versions.
    """

    fields: tuple[str, ...]
    inner: str
    to_own: Callable[[Any], WrapperState]
    from_own: Callable[[Any, WrapperState], Any] | None = None


def wrapper_state(**fields: Any) -> WrapperState:
    """Return a state with the given fields; the other fields contain no arrays."""
    missing: dict[str, Any] = dict.fromkeys(WrapperState._fields) | {"outer": (), "guards": ()}
    return WrapperState(**missing | fields)


def _own_window(node: Any, gradient: WeightedSum, **others: Any) -> WrapperState:
    """Return the state of an accumulation; other fields are those of `node` with the same name."""
    fields: dict[str, Any] = {name: getattr(node, name, None) for name in AccumulationState._fields}
    fields |= {"gradient": gradient, **others}
    return wrapper_state(accumulation=AccumulationState(**fields))


def _own_guard(node: Any, causes: Mapping[str, Any], rule_state: Tree = ()) -> WrapperState:
    """Return the state of one guard, without the causes that it does not count."""
    counts = {name: getattr(node, name) for name in ("consecutive_skips", "guard_failed")}
    skipped = {cause: count for cause, count in causes.items() if count is not None}
    return wrapper_state(
        grad_norm=node.grad_norm, guards=(GuardState(skipped, rule_state),), **counts
    )


def _from_multi_steps(node: optax.MultiStepsState) -> WrapperState:
    weight = jnp.asarray(node.mini_step, jnp.float32)
    return _own_window(node, WeightedSum(node.acc_grads, weight))


def _to_multi_steps(like: optax.MultiStepsState, own: WrapperState) -> optax.MultiStepsState:
    window = own.accumulation
    steps = {"mini_step": window.mini_step, "gradient_step": window.gradient_step}
    return like._replace(acc_grads=window.gradient.total, **steps)


def _from_apply_if_finite(node: optax.ApplyIfFiniteState) -> WrapperState:
    guard = GuardState({"nonfinite": node.total_notfinite}, ())
    return wrapper_state(consecutive_skips=node.notfinite_count, guards=(guard,))


def _to_apply_if_finite(
    like: optax.ApplyIfFiniteState, own: WrapperState
) -> optax.ApplyIfFiniteState:
    streak, total = own.consecutive_skips, own.guards[0].skipped["nonfinite"]
    return like._replace(
        notfinite_count=streak, last_finite=jnp.asarray(streak) == 0, total_notfinite=total
    )


def _from_old_accumulation(node: Any) -> WrapperState:
    loss = WeightedSum(node.loss_sum, node.loss_weight)
    return _own_window(node, WeightedSum(node.acc_grads, node.total_weight), loss=loss)


def _from_old_skip_nonfinite(node: Any) -> WrapperState:
    return _own_guard(node, {"nonfinite": node.skipped_nonfinite})


def _from_old_loss_scale(node: Any) -> WrapperState:
    rule_state = LossScaleState(node.loss_scale, node.good_steps)
    return _own_guard(node, {"nonfinite": node.skipped_nonfinite}, rule_state)


def _from_old_skip_if(node: Any) -> WrapperState:
    return _own_guard(node, {"other": node.skipped_other}, node.rule_state)


def _from_old_skip_spikes(node: Any) -> WrapperState:
    thresholds = {"norm": node.skip_threshold, "loss": node.loss_threshold}
    thresholds = {key: x for key, x in thresholds.items() if x is not None}
    causes = {
        "nonfinite": node.skipped_nonfinite,
        "large_norm": node.skipped_large_norm,
        "large_loss": node.skipped_large_loss,
    }
    return _own_guard(node, causes, SpikeState(thresholds, node.rule_states))


_OLD_GUARD: Final = ("grad_norm", "consecutive_skips", "guard_failed", "inner_state")
"""Fields that all guards of the earlier version have."""

_OLD_ACCUMULATION: Final = (
    *("mini_step", "gradient_step", "inner_opt_state", "acc_grads", "total_weight"),
    *("accumulation_steps", "micro_batch_count", "emitted", "empty_windows"),
    *("loss_sum", "loss_weight"),
)
_OLD_LOSS_SCALE: Final = (*_OLD_GUARD, "skipped_nonfinite", "loss_scale", "good_steps")
_OLD_SKIP_SPIKES: Final = (
    *(*_OLD_GUARD, "skip_threshold", "loss_threshold", "rule_states"),
    *("skipped_nonfinite", "skipped_large_norm", "skipped_large_loss"),
)

_CONVERTERS: Final = (
    _Converter(
        optax.MultiStepsState._fields, "inner_opt_state", _from_multi_steps, _to_multi_steps
    ),
    _Converter(
        optax.ApplyIfFiniteState._fields, "inner_state", _from_apply_if_finite, _to_apply_if_finite
    ),
    _Converter(_OLD_ACCUMULATION, "inner_opt_state", _from_old_accumulation),
    _Converter((*_OLD_GUARD, "skipped_nonfinite"), "inner_state", _from_old_skip_nonfinite),
    _Converter(_OLD_LOSS_SCALE, "inner_state", _from_old_loss_scale),
    _Converter((*_OLD_GUARD, "skipped_other", "rule_state"), "inner_state", _from_old_skip_if),
    _Converter(_OLD_SKIP_SPIKES, "inner_state", _from_old_skip_spikes),
)


def _converter_of(node: object) -> _Converter | None:
    """Return the converter of a state, which is recognized by its fields."""
    fields = set(getattr(type(node), "_fields", ()))
    return next((x for x in _CONVERTERS if set(x.fields) == fields), None)


def _is_convertible(node: object) -> bool:
    """Return whether a node is a state of this package, or is converted to one."""
    return is_own_state(node) or _converter_of(node) is not None
