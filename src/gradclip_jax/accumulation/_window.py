"""The window of micro-batches: when it starts, holds and closes."""

from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np

from .._checks import describe, error_message, is_traced
from .._states import increment_where
from .._types import Array, Scalar
from ._reduction import as_weight
from ._state import AccumulationState

Flag: TypeAlias = Array | bool
"""bool[], or a Python bool: then the program is compiled for that case alone."""


class Call(NamedTuple):
    """What a caller says of a micro-batch.

    Attributes:
        weight: float32[]; None counts as one.
        flush: whether the window closes now; of weight 0 it brings no micro-batch.
        closes: whether this micro-batch closes the window; None counts them.
    """

    weight: Any
    flush: Flag
    closes: bool | None


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


def as_flush(function: str, flush: Any) -> Flag:
    """A bool, if it is known when traced, or bool[]."""
    if flush is None or isinstance(flush, (bool, np.bool_)):
        return bool(flush)
    if np.ndim(flush) or jnp.result_type(flush) != jnp.bool_:
        rule, hint = "a bool scalar", "Pass whether the window closes now."
        raise TypeError(error_message(function, "flush", rule, describe(flush), hint))
    return jnp.asarray(flush)


class WindowStep(NamedTuple):
    """What one call does.

    Attributes:
        arrived: it brings a micro-batch.
        starts: the first of a window.
        holds: one that is added up, and the window stays open.
        emits: the window closes with something in it.
    """

    arrived: Flag
    starts: Flag
    holds: Flag
    emits: Flag


def advance_window(
    state: AccumulationState, length: Scalar, call: Call, admitted: Flag
) -> tuple[WindowStep, AccumulationState]:
    """What a call does to a window of that length, and the counters if no step is taken."""
    weight, flush, closes = call
    is_empty = state.mini_step == 0
    brings_nothing = False if weight is None else flag_and(flush, weight == 0)
    arrived = flag_and(admitted, flag_not(brings_nothing))
    starts = flag_and(is_empty, arrived)
    weight_so_far = jnp.where(starts, 0, state.total_weight)
    with_this = weight_so_far + (1 if weight is None else weight)
    total_weight = jnp.where(arrived, with_this, state.total_weight)
    mini_step = state.mini_step + jnp.asarray(arrived).astype(jnp.int32)
    is_last = jnp.logical_or(mini_step >= length, flush) if closes is None else closes
    closing = flag_and(admitted, is_last)
    # A window that closes with a micro-batch of known weight has one.
    is_known = weight is None or (not is_traced(weight) and float(weight) > 0)
    has_weight = True if closes and is_known else (mini_step > 0) & (total_weight > 0)
    holds, emits = flag_and(arrived, flag_not(closing)), flag_and(closing, has_weight)
    # A flush of an empty window leaves no trace.
    is_idle = flag_and(flag_and(admitted, flag_not(arrived)), is_empty)
    return WindowStep(arrived, starts, holds, emits), state._replace(
        mini_step=jnp.where(closing, 0, mini_step),
        total_weight=total_weight,
        accumulation_steps=jnp.where(starts | ~is_empty, length, state.accumulation_steps),
        micro_batch_count=increment_where(state.micro_batch_count, arrived),
        emitted=state.emitted & is_idle,
    )


def flag_and(a: Flag, b: Flag) -> Flag:
    """Whether both hold: a bool if one of them is known and decides."""
    if isinstance(a, bool):
        return b if a else False
    if isinstance(b, bool):
        return a if b else False
    return a & b


def flag_not(a: Flag) -> Flag:
    """Whether it does not hold."""
    return not a if isinstance(a, bool) else ~a
