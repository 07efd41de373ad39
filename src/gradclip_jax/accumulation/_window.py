"""The window of micro-batches: when it starts, holds and closes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import describe, error_message, is_traced
from .._gate import Flag, flag_and, flag_not, flag_or
from .._states import increment_where
from .._types import Scalar
from ._reduction import as_weight
from ._state import AccumulationState


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
    function: str, extra_args: dict[str, Any], accepted: Flag, *, always_closes: bool
) -> tuple[Call, dict[str, Any]]:
    """The arguments that are ours, and all others."""
    others = dict(extra_args)
    weight = as_weight(function, others.pop("weight", None))
    if accepted is True and isinstance(weight, np.generic) and not np.isfinite(weight):
        rule, hint = "finite", "A guard around this would leave the micro-batch out."
        raise ValueError(error_message(function, "weight", rule, f"{weight}", hint))
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
    is_array = isinstance(flush, (np.ndarray, jax.Array))
    if not is_array or flush.ndim or flush.dtype != jnp.bool_:
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
    state: AccumulationState, length: Scalar, call: Call, accepted: Flag
) -> tuple[WindowStep, AccumulationState]:
    """What a call does to a window of that length, and the counters if no step is taken."""
    weight, flush, closes = call
    is_empty = state.mini_step == 0
    brings_nothing = False if weight is None else flag_and(flush, weight == 0)
    arrived = flag_and(accepted, flag_not(brings_nothing))
    starts = flag_and(is_empty, arrived)
    weight_so_far = jnp.where(starts, 0, state.total_weight)
    with_this = weight_so_far + (1 if weight is None else weight)
    total_weight = jnp.where(arrived, with_this, state.total_weight)
    mini_step = state.mini_step + jnp.asarray(arrived).astype(jnp.int32)
    # A micro-batch that is left out closes no window by counting, but a flush is a flush.
    counted = flag_or(flag_and(accepted, mini_step >= length), flush)
    closing = counted if closes is None else closes
    # A window that closes with a micro-batch of known weight has one.
    is_known = weight is None or (not is_traced(weight) and float(weight) > 0)
    always = closes and is_known and accepted is True
    has_weight = True if always else (mini_step > 0) & (total_weight > 0)
    holds, emits = flag_and(arrived, flag_not(closing)), flag_and(closing, has_weight)
    # A flush of an empty window leaves no trace.
    is_idle = flag_and(flag_and(accepted, flag_not(arrived)), is_empty)
    return WindowStep(arrived, starts, holds, emits), state._replace(
        mini_step=jnp.where(closing, 0, mini_step),
        total_weight=total_weight,
        accumulation_steps=jnp.where(starts | ~is_empty, length, state.accumulation_steps),
        micro_batch_count=increment_where(state.micro_batch_count, arrived),
        emitted=jnp.where(is_idle, state.emitted, 0),
    )
