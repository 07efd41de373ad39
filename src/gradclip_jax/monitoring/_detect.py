"""Detect training faults in rows of norms and losses, with NumPy on the host.

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
The constants were chosen on 18 public training logs and on recorded runs of the seven models of
`benchmarks/faults/detect.py`.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from .._types import HostArray
from ._incident import FATES, STREAK, Incident
from ._incident import KINDS as INCIDENT_KINDS
from ._rows import KINDS, MEASURED, Names, Outcome, Rows

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

FAULTS = (
    Outcome.SKIPPED
    | Outcome.SKIPPED_LARGE_NORM
    | Outcome.SKIPPED_LARGE_LOSS
    | Outcome.REPLICA_DIFFERS
    | Outcome.EMPTY_WINDOW
)
"""Outcomes that are incidents."""

EARLY_RATIO = 8.0
"""In the first WINDOW rows, 8 times the largest previous value is an outlier."""

EARLY_RISE, NUM_ABOVE = 3.0, 3
"""Consecutive early rows whose loss exceeds 3 times the first one are an incident."""

ROUNDED = 0.02
"""Losses whose threshold is below this are rounded to 0 in many logs."""

NUM_ROUTINE = 4
"""Infinite norms in LONG rows up to which they are routine overflows of a loss scale."""


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


class Detector:
    """Find the incidents in consecutive rows.

    Args:
        names: Names of the columns of the rows.
    """

    def __init__(self, names: Names):
        self.names, size = names, 1 + len(names.units)
        kinds = np.repeat([*KINDS, "tap", "loss"], [size] * 3 + [2 * len(names.taps), 2])
        starts = range(1, 3 * size, size) if size > 2 else ()
        self.levels = Levels(kinds, [slice(start, start + size - 1) for start in starts])
        self.drifts, self.zeros = Drifts(size), Zeros(size + 1)
        self.infinite_rows: list[int] = []
        self.last: Incident | None = None
        self.first_loss, self.num_above = math.nan, 0
        self.has_noted, self.last_row, self.count = False, 0, 0

    def update(self, rows: Rows) -> list[Incident]:
        """Return the incidents in the next rows, which may be any number of rows."""
        if not len(rows.step):
            return []
        values, size = self._values(rows), rows.norms.shape[2]
        parts: list[Outliers] = []
        drifts, start = np.zeros((len(values), size)), 0
        while start < len(values):
            stop = min(start + self.levels.rows_until_refresh(), len(values))
            parts.append(self.levels.compare(values[start:stop]))
            if self.levels.count % BLOCK == 0:
                drifts[stop - 1] = self.drifts.compare(self.levels.values[-BLOCK:, :size])
            start = stop
        outliers = Outliers(*(np.concatenate(x) for x in zip(*parts, strict=True)))
        gradient = np.where(rows.has(Outcome.HAS_GRADIENT)[:, None], rows.norms[:, 0], np.nan)
        gradient[~rows.has(Outcome.HAS_UNITS), 1:] = np.nan
        loss = np.where(rows.has(Outcome.HAS_LOSS), rows.loss, np.nan)
        zeros = np.array([self.zeros.compare(x) for x in np.column_stack([gradient, loss])])
        for t, x in enumerate(loss.tolist()):
            outliers.is_outlier[t, -2:] |= self._is_early_rise(self.count + t, x)
        is_suspicious = rows.has(FAULTS) | ~np.isfinite(rows.loss)
        is_suspicious |= ~np.isfinite(rows.norms).all((1, 2)) | (rows.taps[..., -1] > 0).any((1, 2))
        for table in (outliers.is_outlier, drifts != 0, zeros):
            is_suspicious |= table.any(1)
        found: list[Incident] = []
        for t in np.flatnonzero(is_suspicious).tolist():
            row = Outliers(*(x[t] for x in outliers))
            found += self._incident(self.count + t, rows.take(t), row, drifts[t], zeros[t])
        self.count += len(values)
        return found

    def _is_early_rise(self, index: int, loss: float) -> bool:
        """Return whether the loss of a few early rows is far above the first loss."""
        if index >= EARLY or math.isnan(loss):
            return False
        if math.isnan(self.first_loss) or loss <= 0:
            self.first_loss = loss if loss > 0 else math.inf
        self.num_above = self.num_above + 1 if loss > EARLY_RISE * self.first_loss else 0
        return self.num_above == NUM_ABOVE

    def _values(self, rows: Rows) -> HostArray:
        """Return the compared values of each row; NaN if a value is unknown or not finite."""
        is_known = np.stack([rows.has(flag) for flag in MEASURED], 1)[..., None]
        has_units, has_taps = rows.has(Outcome.HAS_UNITS), rows.has(Outcome.HAS_TAPS)
        norms = np.where(is_known, rows.norms, np.nan)
        norms[~has_units, :, 1:] = np.nan
        rms = np.where(has_taps[:, None, None], rows.taps[..., 1], np.nan)
        loss = np.where(rows.has(Outcome.HAS_LOSS), rows.loss, np.nan)[:, None]
        columns = [x.reshape(len(loss), -1) for x in (norms, np.swapaxes(rms, 1, 2), loss)]
        with np.errstate(divide="ignore", invalid="ignore"):
            values = np.hstack([np.log(np.hstack(columns)), loss])
        return np.where(np.isfinite(values), values, np.nan)

    def _incident(
        self, index: int, row: Rows, outliers: Outliers, drift: HostArray, zeros: HostArray
    ) -> list[Incident]:
        """Return the incident in one row, if there is one."""
        flags, size, norms = Outcome(int(row.outcome)), row.norms.shape[1], row.norms
        has_gradient, has_update, has_parameter = (flag in flags for flag in MEASURED)
        loss = float(row.loss) if Outcome.HAS_LOSS in flags else None
        # The rise of each norm that is an outlier; infinity for a norm that is not finite.
        is_outlier, excess = (x[: 3 * size].reshape(3, size) for x in outliers[:2])
        rises = np.where(is_outlier, np.exp(np.minimum(np.nan_to_num(excess), 80)), 0)
        gradient, update, parameter = np.where(np.isfinite(norms), rises, math.inf)
        is_finite = bool(np.isfinite(norms[0, 0]))
        is_tap = outliers.is_outlier[3 * size : -2]
        kinds = {
            "nan": has_gradient and np.isnan(norms[0, 0]),
            "infinity": has_gradient and np.isinf(norms[0, 0]),
            "norm": is_finite and gradient[0] > 0 or Outcome.SKIPPED_LARGE_NORM in flags,
            "loss": self._is_loss(loss, outliers, zeros[-1]) or Outcome.SKIPPED_LARGE_LOSS in flags,
            "leaf": is_finite and gradient[1:].any(),
            "parameter": has_parameter and (parameter[1:].any() or parameter[0] == math.inf),
            "zero": has_gradient and zeros[:-1].any(),
            "drift": drift.any(),
            "tap": is_tap.any(),
            "replica": Outcome.REPLICA_DIFFERS in flags,
            "window": Outcome.EMPTY_WINDOW in flags,
        }
        kinds["jump"] = has_parameter and parameter[0] > 0 and not kinds["parameter"]
        # A large update is no incident of its own if a large gradient or parameter explains it.
        is_large = has_update and update.any()
        kinds["update"] = (is_large or Outcome.SKIPPED in flags) and not any(kinds.values())
        causes = {kind for kind, is_found in kinds.items() if is_found}
        if causes == {"infinity"} and self._is_routine(index, flags, loss):
            causes.add("note")
            if self.has_noted:
                return []
            self.has_noted = True
        if not causes:
            return []
        fates = {fate for fate in FATES if Outcome[fate.upper()] in flags}
        fields: dict[str, Any] = {
            "step": int(row.step),
            "kinds": tuple(kind for kind in INCIDENT_KINDS if kind in causes | fates),
            "norm": float(norms[0, 0]) if has_gradient else None,
            "bad_elements": int(row.nonfinite[0]) if has_gradient else 0,
            "loss": loss,
            "update_norm": float(norms[1, 0]) if has_update else None,
            "parameter_norm": float(norms[2, 0]) if has_parameter else None,
            "batch_id": int(row.batch_id) if Outcome.HAS_BATCH_ID in flags else None,
        }
        if "replica" in causes:
            fields["device"] = int(row.device)
        fields |= self._thresholds(row, flags, outliers.threshold)
        if size > 1:
            ranks = parameter, row.nonfinite, gradient, zeros[:-1], drift, update
            masks = has_parameter, has_gradient, is_finite, has_gradient, True, has_update
            shown = [np.where(mask, x, 0)[1:] for x, mask in zip(ranks, masks, strict=True)]
            fields |= self._place(row, shown)
        if Outcome.HAS_TAPS in flags:
            fields |= self._taps(row.taps, is_tap, outliers.excess[3 * size : -2])
        return [self._with_streak(index, Incident(**fields), causes)]

    @staticmethod
    def _is_loss(loss: float | None, outliers: Outliers, is_zero: bool) -> bool:
        """Return whether the loss is an outlier, not finite, or has become exactly zero.

        A positive loss must also be an outlier as a logarithm. Losses that are rounded to zero are
        no fault.
        """
        if loss is None:
            return False
        if is_zero and outliers.threshold[-1] > ROUNDED:
            return True
        has_log = np.isfinite(outliers.threshold[-2])
        is_outlier = outliers.is_outlier[-1] and (outliers.is_outlier[-2] or not has_log)
        return bool(is_outlier) or not math.isfinite(loss)

    def _is_routine(self, index: int, flags: Outcome, loss: float | None) -> bool:
        """Return whether an infinite gradient norm is a rare overflow of a loss scale."""
        if Outcome.APPLIED in flags or not (loss is None or math.isfinite(loss)):
            return False
        rows = [row for row in self.infinite_rows if row > index - LONG]
        self.infinite_rows = [*rows, index]
        return len(self.infinite_rows) <= NUM_ROUTINE

    def _thresholds(self, row: Rows, flags: Outcome, threshold: HostArray) -> dict[str, float]:
        """Return the thresholds of the norms and the loss, or those of the guard that skipped."""
        size = row.norms.shape[1]
        logs = np.nan_to_num(threshold[[0, size, -2]], nan=math.inf)
        norm, update, loss = np.exp(np.minimum(logs, 700))
        norm, update, loss = (x if x < 1e300 else math.inf for x in (norm, update, loss))
        loss = max(loss if 0 < loss < math.inf else -math.inf, float(threshold[-1]))
        if Outcome.SKIPPED_LARGE_NORM in flags:
            norm = float(row.limits[0])
        if Outcome.SKIPPED_LARGE_LOSS in flags:
            loss = float(row.limits[1])
        names = "norm_threshold", "update_threshold", "loss_threshold"
        return dict(zip(names, map(float, (norm, update, loss)), strict=True))

    def _place(self, row: Rows, ranks: list[HostArray]) -> dict[str, Any]:
        """Return the unit with the strongest evidence, and the unit with the next largest share.

        The evidence is, from strongest to weakest: parameters that are not finite or have jumped,
        non-finite elements of the gradient, a rise of the gradient norm, a gradient that has become
        zero, a drift, an update that is not finite or has risen, and the share of the gradient.
        """
        norms, bad = row.norms[0], row.nonfinite
        is_scaled = np.isfinite(norms[0]) and norms[0] > 0
        shares = np.square(norms[1:] / norms[0]) if is_scaled else 1.0 * np.isinf(norms[1:])
        shares = bad[1:] / bad[0] if bad[0] else np.nan_to_num(shares)
        rank = next((rank for rank in ranks if rank.any()), shares)
        first = int(np.argmax(rank))
        others = np.where(np.arange(len(shares)) == first, 0, shares)
        factors = [ranks[i][first] for i in (0, 2, 4, 5)]
        return {
            "leaf": self.names.units[first],
            "share": float(shares[first]),
            "second_leaf": self.names.units[int(np.argmax(others))],
            "second_share": float(np.max(others)),
            "leaf_rise": next((float(x) for x in factors if x), 0.0),
        }

    def _taps(self, taps: HostArray, is_tap: HostArray, excess: HostArray) -> dict[str, Any]:
        """Return the first taps with non-finite values, and the tap whose RMS has risen most."""
        fields: dict[str, Any] = {}
        for side, name, order in (0, "activation", 1), (1, "cotangent", -1):
            is_bad = np.flatnonzero(taps[:, side, -1] > 0)[::order]
            if is_bad.size:
                fields[name] = self.names.taps[is_bad[0]]
        if is_tap.any():
            rise = np.where(is_tap, excess, -math.inf)
            side, tap = divmod(int(np.argmax(rise)), len(taps))
            name = f"{'cotangent' if side else 'activation'} of {self.names.taps[tap]}"
            fields |= {"tap": name, "tap_rise": float(np.exp(min(np.max(rise), 80)))}
        return fields

    def _with_streak(self, index: int, incident: Incident, causes: set[str]) -> Incident:
        """Count incidents with a common cause in a streak."""
        last = self.last if index - self.last_row <= STREAK else None
        if last is None or causes.isdisjoint(last.kinds):
            incident = incident._replace(first_step=incident.step)
        else:
            incident = incident._replace(streak=last.streak + 1, first_step=last.first_step)
        self.last, self.last_row = incident, index
        return incident
