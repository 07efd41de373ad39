"""Decide when to save, rewind, lower the learning rate, or stop.

If `_evidence` finds a reason, the policy advises a rewind to a good checkpoint, or a stop. A
checkpoint is good if QUIET rows without an incident follow it. docs/recovery.md defines these terms
and the requirements of each action. Let n be the number of rewinds in a row, which is 0 again after
FORGET steps without a decision. The transitions are:

| state | event | next state, action |
| --- | --- | --- |
| running | evidence for a rewind, n < 3 | pending, `rewind`; n + 1 |
| running | the same at the steps of the last rewind: | pending, `lower`; n + 1; these batches |
| | the batches that were left out were not the cause | are used again |
| running | the same elsewhere, n = 3 | pending, `lower`; n + 1 |
| running | the same, the last action was `lower` | pending, `stop` |
| running | a fault of the hardware or the optimizer, n < 3 | pending, `rewind`; n + 1 |
| running | the same, n = 3 | pending, `stop` |
| running | another reason to stop | pending, `stop` |
| running | 32 quiet rows, and no checkpoint waits for them | running, `save` |
| pending | more rows | the same action again |
| any | rows that start at an earlier step | running |

After rows that start at an earlier step, checkpoints of discarded steps are ignored until they are
deleted, that is, until a `saved` list no longer contains them. If a stretch of bad rows had not
ended at the first rewind, the batches after it may be bad as well. The policy then advises a second
rewind before `lower`.
"""

import contextlib
import json
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import numpy as np

from ..._types import HostArray
from ._detect import Incident
from ._evidence import MOST_REWINDS, QUIET, Evidence, bad_rows, find_evidence
from ._outliers import run_lengths
from ._rows import Rows

FORGET = 1000
"""Number of steps without evidence after which earlier rewinds no longer count."""


class Report(NamedTuple):
    """The result of `Monitor.read` for the rows since its last call.

    Attributes:
        step: Index of the next call of `watch`; a checkpoint of this state has the same index.
        action: "continue", "save", "rewind", "lower" or "stop"; see docs/recovery.md.
        reason: Reason for the action, or for not rewinding despite evidence; otherwise empty.
        good_step: Index of the newest checkpoint that is known to be good, or None.
        batch_ids: Batches to leave out after this rewind, including those of earlier rewinds.
        num_rewinds: Number of consecutive rewinds, including this one.
        num_lowers: Number of times that the action was "lower". A restored run should lower its
            initial learning rate this many times.
        is_open: Whether the bad steps that caused the action were still continuing.
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
    num_lowers: int
    is_open: bool
    incidents: Sequence[Incident]
    rows: Rows
    lost_rows: int


class Decision(NamedTuple):
    """The fields of a report that are logged and are equal in all processes; see `Report`."""

    step: int
    action: str
    reason: str
    good_step: int | None
    batch_ids: list[int]
    num_rewinds: int
    num_lowers: int
    is_open: bool

    @classmethod
    def of(cls, report: Report) -> "Decision":
        """Return the decision in a report."""
        return cls._make(report[: len(cls._fields)])


ACTIONS: Final = ("continue", "save", "rewind", "lower", "stop")
"""The values of `Report.action`."""


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
        """Whether a checkpoint exists that later rows may still confirm as good."""
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


class PolicyState(NamedTuple):
    """The values that determine the next decision, besides the rows and the checkpoints.

    Attributes:
        last: The last decision that was not "continue" or "save".
        confirmed_ids: Batches whose omission was confirmed, because the same evidence did not occur
            again without them.
    """

    last: Decision = Decision(0, "continue", "", None, [], 0, 0, False)
    confirmed_ids: Sequence[int] = ()


def next_action(last: Decision, found: Evidence, num_rewinds: int, has_returned: bool) -> str:
    """Return the action for new evidence; see the table of the module.

    `num_rewinds` is the number of earlier rewinds in a row, and `has_returned` is whether the
    evidence is at the steps of the last rewind, whose batches were left out.
    """
    if found.action == "stop" or found.is_fault or num_rewinds == 0:
        return found.action
    if last.action == "lower":
        return "stop"
    # If the stretch had not ended at the first rewind, the batches after it may be bad as well.
    may_go_on = last.is_open and num_rewinds == 1
    if has_returned and not may_go_on:
        return "lower"
    return "lower" if num_rewinds >= MOST_REWINDS else "rewind"


def next_decision(
    state: PolicyState, found: Evidence, num_rewinds: int, good_step: int | None
) -> PolicyState:
    """Return the state with the decision for new evidence.

    `num_rewinds` is the number of earlier rewinds in a row, and `good_step` is the newest good
    checkpoint.
    """
    last, confirmed_ids = state
    has_returned = num_rewinds > 0 and last.action == "rewind" and found.first < last.step
    action, reason = next_action(last, found, num_rewinds, has_returned), found.reason
    batch_ids = list(dict.fromkeys([*last.batch_ids, *found.batch_ids]))
    if action == "lower" and has_returned:
        batch_ids = [*confirmed_ids]
        reason += "; it has returned without the batches that were left out"
    elif not has_returned:
        confirmed_ids = last.batch_ids
    if action == "stop" and found.action == "rewind":
        reason += "; earlier rewinds did not help"
    decision = Decision(
        step=found.step + 1,
        action=action,
        reason=reason,
        good_step=good_step,
        batch_ids=batch_ids,
        num_rewinds=num_rewinds + 1,
        num_lowers=last.num_lowers + (action == "lower"),
        is_open=found.is_open,
    )
    return PolicyState(decision, confirmed_ids)


class Policy:
    """Decide from the rows of a run whether to save, rewind, lower the learning rate, or stop.

    Args:
        events: Lines with a decision or "rewind_to" from the log of the run to continue.
        rewind_on_rise: See `Monitor`.

    Attributes:
        state: The last decision, and other values that the next one depends on.
        is_pending: Whether this decision is pending: the run has not returned to an earlier step
            since then.
        explained_until: First step for which a reason for not rewinding has not been reported yet.
    """

    def __init__(self, events: Iterable[Mapping[str, Any]] = (), *, rewind_on_rise: bool = False):
        self.rewind_on_rise, self.checkpoints = rewind_on_rise, Checkpoints()
        self.state, self.is_pending, self.explained_until = PolicyState(), False, 0
        for event in events:
            self.is_pending = "action" in event
            if self.is_pending:
                last, confirmed_ids = self.state
                confirmed_ids = confirmed_ids if last.is_open else last.batch_ids
                self.state = PolicyState(Decision(**event), confirmed_ids)

    @property
    def last(self) -> Decision:
        """The last decision that was not "continue" or "save"."""
        return self.state.last

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
    ) -> Decision:
        """Return what to do.

        Args:
            rows: The last rows, with increasing steps.
            incidents: The incidents in these rows.
            first_new: The first step of the rows that are new since the last call.
            saved: Indices of all checkpoints that exist; None if they have not changed.
        """
        if saved is not None:
            self.checkpoints.replace(saved)
        if self.checkpoints.good_until < 0 and len(rows.step):
            self.checkpoints.good_until = int(rows.step[0])  # nothing before it was measured
        is_bad = bad_rows(rows, incidents, self.rewind_on_rise)
        suspicious = [x.step for x in incidents if "note" not in x.kinds]
        is_suspicious = is_bad | np.isin(rows.step, suspicious)
        num_quiet = run_lengths(~is_suspicious, is_suspicious)
        num_rewinds = self.last.num_rewinds if rows.end - self.last.step < FORGET else 0
        # After "lower", the next action is "stop", which leaves out no batches. Therefore, the
        # patience is not longer.
        patience = QUIET * 2 ** (num_rewinds if self.last.action == "rewind" else 0)
        starving = [x.step for x in incidents if "clip" in x.kinds and self.rewind_on_rise]
        no_rewind = ""
        for found in find_evidence(rows, is_bad, starving, num_rewinds, patience):
            if found.step >= first_new and not self.is_pending:
                self.checkpoints.confirm(rows.step, num_quiet[rows.step <= found.step])
                good_step = self.checkpoints.good_step
                if found.action == "stop" or good_step is not None:
                    self.state = next_decision(self.state, found, num_rewinds, good_step)
                    self.is_pending = True
                elif found.first >= self.explained_until:
                    has_saved = self.checkpoints.steps is not None
                    why = "no checkpoint is good" if has_saved else "`saved=` was never passed"
                    no_rewind = f"{found.reason}; no rewind, because {why}"
                    self.explained_until = rows.end
        self.checkpoints.confirm(rows.step, num_quiet)
        if self.is_pending:
            return self.last._replace(step=rows.end)
        can_save = num_quiet[-1:].sum() >= QUIET and not self.checkpoints.has_candidate
        return self.last._replace(
            step=rows.end,
            action="save" if can_save else "continue",
            reason=no_rewind,
            good_step=self.checkpoints.good_step,
            num_rewinds=num_rewinds,
            is_open=False,
        )

    def replace(self, last: Decision, decision: Decision) -> None:
        """Use the decision of the function `policy`; `last` is the decision before this read."""
        self.is_pending = decision.action not in ("continue", "save")
        if not self.is_pending:
            self.state = self.state._replace(last=last)
        elif decision[1:] != self.last[1:]:  # without the step
            self.state = self.state._replace(last=decision)


def of_all_processes(decision: Decision) -> list[Decision]:
    """Return the decision of each process; all processes must call this function."""
    if jax.process_count() == 1:
        return [decision]
    text = np.frombuffer(json.dumps(decision).encode(), np.uint8)
    sizes = _allgather(np.int32(len(text)))
    texts = _allgather(np.resize(text, max(sizes)))
    found = (x[:size].tobytes() for x, size in zip(np.asarray(texts, np.uint8), sizes, strict=True))
    return [Decision(*json.loads(x)) for x in found]


@contextlib.contextmanager
def raising_in_all_processes() -> Generator[None]:
    """Raise in all processes if the body raises in one; all processes must enter this context.

    Otherwise, the other processes would wait for the process that raised.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as failure:
        error = failure
    if jax.process_count() > 1 and np.any(_allgather(np.bool_(error is not None))):
        error = error or OSError("another process could not write the log")
    if error is not None:
        raise error


def _allgather(x: HostArray | np.generic) -> HostArray:
    """Return the array of each process, along a new leading axis."""
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(x))
