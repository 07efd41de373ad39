"""Guard that skips steps with non-finite values."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import optax

from .._checks import check_choice
from .._errors import public
from .._mesh import check_bound
from .._states import GATES, find_states, increment_where, register_guard
from .._types import AxisName, Count, Scalar, Tree
from ..gates._gate import ExtraArgs, Verdict
from ._detect import all_finite, finite_extra_args, has_finite_squares, is_finite_step
from ._guard import Check, check_guard, guard, zero


@register_guard("skipped_nonfinite")
class SkipNonfiniteState(NamedTuple):
    """State of `skip_nonfinite`; counters are int32[] and saturate.

    Attributes:
        skipped_nonfinite: Number of skipped steps.
        consecutive_skips: Number of steps skipped since the last applied step.
        guard_failed: 1 if `consecutive_skips` ever reached `max_consecutive_skips`, else 0.
        inner_state: State of the inner optimizer.
    """

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
    | 50 consecutive skipped steps | the same; `guard_failed` is 1 from then on |

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
        axis_name: See `clip_by_global_norm`.

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

    def make_state(inner_state: Tree) -> SkipNonfiniteState:
        return SkipNonfiniteState(zero(), zero(), zero(), inner_state)

    return finite_guard(inner, make_state, check, axis_name, max_consecutive_skips)


def finite_guard(
    inner: optax.GradientTransformation,
    make_state: Callable[[Tree], Tree],
    check: Check,
    axis_name: AxisName,
    max_consecutive_skips: Count | None = None,
    *,
    unscale: Callable[[Tree, Tree], Tree] | None = None,
    adapt: Callable[[Tree, Tree, Scalar], Tree] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Build a guard that counts non-finite steps in `skipped_nonfinite`.

    `unscale` maps the incoming gradient to the gradient that is checked and passed to `inner`.
    `adapt` updates the other fields of the state from the gradient and whether the step is skipped.
    """
    axes = check_guard(inner, axis_name)
    check_choice("check", check, ("gradient", "step"))
    checks_step = check == "step"

    def judge(updates: Tree, state: Tree, params: Tree, extra_args: ExtraArgs) -> Verdict:
        check_bound(axes)
        grads = unscale(updates, state) if unscale else updates

        def next_state(refused: Scalar, failed: Scalar) -> Tree:
            skipped = refused | failed
            after = adapt(state, grads, skipped) if adapt else state
            count = increment_where(state.skipped_nonfinite, skipped)
            return after._replace(skipped_nonfinite=count)

        is_good = finite_extra_args(extra_args, axes)
        if not checks_step:
            is_good &= has_finite_squares(grads, axes)
            check_window = functools.partial(has_finite_squares, axis_name=axes)
            return Verdict(is_good, grads, next_state, check_window)
        # `check_step` also checks the gradient, but only after the guards and accumulations inside
        # have used it.
        if find_states(state.inner_state, tuple(GATES)):
            is_good &= all_finite(grads, axes)
        check_step = functools.partial(is_finite_step, axis_name=axes)
        return Verdict(is_good, grads, next_state, check_step=check_step)

    limit = max_consecutive_skips
    return guard(inner, make_state, judge, max_consecutive_skips=limit, checks_step=checks_step)
