"""The state of an accumulation: the effect of each call on it, and functions that read it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._checks import check_transformation, describe, is_scalar, is_traced
from .._errors import public, type_error, value_error
from .._mesh import is_unreduced, unreduced_axes, zeros_of_type
from .._run_if import run_step
from .._states import (
    GATES,
    find_states,
    increment_where,
    plain_arrays,
    register_metrics,
    replace_states,
    with_structure_of,
)
from .._types import Scalar, Tree
from ..gates._gate import Flag
from ._reduction import REDUCTION, MicroBatch, as_weight, params_of, window_gradient


@register_metrics("mini_step", "gradient_step")
class AccumulationState(NamedTuple):
    """A window of micro-batches, and the state of the inner optimizer.

    Attributes:
        mini_step: int32[], number of micro-batches in the open window.
        gradient_step: int32[], number of emitted windows, including windows that a guard inside
            has skipped.
        inner_opt_state: the state of the inner optimizer.
        acc_grads: the weighted sum of the window, in the accumulator's dtype, or () if it was made
            with `every=1`; the values are ignored while `mini_step` is 0.
        total_weight: float32[], the sum of the weights in the window.
        accumulation_steps: int32[], the length of the window.
        micro_batch_count: int32[], number of all micro-batches so far.
        emitted: int32[], 1 if the last call emitted a window, else 0.
        noise: a `NoiseState`, or () if the noise scale is not measured.
    """

    mini_step: Scalar
    gradient_step: Scalar
    inner_opt_state: Any
    acc_grads: Tree
    total_weight: Scalar
    accumulation_steps: Scalar
    micro_batch_count: Scalar
    emitted: Scalar
    noise: Any


GATES[AccumulationState] = "inner_opt_state"


class Call(NamedTuple):
    """The extra arguments of a call that the accumulation reads.

    Attributes:
        weight: float32[]; None for one.
        flush: whether the window closes with this call, which adds no micro-batch if its weight is
            zero; None for no.
        emit: whether the window closes with this micro-batch; None to count micro-batches.
    """

    weight: Any
    flush: Flag | None
    emit: bool | None


def read_call(extra_args: dict[str, Any], accepted: Flag) -> tuple[Call, dict[str, Any]]:
    """The arguments for the accumulation, and those for the inner optimizer."""
    others = dict(extra_args)
    weight = as_weight(others.pop("weight", None))
    is_unguarded = isinstance(accepted, np.bool_)
    if is_unguarded and isinstance(weight, np.generic) and not np.isfinite(weight):
        hint = "`skip_nonfinite` around this transformation skips such a micro-batch."
        raise value_error("weight", "finite", f"{weight}", hint)
    flush, emit = others.pop("flush", None), others.pop("emit", None)
    if emit is not None and not isinstance(emit, (bool, np.bool_)):
        hint = "Make it static under jit, or leave it out to count micro-batches."
        raise type_error("emit", "a Python bool", describe(emit), hint)
    if emit is not None and flush is not None:
        hint = "`emit` already says whether the window closes."
        raise type_error("flush", "left out beside `emit`", flush, hint)
    if flush is not None and not is_scalar(flush, jnp.bool_):
        hint = "Pass whether the window closes now."
        raise type_error("flush", "a bool scalar", describe(flush), hint)
    if flush is not None:
        flush = np.bool_(flush) if isinstance(flush, bool) else flush
    return Call(weight, flush, None if emit is None else bool(emit)), others


class WindowStep(NamedTuple):
    """The effect of one call on a window.

    Attributes:
        arrived: whether it adds a micro-batch.
        starts: whether that is the first of the window.
        holds: whether it adds a micro-batch and the window stays open.
        emits: whether the window closes and contains a micro-batch with a weight.
    """

    arrived: Flag
    starts: Scalar
    holds: Flag
    emits: Flag


def advance_window(
    state: AccumulationState, length: Scalar, call: Call, accepted: Flag
) -> tuple[WindowStep, AccumulationState]:
    """The effect of a call on a window of that length, and the counters if no step is applied."""
    weight, flush, emit = call
    is_empty = state.mini_step == 0
    arrived = accepted
    if flush is not None and weight is not None:
        arrived = accepted & ~(flush & (weight == 0))
    starts = jnp.logical_and(is_empty, arrived)
    weight_so_far = jnp.where(starts, 0, state.total_weight)
    with_this = weight_so_far + (1 if weight is None else weight)
    total_weight = jnp.where(arrived, with_this, state.total_weight)
    mini_step = state.mini_step + jnp.asarray(arrived, jnp.int32)
    has_weight: Flag = (mini_step > 0) & (total_weight > 0)
    if emit is None:
        # A skipped micro-batch does not close a window by its number; a flush does in any case.
        closes = accepted & (mini_step >= length)
        closes = closes if flush is None else closes | flush
        holds, emits = arrived & ~closes, closes & has_weight
    elif emit:
        # A window that closes with a micro-batch of known weight is not empty.
        is_known = weight is None or (not is_traced(weight) and float(weight) > 0)
        is_certain = is_known and isinstance(accepted, np.bool_)
        closes, holds, emits = np.True_, np.False_, np.True_ if is_certain else has_weight
    else:
        closes, holds, emits = np.False_, arrived, np.False_
    # A flush of an empty window changes nothing.
    is_idle = accepted & ~arrived & is_empty
    return WindowStep(arrived, starts, holds, emits), state._replace(
        mini_step=jnp.where(closes, 0, mini_step),
        total_weight=total_weight,
        accumulation_steps=jnp.where(starts | ~is_empty, length, state.accumulation_steps),
        micro_batch_count=increment_where(state.micro_batch_count, arrived),
        emitted=jnp.where(is_idle, state.emitted, 0),
    )


class AccumulationStats(NamedTuple):
    """Counts of an accumulation; integers, or arrays inside jit and for a vmapped state.

    Attributes:
        total_micro_batches: number of micro-batches so far, saturating.
        total_updates: number of emitted windows, saturating.
        accumulation_steps: number of micro-batches in the current window.
        registered_params: number of accumulated leaves; none with `every=1`.
        total_param_elements: number of their elements.
        effective_batch_multiplier: ratio of the batch size to the micro-batch size.
    """

    total_micro_batches: int | Scalar
    total_updates: int | Scalar
    accumulation_steps: int | Scalar
    registered_params: int
    total_param_elements: int
    effective_batch_multiplier: int | Scalar


@public
def flush(
    tx: optax.GradientTransformation, state: Any, params: Tree, **extra_args: Any
) -> tuple[Tree, Any]:
    """Emit the open window now, divided by the weight that it contains.

    For the end of an epoch whose length is not a multiple of the window. If every window is empty
    the updates are zero and no state changes, including the states around the accumulation.

    Args:
        tx: `accumulate_gradients`, or a transformation around it that passes extra arguments on.
        state: its state.
        params: the parameters.
        **extra_args: passed to the inner optimizer.

    Returns:
        The updates and the new state.

    Raises:
        TypeError: the state contains no accumulation.

    Examples:
        >>> import jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = gcx.accumulate_gradients(optax.sgd(1.0), every=100)
        >>> params = jnp.array([0.0])
        >>> _, state = tx.update(jnp.array([3.0]), tx.init(params), params)
        >>> updates, state = gcx.flush(tx, state, params)
        >>> updates.tolist()
        [-3.0]
    """
    check_transformation("tx", tx)
    arrays, params = plain_arrays(state), plain_arrays(params)
    windows = _accumulations(arrays)
    is_open = jnp.stack([x.mini_step > 0 for x in windows]).any()
    nothing = _zero_gradient(params_of(params), windows[0].acc_grads)
    update = optax.with_extra_args_support(tx).update
    ours = {"weight": jnp.float32(0), "flush": True}

    def emit(state: Any) -> tuple[Tree, Any]:
        return update(nothing, state, params, **ours, **extra_args)

    updates, flushed = run_step(is_open, emit, arrays)
    return updates, with_structure_of(state, flushed)


def _zero_gradient(params: Tree, acc: Tree) -> Tree:
    """A gradient of zeros, unreduced where the accumulator is."""

    def zero(param: Any, total: Any) -> Any:
        dtype = jnp.result_type(param)
        if not jnp.issubdtype(dtype, jnp.inexact):
            return np.zeros(np.shape(param), jax.dtypes.float0)
        return zeros_of_type(total, dtype) if unreduced_axes(total) else jnp.zeros_like(param)

    return jax.tree.map(zero, params, acc if is_unreduced(acc) else params)


@public
def accumulated_gradients(
    state: Any, *, reduction: str | Tree | Callable[[str], str] = "mean"
) -> Tree:
    """The weighted mean of the open window so far, in the accumulator's dtype.

    Args:
        state: the state of `accumulate_gradients`, or any state around it.
        reduction: as given to `accumulate_gradients`. The default also returns the mean for
            leaves that the accumulation sums.

    Returns:
        The mean gradient; inside jit, zeros for an empty window.

    Raises:
        ValueError: the window is empty (outside jit).
        TypeError: the state contains no accumulation.

    Examples:
        >>> import jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = gcx.accumulate_gradients(optax.sgd(1.0), every=8)
        >>> params = jnp.array([0.0])
        >>> _, state = tx.update(jnp.array([3.0]), tx.init(params), params)
        >>> gcx.accumulated_gradients(state).tolist()
        [3.0]
    """
    open_window = _accumulations(state)[0]
    count, total_weight = plain_arrays((open_window.mini_step, open_window.total_weight))
    empty = (count == 0) | ~(total_weight > 0)
    if not is_traced(empty) and bool(empty):
        hint = "Call `update` with a micro-batch first."
        raise value_error("state", "one with an open window", "one with an empty window", hint)
    acc = plain_arrays(open_window.acc_grads)
    window = MicroBatch(acc, REDUCTION.of_leaves(reduction, "updates", acc))
    mean = window_gradient(acc, window, jnp.where(empty, 1, total_weight))
    mean = jax.tree.map(lambda x: jnp.where(empty, jnp.zeros_like(x), x), mean)
    return with_structure_of(open_window.acc_grads, mean)


@public
def reset_accumulation(state: Any) -> Any:
    """Discard the open window without running the inner optimizer.

    Args:
        state: the state of `accumulate_gradients`, or any state around it.

    Returns:
        The state with an empty window; the counts of micro-batches and updates are unchanged.

    Raises:
        TypeError: the state contains no accumulation.

    Examples:
        >>> import jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = gcx.accumulate_gradients(optax.sgd(1.0), every=8)
        >>> params = jnp.array([0.0])
        >>> _, state = tx.update(jnp.array([3.0]), tx.init(params), params)
        >>> _, state = tx.update(jnp.array([5.0]), gcx.reset_accumulation(state), params)
        >>> gcx.accumulated_gradients(state).tolist()
        [5.0]
    """
    _accumulations(state)
    return discard_windows(state, True)


def discard_windows(state: Any, where: Any) -> Any:
    """The state with all windows empty where the condition, bool[], holds."""

    def discard(window: AccumulationState) -> AccumulationState:
        # Mapped, because a field may be a Flax NNX variable.
        fields = {name: getattr(window, name) for name in ("mini_step", "total_weight", "emitted")}
        zeros = jax.tree.map(lambda x: jnp.where(where, jnp.zeros_like(x), x), fields)
        return window._replace(**zeros)

    return replace_states(state, AccumulationState, discard)


@public
def accumulation_stats(state: Any) -> AccumulationStats:
    """Count micro-batches, updates and parameters.

    Args:
        state: the state of `accumulate_gradients`, or any state around it.

    Returns:
        Integers. The counts are traced scalars inside jit, and arrays with the leading axes of a
        state that was vmapped over seeds; the parameters are those of one seed.

    Raises:
        TypeError: the state contains no accumulation.

    Examples:
        >>> import jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = gcx.accumulate_gradients(optax.sgd(1.0), every=8)
        >>> stats = gcx.diagnostics.accumulation_stats(tx.init(jnp.zeros((2, 3))))
        >>> stats.total_micro_batches, stats.accumulation_steps, stats.total_param_elements
        (0, 8, 6)
    """
    first = plain_arrays(_accumulations(state)[0])
    counts = (first.micro_batch_count, first.gradient_step, first.accumulation_steps)
    micro, updates, steps = (x if is_traced(x) or x.ndim else int(x) for x in counts)
    leaves = jax.tree.leaves(first.acc_grads)
    seeds = first.mini_step.size
    return AccumulationStats(
        total_micro_batches=micro,
        total_updates=updates,
        accumulation_steps=steps,
        registered_params=len(leaves),
        total_param_elements=sum(x.size for x in leaves) // seeds,
        effective_batch_multiplier=steps,
    )


def _accumulations(state: Any) -> list[AccumulationState]:
    windows = find_states(state, AccumulationState)
    if not windows:
        hint = "Pass the state that `accumulate_gradients(...).init(params)` made."
        rule = "a state of `accumulate_gradients`, or one that contains it"
        raise type_error("state", rule, type(state).__name__, hint)
    return [accumulation for _, accumulation in windows]
