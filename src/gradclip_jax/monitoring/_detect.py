"""Detect training faults in rows, with NumPy on the host, and describe them as incidents."""

import math
from typing import Any

import numpy as np

from .._types import HostArray
from ._incident import FATES, STREAK, Incident
from ._incident import KINDS as INCIDENT_KINDS
from ._outliers import BLOCK, EARLY, LONG, Drifts, Levels, Outliers, Zeros
from ._rows import KINDS, MEASURED, Names, Outcome, Rows

FAULTS = (
    Outcome.SKIPPED
    | Outcome.SKIPPED_LARGE_NORM
    | Outcome.SKIPPED_LARGE_LOSS
    | Outcome.REPLICA_DIFFERS
    | Outcome.EMPTY_WINDOW
)
"""Outcomes that are incidents."""

EARLY_RISE, NUM_ABOVE = 3.0, 3
"""Consecutive early rows whose loss exceeds 3 times the first one are an incident."""

ROUNDED = 0.02
"""Losses whose threshold is below this are rounded to 0 in many logs."""

NUM_ROUTINE = 4
"""Infinite norms in LONG rows up to which they are routine overflows of a loss scale."""


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
        elif drift.any():
            fields["leaf_rise"] = float(drift[0])
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
