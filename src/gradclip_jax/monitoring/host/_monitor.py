"""Read the rows of `watch` on the host, report what happened, and write a log."""

from __future__ import annotations

import contextlib
import copy
import os
import pathlib
from collections.abc import Callable, Generator, Iterable
from typing import Any, Literal

import jax
import numpy as np

from ..._checks import check_callable, check_choice, check_count, check_flag
from ..._errors import public, type_error, value_error
from ..._format import listed, shortened
from ..._types import HostArray, Tree
from ...norms._granularity import Granularity
from ...norms._mask import Mask
from .._layout import Names, PackedRows, names_of
from .._watch import find_watch
from ._detect import Detector, Incident
from ._lines import lines_with, to_incidents, to_lines, to_rows, units_in
from ._log import Log, LogSource, LogWriter, read_columns
from ._policy import (
    ACTIONS,
    Decision,
    Policy,
    Report,
    of_all_processes,
    raising_in_all_processes,
)
from ._rows import Columns, Line, Rows, unpack_rows
from ._summary import summary_of

_UNITS_EVERY = 50
"""Interval in steps at which the log contains the norms of leaves or layers."""

_AROUND = 8
"""Number of steps before and after an incident whose norms of leaves or layers are logged."""

_MAX_ROWS = 1024
"""Number of rows to keep for the policy, and to restart the detection after a rewind."""


class Monitor:
    """Read the rows of `watch` on the host, find incidents, advise actions, and write a log.

    | situation | what `read` does |
    | --- | --- |
    | more than `history` steps since the last call | reads the last rows, and counts the others |
    | the state was restored from a checkpoint | continues from its step; marks replaced lines |
    | the file `log` exists | raises, or with `resume=True` continues the run in this file |
    | the file `log` cannot be written | raises; the next call reads and writes the same rows |
    | the function `log` raises | raises, although the rows count as read and are in `report`; the |
    | | next call begins with the line for which the function raised |
    | the state of other parameters | raises |
    | several processes | all must call `read`, which waits for the others; process 0 writes the |
    | | log, and with `resume=True` all must be able to read it |
    | a state that was vmapped over seeds | raises; use one monitor for each seed |

    Args:
        params: Parameters, or any pytree with the same structure and shapes.
        log: Path of a file of JSON lines, or a function that is called with a dictionary for each
            row and each incident, such as `wandb.log`. Each row contains the scalars of the whole
            tree; every 50 steps and around incidents it also contains the norms of leaves or
            layers.
        resume: Whether to continue the run recorded in the file `log`, if it exists, and restore
            its incidents, its decisions and the batches to leave out. Pass True in jobs that are
            restarted.
        granularity: As in `watch`.
        trainable: As in `watch`.
        taps: As in `watch`.
        which: Index of the state of `watch`, if an optimizer has several. The outermost is 0.
        rewind_on_rise: Whether to advise a rewind if the loss rises permanently or has only grown
            since the start. Pass False for a value loss of reinforcement learning, which grows with
            the return.
        policy: Function that receives each report, and can return `report._replace(...)` with a
            different `action`, `reason` or `batch_ids`. Its actions are logged, and repeated until
            the run continues from an earlier step. None keeps the actions of docs/recovery.md.

    Attributes:
        names: Names of units, clips and taps.
        incidents: All incidents so far.
        rows: The rows of the last read and the 1,024 rows before it, or all rows of the log after
            `read_log`.
        report: The last report. After a restart, it contains the last decision from the log.

    Raises:
        ValueError: If the file `log` exists and `resume` is False, if it was written for different
            parameters, or if its folder does not exist.
        TypeError: If an argument has another type.

    Examples:
        >>> import jax, jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = gcx.watch(gcx.skip_spikes(optax.sgd(0.1), norm=4.0), history=256)
        >>> params = {"wi": jnp.ones(2), "wo": jnp.ones(2)}
        >>> state, monitor = tx.init(params), gcx.Monitor(params)
        >>> for size in (1.0, 50.0):
        ...     grads = {"wi": jnp.array([0.6, 0.8]) * size, "wo": jnp.array([0.5, 0.5])}
        ...     _, state = jax.jit(tx.update)(grads, state, params)
        >>> report = monitor.read(state)
        >>> print(*report.incidents)
        step 1: skipped, gradient norm 50 (threshold 4), 100 % in wi
        >>> report.action, len(report.rows.step)
        ('continue', 2)
    """

    @public
    def __init__(
        self,
        params: Tree,
        *,
        log: Log = None,
        resume: bool = False,
        granularity: Literal["global", "leaf"] | Granularity = "leaf",
        trainable: Mask = None,
        taps: Tree | None = None,
        which: int | None = None,
        rewind_on_rise: bool = False,
        policy: Callable[[Report], Report] | None = None,
    ):
        check_flag("resume", resume)
        check_flag("rewind_on_rise", rewind_on_rise)
        if which is not None:
            check_count("which", which, "Pass 0 for the outermost `watch`.", low=0)
        if policy is not None:
            check_callable("policy", policy, "Pass a function of a report.")
        names = names_of(params, granularity, trainable, taps)
        columns = _read_own_log(log, names, resume)
        rows, names, _ = to_rows(columns, names)
        events = lines_with(columns, ["rewind_to"]) | lines_with(columns, Decision._fields)
        in_order = (event for _, event in sorted(events.items()))
        own_policy = Policy(in_order, rewind_on_rise=rewind_on_rise)
        self._initialize(rows, names, own_policy, log, which, resume, policy)
        self.incidents = to_incidents(columns)

    @classmethod
    def _of_log(cls, columns: Columns, rows: Rows, names: Names, remark: str) -> Monitor:
        """Return a monitor that has read the rows of a log; `remark` is about omitted lines."""
        monitor = cls.__new__(cls)
        monitor._initialize(rows.take(slice(0)), names, Policy(), remark=remark)
        monitor._start(rows, names)
        monitor.incidents = to_incidents(columns) or monitor._recent
        return monitor

    def _initialize(
        self,
        rows: Rows,
        names: Names,
        own_policy: Policy,
        log: Log = None,
        which: int | None = None,
        is_resumed: bool = False,
        user_policy: Callable[[Report], Report] | None = None,
        remark: str = "",
    ) -> None:
        """Set all attributes except `incidents`; `rows` are the earlier rows of the run.

        `remark` is a sentence about lines of a log that are not in these rows.
        """
        self._writer = LogWriter(None if jax.process_index() else log)
        self._policy, self._user_policy, self._which = own_policy, user_policy, which
        self._is_resumed, self._values = is_resumed, None  # until rows are read
        self._remark = remark
        self._start(rows.take(slice(-_MAX_ROWS, None)), names)
        # Processes communicate only in `read`, so that a single process can create a monitor on its
        # own.
        decision = own_policy.update(self.rows, self._recent, rows.end)
        self.report = Report(*decision, incidents=(), rows=rows.take(slice(0)), lost_rows=0)

    @public
    def read(self, state: Tree, *, saved: Iterable[int] | None = None) -> Report:
        """Read the rows since the last call, and write them to the log.

        The call blocks until the state is computed, and transfers all rows at once.

        Args:
            state: Optimizer state, or any pytree that contains it; or the rows of one or several
                steps from `last_row`.
            saved: Indices of all checkpoints that exist; None if they have not changed.

        Returns:
            A report.

        Raises:
            TypeError: If called inside jit, or if `state` contains no state of `watch`, or several.
            ValueError: If the state belongs to other parameters or to several runs, or if processes
                have resumed different logs.
            OSError: If the file `log` cannot be written. The monitor is unchanged, so that the call
                can be repeated.
            Exception: If the function `log` raises. The rows count as read, because some of their
                lines may have been logged; the report is in `report`.
        """
        row = state if isinstance(state, PackedRows) else find_watch(state, self._which).rows
        rows, names = unpack_rows(row, self.names)
        saved = _checked_steps(saved)
        if self._is_resumed:
            decisions = of_all_processes(Decision.of(self.report))
            if any(x != decisions[0] for x in decisions):
                hint = "Use a file system that all processes share."
                raise value_error("log", "the same file in all processes", "other decisions", hint)
        with self._unchanged_on_error():
            if names != self.names:  # the state contains the names of clips
                self.names, self.rows = names, rows.take(slice(0))
            step = self._first_new(rows, is_same_state=row.values is self._values)
            is_rewound, self._values = step < self.report.step, row.values
            lines: list[Line] = [{"step": step, "rewind_to": step}] if is_rewound else []
            incidents = self._go_back(step) if is_rewound else []
            rows = rows.take(rows.step >= step)
            incidents += self._detector.update(rows)
            self._append(rows, incidents)
            # Write the decision first. If the process is killed here, a restart needs it, but not
            # the rows.
            if self._decide(rows, step, incidents, saved):
                lines.append(Decision.of(self.report)._asdict())
            lines += to_lines(rows, self.names, self._with_units(rows))
            lines += [x._asdict() for x in incidents]
            with raising_in_all_processes():
                self._writer.append(lines)
        self._writer.send()
        return self.report

    def summary(self) -> str:
        """Describe `rows` and all incidents in at most ten lines.

        If `watch` is around an accumulation, it measures micro-batches, so no `max_norm` is
        suggested for a clip inside the accumulation.
        """
        if not len(self.rows.step):
            return "no steps"
        lines = summary_of(self.rows, self.names, self.incidents)
        return "\n".join([*lines, f"log: {self._remark}"] if self._remark else lines)

    def _start(self, rows: Rows, names: Names) -> None:
        """Restart the detection with these rows."""
        self.names, self.rows, self._detector = names, rows, Detector(names)
        self._recent = self._detector.update(rows)

    def _append(self, rows: Rows, incidents: list[Incident]) -> None:
        """Append new rows and their incidents."""
        self._is_resumed &= len(rows.step) == 0
        self.incidents = [*self.incidents, *incidents]
        self._recent = [*self._recent[-_MAX_ROWS:], *incidents]
        self.rows = Rows.concatenate([self.rows.take(slice(-_MAX_ROWS, None)), rows])

    def _decide(
        self, rows: Rows, step: int, incidents: list[Incident], saved: list[int] | None
    ) -> bool:
        """Update the report with new rows, and return whether it contains a new decision."""
        last = self._policy.last
        decision = self._policy.update(self.rows, self._recent, step, saved)
        report = Report(*decision, incidents, rows, int(min(rows.step, default=step)) - step)
        if self._user_policy is not None:
            report = _checked_report(self._user_policy(report))
        # The decision of process 0 is used, because other processes may have different files.
        decision = of_all_processes(Decision.of(report))[0]
        if self._user_policy is not None:
            self._policy.replace(last, decision)
        self.report = report._replace(**decision._asdict())
        return self._policy.last is not last

    def _first_new(self, rows: Rows, *, is_same_state: bool) -> int:
        """Return the first step that was not read before, or that was repeated after a rewind.

        The state still contains rows of earlier calls. If the run has repeated their steps, their
        values differ from the values in `self.rows`. If all values are equal after a rewind was
        advised, but this is not the state of the last call, the run has repeated the steps exactly.
        """
        steps, *places = np.intersect1d(self.rows.step, rows.step, return_indices=True)
        before, after = (
            np.column_stack([x.norms[i, :, 0], x.loss[i], x.batch_id[i]])
            for x, i in zip((self.rows, rows), places, strict=True)
        )
        is_equal = np.isclose(before, after, rtol=1e-6, atol=0, equal_nan=True).all(1)
        first = min(steps[~is_equal] if len(steps) else rows.step, default=rows.end)
        step, report = min(int(first), self.report.step), self.report
        is_repeated = step == rows.end == report.step and not is_same_state
        if is_repeated and report.action in ("rewind", "lower"):
            return report.good_step or 0
        return step

    def _go_back(self, step: int) -> list[Incident]:
        """Delete the rows from this step on; return an incident if no rewind was advised."""
        self._policy.rewound(step)
        self._start(self.rows.take(self.rows.step < step), self.names)
        is_advised = self.report.action in ("rewind", "lower")
        # The first read after `resume=True` is expected to start from a restored state.
        if is_advised or self._is_resumed:
            return []
        sentence = f"the state went back from step {self.report.step}"
        sentence = f"step {step}: {sentence}, although no rewind was advised"
        return [Incident(step, ("state",), sentence)]

    def _with_units(self, rows: Rows) -> HostArray:
        """Return a mask of the rows whose norms of leaves or layers are logged."""
        closed = self.rows.step[self.rows.closes_window]
        _, first = np.unique(closed // _UNITS_EVERY, return_index=True)
        near = [x.step + i for x in self._recent for i in range(-_AROUND, _AROUND + 1)]
        return np.isin(rows.step, [*closed[first], *near])

    @contextlib.contextmanager
    def _unchanged_on_error(self) -> Generator[None]:
        """Restore the monitor after an exception, for example if the disk is full."""
        before = vars(self) | copy.deepcopy({x: vars(self)[x] for x in ("_detector", "_policy")})
        try:
            yield
        except BaseException:
            vars(self).update(before)
            raise


@public
def incidents(state: Tree, params: Tree, **options: Any) -> list[Incident]:
    """Detect incidents in the rows that the state of `watch` still contains, oldest first.

    Detection starts at the first of these rows. A `Monitor` finds more, because it reads every row.
    docs/watching.md lists the kinds of incidents.

    Args:
        state: Optimizer state, or any pytree that contains it.
        params: Parameters, or any pytree with the same structure and shapes.
        options: `granularity`, `trainable`, `taps` and `which`, as in `Monitor`.

    Returns:
        List of incidents; each prints as a sentence.

    Raises:
        TypeError: If called inside jit, or if `state` contains no state of `watch`.
        ValueError: As in `Monitor.read`.

    Examples:
        >>> import jax, jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = gcx.watch(gcx.skip_nonfinite(optax.sgd(0.1)))
        >>> params = {"w": jnp.ones(2)}
        >>> grads = {"w": jnp.array([1.0, jnp.nan])}
        >>> _, state = jax.jit(tx.update)(grads, tx.init(params), params)
        >>> print(*gcx.incidents(state, params))
        step 0: skipped, gradient norm nan, 1 non-finite element, 100 % in w
    """
    row = find_watch(state, options.pop("which", None)).rows
    rows, names = unpack_rows(row, names_of(params, **options))
    return Detector(names).update(rows)


@public
def read_log(log: LogSource, *, prefix: str | None = None) -> Monitor:
    """Detect incidents in the log of a run, which may have been written by another trainer.

    | log | what is read |
    | --- | --- |
    | lines of a `Monitor` | all columns, and the incidents that it logged |
    | lines of `metrics(state)` | all columns |
    | any other dictionaries, JSON lines, a CSV file | step, loss and gradient norm |
    | `trainer_state.json` of Hugging Face | the same |
    | a text file | the same, where they are printed as `loss=2.5`, `lm loss: 2.5` or `loss 2.5` |
    | a step that occurs again after a resumption | the last line |

    Args:
        log: Sequence of dictionaries, or the path of a file.
        prefix: Prefix of the keys, such as `g/`. None detects the prefix.

    Returns:
        A monitor that has read all rows; see its `incidents` and `summary()`.

    Raises:
        ValueError: If the log has neither a loss nor a norm, or has them under several prefixes.

    Examples:
        >>> import gradclip_jax as gcx
        >>> log = [{"step": i, "loss": 3.0 + 0.1 * (i % 3)} for i in range(99)]
        >>> monitor = gcx.diagnostics.read_log([*log, {"step": 99, "loss": 30.0}])
        >>> print(monitor.incidents[0].step, monitor.incidents[0].kinds)
        99 ('loss',)
    """
    if not isinstance(prefix, (str, type(None))):
        hint = "Pass the start of the keys, such as `g/`."
        raise type_error("prefix", "a string or None", shortened(prefix), hint)
    columns = read_columns(log, prefix=prefix)
    rows, names, remark = to_rows(columns)
    if not len(rows.step):
        hint = "docs/recipes/logging.md lists the names of columns that are read."
        got = f"a log with the columns {listed(map(repr, columns))}" if columns else "an empty log"
        got += f" ({remark})" if remark else ""
        raise value_error("log", "a log with a loss or a gradient norm", got, hint)
    return Monitor._of_log(columns, rows, names, remark)


def _checked_report(report: Any) -> Report:
    """Return the result of `policy`; raise an error if its action is not valid."""
    if not isinstance(report, Report):
        hint = "Return `report._replace(action=...)`, or the report itself."
        raise type_error("policy", "a function that returns a report", shortened(report), hint)
    check_choice("policy", report.action, ACTIONS)
    batch_ids = [int(x) for x in report.batch_ids]  # NumPy integers cannot be written as JSON
    return report._replace(batch_ids=batch_ids)


def _checked_steps(saved: Iterable[int] | None) -> list[int] | None:
    """Raise unless `saved` contains indices of checkpoints, or is None."""
    hint = "Pass the steps of all checkpoints, such as `checkpoints.all_steps()`."
    if saved is None:
        return None
    if isinstance(saved, (str, bytes)) or not np.iterable(saved):
        raise type_error("saved", "a list of integers", shortened(saved), hint)
    steps = list(saved)
    for step in steps:
        check_count("saved", step, hint, low=0)
    return [int(step) for step in steps]


def _read_own_log(log: Log, names: Names, resume: bool) -> Columns:
    """Return the columns of the log that a monitor continues."""
    if callable(log):
        check_callable("log", log, "Pass a function of a line.")
    if log is None or callable(log):
        return {}
    if not isinstance(log, (str, os.PathLike)):
        hint = "Pass a path such as 'run.jsonl'."
        raise type_error("log", "a path or a function", type(log).__name__, hint)
    path, place = pathlib.Path(log), repr(os.fspath(log))
    if jax.process_index() == 0 and not path.parent.is_dir():
        raise value_error("log", "a file in a folder that exists", place, "Create the folder.")
    columns = read_columns(path, prefix="") if path.exists() else {}
    if columns and not resume:
        hint = "Pass `resume=True` to continue the run of this file, or another name."
        raise value_error("log", "a new file", f"{place}, which exists", hint)
    if other := sorted({*units_in(columns)} ^ {*names.units}) if units_in(columns) else []:
        rule = "the log of a run with the same parameters, `granularity` and `trainable`"
        got = f"{place}, which differs in {listed(other)}"
        raise value_error("log", rule, got, "Pass another name.")
    return columns
