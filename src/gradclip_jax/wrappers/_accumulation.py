"""Accumulate the micro-batches of a window into one gradient for the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .._checks import (
    call_user,
    check_arrays,
    check_number,
    check_same_structure,
    is_float0,
    is_scalar,
)
from .._errors import type_error
from .._format import describe
from .._states import increment_where
from .._types import Array, Count, Number, Scalar, Tree
from .._weighted_sum import Reduction, WeightedSum, as_weight, scaled, sum_dtype
from ..norms._mesh import check_equal_on_devices, check_placement, varying_axes
from ._extra_args import ExtraArgs, as_loss, is_gradient, loss_argument
from ._guard import params_of

MAX_INT32 = np.iinfo(np.int32).max


class AccumulationState(NamedTuple):
    """The open window of an accumulation; counters are int32[] and saturate.

    Attributes:
        mini_step: Number of micro-batches in the window.
        gradient_step: Number of calls in which the inner transformation ran.
        accumulation_steps: Length of the window.
        micro_batch_count: Number of all micro-batches so far.
        empty_windows: Number of windows that closed with a total weight of zero.
        gradient: Weighted sum of the gradients; `total` is () for `every=1`.
        loss: Weighted sum of the losses, float32[].
    """

    mini_step: Scalar
    gradient_step: Scalar
    accumulation_steps: Scalar
    micro_batch_count: Scalar
    empty_windows: Scalar
    gradient: WeightedSum
    loss: WeightedSum

    @property
    def has_positive_weight(self) -> Scalar:
        """Whether the window contains a micro-batch of positive weight."""
        return self.gradient.weight > 0

    def step_metrics(self) -> dict[str, Tree]:
        """Return the entries of `metrics` for this state."""
        names = "mini_step", "gradient_step", "empty_windows"
        return {name: getattr(self, name) for name in names}

    def with_total(self, total: Tree) -> AccumulationState:
        """Return the state after replacing the sum of gradients."""
        return self._replace(gradient=self.gradient._replace(total=total))

    def close_if(self, closes: Scalar | bool) -> AccumulationState:
        """Return the state; the window is empty if `closes` is true."""
        return self._replace(
            mini_step=jnp.where(closes, 0, self.mini_step),
            gradient=self.gradient.empty_if(closes),
            loss=self.loss.empty_if(closes),
        )


class MicroBatch(NamedTuple):
    """The arguments of one call of an accumulation.

    Attributes:
        weight: Weight of the micro-batch, float32[]; 1 if no weight was passed.
        is_weight_passed: Whether a weight was passed.
        flush: Whether the window closes in this call, bool[].
        extra_args: Extra arguments of `update`, except for `weight` and `flush`.
    """

    weight: Scalar
    is_weight_passed: bool
    flush: Scalar
    extra_args: ExtraArgs

    @property
    def has_gradient(self) -> Scalar:
        """Whether the call contains a gradient. `gcx.flush` passes zeros with weight 0 instead."""
        return ~(self.flush & (self.weight == 0))

    @property
    def is_weighted(self) -> Scalar:
        """Whether the weight is nonzero. NaN is nonzero, so guards can reject it."""
        return self.weight != 0


def micro_batch_of(extra_args: ExtraArgs) -> MicroBatch:
    """Read `weight` and `flush` from the extra arguments of `update`."""
    flush = extra_args.get("flush", False)
    if not is_scalar(flush, jnp.bool_):
        hint = "Pass True to close the window in this call."
        raise type_error("flush", "a bool scalar", describe(flush), hint)
    others = {name: x for name, x in extra_args.items() if name not in ("weight", "flush")}
    has_weight = extra_args.get("weight") is not None
    weight = as_weight(extra_args["weight"] if has_weight else 1)
    return MicroBatch(weight, has_weight, jnp.asarray(flush), others)


class Accumulation(NamedTuple):
    """The arguments and the implementation of `accumulate_gradients`."""

    every: Count | Callable[[Scalar], Number]
    reduction: Reduction
    dtype: DTypeLike | None
    name: str = "accumulate_gradients"

    @property
    def needs_no_sum(self) -> bool:
        """Whether every window has one micro-batch, because `every` is the integer 1."""
        return isinstance(self.every, (int, np.integer)) and self.every == 1

    def has_sum(self, state: AccumulationState) -> bool:
        """Return whether a state contains a sum of gradients.

        If `every` was changed to 1 after the state was saved, the state still contains a sum.
        """
        return not self.needs_no_sum or bool(jax.tree.leaves(state.gradient.total))

    def always_takes_step(self, state: AccumulationState, batch: MicroBatch) -> bool:
        """Return whether each accepted micro-batch closes a window of positive weight."""
        return not (self.has_sum(state) or batch.is_weight_passed)

    def length(self, gradient_step: Scalar) -> Scalar:
        """Return the number of micro-batches in the given window, in [1, 2^31)."""
        length = self.every
        if callable(length):
            length = call_user("every", "every", length, gradient_step)
        check_number("every", length, "Return the length of the next window.", "[1, inf]")
        if isinstance(length, (int, np.integer)):
            return jnp.int32(min(int(length), MAX_INT32))
        value = jnp.asarray(length)
        is_long = ~(value < MAX_INT32)  # also for NaN
        known = jnp.where(is_long, 1, value).astype(jnp.int32)
        return jnp.where(is_long, MAX_INT32, jnp.maximum(known, 1))

    def init(self, params: Tree) -> AccumulationState:
        """Return a state with an empty window."""
        check_arrays("params", params)
        check_placement("params", params)

        def empty(param: Array) -> Array:
            kind = jnp.result_type(param)
            if not jnp.issubdtype(kind, jnp.inexact):
                return jnp.zeros((), self.dtype)  # unused
            return jnp.zeros_like(param, sum_dtype(kind, self.dtype))

        counts = ("mini_step", "gradient_step", "micro_batch_count", "empty_windows")
        total = () if self.needs_no_sum else jax.tree.map(empty, params_of(params))
        zero = (jnp.zeros((), jnp.float32) for _ in range(3))  # each with its own buffer
        return AccumulationState(
            accumulation_steps=self.length(jnp.zeros((), jnp.int32)),
            gradient=WeightedSum(total, next(zero)),
            loss=WeightedSum(next(zero), next(zero)),
            **{name: jnp.zeros((), jnp.int32) for name in counts},
        )

    def add(
        self, state: AccumulationState, grads: Tree, batch: MicroBatch, arrived: Scalar
    ) -> tuple[AccumulationState, Scalar]:
        """Add a micro-batch if `arrived` is true, and return whether the window closes.

        `arrived` is true if the call has a gradient and no guard rejected it.
        """
        mini_step = state.mini_step + arrived.astype(jnp.int32)
        length = self.length(state.gradient_step)
        is_full = arrived & (mini_step >= length)
        # `mini_step > 0` is redundant. It keeps `is_added` from being a compile-time constant,
        # which `summand` forbids.
        is_added = arrived & batch.is_weighted & (mini_step > 0)
        gradient = state.gradient
        if self.has_sum(state):
            check_same_structure(grads, gradient.total)
            weight = batch.weight if batch.is_weight_passed else None
            gradient = gradient.add(grads, weight, is_added)
        else:
            gradient = WeightedSum((), jnp.where(is_added, batch.weight, 0))
        state = state._replace(
            mini_step=mini_step,
            accumulation_steps=jnp.where(mini_step > 0, length, state.accumulation_steps),
            micro_batch_count=increment_where(state.micro_batch_count, arrived),
            gradient=gradient,
            loss=self._add_loss(state.loss, batch, is_added),
        )
        return state, (mini_step > 0) & (is_full | batch.flush)

    def _add_loss(self, loss: WeightedSum, batch: MicroBatch, is_added: Scalar) -> WeightedSum:
        """Add the loss of a micro-batch, if there is one."""
        name, value = loss_argument(batch.extra_args)
        if value is None:
            return loss
        value = as_loss(name, value)
        check_equal_on_devices(name, value, varying_axes(loss.total), name)
        return loss.add(value, batch.weight, is_added)

    def close(
        self, state: AccumulationState, grads: Tree, batch: MicroBatch
    ) -> tuple[Tree, ExtraArgs, Tree]:
        """Return the gradient and the extra arguments of a window, and a new buffer for its sum.

        `grads` and `batch` belong to the last micro-batch. The loss and the gradient of the window
        replace the extra arguments `value` (or `loss`) and `grad`. The old sum is no longer needed,
        because the window becomes empty. The buffer contains the gradient, so that XLA computes the
        mean in place.
        """
        buffer = state.gradient.total
        if self.has_sum(state):
            buffer = state.gradient.result(self.reduction)
            gradient = jax.tree.map(lambda x, y: x if is_float0(x) else y, grads, buffer)
        else:  # the gradient keeps its dtype
            gradient = scaled(grads, batch.weight) if self.reduction == "sum" else grads
        extra_args = dict(batch.extra_args)
        name, value = loss_argument(extra_args)
        if value is not None:
            # The call of `flush` may be the first call to which a loss is passed.
            window_loss = state.loss.result(self.reduction)
            extra_args[name] = jnp.where(state.loss.weight > 0, window_loss, as_loss(name, value))
        if is_gradient(extra_args, gradient):
            extra_args["grad"] = gradient
        return gradient, extra_args, buffer

    def finish(
        self, state: AccumulationState, closes: Scalar, is_empty: Scalar, is_applied: Scalar
    ) -> AccumulationState:
        """Update the counts, and reset the window if it closed."""
        state = state._replace(
            gradient_step=increment_where(state.gradient_step, is_applied),
            empty_windows=increment_where(state.empty_windows, is_empty),
        )
        return state.close_if(closes)
