"""How one call of `update` changes the accumulation window."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from .._checks import (
    check_number,
    check_same_structure,
    check_state,
    describe,
    is_float0,
    is_scalar,
)
from .._errors import named, type_error
from .._mesh import check_equal_on_devices, check_placement, reshard_like, varying_axes
from .._run_if import Flag, like_dtypes, run_if
from .._states import find_role, find_states, increment_where
from .._types import Array, Count, Number, Scalar, Tree
from ..gates._extra_args import has_micro_batch, loss_argument
from ..gates._gate import ExtraArgs, params_of
from ._reduction import Weight, accumulator_dtype, add_weighted, as_weight, divide
from ._state import AccumulationState


class Window(NamedTuple):
    """The accumulation window after the current micro-batch.

    Attributes:
        state: Next state, except for the accumulator and the inner state.
        grads: Gradients of the current micro-batch.
        weight: Its weight, float32[]; None means 1.
        reduction: "mean" or "sum".
        starts: Whether it is the first micro-batch of the window.
        holds: Whether it is accumulated without closing the window.
        emits: Whether the window closes with a positive total weight.
        is_empty: Whether the window closes without weight, although it has micro-batches.
        extra_args: Extra arguments for the inner transformation.
    """

    state: AccumulationState
    grads: Tree
    weight: Weight | None
    reduction: str
    starts: Array
    holds: Flag
    emits: Flag
    is_empty: Flag
    extra_args: ExtraArgs

    def add(self, accumulator: Tree, divisor: Scalar | None = None) -> Tree:
        """Add the micro-batch, divide the sum, and round it once."""

        def add(total: Array, grad: Array) -> Array:
            if is_float0(grad):
                return total
            # Old values are overwritten instead of multiplied by 0, because they may be NaN.
            start = jnp.where(self.starts, jnp.zeros_like(total), total)
            new = add_weighted(start, jnp.asarray(grad), self.weight)
            new = new if divisor is None else divide(new, divisor)
            return reshard_like(new.astype(total.dtype), total)

        return jax.tree.map(add, accumulator, self.grads)

    def read(self, accumulator: Tree) -> tuple[Tree, Tree]:
        """Return the gradient of the window and the next accumulator, which share buffers."""
        is_mean, has_buffer = self.reduction == "mean", bool(jax.tree.leaves(accumulator))
        if not has_buffer and (is_mean or self.weight is None):  # keep the dtype of the gradient
            return self.grads, accumulator
        divisor = self.state.total_weight if is_mean else None
        new = self.add(accumulator if has_buffer else self.grads, divisor)
        grads = jax.tree.map(lambda x, y: x if is_float0(x) else y, self.grads, new)
        return grads, new if has_buffer else accumulator

    def next_state(self, inner_state: Tree, accumulator: Tree, emitted: Flag) -> AccumulationState:
        """Return the next state, in which a micro-batch that does not close it is accumulated."""
        has_buffer = bool(jax.tree.leaves(accumulator))
        return self.state._replace(
            gradient_step=increment_where(self.state.gradient_step, emitted),
            emitted=jnp.asarray(emitted, jnp.int32),
            inner_opt_state=inner_state,
            acc_grads=run_if(self.holds, self.add, accumulator) if has_buffer else (),
        )


@dataclasses.dataclass(frozen=True)
class Accumulation:
    """The options of `accumulate_gradients`, and its part of each call."""

    every: Count | Callable[[Scalar], Number]
    reduction: Literal["mean", "sum"]
    dtype: DTypeLike
    function: ClassVar[str] = "accumulate_gradients"

    @property
    def is_one(self) -> bool:
        # A traced `every` requires the accumulator even if its value is 1.
        return isinstance(self.every, (int, np.integer)) and self.every == 1

    def length(self, gradient_step: Scalar) -> Scalar:
        """Return the number of micro-batches to accumulate at a gradient step."""
        if not callable(self.every):
            return jnp.asarray(self.every).astype(jnp.int32)
        length, hint = self.every(gradient_step), "Return the length of the next window."
        check_number("every(gradient_step)", length, hint, "[1, inf]")
        return jnp.maximum(jnp.asarray(length).astype(jnp.int32), 1)

    def init(self, inner_state: Tree, params: Tree) -> AccumulationState:
        """Return a state without accumulated micro-batches."""
        check_placement("params", params)
        others = find_states(inner_state, optax.MultiStepsState)
        if others or find_role(inner_state, "accumulation"):
            rule = "a transformation that contains no accumulation"
            hint = "Use one accumulation with `every=a * b` instead of two."
            raise type_error("inner", rule, "one that contains an accumulation", hint)

        def empty(param: Array) -> Array:
            kind = jnp.result_type(param)
            if not jnp.issubdtype(kind, jnp.inexact):
                return jnp.zeros((), self.dtype)  # unused
            return jnp.zeros_like(param, accumulator_dtype(kind, self.dtype))

        counts = ("mini_step", "gradient_step", "micro_batch_count", "emitted", "empty_windows")
        sums = ("total_weight", "loss_sum", "loss_weight")
        return AccumulationState(
            # Remove weak types, which `update` does not return, to avoid retracing the second step.
            inner_opt_state=like_dtypes(inner_state, inner_state),
            acc_grads=() if self.is_one else jax.tree.map(empty, params_of(params)),
            accumulation_steps=self.length(jnp.zeros((), jnp.int32)),
            **{name: jnp.zeros((), jnp.int32) for name in counts},
            **{name: jnp.zeros((), jnp.float32) for name in sums},
        )

    @named(function)
    def open(
        self, grads: Tree, state: AccumulationState, accepted: Flag | None, extra_args: ExtraArgs
    ) -> Window:
        """Return the window after a micro-batch, whose gradients `add` or `read` adds later.

        `accepted` is whether all outer guards accepted the micro-batch, None without outer guards.
        """
        check_state(state, AccumulationState)
        weight, flush, emit = _read_call(extra_args)
        if jax.tree.leaves(state.acc_grads) or not self.is_one:
            check_same_structure(grads, state.acc_grads)
            check_placement("state.acc_grads", state.acc_grads)
        elif emit is False:
            hint = "Pass a larger `every`, for which `init` allocates an accumulator."
            raise type_error("emit", "True with `every=1`", "False", hint)
        else:
            emit = True

        arrived = has_micro_batch(extra_args)
        arrived = arrived if accepted is None else accepted & arrived
        starts = (state.mini_step == 0) & arrived
        added = jnp.where(arrived, jnp.float32(1 if weight is None else weight), 0)
        state, others = _with_loss(state, starts, added, extra_args)

        length = self.length(state.gradient_step)
        mini_step = state.mini_step + jnp.asarray(arrived, jnp.int32)
        total_weight = jnp.where(starts, 0, state.total_weight) + added
        has_weight = (mini_step > 0) & (total_weight > 0)
        if emit is None:
            closes = mini_step >= length
            # A skipped micro-batch does not complete a window, but a flush always closes it.
            closes = closes if accepted is None else closes & accepted
            closes = closes if flush is None else closes | flush
            holds, emits = arrived & ~closes, closes & has_weight
        else:
            # A window is not empty if its last micro-batch has a known positive weight.
            is_known = weight is None or (isinstance(weight, np.generic) and weight > 0)
            emits = emit and (True if is_known and accepted is None else has_weight)
            closes, holds = emit, False if emit else arrived
        is_empty = closes & (mini_step > 0) & ~has_weight
        state = state._replace(
            mini_step=jnp.where(closes, 0, mini_step),
            total_weight=total_weight,
            accumulation_steps=jnp.where(mini_step > 0, length, state.accumulation_steps),
            micro_batch_count=increment_where(state.micro_batch_count, arrived),
            empty_windows=increment_where(state.empty_windows, is_empty),
        )
        if accepted is not None and (emit or flush is not None):
            # If a guard skips the micro-batch that closes the window, compute the mean gradient
            # without it, because it may be NaN.
            weight = added
        batch = grads, weight, self.reduction
        return Window(state, *batch, starts, holds, emits, is_empty, others)


def _read_call(extra_args: ExtraArgs) -> tuple[Weight | None, Flag | None, bool | None]:
    """Return the weight, whether to flush, and whether to emit, which is None to count."""
    weight = as_weight(extra_args.get("weight"))
    flush, emit = extra_args.get("flush"), extra_args.get("emit")
    if emit is not None and (flush is not None or not isinstance(emit, (bool, np.bool_))):
        rule, hint = "a Python bool, without `flush`", "Mark it as static under jit, or omit it."
        raise type_error("emit", rule, describe(emit), hint)
    if flush is not None and not is_scalar(flush, jnp.bool_):
        hint = "Pass True to close the window in this call."
        raise type_error("flush", "a bool scalar", describe(flush), hint)
    return weight, flush, None if emit is None else bool(emit)


def _with_loss(
    state: AccumulationState, starts: Array, weight: Array, extra_args: ExtraArgs
) -> tuple[AccumulationState, ExtraArgs]:
    """Add the loss of a micro-batch, and replace it by the weighted mean of the window.

    The extra arguments are returned without those of the accumulation.
    """
    others: dict[str, Any] = dict(extra_args)
    for name in ("weight", "flush", "emit"):
        others.pop(name, None)
    name, loss = loss_argument(others)
    total, total_weight = (jnp.where(starts, 0, x) for x in (state.loss_sum, state.loss_weight))
    if loss is not None and is_scalar(loss, jnp.floating, jnp.integer, jnp.bool_):
        value = jnp.asarray(loss)
        check_equal_on_devices(name, value, varying_axes(total), name)  # the state has its mean
        value = value.astype(jnp.float32)
        total, total_weight = add_weighted(total, value, weight), total_weight + weight
        mean = total / jnp.where(total_weight > 0, total_weight, 1)
        others[name] = jnp.where(total_weight > 0, mean, value)
    return state._replace(loss_sum=total, loss_weight=total_weight), others
