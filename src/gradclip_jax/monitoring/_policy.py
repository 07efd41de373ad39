"""Decide when to save, rewind, lower the learning rate, or stop.

A row is bad if its step was applied although its loss is an outlier or its gradient is not finite.
If bad rows follow each other in a stretch, the policy advises a rewind to a good checkpoint. A
checkpoint is good if QUIET rows without an incident follow it. docs/recovery.md defines these terms
and the requirements of each action. If n is the number of rewinds in the last FORGET steps, the
transitions are:

| state | event | next state, action |
| --- | --- | --- |
| running | evidence for a rewind, n < 3 | pending, `rewind`; n + 1 |
| running | the same at the steps of the last rewind | pending, `lower`; n + 1; the batches that |
| | | were left out were not the cause, and are used again |
| running | the same elsewhere, n = 3 | pending, `lower`; n + 1 |
| running | the same, the last action was `lower` | pending, `stop` |
| running | a fault of the hardware or the optimizer, n < 3 | pending, `rewind`; n + 1 |
| running | the same, n = 3 | pending, `stop` |
| running | another reason to stop | pending, `stop` |
| running | 32 quiet rows, and no checkpoint waits for them | running, `save` |
| pending | more rows | the same action again |
| any | rows that start at an earlier step | running; later checkpoints count only after |
| | | `saved` has once not listed them |

If a stretch of bad rows had not ended at the first rewind, the batches after it may be bad as well.
The policy then advises a second rewind before `lower`.
"""

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .._errors import value_error
from .._types import HostArray
from ._detect import Incident
from ._outliers import BLOCK, GAP, STARVING, WINDOW, median, quantiles, run_lengths
from ._rows import Names, Outcome, Rows

QUIET = 32
"""Number of rows without an incident after which a save is advised, and after which an earlier
checkpoint is good. A stretch that lasts for this many rows (doubled with each rewind, except after
"lower") leads to a rewind, and so do this many consecutive skipped steps."""

BAD_ROWS = 3
"""Minimum number of bad rows in a stretch, with at most GAP other rows between two of them."""

MOST_REWINDS, FORGET = 3, 1000
"""Number of rewinds after which the learning rate is lowered, and number of steps without evidence
after which earlier rewinds no longer count."""

LONGEST_WINDOW = 1000
"""An accumulation window with more calls than this is assumed never to close."""


class Report(NamedTuple):
    """The result of `Monitor.read` for the rows since its last call.

    Attributes:
        step: Index of the next call of `watch`, which is the index of a checkpoint of this state.
        action: "continue", "save", "rewind", "lower" or "stop"; see docs/recovery.md.
        reason: Reason for the action, or for not rewinding despite evidence; otherwise empty.
        good_step: Index of the newest checkpoint that is known to be good, or None.
        batch_ids: Batches to leave out after this rewind, including those of earlier rewinds.
        num_rewinds: Number of rewinds in a row, including this one.
        num_lowers: Number of times that the action was "lower". A restored run should lower its
            initial learning rate this many times.
        is_open: Whether the bad steps that caused the action had not ended yet.
        incidents: Incidents in these rows, oldest first; each prints as a sentence.
        rows: The rows since the last call.
        lost_rows: Number of rows that were overwritten before this call. Pass a larger `history` to
            `watch`, or read more often.
    """

    step: int
    action: str
    reason: str
    good_step: int | None
    batch_ids: list[int]
    num_rewinds: int
    num_lowers: int = 0
    is_open: bool = False
    incidents: Sequence[Incident] = ()
    rows: Rows = Rows.zeros(0, Names())
    lost_rows: int = 0


DECISION = Report._fields[:8]
"""The fields of a report that are logged and are equal in all processes."""


class Checkpoints:
    """The checkpoints of a run, and which of them are known to be good.

    Attributes:
        steps: Indices of the existing checkpoints; None if they were never passed.
        stale: Existing checkpoints of steps that were discarded by a rewind.
        good_until: Checkpoints up to this step are good; -1 before the first row.
    """

    def __init__(self):
        self.steps: set[int] | None = None
        self.stale, self.good_until = set[int](), -1

    @property
    def usable(self) -> set[int]:
        """The checkpoints that are not stale."""
        return (self.steps or set()) - self.stale

    @property
    def good_step(self) -> int | None:
        """The newest good checkpoint, or None."""
        return max((i for i in self.usable if i <= self.good_until), default=None)

    @property
    def has_candidate(self) -> bool:
        """Whether a checkpoint exists that later rows may still confirm."""
        return any(i > self.good_until for i in self.usable)

    def replace(self, steps: Iterable[int]) -> None:
        """Set the indices of all existing checkpoints."""
        self.steps = set(map(int, steps))
        self.stale &= self.steps

    def rewound(self, step: int) -> None:
        """Mark the checkpoints after this step as stale, because their rows are replaced."""
        self.stale |= {i for i in self.steps or () if i > step}
        self.good_until = min(self.good_until, step)

    def confirm(self, steps: HostArray, num_quiet: HostArray) -> None:
        """Mark checkpoints as good if QUIET consecutive quiet rows follow them.

        `num_quiet` is the number of consecutive quiet rows up to each row.
        """
        for t in np.flatnonzero(num_quiet >= QUIET)[-1:]:
            self.good_until = max(self.good_until, int(steps[t - QUIET + 1]))


class Evidence(NamedTuple):
    """A reason to rewind or to stop.

    Attributes:
        step: Step at which the evidence is complete.
        action: "rewind" or "stop".
        reason: Description.
        batch_ids: Batches to leave out.
        first: First step that is bad.
        is_open: Whether the bad steps have not ended at `step`.
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


class RowRule(NamedTuple):
    """A rule that finds evidence in single rows.

    Attributes:
        action: "rewind" or "stop".
        reason: Description.
        is_met: Whether each row is evidence, bool[rows].
        num_windows: Number of windows to leave out, ending with the window of each row, int[rows];
            None to leave out no batches.
        is_fault: As in `Evidence`.
    """

    action: str
    reason: str
    is_met: HostArray
    num_windows: HostArray | None = None
    is_fault: bool = False


class Policy:
    """Decide from the rows of a run whether to save, rewind, lower the learning rate, or stop.

    Args:
        events: Log lines with decisions or "rewind_to" of the run to continue.
        rewind_on_rise: See `Monitor`.

    Attributes:
        last: The last decision.
        is_pending: Whether the run has not returned to an earlier step since this decision.
        confirmed_ids: Batches that were left out, after which the same evidence did not occur
            again.
        explained_until: Step before which the reason for not rewinding was already reported.
    """

    def __init__(self, events: Iterable[Mapping[str, Any]] = (), *, rewind_on_rise: bool = False):
        self.rewind_on_rise, self.checkpoints = rewind_on_rise, Checkpoints()
        self.last, self.is_pending = Report(0, "continue", "", None, [], 0), False
        self.confirmed_ids, self.explained_until = list[int](), 0
        for event in events:
            self.is_pending = "action" in event
            if self.is_pending:
                if not self.last.is_open:
                    self.confirmed_ids = self.last.batch_ids
                self.last = Report(**{name: event[name] for name in DECISION})

    def rewound(self, step: int) -> None:
        """Continue from an earlier step, because the run was rewound or restarted."""
        self.checkpoints.rewound(step)
        self.is_pending = False
        self.explained_until = min(self.explained_until, step)

    def update(
        self,
        rows: Rows,
        incidents: Sequence[Incident],
        first_new: int = 0,
        saved: Iterable[int] | None = None,
    ) -> Report:
        """Decide what to do.

        Args:
            rows: The last rows, with increasing steps.
            incidents: The incidents in these rows.
            first_new: The first step that the last call did not read.
            saved: Indices of all checkpoints that exist; None if they have not changed.

        Returns:
            A report without incidents and rows.
        """
        if saved is not None:
            self.checkpoints.replace(saved)
        if self.checkpoints.good_until < 0 and len(rows.step):
            self.checkpoints.good_until = int(rows.step[0])  # nothing before it was measured
        is_bad = _is_bad(rows, incidents, self.rewind_on_rise)
        suspicious = [x.step for x in incidents if "note" not in x.kinds]
        is_suspicious = is_bad | np.isin(rows.step, suspicious)
        num_quiet = run_lengths(~is_suspicious, is_suspicious)
        num_rewinds = self.last.num_rewinds if rows.end - self.last.step < FORGET else 0
        rules = _row_rules(rows, is_bad, num_rewinds)
        if self.rewind_on_rise:
            reason = f"a clip multiplies the gradients by less than {STARVING}, and the loss has "
            is_starved = _is_starved(rows, incidents)
            rules.append(RowRule("stop", f"{reason}not fallen since", is_starved))
        # After "lower", the next action is "stop". It leaves out no batches, so the patience is not
        # longer.
        patience = QUIET * 2 ** (num_rewinds if self.last.action == "rewind" else 0)
        evidence, no_rewind = [*_in_rows(rows, rules), *_stretches(rows, is_bad, patience)], ""
        # At the same step, evidence for a rewind takes precedence over evidence for a stop.
        for found in sorted(evidence, key=lambda x: (x.step, x.action == "stop")):
            if found.step >= first_new and not self.is_pending:
                self.checkpoints.confirm(rows.step, num_quiet[rows.step <= found.step])
                if found.action == "stop" or self.checkpoints.good_step is not None:
                    self.last, self.is_pending = self._decide(found, num_rewinds), True
                elif found.first >= self.explained_until:
                    no_rewind = f"{found.reason}; no rewind, because {self._why_no_checkpoint()}"
                    self.explained_until = rows.end
        self.checkpoints.confirm(rows.step, num_quiet)
        if self.is_pending:
            return self.last._replace(step=rows.end)
        can_save = num_quiet[-1:].sum() >= QUIET and not self.checkpoints.has_candidate
        return Report(
            step=rows.end,
            action="save" if can_save else "continue",
            reason=no_rewind,
            good_step=self.checkpoints.good_step,
            batch_ids=self.last.batch_ids,
            num_rewinds=num_rewinds,
            num_lowers=self.last.num_lowers,
        )

    def replace(self, last: Report, report: Report) -> Report:
        """Use the report that the function `policy` returned; `last` is the previous decision."""
        decided = slice(1, len(DECISION))  # the step is not part of a decision
        self.is_pending = report.action not in ("continue", "save")
        if not self.is_pending:
            self.last = last
        elif report[decided] != self.last[decided]:
            self.last = report
        return report

    def _decide(self, found: Evidence, num_rewinds: int) -> Report:
        """Return the decision for this evidence after the given number of rewinds."""
        last, action, reason = self.last, found.action, found.reason
        has_returned = num_rewinds > 0 and last.action == "rewind" and found.first < last.step
        may_continue = last.is_open and num_rewinds == 1
        if action == "rewind" and num_rewinds > 0 and not found.is_fault:
            if last.action == "lower":
                action, reason = "stop", f"{reason}; earlier rewinds did not help"
            elif num_rewinds >= MOST_REWINDS or (has_returned and not may_continue):
                action = "lower"
        batch_ids = list(dict.fromkeys([*last.batch_ids, *found.batch_ids]))
        if action == "lower" and has_returned:
            batch_ids = self.confirmed_ids
            reason += "; it has returned without the batches that were left out"
        elif not has_returned:
            self.confirmed_ids = last.batch_ids
        return Report(
            step=found.step + 1,
            action=action,
            reason=reason,
            good_step=self.checkpoints.good_step,
            batch_ids=batch_ids,
            num_rewinds=num_rewinds + 1,
            num_lowers=last.num_lowers + (action == "lower"),
            is_open=found.is_open,
        )

    def _why_no_checkpoint(self) -> str:
        """Return why there is no checkpoint to rewind to."""
        if self.checkpoints.steps is None:
            return "`saved=` was never passed to `Monitor.read`"
        return "no checkpoint is good"


def _in_rows(rows: Rows, rules: list[RowRule]) -> Iterator[Evidence]:
    """Yield the evidence in single rows."""
    window = _windows(rows)
    for rule in rules:
        for t in np.flatnonzero(rule.is_met):
            num = 0 if rule.num_windows is None else int(rule.num_windows[t])
            step, first = int(rows.step[t]), int(rows.step[max(t + 1 - max(num, 1), 0)])
            left_out = _batch_ids(rows, window[t] - num + 1, window[t])
            reason = f"step {step}: {rule.reason}"
            yield Evidence(step, rule.action, reason, left_out, first, is_fault=rule.is_fault)


def _stretches(rows: Rows, is_bad: HostArray, patience: int) -> Iterator[Evidence]:
    """Yield stretches of bad rows that have ended or have lasted for `patience` rows."""
    is_closed = ~rows.has(Outcome.ACCUMULATED)
    steps, losses, bad = rows.step[is_closed], rows.loss[is_closed], _windows(rows)[is_bad]
    last = -1
    for stretch in np.split(bad, np.flatnonzero(np.diff(bad) > GAP + 1) + 1):
        if len(stretch) >= BAD_ROWS and stretch[0] > last:
            first, last = int(stretch[0]), _last_bad(losses, stretch)
            known, is_open = last + GAP + 1, False
            if known >= len(steps) and len(steps) - first >= patience:
                known, is_open = len(steps) - 1, True
            if known < len(steps):
                counts = f"outliers in {len(stretch)} of {last - first + 1} steps"
                reason = f"steps {steps[first]} to {steps[last]}: {counts}"
                reason += ", and they go on" if is_open else ""
                found = "rewind", reason, _batch_ids(rows, first, last), int(steps[first]), is_open
                yield Evidence(int(steps[known]), *found)


def _batch_ids(rows: Rows, first: int, last: int) -> list[int]:
    """Return the ids of the batches in the windows `first` to `last`."""
    window = _windows(rows)
    is_between = (window >= first) & (window <= last)
    return rows.batch_id[rows.has(Outcome.HAS_BATCH_ID) & is_between].tolist()


def _windows(rows: Rows) -> HostArray:
    """Return the index of the window of each row; without an accumulation, each row is a window."""
    is_closed = ~rows.has(Outcome.ACCUMULATED)
    return np.cumsum(is_closed) - is_closed


def _last_bad(losses: HostArray, stretch: HostArray) -> int:
    """Return the index of the last row before the losses have recovered from a stretch.

    Losses have recovered if they are below the midpoint between the median loss before the stretch
    and the median loss of its bad rows. Outlier thresholds are not used, because they rise during a
    long stretch. If the bad losses are not above 90 % of the earlier losses, the last bad row is
    returned.
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


def _row_rules(rows: Rows, is_bad: HostArray, num_rewinds: int) -> list[RowRule]:
    """Return the rules for single rows after a number of rewinds."""
    is_closed = ~rows.has(Outcome.ACCUMULATED)
    is_skipped, differs = rows.has(Outcome.SKIPPED), rows.has(Outcome.REPLICA_DIFFERS)
    num_bad, num_skipped = (
        run_lengths(is_closed & x, is_closed & ~x) for x in (is_bad, is_skipped)
    )
    is_open = rows.has(Outcome.ACCUMULATED | Outcome.EMPTY_WINDOW)
    num_open = run_lengths(is_open, ~is_open)
    gradient, update, parameter = np.isfinite(rows.norms[:, :, 0]).T
    # If parameters and gradients are finite, neither the batch nor the learning rate makes the new
    # parameters non-finite. The parameter norm is measured before the update.
    window = _windows(rows)
    is_finite = parameter & ~np.isin(window, window[~gradient])
    is_finite &= rows.has(Outcome.HAS_GRADIENT) & rows.has(Outcome.HAS_UPDATE)
    is_bad_update = rows.has(Outcome.APPLIED) & ~update
    is_fault = (is_finite & is_bad_update) | (~parameter & np.append(False, is_finite[:-1]))
    fault = "non-finite parameters after a finite gradient: the hardware or the optimizer is faulty"
    is_fatal = ~parameter | is_bad_update
    rewind_or_stop = "rewind" if num_rewinds < MOST_REWINDS else "stop"
    never = f"no window closed in {LONGEST_WINDOW} calls"
    rules = [
        RowRule(rewind_or_stop, fault, is_fault, is_fault=True),
        RowRule("rewind", "non-finite parameters", is_fatal & ~is_fault, np.maximum(num_bad, 1)),
        RowRule("stop", "non-finite parameters and no checkpoint to restore", is_fatal),
        RowRule("rewind", f"{QUIET} consecutive skipped steps", num_skipped == QUIET, num_skipped),
        RowRule("stop", "guard_failed", is_skipped & rows.has(Outcome.GUARD_FAILED)),
        RowRule("stop", never, num_open > LONGEST_WINDOW),
    ]
    if num_rewinds == 0:
        return [*rules, RowRule("rewind", "replicas differ", differs, is_fault=True)]
    return [*rules, RowRule("stop", "hardware: replicas differ again", differs, is_fault=True)]


def _is_starved(rows: Rows, incidents: Sequence[Incident]) -> HostArray:
    """Return the rows of "clip" incidents if the loss has not fallen since the clip began."""
    # In other rows, the clip did not run or its factor is meaningless.
    has_factor = rows.has(Outcome.APPLIED) & np.isfinite(rows.norms[:, 0, 0])
    is_large = has_factor & (rows.factors.min(axis=1, initial=1.0) >= STARVING)
    is_starved = np.isin(rows.step, [x.step for x in incidents if "clip" in x.kinds])
    for t in np.flatnonzero(is_starved):
        onset = 1 + np.flatnonzero(is_large[:t]).max(initial=-1)
        before, since = rows.loss[max(onset - QUIET, 0) : onset], rows.loss[onset : t + 1]
        is_starved[t] = onset > 0 and median(since) >= median(before)
    return is_starved


def _is_bad(rows: Rows, incidents: Sequence[Incident], rewind_on_rise: bool) -> HostArray:
    """Return which steps were applied with a loss that is an outlier or a non-finite gradient.

    Outliers of norms are not bad, because a harmful one also raises the loss. A permanent rise of a
    value loss is not bad either.
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


def check_same_log(report: Report) -> None:
    """Raise in all processes unless the logs that they have read lead to the same decision."""
    if jax.process_count() == 1:
        return
    from jax.experimental import multihost_utils

    checksum = zlib.crc32(json.dumps(report[: len(DECISION)]).encode())
    if len(np.unique(multihost_utils.process_allgather(np.uint32(checksum)))) > 1:
        hint = "Use a file system that all processes share."
        raise value_error("log", "the same file in all processes", "different decisions", hint)


def agreed(report: Report) -> Report:
    """Return the decision of process 0 in all processes, because their files may differ."""
    if jax.process_count() == 1:
        return report
    from jax.experimental import multihost_utils

    text = np.frombuffer(json.dumps(report[: len(DECISION)]).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    sent = multihost_utils.broadcast_one_to_all(np.resize(text, size))
    decision = json.loads(np.asarray(sent, np.uint8).tobytes())
    return report._replace(**dict(zip(DECISION, decision, strict=True)))
