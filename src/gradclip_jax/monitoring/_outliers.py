"""Outliers and drifts among the norms and losses of consecutive rows.

Each value is compared with the values of previous rows. `x` is the logarithm of a norm, of the RMS
of a tap, or of a loss; losses that are not positive are compared themselves. Over the last `WINDOW`
rows,

    level  = median of x
    excess = x - level - the change that others explain
    usual  = median of excess
    spread = 1.4826 * median of |excess - usual|
    bound  = max(width * spread, tail - usual)

and x is an outlier if `excess - usual > bound` and `x - level > log(floor)`. The gradient norm of a
unit is explained by the median change of all units, and that of the tree by the square root of the
loss, as for a squared error. `tail` is an excess that the last `HISTORY` rows without outliers do
not reach: their quantiles of 90 % and 99 %, extrapolated further the more rows there are.

Statistics are computed at fixed rows, at every row at first and then at every 16th row, so that
incidents do not depend on how rows are split into reads. A few early outliers do not change them.
The constants were chosen on 18 public training logs, and on the first seven models of
`benchmarks/faults/detect.py` with the seeds 2 to 4.
"""

import numpy as np

from .._types import HostArray

PERIOD, AFTER, RECENT, WINDOW, HISTORY = 16, 32, 64, 128, 2048
"""Numbers of rows.

PERIOD: Rows without bounds and, after the first RECENT rows, between two computations of them.
AFTER: Rows after an outlier that are not used for the tail, because a loss decays slowly.
RECENT: The last rows, which a drift compares with all earlier ones.
WINDOW: Rows of a median.
HISTORY: Rows of a tail.
"""

RULES = {
    # kind: bound in standard deviations, smallest ratio to the level, expected rows above a tail
    "lone": (3.0, 5.0, 0.5),  # the gradient norm of a tree without units
    "tree": (3.0, 5.0, 0.03),
    "part": (3.0, 3.0, 0.03),  # a unit, a tap, the update, or the parameters
    "loss": (6.0, 1.5, 0.03),
}
"""The last number is that among the rows from which a tail was computed. It is small where many
columns add up their false alarms. A drift must reach the same ratio as an outlier."""

LIMIT, LIMIT_WIDTH = np.log(15.0), 4.0
"""The largest tail of the gradient norm of the tree: a factor of 15, or 4 standard deviations if
these are more. Otherwise a norm that often rises is never an outlier."""

EARLY_RISE = np.log(3.0)
"""In the first WINDOW rows, a loss that is 3 times the largest previous one is an outlier."""

STARTS = (1, 3, EARLY_RISE), (16, 32, 0.0)
"""A run does not start to learn if 3 consecutive losses are above 3 times the first one, or if 32
are above all of the first 16, which noise with a correlation of 0.8 from row to row does in 1 of
500 runs. Both are only looked for in the first RECENT rows."""

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


class Levels:
    """Outliers and drifts of each column relative to the previous rows; see the module.

    The columns are the logarithms of the gradient norm of the tree and of each unit, of the RMS of
    taps, of the update norm, the parameter norm and the loss, and the loss itself.
    """

    def __init__(self, num_units: int, num_taps: int):
        self.units, self.count = slice(1, 1 + num_units), 0
        parts = ["part"] * (num_units + num_taps + 2)
        kinds = ["tree" if num_units else "lone", *parts, "loss", "loss"]
        self.width, floor, self.above = np.array([RULES[kind] for kind in kinds]).T
        self.floor = np.log(floor)
        self.values, self.excesses, self.usual_excesses = np.full((3, 1, len(kinds)), np.nan)
        self.last_outlier = np.full(len(kinds), -HISTORY)
        self.last_drift = np.full(self.units.stop, -HISTORY)

    def compare(self, values: HostArray) -> tuple[HostArray, HostArray, HostArray]:
        """Compare the next rows, and remember them.

        Returns:
            The logarithm of the ratio of each outlier to what is usual, and that of each drift; 0
            for other values. The smallest values that would be outliers.
        """
        rises, thresholds = np.zeros_like(values), np.zeros_like(values)
        drifts, start = np.zeros_like(values[:, : self.units.stop]), 0
        while start < len(values):
            period = 1 if self.count < RECENT else PERIOD
            if self.count % period == 0:
                self._refresh()
            if self.count % PERIOD == 0 and self.count >= WINDOW:
                drifts[start] = self._drifts()
            part = slice(start, start + period - self.count % period)
            rises[part], thresholds[part] = self._rises(values[part]), self.threshold
            start = part.stop
        return rises, drifts, thresholds

    def _rises(self, values: HostArray) -> HostArray:
        """Compare rows that share the same statistics."""
        change = values - self.level
        excess = change.copy()
        excess[:, 0] -= np.fmax(change[:, LOG_LOSS] / 2, 0)  # explained by the loss
        if self.units.stop > 1:
            excess[:, self.units] -= median(change[:, self.units].T)[:, None]
        rise = excess - self.usual
        is_outlier = (rise > self.bound) & (change > self.floor)
        if self.count < RECENT:
            loss = np.append(self.values[:, LOG_LOSS], values[0, LOG_LOSS])
            for first, last, least in STARTS:
                before, *losses = loss[-last - 1 :]  # `loss` begins with a NaN
                if before <= np.max(loss[1 : 1 + first]) + least < np.min(losses):
                    is_outlier[0, LOG_LOSS], rise[0, LOG_LOSS] = True, np.inf
        index = self.count + np.arange(len(values))[:, None]
        last = np.maximum.accumulate(np.where(is_outlier, index, self.last_outlier), 0)
        self.last_outlier, self.count = last[-1], self.count + len(values)
        self.values = _last(HISTORY, self.values, values)
        self.excesses = _last(WINDOW, self.excesses, excess)
        usual = np.where(index - last < AFTER, np.nan, excess)
        self.usual_excesses = _last(HISTORY, self.usual_excesses, usual)
        return np.where(is_outlier, rise, 0)

    def _refresh(self) -> None:
        self.level, self.usual = median(self.values[-WINDOW:]), median(self.excesses)
        # A learning-rate schedule that restarts returns to updates that were usual before.
        peak = quantiles(self.values[:, UPDATE], 0.99)[0]
        self.level[UPDATE] = np.fmax(self.level[UPDATE], peak)
        spread = 1.4826 * median(abs(self.excesses - self.usual))
        low, high, highest = quantiles(self.usual_excesses, 0.9, 0.99, 0.999)
        rows = np.sum(~np.isnan(self.usual_excesses), axis=0)
        decades, slope = np.log10(rows.clip(1) / self.above / 100), high - low
        # Norms can have a heavy tail. The quantile of 99.9 % is known after 1,000 rows.
        slope[:LOG_LOSS] = np.fmax(slope, (rows >= 1000) * (highest - high))[:LOG_LOSS]
        tail = high + np.maximum(decades, 0) * slope - self.usual
        tail[0] = min(tail[0], max(LIMIT, LIMIT_WIDTH * spread[0]))
        bound = np.fmax(self.width * spread, tail)
        # Gradient norms change early in training.
        self.early = 2.0 if self.count < 2 * WINDOW else 1.0
        bound[self.units] = self.early * np.fmax(bound, self.floor)[self.units]
        if self.count < WINDOW:
            # While a loss decreases quickly, its spread is large.
            top = np.fmax.reduce(self.excesses[:, LOG_LOSS]) - self.usual[LOG_LOSS]
            bound[LOG_LOSS] = np.fmin(bound[LOG_LOSS], np.fmax(top, 0) + EARLY_RISE)
        count = np.sum(~np.isnan(self.excesses), axis=0)
        bound[count < PERIOD - 1] = np.inf  # the first value has no excess
        # Compare the loss, or its logarithm.
        bound[LOSS if count[LOG_LOSS] == count[LOSS] else LOG_LOSS] = np.inf
        self.bound, self.floor[LOSS] = bound, 0.1 * abs(self.level[LOSS])
        threshold = self.level + np.fmax(self.usual + bound, self.floor)
        threshold[:LOSS] = np.exp(threshold[:LOSS])
        self.threshold = np.fmin(threshold, np.inf)  # inf instead of NaN

    def _drifts(self) -> HostArray:
        """Return by how much the gradient norms have slowly risen; 0 without a drift."""
        norms = self.values[:, : self.units.stop]
        rise = median(norms[-RECENT:]) - median(norms[:-RECENT])
        if len(rise) > 2:
            rise -= np.fmax(median(rise[self.units]), 0)
            rise[0] = np.nan
        is_drift = rise > self.early * self.floor[: self.units.stop]
        is_drift &= self.count - self.last_drift >= HISTORY
        self.last_drift[is_drift] = self.count
        return np.where(is_drift, rise, 0)


def _last(count: int, old: HostArray, new: HostArray) -> HostArray:
    """Return the last rows of two arrays, as float32 because medians of float64 are slow."""
    return np.concatenate([old, new.astype(np.float32)], dtype=np.float32)[-count:]
