"""Threshold rules based on moving averages, on a window of recent norms, or on the parameters.

AdaGC, ZClip and the quantile of Andrew et al. use moving averages. AutoClip and the rule of
OLMo-core and levanter use a window of recent norms. AGC uses the norms of the parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._checks import (
    check_callable,
    check_count,
    check_decay,
    check_length,
    check_number,
    is_factory,
)
from .._errors import public, type_error
from .._format import shortened
from .._states import increment_where
from .._types import UNBOUNDED, Array, Count, Number, Tree
from ..norms._reduce import norm_of_leaves
from ._formula import scale_factor
from ._threshold import Rule


class EmaState(NamedTuple):
    """Moving average of each norm.

    Attributes:
        step_count: Number of steps so far, saturating, int32[...].
        average: Moving average of the clipped norms as float32[...]; 0 before the first nonzero
            norm.
    """

    step_count: Array
    average: Array


@public
def ema(
    factor: Number = 1.05,
    decay: Number = 0.98,
    warmup_steps: int = 100,
    warmup_max: Number = 1.0,
) -> Rule:
    """Threshold at `factor` times the exponential moving average of the clipped norms.

    `average = decay * average + (1 - decay) * min(norm, threshold)`. This rule does not support
    negative values.

    | step | threshold and average |
    | --- | --- |
    | the first `warmup_steps` | `warmup_max`; the average is the smallest clipped norm |
    | no nonzero norm so far | no threshold; the first nonzero norm becomes the average |
    | a norm of zero | the average does not change; the step counts as warm-up |
    | norms that stay higher | with the defaults, the threshold rises by 0.1 % per step |

    Args:
        factor: Ratio of the threshold to the average; a positive number.
        decay: Decay rate of the average, at least 0 and below 1.
        warmup_steps: Number of warm-up steps, >= 1.
        warmup_max: Threshold during the warm-up, in the unit of the norm; a positive number, or inf
            for no threshold.

    Examples:
        >>> import jax, jax.numpy as jnp, gradclip_jax as gcx
        >>> rule = gcx.thresholds.ema(2.0, warmup_steps=1, warmup_max=4.0)
        >>> clip = gcx.clip_by_global_norm(rule)
        >>> state = clip.init(jnp.zeros(1))
        >>> for norm in (6.0, 9.0):  # the first one is clipped to 4
        ...     updates, state = jax.jit(clip.update)(jnp.array([norm]), state)
        >>> updates.tolist()
        [8.0]

    References:
        Wang et al., 2025, arXiv 2502.11034.
    """
    factor = check_number("factor", factor, "The paper uses 1.05.")
    decay = check_decay("decay", decay)
    warmup_steps = check_count("warmup_steps", warmup_steps, "The paper uses 100.")
    hint = "Pass inf to disable clipping during the warm-up."
    warmup_max = check_number("warmup_max", warmup_max, hint)

    def init(norm: Array) -> EmaState:
        return EmaState(jnp.zeros(norm.shape, jnp.int32), jnp.zeros_like(norm))

    def update(norm: Array, state: EmaState, param_norm: object) -> tuple[Array, EmaState]:
        is_warm = state.step_count >= warmup_steps
        has_average = state.average > 0
        bound = jnp.where(has_average, factor * state.average, UNBOUNDED)
        threshold = jnp.where(is_warm, bound, jnp.minimum(warmup_max, UNBOUNDED))
        clipped = jnp.minimum(norm, threshold)
        moving = decay * state.average + (1 - decay) * clipped
        average = jnp.where(is_warm, moving, jnp.minimum(state.average, clipped))
        average = jnp.where(has_average, average, clipped)
        # If zero norms were averaged, the first nonzero gradient of a rarely used leaf, such as an
        # expert, would be clipped to zero.
        average = jnp.where(norm > 0, average, state.average)
        return threshold, EmaState(increment_where(state.step_count), average)

    return Rule(init, update, name="ema")


class ZscoreState(NamedTuple):
    """Mean and standard deviation of the gradient norms.

    Attributes:
        norm_count: Number of norms so far, saturating, int32[...].
        mean: Mean of all norms during the warm-up, and their exponential moving average after it,
            float32[...].
        std: Standard deviation, float32[...]; its square is averaged in the same way as the mean.
        outlier_streak: Number of consecutive norms above the threshold, saturating, int32[...].
    """

    norm_count: Array
    mean: Array
    std: Array
    outlier_streak: Array


@public
def zscore(
    z_threshold: Number = 2.5,
    decay: Number = 0.97,
    warmup_steps: int = 25,
    *,
    relearn_after: int = 25,
) -> Rule:
    """Clip norms whose z-score exceeds `z_threshold`; larger outliers have lower thresholds.

    With `z = (norm - mean) / std`, the threshold of an outlier is
    `mean + z_threshold^2 / z * std`. Both moving averages are updated with the clipped norm. As in
    the authors' code, the variance is computed from deviations from the updated mean.

    | step | threshold |
    | --- | --- |
    | the first `warmup_steps` | none |
    | z <= z_threshold | none |
    | any increase after constant norms | the old mean, for `relearn_after` steps |
    | further outliers after that | the same; the averages are updated with unclipped norms |
    | a norm of zero | ignored by the averages |

    In the paper, the mean never adapts to a jump after constant norms; here it adapts after
    `relearn_after` outliers. The authors' code adds 1e-6 to `std`; here `1e-6 * mean` is added, so
    that the rule does not depend on the scale of the norms.

    Args:
        z_threshold: Maximum z-score of a norm that is not clipped; a positive number.
        decay: Decay rate of the moving averages, at least 0 and below 1.
        warmup_steps: Number of norms from which the initial mean and variance are computed, >= 1.
        relearn_after: Number of consecutive outliers after which unclipped norms update the
            averages, >= 1.

    Examples:
        >>> import jax, jax.numpy as jnp, gradclip_jax as gcx
        >>> clip = gcx.clip_by_global_norm(gcx.thresholds.zscore(2.0, warmup_steps=2))
        >>> state = clip.init(jnp.zeros(1))
        >>> for norm in (1.0, 3.0, 9.0):
        ...     updates, state = jax.jit(clip.update)(jnp.array([norm]), state)
        >>> round(float(updates[0]), 2)  # 2 + 2^2 / 7 * 1
        2.57

    References:
        Kumar, Owen, Chowdhury and Guera, 2025, arXiv 2504.02507.
    """
    z_threshold = check_number("z_threshold", z_threshold, "The paper uses 2.5.")
    decay = check_decay("decay", decay)
    warmup_steps = check_count("warmup_steps", warmup_steps, "The paper uses 25.")
    hint = "Pass a number of consecutive outliers."
    relearn_after = check_count("relearn_after", relearn_after, hint)

    def init(norm: Array) -> ZscoreState:
        count, zeros = jnp.zeros(norm.shape, jnp.int32), jnp.zeros_like(norm)
        return ZscoreState(count, zeros, zeros, count)

    def update(norm: Array, state: ZscoreState, param_norm: object) -> tuple[Array, ZscoreState]:
        is_warm = state.norm_count >= warmup_steps
        # The authors' code adds 1e-6 to the standard deviation, so norms below 1e-6 would never
        # count as outliers.
        spread = state.std + 1e-6 * jnp.abs(state.mean)
        z = (norm - state.mean) / jnp.maximum(spread, 1e-30)
        is_outlier = is_warm & (z > z_threshold)
        safe_z = jnp.where(is_outlier, z, 1)
        bound = state.mean + z_threshold**2 / safe_z * state.std
        threshold = jnp.where(is_outlier, bound, UNBOUNDED)
        is_clipped = is_outlier & (state.outlier_streak < relearn_after)
        observed = jnp.where(is_clipped, threshold, norm)

        # During the warm-up, compute the mean and population variance with equal weights.
        n = state.norm_count.astype(jnp.float32)
        weight = jnp.where(is_warm, 1 - decay, 1 / (n + 1))
        mean = state.mean + weight * (observed - state.mean)
        warmup_deviation = jnp.sqrt(n / (n + 1)) * (norm - state.mean)
        deviation = jnp.where(is_warm, observed - mean, warmup_deviation)
        next_state = ZscoreState(
            norm_count=increment_where(state.norm_count),
            mean=mean,
            std=jnp.hypot(jnp.sqrt(1 - weight) * state.std, jnp.sqrt(weight) * deviation),
            outlier_streak=jnp.where(is_outlier, increment_where(state.outlier_streak), 0),
        )
        return threshold, optax.tree.where(norm != 0, next_state, state)

    return Rule(init, update, allow_negative=True, name="zscore")


@public
def quantile(target: Number = 0.5, rate: Number = 0.2, initial: Number = 1.0) -> Rule:
    """Threshold that tracks the `target` quantile of the norms by geometric updates.

    After each step, the threshold C is updated by `C *= exp(-rate * ([norm <= C] - target))` and
    limited to the range from 1e-30 to 1e30. A norm of zero does not change it. This rule does not
    support negative values.

    Args:
        target: Fraction of steps that should not be clipped, between 0 and 1.
        rate: Learning rate of log C; a positive number.
        initial: Initial threshold, in the unit of the norm; a positive number. The paper uses 0.1.

    Examples:
        >>> import jax, jax.numpy as jnp, gradclip_jax as gcx
        >>> clip = gcx.clip_by_global_norm(gcx.thresholds.quantile(initial=1.0))
        >>> state = clip.init(jnp.zeros(1))
        >>> for norm in (3.0, 3.0):
        ...     updates, state = jax.jit(clip.update)(jnp.array([norm]), state)
        >>> round(float(updates[0]), 2)  # exp(0.2 * 0.5)
        1.11

    References:
        Andrew, Thakkar, McMahan and Ramaswamy, 2021 (first 2019), arXiv 1905.03871.
    """
    target = check_number("target", target, "Pass 0.5 for the median.", "[0, 1]")
    rate = check_number("rate", rate, "The paper uses 0.2.")
    initial = check_number("initial", initial, "The paper uses 0.1.")

    def update(norm: Array, threshold: Array, param_norm: object) -> tuple[Array, Array]:
        below = (norm <= threshold).astype(jnp.float32)
        moved = jnp.clip(threshold * jnp.exp(-rate * (below - target)), 1e-30, 1e30)
        return threshold, jnp.where(norm > 0, moved, threshold)

    return Rule(lambda norm: jnp.full_like(norm, initial), update, name="quantile")


class WindowState(NamedTuple):
    """The most recent norms or losses.

    Attributes:
        values: Recorded values in chronological order, float32[window, ...]; UNBOUNDED for entries
            that have not been recorded.
        value_count: Number of values recorded so far, saturating, int32[...].
    """

    values: Array
    value_count: Array


def _window_rule(
    name: str, window: Count, threshold_of: Callable[[WindowState, WindowState], Array]
) -> Rule:
    """Return a rule that computes thresholds from the window of recent norms.

    The arguments are the window of norms before and after the current step.
    """

    def init(norm: Array) -> WindowState:
        values = jnp.full((window, *norm.shape), UNBOUNDED, jnp.float32)
        return WindowState(values, jnp.zeros(norm.shape, jnp.int32))

    def update(norm: Array, before: WindowState, param_norm: object) -> tuple[Array, WindowState]:
        values = jnp.concatenate([before.values[1:], norm[None]])  # without the oldest value
        after = WindowState(values, increment_where(before.value_count))
        after = optax.tree.where(norm != 0, after, before)
        return threshold_of(before, after), after

    return Rule(init, update, allow_negative=True, name=name)


@public
def percentile(percentile: Number = 10.0, window: Count = 1000) -> Rule:
    """Threshold at a percentile of the most recent norms, including the current one.

    | step | threshold |
    | --- | --- |
    | the first | the norm itself, so that the step is not clipped |
    | fewer steps than `window` | the percentile of all norms so far, as published |
    | a norm of zero | the norm is not recorded |

    Each step sorts all values in the window.

    Args:
        percentile: Percentile from 1 to 100, with linear interpolation as in
            `numpy.percentile`.
        window: Number of values in the window, 1 to 2^20, static. Each norm needs 4 * window bytes.

    Examples:
        >>> import jax, jax.numpy as jnp, gradclip_jax as gcx
        >>> clip = gcx.clip_by_global_norm(gcx.thresholds.percentile(50.0, window=3))
        >>> state = clip.init(jnp.zeros(1))
        >>> for norm in (1.0, 2.0, 9.0):
        ...     updates, state = jax.jit(clip.update)(jnp.array([norm]), state)
        >>> updates.tolist()
        [2.0]

    References:
        Seetharaman, Wichern, Pardo and Le Roux, 2020, arXiv 2007.14469.
    """
    percent = check_number("percentile", percentile, "Pass 50 for the median.", "[1, 100]")
    window = check_length("window", window, "Pass the number of norms to keep.")

    def threshold_of(before: WindowState, after: WindowState) -> Array:
        ordered = jnp.sort(after.values, axis=0)
        last = jnp.clip(after.value_count - 1, 0, window - 1)
        position = jnp.asarray(percent, jnp.float32) / 100 * last.astype(jnp.float32)
        below = jnp.minimum(jnp.floor(position).astype(jnp.int32), last)
        low, high = (
            jnp.take_along_axis(ordered, place[None], axis=0, mode="promise_in_bounds")[0]
            for place in (below, jnp.minimum(below + 1, last))
        )
        return low + (high - low) * (position - jnp.floor(position))

    return _window_rule("percentile", window, threshold_of)


@public
def mean_std(
    z_threshold: Number = 6.0,
    window: Count = 128,
    warmup_steps: int = 64,
    *,
    ddof: int = 0,
) -> Rule:
    """Threshold `z_threshold` standard deviations above the mean of the most recent norms.

    The mean and standard deviation do not include the current norm. Norms above the threshold enter
    the window unclipped. The threshold therefore adapts quickly to a lasting increase, but a large
    spike raises it for the length of the window. OLMo-core and levanter use this rule to skip
    steps.

    | step | threshold |
    | --- | --- |
    | the first `warmup_steps` | none |
    | constant values | above, because the standard deviation is at least 0.1 % of the mean |
    | a norm of zero | the norm is not recorded |

    Args:
        z_threshold: Number of standard deviations above the mean; a positive number.
        window: Number of values in the window, 1 to 2^20, static.
        warmup_steps: Number of recorded norms before the first threshold, >= 1.
        ddof: 0 for the population variance (levanter), 1 for the sample variance (OLMo-core).

    Examples:
        >>> import jax, jax.numpy as jnp, gradclip_jax as gcx
        >>> clip = gcx.clip_by_global_norm(gcx.thresholds.mean_std(2.0, warmup_steps=2))
        >>> state = clip.init(jnp.zeros(1))
        >>> for norm in (1.0, 3.0, 9.0):
        ...     updates, state = jax.jit(clip.update)(jnp.array([norm]), state)
        >>> updates.tolist()  # 2 + 2 * 1
        [4.0]
    """
    z_threshold = check_number("z_threshold", z_threshold, "OLMo-core and levanter use 6.")
    window = check_length("window", window, "Pass the number of norms to keep.")
    warmup_steps = check_count("warmup_steps", warmup_steps, "Pass for example half of `window`.")
    ddof = check_count("ddof", ddof, "Pass 0 or 1.", low=0, high=1)

    def threshold_of(before: WindowState, after: WindowState) -> Array:
        recorded = before.values < UNBOUNDED
        n = jnp.clip(before.value_count, 1, window).astype(jnp.float32)
        values = jnp.where(recorded, before.values, 0)
        # Divide the values by their mean magnitude, so that their squares cannot overflow.
        size = jax.lax.stop_gradient(jnp.sum(jnp.abs(values) / n[None], axis=0))
        unit = jnp.where(size > 0, size, 1)
        mean = jnp.sum(values / n[None], axis=0) / unit
        deviations = jnp.where(recorded, values / unit[None] - mean[None], 0)
        variance = jnp.sum(deviations**2 / jnp.maximum(n - ddof, 1)[None], axis=0)
        # Without this floor, the threshold of constant norms would equal the norm.
        floor = jnp.maximum(1e-3 * jnp.abs(mean), 1e-6)
        std = jnp.sqrt(jnp.maximum(variance, floor**2))
        threshold = unit * (mean + z_threshold * std)
        return jnp.where(before.value_count >= warmup_steps, threshold, UNBOUNDED)

    return _window_rule("mean_std", window, threshold_of)


@public
def relative_to_params(ratio: Number = 0.01, eps: Number = 1e-3) -> Rule:
    """Set each threshold to `ratio * max(norm of the parameters, eps)`.

    Args:
        ratio: Maximum ratio of gradient norm to parameter norm; a positive number.
        eps: Lower bound of the parameter norm, > 0, which allows updates of zero parameters.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> clip = gcx.clip_by_global_norm(gcx.thresholds.relative_to_params(0.5))
        >>> params, grads = jnp.array([3.0, 4.0]), jnp.array([0.0, 10.0])
        >>> clip.update(grads, clip.init(params), params)[0].tolist()
        [0.0, 2.5]

    References:
        Brock, De, Smith and Simonyan, 2021, arXiv 2102.06171.
    """
    ratio = check_number("ratio", ratio, "The paper uses 0.01 for large batches.")
    eps = check_number("eps", eps, "The paper uses 1e-3.")

    def update(norm: Array, state: Tree, param_norm: Array | None) -> tuple[Array, Tree]:
        assert param_norm is not None  # because of `uses_params`
        limit, floor = jnp.float32(ratio), jnp.float32(eps)
        return limit * jnp.maximum(param_norm, floor), state

    return Rule(None, update, uses_params=True, name="relative_to_params")


@public
def capped(rule: Rule, max_threshold: Number) -> Rule:
    """Limit the threshold of another rule to an upper bound.

    Args:
        rule: Threshold rule.
        max_threshold: Upper bound in the units of the norm; a positive number.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> rule = gcx.thresholds.capped(gcx.thresholds.quantile(initial=4.0), 1.0)
        >>> clip = gcx.clip_by_global_norm(rule)
        >>> clip.update(jnp.array([3.0]), clip.init(jnp.zeros(1)))[0].tolist()
        [1.0]
    """
    hint = "Use the rule without `capped` for no bound."
    bound = check_number("max_threshold", max_threshold, hint)
    if not isinstance(rule, Rule):
        hint = "Pass for example `gcx.thresholds.quantile()`."
        if is_factory(rule):
            check_callable("rule", rule, hint)
        raise type_error("rule", "a rule", shortened(rule), hint)

    def update(norm: Array, state: Tree, param_norm: Array | None) -> tuple[Array, Tree]:
        threshold, state = rule.update(norm, state, param_norm)
        return jnp.minimum(threshold, jnp.float32(bound)), state

    return dataclasses.replace(rule, update=update)


def adagc_rule(relative: Number, absolute: Number, decay: Number, warmup_steps: int) -> Rule:
    """Return the rule of `adagc`, which limits the global norm during the warm-up."""
    relative = check_number("relative", relative, "The paper uses 1.05.")
    bound = check_number("absolute", absolute, "The paper uses 1; pass inf for no bound.")
    rule = ema(relative, decay, warmup_steps, warmup_max=UNBOUNDED)

    def update(norms: Array, state: EmaState, param_norms: Array | None) -> tuple[Array, EmaState]:
        # `norms` is the vector of the norms of all leaves.
        factor = scale_factor(norm_of_leaves([norms], 2.0, None), jnp.minimum(bound, UNBOUNDED))
        scaled = jnp.where(state.step_count < warmup_steps, factor, 1) * norms
        thresholds, state = rule.update(scaled, state, None)
        # In the warm-up, the threshold of a norm is its value after clipping by global norm.
        return jnp.where(scaled < norms, scaled, thresholds), state

    return dataclasses.replace(rule, update=update, name="adagc")
