"""The guard against non-finite values."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import optax

from .._checks import check_bound, check_choice
from .._errors import public
from .._states import GATES, increment_where, register_guard
from .._types import AxisName, Count, Scalar, Tree
from ..gates._gate import ComputedStep, Verdict
from ._detect import all_finite, finite_extra_args, has_finite_squares, is_finite_step
from ._guard import Check, check_guard, guard, zero


@register_guard("skipped_nonfinite", "consecutive_skips", "guard_failed")
class SkipNonfiniteState(NamedTuple):
    """The counters of `skip_nonfinite`; int32[], saturating.

    Attributes:
        skipped_nonfinite: number of skipped steps.
        consecutive_skips: number of steps skipped since the last one that was applied.
        guard_failed: 1 if `consecutive_skips` ever reached `max_consecutive_skips`, else 0.
        inner_state: the state of the inner optimizer.
    """

    skipped_nonfinite: Scalar
    consecutive_skips: Scalar
    guard_failed: Scalar
    inner_state: Any


@public
def skip_nonfinite(
    inner: optax.GradientTransformation,
    *,
    check: Check = "gradient",
    max_consecutive_skips: Count | None = 50,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    """Skip steps with non-finite gradients; parameters and state stay unchanged.

    A step is applied only if the gradient, its sum of squares, the loss and the weight (if `update`
    gets them as `value` or `loss`, and `weight`) are finite. With `check="step"` the update and
    the next inner state have to be finite as well.

    | step | effect |
    | --- | --- |
    | a NaN or infinity in gradient, loss or weight | zero update, state unchanged |
    | finite, but a norm above 1.8e19 in float32, an element above 255 in float16 | the same |
    | a NaN or infinity in the update; a new one in an array of the state | applied by default |
    | the same with `check="step"` | zero update, state unchanged |
    | an infinity in a scalar of the state, such as a clip threshold that is turned off | applied |
    | 50 skipped steps in a row | the same; `guard_failed` is 1 from then on |

    Around `accumulate_gradients` it skips single non-finite micro-batches, and drops a window
    whose gradient or step is non-finite. Inside it only drops windows.

    `check="gradient"` is free if a clip by global norm follows, and costs one read of the
    gradient otherwise. Gradients whose squares overflow are skipped because they would make a
    second moment infinite; every optimizer of Optax returns a finite update for all others. Use
    `check="step"` if a schedule, a parameter or a transformation of your own can produce a NaN. It
    never skips a finite gradient with a finite step. It computes every step, checks it and selects
    the result: 11 N bytes instead of 8 N of memory traffic for AdamW on N bytes of parameters on
    an accelerator; on CPU the selection also copies the state.

    Args:
        inner: any Optax transformation, except `optax.MultiSteps` with `check="step"`.
        check: what has to be finite, "gradient" or "step".
        max_consecutive_skips: number of skips in a row after which `guard_failed` becomes 1 and
            stays 1, an integer >= 1; None for no limit. The guard only sets the flag: check it
            in the training loop, `if gcx.metrics(state)["guard_failed"]: ...`.
        axis_name: as for `clip_by_global_norm`.

    Returns:
        An Optax transformation with a `SkipNonfiniteState`. With `apply_gradients` and donated
        arguments nothing is copied.

    Raises:
        TypeError: `inner` is not a gradient transformation, or contains `MultiSteps`; a leaf is
            not inexact.
        ValueError: `max_consecutive_skips` is < 1, or `check` is unknown.

    Examples:
        >>> import jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = gcx.skip_nonfinite(optax.adam(0.1))
        >>> params = jnp.array([1.0])
        >>> updates, state = tx.update(jnp.array([jnp.nan]), tx.init(params), params)
        >>> updates.tolist(), int(state.skipped_nonfinite)
        ([0.0], 1)
    """

    def make_state(inner_state: Any) -> SkipNonfiniteState:
        return SkipNonfiniteState(zero(), zero(), zero(), inner_state)

    limit = max_consecutive_skips
    return finite_guard(inner, make_state, check, axis_name, max_consecutive_skips=limit)


def finite_guard(
    inner: optax.GradientTransformation,
    make_state: Callable[[Any], Any],
    check: Check,
    axis_name: AxisName,
    *,
    unscale: Callable[[Tree, Any], Tree] | None = None,
    adapt: Callable[[Any, Tree, Scalar], Any] | None = None,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """A guard that counts non-finite steps in `skipped_nonfinite`.

    `unscale` maps the gradient to the one that is checked and passed on; `adapt` updates the other
    fields of the state, given the gradient and whether the step is skipped. `options` are fields
    of `Guard`.
    """
    axes = check_guard(inner, axis_name)
    check_choice("check", check, ("gradient", "step"))
    is_finite = all_finite if check == "step" else has_finite_squares

    def judge(updates: Tree, state: Any, params: Tree, extra_args: dict[str, Any]) -> Verdict:
        check_bound(axes)
        grads = unscale(updates, state) if unscale else updates

        def next_state(refused: Scalar, failed: Scalar, measured: Tree) -> Any:
            skipped = refused | failed
            after = adapt(state, grads, skipped) if adapt else state
            count = increment_where(state.skipped_nonfinite, skipped)
            return after._replace(skipped_nonfinite=count)

        def check_step(step: ComputedStep) -> tuple[Scalar, Tree]:
            return is_finite_step(step, axes), ()

        is_good = finite_extra_args(extra_args, axes)
        # The check of the step reads the gradient as well, unless an accumulation is in between.
        if check == "gradient" or type(state.inner_state) in GATES:
            is_good = is_good & is_finite(grads, axes)
        return Verdict(is_good, grads, next_state, check_step)

    if check == "step":
        options["checks_step"] = True
    else:
        options["check_window"] = functools.partial(has_finite_squares, axis_name=axes)
    return guard(inner, make_state, judge, **options)
