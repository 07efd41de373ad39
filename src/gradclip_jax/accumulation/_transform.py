"""Gradient accumulation as an Optax gradient transformation."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._checks import (
    check_choice,
    check_count,
    check_decays,
    check_number,
    check_transformation,
)
from .._errors import public, type_error
from .._execute import gated
from .._gate import Accumulation, Flag, Judged, Window
from .._mesh import is_unreduced, without_reduced_axes
from .._run_if import like_dtypes, run_if
from .._states import METRICS, find_states, increment_where
from .._tree_checks import check_same_structure
from .._types import FLOAT32, Scalar, Tree
from ._noise import empty_noise, observe_noise
from ._reduction import (
    DTYPE,
    REDUCTION,
    MicroBatch,
    accumulator_like,
    add_micro_batch,
    check_matches_accumulator,
    only_gradient,
    params_of,
    spent_accumulator,
    window_gradient,
)
from ._state import AccumulationState, advance_window, read_call


@public
def accumulate_gradients(
    inner: optax.GradientTransformation,
    every: int | Callable[[Any], Any],
    *,
    reduction: str | Tree | Callable[[str], str] = "mean",
    accumulator_dtype: Any = FLOAT32,
    rounding: Literal["nearest", "stochastic"] = "nearest",
    noise_scale_decay: float | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Runs the inner optimizer once for every `every` micro-batches, on their mean gradient.

    `sum(weight_i * g_i) / sum(weight_i)` over a window; before its end the updates are zeros and
    the inner optimizer is not run. Weighted by its tokens, a window equals one big batch. Taken
    with `apply_gradients`, a step that is held costs no more than the addition.

    | micro-batch | effect |
    | --- | --- |
    | `weight=0`, even one full of NaN | counts, adds nothing |
    | NaN gradient | spoils its own window only; wrap with `skip_nonfinite` to drop it alone |
    | the last of an epoch, `flush=True` | emits now, divided by what was really accumulated |
    | a window of total weight 0 | emits nothing, the inner state is left alone |
    | unreduced over a mesh axis | added up so, and summed over devices when the window closes |

    Extra arguments of `update`:

    - `weight`, a scalar >= 0, for example the number of tokens.
    - `flush`, a bool that may be traced: whether to emit now.
    - `emit`, a Python bool, known when traced: whether this micro-batch closes the window, in
      place of counting. The two programs have no branch, so no device waits for the host;
      but with a traced `weight` the one that emits still leaves out a window of total weight 0.

    All others, such as `value`, are those of the micro-batch that closes the window.

    Use `microbatched_value_and_grad` to split one batch inside one step; the two compose.

    Args:
        inner: any Optax transformation without an accumulation in it.
        every: micro-batches in a window, an integer >= 1, or a function of the gradient step,
            int32[], that returns one. The integer 1 makes no buffer, and emits what is in a window
            that a longer one left open.
        reduction: "mean" or "sum"; for leaves that are no gradients, such as the statistics of
            an fp8 layer, "max" or "last", which no weight multiplies. A prefix tree of these
            words, or a function of the path of a leaf, "layer/kernel", that returns one.
        accumulator_dtype: dtype of the sum for leaves of up to 32 bit; complex leaves take the
            complex dtype over it, 64-bit leaves keep their own. A prefix tree of dtypes, or a
            function of the path of a leaf that returns one, as for `reduction`.
        rounding: of sums in bfloat16: "stochastic" rounds up or down at random, so that their
            mean is right however long the window; alike in every run and on every replica.
        noise_scale_decay: at least 0 and below 1, such as 0.9: measures the gradient noise
            scale (McCandlish et al. 2018, arXiv 1812.06162) with this decay over windows, for the
            price of one norm a micro-batch; `metrics` report it. None does not.

    Returns:
        An Optax transformation with an `AccumulationState`. The inner optimizer sees gradients
        in the accumulator's dtype, or, if it refuses them, in their own; the updates have the
        dtypes it gives on plain gradients.

    Raises:
        ValueError: `every` is < 1, or `reduction` or `rounding` is another word.
        TypeError: `inner` is no transformation, or holds an accumulation; `every` is no integer;
            when traced, a leaf is not inexact or its shape is not the parameter's.

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
    if not callable(every):
        check_count("every", every, "Pass 1 to run the inner optimizer at every step.")
    REDUCTION.check_given(reduction)
    DTYPE.check_given(accumulator_dtype)
    check_choice("rounding", rounding, ("nearest", "stochastic"))
    if noise_scale_decay is not None:
        check_decays(noise_scale_decay=noise_scale_decay)
    # Static: a traced one must work with the state that a longer window has.
    is_one = isinstance(every, (int, np.integer)) and every == 1

    def length_of(gradient_step: Scalar) -> Scalar:
        """Micro-batches in the window that follows so many steps."""
        if not callable(every):
            return jnp.asarray(every).astype(jnp.int32)
        length, hint = every(gradient_step), "Return the micro-batches in the next window."
        check_number("every(gradient_step)", length, hint, low=1, closed=True)
        return jnp.maximum(jnp.asarray(length).astype(jnp.int32), 1)

    def init(params: Tree) -> AccumulationState:
        """An empty window."""
        inner_state = inner.init(without_reduced_axes(params))
        if find_states(inner_state, (AccumulationState, optax.MultiStepsState)):
            rule, hint = "without an accumulation in it", "Multiply the two lengths: `every=a * b`."
            raise type_error("inner", rule, "one that accumulates", hint)
        acc = () if is_one else accumulator_like(params_of(params), accumulator_dtype)
        counts = ("mini_step", "gradient_step", "micro_batch_count", "emitted")
        return AccumulationState(
            # Not weakly typed, as what comes out of a step is not: one trace for all steps.
            inner_opt_state=like_dtypes(inner_state, inner_state),
            acc_grads=acc,
            total_weight=jnp.zeros((), jnp.float32),
            accumulation_steps=length_of(jnp.zeros((), jnp.int32)),
            noise=() if noise_scale_decay is None else empty_noise(),
            **{name: jnp.zeros((), jnp.int32) for name in counts},
        )

    def open_window(
        judged: Judged, params: Tree, extra_args: dict[str, Any], is_measured: bool
    ) -> Window:
        """What a call does: it holds or leaves out a micro-batch, or closes the window."""
        updates, state, accepted = judged.grads, judged.state, judged.accepted
        # Without a buffer every call closes a window.
        keeps_sum = not is_one or bool(jax.tree.leaves(state.acc_grads))
        if keeps_sum:
            check_matches_accumulator(updates, state.acc_grads)
        elif params is not None:
            check_same_structure("updates", updates, "params", params_of(params))
        call, others = read_call(extra_args, accepted, always_emit=not keeps_sum)
        step, advanced = advance_window(state, length_of(state.gradient_step), call, accepted)
        reductions = REDUCTION.of_leaves(reduction, "updates", updates)
        if is_unreduced(updates):
            _check_unreduced(reductions, rounding, noise_scale_decay)
        key = None
        if rounding == "stochastic":
            key = jax.random.fold_in(jax.random.key(0), state.micro_batch_count)
        micro_batch = MicroBatch(updates, reductions, call.weight, key)
        closing = micro_batch
        if accepted is not True and (call.emit or call.flush is not False):
            # One that is left out may be NaN, and the window is emitted without it.
            weight = 1 if call.weight is None else call.weight
            closing = closing._replace(weight=jnp.where(accepted, jnp.float32(weight), 0))

        def add(acc: Tree, micro_batch: MicroBatch = micro_batch) -> Tree:
            return add_micro_batch(acc, micro_batch, step.starts)

        if noise_scale_decay is not None:
            total = add(state.acc_grads, closing) if keeps_sum else updates
            noise = observe_noise(advanced, micro_batch, step, total, noise_scale_decay)
            advanced = advanced._replace(noise=noise)

        def read(acc: Tree) -> tuple[Tree, Tree]:
            inner_state = state.inner_opt_state
            if not keeps_sum:
                return only_gradient(micro_batch, inner_state), acc
            total = add(acc, closing)
            window = window_gradient(total, micro_batch, advanced.total_weight, inner_state)
            # By a guard around this, or by what is inside: a clip, a record, another guard.
            measured = is_measured or bool(find_states(inner_state, tuple(METRICS)))
            return window, spent_accumulator(acc, window, is_measured=measured)

        def next_state(inner_state: Any, acc: Tree, emitted: Flag) -> AccumulationState:
            return advanced._replace(
                gradient_step=increment_where(advanced.gradient_step, emitted),
                emitted=jnp.where(emitted, 1, advanced.emitted),
                inner_opt_state=inner_state,
                acc_grads=run_if(step.holds, add, acc) if keeps_sum else (),
            )

        acc, inner_state = state.acc_grads, state.inner_opt_state
        return Window(step.emits, acc, read, inner_state, others, next_state)

    return gated(Accumulation(AccumulationState, open_window), inner, init)


def _check_unreduced(reductions: list[str], rounding: str, noise_scale_decay: Any) -> None:
    """Refuses what each device cannot do with a summand of the gradient alone."""
    for argument, value, is_given in (
        ("rounding", "'stochastic'", rounding == "stochastic"),
        ("reduction", "'max'", "max" in reductions),
        ("noise_scale_decay", noise_scale_decay, noise_scale_decay is not None),
    ):
        if is_given:
            rule = "left out where gradients are unreduced over a mesh axis"
            hint = "Sum them over devices first, or give `init` parameters without `reduced`."
            raise type_error(argument, rule, value, hint)
