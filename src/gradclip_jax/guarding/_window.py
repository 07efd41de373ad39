"""What a guard does to an accumulation inside it, ours or that of Optax, when it skips."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._run_if import run_if
from .._types import Scalar


def not_updated(state: Any, is_open: Scalar) -> Any:
    """Closed, a guard says so for the windows inside: `has_updated` is about the last call."""

    def tell(window: Any) -> Any:
        if not hasattr(window, "emitted"):
            return window
        return window._replace(emitted=window.emitted & is_open)

    return _each_window(tell, state)


def emptied(state: Any, is_lost: Callable[[], Scalar]) -> Any:
    """The windows start afresh where they are lost, which is only asked if there is one."""
    lost = functools.cache(is_lost)

    def empty(window: Any) -> Any:
        window = window._replace(mini_step=jnp.where(lost(), 0, window.mini_step))
        if hasattr(window, "emitted"):
            return window
        # That of Optax does not start from zero by itself.
        zeros = functools.partial(jax.tree.map, jnp.zeros_like)
        return window._replace(acc_grads=run_if(lost(), zeros, window.acc_grads))

    return _each_window(empty, state)


def _each_window(change: Callable[[Any], Any], state: Any) -> Any:
    """The state with all its windows changed, those inside another one too."""

    def is_window(node: Any) -> bool:
        fields = getattr(node, "_fields", ())
        return "mini_step" in fields and "acc_grads" in fields

    def visit(node: Any) -> Any:
        if not is_window(node):
            return node
        return change(type(node)(*(_each_window(change, part) for part in node)))

    return jax.tree.map(visit, state, is_leaf=is_window)
