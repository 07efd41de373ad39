"""Gradient accumulation as an Optax gradient transformation."""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from .._checks import (
    check_choice,
    check_count,
    check_dtype,
    check_number,
    check_same_structure,
    check_state,
    check_transformation,
    describe,
    is_float0,
    is_function,
    is_scalar,
    is_traced,
)
from .._errors import public, type_error, value_error
from .._mesh import check_placement
from .._run_if import Flag, like_dtypes, run_if
from .._states import find_states, increment_where
from .._types import FLOAT32, Count, Number, Scalar, Tree
from ..gates._execute import gated
from ..gates._gate import ExtraArgs, Window
from ._reduction import (
    REDUCTIONS,
    MicroBatch,
    Weight,
    accumulator_like,
    add_micro_batch,
    as_weight,
    check_matches_accumulator,
    has_micro_batch,
    only_gradient,
    params_of,
    window_gradient,
)
from ._state import AccumulationState, WindowStep

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def _with_hint(fun: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Raise an error with a hint if the keyword of `optax.MultiSteps` is used."""

    @functools.wraps(fun)
    def wrapper(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        if "every_k_schedule" in kwargs:
            hint = "Pass an integer or a function of the gradient step as `every`."
            raise type_error("every_k_schedule", "renamed to `every`", "Optax's name", hint)
        return fun(*args, **kwargs)

    return wrapper


@public
@_with_hint
def accumulate_gradients(
    inner: optax.GradientTransformation,
    every: Count | Callable[[Scalar], Number],
    *,
    reduction: Literal["mean", "sum"] = "mean",
    accumulator_dtype: DTypeLike = FLOAT32,
    rounding: Literal["nearest", "stochastic"] = "nearest",
) -> optax.GradientTransformationExtraArgs:
    """Run the inner optimizer once for every `every` micro-batches, on their mean gradient.

    The gradient of an accumulation window is `sum(weight_i * g_i) / sum(weight_i)`. Before the last
    micro-batch, the updates are zeros and the inner optimizer does not run. If each weight is a
    number of tokens, accumulation is equivalent to one large batch. With `apply_gradients`, a
    micro-step that does not run the optimizer only adds the gradient to the accumulator.

    | micro-batch | result |
    | --- | --- |
    | `weight=0`, even with NaN gradients | counted, but contributes 0 |
    | NaN gradient | affects only its window; an outer `skip_nonfinite` skips the micro-batch |
    | the last of an epoch, with `flush=True` | emits the window, divided by its total weight |
    | the last of a window with a total weight of 0 | zero update; the inner state does not change |

    Extra arguments of `update`:

    - `weight`, a scalar >= 0, for example the number of tokens. It is converted to float32.
    - `flush`, a bool that may be traced: whether to emit the window in this call.
    - `emit`, a Python bool, static under jit: whether this micro-batch closes the window. It
      replaces the counting of micro-batches and compiles one program for each value. These
      programs have no branch, so the host does not wait for the device. However, with a traced
      `weight`, the program that emits checks for a total weight of 0.

    Other extra arguments, such as `value`, are forwarded to the inner optimizer by the call that
    runs it.

    Use `microbatched_value_and_grad` to split one batch inside one step; both can be combined.

    Args:
        inner: Gradient transformation, which must not contain another accumulation.
        every: Number of micro-batches in an accumulation window; an integer >= 1, or a function
            from the gradient step, int32[], to such a number (`every_k_schedule` in Optax). The
            integer 1 allocates no accumulator. It also emits an open window in the state of a
            longer accumulation.
        reduction: "mean" or "sum". To accumulate leaves that are not gradients in another way, such
            as the statistics of an fp8 layer, use `optax.partition`.
        accumulator_dtype: Dtype of the sum for leaves of up to 32 bits. Complex leaves use the
            corresponding complex dtype, and 64-bit leaves keep their dtype.
        rounding: Rounding of bfloat16 sums and means, "nearest" or "stochastic". Stochastic
            rounding is unbiased for windows of any length and deterministic across runs and
            replicas.

    Returns:
        A gradient transformation with an `AccumulationState`. The inner optimizer receives
        gradients in the accumulator's dtype or, if it raises for this dtype, in the dtype of the
        incoming gradients. The updates have the dtypes that it returns for the incoming gradients.

    Raises:
        ValueError: If `every` is less than 1, or if `reduction` or `rounding` is unknown.
        TypeError: If `inner` is not a gradient transformation or contains an accumulation, if
            `every` is not an integer, or if a leaf is not floating-point or complex or has a
            different shape than its parameter.

    Examples:
        >>> import jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = gcx.accumulate_gradients(optax.sgd(1.0), every=2)
        >>> params = jnp.array([0.0])
        >>> state = tx.init(params)
        >>> held, state = tx.update(jnp.array([2.0]), state, params, weight=1.0)
        >>> emitted, state = tx.update(jnp.array([6.0]), state, params, weight=3.0)
        >>> held.tolist(), emitted.tolist(), bool(gcx.has_updated(state))
        ([0.0], [-5.0], True)
    """
    check_transformation("inner", inner)
    if not is_function(every):
        check_count("every", every, "Pass 1 to run the inner optimizer at every step.")
    check_choice("reduction", reduction, REDUCTIONS)
    check_dtype("accumulator_dtype", accumulator_dtype)
    check_choice("rounding", rounding, ("nearest", "stochastic"))
    # A traced `every` requires the accumulator even if its value is 1.
    is_one = isinstance(every, (int, np.integer)) and every == 1

    def length_of(gradient_step: Scalar) -> Scalar:
        """Return the number of micro-batches to accumulate at a gradient step."""
        if not callable(every):
            return jnp.asarray(every).astype(jnp.int32)
        length, hint = every(gradient_step), "Return the length of the next window."
        check_number("every(gradient_step)", length, hint, low=1, closed=True)
        return jnp.maximum(jnp.asarray(length).astype(jnp.int32), 1)

    def init(params: Tree) -> AccumulationState:
        """Return a state without accumulated micro-batches."""
        check_placement("params", params)
        inner_state = inner.init(params)
        if find_states(inner_state, (AccumulationState, optax.MultiStepsState)):
            rule = "a transformation that contains no accumulation"
            hint = "Use one accumulation with `every=a * b` instead of two."
            raise type_error("inner", rule, "one that contains an accumulation", hint)
        acc = () if is_one else accumulator_like(params_of(params), accumulator_dtype)
        counts = ("mini_step", "gradient_step", "micro_batch_count", "emitted")
        return AccumulationState(
            # Remove weak types, which `update` does not return, to avoid retracing the second step.
            inner_opt_state=like_dtypes(inner_state, inner_state),
            acc_grads=acc,
            total_weight=jnp.zeros((), jnp.float32),
            accumulation_steps=length_of(jnp.zeros((), jnp.int32)),
            **{name: jnp.zeros((), jnp.int32) for name in counts},
        )

    def open_window(
        updates: Tree,
        state: AccumulationState,
        accepted: Flag,
        params: Tree,
        extra_args: ExtraArgs,
    ) -> Window:
        """Determine how a micro-batch changes the accumulation window."""
        check_state(state, AccumulationState)
        has_buffer = not is_one or bool(jax.tree.leaves(state.acc_grads))
        if has_buffer:
            check_matches_accumulator(updates, state.acc_grads)
        elif params is not None:
            check_same_structure(updates, params_of(params))
        call, others = _read_call(extra_args, accepted)
        if not has_buffer:
            if call.emit is False:
                hint = "Pass a larger `every`, for which `init` allocates an accumulator."
                raise type_error("emit", "True with `every=1`", "False", hint)
            call = call._replace(emit=True)
        step, advanced = _advance_window(state, length_of(state.gradient_step), call, accepted)
        key = None
        if rounding == "stochastic":
            key = jax.random.fold_in(jax.random.key(0), state.micro_batch_count)
        weight = call.weight
        closes_anyway = call.emit or call.flush is not None
        if has_buffer and closes_anyway and not isinstance(accepted, np.bool_):
            # If a guard skips this micro-batch, compute the mean gradient without it, because it
            # may be NaN.
            weight = jnp.where(accepted, jnp.float32(1 if weight is None else weight), 0)
        micro_batch = MicroBatch(updates, reduction, weight, key)
        add = functools.partial(add_micro_batch, micro_batch=micro_batch, is_first=step.starts)

        def read(acc: Tree) -> tuple[Tree, Tree]:
            if not has_buffer:
                return only_gradient(micro_batch), acc
            mean = window_gradient(add(acc), micro_batch, advanced.total_weight)
            # Reuse the buffers of the accumulator for the mean, to avoid scratch memory.
            return mean, jax.tree.map(lambda x, y: y if is_float0(x) else x, mean, acc)

        def next_state(inner_state: Tree, acc: Tree, emitted: Flag) -> AccumulationState:
            return advanced._replace(
                gradient_step=increment_where(advanced.gradient_step, emitted),
                emitted=jnp.where(emitted, 1, advanced.emitted),
                inner_opt_state=inner_state,
                acc_grads=run_if(step.holds, add, acc) if has_buffer else (),
            )

        return Window(step.emits, read, others, next_state)

    return gated(open_window, inner, init)


class _Call(NamedTuple):
    """Extra arguments of `update` that control the accumulation.

    Attributes:
        weight: Weight of the micro-batch, float32[]; None means 1.
        flush: Whether this call closes the window; with a weight of 0 it adds no micro-batch. None
            means False.
        emit: Whether this micro-batch closes the window; None to count micro-batches.
    """

    weight: Weight | None
    flush: Flag | None
    emit: bool | None


def _read_call(extra_args: ExtraArgs, accepted: Flag) -> tuple[_Call, ExtraArgs]:
    """Split extra arguments into those of the accumulation and those of the inner optimizer."""
    others = dict(extra_args)
    weight = as_weight(others.pop("weight", None))
    is_unguarded = isinstance(accepted, np.bool_)
    if is_unguarded and isinstance(weight, np.generic) and not np.isfinite(weight):
        hint = "Wrap this transformation in `skip_nonfinite` to skip such micro-batches."
        raise value_error("weight", "finite", f"{weight}", hint)
    flush, emit = others.pop("flush", None), others.pop("emit", None)
    if emit is not None and not isinstance(emit, (bool, np.bool_)):
        hint = "Mark it as static under jit, or omit it to count micro-batches."
        raise type_error("emit", "a Python bool", describe(emit), hint)
    if emit is not None and flush is not None:
        hint = "`emit` already determines whether the window closes."
        raise type_error("flush", "omitted if `emit` is passed", flush, hint)
    if flush is not None and not is_scalar(flush, jnp.bool_):
        hint = "Pass True to close the window in this call."
        raise type_error("flush", "a bool scalar", describe(flush), hint)
    return _Call(weight, flush, None if emit is None else bool(emit)), others


def _advance_window(
    state: AccumulationState, length: Scalar, call: _Call, accepted: Flag
) -> tuple[WindowStep, AccumulationState]:
    """Return the `WindowStep` of a call, and the next state before any optimizer step."""
    weight, flush, emit = call
    is_empty = state.mini_step == 0
    arrived = accepted & has_micro_batch(flush, weight)
    starts = jnp.logical_and(is_empty, arrived)
    weight_so_far = jnp.where(starts, 0, state.total_weight)
    with_this = weight_so_far + (1 if weight is None else weight)
    total_weight = jnp.where(arrived, with_this, state.total_weight)
    mini_step = state.mini_step + jnp.asarray(arrived, jnp.int32)
    has_weight: Flag = (mini_step > 0) & (total_weight > 0)
    if emit is None:
        # A skipped micro-batch does not complete a window, but a flush always closes it.
        closes = accepted & (mini_step >= length)
        closes = closes if flush is None else closes | flush
        holds, emits = arrived & ~closes, closes & has_weight
    elif emit:
        # A window is not empty if its last micro-batch has a known positive weight.
        is_known = weight is None or (not is_traced(weight) and float(weight) > 0)
        is_certain = is_known and isinstance(accepted, np.bool_)
        closes, holds, emits = np.True_, np.False_, np.True_ if is_certain else has_weight
    else:
        closes, holds, emits = np.False_, arrived, np.False_
    # Flushing an empty window is a no-op.
    is_idle = accepted & ~arrived & is_empty
    return WindowStep(arrived, starts, holds, emits), state._replace(
        mini_step=jnp.where(closes, 0, mini_step),
        total_weight=total_weight,
        accumulation_steps=jnp.where(starts | ~is_empty, length, state.accumulation_steps),
        micro_batch_count=increment_where(state.micro_batch_count, arrived),
        emitted=jnp.where(is_idle, state.emitted, 0),
    )
