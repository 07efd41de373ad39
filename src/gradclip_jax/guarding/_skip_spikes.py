"""Guards against spikes of the gradient norm and the loss."""

from __future__ import annotations

import functools
from typing import Final, NamedTuple

import jax.numpy as jnp
import optax

from .._checks import check_count, check_ord, check_params
from .._errors import public, type_error, value_error
from .._leaves import measured_leaves
from .._mask import Mask
from .._states import increment_where, register_guard
from .._types import UNBOUNDED, AxisName, Count, Order, Scalar, Tree
from ..clipping._norm import norm_of_leaves
from ..clipping._threshold import Rule, Threshold, as_rule, init_state
from ..gates._gate import ExtraArgs, Guard, Observed
from ._detect import loss_of
from ._guard import check_guard, guard, zero
from ._signal import Signal, compare, loss_rule, relearn

FIELDS: Final = {
    "norm": ("skip_threshold", "skipped_large_norm"),
    "loss": ("loss_threshold", "skipped_large_loss"),
}
"""State fields for the threshold and the number of skips of each signal."""


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
    options = (ord, axis_name, relearn_after, max_consecutive_skips, mask)
    return _skip_above("skip_large_norm", inner, rules, *options)


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
            schedule, or a rule. Use `thresholds.mean_std` or `thresholds.zscore` with
            `allow_negative=True`, because a multiple of the average, as in `ema`, is not meaningful
            for negative losses.
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
    rules = {} if norm is None else {"norm": as_rule("norm", norm)}
    if loss is not None:
        rules["loss"] = loss_rule(loss)
    if not rules:
        hint = "Pass a threshold for the norm or the loss."
        raise value_error("norm", "passed if `loss` is None", "None", hint)
    options = (ord, axis_name, relearn_after, max_consecutive_skips, mask)
    return _skip_above("skip_spikes", inner, rules, *options)


def _skip_above(
    function: str,
    inner: optax.GradientTransformation,
    rules: dict[str, Rule],
    ord: Order | None,
    axis_name: AxisName,
    relearn_after: Count,
    max_consecutive_skips: Count | None,
    mask: Mask,
) -> optax.GradientTransformationExtraArgs:
    """Build a guard that skips steps with a value above its threshold."""
    axes, order = check_guard(inner, axis_name), check_ord(ord)
    hint = "Pass the number of consecutive skips after which threshold rules restart."
    check_count("relearn_after", relearn_after, hint)

    def measure(tree: Tree) -> Scalar:
        return norm_of_leaves(measured_leaves(tree), order, axes)

    def check(
        grads: Tree, state: SkipSpikesState, params: Tree, extra_args: ExtraArgs
    ) -> tuple[Scalar, Tree, Observed]:
        _check_signals(state, rules)
        values = {"norm": measure(grads)}
        if "loss" in rules:
            values["loss"] = _given_loss(extra_args, axes)
        param_norm = None
        if any(rule.uses_params for rule in rules.values()):
            check_params(grads, params)
            param_norm = measure(params)
        finite = functools.reduce(jnp.logical_and, map(jnp.isfinite, values.values()))
        signals: dict[str, Signal] = {}
        for key, rule in rules.items():
            value = jnp.where(finite, values[key], jnp.nan)
            signals[key] = compare(rule, value, state.signals[key], param_norm)
        is_due = state.spikes_in_a_row >= relearn_after
        passed, signals = relearn(finite, signals, is_due)
        values = {key: x.astype(jnp.float32) for key, x in values.items()}
        return passed, grads, Observed(values["norm"], (values, finite, signals))

    gate = Guard(SkipSpikesState, check, _advance, max_consecutive_skips=max_consecutive_skips)
    fields = functools.partial(_fields, rules)
    return guard(function, inner, gate, fields, mask=mask, axis_name=axes)


def _advance(state: SkipSpikesState, observed: Observed, skipped: Scalar) -> SkipSpikesState:
    """Count a skipped step, and store the new states of the rules."""
    values, finite, signals = observed.details
    fields: dict[str, Tree] = {}
    for key, signal in signals.items():
        threshold, count = FIELDS[key]
        fields[threshold] = signal.threshold.astype(jnp.float32)
        fields[count] = increment_where(getattr(state, count), skipped & signal.is_spike)
    if "loss" in signals:
        fields["loss"] = values["loss"]
    # Non-finite values do not count as spikes.
    spikes = increment_where(state.spikes_in_a_row, finite)
    return state._replace(
        skipped_nonfinite=increment_where(state.skipped_nonfinite, skipped & ~finite),
        spikes_in_a_row=jnp.where(skipped, spikes, 0),
        signals={key: signal.rule_state for key, signal in signals.items()},
        **fields,
    )


def _fields(rules: dict[str, Rule], params: Tree) -> dict[str, Tree]:
    """Return the initial values of the fields that other guards do not have."""
    fields: dict[str, Tree] = dict.fromkeys(("loss", "loss_threshold", "skipped_large_loss"))
    for key in ("norm", *rules):
        threshold, count = FIELDS[key]
        fields |= {threshold: jnp.full((), UNBOUNDED, jnp.float32), count: zero()}
    if "loss" in rules:
        fields["loss"] = zero(jnp.float32)
    fields |= {"skipped_nonfinite": zero(), "spikes_in_a_row": zero()}
    return fields | {"signals": {key: init_state(rule) for key, rule in rules.items()}}


def _check_signals(state: SkipSpikesState, rules: dict[str, Rule]) -> None:
    """Raise if the state belongs to a guard with other thresholds."""
    if state.signals.keys() != rules.keys():
        rule, got = (" and ".join(sorted(x)) for x in (rules, state.signals))
        hint = "Create it with `init(params)` of this transformation."
        raise type_error("state", f"a state with a threshold for {rule}", f"only {got}", hint)


def _given_loss(extra_args: ExtraArgs, axes: AxisName) -> Scalar:
    """Return the loss, or raise if it was not passed."""
    loss = loss_of(extra_args, axes)
    if loss is None:
        hint = "Call `update(grads, state, params, value=loss)`."
        raise value_error("value", "passed if `loss` has a threshold", "None", hint)
    return loss
