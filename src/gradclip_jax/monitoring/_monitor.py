"""Read the rows of `watch` on the host, report what happened, and write a log."""

from __future__ import annotations

import contextlib
import copy
import os
import pathlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeAlias

import jax
import numpy as np

from .._checks import check_callable, check_count, check_number, is_traced, listed, shortened
from .._errors import public, type_error, value_error
from .._types import HostArray, Tree
from ..norms._granularity import Granularity
from ..norms._mask import Mask
from ._detect import Detector, Incident, from_lines
from ._log import LogSource, append_lines, read_lines
from ._policy import DECISION, Policy, Report, agreed
from ._rows import (
    WORDS,
    Line,
    Names,
    Outcome,
    Row,
    Rows,
    names_of,
    read_stack,
    to_lines,
    to_rows,
    units_in,
)
from ._watch import find_watch

Log: TypeAlias = str | os.PathLike[str] | Callable[[dict[str, Any]], object] | None

_UNITS_EVERY = 50
"""The log contains the norms of units for the first of so many steps, and the first window."""

_AROUND = 8
"""Number of steps before and after an incident for which the log contains the norms of units."""

_INSIDE = "for a suggested max_norm, watch windows: accumulate_gradients(watch(optimizer), every)"

_KEPT = 1024
"""Number of rows that are kept for the policy, and to start the detection again after a rewind."""


class Monitor:
    """Read the rows of `watch` on the host: incidents, what to do, a log and a summary.

    | situation | what `read` does |
    | --- | --- |
    | more than `history` steps since the last call | reads the last rows, and counts the others |
    | the state was restored from a checkpoint | continues from its step; marks replaced lines |
    | the file `log` exists | raises, or with `resume=True` continues the run in this file |
    | the log cannot be written | raises; the next call reads and writes the same rows |
    | the state of other parameters | raises |
    | several processes | all must build the monitor and call `read`; process 0 writes the log |
    | a state that was vmapped over seeds | raises; use one monitor for each seed |

    Args:
        params: Parameters, or any pytree with the same structure and shapes.
        log: Path of a file of JSON lines, or a function that is called with a dictionary for each
            row and each incident, such as `wandb.log`. Each row contains the scalars of the whole
            tree; every 50 steps and around incidents it also contains the norms of units.
        resume: Whether to continue the run in the file `log`, if it exists: its incidents and
            decisions, and the batches to leave out. Pass True in jobs that are restarted.
        granularity: As in `watch`.
        trainable: As in `watch`.
        taps: As in `watch`.
        which: Index of the state of `watch`, if an optimizer has several. The outermost is 0.
        rewind_on_rise: Whether a loss that rises for good, or has only grown since the start, is
            evidence for a rewind. The loss of a language model or a classifier is; a value loss of
            reinforcement learning, which grows with the return, is not.
        policy: Function that is called with each report and returns it with another `action`,
            `reason` or `batch_ids`, as `report._replace(...)`. Its actions are logged and repeated
            until the run goes on from an earlier step. None keeps the actions of docs/recovery.md.

    Attributes:
        names: Names of units, clips and taps.
        incidents: All incidents so far.
        rows: The rows of the last read and 1,024 before, or all rows of a log for `read_log`.
        report: The last report. After a restart, it has the last decision in the log.

    Raises:
        ValueError: If the file `log` exists and `resume` is False, if it belongs to other
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
        if which is not None:
            check_count("which", which, "Pass 0 for the outermost `watch`.", low=0)
        self._log, self._which = None if jax.process_index() else log, which
        names = names_of(params, granularity, trainable, taps)
        lines = _read_own_log(log, names, resume)
        rows, names, _ = to_rows(lines, names)
        self._has_read = False
        self._remark = ""  # of `read_log`, about the lines that are not rows
        if policy is not None:
            check_callable("policy", policy, "Pass a function of a report.")
        events = (x for x in lines if "rewind_to" in x or x.keys() >= {*DECISION})
        self._policy, self._changed = Policy(events, rewind_on_rise=rewind_on_rise), policy
        self.incidents = _incidents_in(lines)
        self._start(rows.take(slice(-_KEPT, None)), names)
        report = self._policy.update(self.rows, self._recent, rows.end)
        # The monitor of `read_log` has no parameters; one process alone may read a log.
        self.report = agreed(report) if jax.tree.leaves(params) else report

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
            ValueError: If the state belongs to other parameters or to several runs.
            OSError: If the log cannot be written. The monitor is unchanged, so that the call can be
                repeated.
        """
        try:
            row = state if isinstance(state, Row) else find_watch(state, self._which).rows
        except IndexError:
            hint = "Pass 0 for the outermost `watch`."
            raise value_error("which", "the index of a `watch`", self._which, hint) from None
        rows, names = read_stack(row, self.names)
        before = {**vars(self), "incidents": [*self.incidents]}
        before |= copy.deepcopy({x: before[x] for x in ("_detector", "_policy")})
        try:
            return self._read(rows, names, _checked_steps(saved))
        except BaseException:
            vars(self).update(before)
            raise

    def _read(self, rows: Rows, names: Names, saved: list[int] | None) -> Report:
        """Add rows, decide what to do, and write the log."""
        if names != self.names:  # the names of clips are in the state
            self.names, self.rows = names, rows.take(slice(0))
        lines, next_step = list[Line](), min(self._first_new(rows), self.report.step)
        unexpected = list[Incident]()
        if next_step < self.report.step:
            # A monitor that continues the run of its log starts with a restored state.
            if self.report.action not in ("rewind", "lower") and self._has_read:
                unexpected = [_went_back(next_step, self.report.step)]
            lines.append({"step": next_step, "rewind_to": next_step})
            self._policy.rewound(next_step)
            self._start(self.rows.take(self.rows.step < next_step), names)
        rows = rows.take(rows.step >= next_step)
        self._has_read |= len(rows.step) > 0
        incidents, last = unexpected + self._detector.update(rows), self._policy.last
        self.incidents += incidents
        self._recent = [*self._recent[-_KEPT:], *incidents]
        self.rows = Rows.concatenate([self.rows.take(slice(-_KEPT, None)), rows])
        lost = int(min(rows.step, default=next_step)) - next_step
        report = self._policy.update(self.rows, self._recent, next_step, saved)
        report = report._replace(incidents=incidents, rows=rows, lost_rows=lost)
        if self._changed is not None:
            report = self._policy.replace(last, self._changed(report))
        report = agreed(report)
        closed = self.rows.step[~self.rows.has(Outcome.ACCUMULATED)]
        sampled = closed[np.unique(closed // _UNITS_EVERY, return_index=True)[1]].tolist()
        near = [x.step + i for x in self._recent for i in range(-_AROUND, _AROUND + 1)]
        with_units = np.isin(rows.step, sampled + near)
        if self._policy.last is not last:
            # First, because a process that is killed here can go on without the rows.
            lines.append(dict(zip(DECISION, report, strict=False)))
        lines += to_lines(rows, self.names, with_units)
        lines += [x._asdict() for x in incidents]
        if callable(self._log):
            for line in lines:
                self._log(dict(line))
        elif self._log is not None:
            append_lines(self._log, lines)
        self.report = report
        return report

    def summary(self) -> str:
        """Describe `rows` and all incidents in at most ten lines.

        Norms of micro-batches, which `watch` around an accumulation measures, do not suggest a
        `max_norm` for a clip inside the accumulation.
        """
        rows = self.rows
        if not len(rows.step):
            return "no steps"
        counts = {word: rows.has(flag).sum() for word, flag in WORDS.items()}
        kinds = Counter(kind for x in self.incidents for kind in x.kinds)
        lines = [f"steps {rows.step[0]} to {rows.step[-1]}: {_listed(counts)}"]
        lines.append(f"incidents: {len(self.incidents)} ({_listed(kinds)})")
        clipped = np.any(rows.factors[rows.has(Outcome.APPLIED)] < 1, axis=1)
        if self.names.clips and clipped.size and clipped.mean() in (0, 1):
            lines.append(f"max_norm: {'every' if clipped[0] else 'no'} step is clipped")
        of_units = _usual_norms(rows.take(rows.has(Outcome.HAS_UNITS)))
        if of_units[:, 1:].size:
            shares = np.mean((of_units[:, 1:] / of_units[:, :1]) ** 2, axis=0)
            largest = [f"{self.names.units[i]} {shares[i]:.0%}" for i in np.argsort(-shares)[:3]]
            lines.append(f"largest shares of the squared gradient norm: {', '.join(largest)}")
        if (usual := _usual_norms(rows)[:, 0]).size:
            norms = rows.norms[rows.has(Outcome.HAS_GRADIENT), 0, 0]
            median, high = np.percentile(usual, [50, 99])
            threshold = float(f"{3 * high:.2g}")
            of_what = " of micro-batches" if has_micro_batches(rows) else ""
            lines.append(
                f"gradient norm{of_what}: median {median:.3g}, largest {usual.max():.3g}, "
                f"non-finite in {np.sum(~np.isfinite(norms))} steps"
            )
            if has_micro_batches(rows):
                lines.append(_INSIDE)
            else:
                num_skipped = np.sum(~(norms <= threshold))
                lines += [
                    f"suggested max_norm: {median:.2g}, the median",
                    f"suggested guard: skip_spikes(optimizer, norm={threshold:g}), which would "
                    f"have skipped {num_skipped} of {len(norms)} steps",
                ]
        if self._remark:
            lines.append(f"log: {self._remark}")
        return "\n".join(lines)

    def _start(self, rows: Rows, names: Names) -> None:
        """Continue after these rows."""
        self.names, self.rows, self._detector = names, rows, Detector(names)
        self._recent = self._detector.update(rows)

    def _first_new(self, rows: Rows) -> int:
        """Return the first step that was not read before, or that was repeated after a rewind.

        The state still holds rows that were read before. They differ if their steps were repeated;
        after a long way back, nothing is left to compare them with.
        """
        steps, *places = np.intersect1d(self.rows.step, rows.step, return_indices=True)
        before, after = (
            np.column_stack([x.norms[i, :, 0], x.loss[i], x.batch_id[i]])
            for x, i in zip((self.rows, rows), places, strict=True)
        )
        is_equal = np.isclose(before, after, rtol=1e-6, atol=0, equal_nan=True).all(1)
        return int(min(steps[~is_equal] if len(steps) else rows.step, default=rows.end))


def _went_back(step: int, last: int) -> Incident:
    """Return the incident of a state that was replaced by an earlier one without a rewind."""
    sentence = f"step {step}: the state went back from step {last}, although no rewind was advised"
    return Incident(step, ("state",), sentence)


@public
def incidents(state: Tree, params: Tree, **options: Any) -> list[Incident]:
    """Return the incidents in the rows that the state of `watch` still holds, oldest first.

    Detection begins with the first of these rows, so that a `Monitor`, which has seen all rows,
    finds more. docs/watching.md lists the kinds of incidents.

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
    rows, names = read_stack(row, names_of(params, **options))
    return Detector(names).update(rows)


@public
def read_log(log: LogSource, *, prefix: str | None = None) -> Monitor:
    """Detect incidents in the log of a run, also of one that another trainer wrote.

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
        prefix: Start of the keys, such as `g/`. None finds it.

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
    lines = read_lines(log, prefix=prefix)
    rows, names, remark = to_rows(lines)
    if not len(rows.step):
        hint = "docs/recipes/logging.md lists the names of columns that are read."
        keys = dict.fromkeys(key for line in lines for key in line)
        got = f"a log with the columns {listed(map(repr, keys))}" if keys else "an empty log"
        got += f" ({remark})" if remark else ""
        raise value_error("log", "a log with a loss or a gradient norm", got, hint)
    monitor = Monitor(())
    monitor._start(rows, names)
    monitor._remark = remark
    monitor.incidents = _incidents_in(lines) or monitor._recent
    return monitor


@public
def suggest_max_norm(norms: Any, percentile: float = 50.0) -> float:
    """Suggest a `max_norm` as a percentile of the gradient norms of a run.

    The default is the median, which performed best among five percentiles in docs/study.md. A
    threshold at the median clips half of the steps, so consider a larger learning rate. The 90th
    percentile clips only outliers.

    Args:
        norms: Rows of a `Monitor`, such as those of `read_log`, or an array of norms of any shape.
            Norms that are 0 or not finite are ignored.
        percentile: Percentage of steps that should not be clipped, from 1 to 100.

    Returns:
        The percentile of the norms, a positive number.

    Raises:
        ValueError: If all norms are ignored, if they are norms of micro-batches, measured by a
            `watch` around an accumulation, or if `percentile` is outside [1, 100].
        TypeError: If called inside jit, or if `norms` is neither rows nor an array.

    Examples:
        >>> import gradclip_jax as gcx
        >>> gcx.diagnostics.suggest_max_norm([1.0, 2.0, 3.0, float("nan")], percentile=100.0)
        3.0
    """
    check_number("percentile", percentile, "Pass 50 for the median.", "[1, 100]")
    values = _usual_norms(norms)[:, 0] if isinstance(norms, Rows) else _as_array(norms)
    if isinstance(norms, Rows) and has_micro_batches(norms):
        rule, got = "the norms that the clip receives", "norms of micro-batches"
        hint = "Watch windows: `accumulate_gradients(watch(optimizer), every)`."
        raise value_error("norms", rule, got, hint)
    positive = values[np.isfinite(values) & (values > 0)]
    if not positive.size:
        hint = "Record steps with finite gradients first."
        raise value_error("norms", "norms that are not all 0 or non-finite", shortened(norms), hint)
    return float(np.percentile(positive, percentile))


def has_micro_batches(rows: Rows) -> bool:
    """Return whether gradients were measured around an accumulation."""
    is_accumulated = rows.has(Outcome.ACCUMULATED) & rows.has(Outcome.HAS_GRADIENT)
    return bool(np.any(is_accumulated & np.isfinite(rows.norms[:, 0, 0])))


def _as_array(norms: Any) -> HostArray:
    """Convert norms to a NumPy array."""
    hint = "Pass `monitor.rows`, or `read_log(path).rows` for a file."
    if any(map(is_traced, jax.tree.leaves(norms))):
        raise type_error("norms", "passed outside `jit`", "a traced array", hint)
    if not isinstance(norms, (str, Report, Monitor)):
        with contextlib.suppress(TypeError, ValueError):
            return np.asarray(jax.device_get(norms), float)
    raise type_error("norms", "rows or an array of norms", type(norms).__name__, hint)


def _checked_steps(saved: Iterable[int] | None) -> list[int] | None:
    """Raise unless `saved` contains indices of checkpoints, or is None."""
    hint = "Pass the steps of all checkpoints, such as `checkpoints.all_steps()`."
    if saved is None:
        return None
    if isinstance(saved, (str, bytes)) or not isinstance(saved, Iterable):
        raise type_error("saved", "a list of integers", shortened(saved), hint)
    steps = list(saved)
    for step in steps:
        check_count("saved", step, hint, low=0)
    return [int(step) for step in steps]


def _incidents_in(lines: Iterable[Line]) -> list[Incident]:
    """Return the incidents in a log, in which other lines may have a key such as `sentence`."""
    return from_lines(line for line in lines if line.keys() >= {*Incident._fields})


def _read_own_log(log: Log, names: Names, resume: bool) -> list[dict[str, Any]]:
    """Return the lines of the log that a monitor continues."""
    if log is None or callable(log):
        return []
    if not isinstance(log, (str, os.PathLike)):
        hint = "Pass a path such as 'run.jsonl'."
        raise type_error("log", "a path or a function", type(log).__name__, hint)
    path, place = pathlib.Path(log), repr(os.fspath(log))
    if jax.process_index() == 0 and not path.parent.is_dir():
        raise value_error("log", "a file in a folder that exists", place, "Create the folder.")
    lines = read_lines(path, prefix="") if path.exists() else []
    if lines and not resume:
        hint = "Pass `resume=True` to continue the run of this file, or another name."
        raise value_error("log", "a new file", f"{place}, which exists", hint)
    if other := sorted(units_in(lines) ^ {*names.units}) if units_in(lines) else []:
        rule = "the log of a run with the same parameters, `granularity` and `trainable`"
        got = f"{place}, which differs in {listed(other)}"
        raise value_error("log", rule, got, "Pass another name.")
    return lines


def _usual_norms(rows: Rows) -> HostArray:
    """Return the gradient norms of the tree and of the units where they are finite and not 0."""
    norms = rows.norms[rows.has(Outcome.HAS_GRADIENT), 0]
    return norms[np.isfinite(norms).all(axis=1) & (norms[:, 0] > 0)]


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {word}" for word, count in counts.items() if count) or "none"
