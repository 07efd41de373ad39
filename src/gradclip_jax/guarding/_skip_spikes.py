"""Guards against spikes of the gradient norm and the loss."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._checks import check_count, check_ord, check_params
from .._errors import public, value_error
from .._leaves import measured_leaves
from .._mask import Mask
from .._states import increment_where, register_guard
from .._types import UNBOUNDED, AxisName, Count, Number, Order, Scalar, Tree
from ..clipping._norm import norm_of_leaves
from ..clipping._threshold import Rule, Threshold, apply_rule, as_rule, init_state
from ..gates._gate import Gradient, Guard
from ._detect import loss_of
from ._guard import check_guard, guarded


@register_guard(
    "skip_threshold",
    "skipped_large_norm",
    "loss",
    "loss_threshold",
    "skipped_large_loss",
    "skipped_nonfinite",
)
class SkipSpikesState(NamedTuple):
    """State of `skip_spikes`; measurements are float32[], counters are int32[] and saturate.

    If the loss has no threshold, its fields are None. One step can increment both counters.

    Attributes:
        grad_norm: Norm of the last gradient.
        skip_threshold: Threshold of the gradient norm at the last step; the largest float32 if
            there is none.
        skipped_large_norm: Number of steps skipped because of their gradient norm.
        loss: Last loss.
        loss_threshold: Threshold of the loss at the last step.
        skipped_large_loss: Number of steps skipped because of their loss.
        skipped_nonfinite: Number of steps skipped because of a non-finite norm or loss.
        consecutive_skips: Number of steps without an applied update since the last one.
        guard_failed: 1 if `consecutive_skips` ever reached `max_consecutive_skips`, else 0.
        spikes_in_a_row: Number of steps skipped because of a spike since the last applied step.
        signals: State of the threshold rule for each of "norm" and "loss".
        inner_state: State of the inner optimizer.
    """

    grad_norm: Scalar
    skip_threshold: Scalar
    skipped_large_norm: Scalar
    loss: Scalar | None
    loss_threshold: Scalar | None
    skipped_large_loss: Scalar | None
    skipped_nonfinite: Scalar
    consecutive_skips: Scalar
    guard_failed: Scalar
    spikes_in_a_row: Scalar
    signals: dict[str, Tree]
    inner_state: Tree


@public
def skip_large_norm(
    inner: optax.GradientTransformation,
    max_norm: Threshold,
    *,
    ord: Order | None = None,
    axis_name: AxisName = None,
    relearn_after: Count = 25,
    max_consecutive_skips: Count | None = 50,
    mask: Mask = None,
) -> optax.GradientTransformationExtraArgs:
    """Skip steps whose gradient norm is above a threshold or non-finite.

    This function is `skip_spikes` with a threshold for the gradient norm only.

    | gradient norm | result |
    | --- | --- |
    | <= threshold | the step is applied |
    | > threshold | zero update, inner state unchanged |
    | NaN or infinite, also during the warm-up of a rule | the same; the rule ignores the norm |
    | permanently above the threshold of a rule | after `relearn_after` skips, the rule restarts |
    | permanently above a fixed number | always skipped; `guard_failed` is 1 after 50 steps |

    Only the gradient is measured; to check the update as well, wrap the guard in
    `skip_nonfinite(check="step")`. Use `clip_by_global_norm` to scale large gradients instead, or
    `clip_by_norm(reaction="zero")` to run the optimizer with a zero gradient.

    Args:
        inner: Gradient transformation.
        max_norm: Threshold in the units of the gradients; a positive number, a traced scalar, a
            schedule of the step count, or a rule from `gcx.thresholds`.
        ord: Order of the norm: 1, 2 or inf. None means 2.
        axis_name: See `clip_by_global_norm`.
        relearn_after: Number of consecutive large norms after which a threshold rule restarts; an
            integer >= 1.
        max_consecutive_skips: See `skip_nonfinite`.
        mask: See `skip_nonfinite`.

    Returns:
        A gradient transformation with a `SkipSpikesState`.

    Raises:
        ValueError: If a number is out of range.
        TypeError: If `inner` is not a gradient transformation, if `max_norm` is not a threshold, or
            if a leaf is not floating-point or complex.

    Examples:
        >>> import jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = gcx.skip_large_norm(optax.sgd(1.0), max_norm=10.0)
        >>> params = jnp.array([1.0])
        >>> updates, state = tx.update(jnp.array([50.0]), tx.init(params), params)
        >>> updates.tolist(), int(state.skipped_large_norm)
        ([0.0], 1)
    """
    rules = {"norm": as_rule("max_norm", max_norm)}
    axes = check_guard(inner, axis_name)
    guard = _spike_guard("skip_large_norm", rules, ord, axes, relearn_after)
    return guarded(inner, guard._replace(mask=mask, max_consecutive_skips=max_consecutive_skips))


@public
def skip_spikes(
    inner: optax.GradientTransformation,
    *,
    norm: Threshold | None = None,
    loss: Threshold | None = None,
    ord: Order | None = None,
    axis_name: AxisName = None,
    relearn_after: Count = 25,
    max_consecutive_skips: Count | None = 50,
    mask: Mask = None,
) -> optax.GradientTransformationExtraArgs:
    """Skip steps whose gradient norm or loss is above a threshold.

    Each of the two values can have its own threshold. A step is applied if both are finite and
    neither is above its threshold. Pass the loss to `update` as `value` or `loss`. `metrics`
    reports the number of skips for each cause. To limit the size of updates, clip them: place
    `clip_by_global_norm` with a threshold rule after the optimizer in a chain.

    After `relearn_after` consecutive skips because of a spike, every rule that depends on earlier
    values restarts from the current value, unless its threshold has already risen above this value.
    Rules do not restart while a value exceeds the bound of `capped`. The `warmup_max` of `ema`
    (pass inf here) still applies after a restart.

    | step | result |
    | --- | --- |
    | no value above its threshold | applied |
    | a value above its threshold | zero update, inner state unchanged |
    | NaN or infinite norm or loss | the same; the rules ignore the step |
    | permanently above the threshold of a rule | after `relearn_after` skips, the rule restarts |
    | permanently above a fixed number | always skipped; `guard_failed` is 1 after 50 steps |
    | the loss differs between devices | all devices compare the mean loss |

    Args:
        inner: Gradient transformation.
        norm: Threshold of the gradient norm, as `max_norm` of `skip_large_norm`; None for no
            threshold.
        loss: Threshold of the loss, in the units of the loss; a number, which may be negative, a
            schedule, or a rule such as `thresholds.mean_std` or `thresholds.zscore`. A multiple of
            the average, as in `ema`, is not meaningful for negative losses.
        ord: Order of the norm: 1, 2 or inf. None means 2.
        axis_name: See `clip_by_global_norm`.
        relearn_after: Number of consecutive skips after which all threshold rules restart; an
            integer >= 1.
        max_consecutive_skips: See `skip_nonfinite`.
        mask: See `skip_nonfinite`.

    Returns:
        A gradient transformation with a `SkipSpikesState`; `update` requires `value` if the loss
        has a threshold.

    Raises:
        ValueError: If a number is out of range, if no threshold is given, or if `value` is missing.
        TypeError: If `inner` is not a gradient transformation, if a leaf is not floating-point or
            complex, or if `value` is not a real scalar.

    Examples:
        >>> import jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = gcx.skip_spikes(optax.sgd(1.0), norm=10.0, loss=4.0)
        >>> params = jnp.array([1.0])
        >>> updates, state = tx.update(jnp.array([3.0]), tx.init(params), params, value=50.0)
        >>> updates.tolist(), int(state.skipped_large_loss), int(state.skipped_large_norm)
        ([0.0], 1, 0)

    References:
        OLMo-core's `SkipStepOptimizer`, levanter's `skipstep` and MaxText's `skip_step_on_spikes`
        use the rule of `mean_std` for both norm and loss.
    """
    if norm is None and loss is None:
        hint = "Pass a threshold for the norm or the loss."
        raise value_error("norm", "passed if `loss` is None", "None", hint)
    rules = {"norm": as_rule("norm", UNBOUNDED if norm is None else norm)}
    if loss is not None:
        rules["loss"] = _loss_rule(loss)
    axes = check_guard(inner, axis_name)
    guard = _spike_guard("skip_spikes", rules, ord, axes, relearn_after)
    return guarded(inner, guard._replace(mask=mask, max_consecutive_skips=max_consecutive_skips))


def _loss_rule(loss: Threshold) -> Rule:
    """Convert a threshold for losses, which may be negative, to a rule."""
    rule = as_rule("loss", loss, low=-math.inf)
    is_adaptive = bool(jax.tree.leaves(init_state(rule))) and not rule.counts_steps
    if rule.uses_params or (is_adaptive and not rule.allow_negative):
        hint = "Pass for example `gcx.thresholds.mean_std()`."
        raise value_error("loss", "a threshold for values of any sign", "a rule for norms", hint)
    return rule


def _spike_guard(
    function: str, rules: dict[str, Rule], ord: Order | None, axes: AxisName, relearn_after: Count
) -> Guard:
    """Return a guard that skips steps whose norm or loss is above its threshold."""
    order, has_loss = check_ord(ord), "loss" in rules
    hint = "Pass the number of consecutive skips after which threshold rules restart."
    check_count("relearn_after", relearn_after, hint)

    def check(gradient: Gradient, state: SkipSpikesState) -> tuple[Scalar, Tree]:
        values, param_norm = {"norm": gradient.norm}, None
        if rules["norm"].uses_params:
            check_params(gradient.tree, gradient.params)
            param_norm = norm_of_leaves(measured_leaves(gradient.params), order, axes)
        if has_loss:
            loss = loss_of(gradient.extra_args, axes)
            if loss is None:
                hint = "Call `update(grads, state, params, value=loss)`."
                raise value_error("value", "passed if `loss` has a threshold", "None", hint)
            values["loss"] = loss
        finite = functools.reduce(jnp.logical_and, map(jnp.isfinite, values.values()))
        thresholds: dict[str, Scalar] = {}
        spikes: dict[str, Scalar] = {}
        states: dict[str, tuple[Tree, Tree]] = {}
        is_fixed = jnp.array(False)
        for key, rule in rules.items():
            value = jnp.where(finite, values[key], jnp.nan)
            norm = param_norm if rule.uses_params else None
            threshold, after = apply_rule(rule, value, state.signals[key], norm)
            thresholds[key], spikes[key] = threshold, finite & ~(value <= threshold)
            restarted, highest = _restarted(rule, value, threshold, after, norm)
            is_fixed |= spikes[key] & (value > highest)
            states[key] = restarted, after
        is_spike, restarts = functools.reduce(jnp.logical_or, spikes.values()), jnp.array(False)
        if any(jax.tree.leaves(x) for x in states.values()):  # numbers have no state
            restarts = is_spike & ~is_fixed & (state.spikes_in_a_row >= relearn_after)
        signals = {key: optax.tree.where(restarts, *x) for key, x in states.items()}
        return finite & (restarts | ~is_spike), (values, thresholds, signals, spikes, finite)

    def advance(state: Tree, observed: Tree, skipped: Scalar) -> SkipSpikesState:
        values, thresholds, signals, spikes, finite = observed
        if has_loss:
            count = increment_where(state.skipped_large_loss, skipped & spikes["loss"])
            state = state._replace(loss=values["loss"], loss_threshold=thresholds["loss"])
            state = state._replace(skipped_large_loss=count)
        return state._replace(
            skip_threshold=thresholds["norm"].astype(jnp.float32),
            skipped_large_norm=increment_where(state.skipped_large_norm, skipped & spikes["norm"]),
            skipped_nonfinite=increment_where(state.skipped_nonfinite, skipped & ~finite),
            # Non-finite values do not count as spikes.
            spikes_in_a_row=jnp.where(skipped, increment_where(state.spikes_in_a_row, finite), 0),
            signals=signals,
        )

    def fields(params: Tree) -> dict[str, Tree]:
        found: dict[str, Tree] = {"skip_threshold": jnp.full((), UNBOUNDED, jnp.float32)}
        found["signals"] = {key: init_state(rule) for key, rule in rules.items()}
        if not has_loss:
            return found | dict.fromkeys(("loss", "loss_threshold", "skipped_large_loss"))
        unbounded = jnp.full((), UNBOUNDED, jnp.float32)
        return found | {"loss": jnp.zeros((), jnp.float32), "loss_threshold": unbounded}

    return Guard(function, SkipSpikesState, check, advance, fields, ord=order, axis_name=axes)


def _restarted(
    rule: Rule, value: Scalar, threshold: Scalar, after: Tree, param_norm: Scalar | None
) -> tuple[Tree, Number]:
    """Return the state of a rule that restarts from a value, and its highest threshold.

    `after` is the state of the rule without a restart. Numbers and schedules do not restart.
    """
    if not jax.tree.leaves(after) or rule.counts_steps:
        return after, -jnp.inf
    _, new = apply_rule(rule, value, init_state(rule), param_norm)
    # Keep the higher threshold, because a restarted rule may begin far below the current values.
    bound, bound_after = (apply_rule(rule, value, x, param_norm)[0] for x in (new, after))
    new = optax.tree.where((bound > bound_after) | (value <= threshold), new, after)
    return new, jnp.inf if rule.max_threshold is None else rule.max_threshold
