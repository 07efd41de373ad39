"""Find the incidents in the rows of a run, with NumPy on the host.

    values   = logarithms of the norms, of the RMS of the taps and of the loss; NaN if unknown
    findings = results of the rules of `_outliers` for the values of a row
    faults   = problems that the findings and the flags of the row indicate, one for each kind
    incident = all faults of a row, described in one sentence

| kind of fault | rule |
| --- | --- |
| `nan`, `infinity` | the gradient norm is not finite |
| `norm`, `leaf`, `update`, `parameter`, `tap` | the norm or the RMS is an outlier; a norm that is \
  not finite is a fault as well |
| `drift` | a gradient norm has risen permanently |
| `zero` | a gradient norm is 0: of the tree in one row, of a unit in a streak |
| `loss` | the loss is an outlier, is not finite, is 0 in a streak, or has diverged |
| `risen` | the loss has risen permanently, or the run does not learn |
| `flat` | beside `risen`: the run does not learn, and its loss has hardly changed |
| `growth` | beside `loss`: the loss has not fallen since the start, or is sometimes negative |
| `clip` | a factor of a clip is 0 or below STARVING in a streak |
| `replica`, `window` | flags that `watch` has set in the row |
| `state` | the state has gone back without a rewind; see `Monitor.read` |
| `note` | beside `infinity`: it is the first overflow of a loss scale |
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..._types import HostArray
from .._layout import Names, Outcome
from ._losses import Losses, LossRise
from ._outliers import (
    GAP,
    HISTORY,
    LOG_LOSS,
    LOSS,
    PARAMETER,
    PERIOD,
    RATIO,
    STARVING,
    STARVING_ROWS,
    TREE,
    UPDATE,
    WINDOW,
    LastingRises,
    Outliers,
    Periods,
    Streaks,
    median,
)
from ._rows import Rows

_REPORTED = Outcome.SKIPPED | Outcome.REPLICA_DIFFERS | Outcome.EMPTY_WINDOW
"""Rows with one of these flags are incidents even if all of their values are normal."""

_SKIPS = {TREE: Outcome.SKIPPED_LARGE_NORM, LOSS: Outcome.SKIPPED_LARGE_LOSS}
"""The columns that guards compare with a threshold, and the flags of the rows that they skip; in
the order of `Rows.limits`."""


class Incident(NamedTuple):
    """A training step in which a `Monitor` detected a fault; `str` returns it as a sentence.

    Attributes:
        step: Index of the call of `watch`, starting at 0.
        kinds: Kinds of the fault, from the strongest evidence to the weakest; docs/watching.md
            lists them.
        sentence: What happened in the step.
        leaf: Name of the leaf or layer with the strongest evidence; "" if it is unknown.
        loss_threshold: Smallest loss that is an outlier; inf if there is no threshold yet.
        batch_id: The extra argument `batch_id` of `update`; None if it was not passed.
        streak: Number of consecutive incidents, up to this one, that are at most 8 rows apart and
            share a kind.
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


class Fault(NamedTuple):
    """A problem in a row, such as a NaN or a loss that is too large.

    Attributes:
        kind: One of the kinds listed in the module docstring.
        text: Description, which is inserted into the sentence of the incident.
        by_unit: Strength of the evidence in each leaf or layer; empty if it is unknown.
    """

    kind: str
    text: str
    by_unit: HostArray = np.zeros(0)


class Findings(NamedTuple):
    """The measurements of one step, and the results of the detection rules for them.

    Attributes:
        row: The row; its taps are float[taps, 3] in the order of `tap_names`.
        tap_names: Names of the activations and the cotangents of the taps.
        thresholds: For each column, the smallest value that would be an outlier.
        loss_rise: A lasting rise of the loss, or None.
        place: Number of rows before this one.
        rises: Logarithm of the ratio of each outlier to its level, by column; 0 for other values.
        unit_rises: The entries of `rises` for the gradient norms of leaves or layers.
        tap_rises: The entries of `rises` for the RMS values of tapped activations.
        drifts: Logarithms of the ratios by which gradient norms have risen permanently, for the
            tree and each unit; 0 without a rise.
        is_zero: Whether the gradient norms of the tree and of each unit, and the loss, have become
            0.
        has_grown: Whether the loss may be a value loss, which grows with the return of a policy.
        is_starving: Whether the factor of a clip has been almost 0 for a long time.
    """

    row: Rows
    tap_names: list[str]
    thresholds: HostArray
    loss_rise: LossRise | None
    place: int
    rises: HostArray
    unit_rises: HostArray
    tap_rises: HostArray
    drifts: HostArray
    is_zero: HostArray
    has_grown: bool
    is_starving: bool

    @property
    def is_bad_loss(self) -> bool:
        """Whether the loss is an outlier, is not finite, has become 0, or has diverged."""
        is_outlier = self.rises[LOG_LOSS] or self.rises[LOSS] or self.is_zero[-1]
        has_exploded = self.loss_rise is not None and self.loss_rise.has_exploded
        return bool(is_outlier or has_exploded or not math.isfinite(self.row.loss))

    def describe(self, name: str, value: float, column: int) -> str:
        """Describe a value, with its threshold if the value exceeds it."""
        limit = self.thresholds[column]
        return f"{name} {value:.2g}" + (f" (threshold {limit:.2g})" if value > limit else "")


def _faults_of(x: Findings) -> Iterator[Fault]:
    """Yield the faults of a row; faults that identify a leaf or layer most clearly come first."""
    row = x.row
    norm, _, parameter = row.norms[:, 0].tolist()
    if x.rises[PARAMETER] or not math.isfinite(parameter):
        text = x.describe("parameter norm", parameter, PARAMETER)
        yield Fault("parameter", text, row.norms[2, 1:])
    if not math.isfinite(norm):
        yield _nonfinite_gradient(row)
    elif x.unit_rises.any():
        text = f"relative gradient norm rose {_ratio(x.unit_rises)} times"
        yield Fault("leaf", text, x.unit_rises)
    if x.is_zero[:-1].any():
        yield Fault("zero", "the gradient has become zero", x.is_zero[1:-1])
    if x.drifts.any():
        text = f"gradient norm slowly rose {_ratio(x.drifts)} times"
        yield Fault("drift", text, x.drifts[1:])
    if x.rises[TREE] or (x.is_bad_loss and norm > x.thresholds[TREE]):
        parts, share = _parts(row)
        yield Fault("norm", x.describe("gradient norm", norm, TREE) + share, parts)
    if x.is_bad_loss:
        yield Fault("loss", x.describe("loss", float(row.loss), LOSS))
    if x.loss_rise:
        yield Fault("risen", x.loss_rise.text)
        if x.loss_rise.is_flat:
            yield Fault("flat", f"all losses are within a factor of {RATIO['loss']}")
    if x.tap_rises.any():
        name = x.tap_names[int(np.argmax(x.tap_rises))]
        yield Fault("tap", f"RMS of the {name} rose {_ratio(x.tap_rises)} times")
    if x.is_starving:
        factor = row.factors.min()
        text = f"{STARVING_ROWS} gradients by less than {STARVING}, now by {factor:.2g}"
        text = text if factor else f"{PERIOD} gradients by 0"
        yield Fault("clip", f"a clip has multiplied {text}")
    if row.outcome & Outcome.REPLICA_DIFFERS:
        yield Fault("replica", f"the parameters on device {row.device} differ")
    if row.outcome & Outcome.EMPTY_WINDOW:
        yield Fault("window", "the weight of the accumulated window is zero")


def _update_fault(x: Findings) -> Iterator[Fault]:
    """Yield a fault if the update is an outlier or not finite, or if the step was skipped."""
    norm = float(x.row.norms[1, 0])
    is_bad = x.rises[UPDATE] or not math.isfinite(norm)
    text = x.describe("update norm", norm, UPDATE)
    if not is_bad and x.row.outcome & Outcome.SKIPPED_NONFINITE:
        # The row only contains the last micro-batch of the window.
        text = "a guard found non-finite values in the window or the step"
    if is_bad or x.row.outcome & Outcome.SKIPPED:
        yield Fault("update", text, x.row.norms[1, 1:])


def _nonfinite_gradient(row: Rows) -> Fault:
    """Return the fault of a gradient that is not finite."""
    (parts, share), count, norm = _parts(row), int(row.nonfinite[0]), float(row.norms[0, 0])
    elements = f", {count} non-finite element{'s' * (count > 1)}" if count else ""
    kind = "nan" if math.isnan(norm) else "infinity"
    return Fault(kind, f"gradient norm {norm}{elements}{share}", parts)


def _parts(row: Rows) -> tuple[HostArray, str]:
    """Return how much each unit contributes to a gradient, and format the largest share.

    A contribution is a number of non-finite elements, or a squared norm if all are finite.
    """
    bad, norms = row.nonfinite[1:], row.norms[0, 1:]
    parts = bad if bad.any() else ~np.isfinite(norms)
    parts = parts if parts.any() else np.square(norms)
    return parts, (f", {100 * parts.max() / parts.sum():.0f} %" if parts.any() else "")


def _ratio(rises: HostArray) -> str:
    """Convert the largest rise, which is a logarithm, to a ratio and format it."""
    return f"{math.exp(np.max(rises)):.2g}"


class Detector:
    """Find the incidents in consecutive rows.

    Args:
        names: Names of the columns of the rows.
    """

    def __init__(self, names: Names):
        self.names, num_units = names, len(names.units)
        self.tap_names = [f"activation of {x}" for x in names.taps]
        self.tap_names += [f"cotangent of {x}" for x in reversed(names.taps)]
        self.outliers, self.losses = Outliers(num_units, len(self.tap_names)), Losses()
        ratios = [RATIO["tree"], *[RATIO["part"]] * num_units]
        self.drifts = LastingRises(np.log(ratios))
        self.zeros = Streaks([1, *[PERIOD] * (num_units + 1)])  # tree, units, loss
        self.small_factors = Streaks([PERIOD, STARVING_ROWS])
        self.count, self.last_overflow = 0, -HISTORY  # rows so far, and at the last overflow
        # The last incident, the index of its row, and the first step of its streak.
        self.last, self.last_row, self.first_step = Incident(0, ()), 0, 0

    def update(self, rows: Rows) -> list[Incident]:
        """Process any number of new rows, and return their incidents."""
        starts = range(0, len(rows.step), HISTORY)  # in parts, to use less memory
        parts = (rows.take(slice(start, start + HISTORY)) for start in starts)
        return [x for part in parts for row in self._findings(part) for x in self._incidents(row)]

    def _findings(self, rows: Rows) -> Iterator[Findings]:
        """Yield the findings of the next rows; skip rows without findings."""
        norms, loss, taps = _known_values(rows)
        values = _logarithms(norms, rows.norms[:, 1:, 0], loss, taps[..., 1])
        rises, periods = self.outliers.compare(values)
        for column, flag in _SKIPS.items():
            rises[:, column] += rows.has(flag)
        zeros = np.column_stack([norms, loss])
        is_zero = self.zeros.compare(zeros == 0, abs(zeros) > 0)
        drifts = self._drifts(values[:, [TREE]], values[:, self.outliers.units])
        loss_rises, has_grown = self._loss_rises(rows, periods)
        is_starving = self._is_starving(rows)
        is_bad = ~np.isfinite(np.column_stack([rows.norms[:, :, 0], rows.loss]))
        found = np.column_stack([rises, is_zero, drifts, is_starving, rows.has(_REPORTED), is_bad])
        found[list(loss_rises)] = True
        for t in np.flatnonzero(np.any(found, axis=1)).tolist():
            row = rows.take(t)._replace(taps=taps[t])
            yield Findings(
                row=row,
                tap_names=self.tap_names,
                thresholds=self._thresholds(row, periods, t),
                loss_rise=loss_rises.get(t),
                place=self.count + t,
                rises=rises[t],
                unit_rises=rises[t, self.outliers.units],
                tap_rises=rises[t, self.outliers.taps],
                drifts=drifts[t],
                is_zero=is_zero[t],
                has_grown=has_grown[t],
                is_starving=is_starving[t],
            )
        self.count += len(values)

    def _thresholds(self, row: Rows, periods: Periods, t: int) -> HostArray:
        """Return the smallest value of each column that would be an outlier in row `t`.

        If a guard has skipped the row because of its threshold, this threshold is used.
        """
        thresholds = self.outliers.thresholds(periods, t)
        for limit, (column, flag) in zip(row.limits, _SKIPS.items(), strict=True):
            if row.outcome & flag and limit != 0:  # it is 0 in rows of a log
                thresholds[column] = limit
        return thresholds

    def _drifts(self, tree: HostArray, units: HostArray) -> HostArray:
        """Return the permanent rises of the gradient norms of the tree and of the units.

        With more than two units, they are compared with their median instead of the tree.
        """
        if units.shape[1] > 2:
            tree, units = np.full_like(tree, np.nan), units - median(units)[:, None]
        norms = np.hstack([tree, units])
        at, drifts = np.flatnonzero(np.any(~np.isnan(norms), axis=1)), np.zeros(norms.shape)
        has_risen, lowest, best = self.drifts.compare(norms[at])
        drifts[at] = np.where(has_risen, lowest - best, 0)
        return drifts

    def _loss_rises(self, rows: Rows, periods: Periods) -> tuple[dict[int, LossRise], HostArray]:
        """Return the lasting rises of the loss by row, and where it may be a value loss."""
        at, has_grown = np.flatnonzero(rows.has(Outcome.HAS_LOSS)), np.zeros(len(rows.step), bool)
        levels = periods.levels[periods.of_row[at], LOSS]
        rises, has_grown[at] = self.losses.compare(rows.loss[at], levels)
        return {int(at[i]): rise for i, rise in rises.items()}, has_grown

    def _is_starving(self, rows: Rows) -> HostArray:
        """Return whether a clip factor has been 0 or almost 0 for too many steps."""
        factor = rows.factors.min(axis=1, initial=1.0)
        is_small = np.column_stack([factor == 0, (factor > 0) & (factor < STARVING)])
        known = rows.has_clip_factor[:, None]
        return np.any(self.small_factors.compare(is_small & known, ~is_small & known), axis=1)

    def _incidents(self, x: Findings) -> Iterator[Incident]:
        """Yield an `Incident` if the row has a fault."""
        faults = list(_faults_of(x)) or list(_update_fault(x))  # other faults explain an update
        kinds = [fault.kind for fault in faults]
        if "loss" in kinds and math.isfinite(x.row.loss) and x.has_grown:
            faults.append(Fault("growth", "the loss has not fallen since the start"))
        if kinds == ["infinity"] and not x.row.outcome & Outcome.APPLIED:
            is_first, distance = self.last_overflow < 0, x.place - self.last_overflow
            self.last_overflow = x.place
            if is_first:
                faults.append(Fault("note", "others as rare as this one are not reported"))
            elif x.place < PERIOD or distance > WINDOW:  # a loss scale that is too large at first
                return
        if faults:
            threshold = x.loss_rise.threshold if x.loss_rise else float(x.thresholds[LOSS])
            yield self._incident(x, faults, threshold)

    def _incident(self, x: Findings, faults: list[Fault], loss_threshold: float) -> Incident:
        """Combine the faults of a row into an incident, which may continue a streak."""
        step, flags = int(x.row.step), Outcome(int(x.row.outcome))
        if Outcome.SKIPPED in flags:
            # The window is open, but the skipped micro-batch was not added to it.
            flags &= ~Outcome.ACCUMULATED
        kinds, batch_id = tuple(fault.kind for fault in faults), None
        is_near = x.place - self.last_row <= GAP
        has_common_kind = not set(kinds).isdisjoint(self.last.kinds)
        streak = self.last.streak + 1 if is_near and has_common_kind else 1
        self.first_step = self.first_step if streak > 1 else step

        words = [w for w in ("skipped", "accumulated", "clipped") if Outcome[w.upper()] in flags]
        sentence = f"step {step}"
        if Outcome.HAS_BATCH_ID in flags:
            batch_id = int(x.row.batch_id)
            sentence += f", batch {batch_id}"
        units = [self._unit_of(fault) for fault in faults]
        parts = [
            f"{fault.text} in {unit}" if unit else fault.text
            for fault, unit in zip(faults, units, strict=True)
        ]
        for tap in np.flatnonzero(x.row.taps[:, -1])[:1]:
            parts.append(f"first non-finite {x.tap_names[tap]}")
        if streak > 1:
            parts.append(f"{streak} times since step {self.first_step}")
        sentence += f": {' and '.join(words) or 'applied'}, {'; '.join(parts)}"
        leaf = next(filter(None, units), "")
        self.last_row = x.place
        self.last = Incident(step, kinds, sentence, leaf, loss_threshold, batch_id, streak)
        return self.last

    def _unit_of(self, fault: Fault) -> str:
        """Return the name of the leaf or layer with the strongest evidence; "" if unknown."""
        return self.names.units[np.argmax(fault.by_unit)] if fault.by_unit.any() else ""


def _known_values(rows: Rows) -> tuple[HostArray, HostArray, HostArray]:
    """Return the gradient norms, the loss and the statistics of the taps.

    Norms and losses that were not measured are NaN. The statistics, float[rows, taps, 3], are in
    the order of `Detector.tap_names`: activations in the order of the forward pass, then cotangents
    in the order of the backward pass.
    """
    norms = np.where(rows.has(Outcome.HAS_GRADIENT)[:, None], rows.norms[:, 0], np.nan)
    norms[~rows.has(Outcome.HAS_UNITS), 1:] = np.nan
    loss = np.where(rows.has(Outcome.HAS_LOSS), rows.loss, np.nan)
    return norms, loss, np.hstack([rows.taps[:, :, 0], rows.taps[:, ::-1, 1]])


def _logarithms(
    gradient: HostArray, other_norms: HostArray, loss: HostArray, taps: HostArray
) -> HostArray:
    """Return the columns that `Outliers` compares, float[rows, columns].

    They are logarithms of all values, and the loss itself. Non-finite values become NaN, and so do
    the logarithms of values that are not positive.
    """
    singles = [gradient[:, :1], other_norms, loss[:, None]]
    positive = np.hstack([*singles, gradient[:, 1:], taps])
    logarithms = np.log(np.where((positive > 0) & np.isfinite(positive), positive, np.nan))
    return np.insert(logarithms, LOSS, np.where(np.isinf(loss), np.nan, loss), axis=1)
