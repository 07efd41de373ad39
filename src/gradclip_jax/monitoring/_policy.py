"""Recovery: when to save, rewind, lower the learning rate, or stop.

The policy compares the last rows and incidents, without files. docs/recovery.md defines its terms
and says what each action needs. With n rewinds so far, its transitions are:

| state | event | next state, action |
| --- | --- | --- |
| running | evidence for a rewind, n < 3 | pending, `rewind`; n + 1 |
| running | the same, n = 3 | pending, `lower`; n + 1 |
| running | the same, n = 4 | pending, `stop` |
| running | a reason to stop | pending, `stop` |
| running | 1,000 steps after the last evidence for a rewind | n = 0 |
| running | 32 quiet rows, and no checkpoint waits for them | running, `save` |
| pending | rows that go on | the same action again |
| any | rows that start at an earlier step | running; later checkpoints count only after |
| | | `saved` has once not listed them |
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .._types import HostArray
from ._detect import Incident
from ._rows import Names, Outcome, Rows

QUIET = 32
"""Rows without an incident before a save is proposed, and after a checkpoint before it is good."""

BAD_ROWS, GAP = 3, 8
"""A stretch has at least so many bad rows, with at most `GAP` other rows between two of them."""

STUCK = 32
"""Rows after which a stretch that has not ended leads to a rewind, doubled after each rewind; also
the number of consecutive skipped steps that lead to one."""

FIRST_STEPS, FIRST_RATIO = 64, 10.0
"""In the first steps of a run, a loss above `FIRST_RATIO` times the first one is an outlier."""

ACTIONS, FORGET = ("rewind", "rewind", "rewind", "lower", "stop"), 1000
"""What evidence for a rewind leads to, each time, and the number of steps without any after which
earlier rewinds no longer count."""

LASTING = 128
"""Rows after an incident in which its threshold for the loss still counts, because the thresholds
of incidents adapt to a long stretch."""

_HARMFUL = {"loss", "nan", "infinity"}
"""Kinds of incidents in bad rows. The loss tells whether an outlier of a norm did harm."""

LONGEST_WINDOW = 1000
"""A window of an accumulation with more calls never closes."""


class Report(NamedTuple):
    """What `Monitor.read` found in the rows since its last call.

    Attributes:
        step: Index of the next call of `watch`, which is the index of a checkpoint of this state.
        action: "continue", "save", "rewind", "lower" or "stop"; see docs/recovery.md.
        reason: Reason of the action; empty for "continue" and "save".
        good_step: Index of the newest checkpoint that later rows confirmed, or None.
        batch_ids: Batches to leave out, of this rewind and of all earlier ones.
        num_rewinds: Number of rewinds in a row, including this one.
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
    incidents: Sequence[Incident] = ()
    rows: Rows = Rows.zeros(0, Names())
    lost_rows: int = 0


DECISION = Report._fields[:6]
"""The fields of a report that are lines of a log and that all processes share."""


class Policy:
    """Decide from the rows of a run whether to save, rewind, lower the learning rate, or stop.

    Args:
        events: Lines of the log of a run that continues: its decisions, and its "rewind_to".
    """

    def __init__(self, events: Iterable[Mapping[str, Any]] = ()):
        self.last, self.is_pending = Report(0, "continue", "", None, [], 0), False
        for event in events:
            self.is_pending = "action" in event
            if self.is_pending:
                self.last = Report(*(event[name] for name in DECISION))
        self.saved, self.stale = set[int](), set[int]()  # `stale` are those of superseded rows
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
            self.saved = set(map(int, saved))
            self.stale &= self.saved
        if self.good_until < 0:
            self.good_until = int(min(rows.step, default=-1))  # nothing before it was measured
        is_bad = _is_bad(rows, incidents)
        suspicious = [x.step for x in incidents if "note" not in x.kinds]
        num_quiet = _run_lengths(~(is_bad | np.isin(rows.step, suspicious)))
        count = self.last.num_rewinds if rows.end - self.last.step < FORGET else 0
        # Of two reasons at the same step, one to rewind wins over one to stop.
        evidence = sorted(_evidence(rows, is_bad, count), key=lambda x: (x[0], x[1] == "stop"))
        for step, action, reason, batch_ids in evidence:
            if step >= first_new and not self.is_pending:
                self._confirm(rows.step, num_quiet[rows.step <= step])
                if action == "stop" or self.good_step is not None:
                    left_out = list(dict.fromkeys([*self.last.batch_ids, *batch_ids]))
                    facts = action, reason, self.good_step, left_out, count + 1
                    self.last, self.is_pending = Report(step + 1, *facts), True
        self._confirm(rows.step, num_quiet)
        if self.is_pending:
            return self.last._replace(step=rows.end)
        has_candidate = any(i > self.good_until for i in self.saved - self.stale)
        action = "save" if num_quiet[-1:].sum() >= QUIET and not has_candidate else "continue"
        return Report(rows.end, action, "", self.good_step, self.last.batch_ids, count)

    def _confirm(self, steps: HostArray, num_quiet: HostArray) -> None:
        quiet = np.flatnonzero(num_quiet >= QUIET)[-1:]
        self.good_until = max([self.good_until, *steps[quiet - QUIET + 1].tolist()])


def _evidence(
    rows: Rows, is_bad: HostArray, num_rewinds: int
) -> Iterator[tuple[int, str, str, list[int]]]:
    """Yield all reasons to rewind or to stop.

    Yields:
        The step at which it is known, the action, the reason, and the batches to leave out.
    """
    closed, has_id = ~rows.has(Outcome.ACCUMULATED), rows.has(Outcome.HAS_BATCH_ID)
    window = np.cumsum(closed) - closed  # without an accumulation, each row is a window
    is_skipped, differs = rows.has(Outcome.SKIPPED), rows.has(Outcome.REPLICA_DIFFERS)
    has_failed = is_skipped & rows.has(Outcome.GUARD_FAILED)
    num_bad, num_skipped = _run_lengths(is_bad, closed), _run_lengths(is_skipped, closed)
    num_open = _run_lengths(rows.has(Outcome.ACCUMULATED | Outcome.EMPTY_WINDOW))
    _, update, parameter = np.isfinite(rows.norms[:, :, 0]).T
    is_fatal = ~parameter | (rows.has(Outcome.APPLIED) & ~update)
    rewind = ACTIONS[min(num_rewinds, len(ACTIONS) - 1)]
    tried, none = "; earlier rewinds did not help" if rewind == "stop" else "", 0 * window
    is_lost = is_fatal & (rewind != "stop")  # the first of two reasons to stop would be used
    for action, reason, is_known, num_left_out in (
        (rewind, f"non-finite parameters{tried}", is_fatal, np.maximum(num_bad, 1)),
        ("stop", "non-finite parameters and no checkpoint to restore", is_lost, none),
        (rewind, f"{STUCK} consecutive skipped steps{tried}", num_skipped == STUCK, num_skipped),
        ("stop", "guard_failed", has_failed, none),
        ("stop", f"no window closed in {LONGEST_WINDOW} calls", num_open > LONGEST_WINDOW, none),
        ("rewind", "replicas differ", differs & (num_rewinds == 0), none),
        ("stop", "hardware: replicas differ again", differs & (num_rewinds > 0), none),
    ):
        for t in np.flatnonzero(is_known):
            left_out = has_id & (window > window[t] - num_left_out[t]) & (window <= window[t])
            batch_ids, step = rows.batch_id[left_out].tolist(), int(rows.step[t])
            yield step, action, f"step {step}: {reason}", batch_ids
    steps, bad = rows.step[closed], window[is_bad]
    for stretch in np.split(bad, np.flatnonzero(np.diff(bad) > GAP + 1) + 1):
        if len(stretch) >= BAD_ROWS:
            first, last, known = stretch[0], stretch[-1], stretch[-1] + GAP + 1
            if len(steps) - first >= STUCK * 2**num_rewinds:
                known = min(known, len(steps) - 1)
            if known < len(steps):
                counts = f"outliers in {len(stretch)} of {last - first + 1} steps"
                reason = f"steps {steps[first]} to {steps[last]}: {counts}{tried}"
                left_out = has_id & (window >= first) & (window <= last)
                yield int(steps[known]), rewind, reason, rows.batch_id[left_out].tolist()


def _is_bad(rows: Rows, incidents: Sequence[Incident]) -> HostArray:
    """Return which steps were applied although the loss is an outlier or a gradient not finite."""
    first = rows.loss[:1]
    limit = np.where((rows.step < FIRST_STEPS) & (first > 0), FIRST_RATIO * first, np.inf)
    for x in incidents:
        if "loss" in x.kinds:
            is_near = (rows.step >= x.step) & (rows.step < x.step + LASTING)
            limit[is_near] = np.minimum(limit[is_near], x.loss_threshold)
    is_outlier = np.isin(rows.step, [x.step for x in incidents if not _HARMFUL.isdisjoint(x.kinds)])
    return rows.has(Outcome.APPLIED) & (is_outlier | (rows.loss > limit))


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
    return Report(*json.loads(np.asarray(sent, np.uint8).tobytes()))
