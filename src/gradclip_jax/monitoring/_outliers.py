"""Outliers and lasting rises among the norms and losses of consecutive rows.

`x` is the logarithm of a norm, of the RMS of a tap, or of a loss. Losses that are not positive are
compared themselves.

**Outliers.** Each value is compared with those of previous rows:

    level  = median of x in the last WINDOW rows
    excess = x - level - the change that others explain
    usual  = median of the excess in the last WINDOW rows
    spread = 1.4826 * median of |excess - usual| in the last WINDOW rows
    tail   = the excess that TAIL rows are expected to exceed in the last HISTORY rows
    bound  = max(usual + WIDTH * spread, tail, log(RATIO))

and x is an outlier if `excess > bound`. A rise of the gradient norm of a unit is explained by the
median rise of all units, and that of the tree by the square root of the loss, as for a squared
error. The tail is exponential: with the quantiles q of the excesses of `n` rows that
are not outliers,

    tail = q(99 %) + log10(n / TAIL / 100) * (q(99 %) - q(90 %))

**Lasting rises.** A value has risen if the lowest of its last BLOCK values is above `ratio` times
the highest of its best BLOCK values. The new level then replaces the best one, so that a rise is
reported once, and again if it goes on.

Statistics are computed at fixed rows, so that incidents do not depend on how rows are split into
reads. docs/watching.md lists what goes wrong without each constant.
"""

import numpy as np

from .._types import HostArray

PERIOD, WINDOW, HISTORY = 16, 128, 2048
"""Numbers of rows: without bounds, and between two computations of the statistics; of a median; of
a tail. The 2 * PERIOD rows after an outlier are not used for the tail: a loss decays slowly."""

WIDTH = {"tree": 3.0, "other": 6.0}
"""Smallest bound in standard deviations."""

TAIL = {"tree": 3.0, "other": 0.03}
"""Expected number of rows above a tail, among the rows from which it was computed: of the gradient
norm of a tree without units, and of other values, which are many or decide about rewinds."""

RATIO = {"tree": 5.0, "part": 3.0, "loss": 1.5}
"""Smallest ratio of an outlier to the level: the gradient norm of the tree, other norms, losses. In
the first WINDOW rows, a loss above RATIO["part"] times the highest previous one is an outlier."""

BLOCK, RISE = 12, 1.35
"""Rows of a lasting rise, and the smallest ratio of a lasting rise of the loss."""

UPDATE, PARAMETER, LOG_LOSS, LOSS = -4, -3, -2, -1
"""The last columns."""


def quantiles(values: HostArray, *shares: float) -> HostArray:
    """Return lower quantiles of the known values along the first axis; NaN if there are none."""
    count = np.maximum(np.sum(~np.isnan(values), axis=0) - 1, 0)
    index = np.multiply.outer(shares, count).astype(int)
    return np.take_along_axis(np.sort(values, axis=0), index, 0)  # NaN are sorted last


def median(values: HostArray) -> HostArray:
    """Return the lower median of the known values along the first axis; NaN if there are none."""
    return quantiles(values, 0.5)[0]


class Outliers:
    """Outliers of each column relative to the previous rows; see the module.

    The columns are the logarithms of the gradient norm of the tree and of each unit, of the RMS of
    taps, of the update norm, the parameter norm and the loss, and the loss itself.
    """

    def __init__(self, num_units: int, num_taps: int):
        self.units, self.count = slice(1, 1 + num_units), 0
        num_norms = num_units + num_taps + 2
        ratios = [RATIO["tree"], *[RATIO["part"]] * num_norms, RATIO["loss"], 1.0]
        self.log_ratio = np.log(ratios)
        self.width, self.tail = np.full((2, len(ratios)), [[WIDTH["other"]], [TAIL["other"]]])
        self.width[0] = WIDTH["tree"]
        self.tail[0] = TAIL["other" if num_units else "tree"]
        self.values, self.excesses, self.quiet_excesses = np.full((3, 1, len(ratios)), np.nan)
        self.last_outlier = np.full(len(ratios), -HISTORY)

    def compare(self, values: HostArray) -> tuple[HostArray, HostArray, HostArray]:
        """Compare the next rows, and remember them.

        Returns:
            The logarithm of the ratio of each outlier to its level; 0 for other values. The
            smallest values that would be outliers. The level of the loss.
        """
        rises, thresholds = np.zeros_like(values), np.zeros_like(values)
        levels, start = np.zeros(len(values)), 0
        while start < len(values):
            period = 1 if self.count < WINDOW else PERIOD
            if self.count % period == 0:
                self._refresh()
            part = slice(start, start + period - self.count % period)
            thresholds[part], levels[part] = self.threshold, self.level[LOSS]
            rises[part] = self._rises(values[part])
            start = part.stop
        return rises, thresholds, levels

    def _rises(self, values: HostArray) -> HostArray:
        """Return the outliers among rows that share the same statistics, and remember the rows."""
        change = values - self.level
        excess = change.copy()
        excess[:, 0] -= np.fmax(change[:, LOG_LOSS] / 2, 0)  # explained by the loss
        if self.units.stop > 1:
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
        """Compute the level, the bound and the threshold of each column."""
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
        # Compare the loss, or its logarithm.
        bound[LOSS if count[LOG_LOSS] == count[LOSS] else LOG_LOSS] = np.inf
        threshold = self.level + bound
        threshold[:LOSS] = np.exp(threshold[:LOSS])
        self.bound, self.threshold = bound, np.fmin(threshold, np.inf)  # inf instead of NaN

    def _tail(self) -> HostArray:
        """Extrapolate the quantiles of the excesses to an excess that no usual row reaches."""
        low, high = quantiles(self.quiet_excesses, 0.9, 0.99)
        rows = np.sum(~np.isnan(self.quiet_excesses), axis=0)
        return high + np.maximum(np.log10(rows.clip(1) / self.tail / 100), 0) * (high - low)


class Rises:
    """Lasting rises of each column above its best level; see the module.

    Args:
        log_ratios: Logarithm of the smallest ratio that is a rise, for each column.
    """

    def __init__(self, log_ratios: HostArray):
        self.log_ratios, self.best = log_ratios, np.full(len(log_ratios), np.inf)
        self.values = np.full((2 * BLOCK, len(log_ratios)), np.nan)

    def compare(self, row: HostArray) -> tuple[HostArray, HostArray, HostArray]:
        """Compare the next row of logarithms; NaN is unknown.

        Returns:
            Which columns have risen. The lowest of their last values, and the highest of their best
            values.
        """
        is_known = ~np.isnan(row)
        self.values[:-1, is_known] = self.values[1:, is_known]
        self.values[-1, is_known] = row[is_known]
        best = self.best = np.fmin(self.best, self.values[:BLOCK].max(axis=0))
        last = self.values[BLOCK:]
        has_risen = last.min(axis=0) > best + self.log_ratios
        self.best = np.where(has_risen, last.max(axis=0), best)
        return has_risen, last.min(axis=0), best


def _last(count: int, old: HostArray, new: HostArray) -> HostArray:
    """Return the last rows of two arrays, as float32 because medians of float64 are slow."""
    return np.concatenate([old, new.astype(np.float32)], dtype=np.float32)[-count:]
