"""Rules that compare the values of a row with the values of earlier rows.

`x` is the logarithm of a norm, of the RMS of a tap, or of a loss. Where a loss is not positive,
losses are compared without a logarithm.

**Outliers.** A value is an outlier if `excess > bound`, where

    level  = median of x in the last WINDOW rows
    excess = x - level. If most units rise together, the median of their excesses is subtracted from
             the excess of each unit.
    usual  = median of the excess in the last WINDOW rows
    spread = 1.4826 * median of |excess - usual| in the last WINDOW rows
    tail   = the excess above which we expect only TAIL of the last HISTORY rows, if all of them are
             normal
    bound  = max(usual + WIDTH * spread, tail, log(RATIO))

In the first WINDOW rows, a loss above RATIO["part"] times the highest earlier one is an outlier as
well. The tail is exponential. If q are the quantiles of the excesses in the `n` rows that are not
near an outlier,

    tail = q(99 %) + log10(n / TAIL / 100) * (q(99 %) - q(90 %))

**Lasting rises.** A column has risen permanently if the lowest of its last BLOCK values is above a
ratio times the highest of its best BLOCK values. The new values then replace the best values, so
that each rise is reported once, and again if it continues. The n-th rise must exceed the n-th power
of the ratio, because some losses rise and fall slowly all the time.

**Streaks.** A condition that holds in consecutive rows is reported once its streak is long enough,
and at least twice as long as all earlier streaks. A unit that often has no gradient, such as an
expert that receives no tokens, is therefore reported only a few times.

Statistics are computed at fixed rows, so that incidents do not depend on how rows are split into
reads. `benchmarks/faults/constants.py` measures the effect of each constant.
"""

from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ..._types import HostArray

WINDOW = 128
"""Number of rows of a median. In a shorter window, a few outliers change the median."""

HISTORY = 16 * WINDOW
"""Number of rows of a tail. With fewer rows, a heavy tail is reported as outliers."""

PERIOD = 16
"""Number of initial rows without bounds, because medians are not reliable yet. Also the number of
rows between two computations of the statistics, which are slow. The `2 * PERIOD` rows after an
outlier are excluded from the tail, because a loss recovers slowly. A unit, a loss or a clip factor
that is zero in PERIOD rows has become zero."""

WIDTH = {"tree": 3.0, "other": 4.0}
"""Number of standard deviations in the smallest bound. With fewer, noise is reported."""

TAIL = {"tree": 3.0, "other": 0.03}
"""Expected number of normal rows above the tail: for the gradient norm of a tree without units, and
for all other columns. With larger numbers, heavy tails are reported."""

RATIO = {"tree": 5.0, "part": 3.0, "loss": 1.4}
"""Smallest ratio of an outlier to its level, and of a lasting rise, for the gradient norm of the
tree, for other norms and taps, and for the loss. With smaller ratios, harmless noise is reported.
A run that does not learn is flat if its losses differ by less than RATIO["loss"]. A loss has
diverged if it has fallen and then rises permanently above RATIO["tree"] times its level. A value
loss, which grows with the return of a policy, rises more slowly."""

BLOCK = 12
"""Number of rows of a lasting rise. With fewer, a slowly decaying spike is reported as one."""

GAP = 8
"""Maximum distance between two incidents of a streak, and maximum number of other rows between two
bad rows of a stretch. Also the number of rows to which the threshold of an incident applies. With
more, good batches are left out."""

STARVING, STARVING_ROWS = 1e-3, 200
"""If the factor of a clip is below STARVING in this many rows, the optimizer receives almost no
gradient. With a larger factor or fewer rows, large gradients at the start of a run are reported."""

TREE, UPDATE, PARAMETER, LOG_LOSS, LOSS, NUM_SINGLE = range(6)
"""Indices of the columns with the gradient norm of the tree, the update norm, the parameter norm,
the logarithm of the loss, and the loss. Columns of units and taps follow."""

BUFFER_SIZE = HISTORY + WINDOW
"""Number of rows that `Outliers` keeps: the rows of a tail, and more than 3 * PERIOD earlier rows,
for rows near an outlier and for an incomplete period."""


def quantiles(values: HostArray, *shares: float) -> HostArray:
    """Return quantiles (`method="lower"`) of the non-NaN values along the last axis.

    NaN if there are none.
    """
    count = np.sum(~np.isnan(values), axis=-1)
    found, is_known = np.full((*count.shape, len(shares)), np.nan, values.dtype), count > 0
    index = np.multiply.outer(count[is_known] - 1, shares).astype(int)
    known = values[is_known]
    known.sort(axis=-1)  # NaN last
    found[is_known] = np.take_along_axis(known, index, -1)
    return np.moveaxis(found, -1, 0)


def median(values: HostArray) -> HostArray:
    """Return the lower median of the known values along the last axis; NaN if there are none."""
    return quantiles(values, 0.5)[0]


def run_lengths(is_true: HostArray, is_false: HostArray, before: HostArray | int = 0) -> HostArray:
    """Return the number of `is_true` rows since the last `is_false` row; a row may be neither.

    `before` is the value of the row before the first row.
    """
    total = before + np.cumsum(is_true, axis=0)
    return total - np.maximum.accumulate(np.where(is_false, total, 0), axis=0)


class Periods(NamedTuple):
    """Statistics of each period of consecutive rows, computed from the rows before the period.

    Attributes:
        of_row: int[rows], index of the period of each row.
        starts: int[periods], number of rows of the run before each period.
        ends: int[periods], number of rows in the arrays of `Outliers` before each period.
        levels: float[periods, columns], typical value of each column.
        floor: float[periods, columns], lower limit of the outlier bound of each column.
        ceiling: float[periods, columns], upper limit of the outlier bound of each column.
    """

    of_row: HostArray
    starts: HostArray
    ends: HostArray
    levels: HostArray
    floor: HostArray
    ceiling: HostArray


class Outliers:
    """Find the outliers of each column; see the module.

    The tail of the distribution takes much longer to compute than the other terms of a bound,
    because it depends on earlier outliers. It is computed only if a value exceeds the other terms.

    Attributes:
        units: Columns with the gradient norms of leaves or layers.
        taps: Columns of the RMS of the taps.
        values: The rows of the last call, preceded by the BUFFER_SIZE rows before that call.
        excesses: The excess of each value in `values`.
        is_outlier: Whether each of these values is an outlier.
        count: Number of rows so far.
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
        self.values, self.excesses = np.full((2, BUFFER_SIZE, size), np.nan, np.float32)
        self.is_outlier, self.count = np.zeros((BUFFER_SIZE, size), bool), 0

    def compare(self, values: HostArray) -> tuple[HostArray, Periods]:
        """Compare the next rows, float[rows, columns], with earlier rows; NaN marks unknown values.

        Returns:
            Logarithm of the ratio of each outlier to its level, 0 for other values; and the
            statistics of the periods of these rows.
        """
        index = self.count + np.arange(len(values))
        starts = np.where(index < WINDOW, index, index - index % PERIOD)
        starts, of_row = np.unique(starts, return_inverse=True)
        ends = starts - self.count + BUFFER_SIZE
        self.values = _append(self.values, values)
        levels = self._levels(ends)
        excess = values - levels[of_row]
        excess[:, self.units] -= np.fmax(median(excess[:, self.units]), 0)[:, None]
        self.excesses = _append(self.excesses, excess)
        floor, ceiling = self._limits(starts, ends, levels)
        periods = Periods(of_row, starts, ends, levels, floor, ceiling)
        is_outlier = excess > np.fmin(floor, ceiling)[of_row]
        self.is_outlier = _append(self.is_outlier, np.zeros_like(is_outlier))
        columns = np.flatnonzero(is_outlier.any(axis=0))
        for i in np.unique(of_row[is_outlier.any(axis=1)]):
            rows = np.flatnonzero(of_row == i)
            found = excess[np.ix_(rows, columns)] > self._bound(periods, i, columns)
            is_outlier[np.ix_(rows, columns)] = found
            self.is_outlier[BUFFER_SIZE + rows] = is_outlier[rows]
        self.count += len(values)
        return np.where(is_outlier, excess, 0), periods

    def thresholds(self, periods: Periods, row: int) -> HostArray:
        """Return the outlier thresholds of the columns before the units; inf means no bound.

        `periods` is a result of the last call of `compare`, and `row` is the index of one of its
        rows.
        """
        i, single = periods.of_row[row], np.arange(NUM_SINGLE)
        threshold = periods.levels[i, single] + self._bound(periods, i, single)
        np.exp(threshold, where=single != LOSS, out=threshold)
        threshold[LOSS] = np.fmin(threshold[LOG_LOSS], threshold[LOSS])
        return np.fmin(threshold, np.inf)  # inf instead of NaN

    def _levels(self, ends: HostArray) -> HostArray:
        """Return the level of each column in each period."""
        levels = median(_before(ends, self.values, WINDOW))
        # After a restart of the learning-rate schedule, updates return to earlier, larger levels.
        updates = _before(ends, self.values[:, [UPDATE]], HISTORY)
        levels[:, [UPDATE]] = np.fmax(levels[:, [UPDATE]], quantiles(updates, 0.99)[0])
        return levels

    def _limits(
        self, starts: HostArray, ends: HostArray, levels: HostArray
    ) -> tuple[HostArray, HostArray]:
        """Return the lower and upper limits of the bound of each column in each period."""
        values, excesses = (_before(ends, x, WINDOW) for x in (self.values, self.excesses))
        usual = median(excesses)
        spread = 1.4826 * median(abs(excesses - usual[..., None]))
        floor = np.fmax(usual + self.width * spread, self.log_ratio)
        ceiling, is_early = np.full(floor.shape, np.inf), starts < WINDOW
        # While a loss decreases quickly, its spread is large.
        highest = np.fmax.reduce(values[:, LOG_LOSS], axis=-1) + np.log(RATIO["part"])
        limit = np.fmin(highest - levels[:, LOG_LOSS], np.inf)  # inf instead of NaN
        ceiling[is_early, LOG_LOSS] = limit[is_early]
        count = np.sum(~np.isnan(values), axis=-1)
        floor[count < PERIOD] = np.inf
        has_logarithms = count[:, LOG_LOSS] == count[:, LOSS]
        for column, is_unused in (LOSS, has_logarithms), (LOG_LOSS, ~has_logarithms):
            floor[is_unused, column] = ceiling[is_unused, column] = np.inf
        return floor, ceiling

    def _bound(self, periods: Periods, i: int, columns: HostArray) -> HostArray:
        """Return the bounds of some columns in period `i`."""
        tail = self._tail(periods.starts[i], periods.ends[i], columns)
        return np.fmin(np.fmax(periods.floor[i, columns], tail), periods.ceiling[i, columns])

    def _tail(self, start: int, end: int, columns: HostArray) -> HostArray:
        """Estimate the tail of the given columns from the HISTORY rows before row `end`."""
        is_outlier = self.is_outlier[end - HISTORY - 2 * PERIOD : end, columns]
        if start < WINDOW:  # keep the first rows in the tail until there are enough others
            is_outlier[len(is_outlier) - start :][:PERIOD] = False
        count = np.cumsum(is_outlier, axis=0)
        is_near = count[2 * PERIOD :] > count[: -2 * PERIOD]
        quiet = np.where(is_near, np.nan, self.excesses[end - HISTORY : end, columns]).T
        low, high = quantiles(quiet, 0.9, 0.99)
        rows = np.sum(~np.isnan(quiet), axis=-1).clip(1)
        return high + np.maximum(np.log10(rows / self.tail[columns] / 100), 0) * (high - low)


class LastingRises:
    """Find columns that have risen permanently; see the module docstring.

    Args:
        log_ratios: Logarithm of the smallest ratio that counts as a rise, for each column.
    """

    def __init__(self, log_ratios: HostArray):
        self.log_ratios, self.bounds = log_ratios, log_ratios  # of the first and of the next rise
        self.best = np.full(len(log_ratios), np.inf)
        self.values = np.full((2 * BLOCK - 1, len(log_ratios)), np.nan)

    def compare(self, values: HostArray) -> tuple[HostArray, HostArray, HostArray]:
        """Compare the next rows of logarithms, float[rows, columns].

        Blocks that contain NaN, which stands for an unknown value, are ignored.

        Returns:
            Whether each column has risen permanently, the lowest of its last values, and the
            highest of its best values.
        """
        known = np.concatenate([self.values, values])
        self.values = known[len(values) :]
        blocks = sliding_window_view(known, BLOCK, axis=0)
        highest, lowest = blocks.max(axis=-1), blocks.min(axis=-1)[BLOCK:]
        best, has_risen = np.empty(values.shape), np.empty(values.shape, bool)
        start = 0
        while start < len(values):  # the best values change after each rise
            earlier = np.vstack([self.best, highest[start:-BLOCK]])
            best[start:] = np.fmin.accumulate(earlier)[1:]
            has_risen[start:] = lowest[start:] > best[start:] + self.bounds
            stop = start + np.argmax(np.append(has_risen[start:-1].any(axis=1), True))
            self.best = np.where(has_risen[stop], highest[BLOCK + stop], best[stop])
            self.bounds = self.bounds + np.where(has_risen[stop], self.log_ratios, 0)
            start = stop + 1
        return has_risen, lowest, best


class Streaks:
    """Find streaks of rows in which a condition holds; see the module.

    Args:
        least: Minimum length of a streak that is reported, in rows, for each condition.
    """

    def __init__(self, least: list[int]):
        self.least = np.array(least)
        self.count, self.longest = np.zeros((2, len(least)), int)

    def compare(self, is_true: HostArray, is_false: HostArray) -> HostArray:
        """Return whether to report a streak of each condition, bool[rows, conditions].

        A row in which a condition is neither true nor false does not end its streak.
        """
        count = run_lengths(is_true, is_false, self.count)
        highest = np.maximum.accumulate(np.maximum(count, np.maximum(self.longest, self.count)))
        ended = np.maximum.accumulate(np.where(is_false, highest, 0))
        longest = np.maximum(self.longest, ended)
        self.count, self.longest = count[-1], longest[-1]
        return is_true & (count == np.maximum(2 * longest, self.least))


def _append(old: HostArray, new: HostArray) -> HostArray:
    """Append rows to the last BUFFER_SIZE rows, in float32 because float64 medians are slow."""
    return np.concatenate([old[-BUFFER_SIZE:], new.astype(old.dtype)])


def _before(ends: HostArray, values: HostArray, count: int) -> HostArray:
    """Return the `count` rows before each end, float[ends, columns, count]."""
    return np.ascontiguousarray(sliding_window_view(values, count, axis=0)[ends - count])
