"""Guards: an optimizer that does not take the steps that would harm it."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._checks import (
    check_axis_name,
    check_count,
    check_inexact,
    check_ord,
    check_transformation,
    is_float0,
)
from .._run_if import Gate, gated, run_if
from .._states import increment_where, register_metrics
from .._types import TWO, AxisName, Count, Order, Scalar, Tree
from ..clipping._norm import measured_leaves, norm_of_leaves
from ..clipping._rule import apply_rules, as_rule, check_params, first_state
from ._detect import all_finite, check_if, guarded_extra_args, is_finite_step
from ._window import emptied, not_updated

_RELEARN_AFTER = np.int32(25)  # NumPy, so that `optax.inject_hyperparams` leaves it alone


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


@register_metrics(
    "grad_norm",
    "clip_threshold",
    "skipped_large_norm",
    "skipped_nonfinite",
    "consecutive_skips",
    "guard_failed",
)
class SkipLargeNormState(NamedTuple):
    """What `skip_large_norm` measures and counts; float32[], int32[] saturating, and bool[].

    Attributes:
        grad_norm: the norm of the last gradient.
        clip_threshold: the norm above which the last step was skipped.
        skipped_large_norm: steps that were skipped for their norm.
        skipped_nonfinite: steps that were skipped because their norm was NaN or infinite.
        consecutive_skips: steps that were skipped since the last one that was taken.
        large_streak: those of them that were skipped for their norm.
        guard_failed: whether `max_consecutive_skips` was ever reached.
        rules: the state of the threshold rule.
        inner_state: the state of the inner optimizer.
    """

    grad_norm: Scalar
    clip_threshold: Scalar
    skipped_large_norm: Scalar
    skipped_nonfinite: Scalar
    consecutive_skips: Scalar
    large_streak: Scalar
    guard_failed: Scalar
    rules: tuple[Any, ...]
    inner_state: Any


def skip_nonfinite(
    inner: optax.GradientTransformation,
    *,
    max_consecutive_skips: int | None = None,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    """Leaves out every step that is not finite: as if its batch had never been.

    A step is taken only if the gradient, the loss and the weight (where they are given to
    `update` as `value` and `weight`), the update and the next inner state are all finite. Update
    and state are computed twice for it, the first time only to be looked at: up to twice the time
    of Adam, and one byte of scratch for each parameter. A gradient that is not finite costs one
    look at it, and nothing else.

    | step | effect |
    | --- | --- |
    | a NaN or infinity in gradient, loss, weight, update, next state | no update, state unchanged |
    | float16 gradient that overflowed | the same |
    | gradient of 1e20 that makes a second moment infinite | the same |
    | bad steps without end | all skipped; `guard_failed` says so; no NaN is ever let through |

    Inside `accumulate_gradients` it drops a window, around it a single micro-batch. Gradients
    that are finite, but whose sum is not, or whose step, are noticed when their window closes: if
    it refuses two micro-batches in a row, and the second is finite, the window goes as well; at a
    flush it goes at once, if it cannot be closed without the micro-batch either.

    Args:
        inner: any Optax transformation.
        max_consecutive_skips: after so many skips in a row `guard_failed` is up, and stays up,
            for the host to read when it likes; an integer >= 1, or None for never.
        axis_name: as for `clip_by_global_norm`.

    Returns:
        An Optax transformation with a `SkipNonfiniteState`. `apply_gradients` takes its steps
        without copying anything.

    Raises:
        TypeError: `inner` is no transformation; when traced, a leaf is not inexact.
        ValueError: `max_consecutive_skips` is < 1.

    Examples:
        >>> import jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = gcx.skip_nonfinite(optax.adam(0.1))
        >>> params = jnp.array([1.0])
        >>> updates, state = tx.update(jnp.array([jnp.nan]), tx.init(params), params)
        >>> updates.tolist(), int(state.skipped_nonfinite)
        ([0.0], 1)
    """
    name = "skip_nonfinite"
    limit, axes = _checked(name, inner, max_consecutive_skips, axis_name)

    def init(params: Tree) -> SkipNonfiniteState:
        return SkipNonfiniteState(_zero(), _zero(), _zero(bool), inner.init(params))

    def gate(
        updates: Tree, state: SkipNonfiniteState, params: Tree, extra_args: dict[str, Any]
    ) -> Gate:
        check_inexact(name, "updates", updates)
        step = (inner, updates, state.inner_state, params, extra_args, axes)
        guarded = guarded_extra_args(extra_args)
        is_open = is_finite_step(*step) & all_finite(guarded, axes)
        streak = _streak(state.consecutive_skips, is_open)

        def is_lost() -> Scalar:
            # 1e25 is let into a window whose step is then refused, whatever closes it. So where
            # the guard refuses a finite micro-batch right after another skip, the window goes;
            # and at a flush, which the next one need not be, if it is no better without it.
            again = ~is_open & (state.consecutive_skips > 0)
            lost = again & check_if(again, lambda: all_finite((updates, guarded), axes))
            if "flush" not in extra_args:
                return lost
            closed = ~is_open & jnp.asarray(extra_args["flush"]).astype(bool)
            nothing = jax.tree.map(lambda x: x if is_float0(x) else jnp.zeros_like(x), updates)
            weightless = {**extra_args, "weight": jnp.float32(0)}
            without = (inner, nothing, state.inner_state, params, weightless, axes)
            return lost | (closed & ~check_if(closed, lambda: is_finite_step(*without)))

        def next_state(inner_state: Any, accumulator: Tree) -> SkipNonfiniteState:
            return SkipNonfiniteState(
                skipped_nonfinite=increment_where(state.skipped_nonfinite, ~is_open),
                consecutive_skips=streak,
                guard_failed=state.guard_failed | (streak >= limit),
                inner_state=emptied(not_updated(inner_state, is_open), is_lost),
            )

        return Gate(is_open, (), lambda _: (updates, ()), state.inner_state, extra_args, next_state)

    return gated(inner, init, gate)


def skip_large_norm(
    inner: optax.GradientTransformation,
    max_norm: Any,
    *,
    ord: Order = TWO,
    axis_name: AxisName = None,
    relearn_after: Count = _RELEARN_AFTER,
    max_consecutive_skips: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Leaves out every step whose gradient norm is above a threshold, or not finite.

    It cannot lock up: after `relearn_after` skips for the norm in a row the step is taken, and
    a rule that learns its level from history starts afresh from the norm at hand, unless it has
    come to a higher threshold by itself. A bound that the rule keeps for good, such as that of
    `capped` or the `warmup_max` of `ema` (pass inf here), holds as a fixed number does.

    | gradient norm | effect |
    | --- | --- |
    | <= threshold | the step is taken |
    | > threshold | zero updates, inner state untouched |
    | NaN or infinite, also during the warm-up of a rule | the same; history does not see it |
    | above the level of a rule for good | skipped `relearn_after` times, then the new level |
    | above a fixed number for good | always skipped; `guard_failed` says so |

    It looks at the norm alone; wrap it in `skip_nonfinite` to look at the update as well. Use
    `clip_by_global_norm` to scale large gradients down instead, `zero_large_norm` to step with
    a zero gradient.

    Args:
        inner: any Optax transformation.
        max_norm: a threshold in the unit of the gradients: a number > 0, a traced scalar, a
            schedule of the step count, or a rule from `gcx.thresholds`.
        ord: order of the norm, 1, 2, inf or any number > 0.
        axis_name: as for `clip_by_global_norm`.
        relearn_after: large norms in a row after which a rule starts afresh, an integer >= 1.
        max_consecutive_skips: as for `skip_nonfinite`.

    Returns:
        An Optax transformation with a `SkipLargeNormState`.

    Raises:
        ValueError: a number is out of range.
        TypeError: `inner` is no transformation, `max_norm` no threshold; a leaf is not inexact.

    Examples:
        >>> import jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = gcx.skip_large_norm(optax.sgd(1.0), max_norm=10.0)
        >>> params = jnp.array([1.0])
        >>> updates, state = tx.update(jnp.array([50.0]), tx.init(params), params)
        >>> updates.tolist(), int(state.skipped_large_norm)
        ([0.0], 1)
    """
    name = "skip_large_norm"
    limit, axes = _checked(name, inner, max_consecutive_skips, axis_name)
    hint = "It bounds how long a new level of the norm is mistaken for spikes."
    check_count(name, "relearn_after", relearn_after, hint)
    order, rule = check_ord(name, ord), as_rule(name, "max_norm", max_norm)

    # A number or a schedule has no level to learn anew, and keeps its count.
    learns = bool(jax.tree.leaves(first_state(rule))) and not rule.counts_steps

    def measure(tree: Tree) -> Scalar:
        return norm_of_leaves(measured_leaves(tree), order, axes)

    def init(params: Tree) -> SkipLargeNormState:
        return SkipLargeNormState(
            grad_norm=_zero(jnp.float32),
            clip_threshold=jnp.full((), jnp.inf, jnp.float32),
            skipped_large_norm=_zero(),
            skipped_nonfinite=_zero(),
            consecutive_skips=_zero(),
            large_streak=_zero(),
            guard_failed=_zero(bool),
            rules=(first_state(rule),),
            inner_state=inner.init(params),
        )

    def gate(
        updates: Tree, state: SkipLargeNormState, params: Tree, extra_args: dict[str, Any]
    ) -> Gate:
        check_inexact(name, "updates", updates)
        norm = measure(updates)
        if rule.uses_params:
            check_params(name, updates, params)
        param_norms = [measure(params)] if rule.uses_params else None
        (threshold,), rules = apply_rules([rule], [norm], state.rules, param_norms)
        finite, within = jnp.isfinite(norm), norm <= threshold
        relearns = finite & ~within & (state.large_streak >= relearn_after) & learns

        def relearn(rules: tuple[Any, ...]) -> tuple[Any, ...]:
            # Not below what the rule has climbed to: a start of 1 never gets to a level of 1e4.
            _, afresh = apply_rules([rule], [norm], (first_state(rule),), param_norms)
            (low,), _ = apply_rules([rule], [norm], rules, param_norms)
            (high,), _ = apply_rules([rule], [norm], afresh, param_norms)
            return jax.tree.map(functools.partial(jnp.where, high > low), afresh, rules)

        rules = run_if(relearns, relearn, rules) if learns else rules
        is_open = finite & (within | relearns)
        streak = _streak(state.consecutive_skips, is_open)
        is_large = finite & ~is_open

        def next_state(inner_state: Any, accumulator: Tree) -> SkipLargeNormState:
            return SkipLargeNormState(
                grad_norm=norm.astype(jnp.float32),
                clip_threshold=threshold.astype(jnp.float32),
                skipped_large_norm=increment_where(state.skipped_large_norm, is_large),
                skipped_nonfinite=increment_where(state.skipped_nonfinite, ~finite),
                consecutive_skips=streak,
                large_streak=jnp.where(is_open, 0, increment_where(state.large_streak, is_large)),
                guard_failed=state.guard_failed | (streak >= limit),
                rules=rules,
                inner_state=not_updated(inner_state, is_open),
            )

        return Gate(is_open, (), lambda _: (updates, ()), state.inner_state, extra_args, next_state)

    return gated(inner, init, gate)


def _checked(
    function: str, inner: Any, max_consecutive_skips: Any, axis_name: Any
) -> tuple[Any, AxisName]:
    """The limit of skips in a row, the largest integer for none, and the axes."""
    check_transformation(function, "inner", inner)
    if max_consecutive_skips is None:
        return jnp.iinfo(jnp.int32).max, check_axis_name(function, axis_name)
    hint = "Pass None for no limit."
    check_count(function, "max_consecutive_skips", max_consecutive_skips, hint)
    return max_consecutive_skips, check_axis_name(function, axis_name)


def _streak(count: Scalar, is_open: Scalar) -> Scalar:
    return jnp.where(is_open, 0, increment_where(count))


def _zero(dtype: Any = jnp.int32) -> Scalar:
    # A call for each field: a buffer that two fields share cannot be donated.
    return jnp.zeros((), dtype)
