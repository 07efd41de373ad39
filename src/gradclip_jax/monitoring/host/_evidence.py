"""Find the reasons to rewind or to stop in the rows of a run.

A row is bad if its step was applied although its loss is an outlier or its gradient is not finite.
Evidence is either a stretch of bad rows or a single row, such as one with non-finite parameters.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..._types import HostArray
from .._layout import Outcome
from ._detect import Incident
from ._outliers import BLOCK, GAP, STARVING, WINDOW, median, quantiles, run_lengths
from ._rows import Rows

QUIET = 32
"""Number of rows without an incident after which a save is advised, and after which an earlier
checkpoint is good. Also the length of a stretch, and of a streak of skips, that leads to a rewind.
Each rewind doubles the first; after "lower" it is QUIET again."""

BAD_ROWS = 3
"""Minimum number of bad rows in a stretch, with at most GAP other rows between two of them."""

MOST_REWINDS = 3
"""Number of rewinds after which the learning rate is lowered."""

LONGEST_WINDOW = 1000
"""An accumulation window with more calls than this is assumed never to close."""


class Evidence(NamedTuple):
    """A reason to rewind or to stop.

    Attributes:
        step: Step at which the evidence is complete.
        action: "rewind" or "stop".
        reason: Description.
        batch_ids: Batches to leave out.
        first: First step that is bad.
        is_open: Whether the bad steps still continue at `step`.
        is_fault: Whether the hardware or the optimizer is faulty. Neither other batches nor a lower
            learning rate would help.
    """

    step: int
    action: str
    reason: str
    batch_ids: list[int]
    first: int
    is_open: bool = False
    is_fault: bool = False


def bad_rows(rows: Rows, incidents: Sequence[Incident], rewind_on_rise: bool) -> HostArray:
    """Return which steps were applied with a loss that is an outlier or a non-finite gradient.

    An outlier of a norm alone does not make a row bad, because a harmful one also raises the loss.
    A permanent rise of a value loss is not bad either.
    """
    limit, is_outlier = np.full(len(rows.step), np.inf), np.zeros(len(rows.step), bool)
    for x in incidents:
        kinds = {*x.kinds}
        has_outlier = "loss" in kinds and "growth" not in kinds
        if has_outlier or kinds & {"nan", "infinity"}:
            is_outlier |= rows.step == x.step
        is_rise = "flat" in kinds or (rewind_on_rise and kinds & {"loss", "risen"})
        if has_outlier or is_rise:
            first = x.step - BLOCK + 1 if "risen" in kinds else x.step
            is_near = (rows.step >= first) & (rows.step < x.step + GAP)
            limit[is_near] = np.minimum(limit[is_near], x.loss_threshold)
    return rows.has(Outcome.APPLIED) & (is_outlier | (rows.loss >= limit))


def find_evidence(
    rows: Rows, is_bad: HostArray, starving: list[int], num_rewinds: int, patience: int
) -> list[Evidence]:
    """Return all evidence in these rows, sorted by the step at which it is complete.

    Args:
        rows: The most recent rows, sorted by step.
        is_bad: Mask of the bad rows, as returned by `bad_rows`.
        starving: Steps at which a clip factor has long been almost 0; empty if this is not
            evidence.
        num_rewinds: Number of earlier rewinds, after which a stop may be advised instead of a
            rewind.
        patience: Number of rows after which a stretch is evidence even if it has not ended.
    """
    closes, is_skipped = rows.closes_window, rows.has(Outcome.SKIPPED)
    num_bad, num_skipped = (run_lengths(closes & x, closes & ~x) for x in (is_bad, is_skipped))
    is_open = rows.has(Outcome.ACCUMULATED | Outcome.EMPTY_WINDOW)
    never_closes = run_lengths(is_open, ~is_open) > LONGEST_WINDOW
    differs = rows.has(Outcome.REPLICA_DIFFERS)
    fails = is_skipped & rows.has(Outcome.GUARD_FAILED)
    is_fatal, is_fault = _nonfinite_parameters(rows)
    fault = "non-finite parameters after a finite gradient: the hardware or the optimizer is faulty"
    skips = f"{QUIET} consecutive skipped steps"
    no_fall = "a clip starves the optimizer, and the loss has not fallen since"
    on_fault = "rewind" if num_rewinds < MOST_REWINDS else "stop"
    on_difference = "stop" if num_rewinds else "rewind"
    found = [
        *_in_rows(rows, is_fault, on_fault, fault, is_fault=True),
        *_in_rows(rows, is_fatal & ~is_fault, "rewind", "non-finite parameters", num_bad.clip(1)),
        *_in_rows(rows, is_fatal, "stop", "non-finite parameters and no checkpoint to restore"),
        *_in_rows(rows, num_skipped == QUIET, "rewind", skips, num_skipped),
        *_in_rows(rows, fails, "stop", "guard_failed"),
        *_in_rows(rows, never_closes, "stop", f"no window closed in {LONGEST_WINDOW} calls"),
        *_in_rows(rows, differs, on_difference, "hardware: replicas differ", is_fault=True),
        *_in_rows(rows, _is_starved(rows, starving), "stop", no_fall),
        *_stretches(rows, is_bad, patience),
    ]
    # At the same step, evidence for a rewind takes precedence over evidence for a stop.
    return sorted(found, key=lambda x: (x.step, x.action == "stop"))


def _in_rows(
    rows: Rows,
    is_met: HostArray,
    action: str,
    reason: str,
    num_windows: HostArray | None = None,
    is_fault: bool = False,
) -> Iterator[Evidence]:
    """Yield evidence for each row in the mask `is_met`.

    In row t, batches of the last `num_windows[t]` windows are left out; None leaves out no batches.
    """
    window = _windows(rows)
    for t in np.flatnonzero(is_met):
        num = 0 if num_windows is None else int(num_windows[t])
        step = int(rows.step[t])
        first = int(rows.step[np.searchsorted(window, window[t] - max(num, 1) + 1)])
        left_out = _batch_ids(rows, window[t] - num + 1, window[t])
        yield Evidence(step, action, f"step {step}: {reason}", left_out, first, is_fault=is_fault)


def _stretches(rows: Rows, is_bad: HostArray, patience: int) -> Iterator[Evidence]:
    """Yield stretches of bad rows that have ended or have lasted for `patience` rows."""
    steps, losses = rows.step[rows.closes_window], rows.loss[rows.closes_window]
    bad = _windows(rows)[is_bad]
    last, end = -1, len(steps) - 1
    for stretch in np.split(bad, np.flatnonzero(np.diff(bad) > GAP + 1) + 1):
        if len(stretch) < BAD_ROWS or stretch[0] <= last:
            continue
        first, last = int(stretch[0]), _last_bad(losses, stretch)
        is_open = last + GAP + 1 > end
        if is_open and end - first + 1 < patience:
            continue
        counts = f"outliers in {len(stretch)} of {last - first + 1} steps"
        reason = f"steps {steps[first]} to {steps[last]}: {counts}"
        yield Evidence(
            step=int(steps[end if is_open else last + GAP + 1]),
            action="rewind",
            reason=f"{reason}, and they go on" if is_open else reason,
            batch_ids=_batch_ids(rows, first, last),
            first=int(steps[first]),
            is_open=is_open,
        )


def _batch_ids(rows: Rows, first: int, last: int) -> list[int]:
    """Return the ids of the batches in the windows `first` to `last`."""
    window = _windows(rows)
    is_between = (window >= first) & (window <= last)
    return rows.batch_id[rows.has(Outcome.HAS_BATCH_ID) & is_between].tolist()


def _windows(rows: Rows) -> HostArray:
    """Return the index of the window of each row; without an accumulation, each row is a window."""
    return np.cumsum(rows.closes_window) - rows.closes_window


def _last_bad(losses: HostArray, stretch: HostArray) -> int:
    """Return the index of the last row before the losses have recovered from a stretch of bad rows.

    Losses have recovered if they are below the midpoint between the median loss before the stretch
    and the median loss of its bad rows. Outlier thresholds are not used, because they rise during a
    long stretch. If the median bad loss is not above the 90th percentile of the earlier losses, the
    last bad row is returned.
    """
    first, last = int(stretch[0]), int(stretch[-1])
    if first == 0:
        return last
    before = losses[max(first - WINDOW, 0) : first]
    usual, high, bad = median(before), quantiles(before, 0.9)[0], median(losses[stretch])
    if not (np.isfinite(usual + bad) and bad > high):
        return last
    middle = (usual + bad) / 2
    is_high = ~(losses[last + 1 :] < middle)
    places = np.array([last, *last + 1 + np.flatnonzero(is_high)])
    return int(places[np.flatnonzero(np.diff(places, append=np.inf) > GAP + 1)[0]])


def _nonfinite_parameters(rows: Rows) -> tuple[HostArray, HostArray]:
    """Return the rows with non-finite parameters or updates, and those of a faulty device.

    If parameters and gradients are finite, neither the batch nor the learning rate can make the new
    parameters non-finite. The parameter norm is measured before the update.
    """
    gradient, update, parameter = np.isfinite(rows.norms[:, :, 0]).T
    window = _windows(rows)
    is_finite = parameter & ~np.isin(window, window[~gradient])
    is_finite &= rows.has(Outcome.HAS_GRADIENT) & rows.has(Outcome.HAS_UPDATE)
    is_bad_update = rows.has(Outcome.APPLIED) & ~update
    is_fault = (is_finite & is_bad_update) | (~parameter & np.append(False, is_finite[:-1]))
    return ~parameter | is_bad_update, is_fault


def _is_starved(rows: Rows, starving: list[int]) -> HostArray:
    """Return the rows in which the loss has not fallen since the clip factor was small."""
    is_large = rows.has_clip_factor & (rows.factors.min(axis=1, initial=1.0) >= STARVING)
    is_starved = np.isin(rows.step, starving)
    for t in np.flatnonzero(is_starved):
        onset = 1 + np.flatnonzero(is_large[:t]).max(initial=-1)
        before, since = rows.loss[max(onset - QUIET, 0) : onset], rows.loss[onset : t + 1]
        is_starved[t] = onset > 0 and median(since) >= median(before)
    return is_starved
