"""Guards against spikes of the gradient norm, of the loss and of the update."""

import functools
import itertools
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from .._checks import check_count, check_ord
from .._errors import public, value_error
from .._gate import ComputedStep, Verdict
from .._leaves import measured_leaves
from .._states import increment_where, register_metrics
from .._types import UNBOUNDED, AxisName, Count, Order, Scalar, Tree
from ..clipping._norm import norm_of_leaves
from ..clipping._threshold import Rule, as_rule, check_params, init_state
from ._guard import check_guard, guard, zero
from ._signal import Signal, compare, loss_of, loss_rule, relearn

_FIELDS = {
    "norm": ("grad_norm", "skip_threshold", "skipped_large_norm"),
    "loss": ("loss", "loss_threshold", "skipped_large_loss"),
    "update": ("update_norm", "update_threshold", "skipped_large_update"),
}


@register_metrics(
    *itertools.chain(*_FIELDS.values()),
    *("skipped_nonfinite", "consecutive_skips", "guard_failed"),
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
        update_norm: the norm of the last update that was computed; this and the next two are None
            where the update is not watched.
        update_threshold: the norm of an update above which the last step was skipped.
        skipped_large_update: steps that were skipped for their update.
        skipped_nonfinite: steps that were skipped because norm, loss or update was not finite.
        consecutive_skips: steps that were skipped since the last one that was taken.
        guard_failed: 1 if `max_consecutive_skips` was ever reached, else 0.
        spikes_in_a_row: steps that were skipped for a spike since one was taken.
        signals: for "norm", "loss" and "update", the state of the rule.
        inner_state: the state of the inner optimizer.
        incidents: an `IncidentLog`, or None.
    """

    grad_norm: Scalar
    skip_threshold: Scalar
    skipped_large_norm: Scalar
    loss: Any
    loss_threshold: Any
    skipped_large_loss: Any
    update_norm: Any
    update_threshold: Any
    skipped_large_update: Any
    skipped_nonfinite: Scalar
    consecutive_skips: Scalar
    guard_failed: Scalar
    spikes_in_a_row: Scalar
    signals: dict[str, Any]
    inner_state: Any
    incidents: Any = None


@public
def skip_large_norm(
    inner: optax.GradientTransformation,
    max_norm: Any,
    *,
    ord: Order = 2.0,
    axis_name: AxisName = None,
    relearn_after: Count = 25,
    max_consecutive_skips: int | None = None,
    incidents: Count | None = None,
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
        incidents: as for `skip_nonfinite`.

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
    rules = {"norm": as_rule("max_norm", max_norm)}
    options = {"max_consecutive_skips": max_consecutive_skips, "incidents": incidents}
    return _skip_beyond(inner, rules, ord, axis_name, relearn_after, **options)


@public
def skip_spikes(
    inner: optax.GradientTransformation,
    *,
    norm: Any = None,
    loss: Any = None,
    update: Any = None,
    ord: Order = 2.0,
    axis_name: AxisName = None,
    relearn_after: Count = 25,
    max_consecutive_skips: int | None = None,
    incidents: Count | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Leaves out every step whose gradient norm, loss or update is above its own threshold.

    A step is taken if all that is watched is finite and at most its threshold. The loss is the
    extra argument `value`, or `loss`, of `update`. The update is that of `inner`: its norm may rise
    before the loss does. `metrics` tell which of them it was.

    It cannot lock up: after `relearn_after` steps in a row that were skipped for a spike, every
    rule that learns from history starts afresh from the value at hand, unless it has come to a
    higher threshold by itself. A bound that the rule keeps for good, such as that of `capped` or
    the `warmup_max` of `ema` (pass inf here), holds as a fixed number does.

    | step | effect |
    | --- | --- |
    | all at most their thresholds | taken |
    | one of them above | zero updates, inner state untouched |
    | NaN or infinite norm or loss | the same, and no history sees the step |
    | norm or loss above | the same; the update is not computed, `update_norm` is NaN |
    | update above, or not finite | the same, at the cost of `skip_nonfinite(check="step")` |
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
        update: a threshold for the norm of the update, in the unit of the parameters, as `norm`;
            `relative_to_params` bounds the ratio of update to parameter.
        ord: order of the norm, 1, 2, inf or any number > 0.
        axis_name: as for `clip_by_global_norm`.
        relearn_after: skipped steps in a row after which the rules start afresh, an integer >= 1.
        max_consecutive_skips: as for `skip_nonfinite`.
        incidents: as for `skip_nonfinite`.

    Returns:
        An Optax transformation with a `SkipSpikesState`; `update` needs `value` if the loss is
        watched.

    Raises:
        ValueError: a number is out of range, no threshold is given, or `value` is missing.
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
    norms = {"norm": norm, "update": update}
    rules = {key: as_rule(key, x) for key, x in norms.items() if x is not None}
    if loss is not None:
        rules["loss"] = loss_rule(loss)
    if not rules:
        hint = "Pass for example `loss=gcx.thresholds.mean_std()`."
        rule = "given, or `loss` or `update`"
        raise value_error("norm", rule, "None for all", hint)
    options = {"max_consecutive_skips": max_consecutive_skips, "incidents": incidents}
    return _skip_beyond(inner, rules, ord, axis_name, relearn_after, **options)


def _skip_beyond(
    inner: optax.GradientTransformation,
    rules: dict[str, Rule],
    ord: Any,
    axis_name: Any,
    relearn_after: Any,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    axes = check_guard(inner, axis_name)
    order = check_ord(ord)
    hint = "It bounds how long a new level is mistaken for spikes."
    check_count("relearn_after", relearn_after, hint)

    def measure(tree: Tree) -> Scalar:
        return norm_of_leaves(measured_leaves(tree), order, axes)

    def judge(
        updates: Tree, state: SkipSpikesState, params: Tree, extra_args: dict[str, Any]
    ) -> Verdict:
        values = {"norm": measure(updates)}
        if "loss" in rules:
            loss = loss_of(extra_args, axes)
            if loss is None:
                hint = "Pass the loss: `update(grads, state, params, value=loss)`."
                rule = "given to watch the loss"
                raise value_error("value", rule, "None", hint)
            values["loss"] = loss
        param_norm = None
        if any(rule.uses_params for rule in rules.values()):
            check_params(updates, params)
            param_norm = measure(params)
        finite = functools.reduce(jnp.logical_and, map(jnp.isfinite, values.values()))

        def signals_of(
            values: dict[str, Scalar], finite: Scalar
        ) -> tuple[Scalar, Scalar, dict[str, Signal]]:
            signals: dict[str, Signal] = {}
            for key in rules:  # not a set of keys: its order is another in each process
                if key in values:
                    value = jnp.where(finite, values[key], jnp.nan)
                    signals[key] = compare(rules[key], value, state.signals[key], param_norm)
            return relearn(finite, signals, state.spikes_in_a_row >= relearn_after)

        is_good, finite, signals = signals_of(values, finite)

        def check_step(step: ComputedStep) -> tuple[Scalar, Scalar]:
            norm = measure(step.updates)
            is_usual, _, _ = signals_of({"update": norm}, jnp.isfinite(norm))
            return is_usual, norm.astype(jnp.float32)

        def own_fields(refuses: Scalar, measured: Scalar) -> SkipSpikesState:
            observed, learned, is_sound = values | {"update": measured}, signals, finite
            if "update" in rules:
                _, is_finite, of_update = signals_of({"update": measured}, jnp.isfinite(measured))
                learned = signals | of_update
                is_sound = finite & ~(refuses & is_good & ~is_finite)
            fields: dict[str, Any] = {"grad_norm": values["norm"].astype(jnp.float32)}
            for key, signal in learned.items():
                measurement, threshold, count = _FIELDS[key]
                fields[measurement] = observed[key].astype(jnp.float32)
                fields[threshold] = signal.threshold.astype(jnp.float32)
                fields[count] = increment_where(getattr(state, count), signal.is_spike)
            # A step that is not finite says nothing about the level.
            longer = increment_where(state.spikes_in_a_row, is_sound)
            return state._replace(
                skipped_nonfinite=increment_where(state.skipped_nonfinite, ~is_sound),
                spikes_in_a_row=jnp.where(refuses, longer, 0),
                signals={key: signal.rule_state for key, signal in learned.items()},
                **fields,
            )

        return Verdict(is_good, updates, own_fields, check_step)

    first = functools.partial(_first_state, rules)
    return guard(inner, first, judge, axes, checks_step="update" in rules, **options)


def _first_state(rules: dict[str, Rule], inner_state: Any) -> SkipSpikesState:
    fields: dict[str, Any] = dict.fromkeys(SkipSpikesState._fields)  # None for what is not watched
    for key in ("norm", *rules):
        measured, threshold, count = _FIELDS[key]
        fields |= {measured: zero(jnp.float32), count: zero()}
        fields[threshold] = jnp.full((), UNBOUNDED, jnp.float32)
    counts = ("skipped_nonfinite", "consecutive_skips", "guard_failed", "spikes_in_a_row")
    fields |= {name: zero() for name in counts}
    fields["signals"] = {key: init_state(rule) for key, rule in rules.items()}
    return SkipSpikesState(**fields | {"inner_state": inner_state})
