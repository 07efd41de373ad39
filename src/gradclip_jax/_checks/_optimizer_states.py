"""Checks of optimizer states."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from .._errors import type_error
from ._arrays import check_values
from ._functions import has_init_and_update


def check_state(state: Any, kind: type, count: str) -> None:
    """Raise if the state is missing, belongs to another transformation, or cannot be read.

    `count` is the name of a scalar field. If it has an axis, the state belongs to several runs.
    """
    if not isinstance(state, kind):
        hint = "Call `update(grads, state, params)` with the state that `init(params)` returned."
        raise type_error("state", f"of type `{kind.__name__}`", type(state).__name__, hint)
    check_values("state", state)
    check_one_run([getattr(state, count)])


def check_optimizer_state(state: object) -> None:
    """Raise if no state can be read from a value that was passed as the optimizer state."""
    if has_init_and_update(state):
        hint = "Pass the state that `init(params)` or `update` returned."
        raise type_error("state", "an optimizer state", type(state).__name__, hint)
    if any(map(_is_untyped_state, jax.tree.leaves(state, is_leaf=_is_untyped_state))):
        hint = "Restore the checkpoint into the structure of `tx.init(params)`."
        raise type_error("state", "a state with its types", "its fields in a dict", hint)
    check_values("state", state)


def _is_untyped_state(node: object) -> bool:
    """Return whether a node has the fields, but not the type, of a state of a guard or `watch`."""
    fields = {"outcome", "guard_failed"}, {"step_count", "rows"}
    return isinstance(node, Mapping) and any(x <= node.keys() for x in fields)


def check_one_run(counts: Iterable[Any]) -> None:
    """Raise if the counts of a state have an axis of `vmap`."""
    if any(map(np.ndim, counts)):
        hint = "Use `jax.vmap`, or select run i with `jax.tree.map(lambda x: x[i], state)`."
        raise type_error("state", "the state of one run", "a state with an axis of `vmap`", hint)
