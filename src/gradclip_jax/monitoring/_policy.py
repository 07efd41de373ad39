"""Recovery: when to save, rewind, lower the learning rate, or stop.

The policy compares the last rows and incidents, without files. docs/recovery.md defines its terms
and says what each action needs. With n rewinds in the last 1,000 steps, its transitions are:

| state | event | next state, action |
| --- | --- | --- |
| running | evidence for a rewind, n < 3 | pending, `rewind`; n + 1 |
| running | the same at the steps of the last rewind | pending, `lower`; n + 1; the batches that |
| | | were left out were not the cause, and are used again |
| running | the same elsewhere, n = 3 | pending, `lower`; n + 1 |
| running | the same, the last action was `lower` | pending, `stop` |
| running | a reason to stop | pending, `stop` |
| running | 32 quiet rows, and no checkpoint waits for them | running, `save` |
| pending | rows that go on | the same action again |
| any | rows that start at an earlier step | running; later checkpoints count only after |
| | | `saved` has once not listed them |

A stretch of bad rows that had not ended at the first rewind may go on after it, with the batches
that follow. It then leads to a second rewind before `lower`.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .._types import HostArray
from ._detect import Incident
from ._outliers import BLOCK
from ._rows import Names, Outcome, Rows

QUIET = 32
"""Rows without an incident before a save is proposed, and after a checkpoint before it is good."""

BAD_ROWS, GAP = 3, 8
"""A stretch has at least so many bad rows, with at most `GAP` other rows between two of them."""

STUCK = 32
"""Rows after which a stretch that has not ended leads to a rewind, doubled after each rewind; also
the number of consecutive skipped steps that lead to one."""

MOST_REWINDS, FORGET = 3, 1000
"""Number of rewinds after which the learning rate is lowered, and number of steps without evidence
after which earlier rewinds no longer count."""

LASTING = 8
"""Rows after an incident in which its threshold for the loss still counts. With more rows, the good
batches with which a loss recovers would be left out as well."""

_GOES_ON = ", and they go on"
"""The end of the reason of a rewind from a stretch that has not ended. The log keeps the reason."""

LONGEST_WINDOW = 1000
"""A window of an accumulation with more calls never closes."""


class Report(NamedTuple):
    """What `Monitor.read` found in the rows since its last call.

    Attributes:
        step: Index of the next call of `watch`, which is the index of a checkpoint of this state.
        action: "continue", "save", "rewind", "lower" or "stop"; see docs/recovery.md.
        reason: Reason of the action, or why evidence for a rewind did not lead to one; otherwise
            empty.
        good_step: Index of the newest checkpoint that later rows confirmed, or None.
        batch_ids: Batches to leave out, of this rewind and of all earlier ones.
        num_rewinds: Number of rewinds in a row, including this one.
        num_lowers: Number of times that the run was told to lower the learning rate. A run that is
            restored should use a learning rate that was lowered so many times.
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
    incidents: Sequence[Incident] = ()
    rows: Rows = Rows.zeros(0, Names())
    lost_rows: int = 0


DECISION = Report._fields[:7]
"""The fields of a report that are lines of a log and that all processes share."""


class Policy:
    """Decide from the rows of a run whether to save, rewind, lower the learning rate, or stop.

    Args:
        events: Lines of the log of a run that continues: its decisions, and its "rewind_to".
        rewind_on_rise: Whether a loss that rises for good, or that has only grown since the start,
            is evidence for a rewind.
    """

    def __init__(self, events: Iterable[Mapping[str, Any]] = (), *, rewind_on_rise: bool = False):
        self.rewind_on_rise = rewind_on_rise
        self.last, self.is_pending = Report(0, "continue", "", None, [], 0), False
        self.confirmed_ids = list[int]()  # left out by rewinds after which the run went on
        for event in events:
            self.is_pending = "action" in event
            if self.is_pending:
                if not self.last.reason.endswith(_GOES_ON):
                    self.confirmed_ids = self.last.batch_ids
                fields = (event.get(name, 0) for name in DECISION)
                self.last = Report(*fields)
        self.saved, self.stale = set[int](), set[int]()  # `stale` are those of superseded rows
        self.has_saved = False
        self.explained_until = 0  # evidence before this step was explained
        self.good_until = -1  # checkpoints until this step are good: `QUIET` rows follow it

    @property
    def good_step(self) -> int | None:
        """The newest checkpoint that exists and that later rows have confirmed."""
        good = (i for i in self.saved - self.stale if i <= self.good_until)
        return max(good, default=None)

    def rewound(self, step: int) -> None:
        """Go on from an earlier step, because the run was rewound or restarted."""
        self.stale |= {i for i in self.saved if i > step}
        self.good_until, self.is_pending = min(self.good_until, step), False
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
            first_new: The first step that was not in the rows of the last call.
            saved: Indices of all checkpoints that exist; None if they have not changed.

        Returns:
            A report without incidents and rows.
        """
        if saved is not None:
            self.saved, self.has_saved = set(map(int, saved)), True
            self.stale &= self.saved
        if self.good_until < 0:
            self.good_until = int(min(rows.step, default=-1))  # nothing before it was measured
        is_bad = _is_bad(rows, incidents, self.rewind_on_rise)
        suspicious = [x.step for x in incidents if "note" not in x.kinds]
        num_quiet = _run_lengths(~(is_bad | np.isin(rows.step, suspicious)))
        count = self.last.num_rewinds if rows.end - self.last.step < FORGET else 0
        missing = ""
        # Of two reasons at the same step, one to rewind wins over one to stop.
        evidence = sorted(
            _evidence(rows, is_bad, count), key=lambda x: (x.step, x.action == "stop")
        )
        for found in evidence:
            if found.step >= first_new and not self.is_pending:
                self._confirm(rows.step, num_quiet[rows.step <= found.step])
                if found.action == "stop" or self.good_step is not None:
                    self.last, self.is_pending = self._decide(found, count), True
                elif found.first >= self.explained_until:
                    not_passed = "`saved=` was never passed to `Monitor.read`"
                    why = "no checkpoint is good" if self.has_saved else not_passed
                    missing = f"{found.reason}; no rewind, because {why}"
                    self.explained_until = rows.end
        self._confirm(rows.step, num_quiet)
        if self.is_pending:
            return self.last._replace(step=rows.end)
        has_candidate = any(i > self.good_until for i in self.saved - self.stale)
        can_save = num_quiet[-1:].sum() >= QUIET and not has_candidate
        action = "save" if can_save else "continue"
        left_out, num_lowers = self.last.batch_ids, self.last.num_lowers
        return Report(rows.end, action, missing, self.good_step, left_out, count, num_lowers)

    def replace(self, last: Report, report: Report) -> Report:
        """Continue with a report that a user's function returned; `last` is the decision before."""
        decided = slice(1, len(DECISION))  # the step is not part of a decision
        self.is_pending = report.action not in ("continue", "save")
        if not self.is_pending:
            self.last = last
        elif report[decided] != self.last[decided]:
            self.last = report
        return report

    def _decide(self, found: "Evidence", count: int) -> Report:
        """Return the decision that evidence leads to after `count` rewinds."""
        last, action, reason = self.last, found.action, found.reason
        has_returned = count > 0 and last.action == "rewind" and found.first < last.step
        may_go_on = last.reason.endswith(_GOES_ON) and count == 1
        if action == "rewind" and count > 0 and last.action == "lower":
            action, reason = "stop", f"{reason}; earlier rewinds did not help"
        elif action == "rewind" and (count >= MOST_REWINDS or (has_returned and not may_go_on)):
            action = "lower"
        left_out = list(dict.fromkeys([*last.batch_ids, *found.batch_ids]))
        if action == "lower" and has_returned:
            left_out = self.confirmed_ids
            reason += "; it has returned without the batches that were left out"
        elif not has_returned:
            self.confirmed_ids = last.batch_ids
        num_lowers = last.num_lowers + (action == "lower")
        facts = action, reason, self.good_step, left_out, count + 1, num_lowers
        return Report(found.step + 1, *facts)

    def _confirm(self, steps: HostArray, num_quiet: HostArray) -> None:
        quiet = np.flatnonzero(num_quiet >= QUIET)[-1:]
        self.good_until = max([self.good_until, *steps[quiet - QUIET + 1].tolist()])


class Evidence(NamedTuple):
    """A reason to rewind or to stop.

    Attributes:
        step: Step at which it is known.
        action: "rewind" or "stop".
        reason: Description.
        batch_ids: Batches to leave out.
        first: First step that is bad.
    """

    step: int
    action: str
    reason: str
    batch_ids: list[int]
    first: int


def _evidence(rows: Rows, is_bad: HostArray, num_rewinds: int) -> Iterator[Evidence]:
    """Yield all reasons to rewind or to stop."""
    closed, has_id = ~rows.has(Outcome.ACCUMULATED), rows.has(Outcome.HAS_BATCH_ID)
    window = np.cumsum(closed) - closed  # without an accumulation, each row is a window
    is_skipped, differs = rows.has(Outcome.SKIPPED), rows.has(Outcome.REPLICA_DIFFERS)
    has_failed = is_skipped & rows.has(Outcome.GUARD_FAILED)
    num_bad, num_skipped = _run_lengths(is_bad, closed), _run_lengths(is_skipped, closed)
    num_open = _run_lengths(rows.has(Outcome.ACCUMULATED | Outcome.EMPTY_WINDOW))
    _, update, parameter = np.isfinite(rows.norms[:, :, 0]).T
    is_fatal, none = ~parameter | (rows.has(Outcome.APPLIED) & ~update), 0 * window
    for action, reason, is_known, num_left_out in (
        ("rewind", "non-finite parameters", is_fatal, np.maximum(num_bad, 1)),
        ("stop", "non-finite parameters and no checkpoint to restore", is_fatal, none),
        ("rewind", f"{STUCK} consecutive skipped steps", num_skipped == STUCK, num_skipped),
        ("stop", "guard_failed", has_failed, none),
        ("stop", f"no window closed in {LONGEST_WINDOW} calls", num_open > LONGEST_WINDOW, none),
        ("rewind", "replicas differ", differs & (num_rewinds == 0), none),
        ("stop", "hardware: replicas differ again", differs & (num_rewinds > 0), none),
    ):
        for t in np.flatnonzero(is_known):
            left_out = has_id & (window > window[t] - num_left_out[t]) & (window <= window[t])
            batch_ids, step = rows.batch_id[left_out].tolist(), int(rows.step[t])
            first = int(rows.step[max(t + 1 - max(num_left_out[t], 1), 0)])
            yield Evidence(step, action, f"step {step}: {reason}", batch_ids, first)
    steps, bad = rows.step[closed], window[is_bad]
    for stretch in np.split(bad, np.flatnonzero(np.diff(bad) > GAP + 1) + 1):
        if len(stretch) >= BAD_ROWS:
            first, last, known = stretch[0], stretch[-1], stretch[-1] + GAP + 1
            if len(steps) - first >= STUCK * 2**num_rewinds:
                known = min(known, len(steps) - 1)
            if known < len(steps):
                counts = f"outliers in {len(stretch)} of {last - first + 1} steps"
                reason = f"steps {steps[first]} to {steps[last]}: {counts}"
                reason += _GOES_ON if known <= last + GAP else ""
                left_out = has_id & (window >= first) & (window <= last)
                batch_ids = rows.batch_id[left_out].tolist()
                yield Evidence(int(steps[known]), "rewind", reason, batch_ids, int(steps[first]))


def _is_bad(rows: Rows, incidents: Sequence[Incident], rewind_on_rise: bool) -> HostArray:
    """Return which steps were applied although the loss is an outlier or a gradient not finite.

    The loss tells whether an outlier of a norm did harm. A loss that rises for good or has only
    grown since the start of the run may be a value loss, and then this is no fault.
    """
    limit, is_outlier = np.full(len(rows.step), np.inf), np.zeros(len(rows.step), bool)
    for x in incidents:
        is_growth = "growth" in x.kinds or "loss" not in x.kinds
        if not {"nan", "infinity"}.isdisjoint(x.kinds) or "loss" in x.kinds and not is_growth:
            is_outlier |= rows.step == x.step
        if not is_growth or (rewind_on_rise and not {"loss", "risen"}.isdisjoint(x.kinds)):
            first = x.step - BLOCK if "risen" in x.kinds else x.step - 1
            is_near = (rows.step > first) & (rows.step < x.step + LASTING)
            limit[is_near] = np.minimum(limit[is_near], x.loss_threshold)
    return rows.has(Outcome.APPLIED) & (is_outlier | (rows.loss >= limit))


def _run_lengths(is_true: HostArray, is_counted: HostArray | bool = True) -> HostArray:
    """Return the number of consecutive true elements up to each one, among those that count."""
    total = np.cumsum(is_true & is_counted)
    return total - np.maximum.accumulate(np.where(is_counted & ~is_true, total, 0))


def agreed(report: Report) -> Report:
    """Return the report of process 0 in all processes, whose losses and files may differ."""
    if jax.process_count() == 1:
        return report
    from jax.experimental import multihost_utils

    text = np.frombuffer(json.dumps(report[: len(DECISION)]).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    sent = multihost_utils.broadcast_one_to_all(np.resize(text, size))
    decision = Report(*json.loads(np.asarray(sent, np.uint8).tobytes()))
    found = {name: getattr(report, name) for name in ("incidents", "rows", "lost_rows")}
    return decision._replace(**found)
