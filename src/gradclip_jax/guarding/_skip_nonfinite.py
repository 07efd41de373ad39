"""A guard against what is not finite."""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import optax

from .._checks import check_choice
from .._devices import shared
from .._errors import public
from .._gate import ComputedStep, Verdict
from .._states import GATES, increment_where, register_metrics
from .._types import AxisName, Count, Scalar, Tree
from ._detect import all_finite, finite_extra_args, has_finite_squares, is_finite_step
from ._guard import check_guard, guard, zero


@register_metrics("skipped_nonfinite", "consecutive_skips", "guard_failed", gate="inner_state")
class SkipNonfiniteState(NamedTuple):
    """What `skip_nonfinite` counts; int32[], saturating.

    Attributes:
        skipped_nonfinite: steps that were skipped.
        consecutive_skips: steps that were skipped since the last one that was taken.
        guard_failed: 1 if `max_consecutive_skips` was ever reached, else 0.
        inner_state: the state of the inner optimizer.
        incidents: an `IncidentLog`, or None.
    """

    skipped_nonfinite: Scalar
    consecutive_skips: Scalar
    guard_failed: Scalar
    inner_state: Any
    incidents: Any = None


@public
def skip_nonfinite(
    inner: optax.GradientTransformation,
    *,
    check: Literal["gradient", "step"] = "gradient",
    max_consecutive_skips: int | None = None,
    incidents: Count | None = None,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    """Leaves out every step that is not finite: as if its batch had never been.

    A step is taken only if the gradient, its sum of squares, the loss and the weight (where they
    are given to `update` as `value`, or `loss`, and `weight`) are finite; with `check="step"` the
    update and the next inner state are looked at as well.

    | step | effect |
    | --- | --- |
    | a NaN or infinity in gradient, loss or weight | no update, state unchanged |
    | finite, but a norm above 1.8e19 in float32, an element above 255 in float16 | the same |
    | a NaN or infinity in the update; a new one in an array of the next state | taken by default |
    | the same with `check="step"` | no update, state unchanged |
    | an infinity in a scalar of the state, such as a clip threshold that is turned off | taken |
    | bad steps without end | all skipped; `guard_failed` says so; no NaN is ever let through |

    Around `accumulate_gradients` it leaves out a single micro-batch that is not finite, and drops
    a window whose gradient or step is not. Inside it drops windows only.

    `check="gradient"` is free where a clip by global norm follows, and costs one read of the
    gradient elsewhere. A gradient whose squares overflow is refused so that no second moment can
    become infinite: every optimizer of Optax makes a finite update of the others. Take
    `check="step"` where a schedule, a parameter or a transformation of your own can add a NaN. It
    refuses no finite gradient whose step is finite. It looks at the computed step: 11 N instead of
    8 N of memory traffic for AdamW on N parameters. A CPU computes it twice, and runs the host
    callbacks of the optimizer twice.

    Args:
        inner: any Optax transformation, except `optax.MultiSteps` with `check="step"`.
        check: what has to be finite, "gradient" or "step".
        max_consecutive_skips: after so many skips in a row `guard_failed` becomes True, and
            stays so, for the host to read when it likes; an integer >= 1, or None for never.
        incidents: how many of its last skips it keeps for `incidents`, 1 to 2^20, static; None
            for none.
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

    def first(inner_state: Any) -> SkipNonfiniteState:
        return SkipNonfiniteState(zero(), zero(), zero(), inner_state)

    limit = max_consecutive_skips
    options: dict[str, Any] = {"incidents": incidents, "max_consecutive_skips": limit}
    return finite_guard(inner, first, check, axis_name, **options)


def finite_guard(
    inner: optax.GradientTransformation,
    first: Callable[[Any], Any],
    check: Any,
    axis_name: Any,
    *,
    grads_of: Callable[[Tree, Any], Tree] = lambda updates, state: updates,
    adapted: Callable[[Any, Scalar], dict[str, Any]] = lambda state, refuses: {},
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """A guard that counts in `skipped_nonfinite` what is not finite, alike on all devices.

    `grads_of` makes the gradient that is judged and passed on, `adapted` the other fields;
    `options` are those of `guard`.
    """
    axes = check_guard(inner, axis_name)
    check_choice("check", check, ("gradient", "step"))
    is_finite = all_finite if check == "step" else has_finite_squares

    def judge(updates: Tree, state: Any, params: Tree, extra_args: dict[str, Any]) -> Verdict:
        grads = grads_of(updates, state)

        def own_fields(refuses: Scalar, measured: Scalar) -> Any:
            count = increment_where(state.skipped_nonfinite, refuses)
            return state._replace(skipped_nonfinite=count, **adapted(state, refuses))

        def check_step(step: ComputedStep) -> tuple[Scalar, Scalar]:
            return is_finite_step(step, axes), jnp.zeros((), jnp.float32)

        is_good = finite_extra_args(extra_args, axes)
        # The check of the step that is next reads the gradient as well.
        if check == "gradient" or type(state.inner_state) in GATES:
            is_good = shared(is_good & is_finite(grads, axes))
        return Verdict(is_good, grads, own_fields, check_step)

    if check == "step":
        options["checks_step"] = True
    else:
        options["check_window"] = functools.partial(has_finite_squares, axis_name=axes)
    return guard(inner, first, judge, axes, **options)
