"""Outliers, drifts and zeros among the norms and losses of consecutive rows.

Each value is compared with the values of previous rows. `x` is the logarithm of a norm, of the RMS
of a tap, or of a loss; losses that are not positive are compared themselves. Over the last `WINDOW`
rows,

    level  = median of x
    excess = x - level - the change that others explain
    usual  = median of excess
    spread = 1.4826 * median of |excess - usual|
    bound  = max(min(WIDTH * spread, max(CAP, 3.5 * spread)), min(tail - usual, LIMIT), UNIT_FLOOR)

and x is an outlier if `excess - usual > bound` and `x - level > FLOOR`. The gradient norm of a unit
is explained by the median change of all units, and that of the tree by the square root of the loss,
as for a squared error. `tail` is an excess that the last `LONG` rows without outliers do not reach:
their quantiles of 90 % and 99 %, extrapolated further the more rows there are.

Statistics are computed at fixed rows, at every row at first and then at every eighth row, so that
incidents do not depend on how rows are split into reads. A few early outliers do not change them.
The constants were chosen on 18 public training logs, and on the first seven models of
`benchmarks/faults/detect.py` with the seeds 2 to 4.
"""

import math

import numpy as np

from .._types import HostArray

WARM_UP, WINDOW, LONG = 16, 128, 2048
"""Rows without bounds, rows of a median, and rows of a tail."""

EARLY, REFRESH, TAIL_REFRESH = 64, 8, 64
"""Rows in which bounds are computed at every row, and rows between two computations of bounds and
of tails afterwards."""

LIMIT = math.log(15.0)
"""The largest tail of a gradient norm. Otherwise a norm that often rises is never an outlier."""

AFTER = 32
"""Rows after an outlier that are not used for the tail, because a loss decays slowly."""

FLOORS = {"gradient": 5.0, "unit": 3.0, "tap": 3.0, "update": 3.0, "parameter": 2.0, "loss": 1.5}
"""Smallest ratio of an outlier to its level."""

UNIT_FLOOR = math.log(2.0)
"""Smallest rise of a unit relative to the others."""

CAP = math.log(6.0)
"""After WINDOW rows, a rise of a unit by this ratio and by 3.5 standard deviations is an outlier,
unless its tail is longer."""

WIDTHS = {"gradient": 3.5, "unit": 8.0, "tap": 3.5, "update": 3.5, "parameter": 3.5, "loss": 6.0}
"""Smallest bound in standard deviations."""

TREE_FEW, FEW = 60, 3
"""A tail is extrapolated by the decades in the number of rows divided by this: by 1.5 decades at
most for the gradient norm of the tree, and by 2.8 for other values."""

EARLY_RATIO = 8.0
"""In the first WINDOW rows, 8 times the largest previous value is an outlier."""

BLOCK, SHORT, GAP, MEMORY = 16, 3, 1, 64
"""Drifts compare the last 48 rows with up to 1,024 rows, in blocks of 16 rows."""

DRIFT, OWN_DRIFT, LONE_DRIFT = math.log(2.5), math.log(1.25), math.log(5.0)
"""Smallest rise of a drift relative to the other units, and of its own; and of a single norm."""

LEAST_ZEROS = 16
"""Consecutive zeros of a unit that are reported."""


def quantile(values: HostArray, share: float) -> HostArray:
    """Return a lower quantile of the known values along the first axis; NaN if there are none."""
    values = np.sort(values, axis=0)  # NaN last
    count = np.maximum(np.sum(~np.isnan(values), axis=0) - 1, 0)
    return np.take_along_axis(values, (share * count).astype(int)[None], 0)[0]


def median(values: HostArray) -> HostArray:
    """Return the lower median of the known values along the first axis; NaN if there are none."""
    return quantile(values, 0.5)


class Levels:
    """Outliers of each column relative to the previous rows; see the module.

    Args:
        kinds: Kind of each column, a key of `FLOORS`. The first column is the gradient norm of the
            tree; the last ones are the update norm, the parameter norm, the logarithm of the loss
            and the loss itself.
    """

    def __init__(self, kinds: list[str]):
        names, size, self.count = np.array(kinds), len(kinds), 0
        self.width = np.array([WIDTHS[kind] for kind in kinds])
        self.cap = np.where(names == "loss", np.inf, CAP)
        self.is_unit = names == "unit"
        self.least = np.where(self.is_unit, UNIT_FLOOR, 0)
        self.limit = np.where(names == "gradient", LIMIT, np.inf)
        self.few = np.where(names == "gradient", TREE_FEW, FEW)
        self.floor = np.log([FLOORS[kind] for kind in kinds])
        self.values, self.excesses, self.usual_excesses = np.full((3, 1, size), np.nan)
        self.last_outlier = np.full(size, -LONG)

    def compare(self, values: HostArray) -> tuple[HostArray, HostArray]:
        """Compare the next rows, and remember them.

        Returns:
            The ratio of each outlier to what is usual, 0 for other values; and the smallest values
            that would be outliers.
        """
        rises, thresholds, start = np.zeros_like(values), np.zeros_like(values), 0
        while start < len(values):
            if self.count < EARLY or self.count % REFRESH == 0:
                self._refresh()
            size = 1 if self.count < EARLY else REFRESH - self.count % REFRESH
            part = slice(start, start + size)
            rises[part], thresholds[part] = self._rises(values[part]), self.threshold
            start += size
        return rises, thresholds

    def _rises(self, values: HostArray) -> HostArray:
        """Compare rows that share the same statistics."""
        change = values - self.level
        excess = change.copy()
        excess[:, 0] -= np.fmax(change[:, -2] / 2, 0)  # explained by the loss
        if self.is_unit.any():
            excess[:, self.is_unit] -= median(change[:, self.is_unit].T)[:, None]
        index = self.count + np.arange(len(values))[:, None]
        with np.errstate(invalid="ignore"):
            is_outlier = (excess - self.usual > self.bound) & (change > self.floor)
        last = np.maximum.accumulate(np.where(is_outlier, index, self.last_outlier), 0)
        usual = np.where((index - last < AFTER) | (index < WARM_UP), np.nan, excess)
        self.last_outlier, self.count = last[-1], self.count + len(values)
        self.values = _last(LONG, self.values, values)
        self.excesses = _last(WINDOW, self.excesses, excess)
        self.usual_excesses = _last(LONG, self.usual_excesses, usual)
        return np.where(is_outlier, np.exp(np.minimum(np.nan_to_num(excess), 80)), 0)

    def _refresh(self) -> None:
        self.level, usual = median(self.values[-WINDOW:]), median(self.excesses)
        count = np.sum(~np.isnan(self.excesses), axis=0)
        spread = 1.4826 * median(abs(self.excesses - usual))
        if self.count < WINDOW or self.count % TAIL_REFRESH == 0:
            high = quantile(self.usual_excesses, 0.99)
            decades = np.log10(np.sum(~np.isnan(self.usual_excesses), axis=0).clip(1) / self.few)
            step = high - quantile(self.usual_excesses, 0.9)
            self.tail = high + np.maximum(decades, 0) * step
        width, tail = self.width * spread, np.fmin(self.tail - usual, self.limit)
        if self.count >= WINDOW:
            width = np.fmin(width, np.fmax(self.cap, WIDTHS["gradient"] * spread))
        bound = np.fmax(np.fmax(width, tail), self.least)
        if self.count < WINDOW:
            # While a loss decreases quickly, its spread is large.
            top = np.fmax(np.fmax.reduce(self.excesses) - usual, 0)
            bound[-2] = min(bound[-2], top[-2] + math.log(EARLY_RATIO))
        is_known = count >= WARM_UP - 1  # the first value has no excess
        is_known[-1 if count[-2] == count[-1] else -2] = False  # compare the loss, or its logarithm
        self.bound = np.where(is_known, bound, np.inf)
        self.usual = np.where(is_known, usual, 0)
        self.floor[-1] = 0.1 * abs(self.level[-1])
        # A learning-rate schedule that restarts returns to updates that were usual before.
        peak = quantile(self.values[:, -4:-3], 0.99) - self.level[-4]
        self.floor[-4] = math.log(FLOORS["update"]) + max(np.nan_to_num(peak)[0], 0)
        threshold = self.level + np.maximum(self.usual + self.bound, self.floor)
        threshold[:-1] = np.exp(np.minimum(threshold[:-1], 700))
        self.threshold = np.where(np.isnan(self.level + self.bound), np.inf, threshold)


def _last(count: int, old: HostArray, new: HostArray) -> HostArray:
    """Return the last rows of two arrays, as float32 because medians of float64 are slow."""
    return np.concatenate([old, new.astype(np.float32)], dtype=np.float32)[-count:]


class Drifts:
    """Units whose gradient norm has slowly risen relative to the other units."""

    def __init__(self, size: int):
        self.medians, self.count = np.full((MEMORY, size), np.nan), 0
        self.block = list[HostArray]()

    def compare(self, logs: HostArray) -> HostArray:
        """Return the rise of each column in the rows that close a block; 0 without a drift."""
        rises = np.zeros_like(logs)
        for t, row in enumerate(logs):
            self.block.append(row)
            if len(self.block) == BLOCK:
                rises[t] = self._compare(median(np.array(self.block)))
                self.block = []
        return rises

    def _compare(self, level: HostArray) -> HostArray:
        self.medians, self.count = np.vstack([self.medians[1:], level]), self.count + 1
        now, past = self.medians[-SHORT:], self.medians[: -SHORT - GAP]
        rise = median(now) - median(past)
        # Gradient norms change early in training.
        early = max(1.0, 2.4 - 1.4 * self.count * BLOCK / 512)
        others, limit = 0.0, np.full(len(rise), LONE_DRIFT)
        if len(rise) > 2:
            others, limit = median(rise[1:]), np.r_[np.inf, np.full(len(rise) - 1, DRIFT)]
        is_drift = (rise - others > early * limit) & (rise > OWN_DRIFT)
        is_drift &= self.count >= 2 * (SHORT + GAP)
        # After a drift, compare with the current norm.
        self.medians[:, is_drift] = median(now)[is_drift]
        return np.where(is_drift, np.exp(rise - others), 0)


class Zeros:
    """Values that have become exactly zero.

    A streak of zeros is reported once, if it has LEAST_ZEROS rows and twice as many as all earlier
    ones. The first column is the whole tree, whose first zero is reported after the warm-up.
    """

    def __init__(self, size: int):
        self.streak, self.longest = np.zeros((2, size), int)
        self.count = 0

    def compare(self, values: HostArray) -> HostArray:
        """Return the columns whose streak of zeros is reported in each row; NaN is unknown."""
        found = np.zeros(values.shape, bool)
        for t, row in enumerate(values):
            is_zero, is_over = row == 0, (row != 0) & ~np.isnan(row)
            self.longest[is_over] = np.maximum(self.longest, self.streak)[is_over]
            self.streak, self.count = np.where(is_over, 0, self.streak + is_zero), self.count + 1
            least = np.maximum(2 * self.longest, LEAST_ZEROS)
            if self.count > WARM_UP:
                least[0] = max(2 * self.longest[0], 1)
            found[t] = is_zero & (self.streak == least)
        return found
