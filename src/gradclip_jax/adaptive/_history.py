"""What the rules share: a window of the last values, and histories without zeros."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._states import increment_where
from .._types import UNBOUNDED, Array


class WindowState(NamedTuple):
    """A ring buffer of the last values of each unit.

    Attributes:
        values: float32[window, ...]; UNBOUNDED where nothing is recorded yet.
        value_count: int32[...], values recorded so far, saturating.
        position: int32[...], where the next value goes.
    """

    values: Array
    value_count: Array
    position: Array


def empty_window(norm: Array, window: int) -> WindowState:
    """The state before the first value."""
    zero = jnp.zeros(norm.shape, jnp.int32)
    return WindowState(jnp.full((window, *norm.shape), UNBOUNDED, jnp.float32), zero, zero)


def record(state: WindowState, value: Array, *, signed: bool) -> WindowState:
    """Replaces the oldest value of each unit by the new one."""
    window = state.values.shape[0]
    next_state = WindowState(
        values=jnp.where(_positions(state) == state.position[None], value[None], state.values),
        value_count=increment_where(state.value_count),
        position=(state.position + 1) % window,
    )
    return next_state if signed else where_nonzero(value, next_state, state)


def is_recorded(state: WindowState) -> Array:
    """Which entries of `values` hold a value."""
    return _positions(state) < state.value_count[None]


def where_nonzero(norm: Array, next_state: Any, state: Any) -> Any:
    """The next state of the units whose norm is not zero.

    With zeros in its history, a leaf that is seldom used, such as an expert, would be clipped
    to zero when it is used.
    """
    return jax.tree.map(lambda new, old: jnp.where(norm > 0, new, old), next_state, state)


def _positions(state: WindowState) -> Array:
    return jnp.arange(state.values.shape[0], dtype=jnp.int32).reshape(
        -1, *(1,) * state.value_count.ndim
    )
