"""Guards against spikes of the gradient norm and of the loss."""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from .._checks import check_bound, check_count, check_ord, error_message
from .._gate import Verdict
from .._states import increment_where, register_metrics
from .._types import UNBOUNDED, AxisName, Count, Order, Scalar, Tree
from ..clipping._norm import measured_leaves, norm_of_leaves
from ..clipping._threshold import Rule, as_rule, check_params, first_state
from ._guard import check_guard, guard, loss_of, zero
from ._signal import Signal, compare, loss_rule, mean_loss, relearn


@register_metrics(
    "grad_norm",
    "skip_threshold",
    "skipped_large_norm",
    "loss",
    "loss_threshold",
    "skipped_large_loss",
    "skipped_nonfinite",
    "consecutive_skips",
    "guard_failed",
    gate="inner_state",
)
class SkipSpikesState(NamedTuple):
    """What `skip_spikes` measures and counts; float32[], and int32[] saturating.

    Attributes:
        grad_norm: the norm of the last gradient.
        skip_threshold: the norm above which the last step was skipped; the largest float32 is none.
        skipped_large_norm: steps that were skipped for their norm.
        loss: the last loss; this and the next two are None where the loss is not watched.
        loss_threshold: the loss above which the last step was skipped.
        skipped_large_loss: steps that were skipped for their loss; one can count in both.
        skipped_nonfinite: steps that were skipped because norm or loss were not finite.
        consecutive_skips: steps that were skipped since the last one that was taken.
        guard_failed: 1 if `max_consecutive_skips` was ever reached, else 0.
        spikes_in_a_row: steps that were skipped for their norm or loss since one was taken.
        signals: for "norm" and "loss", the state of the rule.
        inner_state: the state of the inner optimizer.
    """

    grad_norm: Scalar
    skip_threshold: Scalar
    skipped_large_norm: Scalar
    loss: Any
    loss_threshold: Any
    skipped_large_loss: Any
    skipped_nonfinite: Scalar
    consecutive_skips: Scalar
    guard_failed: Scalar
    spikes_in_a_row: Scalar
    signals: dict[str, Any]
    inner_state: Any


def skip_large_norm(
    inner: optax.GradientTransformation,
    max_norm: Any,
    *,
    ord: Order = 2.0,
    axis_name: AxisName = None,
    relearn_after: Count = 25,
    max_consecutive_skips: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Leaves out every step whose gradient norm is above a threshold, or not finite.

    `skip_spikes` with a threshold for the norm alone, and with its guarantees.

    | gradient norm | effect |
    | --- | --- |
    | <= threshold | the step is taken |
    | > threshold | zero updates, inner state untouched |
    | NaN or infinite, also during the warm-up of a rule | the same; history does not see it |
    | above the level of a rule for good | skipped `relearn_after` times, then the new level |
    | above a fixed number for good | always skipped; `guard_failed` says so |

    It measures the gradient alone; wrap it in `skip_nonfinite` to check the update as well. Use
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
        An Optax transformation with a `SkipSpikesState`.

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
    rules = {"norm": as_rule(name, "max_norm", max_norm)}
    return _skip_beyond(name, inner, rules, ord, axis_name, relearn_after, max_consecutive_skips)


def skip_spikes(
    inner: optax.GradientTransformation,
    *,
    norm: Any = None,
    loss: Any = None,
    ord: Order = 2.0,
    axis_name: AxisName = None,
    relearn_after: Count = 25,
    max_consecutive_skips: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Leaves out every step whose gradient norm or whose loss is above its own threshold.

    A step is taken if norm and loss are finite and neither is above its threshold. The loss is
    the extra argument `value`, or `loss`, of `update`. `metrics` tell which of the two it was.

    It cannot lock up: after `relearn_after` steps in a row that were skipped for their norm or
    their loss, every rule that learns from history starts afresh from the value at hand, unless
    it has come to a higher threshold by itself. A bound that the rule keeps for good, such as that
    of `capped` or the `warmup_max` of `ema` (pass inf here), holds as a fixed number does.

    | step | effect |
    | --- | --- |
    | norm and loss at most their thresholds | taken |
    | one of them above | zero updates, inner state untouched |
    | NaN or infinite norm or loss | the same, and neither history sees the step |
    | above the level of a rule for good | skipped `relearn_after` times, then the new level |
    | above a fixed number for good | always skipped; `guard_failed` says so |
    | the loss differs from device to device | their mean decides, on all of them alike |

    Args:
        inner: any Optax transformation.
        norm: a threshold for the gradient norm, as `max_norm` of `skip_large_norm`; None for
            none.
        loss: a threshold for the loss, in its unit: a number, also a negative one, a schedule, or
            a rule. A loss may be negative, so take a rule of spread, `thresholds.mean_std` or
            `thresholds.zscore`; a multiple of the level, as in `ema`, has no meaning there.
        ord: order of the norm, 1, 2, inf or any number > 0.
        axis_name: as for `clip_by_global_norm`.
        relearn_after: skipped steps in a row after which the rules start afresh, an integer >= 1.
        max_consecutive_skips: as for `skip_nonfinite`.

    Returns:
        An Optax transformation with a `SkipSpikesState`; `update` needs `value` if the loss is
        watched.

    Raises:
        ValueError: a number is out of range, neither threshold is given, or `value` is missing.
        TypeError: `inner` is no transformation; a leaf is not inexact; `value` is no scalar.

    Examples:
        >>> import jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = gcx.skip_spikes(optax.sgd(1.0), norm=10.0, loss=4.0)
        >>> params = jnp.array([1.0])
        >>> updates, state = tx.update(jnp.array([3.0]), tx.init(params), params, value=50.0)
        >>> updates.tolist(), int(state.skipped_large_loss), int(state.skipped_large_norm)
        ([0.0], 1, 0)

    References:
        The rule of OLMo-core's `SkipStepOptimizer`, levanter's `skipstep` and MaxText's
        `skip_step_on_spikes` is `mean_std` for both.
    """
    name = "skip_spikes"
    rules: dict[str, Rule] = {}
    if norm is not None:
        rules["norm"] = as_rule(name, "norm", norm)
    if loss is not None:
        rules["loss"] = loss_rule(name, loss)
    if not rules:
        hint = "Pass for example `loss=gcx.thresholds.mean_std()`."
        raise ValueError(error_message(name, "norm", "given, or `loss`", "None for both", hint))
    return _skip_beyond(name, inner, rules, ord, axis_name, relearn_after, max_consecutive_skips)


def _skip_beyond(
    name: str,
    inner: optax.GradientTransformation,
    rules: dict[str, Rule],
    ord: Any,
    axis_name: Any,
    relearn_after: Any,
    max_consecutive_skips: Any,
) -> optax.GradientTransformationExtraArgs:
    axes = check_guard(name, inner, axis_name)
    order = check_ord(name, ord)
    hint = "It bounds how long a new level is mistaken for spikes."
    check_count(name, "relearn_after", relearn_after, hint)

    def measure(tree: Tree) -> Scalar:
        return norm_of_leaves(measured_leaves(tree), order, axes)

    def judge(
        updates: Tree, state: SkipSpikesState, params: Tree, extra_args: dict[str, Any]
    ) -> Verdict:
        check_bound(name, axes)
        values = {"norm": measure(updates)}
        if "loss" in rules:
            values["loss"] = mean_loss(name, loss_of(name, extra_args), axes)
        param_norm = None
        if any(rule.uses_params for rule in rules.values()):
            check_params(name, updates, params)
            param_norm = measure(params)
        finite = functools.reduce(jnp.logical_and, map(jnp.isfinite, values.values()))

        def signal(key: str) -> Signal:
            value = jnp.where(finite, values[key], jnp.nan)
            compared = compare(rules[key], value, state.signals[key], param_norm)
            return compared._replace(is_spike=finite & compared.is_spike)

        is_due = state.spikes_in_a_row >= relearn_after
        signals = relearn({key: signal(key) for key in rules}, is_due)
        is_good = functools.reduce(jnp.logical_and, (~x.is_spike for x in signals.values()), finite)
        own_fields = functools.partial(_own_fields, state, values, signals, finite)
        return Verdict(is_good, updates, own_fields)

    first = functools.partial(_first_state, rules)
    return guard(name, inner, first, judge, max_consecutive_skips=max_consecutive_skips)


def _first_state(rules: dict[str, Rule], inner_state: Any) -> SkipSpikesState:
    has_loss = "loss" in rules
    return SkipSpikesState(
        grad_norm=zero(jnp.float32),
        skip_threshold=jnp.full((), UNBOUNDED, jnp.float32),
        skipped_large_norm=zero(),
        loss=zero(jnp.float32) if has_loss else None,
        loss_threshold=jnp.full((), UNBOUNDED, jnp.float32) if has_loss else None,
        skipped_large_loss=zero() if has_loss else None,
        skipped_nonfinite=zero(),
        consecutive_skips=zero(),
        guard_failed=zero(),
        spikes_in_a_row=zero(),
        signals={key: first_state(rule) for key, rule in rules.items()},
        inner_state=inner_state,
    )


def _own_fields(
    state: SkipSpikesState,
    values: dict[str, Scalar],
    signals: dict[str, Signal],
    finite: Scalar,
    refuses: Scalar,
) -> SkipSpikesState:
    """What was measured at this step, and what was counted up to it."""
    fields: dict[str, Any] = {"grad_norm": values["norm"].astype(jnp.float32)}
    for key, signal in signals.items():
        measured, threshold, count = _FIELDS[key]
        fields[measured] = values[key].astype(jnp.float32)
        fields[threshold] = signal.threshold.astype(jnp.float32)
        fields[count] = increment_where(getattr(state, count), signal.is_spike)
    # A step that is not finite says nothing about the level.
    longer = increment_where(state.spikes_in_a_row, finite)
    return state._replace(
        skipped_nonfinite=increment_where(state.skipped_nonfinite, ~finite),
        spikes_in_a_row=jnp.where(refuses, longer, 0),
        signals={key: signal.rule_state for key, signal in signals.items()},
        **fields,
    )


_FIELDS = {
    "norm": ("grad_norm", "skip_threshold", "skipped_large_norm"),
    "loss": ("loss", "loss_threshold", "skipped_large_loss"),
}
