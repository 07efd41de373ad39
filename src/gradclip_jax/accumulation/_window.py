"""The window of micro-batches: when it starts, holds and closes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import describe, error_message, is_traced
from .._states import increment_where
from .._types import Array, Scalar
from ._state import AccumulationState

Flag = Array | bool
"""bool[], or a Python bool: then the program is compiled for that case alone."""


class Call(NamedTuple):
    """What a caller says of a micro-batch.

    Attributes:
        weight: float32[]; None counts as one.
        flush: whether the window closes now. A flush that brings no weight is not a micro-batch,
            only the wish to close the window.
        closes: whether this micro-batch closes the window; None counts them.
    """

    weight: Any = None
    flush: Flag = False
    closes: bool | None = None


def read_call(
    function: str, extra_args: dict[str, Any], *, always_closes: bool
) -> tuple[Call, dict[str, Any]]:
    """The arguments that are ours, and all others."""
    others = dict(extra_args)
    weight = as_weight(function, others.pop("weight", None))
    flush, closes = others.pop("flush", None), others.pop("closes", None)
    if closes is not None and not isinstance(closes, (bool, np.bool_)):
        rule, hint = "a Python bool", "Make it static under jit, or leave it out to count."
        raise TypeError(error_message(function, "closes", rule, describe(closes), hint))
    if closes is not None and flush is not None:
        hint = "The window closes where `closes` says so."
        raise TypeError(error_message(function, "flush", "left out beside `closes`", flush, hint))
    closes = always_closes or None if closes is None else bool(closes)
    return Call(weight, as_flush(function, flush), closes), others


def as_weight(function: str, weight: Any) -> Any:
    """The weight of a micro-batch as float32[], on the host if it is there."""
    if weight is None:
        return None
    rule, hint = "a real scalar >= 0", "Pass the number of examples or tokens in the micro-batch."
    if np.ndim(weight) or jnp.issubdtype(jnp.result_type(weight), jnp.complexfloating):
        raise TypeError(error_message(function, "weight", rule, describe(weight), hint))
    is_array = isinstance(weight, jax.Array)
    value = weight.astype(jnp.float32) if is_array else np.float32(weight)
    if not is_traced(value) and float(value) < 0:
        raise ValueError(error_message(function, "weight", rule, repr(weight), hint))
    return value


def as_flush(function: str, flush: Any) -> Flag:
    """A bool, if it is known when traced, or bool[]."""
    if flush is None or isinstance(flush, (bool, np.bool_)):
        return bool(flush)
    if np.ndim(flush) or jnp.result_type(flush) != jnp.bool_:
        rule, hint = "a bool scalar", "Pass whether the window closes now."
        raise TypeError(error_message(function, "flush", rule, describe(flush), hint))
    return jnp.asarray(flush).astype(bool)


class WindowStep(NamedTuple):
    """What one call does.

    Attributes:
        arrived: it brings a micro-batch.
        starts: the first of a window.
        holds: one that is added up, and the window stays open.
        emits: the window closes with something in it.
        is_idle: a flush of an empty window.
        total_weight: float32[], of the window, this micro-batch included.
    """

    arrived: Flag
    starts: Flag
    holds: Flag
    emits: Flag
    is_idle: Flag
    total_weight: Scalar


def advance_window(
    state: AccumulationState, length: Scalar, call: Call, admitted: Flag = True
) -> tuple[WindowStep, AccumulationState]:
    """What a call does to the window, and the counters after it if no step is taken.

    Args:
        state: before the call.
        length: int32[], micro-batches in a window.
        call: what the caller says.
        admitted: whether the call counts at all.
    """
    weight, flush, closes = call
    is_empty = state.mini_step == 0
    arrived = admitted if weight is None else both(admitted, opposite(both(flush, weight == 0)))
    starts = both(is_empty, arrived)
    weight_so_far = jnp.where(starts, 0, state.total_weight)
    with_this = weight_so_far + (1 if weight is None else weight)
    total_weight = jnp.where(arrived, with_this, state.total_weight)
    mini_step = state.mini_step + jnp.asarray(arrived).astype(jnp.int32)
    if closes is None:
        closing = both(admitted, jnp.logical_or(mini_step >= length, flush))
    else:
        closing = both(admitted, closes)
    # A window that closes with a micro-batch of known weight is not empty.
    weighs = weight is None or (not is_traced(weight) and float(weight) > 0)
    filled = True if closes and weighs else (mini_step > 0) & (total_weight > 0)
    step = WindowStep(
        arrived=arrived,
        starts=starts,
        holds=both(arrived, opposite(closing)),
        emits=both(closing, filled),
        is_idle=both(both(admitted, opposite(arrived)), is_empty),
        total_weight=total_weight,
    )
    return step, state._replace(
        mini_step=jnp.where(closing, 0, mini_step),
        total_weight=total_weight,
        accumulation_steps=jnp.where(starts | ~is_empty, length, state.accumulation_steps),
        micro_batch_count=increment_where(state.micro_batch_count, arrived),
    )


def count_step(state: AccumulationState, step: WindowStep, stepped: Flag) -> AccumulationState:
    """The counters after the inner optimizer ran, or did not."""
    return state._replace(
        gradient_step=increment_where(state.gradient_step, stepped),
        emitted=jnp.where(step.is_idle, state.emitted, stepped),
    )


def both(a: Flag, b: Flag) -> Flag:
    """Whether both hold: a bool if one of them is known and decides."""
    if isinstance(a, bool):
        return b if a else False
    if isinstance(b, bool):
        return a if b else False
    return a & b


def opposite(a: Flag) -> Flag:
    """Whether it does not hold."""
    return not a if isinstance(a, bool) else ~a
