"""Convert states of Optax and of an earlier version of this package to `WrapperState`.

| state | converted to |
| --- | --- |
| `optax.MultiSteps` | an accumulation, whose window is a `MultiStepsWindow` |
| `optax.apply_if_finite` | a guard with the cause "nonfinite" |
| a guard or an accumulation of an earlier version | the same; see `_earlier.py` |

States are recognized by their fields, because a restored checkpoint may contain other types. A
conversion only moves arrays to other fields, so it also converts a state that contains indices
instead of arrays. A field without a counterpart is None.
"""

from collections.abc import Callable
from typing import Any, Final

import jax
import optax

from .._states import is_own_state
from .._types import Tree
from .._weighted_sum import WeightedSum
from ..wrappers._accumulation import AccumulationState
from ..wrappers._state import GuardState, WrapperState
from ._earlier import EARLIER_CONVERSIONS
from ._partial import accumulation, guard, partial_state


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


class MultiStepsWindow(AccumulationState):
    """The open window of `optax.MultiSteps`; `gradient.total` is the mean of its gradients.

    `optax.MultiSteps` stores neither losses nor weights, so these fields are None.
    """

    __slots__ = ()


def _from_multi_steps(old: optax.MultiStepsState) -> WrapperState:
    """Convert the state of `optax.MultiSteps`."""
    window = partial_state(
        MultiStepsWindow,
        mini_step=old.mini_step,
        gradient_step=old.gradient_step,
        gradient=partial_state(WeightedSum, total=old.acc_grads),
    )
    return accumulation(window, old.inner_opt_state)


def _from_apply_if_finite(old: optax.ApplyIfFiniteState) -> WrapperState:
    """Convert the state of `optax.apply_if_finite`."""
    state = GuardState(skipped={"nonfinite": old.total_notfinite}, rule_state=())
    return guard(state, old.inner_state, consecutive_skips=old.notfinite_count)


_CONVERSIONS: Final[dict[frozenset[str], Callable[[Any], WrapperState]]] = {
    frozenset(optax.MultiStepsState._fields): _from_multi_steps,
    frozenset(optax.ApplyIfFiniteState._fields): _from_apply_if_finite,
    **EARLIER_CONVERSIONS,
}
"""A mapping from names of fields that identify a type of state to its conversion."""


def _conversion_of(node: object) -> Callable[[Any], WrapperState] | None:
    """Return the conversion of a state, or None for a state that needs no conversion."""
    fields = set() if is_own_state(node) else set(getattr(type(node), "_fields", ()))
    return next((x for names, x in _CONVERSIONS.items() if names <= fields), None)
