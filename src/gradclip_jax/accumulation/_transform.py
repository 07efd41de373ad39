"""Gradient accumulation as an Optax gradient transformation."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._checks import (
    check_choice,
    check_count,
    check_dtype,
    check_inexact,
    check_number,
    check_transformation,
)
from .._run_if import Gate, gated, like_dtypes, run_if
from .._states import increment_where
from .._types import FLOAT32, Array, Scalar, Tree
from ._noise import NoiseState, empty_noise, observe_micro_batch, observe_window
from ._running import (
    accumulator_like,
    add_weighted,
    as_weight,
    check_matches_accumulator,
    window_gradient,
)
from ._state import AccumulationState


def accumulate_gradients(
    inner: optax.GradientTransformation,
    every: int | Callable[[Any], Any],
    *,
    reduction: str = "mean",
    accumulator_dtype: Any = FLOAT32,
    noise_scale_decay: float | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Runs the inner optimizer once for every `every` micro-batches, on their mean gradient.

    `sum(weight_i * g_i) / sum(weight_i)` over a window; between windows the updates are zeros
    and the inner optimizer is not run. Weighted by its tokens, a window equals one big batch.
    Take the steps with `apply_gradients` and a held one costs no more than the addition.

    | micro-batch | effect |
    | --- | --- |
    | `weight=0`, even one full of NaN | counts, adds nothing |
    | NaN gradient | spoils its own window only; wrap with `skip_nonfinite` to drop it alone |
    | the last of an epoch, `flush=True` | emits now, divided by what was really accumulated |
    | a window of total weight 0 | emits nothing, the inner state is left alone |

    Extra arguments of `update`: `weight`, a scalar >= 0, for example the number of tokens;
    `flush`, a bool that may be traced. All others reach the inner optimizer as the micro-batch
    that closes the window brings them; a `value` is thus the loss of the last micro-batch.

    Use `microbatched_value_and_grad` to split one batch inside one step; the two compose.

    Args:
        inner: any Optax transformation.
        every: micro-batches in a window, an integer >= 1, or a function of the gradient step,
            int32[], that returns one.
        reduction: "mean" or "sum".
        accumulator_dtype: dtype of the sum for leaves of up to 32 bit; complex leaves take the
            complex dtype over it, 64-bit leaves keep their own.
        noise_scale_decay: in [0, 1], 0.9 for example, measures the gradient noise scale
            (McCandlish et al. 2018, arXiv 1812.06162) with this decay over windows, for the
            price of one norm a micro-batch; `metrics` tell it. None does not.

    Returns:
        An Optax transformation with an `AccumulationState`. The inner optimizer sees gradients
        in the accumulator's dtype, or, if it refuses them, in their own; the updates have the
        dtypes it gives on plain gradients.

    Raises:
        ValueError: `every` is < 1, or `reduction` is another word.
        TypeError: `inner` is no transformation, `every` no integer; when traced, a leaf is not
            inexact or its shape is not the parameter's.

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
    name = "accumulate_gradients"
    check_transformation(name, "inner", inner)
    check_choice(name, "reduction", reduction, ("mean", "sum"))
    check_dtype(name, "accumulator_dtype", accumulator_dtype)
    if not callable(every):
        check_count(name, "every", every, "Pass 1 to run the inner optimizer at every step.")
    if noise_scale_decay is not None:
        hint = "Pass None not to measure the noise scale."
        check_number(name, "noise_scale_decay", noise_scale_decay, hint, high=1.0, closed=True)
    inner = optax.with_extra_args_support(inner)

    def steps(gradient_step: Scalar) -> Scalar:
        now = every(gradient_step) if callable(every) else every
        return jnp.maximum(jnp.asarray(now).astype(jnp.int32), 1)

    def init(params: Tree) -> AccumulationState:
        inner_state = inner.init(params)
        return AccumulationState(
            mini_step=jnp.zeros((), jnp.int32),
            gradient_step=jnp.zeros((), jnp.int32),
            # Not weakly typed, as what comes out of a step is not: one trace for all steps.
            inner_opt_state=like_dtypes(inner_state, inner_state),
            acc_grads=accumulator_like(params, accumulator_dtype),
            total_weight=jnp.zeros((), jnp.float32),
            accumulation_steps=steps(jnp.zeros((), jnp.int32)),
            micro_batch_count=jnp.zeros((), jnp.int32),
            emitted=jnp.zeros((), bool),
            noise=() if noise_scale_decay is None else empty_noise(),
        )

    def gate(
        updates: Tree,
        state: AccumulationState,
        params: Tree,
        extra_args: dict[str, Any],
        admitted: Array | bool,
    ) -> Gate:
        check_inexact(name, "updates", updates)
        check_matches_accumulator(name, updates, state.acc_grads)
        extra_args = dict(extra_args)
        weight = as_weight(name, extra_args.pop("weight", None))
        flush = admitted & jnp.asarray(extra_args.pop("flush", False)).astype(bool)
        # A flush that brings no weight is not a micro-batch, only the wish to close the window.
        arrived = jnp.asarray(admitted)
        arrived &= jnp.array(True) if weight is None else ~(flush & (weight == 0))
        empty = state.mini_step == 0
        starts, idle = empty & arrived, empty & ~arrived
        acc_grads = add_weighted(state.acc_grads, updates, weight, starts)
        acc_grads = _where(admitted, acc_grads, state.acc_grads)
        total_weight = jnp.where(starts, 0, state.total_weight) + (1 if weight is None else weight)
        total_weight = jnp.where(admitted, total_weight, state.total_weight)
        mini_step = state.mini_step + arrived.astype(jnp.int32)
        length = steps(state.gradient_step)
        closes = (admitted & (mini_step >= length)) | flush
        emits = closes & (mini_step > 0) & (total_weight > 0)
        noise = state.noise
        decay = noise_scale_decay
        if decay is not None:
            one = jnp.float32(1) if weight is None else weight
            noise = _where(admitted, observe_micro_batch(noise, updates, one, starts), noise)

            def observe(noise: NoiseState) -> NoiseState:
                mean = window_gradient(acc_grads, updates, total_weight, mean=True)
                return observe_window(noise, mean, total_weight, decay)

            noise = run_if(emits, observe, noise)

        def next_state(
            inner_opt_state: Any, acc_grads: Tree, stepped: Array
        ) -> AccumulationState:
            return AccumulationState(
                mini_step=jnp.where(closes, 0, mini_step),
                gradient_step=increment_where(state.gradient_step, stepped),
                inner_opt_state=inner_opt_state,
                acc_grads=acc_grads,
                total_weight=total_weight,
                accumulation_steps=jnp.where(idle, state.accumulation_steps, length),
                micro_batch_count=increment_where(state.micro_batch_count, arrived),
                emitted=jnp.where(idle & admitted, state.emitted, stepped),
                noise=noise,
            )

        def read_gradient(acc_grads: Tree) -> tuple[Tree, Tree]:
            window = window_gradient(acc_grads, updates, total_weight, mean=reduction == "mean")
            step = (state.inner_opt_state, params, extra_args)
            return _cast_if_refused(inner, window, updates, *step), window

        return Gate(emits, acc_grads, read_gradient, state.inner_opt_state, extra_args, next_state)

    return gated(inner, init, gate)


def _where(predicate: Array | bool, new: Tree, old: Tree) -> Tree:
    if predicate is True:
        return new  # nothing is around it that could have left the micro-batch out
    return jax.tree.map(functools.partial(jnp.where, predicate), new, old)


def _cast_if_refused(
    inner: optax.GradientTransformationExtraArgs,
    window: Tree,
    updates: Tree,
    state: Any,
    params: Tree,
    extra_args: dict[str, Any],
) -> Tree:
    """The gradient of the window in the accumulator's dtype, if the inner optimizer takes it.

    Some, `optax.novograd` and `optax.apply_if_finite` among them, cannot be traced on gradients
    whose dtype is not that of the parameters.
    """
    plain = like_dtypes(window, updates)
    if [x.dtype for x in jax.tree.leaves(plain)] == [x.dtype for x in jax.tree.leaves(window)]:
        return window
    try:
        jax.eval_shape(lambda: inner.update(window, state, params, **extra_args))
    except TypeError:
        return plain
    return window
