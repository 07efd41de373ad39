"""Moving averages of the logarithms of norms and losses, and detection of outliers."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from .._types import UNBOUNDED, Array, HostArray, Number, Scalar
from ..clipping._threshold import Rule

KINDS = ("gradient", "update", "parameter")

WARM_UP, SHORT, LONG = 16, 64, 1024
"""Number of steps without thresholds, and window sizes of the moving averages."""

_WIDTH = 1.35
"""Factor by which `spike_threshold` is multiplied. The variance, in which values far below the mean
have a lower weight, is up to 18 % too small, and the logarithms of norms have long tails."""

_EARLY = math.log(8.0)
"""Until step 2 * SHORT, thresholds are at most 8 times the largest previous value."""

_DRIFT = math.log(2.5)
"""A leaf or layer has drifted if its short-term mean is 2.5 times its long-term mean. In the
first 8 * SHORT steps, up to 8 times are allowed."""

_OWN_DRIFT = math.log(1.25)
"""Smallest drift if it is not compared with the other leaves."""

_UPDATES = 16
"""A parameter has jumped if its norm exceeds its average by 16 times the usual update norm."""

_OF_KINDS: dict[str, tuple[float, float]] = {
    "gradient": (2.0, SHORT),
    "update": (3.0, SHORT),  # a schedule may restart
    "parameter": (2.0, 8),
    "loss": (1.5, SHORT),
}
"""Smallest ratio of an outlier to its average, and window size of the moving average."""

_EXPECTED = np.array([-3.0, -12.0])
"""Log-probabilities below which zero gradients are reported, for the whole tree and for a leaf."""

_SURPRISE = 9.0
"""Negative log-probability above which zero gradients of a leaf are reported, given the uncertainty
of the share of zeros."""


class LevelState(NamedTuple):
    """Moving statistics of each value; all arrays are float32[values].

    Attributes:
        num_values: Number of previous values, at most LONG.
        mean: Moving average over about 2 * SHORT values.
        variance: Moving variance over about 2 * SHORT values, with a lower weight for values far
            below the mean.
        top: Largest excess over the mean, which decays exponentially over LONG values.
    """

    num_values: Array
    mean: Array
    variance: Array
    top: Array


class Levels(NamedTuple):
    """Statistics of previous steps; all arrays are float32[kinds + 1, 1 + units].

    Each kind of norm has one row, with the whole tree in the first column, followed by the leaves
    or layers. The last row starts with the statistics of the logarithm of the loss and of the loss.

    Attributes:
        num_values: Number of previous values, at most LONG.
        mean: Moving average of the logarithms of norms and losses, and of the loss itself.
        variance: Moving variance.
        top: Largest difference from the mean.
        long_mean: Moving average over about 2 * LONG steps.
        zero_share: Fraction of steps in which the norm was zero, before the current streak.
        zero_streak: Number of consecutive steps in which the norm was zero, negative after it was
            reported.
        longest_streak: Largest number of consecutive zeros before the current streak.
    """

    num_values: Array
    mean: Array
    variance: Array
    top: Array
    long_mean: Array
    zero_share: Array
    zero_streak: Array
    longest_streak: Array


def init_levels(num_kinds: int, is_empty: list[bool]) -> Array:
    """Initialize the statistics as one array, stacked in the order of the fields of `Levels`.

    `is_empty` states for each unit whether it has no elements. Its gradient, which is always zero,
    counts as reported.
    """
    levels = np.zeros((len(Levels._fields), num_kinds + 1, 1 + len(is_empty)), np.float32)
    levels[Levels._fields.index("zero_streak"), 0, 1:] = np.where(is_empty, -1, 0)
    return jnp.array(levels)


def outliers(
    z_threshold: Number,
    floor: HostArray,
    memory: HostArray,
    tail: HostArray | float = 0.0,
    is_log: HostArray | bool = True,
) -> Rule:
    """Threshold a multiple of the standard deviation above a moving average.

    Outliers are clipped to the threshold before averaging, so that later outliers are still
    detected. The weight of an outlier is 1 / 4, so that the average adapts to a lasting increase in
    a few steps.

    Args:
        z_threshold: Number of standard deviations; all arguments are applied elementwise.
        floor: Smallest standard deviation.
        memory: Window size of the average; a new value has the weight `1 / memory`.
        tail: Minimum of `(threshold - mean) / top`, which raises the threshold for long-tailed
            values.
        is_log: Whether the values are logarithms. The standard deviation of other values is at
            least 1 % of their mean.
    """

    def init(value: Array) -> LevelState:
        return LevelState(*(jnp.zeros_like(value) for _ in LevelState._fields))

    def update(value: Array, state: LevelState, param_norm: object) -> tuple[Array, LevelState]:
        count, mean, variance, top = state
        size = abs(mean)
        deviation = jnp.maximum(jnp.sqrt(variance), jnp.where(is_log, floor, 0.01 * size + floor))
        # The variance of 16 values is uncertain, so the threshold is twice as wide as for 64
        # values.
        width = _WIDTH * (1 + jnp.clip((SHORT - count) / (SHORT - WARM_UP), 0, 1))
        bound = jnp.maximum(z_threshold * width * deviation, tail * top)
        # While the loss decreases quickly, its variance is large, so also use its largest value.
        early = jnp.maximum(1, count / (2 * SHORT))
        rise = jnp.where(is_log, _EARLY, (math.exp(_EARLY) - 1) * (top + size))
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
    """Outliers, drifts and zero gradients found by `compare`.

    Attributes:
        thresholds: [kinds + 1], threshold for the norm of the whole tree; the last is unused.
        loss_threshold: Threshold for the loss.
        rises: [kinds, units], ratio of each unit's norm to its moving average, relative to the
            other units; 0 below the threshold.
        jumped: Whether the norm of all parameters is above its threshold.
        drifts: [units], ratio of each unit's gradient norm to its long-term mean; 0 without a
            drift.
        dead: bool[1 + units], whether the gradient of the tree or of a leaf or layer has become
            zero.
    """

    thresholds: Array
    loss_threshold: Scalar
    rises: Array
    jumped: Scalar
    drifts: Array
    dead: Array


@jax.jit
def compare(
    levels: Array,
    norms: Array,
    loss: Scalar | None,
    z_threshold: Number,
    *,
    has_gradient: Scalar,
    is_step: Scalar,
) -> tuple[Comparison, Array]:
    """Compare the norms and loss of the current step with previous steps.

    `norms` is float32[kinds, 1 + units]. Updates and parameters are compared only if the optimizer
    ran (`is_step`), and gradients unless the call only flushes an accumulation (`has_gradient`).
    Norms and losses are compared as logarithms, because their distributions have long tails. The
    loss is also compared directly, because it may be negative.

    All values and statistics are stored in one matrix, because compile time on CPU grows with the
    number of kernels.
    """
    past = Levels(*jnp.unstack(levels))
    size = past.mean.shape[1]
    row, column = np.arange(len(norms) + 1)[:, None], np.arange(size)
    is_loss = row == len(norms)
    is_log = ~(is_loss & (column == 1))
    of_rows = [_OF_KINDS[kind] for kind in (*KINDS[: len(norms)], "loss")]
    least, memory = np.array(of_rows, np.float32).T[..., None]
    floor = np.where(is_log, np.log(least) / (6 * _WIDTH), np.float32(1e-6))
    tail = np.where(is_loss | (column == 0), np.float32(2), 0)
    rule = outliers(z_threshold, floor, memory, tail, is_log)

    value = jnp.float32(jnp.inf) if loss is None else loss.astype(jnp.float32)
    losses = jnp.pad(jnp.stack([jnp.maximum(value, 0), value]), (0, size - 2))
    is_measured = is_step | is_loss | (row == 0)
    measured = jnp.where(is_measured, jnp.vstack([norms, losses]), 0)
    # Norms of zero are not averaged, because their logarithm is infinite.
    values = jnp.where(is_log, jnp.log(measured), measured)
    is_known = jnp.isfinite(values) & ~is_loss
    changes = jnp.stack([values - past.mean, past.mean - past.long_mean])
    shared = _of_others(changes, (is_known & (past.num_values > 0))[None])
    excess, drift = changes - shared
    shared = shared[0]

    given, before = values - shared, LevelState(*past[:4])
    is_finite = jnp.isfinite(given)
    limits, usual = rule.update(jnp.where(is_finite, given, 0), before, None)
    usual = optax.tree.where(is_finite, usual, before)
    is_rise = jnp.isfinite(excess) & (values - shared > limits)
    # If all other norms decrease, a constant norm is not an outlier.
    is_rise &= changes[0] > np.log(least)
    jumped = jnp.array(False)
    if len(norms) == len(KINDS):  # a small parameter may change its sign
        usual_norm = jnp.where(past.num_values > 0, jnp.exp(past.mean), 0)
        is_rise &= (row != 2) | (measured > usual_norm[2:3] + _UPDATES * usual_norm[1:2])
        jumped = is_rise[2, 0]
    rises = jnp.where(is_rise, jnp.exp(jnp.minimum(excess, 80)), 0)[:-1, 1:]
    thresholds = _exp(limits[:, 0])
    # Negative losses have no logarithm and are only compared directly.
    has_log = (limits[-1, 0] < UNBOUNDED) | (past.mean[-1, 1] >= 0)
    of_log = jnp.where(has_log, thresholds[-1], -jnp.inf)
    loss_threshold = jnp.maximum(limits[-1, 1], of_log)

    is_drift = _is_drift(past, drift) & is_known & (size > 2)
    drifts = jnp.where(is_drift, jnp.exp(jnp.minimum(drift, 80)), 0)[0, 1:]
    # After a drift, reset the long-term mean to the short-term mean.
    rate = jnp.where(is_drift, 1, 1 / jnp.maximum(past.num_values, 1))
    long_mean = past.long_mean + jnp.where(is_known, rate, 0) * (past.mean - past.long_mean)

    dead, *zeros = _dead(past, measured == 0)
    zeros = [jnp.where(has_gradient, x, old) for x, old in zip(zeros, past[5:], strict=True)]
    # If the whole gradient is zero, report only the whole tree.
    dead = dead[0] & has_gradient & ((column == 0) | (measured[0, 0] > 0))
    # The rule averaged the changes relative to the other leaves, so add the mean change.
    weight = jnp.where(is_known, 1 / jnp.minimum(past.num_values + 1, memory), 0)
    mean = usual.mean + weight * shared
    after = [usual.num_values, mean, usual.variance, usual.top, long_mean, *zeros]
    found = Comparison(thresholds, loss_threshold, rises, jumped, drifts, dead)
    return found, jnp.stack(after)


def _of_others(changes: Array, is_known: Array) -> Array:
    """For each leaf, compute the mean change of the other leaves; 0 for the whole tree.

    A difficult batch raises the norms of all leaves, so each leaf is compared with the others. A
    decrease is limited to a factor of 20, because the norm of a single leaf may vanish. The largest
    change of the others is limited to 20 times the mean of the rest, because one leaf must not hide
    a fault in another.
    """
    is_unit = (np.arange(changes.shape[-1]) > 0).reshape(1, 1, -1)
    is_counted = jnp.broadcast_to(is_known & is_unit, changes.shape)
    bounded = jnp.where(is_counted, jnp.maximum(changes, -3), 0)
    known = is_counted.astype(jnp.float32)
    total, count = jnp.sum(jnp.stack([bounded, known]), -1, keepdims=True)
    first, second = jnp.split(lax.top_k(jnp.where(is_counted, bounded, -jnp.inf), 2)[0], 2, -1)
    # The following values are those of the other leaves.
    largest = jnp.where(bounded < first, first, second)
    total, count = total - bounded, count - known
    limit = (total - largest) / jnp.maximum(count - 1, 1) + 3
    total = jnp.where(count > 1, total - jnp.maximum(largest - limit, 0), total)
    return jnp.where(is_unit, total / jnp.maximum(count, 1), 0)


def _is_drift(past: Levels, drift: Array) -> Array:
    """Return whether the short-term mean of a norm is far above its long-term mean.

    `drift` is relative to the other leaves. Gradient norms of single leaves change early in
    training, so the threshold is larger then.
    """
    threshold = _DRIFT * jnp.maximum(1, 2.4 - 1.4 * past.num_values / (8 * SHORT))
    # If all other norms decrease, a constant norm has not drifted.
    has_risen = past.mean - past.long_mean > _OWN_DRIFT
    return (past.num_values >= SHORT) & (drift > threshold) & has_risen


def _dead(past: Levels, is_zero: Array) -> tuple[Array, Array, Array, Array]:
    """Detect leaves whose gradient has become zero, and update the statistics of zero norms.

    A streak of n zeros is reported once, if it is longer than all earlier streaks and the
    probability `zero_share^n` is small. The share of a leaf with few nonzero gradients is
    uncertain: after k of them in m steps, the probability of n zeros is about `(m / (m + n))^k`.
    """
    is_tree = (np.arange(is_zero.shape[1]) == 0)[None]
    least = np.where(is_tree, *_EXPECTED).astype(np.float32)
    streak = jnp.abs(past.zero_streak)
    length = streak + 1
    count = past.num_values[0, 0] + streak[0, 0]  # number of measured steps, at most about LONG
    # Use at least half a zero step, so that a single zero gradient is not an incident.
    num_before = jnp.clip(count - streak, 0, LONG)
    share = jnp.maximum(past.zero_share, 0.5 / (num_before + 1))
    is_dead = (length * jnp.log(share) < least) & (length > past.longest_streak)
    num_nonzero = past.num_values
    surprise = num_nonzero * jnp.log1p(length / jnp.maximum(num_before, 1))
    is_dead &= is_tree | (num_nonzero == 0) | (surprise > _SURPRISE)
    was_reported = past.zero_streak < 0
    dead = is_zero & is_dead & ~was_reported & (count >= WARM_UP)
    weight = jnp.minimum(length / jnp.minimum(count + 1, LONG), 1)
    after = past.zero_share + weight * (streak / length - past.zero_share)
    return (
        dead,
        jnp.where(is_zero, past.zero_share, after),
        jnp.where(is_zero, jnp.where(dead | was_reported, -length, length), 0),
        jnp.where(is_zero, past.longest_streak, jnp.maximum(past.longest_streak, streak)),
    )


def _exp(x: Array) -> Array:
    return jnp.where(x < 88, jnp.exp(jnp.minimum(x, 88)), UNBOUNDED)
