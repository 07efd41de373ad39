"""Guards against spikes of the gradient norm and the loss."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._errors import public, value_error
from .._types import UNBOUNDED, AxisName, Count, Scalar, Tree
from ..clipping._threshold import Rule, Threshold, apply_rule, as_rule, init_state
from ..norms._mask import Mask
from ..wrappers._extra_args import ExtraArgs, mean_loss
from ..wrappers._guard import Guard, Rejections
from ..wrappers._update import wrap


class SpikeState(NamedTuple):
    """State of the thresholds of `skip_spikes`.

    Attributes:
        thresholds: Thresholds of "norm" and "loss" at the last step, float32[]; the largest float32
            for a missing threshold.
        rules: State of each threshold rule, keyed by the name of the rule.
    """

    thresholds: dict[str, Scalar]
    rules: dict[str, Tree]

    def step_metrics(self) -> dict[str, Tree]:
        """Return the entries of `metrics` for this state."""
        names = {"norm": "skip_threshold", "loss": "loss_threshold"}
        return {names[key]: threshold for key, threshold in self.thresholds.items()}


@public
def skip_spikes(
    inner: optax.GradientTransformation,
    *,
    norm: Threshold | None = None,
    loss: Threshold | None = None,
    axis_name: AxisName = None,
    max_consecutive_skips: Count | None = 50,
    trainable: Mask = None,
) -> optax.GradientTransformationExtraArgs:
    """Skip steps whose gradient norm or loss is above a threshold or non-finite.

    Each of the two values can have its own threshold. A step is applied if both are finite and
    neither is above its threshold. Pass the loss to `update` as `value` or `loss`. `metrics`
    reports the number of skips for each cause.

    | step | result |
    | --- | --- |
    | no value above its threshold | applied |
    | a value above its threshold | zero update, inner state unchanged |
    | NaN or infinite norm or loss | the same; the rules ignore the step |
    | permanently above the threshold of a rule | skipped until the rule has adapted |
    | permanently above a fixed number | always skipped; `guard_failed` is 1 after 50 steps |
    | the loss differs between devices | all devices compare the mean loss |

    Rules also receive the finite values of skipped steps and so adapt to a permanent rise: in our
    tests, `mean_std` adapts after 4 skips, `percentile` after 9, and `zscore` after 31. `ema`
    updates its average with clipped values, so the average adapts only if `factor` is large; for
    example, it grows tenfold in 80 skips.

    Only the gradient and the loss are measured; to check the update as well, wrap the guard in
    `skip_nonfinite(check="step")`. To scale large gradients instead, use `clip_by_global_norm`; to
    run the optimizer with a zero gradient, use `clip_by_norm(reaction="zero")`. To limit the size
    of updates, place `clip_by_global_norm` with a threshold rule after the optimizer in a chain.

    Args:
        inner: Gradient transformation.
        norm: Threshold of the L2 norm of the gradient; a positive number, a traced scalar, a
            schedule of the step count, or a rule from `gcx.thresholds`. None for no threshold.
        loss: Threshold of the loss, in the units of the loss; a number, which may be negative, a
            schedule, or a rule such as `thresholds.mean_std` or `thresholds.zscore`. A multiple of
            the average, as in `ema`, is not meaningful for negative losses.
        axis_name: See `clip_by_global_norm`.
        max_consecutive_skips: See `skip_nonfinite`.
        trainable: See `skip_nonfinite`.

    Returns:
        A gradient transformation with a `WrapperState`; `update` requires `value` if the loss
        has a threshold.

    Raises:
        ValueError: If a number is out of range, or if no threshold is given.
        TypeError: If `inner` is not a gradient transformation, if a leaf is not floating-point or
            complex, or if `value` is required and not a real scalar.

    Examples:
        >>> import jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = gcx.skip_spikes(optax.sgd(1.0), norm=10.0, loss=4.0)
        >>> params = jnp.array([1.0])
        >>> updates, state = tx.update(jnp.array([3.0]), tx.init(params), params, value=50.0)
        >>> updates.tolist(), int(gcx.metrics(state)["skipped_large_loss"])
        ([0.0], 1)

    References:
        OLMo-core's `SkipStepOptimizer`, levanter's `skipstep` and MaxText's `skip_step_on_spikes`
        use the rule of `mean_std` for both norm and loss.
    """
    if norm is None and loss is None:
        raise value_error("norm", "passed if `loss` is None", "None", "Pass `norm` or `loss`.")
    rules = {"norm": _as_rule("norm", UNBOUNDED if norm is None else norm)}
    if loss is not None:
        rules["loss"] = _as_rule("loss", loss, low=-math.inf)

    def init(params: Tree) -> SpikeState:
        thresholds = {key: jnp.full((), UNBOUNDED, jnp.float32) for key in rules}
        return SpikeState(thresholds, {key: init_state(rule) for key, rule in rules.items()})

    def check(
        grads: Tree, grad_norm: Scalar, state: SpikeState, params: Tree, extra_args: ExtraArgs
    ) -> tuple[Rejections, SpikeState]:
        values = {"norm": grad_norm}
        if loss is not None:
            values["loss"] = mean_loss(extra_args, axis_name)
        is_finite = functools.reduce(jnp.logical_and, map(jnp.isfinite, values.values()))
        rejections: Rejections = {"nonfinite": ~is_finite}
        thresholds: dict[str, Scalar] = {}
        states: dict[str, Tree] = {}
        for key, rule in rules.items():
            given = rule, values[key], state.rules[key]
            threshold, states[key] = apply_rule(*given, is_finite=is_finite, argument=key)
            rejections[f"large_{key}"] = is_finite & ~(values[key] <= threshold)
            thresholds[key] = threshold.astype(jnp.float32)
        return rejections, SpikeState(thresholds, states)

    guard = Guard(
        "skip_spikes",
        causes=("nonfinite", *(f"large_{key}" for key in rules)),
        check=check,
        init=init,
        advance=lambda state, observed, skipped: observed,
        trainable=trainable,
        axis_name=axis_name,
        max_consecutive_skips=max_consecutive_skips,
    )
    return wrap(guard, inner)


_HINT = "Pass `gcx.thresholds.mean_std()`, or `allow_negative=True` to your own `Rule`."


def _as_rule(argument: str, threshold: Threshold, low: float = 0.0) -> Rule:
    """Convert a threshold for values above `low` to a rule that needs no parameters."""
    rule = as_rule(argument, threshold, low=low)
    is_adaptive = bool(jax.tree.leaves(init_state(rule)))
    if rule.uses_params or (low < 0 and is_adaptive and not rule.allow_negative):
        must = "a threshold that needs no parameters and, for the loss, allows negative values"
        raise value_error(argument, must, "another rule", _HINT)
    return rule
