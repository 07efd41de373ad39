"""Detect training faults in rows, with NumPy on the host, and describe them as incidents."""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from .._types import HostArray
from ._outliers import (
    BLOCK,
    HISTORY,
    LOG_LOSS,
    LOSS,
    PARAMETER,
    PERIOD,
    RATIO,
    RISE,
    UPDATE,
    Outliers,
    Rises,
    median,
)
from ._rows import Names, Outcome, Rows

NUM_ROUTINE = 4
"""Infinite norms in HISTORY rows up to which they are routine overflows of a loss scale."""

STREAKS = {"zero": 16, "clip": 200}
"""Consecutive zeros of a unit or of the loss, and starving factors of a clip, that are reported."""

STARVING = 1e-3
"""A clip with a smaller factor starves the optimizer."""

EXPLODED = 10.0
"""A loss that has fallen and then rises to so many times its first value has diverged."""

UNLEARNED = 5 * BLOCK
"""A run does not learn if its last `UNLEARNED - 2 * BLOCK` losses are then above the first `BLOCK`
ones. For noise with a correlation of 0.9 from row to row, this happens in 1 of 100 runs."""

STREAK = 8
"""Maximum number of rows between two incidents of one streak."""

_FATES = "skipped", "accumulated", "clipped"
_UNKNOWN = np.zeros(0)

Fault: TypeAlias = tuple[str, HostArray]
"""The description of a fault, and how strong its evidence is in each unit."""


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


class Streaks:
    """Streaks of rows with a condition, each of which is reported once.

    A streak is reported if it has `least` rows and twice as many as all earlier ones.
    """

    def __init__(self, least: HostArray):
        self.least, self.count, self.longest = least, *np.zeros((2, len(least)), int)

    def compare(self, is_true: HostArray, is_false: HostArray) -> HostArray:
        """Return which streaks to report in this row; rows without either are unknown."""
        self.longest[is_false] = np.maximum(self.longest, self.count)[is_false]
        self.count = np.where(is_false, 0, self.count + is_true)
        return is_true & (self.count == np.maximum(2 * self.longest, self.least))


class Losses:
    """Whether the losses of a run have fallen since its start, and whether they rise for good.

    Attributes:
        first: The first finite loss.
        best: The maximum of the `BLOCK` consecutive losses whose maximum is lowest.
        limit: The loss above which the last lasting rise goes on.
    """

    def __init__(self):
        self.rises, self.count, self.is_positive = Rises(np.log([RISE])), 0, True
        self.first = self.best = self.limit = math.inf
        self.highest_at_start, self.lowest_since = -math.inf, math.inf
        self.has_exploded = False

    @property
    def have_fallen(self) -> bool:
        """Whether `BLOCK` consecutive losses were clearly below the first one."""
        return self.best * RISE < self.first

    def have_grown(self, level: float) -> bool:
        """Whether the loss has only grown since the start, so that it may be a value loss.

        The size of a loss whose sign changes has no meaning either.
        """
        is_high = self.count < PERIOD or level > RISE * self.first
        return not self.is_positive or (is_high and not self.have_fallen)

    def update(self, loss: float) -> str:
        """Return what the losses are compared with if they have risen for good, otherwise ""."""
        value = loss if math.isfinite(loss) else math.inf
        self.first = value if math.isinf(self.first) else self.first
        self.is_positive &= value >= 0
        if self.count < BLOCK:
            self.highest_at_start = max(self.highest_at_start, value)
        elif self.count >= 2 * BLOCK:
            self.lowest_since = min(self.lowest_since, value)
        self.count += 1
        log_loss = math.log(value) if value > 0 else math.nan
        (has_risen,), *levels = self.rises.compare(np.array([log_loss]))
        lowest, best = np.exp(np.ravel(levels)).tolist()
        self.best = min(self.best, best)
        self.has_exploded = False
        if has_risen and self.is_positive:
            self.limit = RISE * best
            self.has_exploded = self.have_fallen and lowest > EXPLODED * self.first
            last = f"the lowest of the last {BLOCK} losses, {lowest:.3g}"
            reference = f"the highest of the best {BLOCK}, {best:.3g}"
            return f"{last}, is above {RISE} times {reference}"
        if self.count == UNLEARNED and self.lowest_since > self.highest_at_start:
            self.limit = self.highest_at_start
            first = f"the highest of the first {BLOCK}, {self.limit:.3g}"
            return f"the last {UNLEARNED - 2 * BLOCK} losses are above {first}"
        return ""


class Evidence(NamedTuple):
    """One row and what its values are compared with.

    Attributes:
        row: The row.
        outliers: Logarithms of the ratios of outliers to what is usual, by column of `Outliers`.
        limits: The smallest values that would be outliers, by column.
        streaks: Which streaks of zeros of the gradient norms and of the loss are reported, and
            whether a streak of starving clip factors is.
        drifts: Logarithms of the ratios by which the gradient norms of the tree and of the units
            have slowly risen.
        risen: What the last losses are compared with if they have risen for good.
        has_exploded: Whether they are far above the first one.
        tap_names: Names of the taps.
    """

    row: Rows
    outliers: HostArray
    limits: HostArray
    streaks: HostArray
    drifts: HostArray
    risen: str
    has_exploded: bool
    tap_names: list[str]

    @property
    def has_bad_loss(self) -> bool:
        """Whether the loss is an outlier, non-finite, has become zero, or has exploded."""
        is_outlier = self.outliers[LOG_LOSS:].any() or self.streaks[-2] or self.has_exploded
        return bool(is_outlier or not math.isfinite(self.row.loss))

    def compared(self, name: str, value: float, column: int) -> str:
        """Describe a value, with the threshold of its column if the value exceeds it."""
        limit = self.limits[column]
        return f"{name} {value:.2g}" + (f" (threshold {limit:.2g})" if value > limit else "")

    def shares(self) -> tuple[str, HostArray]:
        """Return the largest share of a unit of the squared norm or of the non-finite elements."""
        bad, norms = self.row.nonfinite[1:], self.row.norms[0, 1:]
        parts = bad if bad.any() else ~np.isfinite(norms)
        parts = parts if parts.any() else np.square(norms)
        return (f", {100 * parts.max() / parts.sum():.0f} %" if parts.any() else ""), parts


def _faults_of(x: Evidence) -> Iterator[tuple[str, str, HostArray]]:
    """Yield the kind and the description of each fault, and how strong its evidence is by unit.

    They are in the order of their evidence for a unit, the strongest first.
    """
    row, num_norms = x.row, len(x.drifts)
    norm, _, parameter = row.norms[:, 0].tolist()
    units, taps = x.outliers[1:num_norms], x.outliers[num_norms:UPDATE]
    if x.outliers[PARAMETER] or not math.isfinite(parameter):
        yield "parameter", x.compared("parameter norm", parameter, PARAMETER), row.norms[2, 1:]
    if not math.isfinite(norm):
        (share, parts), count = x.shares(), int(row.nonfinite[0])
        elements = f", {count} non-finite element{'s' * (count > 1)}" if count else ""
        kind = "nan" if math.isnan(norm) else "infinity"
        yield kind, f"gradient norm {norm}{elements}{share}", parts
    elif units.any():
        yield "leaf", f"relative gradient norm rose {_ratio(units)} times", units
    if x.streaks[:num_norms].any():
        yield "zero", "the gradient has become zero", x.streaks[1:num_norms]
    if x.drifts.any():
        yield "drift", f"gradient norm slowly rose {_ratio(x.drifts)} times", x.drifts[1:]
    if x.outliers[0] or (x.has_bad_loss and norm > x.limits[0]):
        share, parts = x.shares()
        yield "norm", x.compared("gradient norm", norm, 0) + share, parts
    if x.has_bad_loss:
        yield "loss", x.compared("loss", float(row.loss), LOSS), _UNKNOWN
    if x.risen:
        yield "risen", x.risen, _UNKNOWN
    if taps.any():
        name = x.tap_names[int(np.argmax(taps))]
        yield "tap", f"RMS of the {name} rose {_ratio(taps)} times", _UNKNOWN
    if x.streaks[-1]:
        factor = row.factors.min()
        text = f"a clip has multiplied {STREAKS['clip']} gradients by less than {STARVING}"
        never = "a clip multiplies the gradient by 0, its threshold is not positive"
        yield "clip", f"{text}, now by {factor:.2g}" if factor else never, _UNKNOWN
    if row.outcome & Outcome.REPLICA_DIFFERS:
        yield "replica", f"the parameters on device {row.device} differ", _UNKNOWN
    if row.outcome & Outcome.EMPTY_WINDOW:
        yield "window", "the weight of the accumulated window is zero", _UNKNOWN


def _update(x: Evidence) -> tuple[str, HostArray] | None:
    """Describe an update norm that is large, not finite, or of a skipped step."""
    norm = float(x.row.norms[1, 0])
    if x.outliers[UPDATE] or not math.isfinite(norm) or x.row.outcome & Outcome.SKIPPED:
        return x.compared("update norm", norm, UPDATE), x.row.norms[1, 1:]
    return None


class Detector:
    """Find the incidents in consecutive rows.

    Args:
        names: Names of the columns of the rows.
    """

    def __init__(self, names: Names):
        self.names, self.size = names, 1 + len(names.units)
        self.taps = [f"activation of {x}" for x in names.taps]
        self.taps += [f"cotangent of {x}" for x in reversed(names.taps)]
        self.outliers, self.losses = Outliers(len(names.units), len(self.taps)), Losses()
        self.drifts = Rises(np.log([RATIO["tree"], *[RATIO["part"]] * len(names.units)]))
        least = 1, *[STREAKS["zero"]] * self.size, STREAKS["clip"]
        self.streaks = Streaks(np.array(least))
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
        outliers, thresholds, levels = self.outliers.compare(values)
        thresholds[:, LOSS] = np.fmin(thresholds[:, LOG_LOSS], thresholds[:, LOSS])
        skips = Outcome.SKIPPED_LARGE_NORM, Outcome.SKIPPED_LARGE_LOSS
        for column, flag, limits in zip((0, LOSS), skips, rows.limits.T, strict=True):
            outliers[:, column] += rows.has(flag)
            np.copyto(thresholds[:, column], limits, where=rows.has(flag))
        found: list[Incident] = []
        for t, (outlier, limits) in enumerate(zip(outliers, thresholds, strict=True)):
            row = rows.take(t)._replace(taps=taps[t])
            streaks = self._streaks(row, np.append(gradient[t], loss[t]))
            has_loss = row.outcome & Outcome.HAS_LOSS
            risen = self.losses.update(float(loss[t])) if has_loss else ""
            drifts = self._drifts(values[t, : self.size])
            x = (row, outlier, limits, streaks, drifts, risen, self.losses.has_exploded)
            faults = self._faults(Evidence(*x, self.taps), levels[t])
            if faults:
                limit = self.losses.limit if risen else limits[LOSS]
                found += self._incident(row, faults, float(limit))
            self.count += 1
        return found

    def _streaks(self, row: Rows, values: HostArray) -> HostArray:
        """Return which values have become exactly zero, and whether a clip starves the optimizer.

        The first zero of the whole gradient and the first clip factor of zero are reported at once.
        """
        has_run = row.outcome & Outcome.APPLIED and math.isfinite(row.norms[0, 0])
        factor = row.factors.min(initial=1.0) if has_run else np.nan
        is_first = factor == 0 and self.streaks.longest[-1] + self.streaks.count[-1] == 0
        starts = self.streaks.compare(
            np.append(values == 0, factor < STARVING),
            np.append(abs(values) > 0, factor >= STARVING),
        )
        starts[-1] = is_first or (starts[-1] and factor > 0)
        return starts

    def _drifts(self, norms: HostArray) -> HostArray:
        """Return by how much gradient norms have slowly risen relative to the other units."""
        if self.size > 3:
            norms = np.append(np.nan, norms[1:] - median(norms[1:]))
        has_risen, lowest, best = self.drifts.compare(norms)
        return np.where(has_risen, lowest - best, 0)

    def _faults(self, x: Evidence, level: float) -> dict[str, Fault]:
        """Return the faults in one row."""
        faults = {kind: (text, evidence) for kind, text, evidence in _faults_of(x)}
        if not faults and (fault := _update(x)):  # other faults explain a large update
            faults["update"] = fault
        if "loss" in faults and math.isfinite(x.row.loss) and self.losses.have_grown(level):
            faults["growth"] = "the loss has not fallen since the start", _UNKNOWN
        return faults

    def _incident(
        self, row: Rows, faults: dict[str, Fault], loss_threshold: float
    ) -> list[Incident]:
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


def _ratio(rises: HostArray) -> str:
    """Format the ratio of the largest rise, which is a logarithm."""
    return f"{math.exp(np.max(rises)):.2g}"
