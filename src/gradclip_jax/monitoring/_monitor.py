"""Read the rows of `watch` on the host, report what happened, and write a log."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeAlias

import jax
import numpy as np

from .._checks import check_number, shortened
from .._errors import public, value_error
from .._mask import Mask
from .._types import HostArray, Tree
from ..clipping._granularity import Granularity
from ._detect import Detector, Incident, from_lines
from ._log import LogSource, append_lines, read_lines
from ._policy import DECISION, Policy, Report, agreed
from ._rows import WORDS, Line, Names, Outcome, Row, Rows, names_of, read_stack, to_lines, to_rows
from ._watch import find_watch

Log: TypeAlias = str | os.PathLike[str] | Callable[[dict[str, Any]], object] | None

_UNITS_EVERY = 50
"""The log contains the norms of units at every step that this number divides."""

_AROUND = 8
"""Number of steps before and after an incident for which the log contains the norms of units."""

_KEPT = 1024
"""Number of rows that are kept for the policy, and to start the detection again after a rewind."""


class Monitor:
    """Read the rows of `watch` on the host: incidents, what to do, a log and a summary.

    | situation | what `read` does |
    | --- | --- |
    | more than `history` steps since the last call | reads the last rows, and counts the others |
    | the state was restored from a checkpoint | continues from its step; marks replaced lines |
    | the file `log` exists | the monitor continues the run in this file |
    | the state of other parameters | raises |
    | several processes | all processes read; process 0 writes the log |
    | a state that was vmapped over seeds | raises; use one monitor for each seed |

    Args:
        params: Parameters, or any pytree with the same structure and shapes.
        log: Path of a file of JSON lines, or a function that is called with a dictionary for each
            row and each incident, such as `wandb.log`. Each row contains the scalars of the whole
            tree; every 50 steps and around incidents it also contains the norms of units.
        granularity: As in `watch`.
        mask: As in `watch`.
        taps: As in `watch`.
        which: Index of the state of `watch`, if an optimizer has several. The outermost is 0.
        rewind_on_rise: Whether a loss that rises for good, or has only grown since the start, is
            evidence for a rewind. The loss of a language model or a classifier is; a value loss of
            reinforcement learning, which grows with the return, is not.
        policy: Function that is called with each report and returns it, possibly with another
            `action`; see docs/recovery.md.

    Attributes:
        names: Names of units, clips and taps.
        incidents: All incidents so far.
        rows: The rows of the last read and 1,024 before, or all rows of a log for `read_log`.
        report: The last report. After a restart, it has the last decision in the log.

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
        granularity: Literal["global", "leaf"] | Granularity = "leaf",
        mask: Mask = None,
        taps: Tree | None = None,
        which: int | None = None,
        rewind_on_rise: bool = False,
        policy: Callable[[Report], Report] | None = None,
    ):
        self._log, self._which = None if jax.process_index() else log, which
        lines = [] if log is None or callable(log) or not os.path.exists(log) else read_lines(log)
        rows, names = to_rows(lines, names_of(params, granularity, mask, taps))
        events = (x for x in lines if "rewind_to" in x or "action" in x)
        self._policy = Policy(events, rewind_on_rise=rewind_on_rise)
        self._replace_action = policy
        self.incidents = from_lines(lines)
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
        """
        row = state if isinstance(state, Row) else find_watch(state, self._which).rows
        rows, names = read_stack(row, self.names)
        if names != self.names:  # the names of clips are in the state
            self.names, self.rows = names, rows.take(slice(0))
        lines, next_step = list[Line](), min(self._first_new(rows), self.report.step)
        unexpected = list[Incident]()
        if next_step < self.report.step:
            if self.report.action not in ("rewind", "lower") and self.report.rows.step.size:
                unexpected = [_went_back(next_step, self.report.step)]
            lines.append({"step": next_step, "rewind_to": next_step})
            self._policy.rewound(next_step)
            self._start(self.rows.take(self.rows.step < next_step), names)
        rows = rows.take(rows.step >= next_step)
        incidents, last = unexpected + self._detector.update(rows), self._policy.last
        self.incidents += incidents
        self._recent = [*self._recent[-_KEPT:], *incidents]
        self.rows = Rows.concatenate([self.rows.take(slice(-_KEPT, None)), rows])
        report = self._policy.update(self.rows, self._recent, next_step, saved)
        if self._replace_action is not None:
            report = self._replace_action(report._replace(incidents=incidents, rows=rows))
        report = agreed(report)
        near = [x.step + i for x in self._recent for i in range(-_AROUND, _AROUND + 1)]
        with_units = (rows.step % _UNITS_EVERY == 0) | np.isin(rows.step, near)
        lines += to_lines(rows, self.names, with_units)
        lines += [x._asdict() for x in incidents]
        has_replaced = self._replace_action is not None and report.action != self.report.action
        if self._policy.last is not last or has_replaced:
            lines.append(dict(zip(DECISION, report, strict=False)))
        if callable(self._log):
            for line in lines:
                self._log(dict(line))
        elif self._log is not None:
            append_lines(self._log, lines)
        lost = int(min(rows.step, default=next_step)) - next_step
        self.report = report._replace(incidents=incidents, rows=rows, lost_rows=lost)
        return self.report

    def summary(self) -> str:
        """Describe `rows` and all incidents in at most ten lines."""
        rows = self.rows
        if not len(rows.step):
            return "no steps"
        counts = {word: rows.has(flag).sum() for word, flag in WORDS.items()}
        kinds = Counter(kind for x in self.incidents for kind in x.kinds)
        lines = [f"steps {rows.step[0]} to {rows.step[-1]}: {_listed(counts)}"]
        lines.append(f"incidents: {len(self.incidents)} ({_listed(kinds)})")
        of_units = _usual_norms(rows.take(rows.has(Outcome.HAS_UNITS)))
        if of_units[:, 1:].size:
            shares = np.mean((of_units[:, 1:] / of_units[:, :1]) ** 2, axis=0)
            largest = [f"{self.names.units[i]} {shares[i]:.0%}" for i in np.argsort(-shares)[:3]]
            lines.append(f"largest shares of the squared gradient norm: {', '.join(largest)}")
        if (usual := _usual_norms(rows)[:, 0]).size:
            norms = rows.norms[rows.has(Outcome.HAS_GRADIENT), 0, 0]
            median, high = np.percentile(usual, [50, 99])
            threshold = float(f"{3 * high:.2g}")
            lines += [
                f"gradient norm: median {median:.3g}, largest {usual.max():.3g}, "
                f"non-finite in {np.sum(~np.isfinite(norms))} steps",
                f"suggested max_norm: {median:.2g}, the median",
                f"suggested guard: skip_spikes(optimizer, norm={threshold:g}), which would have "
                f"skipped {np.sum(~(norms <= threshold))} of {len(norms)} steps",
            ]
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
        options: `granularity`, `mask`, `taps` and `which`, as in `Monitor`.

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
    monitor = Monitor(())
    monitor._start(*to_rows(lines))
    if not len(monitor.rows.step):
        hint = "Log `loss` or `gradient_norm`, or write the log with `gcx.Monitor`."
        raise value_error("log", "a log with a loss or a gradient norm", shortened(log), hint)
    monitor.incidents = from_lines(lines) or monitor._recent
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
        ValueError: If all norms are ignored, or if `percentile` is outside [1, 100].
        TypeError: If called inside jit.

    Examples:
        >>> import gradclip_jax as gcx
        >>> gcx.diagnostics.suggest_max_norm([1.0, 2.0, 3.0, float("nan")], percentile=100.0)
        3.0
    """
    check_number("percentile", percentile, "Pass 50 for the median.", "[1, 100]")
    values = _usual_norms(norms)[:, 0] if isinstance(norms, Rows) else np.asarray(norms, float)
    positive = values[np.isfinite(values) & (values > 0)]
    if not positive.size:
        hint = "Record steps with finite gradients first."
        raise value_error("norms", "norms that are not all 0 or non-finite", shortened(norms), hint)
    return float(np.percentile(positive, percentile))


def _usual_norms(rows: Rows) -> HostArray:
    """Return the gradient norms of the tree and of the units where they are finite and not 0."""
    norms = rows.norms[rows.has(Outcome.HAS_GRADIENT), 0]
    return norms[np.isfinite(norms).all(axis=1) & (norms[:, 0] > 0)]


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {word}" for word, count in counts.items() if count) or "none"
