"""The state of an accumulation: what a call does to it, and what can be asked in between."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._checks import (
    check_transformation,
    describe,
    is_scalar,
    is_traced,
)
from .._errors import public, type_error, value_error
from .._gate import Flag, flag_and, flag_not, flag_or
from .._mesh import is_unreduced, unreduced_axes, zeros_of_type
from .._run_if import run_if, trace
from .._states import (
    find_states,
    increment_where,
    plain_arrays,
    register_metrics,
    replace_states,
    with_structure_of,
)
from .._types import Scalar, Tree
from ._reduction import REDUCTION, MicroBatch, as_weight, params_of, window_gradient


@register_metrics("mini_step", "gradient_step", gate="inner_opt_state")
class AccumulationState(NamedTuple):
    """A window of micro-batches, and the optimizer that waits for it.

    Attributes:
        mini_step: int32[], micro-batches in the open window.
        gradient_step: int32[], windows that were emitted; a guard inside may have refused some.
        inner_opt_state: the state of the inner optimizer.
        acc_grads: the weighted sum of the window, in the accumulator's dtype, or () if it was made
            with `every=1`; what it holds while `mini_step` is 0 means nothing.
        total_weight: float32[], the weight in the window.
        accumulation_steps: int32[], the length of the window.
        micro_batch_count: int32[], all micro-batches so far.
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


class Call(NamedTuple):
    """The extra arguments of a call that belong to the accumulation.

    Attributes:
        weight: float32[]; None counts as one.
        flush: whether the window closes with this call; of weight 0 it adds no micro-batch.
        emit: whether this micro-batch closes the window; None counts them.
    """

    weight: Any
    flush: Flag
    emit: bool | None


def read_call(
    extra_args: dict[str, Any], accepted: Flag, *, always_emit: bool
) -> tuple[Call, dict[str, Any]]:
    """The arguments that are ours, and all others."""
    others = dict(extra_args)
    weight = as_weight(others.pop("weight", None))
    if accepted is True and isinstance(weight, np.generic) and not np.isfinite(weight):
        rule, hint = "finite", "A guard around this would leave the micro-batch out."
        raise value_error("weight", rule, f"{weight}", hint)
    flush, emit = others.pop("flush", None), others.pop("emit", None)
    if emit is not None and not isinstance(emit, (bool, np.bool_)):
        rule, hint = "a Python bool", "Make it static under jit, or leave it out to count."
        raise type_error("emit", rule, describe(emit), hint)
    if emit is not None and flush is not None:
        hint = "The window closes where `emit` says so."
        raise type_error("flush", "left out beside `emit`", flush, hint)
    if flush is not None and not is_scalar(flush, jnp.bool_):
        rule, hint = "a bool scalar", "Pass whether the window closes now."
        raise type_error("flush", rule, describe(flush), hint)
    is_known = flush is None or isinstance(flush, (bool, np.bool_))
    flush = bool(flush) if is_known else jnp.asarray(flush)
    emit = always_emit or None if emit is None else bool(emit)
    return Call(weight, flush, emit), others


class WindowStep(NamedTuple):
    """The effect of one call.

    Attributes:
        arrived: it adds a micro-batch.
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
    weight, flush, emit = call
    is_empty = state.mini_step == 0
    is_bare_flush = False if weight is None else flag_and(flush, weight == 0)
    arrived = flag_and(accepted, flag_not(is_bare_flush))
    starts = flag_and(is_empty, arrived)
    weight_so_far = jnp.where(starts, 0, state.total_weight)
    with_this = weight_so_far + (1 if weight is None else weight)
    total_weight = jnp.where(arrived, with_this, state.total_weight)
    mini_step = state.mini_step + jnp.asarray(arrived).astype(jnp.int32)
    # A micro-batch that is left out closes no window by counting, but a flush is a flush.
    counted = flag_or(flag_and(accepted, mini_step >= length), flush)
    closing = counted if emit is None else emit
    # A window that closes with a micro-batch of known weight has one.
    is_known = weight is None or (not is_traced(weight) and float(weight) > 0)
    always = emit and is_known and accepted is True
    has_weight = True if always else (mini_step > 0) & (total_weight > 0)
    holds, emits = flag_and(arrived, flag_not(closing)), flag_and(closing, has_weight)
    # A flush of an empty window changes no state.
    is_idle = flag_and(flag_and(accepted, flag_not(arrived)), is_empty)
    return WindowStep(arrived, starts, holds, emits), state._replace(
        mini_step=jnp.where(closing, 0, mini_step),
        total_weight=total_weight,
        accumulation_steps=jnp.where(starts | ~is_empty, length, state.accumulation_steps),
        micro_batch_count=increment_where(state.micro_batch_count, arrived),
        emitted=jnp.where(is_idle, state.emitted, 0),
    )


class AccumulationStats(NamedTuple):
    """Counts of an accumulation; integers, or arrays inside jit and of a state that was vmapped.

    Attributes:
        total_micro_batches: micro-batches so far, saturating.
        total_updates: windows that were emitted, saturating.
        accumulation_steps: micro-batches in the current window.
        registered_params: leaves that are accumulated; none with `every=1`.
        total_param_elements: their elements.
        effective_batch_multiplier: by how much the batch is larger than a micro-batch.
    """

    total_micro_batches: Any
    total_updates: Any
    accumulation_steps: Any
    registered_params: int
    total_param_elements: int
    effective_batch_multiplier: Any


@public
def flush(
    tx: optax.GradientTransformation, state: Any, params: Tree, **extra_args: Any
) -> tuple[Tree, Any]:
    """Emits the open window now, divided by what was really accumulated.

    For the end of an epoch that is no multiple of the window. Where every window is empty the
    updates are zero and no state changes, also none of what is around the accumulation.

    Args:
        tx: `accumulate_gradients`, or what wraps it and passes extra arguments on.
        state: its state.
        params: the parameters.
        **extra_args: passed on to the inner optimizer.

    Returns:
        The updates and the new state.

    Raises:
        TypeError: the state holds no accumulation.

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
    program = trace(lambda state: update(nothing, state, params, **ours, **extra_args), arrays)
    zeros = jax.tree.map(zeros_of_type, program.output[0])
    updates, flushed = run_if(is_open, lambda carry: program(carry[1]), (zeros, arrays))
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
        reduction: as given to `accumulate_gradients`, if it takes the maximum or the last of
            some leaves. What it sums comes back as a mean, unless "sum" is said here.

    Returns:
        The mean gradient; inside jit, zeros for an empty window.

    Raises:
        ValueError: nothing was accumulated (on the host).
        TypeError: the state holds no accumulation.

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
        rule = "a state with an open window"
        raise value_error("state", rule, "an empty one", hint)
    acc = plain_arrays(open_window.acc_grads)
    window = MicroBatch(acc, REDUCTION.of_leaves(reduction, "updates", acc))
    mean = window_gradient(acc, window, jnp.where(empty, 1, total_weight))
    mean = jax.tree.map(lambda x: jnp.where(empty, jnp.zeros_like(x), x), mean)
    return with_structure_of(open_window.acc_grads, mean)


@public
def reset_accumulation(state: Any) -> Any:
    """Discards the open window; the inner optimizer is not stepped.

    Args:
        state: the state of `accumulate_gradients`, or any state around it.

    Returns:
        The state with an empty window; counts of past micro-batches and updates stay.

    Raises:
        TypeError: the state holds no accumulation.

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
    """The state with every open window reset; `where`, bool[], may be traced."""

    def discard(window: AccumulationState) -> AccumulationState:
        # Mapped, not replaced: a field may be a variable of Flax's NNX.
        fields = {name: getattr(window, name) for name in ("mini_step", "total_weight", "emitted")}
        zeros = jax.tree.map(lambda x: jnp.where(where, jnp.zeros_like(x), x), fields)
        return window._replace(**zeros)

    return replace_states(state, AccumulationState, discard)


@public
def accumulation_stats(state: Any) -> AccumulationStats:
    """Counts micro-batches, updates and parameters.

    Args:
        state: the state of `accumulate_gradients`, or any state around it.

    Returns:
        Integers on the host; the counts are traced scalars inside jit, and arrays with the leading
        axes of a state that was vmapped over seeds. The parameters are those of one seed.

    Raises:
        TypeError: the state holds no accumulation.

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
        rule = "a state of `accumulate_gradients`, or one around it"
        raise type_error("state", rule, type(state).__name__, hint)
    return [accumulation for _, accumulation in windows]
