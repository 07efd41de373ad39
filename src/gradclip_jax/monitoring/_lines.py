"""Convert rows and incidents to the lines of a log, and back; see docs/rows.md.

A line is a dictionary. Lines of other trainers are converted by `_log` first, so that they have
the same keys.

| line with the keys | meaning |
| --- | --- |
| `loss`, `gradient_norm` or `outcome` | a row, or some of the numbers of a row |
| `rewind_to` | the run was rewound: the earlier rows from this step on are replaced |
| the fields of `Incident` | an incident |
| the fields of `DECISION` | an action of the recovery policy |
"""

import bisect
import functools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from .._types import HostArray
from ._detect import Incident
from ._rows import MEASURED, MEASURES, Line, Names, Outcome, Rows

WORDS = {str(x.name).lower(): int(x) for x in Outcome if not str(x.name).startswith("HAS_")}
"""The words of the key `outcome`, and their flags."""

_ROW = {"loss", "gradient_norm", "outcome", "rewind_to"}
"""A line with one of these keys is a row, or marks a rewind."""

_MAX_STEP = 2.0**53

_LATE = 8
"""Maximum number of rows by which a line may be late in a log that is not in order."""

_THOUSANDS = re.compile(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?")


def to_lines(rows: Rows, names: Names, with_units: HostArray) -> list[dict[str, Any]]:
    """Convert rows to lines; those of the mask `with_units` contain the norms of units."""
    columns = [(key, column.tolist(), int(x)) for key, column, x in _columns(rows, names)]
    outcome = np.where(with_units, rows.outcome, rows.outcome & ~int(Outcome.HAS_UNITS)).tolist()
    return [
        {key: column[i] for key, column, flags in columns if flags & bits == flags}
        | {"outcome": " ".join(word for word, flag in WORDS.items() if flag & bits)}
        for i, bits in enumerate(outcome)
    ]


def to_rows(lines: Iterable[Line], names: Names | None = None) -> tuple[Rows, Names, str]:
    """Convert lines to rows without taps, with the units of `names`, or with all if it is None.

    Returns:
        The rows, their names, and a sentence about the lines that are not in the rows, or "".
    """
    table, remark = _join_steps(lines)
    # The rows in which a key occurs, and its values there.
    places, values = defaultdict[str, list[int]](list), defaultdict[str, list[Any]](list)
    for i, line in enumerate(table.values()):
        for key, value in line.items():
            places[key].append(i)
            values[key].append(value)
    clips = tuple(key for key in places if key.startswith("clip_factor"))
    names = names._replace(clips=clips) if names else Names(_units(places), clips)
    rows = Rows.zeros(len(table), names)
    rows.step[:], rows.factors[:] = list(table), 1  # a clip that is not in a line has not clipped
    rows.outcome[:] = int(Outcome.APPLIED)
    bits_of = functools.cache(_outcome_bits)
    rows.outcome[places["outcome"]] = [bits_of(str(text)) for text in values["outcome"]]
    for key, column, flags in _columns(rows, names):
        if key in places and key != "step":
            numbers = values[key]
            if {*map(type, numbers)} != {float}:
                numbers = list(map(_number, numbers))
            is_known = np.array([x is not None for x in numbers])
            at = np.array(places[key])[is_known]
            column[at] = [x for x in numbers if x is not None]
            rows.outcome[at] |= int(flags)
    return rows, names, remark


def to_incidents(lines: Iterable[Line]) -> list[Incident]:
    """Return the incidents in a log; lines without all of their fields are ignored."""
    fields = Incident._fields
    found = (Incident(*(x[key] for key in fields)) for x in lines if x.keys() >= {*fields})
    return [x._replace(kinds=tuple(x.kinds), loss_threshold=float(x.loss_threshold)) for x in found]


def units_in(lines: Iterable[Line]) -> set[str]:
    """Return the names of the units whose gradient norms are in a log."""
    return {*_units({key: None for line in lines for key in line})}


def _units(keys: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the units whose gradient norms have these keys."""
    start = "gradient_norm/"
    return tuple(key.removeprefix(start) for key in keys if key.startswith(start))


def _columns(rows: Rows, names: Names) -> Iterator[tuple[str, HostArray, Outcome]]:
    """Yield the key of each number in a line, its column, and the flags of rows that have it."""
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
    """Return the flags of the key `outcome`; a text of another trainer means "applied"."""
    flags = [WORDS[word] for word in text.split() if word in WORDS]
    return sum(flags) if flags or not text else int(Outcome.APPLIED)


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


def _join_steps(lines: Iterable[Line]) -> tuple[dict[int, Line], str]:
    """Return the line of each step, in order, and a remark on lines that are not included.

    | line | effect |
    | --- | --- |
    | without a loss, a norm and an outcome | it is not a row |
    | without a step | it has the next step |
    | the step of an earlier line, without its numbers | both lines become one |
    | the step of the last line, with the same numbers | it replaces the last line |
    | an earlier step, with the same numbers or more than `_LATE` rows back | the run was resumed: \
      it replaces all rows from this step on |
    | an earlier step that is new, at most `_LATE` rows back | it is late, and is sorted in |
    """
    table, steps, last = dict[int, Line](), list[int](), -1  # `steps` are the keys, sorted
    num_lines = num_replaced = num_resumed = num_unknown = 0
    for line in lines:
        if _ROW.isdisjoint(line):
            continue
        number = last + 1 if line.get("step") in (None, "") else _number(line["step"])
        if number is None or not abs(number) < _MAX_STEP:
            num_unknown += 1
            continue
        step, is_rewind = int(number), "rewind_to" in line
        earlier, place = table.get(step), bisect.bisect_left(steps, step)
        is_repeated = earlier is not None and not _ROW.isdisjoint(earlier.keys() & line.keys())
        is_far = earlier is None and len(steps) - place > _LATE
        if is_rewind or is_far or (is_repeated and step < last):
            for replaced in steps[place:]:
                del table[replaced]
            num_resumed, num_replaced = num_resumed + 1, num_replaced + len(steps) - place
            del steps[place:]
            earlier = None
        else:
            num_replaced += is_repeated
        if is_rewind:
            last = step - 1
            continue
        if earlier is None:
            steps.insert(place, step)
        table[step] = {**earlier, **line} if earlier else line
        last, num_lines = step, num_lines + 1
    remarks = list[str]()
    if num_replaced:
        remarks.append(f"{num_replaced:,} of {num_lines:,} rows were replaced by later rows")
    if num_resumed:
        remarks.append(f"the steps go back {num_resumed} time{'s' * (num_resumed > 1)}")
    if num_unknown:
        remarks.append(f"rows without a number as their step, which are left out: {num_unknown:,}")
    return {step: table[step] for step in steps}, "; ".join(remarks)
