"""Detect training faults in rows, with NumPy on the host, and describe them as incidents."""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from .._types import HostArray
from ._outliers import HISTORY, LOG_LOSS, LOSS, PARAMETER, UPDATE, Levels
from ._rows import Names, Outcome, Rows

NUM_ROUTINE = 4
"""Infinite norms in HISTORY rows up to which they are routine overflows of a loss scale."""

LEAST_ZEROS = 16
"""Consecutive zeros of a unit or of the loss that are reported."""

STREAK = 8
"""Maximum number of rows between two incidents of one streak."""

_FATES = "skipped", "accumulated", "clipped"
_UNKNOWN = np.zeros(0)

Faults: TypeAlias = dict[str, tuple[str, HostArray]]
"""The description of each kind of fault, and how strong its evidence is in each unit."""


class Incident(NamedTuple):
    """A training step in which a `Monitor` detected a fault; `str` returns it as a sentence.

    Attributes:
        step: Index of the call of `watch`, starting at 0.
        kinds: Kinds of the fault, from the strongest evidence to the weakest; docs/watching.md
            lists them.
        sentence: What happened in the step.
        leaf: Name of the leaf or layer with the strongest evidence; "" if it is unknown.
        loss_threshold: Loss from which on it is an outlier; inf if there is no threshold yet.
        batch_id: The extra argument `batch_id` of `update`; None if it was not passed.
        streak: Number of incidents with a common kind that follow each other within 8 rows,
            including this one.
    """

    step: int
    kinds: tuple[str, ...]
    sentence: str = ""
    leaf: str = ""
    loss_threshold: float = math.inf
    batch_id: int | None = None
    streak: int = 1

    def __str__(self) -> str:
        """Return the incident as a sentence."""
        return self.sentence


def from_lines(lines: Iterable[Mapping[str, Any]]) -> list[Incident]:
    """Return the incidents in a log, whose lines have the fields of `Incident`."""
    found = (Incident(*(x[key] for key in Incident._fields)) for x in lines if "sentence" in x)
    return [x._replace(kinds=tuple(x.kinds), loss_threshold=float(x.loss_threshold)) for x in found]


class Detector:
    """Find the incidents in consecutive rows.

    Args:
        names: Names of the columns of the rows.
    """

    def __init__(self, names: Names):
        self.names, self.size = names, 1 + len(names.units)
        self.taps = [f"activation of {x}" for x in names.taps]
        self.taps += [f"cotangent of {x}" for x in reversed(names.taps)]
        self.levels = Levels(len(names.units), len(self.taps))
        self.num_zeros, self.most_zeros = np.zeros((2, self.size + 1), int)
        self.least_zeros = np.append(1, np.full(self.size, LEAST_ZEROS))
        self.overflows = deque[int](maxlen=NUM_ROUTINE + 1)
        self.count, self.last_row, self.last_kinds = 0, 0, ()
        self.streak, self.first_step = 0, 0

    def update(self, rows: Rows) -> list[Incident]:
        """Return the incidents in the next rows, which may be any number of rows."""
        gradient = np.where(rows.has(Outcome.HAS_GRADIENT)[:, None], rows.norms[:, 0], np.nan)
        gradient[~rows.has(Outcome.HAS_UNITS), 1:] = np.nan
        loss = np.where(rows.has(Outcome.HAS_LOSS), rows.loss, np.nan)
        taps = np.hstack([rows.taps[:, :, 0], rows.taps[:, ::-1, 1]])
        values = np.column_stack([gradient, taps[..., 1], rows.norms[:, 1:, 0], loss, loss])
        values[np.isinf(values)] = np.nan
        values[:, :LOSS] = np.log(np.where(values[:, :LOSS] > 0, values[:, :LOSS], np.nan))
        rises, drifts, thresholds = self.levels.compare(values)
        thresholds[:, LOSS] = np.fmin(thresholds[:, LOG_LOSS], thresholds[:, LOSS])
        skips = Outcome.SKIPPED_LARGE_NORM, Outcome.SKIPPED_LARGE_LOSS
        for column, flag, limits in zip((0, LOSS), skips, rows.limits.T, strict=True):
            rises[:, column] += rows.has(flag)
            np.copyto(thresholds[:, column], limits, where=rows.has(flag))
        zeros = map(self._zeros, np.column_stack([gradient, loss]))
        found: list[Incident] = []
        for t, evidence in enumerate(zip(rises, drifts, thresholds, zeros, strict=True)):
            row = rows.take(t)._replace(taps=taps[t])
            if faults := self._faults(row, *evidence):
                found += self._incident(row, faults, float(thresholds[t, LOSS]))
            self.count += 1
        return found

    def _zeros(self, values: HostArray) -> HostArray:
        """Return which values have become exactly zero: the gradient norms and the loss.

        A streak of zeros is reported once, if it has LEAST_ZEROS rows and twice as many as all
        earlier ones. The first zero of the whole gradient is reported at once.
        """
        is_zero, is_over = values == 0, abs(values) > 0
        self.most_zeros[is_over] = np.maximum(self.most_zeros, self.num_zeros)[is_over]
        self.num_zeros = np.where(is_over, 0, self.num_zeros + is_zero)
        return is_zero & (self.num_zeros == np.maximum(2 * self.most_zeros, self.least_zeros))

    def _faults(
        self, row: Rows, rise: HostArray, drift: HostArray, limit: HostArray, zero: HostArray
    ) -> Faults:
        """Return the faults in one row, from the strongest evidence for a unit to the weakest."""
        flags, loss = int(row.outcome), float(row.loss)
        (norm, update, parameter), norms = row.norms[:, 0].tolist(), row.norms[:, 1:]
        units, taps, bad = rise[1 : self.size], rise[self.size : UPDATE], row.nonfinite[1:]
        parts = bad if bad.any() else ~np.isfinite(norms[0])
        parts = parts if parts.any() else np.square(norms[0])
        share = f", {100 * parts.max() / parts.sum():.0f} %" if parts.any() else ""
        found = Faults()
        if rise[PARAMETER] or not math.isfinite(parameter):
            found["parameter"] = _compared("parameter norm", parameter, limit[PARAMETER]), norms[2]
        if not math.isfinite(norm):
            count = int(row.nonfinite[0])
            elements = f", {count} non-finite element{'s' * (count > 1)}" if count else ""
            kind = "nan" if math.isnan(norm) else "infinity"
            found[kind] = f"gradient norm {norm}{elements}{share}", parts
        elif units.any():
            found["leaf"] = f"relative gradient norm rose {_ratio(units)} times", units
        if zero[:-1].any():
            found["zero"] = "the gradient has become zero", zero[1:-1]
        if drift.any():
            found["drift"] = f"gradient norm slowly rose {_ratio(drift)} times", drift[1:]
        is_bad_loss = rise[LOG_LOSS:].any() or zero[-1] or not math.isfinite(loss)
        if rise[0] or is_bad_loss and norm > limit[0]:
            found["norm"] = _compared("gradient norm", norm, limit[0]) + share, parts
        if is_bad_loss:
            found["loss"] = _compared("loss", loss, limit[LOSS]), _UNKNOWN
        if taps.any():
            name = self.taps[int(np.argmax(taps))]
            found["tap"] = f"RMS of the {name} rose {_ratio(taps)} times", _UNKNOWN
        if flags & Outcome.REPLICA_DIFFERS:
            found["replica"] = f"the parameters on device {row.device} differ", _UNKNOWN
        if flags & Outcome.EMPTY_WINDOW:
            found["window"] = "the weight of the accumulated window is zero", _UNKNOWN
        is_large = rise[UPDATE] or not math.isfinite(update) or flags & Outcome.SKIPPED
        if is_large and not found:  # a large gradient or parameter explains a large update
            found["update"] = _compared("update norm", update, limit[UPDATE]), norms[1]
        return found

    def _incident(self, row: Rows, faults: Faults, loss_threshold: float) -> list[Incident]:
        """Return the incident in one row, unless it is a routine overflow."""
        if list(faults) == ["infinity"] and not row.outcome & Outcome.APPLIED:
            self.overflows.append(self.count)
            if len(self.overflows) == 1:
                faults["note"] = "others as rare as this one are not reported", _UNKNOWN
            elif len(self.overflows) <= NUM_ROUTINE or self.overflows[0] <= self.count - HISTORY:
                return []
        step, flags, leaf = int(row.step), Outcome(int(row.outcome)), ""
        batch_id = int(row.batch_id) if Outcome.HAS_BATCH_ID in flags else None
        batch = "" if batch_id is None else f", batch {batch_id}"
        fates = " and ".join(x for x in _FATES if Outcome[x.upper()] in flags) or "applied"
        parts = list[str]()
        for text, evidence in faults.values():
            unit = self.names.units[np.argmax(evidence)] if evidence.any() else ""
            parts.append(f"{text} in {unit}" if unit else text)
            leaf = leaf or unit
        if row.taps[:, -1].any():
            parts.append(f"first non-finite {self.taps[np.flatnonzero(row.taps[:, -1])[0]]}")
        if self.count - self.last_row > STREAK or faults.keys().isdisjoint(self.last_kinds):
            self.first_step, self.streak = step, 0
        self.streak += 1
        if self.streak > 1:
            parts.append(f"{self.streak} times since step {self.first_step}")
        self.last_row, self.last_kinds = self.count, tuple(faults)
        sentence = f"step {step}{batch}: {fates}, {'; '.join(parts)}"
        fields = self.last_kinds, sentence, leaf, loss_threshold, batch_id, self.streak
        return [Incident(step, *fields)]


def _compared(name: str, value: float, threshold: float) -> str:
    """Describe a value, with the threshold if the value exceeds it."""
    return f"{name} {value:.2g}" + (f" (threshold {threshold:.2g})" if value > threshold else "")


def _ratio(rises: HostArray) -> str:
    """Format the ratio of the largest rise, which is a logarithm."""
    return f"{math.exp(np.max(rises)):.2g}"
