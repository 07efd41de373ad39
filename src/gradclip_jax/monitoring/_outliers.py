"""Outliers, drifts and zeros among the norms and losses of consecutive rows.

Each value is compared with the values of previous rows. `x` is the logarithm of a norm or of the
RMS of a tap, or a loss and its logarithm. Over the last `WINDOW` rows,

    level  = median of x
    excess = (x - level) - (median of x - level over all units, if x belongs to a unit)
    usual  = median of excess
    spread = 1.4826 * median of |excess - usual|
    bound  = max(min(WIDTH * spread, max(CAP, LEAST_WIDTH * spread)), tail)

and x is an outlier if `excess - usual > bound` and `x - level > FLOOR`. `tail` is the excess that
one in `10 * RARITY` rows reaches without a fault, extrapolated from the last LONG rows without
outliers. A loss that is always positive must be an outlier itself and as a logarithm.

Statistics are computed at fixed rows, at every row at first and then at every eighth row, so that
incidents do not depend on how rows are split into reads. A few early outliers do not change them.
The constants were chosen on 18 public training logs, and on the seven models of
`benchmarks/faults/detect.py` with the seed 2.
"""

import math
from typing import NamedTuple

import numpy as np

from .._types import HostArray

WARM_UP, WINDOW, LONG = 16, 128, 2048
"""Rows without bounds, rows of a median, and rows of a tail."""

EARLY, REFRESH = 64, 8
"""Rows in which bounds are computed at every row, and rows between two computations afterwards."""

WIDTH, LOSS_WIDTH = 8.0, 6.0
"""Bounds of norms and of the loss in standard deviations."""

CAP, LEAST_WIDTH = math.log(6.0), 3.25
"""Largest bound in standard deviations, as a ratio, and the least number of them. Without the
first, a norm that varies by a decade never is an outlier."""

RARITY, UNIT_RARITY = 1000.0, 10_000.0
"""One in so many excesses above the 90 % quantile is an outlier, if excesses are independent."""

AFTER, TAIL_REFRESH = 32, 64
"""Rows after an outlier that are not used for the tail, and rows between two estimates of it."""

LIMIT, LIMIT_WIDTH = math.log(20.0), 3.5
"""Largest bound of a gradient norm, and the same in standard deviations."""

FLOORS = {"gradient": 2.0, "update": 3.0, "parameter": 2.0, "tap": 3.0, "loss": 1.5}
"""Smallest ratio of an outlier to its level."""

NUM_UPDATES = 16
"""A parameter has jumped if its norm exceeds its level by 16 times the usual update norm."""

PEAK_DECAY = math.log(3.0) / 2048
"""Decay per row of the largest level of an update norm."""

BLOCK, SHORT, GAP, MEMORY = 16, 3, 1, 64
"""Drifts compare the last 48 rows with up to 1,024 rows, in blocks of 16 rows."""

DRIFT, OWN_DRIFT, LONE_DRIFT = math.log(2.5), math.log(1.25), math.log(5.0)
"""Smallest rise of a drift relative to the other units, and of its own; and of a single norm."""

RARE_TREE, RARE_UNIT, SURPRISE = -3.0, -12.0, 9.0
"""Log-probabilities below which zeros are reported."""

EARLY_RATIO = 8.0
"""In the first WINDOW rows, 8 times the largest previous value is an outlier."""


def quantile(values: HostArray, share: float) -> HostArray:
    """Return a lower quantile of the known values along the first axis; NaN if there are none."""
    values = np.sort(values, axis=0)  # NaN last
    count = np.maximum(np.sum(~np.isnan(values), axis=0) - 1, 0)
    return np.take_along_axis(values, (share * count).astype(int)[None], 0)[0]


def median(values: HostArray) -> HostArray:
    """Return the lower median of the known values along the first axis; NaN if there are none."""
    return quantile(values, 0.5)


def _tail(values: HostArray, rarity: HostArray) -> HostArray:
    """Return the value that one in `rarity` of the values above the 90 % quantile exceeds.

    The values above the quantile are fitted by a generalized Pareto distribution with a shape of
    at most 0 (an exponential tail) from their mean and variance (Hosking and Wallis, 1987).
    """
    # Few values say little about rare ones.
    rarity = np.maximum(rarity * np.minimum(np.sum(~np.isnan(values), axis=0) / 1024, 1), 1)
    start = quantile(values, 0.9)
    is_above = values > start
    count = np.maximum(np.sum(is_above, axis=0), 1)
    above = np.where(is_above, values - start, 0)
    mean = np.sum(above, axis=0) / count
    variance = np.sum(np.square(above), axis=0) / count - mean**2
    ratio = np.clip(mean**2 / np.maximum(variance, 1e-12), 1.0, 1.6)
    shape, scale = 0.5 * (1 - ratio) - 1e-6, 0.5 * mean * (1 + ratio)
    return start + scale / shape * (rarity**shape - 1)


class Outliers(NamedTuple):
    """Result of `Levels.compare`, arrays of shape [rows, columns].

    Attributes:
        is_outlier: Whether a value is an outlier.
        excess: Change of the value relative to its level and to the other units.
        threshold: Smallest value that would be an outlier.
    """

    is_outlier: HostArray
    excess: HostArray
    threshold: HostArray


class Levels:
    """Outliers of each column relative to the previous rows; see the module.

    Args:
        kinds: Kind of each column, a key of `FLOORS`. The last column is the loss itself.
        groups: Columns that are compared with each other.
    """

    def __init__(self, kinds: HostArray, groups: list[slice]):
        size = len(kinds)
        self.kinds, self.groups, self.count = kinds, groups, 0
        is_unit = np.zeros(size, bool)
        for group in groups:
            is_unit[group] = True
        self.is_unit, self.width = is_unit, np.where(kinds == "loss", LOSS_WIDTH, WIDTH)
        self.rarity = np.where(is_unit, UNIT_RARITY, RARITY)
        self.least, self.cap = np.log([FLOORS[kind] for kind in kinds]), np.full(size, CAP)
        self.least[-1], self.cap[-1] = 1e-9, math.inf
        self.values, self.excesses, self.usual_excesses = np.full((3, 1, size), np.nan)
        self.peak, self.last_outlier = np.full(size, -np.inf), np.full(size, -LONG)

    def rows_until_refresh(self) -> int:
        """Return the number of next rows that share the same statistics."""
        return 1 if self.count < EARLY else REFRESH - self.count % REFRESH

    def compare(self, values: HostArray) -> Outliers:
        """Compare rows up to the next refresh, and remember them."""
        if self.count < EARLY or self.count % REFRESH == 0:
            self._refresh()
        change = values - self.level
        excess = change - self._common(change)
        index = self.count + np.arange(len(values))[:, None]
        with np.errstate(invalid="ignore"):
            is_outlier = (excess - self.usual > self.bound) & (change > self.floor)
        # An outlier and the rows after it, in which a loss decays, are no usual excesses. Updates
        # and units with sparse gradients often rise for several steps.
        is_known = is_outlier & ~self.is_unit & (self.kinds != "update")
        last = np.maximum.accumulate(np.where(is_known, index, self.last_outlier), 0)
        usual = np.where((index - last < AFTER) | (index < WARM_UP), np.nan, excess)
        self.last_outlier, self.count = last[-1], self.count + len(values)
        self.values = _last(WINDOW, self.values, values)
        self.excesses = _last(WINDOW, self.excesses, excess)
        self.usual_excesses = _last(LONG, self.usual_excesses, usual)
        threshold = self.level + np.maximum(self.usual + self.bound, self.floor)
        return Outliers(is_outlier, excess, np.broadcast_to(threshold, change.shape))

    def _refresh(self) -> None:
        self.level, usual = median(self.values), median(self.excesses)
        count = np.sum(~np.isnan(self.excesses), axis=0)
        spread = 1.4826 * median(abs(self.excesses - usual))
        if self.count < WINDOW or self.count % TAIL_REFRESH == 0:
            self.tail = _tail(self.usual_excesses, self.rarity)
        # The spread of 16 values is uncertain, so the bound is twice as wide as for 64 values.
        early = 1 + np.clip((EARLY - count) / (EARLY - WARM_UP), 0, 1)
        bound = np.minimum(self.width * spread, np.maximum(self.cap, LEAST_WIDTH * spread)) * early
        # A norm of 20 times its level is an outlier, unless norms vary that much.
        is_whole = (self.kinds == "gradient") & ~self.is_unit
        limit = np.where(is_whole, np.maximum(LIMIT, LIMIT_WIDTH * spread), np.inf)
        bound = np.fmin(np.fmax(bound, self.tail - usual), limit)
        if self.count < WINDOW:
            # While a loss decreases quickly, its spread is large.
            top = np.fmax(np.fmax.reduce(self.excesses) - usual, 0)
            rise = np.full(len(top), math.log(EARLY_RATIO))
            rise[-1] = (EARLY_RATIO - 1) * (top[-1] + abs(self.level[-1]))
            bound = np.fmin(bound, top + rise)
        is_known = count >= WARM_UP - 1  # the first value has no excess
        self.bound = np.where(
            is_known, np.maximum(bound, np.where(self.is_unit, self.least, 0)), np.inf
        )
        self.usual = np.where(is_known, usual, 0)
        self.floor = self.least.copy()
        # A learning-rate schedule that restarts returns to updates that were usual before.
        is_update = self.kinds == "update"
        self.peak = np.fmax(self.level, self.peak - PEAK_DECAY * self.rows_until_refresh())
        above = self.peak[is_update] - self.level[is_update] + math.log(2)
        self.floor[is_update] = np.fmax(self.floor[is_update], above)
        # A small parameter may change its sign.
        is_parameter = self.kinds == "parameter"
        update = self.level[is_update] - self.level[is_parameter]
        moved = np.log1p(NUM_UPDATES * np.exp(update))
        self.floor[is_parameter] = np.fmax(self.floor[is_parameter], moved)

        if count[-2] < count[-1]:  # some losses are not positive: compare only the loss itself
            self.bound[-2] = self.floor[-2] = -math.inf

    def _common(self, change: HostArray) -> HostArray:
        """Return the median change of the other columns of the same group; 0 without a group."""
        common = np.zeros_like(change)
        for group in self.groups:
            own = change[:, group]
            ordered = np.sort(own, axis=1)
            count = np.sum(~np.isnan(own), axis=1, keepdims=True)
            # Without one of the values below the median, the next larger value is the median.
            place = np.maximum(count - 2, 0) // 2
            median, next_larger = (np.take_along_axis(ordered, place + i, 1) for i in (0, 1))
            of_others = np.where(own <= median, next_larger, median)
            common[:, group] = np.where(count > 1, of_others, 0)
        return common


def _last(count: int, old: HostArray, new: HostArray) -> HostArray:
    """Return the last rows of two arrays, as float32 because medians of float64 are slow."""
    return np.concatenate([old, new.astype(np.float32)], dtype=np.float32)[-count:]


class Drifts:
    """Units whose gradient norm has slowly risen relative to the other units."""

    def __init__(self, size: int):
        self.medians, self.count = np.full((MEMORY, size), np.nan), 0

    def compare(self, block: HostArray) -> HostArray:
        """Return the rise of each column after a block of rows; 0 without a drift."""
        self.medians, self.count = np.vstack([self.medians[1:], median(block)]), self.count + 1
        now, past = self.medians[-SHORT:], self.medians[: -SHORT - GAP]
        rise = median(now) - median(past)
        # Gradient norms change early in training.
        early = max(1.0, 2.4 - 1.4 * self.count * BLOCK / 512)
        if len(rise) > 2:
            relative = rise - median(rise[1:])
            is_drift = (relative > early * DRIFT) & (rise > OWN_DRIFT) & (np.arange(len(rise)) > 0)
        else:
            relative, is_drift = rise, rise > early * LONE_DRIFT
        is_drift &= self.count >= 2 * (SHORT + GAP)
        # After a drift, compare with the current norm.
        self.medians[:, is_drift] = median(now)[is_drift]
        return np.where(is_drift, relative, 0)


class Zeros:
    """Values that have become exactly zero.

    A streak of n zeros is reported once, if it is longer than all earlier streaks and the
    probability `share^n` is small, where `share` is the share of zeros in previous rows. The share
    of a unit with few nonzero values is uncertain: after k of them in m rows, the probability of n
    zeros is about `(m / (m + n))^k`. The first column is the whole tree.
    """

    def __init__(self, size: int):
        self.streak, self.longest, self.num_nonzero = np.zeros((3, size), int)
        self.share, self.is_reported, self.count = np.zeros(size), np.zeros(size, bool), 0

    def compare(self, values: HostArray) -> HostArray:
        """Return the columns whose streak of zeros is reported in this row; NaN is unknown."""
        # An unknown value continues what the previous values were.
        is_known, is_zero = ~np.isnan(values), (values == 0) | np.isnan(values) & (self.streak > 0)
        if not (is_zero.any() or self.streak.any() or self.share.any()):
            self.num_nonzero, self.count = self.num_nonzero + is_known, self.count + 1
            return is_zero
        length = self.streak + 1
        weight = np.minimum(length / min(self.count + 1, LONG), 1)
        share = self.share + weight * (self.streak / length - self.share)
        self.share = np.where(is_zero, self.share, share)
        self.longest = np.where(is_zero, self.longest, np.maximum(self.longest, self.streak))
        self.streak = np.where(is_zero, length, 0)
        self.num_nonzero, self.count = self.num_nonzero + (is_known & ~is_zero), self.count + 1
        before = np.clip(self.count - self.streak, 0, LONG)
        # Use at least half a zero, so that a single zero of a unit is not an incident.
        rarity = self.streak * np.log(np.maximum(self.share, 0.5 / (before + 1)))
        surprise = np.minimum(self.num_nonzero, before) * np.log1p(self.streak / np.fmax(before, 1))
        is_rare = (rarity < RARE_UNIT) & ((self.num_nonzero == 0) | (surprise > SURPRISE))
        # The first zero of the whole tree is reported early.
        is_rare[0] = rarity[0] < RARE_TREE * (2 if self.longest[0] else 1)
        found = is_known & is_zero & is_rare & (self.streak > self.longest) & ~self.is_reported
        found &= self.count > WARM_UP
        self.is_reported = is_zero & (self.is_reported | found)
        return found
