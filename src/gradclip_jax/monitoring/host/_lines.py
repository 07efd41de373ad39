"""Convert the measured steps of a run to lines of a log, and back; see docs/rows.md.

A line is a dictionary. `_log` renames the keys of other trainers to the keys of a `Monitor`.

| line with the keys | meaning |
| --- | --- |
| `loss`, `gradient_norm` or `outcome` | a row, or some of the numbers of a row |
| `rewind_to` | the run was rewound: the earlier rows from this step on are replaced |
| the fields of `Incident` | an incident |
| the fields of `Decision` | an action of the recovery policy |
"""

import bisect
import contextlib
import functools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from ..._types import HostArray
from .._layout import MEASURED, MEASURES, Names, Outcome
from ._detect import Incident
from ._policy import Decision
from ._rows import Columns, Rows

WORDS = {str(x.name).lower(): int(x) for x in Outcome if not str(x.name).startswith("HAS_")}
"""The words of the key `outcome`, and their flags."""

_ROW = "loss", "gradient_norm", "outcome", "rewind_to"
"""A line with one of these keys is a row or marks a rewind."""

KEYS = {"batch_id", "device", "clip_factor", *_ROW, *MEASURES, *Incident._fields, *Decision._fields}
"""The keys of a line, except the keys of single leaves, layers or clips."""

_MAX_STEP = 2.0**53

_LATE = 8
"""Maximum delay of a line in a log that is not in order, in rows."""

_THOUSANDS = re.compile(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?")


def to_lines(rows: Rows, names: Names, with_units: HostArray) -> list[dict[str, Any]]:
    """Convert rows to lines; rows in the mask `with_units` include norms of leaves or layers."""
    columns = [(key, column.tolist(), int(x)) for key, column, x in _columns(rows, names)]
    outcome = np.where(with_units, rows.outcome, rows.outcome & ~int(Outcome.HAS_UNITS)).tolist()
    return [
        {key: column[i] for key, column, flags in columns if flags & bits == flags}
        | {"outcome": " ".join(word for word, flag in WORDS.items() if flag & bits)}
        for i, bits in enumerate(outcome)
    ]


def to_rows(columns: Columns, names: Names | None = None) -> tuple[Rows, Names, str]:
    """Convert columns to rows without taps, with the units in `names`; None includes all units.

    Returns:
        The rows, their names, and a sentence about omitted lines, "" if there are none.
    """
    steps, row_of, remark = _join_steps(columns)
    clips = tuple(key for key in columns if key.startswith("clip_factor") and columns[key])
    names = names._replace(clips=clips) if names else Names(units_in(columns), clips)
    rows = Rows.zeros(len(steps), names)
    rows.step[:], rows.factors[:] = steps, 1  # a step without a logged factor was not clipped
    rows.outcome[:] = int(Outcome.APPLIED)
    bits_of = functools.cache(_outcome_bits)
    bits = {line: bits_of(str(text)) for line, text in columns.get("outcome", {}).items()}
    columns = columns | {"outcome": bits, "step": {}}  # the steps are already in the rows
    for key, target, flags in [("outcome", rows.outcome, Outcome(0)), *_columns(rows, names)]:
        column = columns.get(key, {})
        (numbers, is_number), at = _numbers(column.values()), row_of[[*column]]
        is_used = is_number & (at >= 0)
        target[at[is_used]] = numbers[is_used]
        rows.outcome[at[is_used]] |= int(flags)
    return rows, names, remark


def lines_with(columns: Columns, keys: Sequence[str]) -> dict[int, dict[str, Any]]:
    """Map the index of each line that has all of these keys to the values of these keys."""
    found = [columns.get(key, {}) for key in keys]
    lines = sorted(i for i in min(found, key=len) if all(i in column for column in found))
    return {i: {key: columns[key][i] for key in keys} for i in lines}


def to_incidents(columns: Columns) -> list[Incident]:
    """Return the incidents in a log; lines without all of their fields are ignored."""
    found = (Incident(**x) for x in lines_with(columns, Incident._fields).values())
    return [x._replace(kinds=tuple(x.kinds), loss_threshold=float(x.loss_threshold)) for x in found]


def units_in(columns: Columns) -> tuple[str, ...]:
    """Return the names of the units whose gradient norms are in a log."""
    start = "gradient_norm/"
    return tuple(key.removeprefix(start) for key in columns if key.startswith(start))


def _columns(rows: Rows, names: Names) -> Iterator[tuple[str, HostArray, Outcome]]:
    """Yield the key of each number in a line, its column, and the flags of rows that contain it."""
    yield "step", rows.step, Outcome(0)
    yield "batch_id", rows.batch_id, Outcome.HAS_BATCH_ID
    yield "device", rows.device, Outcome.REPLICA_DIFFERS
    yield "loss", rows.loss, Outcome.HAS_LOSS
    for i, clip in enumerate(names.clips):
        yield clip, rows.factors[:, i], Outcome(0)
    tables = rows.nonfinite, *np.moveaxis(rows.norms, 1, 0)
    flags = Outcome.HAS_GRADIENT, *MEASURED.values()
    for name, table, flag in zip(MEASURES, tables, flags, strict=True):
        yield name, table[:, 0], flag
        for i, unit in enumerate(names.units, 1):
            yield f"{name}/{unit}", table[:, i], flag | Outcome.HAS_UNITS


def _outcome_bits(text: str) -> int:
    """Convert values of the key `outcome` to flags; unknown texts mean "applied"."""
    flags = [WORDS[word] for word in text.split() if word in WORDS]
    return sum(flags) if flags or not text else int(Outcome.APPLIED)


def _numbers(values: Collection[Any]) -> tuple[HostArray, HostArray]:
    """Convert logged values to float64, and return a mask of those that are numbers."""
    if {*map(type, values)} <= {int, float, str}:
        with contextlib.suppress(OverflowError, ValueError):
            numbers = np.fromiter(map(float, values), float, len(values))
            return numbers, np.ones(len(values), bool)
    found = [*map(_number, values)]
    return np.array(found, float), np.array([x is not None for x in found], bool)


def _number(value: Any) -> float | None:
    """Convert a value in a log to a number; return None if it is not a number."""
    if value is None or isinstance(value, bool):
        return None
    try:
        # A transfer guard allows `device_get`.
        is_array = type(value) not in (str, int, float) and hasattr(value, "dtype")
        number: Any = jax.device_get(value) if is_array else value
        return float(number)
    except OverflowError:
        return math.inf if value > 0 else -math.inf  # an integer of Python
    except (TypeError, ValueError):
        is_text = isinstance(value, str) and _THOUSANDS.fullmatch(value.strip())
        return float(value.replace(",", "")) if is_text else None


def _join_steps(columns: Columns) -> tuple[list[int], HostArray, str]:
    """Return all steps, the row index of each line, and a remark about replaced and omitted rows.

    The steps increase. The row index is -1 for a line without a row, that is, with no loss, norm or
    outcome. `_Steps` describes the other lines.
    """
    keys = _row_keys(columns)
    lines = np.flatnonzero(keys)
    values = [*map(columns.get("step", {}).get, lines.tolist())]
    numbers, rewinds = _numbers(values)[0], columns.get("rewind_to", {})
    if not rewinds and np.all(abs(numbers) < _MAX_STEP) and np.all(np.diff(np.trunc(numbers)) > 0):
        row_of = np.full(len(keys), -1)
        row_of[lines] = np.arange(len(lines))  # most logs
        return numbers.astype(int).tolist(), row_of, ""
    steps = _Steps(keys.tolist())
    for line, value, number in zip(lines.tolist(), values, numbers.tolist(), strict=True):
        number = steps.last + 1 if value in (None, "") else number
        if not abs(number) < _MAX_STEP:
            steps.counts["unknown"] += 1
        elif line in rewinds:
            steps.go_back(int(number))
        else:
            steps.add(line, int(number))
    return steps.steps, steps.row_of_lines(), _remark(steps.counts)


class _Steps:
    """The increasing step numbers of the rows of a log.

    | line | method |
    | --- | --- |
    | a later step, or no step, which means the next step | `insert`: the line begins a row |
    | a new step, at most `_LATE` rows back | `insert`: the line is late |
    | the step of an earlier line, without its numbers | `join`: both lines become one row |
    | the step of the last line, with the same numbers | `join`: it replaces the last line |
    | an earlier step, with the same numbers | `go_back`, because the run was resumed; `insert` |
    | a new step, more than `_LATE` rows back | the same |

    Args:
        keys: Bit mask of the keys in `_ROW` that each line contains.

    Attributes:
        steps: The steps so far.
        line_of: The first line of each step.
        keys: The keys of the row that begins at each line.
        first_lines: For each line, the first line of its row.
        last: The step of the last line.
        counts: Number of lines, replaced rows, resumptions, and lines whose step is not a number.
    """

    def __init__(self, keys: list[int]):
        self.steps, self.line_of = list[int](), dict[int, int]()
        self.keys, self.first_lines = [*keys], list(range(len(keys)))
        self.last, self.counts = -1, Counter[str]()

    def add(self, line: int, step: int) -> None:
        """Add a line with the numbers of a row."""
        first, num_later = self.line_of.get(step), self._num_from(step)
        is_repeated = first is not None and bool(self.keys[first] & self.keys[line])
        self.counts["lines"] += 1
        self.counts["replaced"] += is_repeated and step >= self.last
        if (first is None and num_later > _LATE) or (is_repeated and step < self.last):
            self.go_back(step)
            self.insert(line, step)
        elif first is None:
            self.insert(line, step)
        else:
            self.join(line, first)
        self.last = step

    def insert(self, line: int, step: int) -> None:
        """Begin a new row with this line."""
        bisect.insort(self.steps, step)
        self.line_of[step] = line

    def join(self, line: int, first: int) -> None:
        """Add a line to the row that begins at line `first`."""
        self.first_lines[line] = first
        self.keys[first] |= self.keys[line]

    def go_back(self, step: int) -> None:
        """Remove all rows from this step on."""
        num_replaced = self._num_from(step)
        for replaced in self.steps[len(self.steps) - num_replaced :]:
            del self.line_of[replaced]
        del self.steps[len(self.steps) - num_replaced :]
        self.counts.update(replaced=num_replaced, resumed=1)
        self.last = step - 1

    def row_of_lines(self) -> HostArray:
        """Return the row index of each line, or -1."""
        row_of = np.full(len(self.keys), -1)
        row_of[[self.line_of[step] for step in self.steps]] = np.arange(len(self.steps))
        return row_of[self.first_lines]

    def _num_from(self, step: int) -> int:
        """Return the number of rows with this step or a later one."""
        return len(self.steps) - bisect.bisect_left(self.steps, step)


def _row_keys(columns: Columns) -> HostArray:
    """Return a bit mask of the `_ROW` keys in each line; 0 for a line without a row."""
    size = 1 + max((max(column, default=-1) for column in columns.values()), default=-1)
    keys = np.zeros(size, int)
    for i, key in enumerate(_ROW):
        keys[[*columns.get(key, ())]] |= 1 << i
    return keys


def _remark(counts: Counter[str]) -> str:
    """Describe how many rows of a log were replaced or left out; "" if there are none."""
    replaced, resumed, unknown = counts["replaced"], counts["resumed"], counts["unknown"]
    remarks = [
        (replaced, f"{replaced:,} of {counts['lines']:,} rows were replaced by later rows"),
        (resumed, f"the steps go back {resumed} time{'s' * (resumed > 1)}"),
        (unknown, f"rows without a number as their step, which are left out: {unknown:,}"),
    ]
    return "; ".join(text for count, text in remarks if count)
