"""What a guard does to an accumulation inside it, ours or that of Optax, when it skips."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._types import Scalar


def not_updated(state: Any, is_open: Scalar) -> Any:
    """Closed, a guard says so for the windows inside: `has_updated` is about the last call."""

    def tell(window: Any) -> Any:
        if not hasattr(window, "emitted"):
            return window
        return window._replace(emitted=window.emitted & is_open)

    return _each_window(tell, state)


def emptied(state: Any, goes: Callable[[], Scalar]) -> Any:
    """The windows start afresh where they have to go, which is only asked if there is one."""

    def empty(window: Any) -> Any:
        return window._replace(mini_step=jnp.where(goes(), 0, window.mini_step))

    return _each_window(empty, state)


def _each_window(change: Callable[[Any], Any], state: Any) -> Any:
    def is_window(node: Any) -> bool:
        return isinstance(node, tuple) and hasattr(node, "mini_step")

    def visit(node: Any) -> Any:
        return change(node) if is_window(node) else node

    return jax.tree.map(visit, state, is_leaf=is_window)
