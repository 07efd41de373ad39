"""Recovery: when to save, rewind, lower the learning rate, or stop.

The policy is a state machine over rows and incidents, without files. docs/recovery.md defines its
terms and says what each action needs. With n rewinds so far, its transitions are:

| state | event | next state, action |
| --- | --- | --- |
| running | `saved` has a new index | waiting |
| waiting | a suspicious row | waiting; its 32 rows start again |
| waiting | 32 rows that are not suspicious | running; the candidate is good |
| running, waiting | evidence for a rewind, n < 3 | rewinding, `rewind`; n + 1 |
| running, waiting | the same, n = 3 | rewinding, `lower`; n + 1 |
| running, waiting | the same, n = 4 | stopped, `stop` |
| running, waiting | 1,000 steps after the last evidence for a rewind | n = 0 |
| running, waiting | rows that start at an earlier step | evidence of superseded rows is dropped |
| rewinding | rows that go on | the same action again |
| rewinding | rows that start at `good_step` | running; later checkpoints count only after |
| | | `saved` has once not listed them |
| running, waiting | a reason to stop | stopped, `stop` |
| stopped | anything | stopped, `stop` with the same reason |
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ._incident import Incident
from ._rows import Outcome, Rows

BAD_ROWS, GAP = 3, 8
"""A stretch has at least so many bad rows, with at most `GAP` other rows between two of them."""

LONG = 32
"""Rows after which a stretch that has not ended leads to a rewind, doubled after each rewind; also
the number of consecutive skipped steps that lead to one."""

EARLY, EARLY_RATIO = 16, 10.0
"""Incidents need this number of rows. In the first ones, a loss above `EARLY_RATIO` times all
earlier losses is an outlier."""

FORGET = 1000
"""Rows without evidence for a rewind after which earlier rewinds no longer count."""

WINDOWS, FEWEST_CALLS = 8, 1000
"""A window never closes if it has `WINDOWS` times as many calls as the longest window so far, and
more than `FEWEST_CALLS`."""


class Decision(NamedTuple):
    """What to do after a read of the monitor; see docs/recovery.md.

    Attributes:
        action: "continue", "save", "rewind", "lower" or "stop".
        reason: A sentence; empty for "continue" and "save".
        good_step: Index of the newest checkpoint that later rows have confirmed, or None.
        batch_ids: Batches to leave out, of this rewind and of all earlier ones.
    """

    action: str
    reason: str
    good_step: int | None
    batch_ids: tuple[int, ...]


class Step(NamedTuple):
    """The facts of one row that the policy reads.

    Attributes:
        step: Index of the row.
        flags: Outcome of the step.
        loss: Loss, or 0.
        batch_id: Batch of the row, or None.
        device: Index of the device that differs.
        is_suspicious: Whether the row has an incident.
        is_bad: Whether the step was applied and its loss is an outlier; without a loss, its norms.
        is_fatal: Whether the parameters are non-finite before or after the step.
    """

    step: int
    flags: Outcome
    loss: float
    batch_id: int | None
    device: int
    is_suspicious: bool
    is_bad: bool
    is_fatal: bool


class Policy:
    """Decide from the rows of a run whether to save, rewind, lower the learning rate, or stop.

    Args:
        quiet: Number of rows without an incident before a save is proposed, and after a checkpoint
            before it is good.
        max_rewinds: Number of rewinds after which the learning rate is lowered. Rewinds are
            forgotten after 1,000 rows without evidence for another.
        events: Decisions and rewinds in the log of a run that continues, in their order: dicts with
            "step" and the fields of `Decision`, or with "rewind_to".
    """

    def __init__(
        self, *, quiet: int = 32, max_rewinds: int = 3, events: Iterable[Mapping[str, Any]] = ()
    ):
        self.quiet, self.max_rewinds = quiet, max_rewinds
        self.pending: Decision | None = None
        self.num_rewinds, self.last_evidence, self.next_step = 0, 0, -1
        self.quiet_from = 0  # no row from this step on is suspicious
        self.good_until = 0  # checkpoints until this step are good: `quiet` rows follow it
        self.saved, self.stale = set[int](), set[int]()  # `stale` are those of superseded rows
        self.left_out: dict[int, None] = {}
        self.differing_devices = set[int]()
        self.longest_window = 0
        self.usual = list[float]()  # losses of the last applied steps outside stretches
        self._start_branch()
        for event in events:
            if "rewind_to" in event:
                self.rewound(event["rewind_to"])
            else:
                self.left_out = dict.fromkeys(event["batch_ids"])
                self._wait(event["action"], event["reason"], event["good_step"])
                self.last_evidence = event["step"]

    @property
    def good_step(self) -> int | None:
        """The newest checkpoint that exists and that later rows have confirmed."""
        good = (i for i in self.saved - self.stale if i <= self.good_until)
        return max(good, default=None)

    def update(
        self, rows: Rows, incidents: Iterable[Incident], saved: Iterable[int] | None = None
    ) -> Decision:
        """Process the rows since the last call, and decide what to do.

        Args:
            rows: Rows with increasing steps; possibly none.
            incidents: The incidents in these rows, one for each row with a fault.
            saved: Indices of all checkpoints that exist; None if they have not changed.

        Returns:
            The decision; with several processes, that of process 0.
        """
        if saved is not None:
            self.saved = set(map(int, saved))
            self.stale &= self.saved
        for row in _steps(rows, incidents):
            if not self.pending:
                self._process(row)
        if not self.pending and len(self.stretch) >= LONG * 2**self.num_rewinds:
            self._end_stretch()
        is_quiet = self.next_step - self.quiet_from >= self.quiet
        has_candidate = any(i > self.good_until for i in self.saved - self.stale)
        action = "save" if is_quiet and not has_candidate else "continue"
        left_out = tuple(self.left_out)
        return _broadcast(self.pending or Decision(action, "", self.good_step, left_out))

    def resume(self, rows: Rows, incidents: Iterable[Incident]) -> None:
        """Process the last rows of a log, whose decisions are among the events."""
        decided = self.pending, self.num_rewinds, self.last_evidence, dict(self.left_out)
        for row in _steps(rows, incidents):
            self._process(row)
        self.pending, self.num_rewinds, self.last_evidence, self.left_out = decided

    def rewound(self, step: int) -> None:
        """Go on from an earlier step, because the run was rewound or restarted."""
        self._start_branch()
        self.stale |= {i for i in self.saved if i > step}
        self.next_step = min(self.next_step, step)
        self.quiet_from, self.good_until = min(self.quiet_from, step), min(self.good_until, step)
        if self.pending and self.pending.action != "stop":
            self.pending = None

    def _start_branch(self) -> None:
        self.stretch, self.skipped = list[Step](), list[Step]()
        self.num_others, self.num_calls = 0, 0

    def _process(self, row: Step) -> None:
        if self.next_step < 0:
            self.quiet_from = self.good_until = row.step  # nothing before it was measured
        self.next_step = row.step + 1
        if row.step - self.last_evidence >= FORGET:
            self.num_rewinds = 0
        self._check_window(row)
        if Outcome.SKIPPED in row.flags:
            self.skipped.append(row)
        elif Outcome.HELD not in row.flags:
            self.skipped = []
        if self._extend_stretch(row) or row.is_suspicious:
            self.quiet_from = self.next_step
        if self.next_step - self.quiet_from >= self.quiet:
            self.good_until = self.next_step - self.quiet
        place, skips = f"step {row.step}", len(self.skipped)
        if row.is_fatal:
            self._rewind(f"{place}: non-finite parameters", self.stretch or [row], is_fatal=True)
        elif Outcome.REPLICA_DIFFERS in row.flags:
            reason = f"{place}: the parameters on device {row.device} differ from the others"
            if row.device in self.differing_devices:
                self._wait("stop", f"hardware: {reason} again")
            self.differing_devices.add(row.device)
            self._rewind(reason, [])
        elif Outcome.GUARD_FAILED in row.flags and skips:
            self._wait("stop", f"{place}: guard_failed after {skips} consecutive skipped steps")
        elif skips == LONG:
            self._rewind(f"{place}: {skips} consecutive steps were skipped", self.skipped)

    def _extend_stretch(self, row: Step) -> bool:
        """Add the row to a stretch of bad rows; return whether it is bad."""
        is_applied, is_bad = Outcome.APPLIED in row.flags, row.is_bad
        if self.stretch:
            # The thresholds of incidents adapt to a long stretch, but this limit does not.
            is_bad |= is_applied and row.loss > self.limit
        else:
            largest = max(self.usual, default=np.inf)
            is_early = len(self.usual) < EARLY and row.loss > EARLY_RATIO * largest > 0
            is_bad |= is_applied and is_early
            if not is_bad:
                if is_applied and np.isfinite(row.loss):
                    self.usual = [*self.usual[1 - LONG :], row.loss]
                return False
            self.limit = (np.median(self.usual) + row.loss) / 2 if self.usual else np.inf
        self.stretch.append(row._replace(is_bad=is_bad))
        self.num_others = 0 if is_bad else self.num_others + (Outcome.HELD not in row.flags)
        if self.num_others > GAP:
            self._end_stretch()
        return is_bad

    def _end_stretch(self) -> None:
        """Rewind if the stretch has enough bad rows."""
        bad = [i for i, row in enumerate(self.stretch) if row.is_bad]
        rows, self.stretch, self.num_others = self.stretch[: bad[-1] + 1], [], 0
        if len(bad) >= BAD_ROWS:
            place = f"steps {rows[0].step} to {rows[-1].step}"
            self._rewind(f"{place}: outliers in {len(bad)} of {len(rows)} steps", rows)

    def _check_window(self, row: Step) -> None:
        """Stop if the window of an accumulation never closes."""
        self.num_calls += 1
        if not row.flags & (Outcome.HELD | Outcome.EMPTY_WINDOW):
            self.longest_window, self.num_calls = max(self.longest_window, self.num_calls), 0
        elif self.num_calls > max(FEWEST_CALLS, WINDOWS * self.longest_window):
            self._wait("stop", f"step {row.step}: no window closed in {self.num_calls} calls")

    def _rewind(self, reason: str, rows: Sequence[Step], *, is_fatal: bool = False) -> None:
        """Wait for a rewind, or stop if rewinding did not help or is impossible."""
        count = self.num_rewinds
        if self.good_step is None:
            if is_fatal:
                self._wait("stop", f"{reason}, and no checkpoint to restore")
        elif count > self.max_rewinds:
            tried = f"{count - 1} rewinds and a lower learning rate"
            self._wait("stop", f"{reason}; {tried} did not help")
        else:
            self.left_out |= {x.batch_id: None for x in rows if x.batch_id is not None}
            self._wait("rewind" if count < self.max_rewinds else "lower", reason)

    def _wait(self, action: str, reason: str, good_step: int | None = None) -> None:
        """Keep a decision until the run is rewound; the earliest evidence counts."""
        if not self.pending:
            self.num_rewinds += action != "stop"
            self.last_evidence = self.next_step
            good_step = self.good_step if good_step is None else good_step
            self.pending = Decision(action, reason, good_step, tuple(self.left_out))


def _steps(rows: Rows, incidents: Iterable[Incident]) -> Iterator[Step]:
    found = {incident.step: set(incident.kinds) - {"note"} for incident in incidents}
    for t, step in enumerate(rows.step.tolist()):
        flags, kinds = Outcome(int(rows.outcome[t])), found.get(step, set[str]())
        is_applied, has_loss = Outcome.APPLIED in flags, Outcome.HAS_LOSS in flags
        # The loss tells whether an outlier of a norm did harm.
        outliers = {"loss", "nan", "infinity"} | (set() if has_loss else {"norm", "update"})
        _, update, parameter = np.isfinite(rows.norms[t, :, 0])
        yield Step(
            step,
            flags,
            rows.loss[t],
            int(rows.batch_id[t]) if Outcome.HAS_BATCH_ID in flags else None,
            int(rows.device[t]),
            is_suspicious=bool(kinds),
            is_bad=is_applied and not outliers.isdisjoint(kinds),
            is_fatal=not (parameter and (update or not is_applied)),
        )


def _broadcast(decision: Decision) -> Decision:
    """Return the decision of process 0: losses and files may differ between processes."""
    if jax.process_count() == 1:
        return decision
    from jax.experimental import multihost_utils

    text = np.frombuffer(json.dumps(decision).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    sent = multihost_utils.broadcast_one_to_all(np.resize(text, size))
    action, reason, good_step, batch_ids = json.loads(np.asarray(sent, np.uint8).tobytes())
    return Decision(action, reason, good_step, tuple(batch_ids))
