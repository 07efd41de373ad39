"""Threshold rules that follow the norms, by an average or by a window of the last ones.

Averages: AdaGC, ZClip, and a quantile (Andrew et al.). Windows: AutoClip; OLMo-core and levanter.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._checks import check_count, check_decays, check_length, check_number
from .._errors import public
from .._states import increment_where
from .._types import UNBOUNDED, Array, Count, Number
from ..clipping._threshold import Rule
from ._averages import hypotenuse, where_nonzero


class EmaState(NamedTuple):
    """The average norm of each unit.

    Attributes:
        step_count: int32[...], steps so far, saturating.
        average: float32[...], of the clipped norms; 0 before the first norm above 0.
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
    """A threshold of `factor` times the exponential moving average of the clipped norms.

    `average = decay * average + (1 - decay) * min(norm, threshold)`. For norms only: it has no
    meaning for values that may be negative.

    | step | threshold and average |
    | --- | --- |
    | the first `warmup_steps` | `warmup_max`; the average is the smallest clipped norm |
    | no norm above zero so far | none; the first such norm is the average |
    | a norm of zero | leaves the average as it was; the step counts as warm-up |
    | a lasting rise | rises by 0.1 % a step with the defaults, as published |

    Args:
        factor: how far above the average a norm may be, dimensionless, > 0.
        decay: of the average, at least 0 and below 1.
        warmup_steps: >= 1.
        warmup_max: threshold during the warm-up, in the unit of the norm, > 0; inf for none.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> rule = gcx.thresholds.ema(2.0, warmup_steps=1, warmup_max=jnp.inf)
        >>> clip = gcx.clip_by_global_norm(rule)
        >>> state = clip.init(jnp.zeros(1))
        >>> for norm in (1.0, 9.0):
        ...     updates, state = clip.update(jnp.array([norm]), state)
        >>> updates.tolist()
        [2.0]

    References:
        Wang et al., 2025, arXiv 2502.11034.
    """
    check_number("factor", factor, "The paper uses 1.05.")
    check_decays(decay=decay)
    check_count("warmup_steps", warmup_steps, "The paper uses 100.")
    check_number("warmup_max", warmup_max, "Pass inf not to clip during the warm-up.")

    def init(norm: Array) -> EmaState:
        return EmaState(jnp.zeros(norm.shape, jnp.int32), jnp.zeros_like(norm))

    def update(norm: Array, state: EmaState, param_norm: Any) -> tuple[Array, EmaState]:
        is_warm = state.step_count >= warmup_steps
        has_average = state.average > 0
        bound = jnp.where(has_average, factor * state.average, UNBOUNDED)
        threshold = jnp.where(is_warm, bound, jnp.minimum(warmup_max, UNBOUNDED))
        clipped = jnp.minimum(norm, threshold)
        moving = decay * state.average + (1 - decay) * clipped
        average = jnp.where(is_warm, moving, jnp.minimum(state.average, clipped))
        average = jnp.where(has_average, average, clipped)
        average = jnp.where(norm > 0, average, state.average)
        return threshold, EmaState(increment_where(state.step_count), average)

    return Rule(init, update)


class ZscoreState(NamedTuple):
    """Mean and standard deviation of the norms of each unit.

    Attributes:
        norm_count: int32[...], norms so far, saturating.
        mean: float32[...], of all norms in the warm-up, then an exponential moving average.
        std: float32[...], the standard deviation, averaged alike, as a variance.
        outlier_streak: int32[...], consecutive norms above the threshold, saturating.
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
    allow_negative: bool = False,
) -> Rule:
    """Clips norms whose z-score exceeds `z_threshold`; larger outliers get lower thresholds.

    With `z = (norm - mean) / std`, the threshold of an outlier is
    `mean + z_threshold^2 / z * std`. The clipped norm then enters both moving averages; the
    variance is taken about the new mean, as in the authors' code.

    | step | threshold |
    | --- | --- |
    | the first `warmup_steps` | none |
    | z <= z_threshold | none |
    | constant norms, then any rise | the old mean, for `relearn_after` steps |
    | then more outliers in a row | as before, but unclipped norms enter the averages |
    | a norm of zero | does not enter the averages, unless `allow_negative` |

    The fourth row is not in the paper, where the mean never follows a jump after constant norms.

    Args:
        z_threshold: in standard deviations, > 0.
        decay: of the moving averages, at least 0 and below 1.
        warmup_steps: how many norms the first mean and variance are taken of, >= 1.
        relearn_after: consecutive outliers before the averages get unclipped norms, >= 1.
        allow_negative: the values may be zero or negative, such as losses.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> clip = gcx.clip_by_global_norm(gcx.thresholds.zscore(2.0, warmup_steps=2))
        >>> state = clip.init(jnp.zeros(1))
        >>> for norm in (1.0, 3.0, 9.0):
        ...     updates, state = clip.update(jnp.array([norm]), state)
        >>> round(float(updates[0]), 2)  # 2 + 2^2 / 7 * 1
        2.57

    References:
        Kumar, Owen, Chowdhury and Guera, 2025, arXiv 2504.02507.
    """
    check_number("z_threshold", z_threshold, "The paper uses 2.5.")
    check_decays(decay=decay)
    check_count("warmup_steps", warmup_steps, "The paper uses 25.")
    check_count("relearn_after", relearn_after, "A new level counts as spikes this long.")

    def init(norm: Array) -> ZscoreState:
        count, zeros = jnp.zeros(norm.shape, jnp.int32), jnp.zeros_like(norm)
        return ZscoreState(count, zeros, zeros, count)

    def update(norm: Array, state: ZscoreState, param_norm: Any) -> tuple[Array, ZscoreState]:
        is_warm = state.norm_count >= warmup_steps
        z = (norm - state.mean) / (state.std + 1e-6)
        is_outlier = is_warm & (z > z_threshold)
        safe_z = jnp.where(is_outlier, z, 1)
        bound = state.mean + z_threshold**2 / safe_z * state.std
        threshold = jnp.where(is_outlier, bound, UNBOUNDED)
        is_clipped = is_outlier & (state.outlier_streak < relearn_after)
        observed = jnp.where(is_clipped, threshold, norm)

        # In the warm-up all norms weigh the same: mean and population variance so far.
        n = state.norm_count.astype(jnp.float32)
        weight = jnp.where(is_warm, 1 - decay, 1 / (n + 1))
        mean = state.mean + weight * (observed - state.mean)
        warmup_deviation = jnp.sqrt(n / (n + 1)) * (norm - state.mean)
        deviation = jnp.where(is_warm, observed - mean, warmup_deviation)
        next_state = ZscoreState(
            norm_count=increment_where(state.norm_count),
            mean=mean,
            std=hypotenuse(jnp.sqrt(1 - weight) * state.std, jnp.sqrt(weight) * deviation),
            outlier_streak=jnp.where(is_outlier, increment_where(state.outlier_streak), 0),
        )
        return threshold, next_state if allow_negative else where_nonzero(norm, next_state, state)

    return Rule(init, update, allow_negative=allow_negative)


@public
def quantile(target: Number = 0.5, rate: Number = 0.2, initial: Number = 1.0) -> Rule:
    """A threshold C that moves geometrically towards the `target` quantile of the norms.

    After each step `C *= exp(-rate * ([norm <= C] - target))`. C stays within 1e-30 and 1e30, so
    that it can always recover. A norm of zero leaves C as it was. For norms only: it has no meaning
    for values that may be negative.

    Args:
        target: the fraction of steps that should not be clipped, 0 to 1.
        rate: learning rate of log C, > 0.
        initial: the first C, in the unit of the norm, > 0; the paper starts at 0.1.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> clip = gcx.clip_by_global_norm(gcx.thresholds.quantile(initial=1.0))
        >>> state = clip.init(jnp.zeros(1))
        >>> for norm in (3.0, 3.0):
        ...     updates, state = clip.update(jnp.array([norm]), state)
        >>> round(float(updates[0]), 2)  # exp(0.2 * 0.5)
        1.11

    References:
        Andrew, Thakkar, McMahan and Ramaswamy, 2021 (first 2019), arXiv 1905.03871.
    """
    check_number("target", target, "0.5 aims at the median.", high=1.0, closed=True)
    check_number("rate", rate, "The paper uses 0.2.")
    check_number("initial", initial, "The paper uses 0.1.")

    def update(norm: Array, threshold: Array, param_norm: Any) -> tuple[Array, Array]:
        below = (norm <= threshold).astype(jnp.float32)
        moved = jnp.clip(threshold * jnp.exp(-rate * (below - target)), 1e-30, 1e30)
        return threshold, where_nonzero(norm, moved, threshold)

    return Rule(lambda norm: jnp.full_like(norm, initial), update)


class WindowState(NamedTuple):
    """The last values of each unit.

    Attributes:
        values: float32[window, ...], the newest last; UNBOUNDED where nothing is recorded yet.
        value_count: int32[...], values recorded so far, saturating.
    """

    values: Array
    value_count: Array


def empty_window(norm: Array, window: int) -> WindowState:
    """The state before the first value."""
    values = jnp.full((window, *norm.shape), UNBOUNDED, jnp.float32)
    return WindowState(values, jnp.zeros(norm.shape, jnp.int32))


def record(state: WindowState, value: Array, *, allow_negative: bool) -> WindowState:
    """Drops the oldest value of each unit for the new one."""
    values = jnp.concatenate([state.values[1:], value[None]])
    next_state = WindowState(values, increment_where(state.value_count))
    return next_state if allow_negative else where_nonzero(value, next_state, state)


@public
def percentile(
    percentile: Number = 10.0, window: Count = 1000, *, allow_negative: bool = False
) -> Rule:
    """A threshold at a percentile of the last norms, the current one included.

    | step | threshold |
    | --- | --- |
    | the first | the norm itself: not clipped |
    | fewer steps than `window` | of all norms so far, as published |
    | a norm of zero | not recorded, unless `allow_negative` |

    Each step sorts the window of each unit.

    Args:
        percentile: 0 to 100, linearly interpolated as in `numpy.percentile`.
        window: how many values are kept, 1 to 2^20, static; 4 * window bytes for each unit.
        allow_negative: the values may be zero or negative, such as losses.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> clip = gcx.clip_by_global_norm(gcx.thresholds.percentile(50.0, window=3))
        >>> state = clip.init(jnp.zeros(1))
        >>> for norm in (1.0, 2.0, 9.0):
        ...     updates, state = clip.update(jnp.array([norm]), state)
        >>> updates.tolist()
        [2.0]

    References:
        Seetharaman, Wichern, Pardo and Le Roux, 2020, arXiv 2007.14469.
    """
    check_number("percentile", percentile, "The paper uses 10.", high=100.0, closed=True)
    check_length("window", window)

    def update(norm: Array, state: WindowState, param_norm: Any) -> tuple[Array, WindowState]:
        state = record(state, norm, allow_negative=allow_negative)
        ordered = jnp.sort(state.values, axis=0)
        last = jnp.clip(state.value_count - 1, 0, window - 1)
        position = jnp.asarray(percentile, jnp.float32) / 100 * last.astype(jnp.float32)
        below = jnp.floor(position)
        place = jnp.minimum(below.astype(jnp.int32), last)
        low, high = (
            jnp.take_along_axis(ordered, i[None], axis=0, mode="promise_in_bounds")[0]
            for i in (place, jnp.minimum(place + 1, last))
        )
        return low + (high - low) * (position - below), state

    return Rule(
        functools.partial(empty_window, window=int(window)), update, allow_negative=allow_negative
    )


@public
def mean_std(
    z_threshold: Number = 6.0,
    window: Count = 128,
    warmup_steps: int = 64,
    *,
    ddof: int = 0,
    allow_negative: bool = False,
) -> Rule:
    """A threshold `z_threshold` standard deviations above the mean of the last norms.

    The current norm is not part of the mean. Norms above the threshold enter the history as they
    are, so a lasting rise is learned at once; but the first spike of a series hides smaller ones.
    OLMo-core and levanter skip steps by this rule.

    | step | threshold |
    | --- | --- |
    | the first `warmup_steps` | none |
    | constant norms | above the norm: the deviation counts as at least 1 % of the mean |
    | constant values, `allow_negative` | the value: no floor beyond rounding |
    | a norm of zero | not recorded, unless `allow_negative` |

    Args:
        z_threshold: in standard deviations, > 0.
        window: how many values are kept, 1 to 2^20, static.
        warmup_steps: how many values are recorded before the first threshold, >= 1.
        ddof: 0 for the population variance (levanter), 1 for the sample variance (OLMo-core).
        allow_negative: the values may be zero or negative, such as losses.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> clip = gcx.clip_by_global_norm(gcx.thresholds.mean_std(2.0, warmup_steps=2))
        >>> state = clip.init(jnp.zeros(1))
        >>> for norm in (1.0, 3.0, 9.0):
        ...     updates, state = clip.update(jnp.array([norm]), state)
        >>> updates.tolist()  # 2 + 2 * 1
        [4.0]
    """
    check_number("z_threshold", z_threshold, "Both projects use 6.")
    check_length("window", window)
    check_count("warmup_steps", warmup_steps, "levanter uses half the window.")
    check_count("ddof", ddof, "Pass 0 or 1.", low=0)

    def update(norm: Array, state: WindowState, param_norm: Any) -> tuple[Array, WindowState]:
        recorded = state.values < UNBOUNDED
        n = jnp.clip(state.value_count, 1, window).astype(jnp.float32)
        values = jnp.where(recorded, state.values, 0)
        # In units of the mean size, so that squares cannot overflow.
        size = jax.lax.stop_gradient(jnp.sum(jnp.abs(values) / n[None], axis=0))
        unit = jnp.where(size > 0, size, 1)
        mean = jnp.sum(values / n[None], axis=0) / unit
        deviations = jnp.where(recorded, values / unit[None] - mean[None], 0)
        variance = jnp.sum(deviations**2 / jnp.maximum(n - ddof, 1)[None], axis=0)
        # Without a floor a constant norm would be its own threshold.
        floor = 1e-6 if allow_negative else jnp.maximum(0.01 * mean, 1e-6)
        std = jnp.sqrt(jnp.maximum(variance, floor**2))
        threshold = unit * (mean + z_threshold * std)
        is_warm = state.value_count >= warmup_steps
        return jnp.where(is_warm, threshold, UNBOUNDED), record(
            state, norm, allow_negative=allow_negative
        )

    return Rule(
        functools.partial(empty_window, window=int(window)), update, allow_negative=allow_negative
    )
