"""Build a `WrapperState` from a state of another type that lacks some of its fields."""

from typing import Any

from .._types import Tree
from ..wrappers._state import GuardState, WrapperState


def partial_state(kind: Any, **fields: Any) -> Any:
    """Return a state of a type with the given fields; the other fields are None."""
    return kind(**dict.fromkeys(kind._fields) | fields)


def accumulation(window: Tree, inner_state: Tree) -> WrapperState:
    """Return the state of an accumulation with the given window."""
    return partial_state(
        WrapperState,
        outer_guards=(),
        accumulation=window,
        inner_guards=(),
        inner_state=inner_state,
    )


def guard(state: GuardState, inner_state: Tree, **fields: Any) -> WrapperState:
    """Return the state of a guard, with the given fields of `WrapperState`."""
    return partial_state(
        WrapperState, outer_guards=(), inner_guards=(state,), inner_state=inner_state, **fields
    )
