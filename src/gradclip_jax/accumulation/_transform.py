"""Gradient accumulation as an Optax gradient transformation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from .._checks import (
    check_choice,
    check_count,
    check_number,
    check_same_structure,
    check_state,
    check_transformation,
    describe,
    is_float0,
    is_scalar,
)
from .._devices import summand
from .._errors import named, public, type_error
from .._run_if import Flag, like_dtypes
from .._states import find_role, find_states, increment_where
from .._types import FLOAT32, Array, Count, Number, Scalar, Tree
from ..gates._execute import gated
from ..gates._extra_args import has_micro_batch, loss_argument
from ..gates._gate import ExtraArgs, params_of
from ..norms._mesh import check_equal_on_devices, check_placement, reshard_like, varying_axes
from ._reduction import (
    REDUCTIONS,
    Weight,
    accumulator_dtype,
    add_weighted,
    as_weight,
    check_dtype,
    divide,
)
from ._state import AccumulationState


@public
def accumulate_gradients(
    inner: optax.GradientTransformation,
    every: Count | Callable[[Scalar], Number],
    *,
    reduction: Literal["mean", "sum"] = "mean",
    accumulator_dtype: DTypeLike = FLOAT32,
) -> optax.GradientTransformationExtraArgs:
    """Run the inner optimizer once for every `every` micro-batches, on their mean gradient.

    The gradient of an accumulation window is `sum(weight_i * g_i) / sum(weight_i)`. Before the last
    micro-batch, the updates are zeros and the inner optimizer does not run. If each weight is a
    number of tokens, accumulation is equivalent to one large batch. With `apply_gradients`, a
    micro-step that does not run the optimizer only adds the gradient to the accumulator.

    | micro-batch | result |
    | --- | --- |
    | `weight=0`, even with NaN gradients | contributes 0; counted, unless `flush=True` |
    | NaN gradient | affects only its window; an outer `skip_nonfinite` skips the micro-batch |
    | the last of an epoch, with `flush=True` | emits the window, divided by its total weight |
    | the last of a window with a total weight of 0 | zero update; the inner state does not change |
    | | (see the metric `empty_windows`) |

    | mistake | result |
    | --- | --- |
    | an optimizer outside, as in `chain(accumulate_gradients(identity(), 4), adamw)` | a warning; |
    | | most of its gradients are 0 |
    | `optax.MultiSteps` around this transformation | windows of windows; not detected |

    Extra arguments of `update`:

    - `weight`, a scalar >= 0, for example the number of tokens. It is converted to float32.
    - `flush`, a bool that may be traced: whether to emit the window in this call.
    - `emit`, a Python bool, static under jit: whether this micro-batch closes the window. It
      replaces the counting of micro-batches and compiles one program for each value. These
      programs have no branch, so the host does not wait for the device. However, with a traced
      `weight`, the program that emits checks for a total weight of 0.

    The loss, a scalar passed as `value` or `loss`, must be equal on all devices. The call that runs
    the inner optimizer forwards its weighted mean over the window if it receives a loss. Other
    extra arguments are forwarded unchanged.

    Use `microbatched_value_and_grad` to split one batch inside one step; both can be combined.

    Args:
        inner: Gradient transformation, which must not contain another accumulation.
        every: Number of micro-batches in an accumulation window; an integer >= 1, or a function
            from the gradient step, int32[], to such a number (`every_k_schedule` in Optax). The
            integer 1 allocates no accumulator.
        reduction: "mean" or "sum". To accumulate leaves that are not gradients in another way, such
            as the statistics of an fp8 layer, use `optax.partition`.
        accumulator_dtype: Dtype of the sum for leaves of up to 32 bits. Complex leaves use the
            corresponding complex dtype, and 64-bit leaves keep their dtype.

    Returns:
        A gradient transformation with an `AccumulationState`. The inner optimizer receives
        gradients in the accumulator's dtype or, if it raises for this dtype, in the dtype of the
        incoming gradients. The updates have the dtypes that it returns for the incoming gradients.

    Raises:
        ValueError: If `every` is less than 1, or if `reduction` is unknown.
        TypeError: If `inner` is not a gradient transformation or contains an accumulation, if
            `every` is not an integer, or if a leaf is not floating-point or complex or has a
            different shape than its parameter.

    Examples:
        >>> import jax, jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = gcx.accumulate_gradients(optax.sgd(1.0), every=2)
        >>> params = jnp.array([0.0])
        >>> update, state = jax.jit(tx.update), tx.init(params)
        >>> held, state = update(jnp.array([2.0]), state, params, weight=1.0)
        >>> emitted, state = update(jnp.array([6.0]), state, params, weight=3.0)
        >>> held.tolist(), emitted.tolist(), bool(gcx.has_updated(state))
        ([0.0], [-5.0], True)
    """
    check_transformation("inner", inner)
    if not callable(every):
        check_count("every", every, "Pass 1 to run the inner optimizer at every step.")
    check_choice("reduction", reduction, REDUCTIONS)
    check_dtype("accumulator_dtype", accumulator_dtype)
    return gated(Accumulation(every, reduction, accumulator_dtype), inner)


class Accumulation(NamedTuple):
    """The arguments of `accumulate_gradients`, and its part of a call of `update`."""

    every: Count | Callable[[Scalar], Number]
    reduction: Literal["mean", "sum"]
    dtype: DTypeLike
    function: str = "accumulate_gradients"

    @property
    def is_one(self) -> bool:
        # A traced `every` requires the accumulator even if its value is 1.
        return isinstance(self.every, (int, np.integer)) and self.every == 1

    def length(self, gradient_step: Scalar) -> Scalar:
        """Return the number of micro-batches in the window of a gradient step."""
        length = self.every(gradient_step) if callable(self.every) else self.every
        check_number("every", length, "Return the length of the next window.", "[1, inf]")
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

    @named("accumulate_gradients")
    def micro_step(
        self, grads: Tree, state: AccumulationState, accepted: Flag | None, extra_args: ExtraArgs
    ) -> MicroStep:
        """Return how a micro-batch changes its window, without adding the gradient.

        `accepted` is whether all outer guards accepted the micro-batch, None without outer guards.
        """
        check_state(state, AccumulationState)
        weight, flush, emit = _read_call(extra_args)
        if not self.is_one:
            check_same_structure(grads, state.acc_grads)
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
        return MicroStep(state, *batch, starts, holds, emits, is_empty, others)


class MicroStep(NamedTuple):
    """A micro-batch, and how it changes its window.

    Attributes:
        state: Next state, except for the accumulator and the inner state.
        grads: Gradient of the micro-batch.
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

    def hold(self, accumulator: Tree) -> Tree:
        """Return the accumulator, with the micro-batch if the window stays open.

        The addition is not a conditional step, for whose predicate the host of a GPU would wait.
        """
        if self.holds is False:
            return accumulator
        is_added = jnp.asarray(self.holds) & (self.state.mini_step > 0)  # no constant: `summand`
        # The weight of a micro-batch that a guard skips may be NaN.
        weight = None if self.weight is None else jnp.where(is_added, self.weight, 0)
        grads = jax.tree.map(lambda x: x if is_float0(x) else summand(x, is_added), self.grads)
        held = self._replace(grads=grads, starts=self.starts & is_added, weight=weight)
        return held.add(accumulator)

    def add(self, accumulator: Tree, divisor: Scalar | None = None) -> Tree:
        """Add the micro-batch, divide the sum, and round it once."""

        def add(total: Array, grad: Array) -> Array:
            if is_float0(grad):
                return total
            # Old values are overwritten instead of multiplied by 0, because they may be NaN.
            # XLA on GPU would share zeros with a scan over layers, and copy them (see `summand`).
            start = jnp.where(self.starts, jnp.full_like(total, -0.0), total)
            new = add_weighted(start, jnp.asarray(grad), self.weight)
            new = new if divisor is None else divide(new, divisor)
            return reshard_like(new.astype(total.dtype), total)

        return jax.tree.map(add, accumulator, self.grads)

    def window_gradient(self, accumulator: Tree) -> tuple[Tree, Tree]:
        """Return the gradient of the window and the next accumulator, which share buffers."""
        is_mean, has_buffer = self.reduction == "mean", bool(jax.tree.leaves(accumulator))
        if not has_buffer and (is_mean or self.weight is None):  # keep the dtype of the gradient
            return self.grads, accumulator
        divisor = self.state.total_weight if is_mean else None
        new = self.add(accumulator if has_buffer else self.grads, divisor)
        grads = jax.tree.map(lambda x, y: x if is_float0(x) else y, self.grads, new)
        return grads, new if has_buffer else accumulator

    def finish(self, inner_state: Tree, accumulator: Tree, emitted: Flag) -> AccumulationState:
        """Return the next state, with the micro-batch in the accumulator if the window is open."""
        return self.state._replace(
            gradient_step=increment_where(self.state.gradient_step, emitted),
            emitted=jnp.asarray(emitted, jnp.int32),
            inner_opt_state=inner_state,
            acc_grads=self.hold(accumulator),
        )


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
    ours = ("weight", "flush", "emit")
    others = {name: x for name, x in extra_args.items() if name not in ours}
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
