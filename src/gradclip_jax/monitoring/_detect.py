"""Detect training faults in rows, with NumPy on the host, and describe them as incidents."""

import math
from typing import Any

import numpy as np

from .._types import HostArray
from ._incident import FATES, STREAK, Incident
from ._incident import KINDS as INCIDENT_KINDS
from ._outliers import EARLY, LONG, Drifts, Levels, Zeros
from ._rows import MEASURED, Names, Outcome, Rows

EARLY_RISE, NUM_ABOVE = 3.0, 3
"""Consecutive early rows whose loss exceeds 3 times the first one are an incident."""

ROUNDED = 0.02
"""Losses whose threshold is below this are rounded to 0 in many logs."""

NUM_ROUTINE = 4
"""Infinite norms in LONG rows up to which they are routine overflows of a loss scale."""

UPDATE, PARAMETER, LOG_LOSS, LOSS = -4, -3, -2, -1
"""The last columns that are compared. The first are the gradient norms of the tree and of units,
then the RMS of each tap's activation and cotangent."""


class Detector:
    """Find the incidents in consecutive rows.

    Args:
        names: Names of the columns of the rows.
    """

    def __init__(self, names: Names):
        self.names, self.size = names, 1 + len(names.units)
        kinds = ["gradient"] + ["unit"] * len(names.units) + ["tap"] * 2 * len(names.taps)
        self.levels = Levels([*kinds, "update", "parameter", "loss", "loss"])
        self.drifts, self.zeros = Drifts(self.size), Zeros(self.size + 1)
        self.infinite_rows: list[int] = []
        self.last: Incident | None = None
        self.first_loss, self.num_above = math.nan, 0
        self.has_noted, self.last_row, self.count = False, 0, 0

    def update(self, rows: Rows) -> list[Incident]:
        """Return the incidents in the next rows, which may be any number of rows."""
        if not len(rows.step):
            return []
        gradient = np.where(rows.has(Outcome.HAS_GRADIENT)[:, None], rows.norms[:, 0], np.nan)
        gradient[~rows.has(Outcome.HAS_UNITS), 1:] = np.nan
        loss = np.where(rows.has(Outcome.HAS_LOSS), rows.loss, np.nan)[:, None]
        values = _compared_values(rows, gradient, loss)
        rises, thresholds = self.levels.compare(values)
        drifts = self.drifts.compare(values[:, : self.size])
        zeros = self.zeros.compare(np.hstack([gradient, loss]))
        found: list[Incident] = []
        for t, evidence in enumerate(zip(rises, thresholds, drifts, zeros, strict=True)):
            found += self._incident(rows.take(t), *evidence)
            self.count += 1
        return found

    def _is_early_rise(self, loss: float) -> bool:
        """Return whether several early losses in a row are far above the first loss."""
        if math.isnan(self.first_loss) or loss <= 0:
            self.first_loss = loss if loss > 0 else math.inf
        self.num_above = self.num_above + 1 if loss > EARLY_RISE * self.first_loss else 0
        return self.count < EARLY and self.num_above == NUM_ABOVE

    def _incident(
        self, row: Rows, rise: HostArray, threshold: HostArray, drift: HostArray, zeros: HostArray
    ) -> list[Incident]:
        """Return the incident in one row, if there is one."""
        flags, units = Outcome(int(row.outcome)), rise[1 : self.size]
        measured = zip(row.norms[:, 0].tolist(), MEASURED, strict=True)
        norm, update, parameter = (x if flag in flags else None for x, flag in measured)
        loss_threshold = min(threshold[LOG_LOSS:])
        is_large_norm = Outcome.SKIPPED_LARGE_NORM in flags
        is_large_loss = Outcome.SKIPPED_LARGE_LOSS in flags
        incident = Incident(
            step=int(row.step),
            kinds=(),
            norm=norm,
            norm_threshold=float(row.limits[0] if is_large_norm else threshold[0]),
            loss=float(row.loss) if Outcome.HAS_LOSS in flags else None,
            loss_threshold=float(row.limits[1] if is_large_loss else loss_threshold),
            update_norm=update,
            update_threshold=float(threshold[UPDATE]),
            parameter_norm=parameter,
            bad_elements=int(row.nonfinite[0]),
            leaf_rise=float(units.max(initial=0) or drift.max()),
            batch_id=int(row.batch_id) if Outcome.HAS_BATCH_ID in flags else None,
            device=int(row.device) if Outcome.REPLICA_DIFFERS in flags else -1,
        )
        kinds = self._causes(incident, flags, rise, drift, zeros)
        if not kinds:
            return []
        last, first_step, streak = self.last, incident.step, 1
        if last and self.count - self.last_row <= STREAK and not kinds.isdisjoint(last.kinds):
            first_step, streak = last.first_step, last.streak + 1
        kinds |= {fate for fate in FATES if Outcome[fate.upper()] in flags}
        self.last_row = self.count
        self.last = incident._replace(
            kinds=tuple(kind for kind in INCIDENT_KINDS if kind in kinds),
            first_step=first_step,
            streak=streak,
            **self._place(row, kinds, (units, zeros[1:-1], drift[1:])),
            **self._taps(row.taps, rise[self.size : UPDATE]),
        )
        return [self.last]

    def _causes(
        self, x: Incident, flags: Outcome, rise: HostArray, drift: HostArray, zeros: HostArray
    ) -> set[str]:
        """Return the kinds of faults in one row."""
        is_zero_loss = zeros[-1] and x.loss_threshold > ROUNDED
        is_early_rise = self._is_early_rise(math.nan if x.loss is None else x.loss)
        found = {
            "nan": math.isnan(x.norm or 0),
            "infinity": x.norm == math.inf,
            "norm": rise[0] > 0 or Outcome.SKIPPED_LARGE_NORM in flags,
            "loss": rise[LOG_LOSS:].any() or is_early_rise or is_zero_loss,
            "leaf": rise[1 : self.size].any() and math.isfinite(x.norm or 0),
            "parameter": rise[PARAMETER] > 0 or not math.isfinite(x.parameter_norm or 0),
            "zero": zeros[:-1].any(),
            "drift": drift.any(),
            "tap": rise[self.size : UPDATE].any(),
            "replica": Outcome.REPLICA_DIFFERS in flags,
            "window": Outcome.EMPTY_WINDOW in flags,
        }
        found["loss"] |= not math.isfinite(x.loss or 0) or Outcome.SKIPPED_LARGE_LOSS in flags
        # A large update is no incident of its own if a large gradient or parameter explains it.
        is_large = rise[UPDATE] > 0 or not math.isfinite(x.update_norm or 0)
        found["update"] = (is_large or Outcome.SKIPPED in flags) and not any(found.values())
        kinds = {kind for kind, is_found in found.items() if is_found}
        if kinds == {"infinity"} and Outcome.APPLIED not in flags:
            recent = [i for i in self.infinite_rows if i > self.count - LONG]
            self.infinite_rows = [*recent, self.count]
            if len(recent) < NUM_ROUTINE:
                kinds = set() if self.has_noted else {"infinity", "note"}
                self.has_noted = True
        return kinds

    def _place(self, row: Rows, kinds: set[str], evidence: tuple[HostArray, ...]) -> dict[str, Any]:
        """Return the unit with the strongest evidence, and the unit with the next largest share.

        The evidence is, from strongest to weakest: large or non-finite parameters, non-finite
        elements of the gradient, a rise of the gradient norm, a gradient that has become zero, a
        drift, a large or non-finite update, and the share of the gradient.
        """
        if not self.names.units:
            return {}
        norms, bad = np.where(np.isnan(row.norms), np.inf, row.norms)[:, 1:], row.nonfinite[1:]
        is_infinite = np.isinf(norms[0])
        weights = is_infinite if is_infinite.any() else np.square(norms[0])
        weights = bad if bad.any() else weights
        shares = weights / (weights.sum() or 1)
        ranks = [bad, *evidence, norms[1] if "update" in kinds else shares, shares]
        if "parameter" in kinds:
            ranks = [norms[2]]
        first = int(np.argmax(next((rank for rank in ranks if rank.any()), shares)))
        others = np.where(np.arange(len(shares)) == first, 0, shares)
        return {
            "leaf": self.names.units[first],
            "share": float(shares[first]),
            "second_leaf": self.names.units[int(np.argmax(others))],
            "second_share": float(np.max(others)),
        }

    def _taps(self, taps: HostArray, rises: HostArray) -> dict[str, Any]:
        """Return the first taps with non-finite values, and the tap whose RMS has risen most."""
        fields: dict[str, Any] = {}
        for side, name, order in (0, "activation", 1), (1, "cotangent", -1):
            is_bad = np.flatnonzero(taps[:, side, -1] > 0)[::order]
            if is_bad.size:
                fields[name] = self.names.taps[is_bad[0]]
            if rises.any() and np.argmax(rises) % 2 == side:
                tap = self.names.taps[np.argmax(rises) // 2]
                fields |= {"tap": f"{name} of {tap}", "tap_rise": float(np.max(rises))}
        return fields


def _compared_values(rows: Rows, gradient: HostArray, loss: HostArray) -> HostArray:
    """Return the columns of `Levels`; NaN if a value is unknown, zero or not finite."""
    rms = np.where(rows.has(Outcome.HAS_TAPS)[:, None, None], rows.taps[..., 1], np.nan)
    is_known = np.stack([rows.has(flag) for flag in MEASURED[1:]], 1)
    others = np.where(is_known, rows.norms[:, 1:, 0], np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(np.hstack([gradient, rms.reshape(len(loss), -1), others, loss]))
    values = np.hstack([logs, loss])
    return np.where(np.isfinite(values), values, np.nan)
