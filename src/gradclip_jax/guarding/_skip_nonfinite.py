"""Guard that skips steps with non-finite values."""

from __future__ import annotations

import functools
from typing import NamedTuple

import optax

from .._checks import check_choice
from .._errors import public
from .._mask import Mask
from .._states import increment_where, register_guard
from .._types import AxisName, Count, Scalar, Tree
from ..gates._gate import Gradient, Guard
from ._detect import all_finite, finite_extra_args, has_finite_squares, is_finite_step
from ._guard import Check, check_guard, guarded


@register_guard("skipped_nonfinite")
class SkipNonfiniteState(NamedTuple):
    """State of `skip_nonfinite`; counters are int32[] and saturate.

    Attributes:
        grad_norm: Norm of the last gradient, float32[].
        skipped_nonfinite: Number of steps that this guard skipped.
        consecutive_skips: Number of steps without an applied update since the last one.
        guard_failed: 1 if `consecutive_skips` ever reached `max_consecutive_skips`, else 0.
        inner_state: State of the inner optimizer.
    """

    grad_norm: Scalar
    skipped_nonfinite: Scalar
    consecutive_skips: Scalar
    guard_failed: Scalar
    inner_state: Tree


@public
def skip_nonfinite(
    inner: optax.GradientTransformation,
    *,
    check: Check = "gradient",
    max_consecutive_skips: Count | None = 50,
    axis_name: AxisName = None,
    mask: Mask = None,
) -> optax.GradientTransformationExtraArgs:
    """Skip steps with non-finite gradients; parameters and state stay unchanged.

    A step is applied only if the gradient and its sum of squares are finite, and also the loss and
    the weight if `update` receives them as `value` or `loss`, and `weight`. With `check="step"`,
    the update and the next inner state must be finite as well.

    | step | result |
    | --- | --- |
    | a NaN or infinity in gradient, loss or weight | zero update, state unchanged |
    | a norm above 1.8e19 in float32, or an element above 255 in float16 | the same |
    | a NaN or infinity in the update, or a new one in a state array | applied by default |
    | the same with `check="step"` | zero update, state unchanged |
    | an infinity in a scalar of the state, such as an infinite clip threshold | applied |
    | an array as loss | all elements must be finite; a warning |
    | a micro-batch of weight 0 of an accumulation inside this guard | not checked |
    | `weight` without an accumulation | passed to `inner`; `apply_gradients` warns |
    | 50 consecutive steps without an applied update | `guard_failed` is 1 from then on |

    A guard around `accumulate_gradients` skips single non-finite micro-batches, and drops an
    accumulation window if its gradient or step is non-finite. A guard inside `accumulate_gradients`
    only drops whole accumulation windows.

    `check="gradient"` has no cost if a clip by global norm follows, and otherwise costs one read of
    the gradient. Gradients whose squares overflow are skipped because they would make a second
    moment infinite; for all other gradients, the optimizers of Optax return finite updates. Use
    `check="step"` if a schedule, a parameter or a custom transformation can produce a NaN. This
    mode applies steps with large gradients if the computed step is finite. It computes and checks
    every step, then selects the old or the new state. On an accelerator, this increases the memory
    traffic of AdamW from 8 N to 11 N bytes for N bytes of parameters; on CPU, the selection also
    copies the state.

    Args:
        inner: Gradient transformation. With `check="step"` it must not contain `optax.MultiSteps`.
        check: "gradient" to check only the gradient, or "step" to check the computed step as well.
        max_consecutive_skips: Number of consecutive skips after which `guard_failed` is set to 1
            permanently; an integer >= 1, or None for no limit. The guard only sets this flag. Check
            it in the training loop with `if gcx.metrics(state)["guard_failed"]: ...`.
        axis_name: See `clip_by_global_norm`; `()` raises, because devices would decide differently.
        mask: Leaves to check, as a prefix tree of bools or a function from the parameters to one,
            for models with frozen parameters. Other leaves are not checked and reach `inner` as
            zeros, so that a NaN cannot come in through a clip. None checks all leaves.

    Returns:
        A gradient transformation with a `SkipNonfiniteState`. With `apply_gradients` and donated
        arguments, no buffers are copied.

    Raises:
        TypeError: If `inner` is not a gradient transformation or contains `MultiSteps`, or if a
            leaf is not floating-point or complex.
        ValueError: If `max_consecutive_skips` is less than 1, or if `check` is unknown.

    Examples:
        >>> import jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = gcx.skip_nonfinite(optax.adam(0.1))
        >>> params = jnp.array([1.0])
        >>> updates, state = tx.update(jnp.array([jnp.nan]), tx.init(params), params)
        >>> updates.tolist(), int(state.skipped_nonfinite)
        ([0.0], 1)
    """
    axes = check_guard(inner, axis_name)
    guard = finite_guard("skip_nonfinite", SkipNonfiniteState, check, mask, axes)
    return guarded(inner, guard._replace(max_consecutive_skips=max_consecutive_skips))


def finite_guard(function: str, kind: type, check: Check, mask: Mask, axes: AxisName) -> Guard:
    """Return a guard that counts non-finite steps in `skipped_nonfinite`."""
    check_choice("check", check, ("gradient", "step"))

    def check_gradient(gradient: Gradient, state: Tree) -> tuple[Scalar, Tree]:
        passed = finite_extra_args(gradient.extra_args, axes)
        if check == "step":
            return passed & all_finite(gradient.tree, axes), ()
        return passed & has_finite_squares(gradient.tree, gradient.norm, axes), ()

    def advance(state: Tree, observed: Tree, skipped: Scalar) -> Tree:
        count = increment_where(state.skipped_nonfinite, skipped)
        return state._replace(skipped_nonfinite=count)

    guard = Guard(function, kind, check_gradient, advance, mask=mask, axis_name=axes)
    if check == "step":
        check_step = functools.partial(is_finite_step, mask=mask, axis_name=axes)
        return guard._replace(check_step=check_step)
    return guard._replace(checks_window=True)
