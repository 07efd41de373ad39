"""Usual levels of the logarithms of norms and losses, and the outliers above them."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .._types import UNBOUNDED, Array, Number, Scalar
from ..clipping._threshold import Rule, apply_rule

KINDS = ("gradient", "update", "parameter")

WARM_UP, SHORT, LONG = 16, 64, 1024
"""Steps before the first threshold, and the steps after which a new value weighs 1 / SHORT."""

_WIDTH = 1.35
"""Thresholds are this times wider than `spike_threshold` says. The variance counts values far below
the mean for less, which makes it up to 18 % too small, and logarithms of norms have long tails."""

_EARLY = float(np.log(8.0))
"""Until step 2 * SHORT no threshold is above 8 times the largest value so far."""

_DRIFT = float(np.log(4.0))
"""A unit drifts if its short mean is 4 times its long mean."""

_EXPECTED = np.array([-3.0, -12.0])
"""Log-probabilities below which zeros are no coincidence: of the whole gradient, of a unit."""


class LevelState(NamedTuple):
    """The level of each value: float32[values] each.

    Attributes:
        num_values: values so far, at most LONG.
        mean: moving average over about 2 * SHORT values.
        variance: moving variance, of the same memory; values far below the mean count for less.
        top: the largest excess over the mean, which decays over LONG values.
    """

    num_values: Array
    mean: Array
    variance: Array
    top: Array


class Levels(NamedTuple):
    """What `watch` remembers: float32.

    Attributes:
        usual: the levels of all values, see `compare`.
        long_mean: [units], the mean of the gradient norm of each unit over about 2 * LONG steps.
        zero_share: [1 + units], the share of steps whose gradient was zero.
        zero_streak: [1 + units], the number of such steps in a row until now.
    """

    usual: LevelState
    long_mean: Array
    zero_share: Array
    zero_streak: Array


def init_levels(num_kinds: int, num_units: int) -> Levels:
    """The levels before the first step."""
    # A buffer for each field: one buffer cannot be donated twice.
    size = num_kinds * (1 + num_units) + 2
    usual = LevelState(*(jnp.zeros(size, jnp.float32) for _ in LevelState._fields))
    zeros = (jnp.zeros(n, jnp.float32) for n in (num_units, 1 + num_units, 1 + num_units))
    return Levels(usual, *zeros)


def outliers(
    z_threshold: Any, floor: Any, memory: Any, tail: Any = 0.0, is_log: Any = True
) -> Rule:
    """A threshold some standard deviations above the moving average of values of any sign.

    An outlier enters the average as the threshold, so that later outliers are still detected, and
    with weight 1 / 4, so that a lasting rise is learned within some steps.

    Args:
        z_threshold: in standard deviations; elementwise, like the other arguments.
        floor: the smallest standard deviation.
        memory: the number of values after which a new one weighs `1 / memory`.
        tail: the smallest threshold above the mean, relative to the largest excess so far: values
            with a long tail get a higher threshold.
        is_log: whether the values are logarithms; the standard deviation of other values is at
            least 1 % of their mean.
    """

    def init(value: Array) -> LevelState:
        return LevelState(*(jnp.zeros_like(value) for _ in LevelState._fields))

    def update(value: Array, state: LevelState, param_norm: Any) -> tuple[Array, LevelState]:
        count, mean, variance, top = state
        size = abs(mean)
        deviation = jnp.maximum(jnp.sqrt(variance), jnp.where(is_log, floor, 0.01 * size + floor))
        # Twice as wide after 16 values as after 64: the variance is not well known by then.
        width = _WIDTH * (1 + jnp.clip((SHORT - count) / (SHORT - WARM_UP), 0, 1))
        bound = jnp.maximum(z_threshold * width * deviation, tail * top)
        # While a loss falls fast its variance is large, but not its largest value.
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
    """How the values of a step compare with their levels.

    Attributes:
        thresholds: [kinds], of the norm of the whole tree.
        loss_threshold: of the loss.
        rises: [kinds, units], how many times its usual norm a unit has, in proportion to the other
            units; 0 where it is below its threshold.
        drifts: [units], how many times its long-term norm a unit has, 0 where that is usual.
        dead: bool[1 + units], whether a gradient has become zero: of the whole tree, of a unit.
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
    """Compares norms, float32[1 + units] of each kind, and the loss of a step with their levels.

    Updates and parameters are compared where `is_step`. Norms and losses have long tails and look
    normally distributed as logarithms; a loss may be negative and is then compared as it is.
    """
    norms = jnp.stack(list(by_kind.values()))
    units = norms.shape[1] - 1
    is_kind = np.array([[kind == other for other in KINDS] for kind in by_kind])
    # Rises below a factor of 2 are no incident, and below 3 none of an update: a schedule may
    # restart. The last two values are the logarithm of the loss, and the loss.
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

    measured = jnp.where(is_kind[:, :1] | is_step, norms, 0)  # the log of 0 enters no level
    logs = jnp.log(measured)
    mean, count = (x[:-2].reshape(norms.shape) for x in levels.usual[1::-1])
    shared = _of_others(jnp.where(jnp.isfinite(logs) & (count > 0), logs - mean, jnp.nan))
    value = jnp.float32(jnp.inf) if loss is None else loss.astype(jnp.float32)
    of_loss = jnp.stack([jnp.log(jnp.maximum(value, 0)), value])
    values = jnp.append((logs - shared).reshape(-1), of_loss)
    limits, usual = apply_rule(rule, values, levels.usual)
    # A level follows what all units do together.
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
    """For each unit the mean change of the other units; 0 for the whole tree. NaN is left out.

    A hard batch raises all units together: the change relative to the others says more. No unit
    moves this mean by more than a factor of 20.
    """
    known = ~jnp.isnan(changes[:, 1:])
    bounded = jnp.where(known, jnp.clip(changes[:, 1:], -3, 3), 0)
    total, count = (jnp.sum(x, 1, keepdims=True) for x in (bounded, known.astype(jnp.float32)))
    others = (total - bounded) / jnp.maximum(count - known.astype(jnp.float32), 1)
    return jnp.concatenate([jnp.zeros_like(total), others], 1)


def _drifts(
    long_mean: Array, usual: LevelState, is_known: Array, units: int
) -> tuple[Array, Array]:
    """The units that slowly left the others, and the long means, which then begin anew."""
    mean, count = usual.mean[1 : 1 + units], usual.num_values[1 : 1 + units]
    steps = jnp.where(is_known, jnp.maximum(count, 1), UNBOUNDED)
    long_mean = long_mean + (mean - long_mean) / steps
    changes = mean - long_mean
    shared = _of_others(jnp.append(0, changes)[None])[0, 1:]
    is_drift = is_known & (count >= SHORT) & (changes - shared > _DRIFT) & (units > 1)
    drifts = jnp.where(is_drift, jnp.exp(jnp.minimum(changes - shared, 80)), 0)
    return drifts, jnp.where(is_drift, mean, long_mean)


def _dead(levels: Levels, norms: Array, count: Scalar) -> tuple[Array, Array, Array]:
    """The gradients that have become zero at this step, beyond coincidence; shares, streaks."""
    least = np.repeat(_EXPECTED, [1, norms.size - 1])

    def is_dead(share: Array, streak: Array) -> Array:
        return (count >= WARM_UP) & (streak * jnp.log(share) < least)

    is_zero = (norms == 0).astype(jnp.float32)
    # Half a zero is added to the share: a gradient that was never zero may be so once.
    prior = jnp.maximum(levels.zero_share, 0.5 / (jnp.minimum(count, LONG) + 1))
    streak = jnp.where(norms == 0, levels.zero_streak + 1, 0)
    dead = is_dead(prior, streak) & ~is_dead(prior, levels.zero_streak)
    share = levels.zero_share + (is_zero - levels.zero_share) / jnp.minimum(count + 1, LONG)
    # Where all units are zero, the whole is.
    return dead & (np.arange(norms.size) == 0) | dead & (norms[0] > 0), share, streak


def _exp(x: Array) -> Array:
    return jnp.where(x < 88, jnp.exp(jnp.minimum(x, 88)), UNBOUNDED)
