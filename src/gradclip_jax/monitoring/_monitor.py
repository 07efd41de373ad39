"""Read the rows of `watch` on the host, report what happened, and write a log."""

from __future__ import annotations

import json
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import numpy as np

from .._checks import refuse_traced
from .._errors import public, value_error
from .._mask import Mask
from .._states import plain_arrays
from .._types import Tree
from ..clipping._granularity import Granularity, as_granularity
from ._detect import Detector
from ._incident import Incident
from ._log import PATTERN, Line, LogSource, read_lines, read_rows, to_lines
from ._metrics import clip_factors
from ._policy import Policy
from ._rows import Names, Row, Rows, check_names, read_stack, unpack
from ._summary import Totals
from ._watch import WatchState, find_watch, names_of

Log: TypeAlias = str | os.PathLike[str] | Callable[[dict[str, Any]], object] | None

_UNITS_EVERY = 50
"""The log has the norms of units at every step that this number divides."""

_AROUND = 8
"""It also has them for this number of steps before and after an incident."""

_KEPT = 1024
"""Number of rows that are kept, to start the detection again after a rewind."""


class Report(NamedTuple):
    """What `Monitor.read` found in the rows since its last call.

    Attributes:
        step: Index of the next call of `watch`, which is the index of a checkpoint of this state.
        incidents: Incidents in these rows, oldest first; each prints as a sentence.
        action: "continue", "save", "rewind", "lower" or "stop"; see docs/recovery.md.
        reason: Reason of the action; may be empty.
        good_step: Index of the newest checkpoint that later rows confirmed, or None.
        batch_ids: Batches to leave out after a rewind.
        rows: The rows since the last call.
        lost_rows: Number of rows that were overwritten before this call. Pass a larger `history` to
            `watch`, or read more often.
    """

    step: int
    incidents: list[Incident]
    action: str
    reason: str
    good_step: int | None
    batch_ids: tuple[int, ...]
    rows: Rows
    lost_rows: int


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
        quiet: Number of rows without an incident before a checkpoint is good.
        max_rewinds: Number of rewinds after which the learning rate is lowered.

    Attributes:
        names: Names of units, clips and taps.
        incidents: All incidents so far.
        rows: The last 1,024 rows, or all rows of a log that `read_log` read.
        report: The last report. After a restart, it has the last decision in the log.

    Examples:
        >>> import jax, jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = gcx.watch(gcx.skip_large_norm(optax.sgd(0.1), 4.0), history=256)
        >>> params = {"wi": jnp.ones(2), "wo": jnp.ones(2)}
        >>> state, monitor = tx.init(params), gcx.Monitor(params)
        >>> for size in (1.0, 50.0):
        ...     grads = {"wi": jnp.array([0.6, 0.8]) * size, "wo": jnp.array([0.5, 0.5])}
        ...     _, state = jax.jit(tx.update)(grads, state, params)
        >>> report = monitor.read(state)
        >>> print(*report.incidents)
        step 1: skipped, gradient norm 50 (threshold 4); 100 % of it in wi
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
        quiet: int = 32,
        max_rewinds: int = 3,
    ):
        self.names = names_of(params, as_granularity(granularity), mask, taps)
        self.incidents: list[Incident] = []
        is_path = isinstance(log, (str, os.PathLike))
        self._path, self._log = (pathlib.Path(log), None) if is_path else (None, log)
        self._which, self._next_step = which, 0
        self.rows, self._detector = Rows.zeros(0, self.names), Detector(self.names)
        self._totals = Totals(self.names)
        lines = read_lines(self._path) if self._path and self._path.exists() else []
        events = [x for x in lines if "rewind_to" in x or "action" in x]
        self._policy = Policy(quiet=quiet, max_rewinds=max_rewinds, events=events)
        if lines:
            self._continue(lines)
        none = Rows.zeros(0, self.names)
        decision = self._policy.update(none, [])
        self.report = Report(self._next_step, [], *decision, rows=none, lost_rows=0)

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
            TypeError: If called inside jit, or if `state` contains no state of `watch`.
            ValueError: If the state belongs to other parameters or to several runs, or contains
                several states of `watch`.
        """
        if isinstance(state, Row):
            rows, names = read_stack(plain_arrays(state), self.names)
        else:
            rows, names = read_ring(find_watch(plain_arrays(state), self._which), self.names)
        if names != self.names:  # the names of clips are in the state
            self._use(names)
        lines: list[dict[str, Any]] = []
        rewind_to = self._rewound_to(rows)
        if rewind_to is not None:
            self._rewind(rewind_to)
            lines.append({"rewind_to": rewind_to})
        rows = rows.take(rows.step >= self._next_step)
        lost = int(rows.step[0]) - self._next_step if len(rows.step) else 0
        incidents = self._process(rows)
        places = np.array([x.step for x in incidents])
        is_near = np.any(abs(rows.step[:, None] - places) <= _AROUND, axis=1)
        lines += to_lines(rows, self.names, is_near | (rows.step % _UNITS_EVERY == 0))
        lines += [x.to_dict() for x in incidents]
        pending = self._policy.pending
        decision = self._policy.update(rows, incidents, saved)
        if self._policy.pending is not pending:
            lines.append({"step": self._next_step, **decision._asdict()})
        self._write(lines)
        self.report = Report(self._next_step, incidents, *decision, rows=rows, lost_rows=lost)
        return self.report

    def summary(self) -> str:
        """Describe the run so far in at most ten lines."""
        return self._totals.summary(self.incidents)

    def _use(self, names: Names) -> None:
        """Start again without rows, whose columns have these names."""
        self.names, self._totals = names, Totals(names)
        self.rows, self._detector = Rows.zeros(0, names), Detector(names)

    def _process(self, rows: Rows) -> list[Incident]:
        found = self._detector.update(rows) if len(rows.step) else []
        self.incidents += found
        self._totals.add(rows)
        self._remember(rows)
        return found

    def _remember(self, rows: Rows) -> None:
        self.rows = Rows.concatenate([self.rows, rows]).take(slice(-_KEPT, None))
        if len(rows.step):
            self._next_step = int(rows.step[-1]) + 1

    def _continue(self, lines: Sequence[Line]) -> None:
        """Continue the run of a log: its last rows are those before the next ones."""
        self.incidents = logged_incidents(lines)
        rows, names = read_rows(lines, names=self.names)
        self._use(names)
        self._totals.add(rows)
        self._remember(rows)
        self._detector.update(self.rows)
        self._policy.resume(self.rows, self.incidents)

    def _rewound_to(self, rows: Rows) -> int | None:
        """Return the step from which the run was repeated with an earlier state, or None.

        The state still holds rows that were read before. They differ if their steps were repeated.
        """
        _, old, new = np.intersect1d(self.rows.step, rows.step, return_indices=True)
        pairs = ((x.loss[:, None], x.norms[:, :, 0]) for x in (self.rows.take(old), rows.take(new)))
        before, after = map(np.hstack, pairs)
        is_other = ~np.isclose(before, after, rtol=1e-6, atol=0, equal_nan=True).all(1)
        if is_other.any():
            return int(rows.step[new][is_other][0])
        end = int(rows.step[-1]) + 1 if len(rows.step) else 0
        return end if end < self._next_step else None

    def _rewind(self, step: int) -> None:
        self._totals.rewind(step)
        self._policy.rewound(step)
        self.rows = self.rows.take(self.rows.step < step)
        self._detector = Detector(self.names)
        self._detector.update(self.rows)
        self._next_step = step

    def _write(self, lines: Sequence[dict[str, Any]]) -> None:
        if jax.process_index():
            return
        if self._log:
            for line in lines:
                self._log(line)
        elif self._path:
            strict = ({key: _strict(x) for key, x in line.items()} for line in lines)
            text = "".join(json.dumps(line) + "\n" for line in strict)
            with self._path.open("ab+") as file:
                if file.tell():
                    file.seek(-1, os.SEEK_END)
                    # A process that was killed may have written half a line.
                    text = text if file.read() == b"\n" else "\n" + text
                file.write(text.encode())


def _strict(x: Any) -> Any:
    """Shorten a number to the digits of a float32; name a non-finite one, as strict JSON needs."""
    if not isinstance(x, float):
        return x
    return float(f"{x:.9g}") if math.isfinite(x) else str(x)


def read_ring(watched: WatchState, names: Names) -> tuple[Rows, Names]:
    """Read the rows that a state of `watch` holds, oldest first."""
    refuse_traced("state", watched.floats)
    if np.ndim(watched.step_count):
        got = f"a batch of {len(watched.floats)} states"
        hint = "Select run i: `jax.tree.map(lambda x: x[i], state)`."
        raise value_error("state", "the state of one run", got, hint)
    names = names._replace(clips=tuple(jax.eval_shape(clip_factors, watched.inner_state)))
    count, ints, floats, checksum = jax.device_get(watched[:4])
    end = floats.shape[1] - len(names.clips)
    check_names(names, checksum, end)
    steps = np.arange(max(count - len(ints), 0), count)
    # `convert_state` may have dropped the rows of some steps; every row has a flag.
    places = steps % len(ints)
    places = places[(ints[places, 0] == steps) & (ints[places, 2] != 0)]
    return unpack(ints[places], floats[places, :end], floats[places, end:], names), names


def logged_incidents(lines: Iterable[Line]) -> list[Incident]:
    """Return the incidents in a log, whose lines are those of `Incident.to_dict`."""
    found: list[Incident] = []
    for line in lines:
        if "sentence" in line:
            fields: dict[str, Any] = {x: line[x] for x in Incident._fields if x in line}
            for key, value in fields.items():
                if value is None and key.endswith("_threshold"):
                    fields[key] = math.inf
                elif value in ("nan", "inf", "-inf"):
                    fields[key] = float(value)
            fields["kinds"] = tuple(line["kinds"])
            found.append(Incident(**fields))
    return found


@public
def incidents(
    state: Tree,
    params: Tree,
    *,
    granularity: Literal["global", "leaf"] | Granularity = "leaf",
    mask: Mask = None,
    taps: Tree | None = None,
    which: int | None = None,
) -> list[Incident]:
    """Return the incidents in the rows that the state of `watch` still holds, oldest first.

    Detection begins with the first of these rows, so that a `Monitor`, which has seen all rows,
    finds more. docs/watching.md lists the kinds of incidents.

    Args:
        state: Optimizer state, or any pytree that contains it.
        params: Parameters, or any pytree with the same structure and shapes.
        granularity: As in `watch`.
        mask: As in `watch`.
        taps: As in `watch`.
        which: As in `Monitor`.

    Returns:
        List of incidents; each prints as a sentence.

    Raises:
        TypeError: If called inside jit, or if `state` contains no state of `watch`.
        ValueError: As in `Monitor.read`.

    Examples:
        >>> import jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = gcx.watch(gcx.skip_nonfinite(optax.sgd(0.1)))
        >>> params = {"w": jnp.ones(2)}
        >>> _, state = tx.update({"w": jnp.array([1.0, jnp.nan])}, tx.init(params), params)
        >>> print(*gcx.incidents(state, params))
        step 0: skipped, gradient norm NaN; 1 non-finite element in w
    """
    monitor = Monitor(params, granularity=granularity, mask=mask, taps=taps, which=which)
    return monitor.read(state).incidents


@public
def read_log(log: LogSource, *, prefix: str | None = None, pattern: str = PATTERN) -> Monitor:
    """Detect incidents in the log of a run, also of one that another trainer wrote.

    | log | what is read |
    | --- | --- |
    | lines of a `Monitor`, or of `metrics(state)` | all columns |
    | any other dictionaries, JSON lines, a CSV file | step, loss and gradient norm |
    | `trainer_state.json` of Hugging Face | the same |
    | a text file | lines that match `pattern` |
    | a step that occurs again after a resumption | the last line |

    Args:
        log: Sequence of dictionaries, or the path of a file.
        prefix: Start of the keys, such as `g/`. None finds it.
        pattern: Regular expression with the groups `loss` and optionally `step` and `norm`.

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
    rows, names = read_rows(log, prefix=prefix, pattern=pattern)
    monitor = Monitor(())
    monitor._use(names)
    monitor._process(rows)
    monitor.rows = rows
    return monitor
