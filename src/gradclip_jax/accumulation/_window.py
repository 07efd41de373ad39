"""How one call of `update` changes the accumulation window."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

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
    is_traced,
)
from .._errors import named, type_error, value_error
from .._leaves import wide_dtype
from .._mesh import check_placement, reshard_like, varying_axes
from .._rounding import rounded
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
        key: Random key for stochastic rounding; None to round to nearest.
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
    key: Array | None
    starts: Array
    holds: Flag
    emits: Flag
    is_empty: Flag
    extra_args: ExtraArgs

    def add(self, accumulator: Tree) -> Tree:
        """Add the micro-batch; the first one of a window overwrites the accumulator.

        Old values are overwritten instead of multiplied by 0, because they may be NaN.
        """
        keys = _keys_of_leaves(self.key, accumulator)

        def add(total: Array, grad: Array) -> Array:
            key = next(keys)
            if is_float0(grad):
                return total
            start = jnp.where(self.starts, jnp.zeros_like(total), total)
            new = add_weighted(start, jnp.asarray(grad), self.weight)
            return reshard_like(rounded(total.dtype, new, key), total)

        return jax.tree.map(add, accumulator, self.grads)

    def read(self, accumulator: Tree) -> tuple[Tree, Tree]:
        """Return the gradient of the window and the next accumulator, which share buffers."""
        if not jax.tree.leaves(accumulator):
            return self._only_gradient(), accumulator
        key = self.key
        if key is not None:  # differs from the keys of the sums
            key = jax.random.fold_in(key, len(jax.tree.leaves(accumulator)))
        keys = _keys_of_leaves(key, accumulator)

        def read(total: Array, grad: Array) -> Array:
            key = next(keys)
            if is_float0(grad) or self.reduction == "sum":
                return grad if is_float0(grad) else total
            return rounded(total.dtype, divide(total, self.state.total_weight), key)

        mean = jax.tree.map(read, self.add(accumulator), self.grads)
        # Reuse the buffers of the accumulator for the mean, to avoid scratch memory.
        return mean, jax.tree.map(lambda x, y: y if is_float0(x) else x, mean, accumulator)

    def _only_gradient(self) -> Tree:
        """Return the gradient of a window of one micro-batch, without a cast to another dtype."""
        if self.reduction == "mean" or self.weight is None:
            return self.grads

        def weighted(grad: Array) -> Array:
            if is_float0(grad):
                return grad
            return add_weighted(jnp.zeros_like(grad), grad, self.weight).astype(grad.dtype)

        return jax.tree.map(weighted, self.grads)

    def next_state(self, inner_state: Tree, accumulator: Tree, emitted: Flag) -> AccumulationState:
        """Return the next state, in which a micro-batch that does not close it is accumulated."""
        has_buffer = bool(jax.tree.leaves(accumulator))
        return self.state._replace(
            gradient_step=increment_where(self.state.gradient_step, emitted),
            emitted=jnp.asarray(emitted, jnp.int32),
            inner_opt_state=inner_state,
            acc_grads=run_if(self.holds, self.add, accumulator) if has_buffer else (),
        )


def _keys_of_leaves(key: Array | None, tree: Tree) -> Iterator[Array | None]:
    """Return a random key for each leaf; None if there is no key."""
    if key is None:
        return itertools.repeat(None)
    return iter(jax.random.split(key, len(jax.tree.leaves(tree))))  # one split for all leaves


@dataclasses.dataclass(frozen=True)
class Accumulation:
    """The options of `accumulate_gradients`, and its part of each call."""

    every: Count | Callable[[Scalar], Number]
    reduction: Literal["mean", "sum"]
    dtype: DTypeLike
    rounding: Literal["nearest", "stochastic"]

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
        counts = ("mini_step", "gradient_step", "micro_batch_count", "emitted", "empty_windows")
        sums = ("total_weight", "loss_sum", "loss_weight")
        return AccumulationState(
            # Remove weak types, which `update` does not return, to avoid retracing the second step.
            inner_opt_state=like_dtypes(inner_state, inner_state),
            acc_grads=() if self.is_one else _empty_accumulator(params_of(params), self.dtype),
            accumulation_steps=self.length(jnp.zeros((), jnp.int32)),
            **{name: jnp.zeros((), jnp.int32) for name in counts},
            **{name: jnp.zeros((), jnp.float32) for name in sums},
        )

    @functools.partial(named, function="accumulate_gradients")
    def open(
        self, grads: Tree, state: AccumulationState, accepted: Scalar | None, extra_args: ExtraArgs
    ) -> Window:
        """Add a micro-batch to the window.

        `accepted` is whether all outer guards accepted the micro-batch, None without outer guards.
        """
        check_state(state, AccumulationState)
        call, others = _read_call(extra_args, is_guarded=accepted is not None)
        if jax.tree.leaves(state.acc_grads) or not self.is_one:
            _check_accumulator(grads, state.acc_grads)
        elif call.emit is False:
            hint = "Pass a larger `every`, for which `init` allocates an accumulator."
            raise type_error("emit", "True with `every=1`", "False", hint)
        else:
            call = call._replace(emit=True)
        key = None
        if self.rounding == "stochastic":
            key = jax.random.fold_in(jax.random.key(0), state.micro_batch_count)
        arrived = has_micro_batch(extra_args)
        arrived = arrived if accepted is None else accepted & arrived
        starts = (state.mini_step == 0) & arrived
        state, others = _with_loss(state, starts, arrived, call.weight, others)
        length = self.length(state.gradient_step)
        state, (holds, emits, is_empty) = _advanced(state, length, call, arrived, accepted)
        weight = call.weight
        if accepted is not None and (call.emit or call.flush is not None):
            # If a guard skips the micro-batch that closes the window, compute the mean gradient
            # without it, because it may be NaN.
            weight = jnp.where(accepted, jnp.float32(1 if weight is None else weight), 0)
        batch = grads, weight, self.reduction, key
        return Window(state, *batch, starts, holds, emits, is_empty, others)


def _empty_accumulator(params: Tree, dtype: DTypeLike) -> Tree:
    """Return an empty accumulator; that of an integer parameter is an unused scalar."""

    def zeros(param: Array) -> Array:
        kind = jnp.result_type(param)
        if not jnp.issubdtype(kind, jnp.inexact):
            return jnp.zeros((), dtype)
        return jnp.zeros_like(param, accumulator_dtype(kind, dtype))

    return jax.tree.map(zeros, params)


def _check_accumulator(updates: Tree, accumulator: Tree) -> None:
    """Raise if gradients cannot be added to the accumulator; float0 leaves may have any shape."""
    if jax.tree.leaves(updates) and not jax.tree.leaves(accumulator):
        hint = "Convert the state of `every=1` with `convert_state`."
        raise value_error("state", "a state with an accumulator", "one without", hint)
    check_same_structure(updates, accumulator)
    check_placement("state.acc_grads", accumulator)


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


def _read_call(extra_args: ExtraArgs, *, is_guarded: bool) -> tuple[_Call, ExtraArgs]:
    """Split extra arguments into those of the accumulation and those of the inner optimizer."""
    others = dict(extra_args)
    weight = as_weight(others.pop("weight", None))
    if not is_guarded and isinstance(weight, np.generic) and not np.isfinite(weight):
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


def _advanced(
    state: AccumulationState, length: Scalar, call: _Call, arrived: Flag, accepted: Scalar | None
) -> tuple[AccumulationState, tuple[Flag, Flag, Flag]]:
    """Return the next state without its trees, and whether the window holds, emits, or is empty."""
    weight, flush, emit = call
    starts = (state.mini_step == 0) & arrived
    total_weight = jnp.where(starts, 0, state.total_weight)
    added = total_weight + (1 if weight is None else weight)
    total_weight = jnp.where(arrived, added, state.total_weight)
    mini_step = state.mini_step + jnp.asarray(arrived, jnp.int32)
    has_weight = (mini_step > 0) & (total_weight > 0)
    if emit is None:
        closes = mini_step >= length
        # A skipped micro-batch does not complete a window, but a flush always closes it.
        closes = closes if accepted is None else closes & accepted
        closes = closes if flush is None else closes | flush
        holds, emits = arrived & ~closes, closes & has_weight
    elif emit:
        # A window is not empty if its last micro-batch has a known positive weight.
        is_known = weight is None or (not is_traced(weight) and float(weight) > 0)
        closes, holds, emits = True, False, True if is_known and accepted is None else has_weight
    else:
        closes, holds, emits = False, arrived, False
    is_empty = closes & (mini_step > 0) & ~has_weight
    state = state._replace(
        mini_step=jnp.where(closes, 0, mini_step),
        total_weight=total_weight,
        accumulation_steps=jnp.where(mini_step > 0, length, state.accumulation_steps),
        micro_batch_count=increment_where(state.micro_batch_count, arrived),
        empty_windows=increment_where(state.empty_windows, is_empty),
    )
    return state, (holds, emits, is_empty)


def _with_loss(
    state: AccumulationState,
    starts: Array,
    arrived: Flag,
    weight: Weight | None,
    extra_args: ExtraArgs,
) -> tuple[AccumulationState, ExtraArgs]:
    """Add the loss of a micro-batch, and replace it by the weighted mean of the window."""
    name, loss = loss_argument(extra_args)
    total, total_weight = (jnp.where(starts, 0, x) for x in (state.loss_sum, state.loss_weight))
    if loss is None or not is_scalar(loss, jnp.floating, jnp.integer, jnp.bool_):
        return state._replace(loss_sum=total, loss_weight=total_weight), extra_args
    axes = varying_axes(jnp.asarray(loss)) - varying_axes(state.loss_sum)
    if axes:
        names = ", ".join(map(repr, sorted(axes)))
        hint = f"Average it first: `jax.lax.pmean({name}, {names})`."
        rule = f"the same on all devices along {names}, because its mean is part of the state"
        raise type_error(name, rule, "a value that differs", hint)
    value, size = jnp.asarray(loss), jnp.float32(1 if weight is None else weight)
    is_added = (size != 0) & arrived
    total = jnp.where(is_added, total + size * value.astype(jnp.float32), total)
    total_weight = jnp.where(is_added, total_weight + size, total_weight)
    mean = total / jnp.where(total_weight > 0, total_weight, 1)
    is_float = jnp.issubdtype(value.dtype, jnp.floating)
    dtype = wide_dtype(value.dtype) if is_float else jnp.float32
    mean = jnp.where(total_weight > 0, mean.astype(dtype), value.astype(dtype))
    state = state._replace(loss_sum=total, loss_weight=total_weight)
    return state, {**extra_args, name: mean}
