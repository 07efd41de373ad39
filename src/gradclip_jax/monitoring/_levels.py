"""Moving averages of the logarithms of norms and losses, and detection of outliers."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .._types import UNBOUNDED, Array, HostArray, Number, Scalar
from ..clipping._threshold import Rule, apply_rule

KINDS = ("gradient", "update", "parameter")

WARM_UP, SHORT, LONG = 16, 64, 1024
"""Number of steps before the first threshold, and window sizes of the moving averages."""

_WIDTH = 1.35
"""Factor by which `spike_threshold` is multiplied. The variance, in which values far below the mean
have a lower weight, is up to 18 % too small, and the logarithms of norms have long tails."""

_EARLY = float(np.log(8.0))
"""Until step 2 * SHORT, thresholds are at most 8 times the largest value so far."""

_DRIFT = float(np.log(3.0))
"""A unit has drifted if its short-term mean is 3 times its long-term mean, or up to 8 times in the
first 8 * SHORT steps."""

_EXPECTED = np.array([-3.0, -12.0])
"""Log-probabilities below which zero gradients are an incident: for the whole tree, for a unit."""


class LevelState(NamedTuple):
    """Moving statistics of each value, each float32[values].

    Attributes:
        num_values: Number of values so far, at most LONG.
        mean: Moving average over about 2 * SHORT values.
        variance: Moving variance over about 2 * SHORT values, with a lower weight for values far
            below the mean.
        top: Largest difference from the mean, which decays exponentially over LONG values.
    """

    num_values: Array
    mean: Array
    variance: Array
    top: Array


class Levels(NamedTuple):
    """Statistics of previous steps that `watch` compares a step with, all float32.

    Attributes:
        usual: Moving statistics of all norms and losses; see `compare`.
        long_mean: [units], mean logarithm of each unit's gradient norm over about 2 * LONG steps.
        zero_share: [1 + units], share of steps with a zero gradient.
        zero_streak: [1 + units], number of consecutive steps with a zero gradient.
    """

    usual: LevelState
    long_mean: Array
    zero_share: Array
    zero_streak: Array


def init_levels(num_kinds: int, num_units: int) -> Levels:
    """Return the statistics before the first step."""
    # Use one buffer per field, because a buffer cannot be donated twice.
    size = num_kinds * (1 + num_units) + 2
    usual = LevelState(*(jnp.zeros(size, jnp.float32) for _ in LevelState._fields))
    zeros = (jnp.zeros(n, jnp.float32) for n in (num_units, 1 + num_units, 1 + num_units))
    return Levels(usual, *zeros)


def outliers(
    z_threshold: Number,
    floor: HostArray,
    memory: HostArray,
    tail: HostArray | float = 0.0,
    is_log: HostArray | bool = True,
) -> Rule:
    """Threshold rule: a moving average plus a multiple of the standard deviation.

    An outlier is replaced by the threshold before it is averaged, so that later outliers are still
    detected. Its weight is 1 / 4, so that the average adapts to a lasting increase in a few steps.

    Args:
        z_threshold: Number of standard deviations; elementwise, like the other arguments.
        floor: Smallest standard deviation.
        memory: Window size of the average; a new value has the weight `1 / memory`.
        tail: Smallest distance of the threshold from the mean, relative to the largest excess so
            far, which raises the threshold for long-tailed values.
        is_log: Whether the values are logarithms. The standard deviation of other values is at
            least 1 % of their mean.
    """

    def init(value: Array) -> LevelState:
        return LevelState(*(jnp.zeros_like(value) for _ in LevelState._fields))

    def update(value: Array, state: LevelState, param_norm: Any) -> tuple[Array, LevelState]:
        count, mean, variance, top = state
        size = abs(mean)
        deviation = jnp.maximum(jnp.sqrt(variance), jnp.where(is_log, floor, 0.01 * size + floor))
        # After 16 values the variance is uncertain, so the threshold is twice as wide as after 64.
        width = _WIDTH * (1 + jnp.clip((SHORT - count) / (SHORT - WARM_UP), 0, 1))
        bound = jnp.maximum(z_threshold * width * deviation, tail * top)
        # The variance of a quickly decreasing loss is large, but its largest value is not.
        early = jnp.maximum(1, count / (2 * SHORT))
        rise = jnp.where(is_log, _EARLY, (np.exp(_EARLY) - 1) * (top + size))
        bound = jnp.minimum(bound, jnp.where(z_threshold < jnp.inf, top + early * rise, jnp.inf))
        bound = jnp.where(count >= WARM_UP, bound, UNBOUNDED)
        change = jnp.minimum(value - mean, bound)
        steps = jnp.minimum(count + 1, memory)
        weight = jnp.where(value - mean > bound, jnp.maximum(1 / steps, 0.25), 1 / steps)
        after = LevelState(
            num_values=jnp.minimum(count + 1, LONG),
            mean=mean + weight * change,
            variance=(1 - 1 / steps) * (variance + jnp.maximum(change, -deviation) ** 2 / steps),
            top=jnp.maximum((1 - 1 / LONG) * top, (1 - weight) * change),
        )
        return jnp.where(bound < UNBOUNDED, mean + bound, UNBOUNDED), after

    return Rule(init, update, allow_negative=True)


class Comparison(NamedTuple):
    """Comparison of the norms and the loss of a step with previous steps.

    Attributes:
        thresholds: [kinds], threshold for the norm of the whole tree.
        loss_threshold: Threshold for the loss.
        rises: [kinds, units], ratio of each unit's norm to its moving average, relative to the
            other units; 0 below the threshold.
        drifts: [units], ratio of each unit's gradient norm to its long-term mean; 0 without a
            drift.
        dead: bool[1 + units], whether the gradient of the tree or of a leaf or layer has become
            zero.
    """

    thresholds: Array
    loss_threshold: Scalar
    rises: Array
    drifts: Array
    dead: Array


def compare(
    levels: Levels,
    by_kind: dict[str, Array],
    loss: Scalar | None,
    z_threshold: Number,
    *,
    is_step: Scalar,
    step: Scalar,
) -> tuple[Comparison, Levels]:
    """Compare the norms and the loss of a step with previous steps.

    `norms` contains float32[1 + units] for each kind.

    Updates and parameters are compared only if `is_step`. Norms and losses are compared as
    logarithms, because their distributions have long tails. The loss is also compared directly,
    because it may be negative.
    """
    norms = jnp.stack(list(by_kind.values()))
    units = norms.shape[1] - 1
    is_kind = np.array([[kind == other for other in KINDS] for kind in by_kind])
    # Rises below a factor of 2 are not incidents, and of updates below 3, because a schedule may
    # restart. The last two values are the logarithm of the loss and the loss itself.
    memory = (is_kind @ np.array([SHORT, SHORT, 8.0])).astype(np.float32)
    columns = [
        (np.log(is_kind @ np.array([2.0, 3.0, 2.0])) / (6 * _WIDTH), (0.05, 1e-6)),
        (memory, (SHORT, SHORT)),
        (np.ones(len(by_kind)), (1, 1)),
    ]
    least, memories, ones = (
        np.append(np.repeat(of_kinds, 1 + units), of_loss).astype(np.float32)
        for of_kinds, of_loss in columns
    )
    place = np.arange(ones.size)
    is_whole = (place % (1 + units) == 0) | (place >= norms.size)
    rule = outliers(z_threshold, least, memories, 2 * is_whole * ones, place < place[-1])

    measured = jnp.where(is_kind[:, :1] | is_step, norms, 0)  # log(0) does not enter the average
    logs = jnp.log(measured)
    mean, count = (x[:-2].reshape(norms.shape) for x in levels.usual[1::-1])
    shared = _of_others(jnp.where(jnp.isfinite(logs) & (count > 0), logs - mean, jnp.nan))
    value = jnp.float32(jnp.inf) if loss is None else loss.astype(jnp.float32)
    of_loss = jnp.stack([jnp.log(jnp.maximum(value, 0)), value])
    values = jnp.append((logs - shared).reshape(-1), of_loss)
    limits, usual = apply_rule(rule, values, levels.usual)
    # Shift each mean by the change that all leaves share.
    weight = jnp.where(jnp.isfinite(logs), 1 / jnp.minimum(count + 1, memory[:, None]), 0)
    followed = jnp.pad((shared * weight).reshape(-1), (0, 2))
    usual = usual._replace(mean=usual.mean + followed)

    limit = limits[:-2].reshape(norms.shape)
    excess = logs - shared - mean
    is_rise = jnp.isfinite(excess) & (logs - shared > limit)
    rises = jnp.where(is_rise, jnp.exp(jnp.minimum(excess, 80)), 0)[:, 1:]
    is_low = limits[-2] < UNBOUNDED
    loss_threshold = jnp.where(is_low, jnp.maximum(limits[-1], _exp(limits[-2])), limits[-1])

    drifts, long_mean = _drifts(levels.long_mean, usual, jnp.isfinite(logs[0, 1:]), units)
    dead, share, streak = _dead(levels, norms[0], step.astype(jnp.float32))
    after = Levels(usual, long_mean, share, streak)
    return Comparison(_exp(limit[:, 0]), loss_threshold, rises, drifts, dead), after


def _of_others(changes: Array) -> Array:
    """Return the mean change of all other leaves for each leaf; 0 for the whole tree.

    A difficult batch raises the norms of all leaves, so changes are measured relative to the other
    leaves. NaN is ignored. Each change is limited to a factor of 20.
    """
    known = ~jnp.isnan(changes[:, 1:])
    bounded = jnp.where(known, jnp.clip(changes[:, 1:], -3, 3), 0)
    total, count = (jnp.sum(x, 1, keepdims=True) for x in (bounded, known.astype(jnp.float32)))
    others = (total - bounded) / jnp.maximum(count - known.astype(jnp.float32), 1)
    return jnp.concatenate([jnp.zeros_like(total), others], 1)


def _drifts(
    long_mean: Array, usual: LevelState, is_known: Array, units: int
) -> tuple[Array, Array]:
    """Detect gradient norms that slowly drift from the others, and reset their long-term means."""
    mean, count = usual.mean[1 : 1 + units], usual.num_values[1 : 1 + units]
    steps = jnp.where(is_known, jnp.maximum(count, 1), UNBOUNDED)
    long_mean = long_mean + (mean - long_mean) / steps
    changes = mean - long_mean
    shared = _of_others(jnp.append(0, changes)[None])[0, 1:]
    # Gradient norms of single leaves change early in training, so the threshold is larger at first.
    threshold = _DRIFT * jnp.maximum(1, 2 - count / (8 * SHORT))
    is_drift = is_known & (count >= SHORT) & (changes - shared > threshold) & (units > 1)
    drifts = jnp.where(is_drift, jnp.exp(jnp.minimum(changes - shared, 80)), 0)
    return drifts, jnp.where(is_drift, mean, long_mean)


def _dead(levels: Levels, norms: Array, count: Scalar) -> tuple[Array, Array, Array]:
    """Detect gradients that have become zero, and update the counts of zero gradients."""
    least = np.repeat(_EXPECTED, [1, norms.size - 1])

    def is_dead(share: Array, streak: Array) -> Array:
        return (count >= WARM_UP) & (streak * jnp.log(share) < least)

    is_zero = (norms == 0).astype(jnp.float32)
    # Add half a count, so that a single zero gradient is not an incident.
    prior = jnp.maximum(levels.zero_share, 0.5 / (jnp.minimum(count, LONG) + 1))
    streak = jnp.where(norms == 0, levels.zero_streak + 1, 0)
    dead = is_dead(prior, streak) & ~is_dead(prior, levels.zero_streak)
    share = levels.zero_share + (is_zero - levels.zero_share) / jnp.minimum(count + 1, LONG)
    # If the whole gradient is zero, report only the whole tree.
    return dead & (np.arange(norms.size) == 0) | dead & (norms[0] > 0), share, streak


def _exp(x: Array) -> Array:
    return jnp.where(x < 88, jnp.exp(jnp.minimum(x, 88)), UNBOUNDED)
