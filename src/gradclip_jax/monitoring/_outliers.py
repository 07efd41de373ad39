"""Rules that compare the values of a row with those of earlier rows.

`x` is the logarithm of a norm, of the RMS of a tap, or of a loss. Where a loss is not positive,
losses are compared without a logarithm.

**Outliers.** A value is an outlier if `excess > bound`, where

    level  = median of x in the last WINDOW rows
    excess = x - level - the rise that other columns explain
    usual  = median of the excess in the last WINDOW rows
    spread = 1.4826 * median of |excess - usual| in the last WINDOW rows
    tail   = the excess that TAIL rows are expected to exceed in the last HISTORY rows
    bound  = max(usual + WIDTH * spread, tail, log(RATIO))

The gradient norm of a unit is explained by the median rise of all units, and that of the tree by
the square root of the loss, as for a squared error. The tail is exponential: with the quantiles q
of the excesses of the `n` rows that are not near an outlier,

    tail = q(99 %) + log10(n / TAIL / 100) * (q(99 %) - q(90 %))

**Lasting rises.** A column has risen for good if the lowest of its last BLOCK values is above a
ratio times the highest of its best BLOCK values. The new level then replaces the best one, so that
a rise is reported once, and again if it continues.

**Streaks.** A condition that holds in consecutive rows is reported once its streak is long enough,
and at least twice as long as all earlier streaks. A unit that often has no gradient, such as an
expert that receives no tokens, is therefore reported only a few times.

Statistics are computed at fixed rows, so that incidents do not depend on how rows are split into
reads. `benchmarks/faults/constants.py` measures what happens without each constant.
"""

from typing import NamedTuple

import numpy as np

from .._types import HostArray

WINDOW = 128
"""Rows of a median. In a shorter window, a few outliers become the usual value."""

HISTORY = 2048
"""Rows of a tail. In fewer rows, a tail that is heavy but usual looks like outliers."""

PERIOD = 16
"""Rows without bounds, because their medians are not reliable yet; and rows between two
computations of the statistics, which would otherwise dominate the time of a read. The
`2 * PERIOD` rows after an outlier are excluded from the tail, because a loss recovers slowly."""

WIDTH = {"tree": 3.0, "other": 6.0}
"""Standard deviations of the smallest bound. With less, noise is reported."""

TAIL = {"tree": 3.0, "other": 0.03}
"""Expected number of usual rows above the tail: for the gradient norm of a tree without units, and
for other columns, which are many or lead to a rewind. With more, heavy tails are reported."""

RATIO = {"tree": 5.0, "part": 3.0, "loss": 1.5}
"""Smallest ratio of an outlier to its level: the gradient norm of the tree, other norms and taps,
and the loss. With less, outliers without any effect are reported. In the first WINDOW rows, a loss
above RATIO["part"] times the highest earlier one is an outlier as well."""

BLOCK = 12
"""Rows of a lasting rise. With fewer, a spike that decays slowly is a lasting rise."""

RISE = 1.35
"""Smallest ratio of a lasting rise of the loss. With less, the noise of a loss is a rise."""

STREAKS = {"zero": 16, "starving clip": 200}
"""Rows of a streak: zeros of a unit or of the loss, and clip factors below STARVING. With fewer, a
batch without tokens for an expert, or the first steps of a run, are reported."""

STARVING = 1e-3
"""A clip whose factor is smaller leaves the optimizer almost no gradient. With more, the large
gradients at the start of a run are reported."""

EXPLODED = 10.0
"""A loss that has fallen and then rises for good above so many times its first value has diverged.
Without it, such a run is not told to rewind, because a value loss may grow as well."""

NUM_ROUTINE = 4
"""Infinite norms in HISTORY rows up to which they are routine overflows of a loss scale. Without
it, each of them is reported."""

TREE, UPDATE, PARAMETER, LOG_LOSS, LOSS, NUM_SINGLE = range(6)
"""The columns of the gradient norm of the tree, the norms of update and parameters, the logarithm
of the loss, and the loss. The columns of units and of taps follow them."""


def quantiles(values: HostArray, *shares: float) -> HostArray:
    """Return lower quantiles of the known values along the first axis; NaN if there are none."""
    count = np.maximum(np.sum(~np.isnan(values), axis=0) - 1, 0)
    index = np.multiply.outer(shares, count).astype(int)
    return np.take_along_axis(np.sort(values, axis=0), index, 0)  # NaN are sorted last


def median(values: HostArray) -> HostArray:
    """Return the lower median of the known values along the first axis; NaN if there are none."""
    return quantiles(values, 0.5)[0]


class Comparison(NamedTuple):
    """How the values of some rows compare with earlier rows; each array is float[rows, columns].

    Attributes:
        rises: Logarithm of the ratio of each outlier to its level; 0 for other values.
        thresholds: The smallest values that would be outliers; inf if there are none yet.
        levels: The medians of the last rows.
    """

    rises: HostArray
    thresholds: HostArray
    levels: HostArray


class Outliers:
    """Find the outliers of each column; see the module.

    Attributes:
        units: Columns of the gradient norms of the units.
        taps: Columns of the RMS of the taps.
    """

    def __init__(self, num_units: int, num_taps: int):
        size = NUM_SINGLE + num_units + num_taps
        self.units = slice(NUM_SINGLE, NUM_SINGLE + num_units)
        self.taps = slice(NUM_SINGLE + num_units, size)
        self.log_ratio = np.full(size, np.log(RATIO["part"]))
        self.log_ratio[TREE], self.log_ratio[LOG_LOSS] = np.log([RATIO["tree"], RATIO["loss"]])
        self.log_ratio[LOSS] = 0  # the loss may be negative
        self.width, self.tail = np.full(size, WIDTH["other"]), np.full(size, TAIL["other"])
        self.width[TREE] = WIDTH["tree"]
        self.tail[TREE] = TAIL["other" if num_units else "tree"]
        # Of the last HISTORY, WINDOW and HISTORY rows.
        self.values, self.excesses, self.quiet_excesses = np.full((3, 1, size), np.nan)
        self.count, self.last_outlier = 0, np.full(size, -HISTORY)

    def compare(self, values: HostArray) -> Comparison:
        """Compare the next rows, float[rows, columns] with NaN for unknown values."""
        found = Comparison(*np.zeros((3, *values.shape)))
        start = 0
        while start < len(values):
            period = 1 if self.count < WINDOW else PERIOD
            if self.count % period == 0:
                self._refresh()
            part = slice(start, start + period - self.count % period)
            found.thresholds[part], found.levels[part] = self.threshold, self.level
            found.rises[part] = self._rises(values[part])
            start = part.stop
        return found

    def _rises(self, values: HostArray) -> HostArray:
        """Return the rises of the outliers in the next rows, and add the rows to the history."""
        change = values - self.level
        excess = change.copy()
        excess[:, TREE] -= np.fmax(change[:, LOG_LOSS] / 2, 0)  # explained by the loss
        if change[:, self.units].size:
            excess[:, self.units] -= np.fmax(median(change[:, self.units].T), 0)[:, None]
        is_outlier = excess > self.bound
        index = self.count + np.arange(len(values))[:, None]
        is_usual = ~is_outlier | (index < PERIOD)
        last = np.maximum.accumulate(np.where(is_usual, self.last_outlier, index), 0)
        self.last_outlier, self.count = last[-1], self.count + len(values)
        self.values = _last(HISTORY, self.values, values)
        self.excesses = _last(WINDOW, self.excesses, excess)
        quiet = np.where(index - last < 2 * PERIOD, np.nan, excess)
        self.quiet_excesses = _last(HISTORY, self.quiet_excesses, quiet)
        return np.where(is_outlier, excess, 0)

    def _refresh(self) -> None:
        """Compute the level, the bound and the threshold of each column from the history."""
        self.level = median(self.values[-WINDOW:])
        # A learning-rate schedule that restarts returns to updates that were usual before.
        self.level[UPDATE] = np.fmax(self.level, quantiles(self.values, 0.99)[0])[UPDATE]
        usual = median(self.excesses)
        spread = 1.4826 * median(abs(self.excesses - usual))
        bound = np.fmax(np.fmax(usual + self.width * spread, self._tail()), self.log_ratio)
        count = np.sum(~np.isnan(self.values[-WINDOW:]), axis=0)
        bound[count < PERIOD] = np.inf
        if self.count < WINDOW:  # while a loss decreases quickly, its spread is large
            highest = np.fmax.reduce(self.values[:, LOG_LOSS]) + np.log(RATIO["part"])
            bound[LOG_LOSS] = np.fmin(bound[LOG_LOSS], highest - self.level[LOG_LOSS])
        has_logarithms = count[LOG_LOSS] == count[LOSS]
        bound[LOSS if has_logarithms else LOG_LOSS] = np.inf
        threshold = self.level + bound
        is_logarithm = np.arange(len(threshold)) != LOSS
        np.exp(threshold, where=is_logarithm, out=threshold)
        threshold[LOSS] = np.fmin(threshold[LOG_LOSS], threshold[LOSS])
        self.bound, self.threshold = bound, np.fmin(threshold, np.inf)  # inf instead of NaN

    def _tail(self) -> HostArray:
        """Return an excess that usual rows are not expected to reach, by extrapolation."""
        low, high = quantiles(self.quiet_excesses, 0.9, 0.99)
        rows = np.sum(~np.isnan(self.quiet_excesses), axis=0)
        return high + np.maximum(np.log10(rows.clip(1) / self.tail / 100), 0) * (high - low)


class LastingRises:
    """Find columns that have risen for good; see the module.

    Args:
        log_ratios: Logarithm of the smallest ratio of a rise, for each column.
    """

    def __init__(self, log_ratios: HostArray):
        self.log_ratios, self.best = log_ratios, np.full(len(log_ratios), np.inf)
        self.values = np.full((2 * BLOCK, len(log_ratios)), np.nan)

    def compare(self, row: HostArray) -> tuple[HostArray, HostArray, HostArray]:
        """Compare the next row of logarithms, in which NaN is unknown.

        Returns:
            Whether each column has risen for good, the lowest of its last values, and the highest
            of its best values.
        """
        is_known = ~np.isnan(row)
        self.values[:-1, is_known] = self.values[1:, is_known]
        self.values[-1, is_known] = row[is_known]
        best = self.best = np.fmin(self.best, self.values[:BLOCK].max(axis=0))
        last = self.values[BLOCK:]
        has_risen = last.min(axis=0) > best + self.log_ratios
        self.best = np.where(has_risen, last.max(axis=0), best)
        return has_risen, last.min(axis=0), best


class Streaks:
    """Find streaks of rows in which a condition holds; see the module.

    Args:
        least: Number of rows of the shortest streak that is reported, for each condition.
    """

    def __init__(self, least: list[int]):
        self.least = np.array(least)
        self.count, self.longest = np.zeros((2, len(least)), int)

    def compare(self, is_true: HostArray, is_false: HostArray) -> HostArray:
        """Return which streaks to report in the next row; it may be unknown if they hold."""
        self.longest[is_false] = np.maximum(self.longest, self.count)[is_false]
        self.count = np.where(is_false, 0, self.count + is_true)
        return is_true & (self.count == np.maximum(2 * self.longest, self.least))


def _last(count: int, old: HostArray, new: HostArray) -> HostArray:
    """Return the last rows of two arrays, as float32 because medians of float64 are slow."""
    return np.concatenate([old, new.astype(np.float32)], dtype=np.float32)[-count:]
