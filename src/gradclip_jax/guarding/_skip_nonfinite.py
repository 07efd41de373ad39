"""A guard against what is not finite."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import optax

from .._checks import check_choice, renamed
from .._gate import ComputedStep
from .._states import increment_where, register_metrics
from .._types import AxisName, Scalar, Tree
from ._detect import all_finite, finite_extra_args, has_finite_squares, is_finite_step
from ._guard import check_guard, guard, zero


@register_metrics("skipped_nonfinite", "consecutive_skips", "guard_failed")
class SkipNonfiniteState(NamedTuple):
    """What `skip_nonfinite` counts; int32[], saturating, and bool[].

    Attributes:
        skipped_nonfinite: steps that were skipped.
        consecutive_skips: steps that were skipped since the last one that was taken.
        guard_failed: whether `max_consecutive_skips` was ever reached.
        inner_state: the state of the inner optimizer.
    """

    skipped_nonfinite: Scalar
    consecutive_skips: Scalar
    guard_failed: Scalar
    inner_state: Any


@renamed(max_consecutive_errors="`max_consecutive_skips`")
def skip_nonfinite(
    inner: optax.GradientTransformation,
    *,
    check: Literal["step", "gradient"] = "step",
    max_consecutive_skips: int | None = None,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    """Leaves out every step that is not finite: as if its batch had never been.

    A step is taken only if the gradient, the loss and the weight (where they are given to
    `update` as `value` and `weight`) are finite, and with `check="step"` also the update and the
    next inner state.

    | step | effect |
    | --- | --- |
    | a NaN or infinity in gradient, loss or weight | no update, state unchanged |
    | a NaN or infinity in the update; a new one in an array of the next state | the same |
    | a gradient of 1e20, which makes a second moment infinite | the same |
    | an infinity in a scalar of the state, such as a clip threshold that is turned off | taken |
    | bad steps without end | all skipped; `guard_failed` says so; no NaN is ever let through |

    Around `accumulate_gradients` it leaves out a single micro-batch that is not finite, and drops
    a window whose sum or step is not finite. Inside it drops windows only.

    `check="step"` computes update and state once more, only to look at them: 11 N instead of 8 N
    of memory traffic for AdamW on N parameters. `check="gradient"` is free where a clip by global
    norm follows, and costs one read of the gradient elsewhere. It refuses a gradient whose
    squares overflow (a norm above 1.8e19 in float32, an element above 255 in float16), so that
    no second moment can become infinite. Use it with optimizers that make a finite update of
    every such gradient, as Optax's do; not where a schedule or a parameter can add a NaN.

    Args:
        inner: any Optax transformation, except `optax.MultiSteps` with `check="step"`.
        check: what has to be finite, "step" or "gradient".
        max_consecutive_skips: after so many skips in a row `guard_failed` becomes True, and
            stays so, for the host to read when it likes; an integer >= 1, or None for never.
        axis_name: as for `clip_by_global_norm`.

    Returns:
        An Optax transformation with a `SkipNonfiniteState`. `apply_gradients` takes its steps
        without copying anything.

    Raises:
        TypeError: `inner` is no transformation, or holds `MultiSteps`; a leaf is not inexact.
        ValueError: `max_consecutive_skips` is < 1, or `check` another word.

    Examples:
        >>> import jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = gcx.skip_nonfinite(optax.adam(0.1))
        >>> params = jnp.array([1.0])
        >>> updates, state = tx.update(jnp.array([jnp.nan]), tx.init(params), params)
        >>> updates.tolist(), int(state.skipped_nonfinite)
        ([0.0], 1)
    """
    name = "skip_nonfinite"
    axes = check_guard(name, inner, axis_name)
    check_choice(name, "check", check, ("step", "gradient"))
    is_good_gradient = all_finite if check == "step" else has_finite_squares

    def first(inner_state: Any) -> SkipNonfiniteState:
        return SkipNonfiniteState(zero(), zero(), zero(bool), inner_state)

    def judge(
        updates: Tree, state: SkipNonfiniteState, params: Tree, extra_args: dict[str, Any]
    ) -> tuple[Scalar, Callable[[Scalar], SkipNonfiniteState]]:
        is_good = is_good_gradient(updates, axes) & finite_extra_args(extra_args, axes)

        def own_fields(skipped: Scalar) -> SkipNonfiniteState:
            count = increment_where(state.skipped_nonfinite, skipped)
            return state._replace(skipped_nonfinite=count)

        return is_good, own_fields

    def check_step(step: ComputedStep) -> Scalar:
        return is_finite_step(step, axes)

    def check_window(step: ComputedStep) -> Scalar:
        return has_finite_squares(step.grads, axes)

    return guard(
        name,
        inner,
        first,
        judge,
        check_step=check_step if check == "step" else None,
        check_window=check_step if check == "step" else check_window,
        max_consecutive_skips=max_consecutive_skips,
    )
