"""Training logs: lines, which are dictionaries, and rows, also from the log of any trainer."""

import contextlib
import csv
import json
import math
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from .._errors import value_error
from .._types import HostArray
from ._rows import MEASURED, Names, Outcome, Rows
from ._taps import STATISTICS

Line: TypeAlias = Mapping[str, Any]
LogSource: TypeAlias = Sequence[Line] | str | os.PathLike[str]
"""The lines of a log as dictionaries, or the path of a file."""

_ALIASES = {
    **dict.fromkeys(("watch_step", "global_step", "iteration", "iter", "_step"), "step"),
    **dict.fromkeys(("train_loss", "lm loss"), "loss"),
    **dict.fromkeys(("grad_norm", "norm", "gnorm", "grad norm"), "gradient_norm"),
}
"""Keys of other trainers, and ours."""

WORDS = {str(x.name).lower(): int(x) for x in Outcome if not str(x.name).startswith("HAS_")}
"""The words of the key `outcome`."""

_NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+|nan|inf(?:inity)?)"
_GAP = r"[^\w.+-]{0,12}"
PATTERN = (
    rf"(?i)(?=(?:.*?(?:\b|_)(?:step|iter(?:ation)?)s?{_GAP}(?P<step>\d+))?)"
    rf"(?=.*?(?<!val.)(?<!test.)(?:\b|(?<=train_))loss{_GAP}(?P<loss>{_NUMBER}))"
    rf"(?=(?:.*?norm{_GAP}(?P<norm>{_NUMBER}))?)"
)
"""The lines of a text file that are read by default."""

_MEASURES = "gradient_norm", "update_norm", "parameter_norm", "nonfinite_elements"
_ROW = {"loss", "gradient_norm", "outcome", "rewind_to"}
"""A line with one of these keys is a row, or marks a rewind."""


def read_lines(
    log: LogSource, *, prefix: str | None = None, pattern: str = PATTERN
) -> list[dict[str, Any]]:
    """Return the lines of a log as dictionaries with the keys of a `Monitor`; see `read_log`."""
    lines = _parsed(pathlib.Path(log), pattern) if isinstance(log, (str, os.PathLike)) else log
    start = _prefix({key for line in lines for key in line}) if prefix is None else prefix
    short = [{key.removeprefix(start): x for key, x in line.items()} for line in lines]
    return [{_ALIASES[x]: line[x] for x in line if x in _ALIASES} | line for line in short]


def to_rows(lines: Iterable[Line], names: Names | None = None) -> tuple[Rows, Names]:
    """Convert lines to rows, with the units and taps of `names`, or with all if it is None."""
    table = _latest(lines)
    keys = dict.fromkeys(key for line in table.values() for key in line)
    patterns = "gradient_norm/(.*)", "(clip_factor.*)", "taps/(.*)/rms"
    found = Names(*(tuple(y[1] for x in keys if (y := re.fullmatch(p, x))) for p in patterns))
    names = names._replace(clips=found.clips) if names else found
    rows = Rows.zeros(len(table), names)
    rows.step[:], rows.factors[:] = list(table), 1  # a clip that is not in a line has not clipped
    columns = {key: (column, int(flags)) for key, column, flags in _columns(rows, names)}
    for i, line in enumerate(table.values()):
        words = str(line.get("outcome", "applied")).split()
        rows.outcome[i] = sum(WORDS.get(word, 0) for word in words)
        for key in line.keys() & columns.keys():
            column, flags = columns[key]
            with contextlib.suppress(TypeError, ValueError):  # no number, nor the text of one
                column[i] = float(line[key])
                rows.outcome[i] |= flags
    return rows, names


def to_lines(rows: Rows, names: Names, with_units: HostArray) -> list[dict[str, Any]]:
    """Convert rows to the lines of a log; those of `with_units` include units and taps."""
    columns = [(key, column.tolist(), int(x)) for key, column, x in _columns(rows, names)]
    sparse = int(Outcome.HAS_UNITS | Outcome.HAS_TAPS)
    outcome = np.where(with_units, rows.outcome, rows.outcome & ~sparse).tolist()
    return [
        {key: column[i] for key, column, flags in columns if flags & bits == flags}
        | {"outcome": " ".join(word for word, flag in WORDS.items() if flag & bits)}
        for i, bits in enumerate(outcome)
    ]


def to_json(line: Line) -> dict[str, Any]:
    """Shorten floats to the digits of a float32; name non-finite ones, which JSON does not have."""
    floats = {key: x for key, x in line.items() if isinstance(x, float)}
    texts = {key: str(x) for key, x in floats.items() if not math.isfinite(x)}
    return {**line, **{key: float(f"{x:.9g}") for key, x in floats.items()}, **texts}


def _columns(rows: Rows, names: Names) -> Iterator[tuple[str, HostArray, Outcome]]:
    """Yield the key of each number in a line, its column, and the flags of rows that have it."""
    yield "step", rows.step, Outcome(0)
    yield "batch_id", rows.batch_id, Outcome.HAS_BATCH_ID
    yield "device", rows.device, Outcome.REPLICA_DIFFERS
    yield "loss", rows.loss, Outcome.HAS_LOSS
    yield "skip_threshold", rows.limits[:, 0], Outcome.HAS_NORM_LIMIT
    yield "loss_threshold", rows.limits[:, 1], Outcome.HAS_LOSS_LIMIT
    for i, clip in enumerate(names.clips):
        yield clip, rows.factors[:, i], Outcome(0)
    tables = *np.moveaxis(rows.norms, 1, 0), rows.nonfinite
    for name, table, flag in zip(_MEASURES, tables, (*MEASURED, MEASURED[0]), strict=True):
        yield name, table[:, 0], flag
        for i, unit in enumerate(names.units, 1):
            yield f"{name}/{unit}", table[:, i], flag | Outcome.HAS_UNITS
    for i, j, k in np.ndindex(*rows.taps.shape[1:]):
        side = ("", "cotangent_")[j]
        yield f"taps/{names.taps[i]}/{side}{STATISTICS[k]}", rows.taps[:, i, j, k], Outcome.HAS_TAPS


def _prefix(keys: Iterable[str]) -> str:
    """Return the start of the keys of the loss and the norm, such as `train/`."""
    known = {"loss", "gradient_norm", *(x for x, name in _ALIASES.items() if name != "step")}
    starts = {key[: key.rfind("/") + 1] for key in keys if key.rpartition("/")[2] in known}
    found = sorted(x for x in starts if not x.startswith(tuple(starts - {x})))
    found = [x for x in found if "train" in x] or found or [""]
    if len(found) > 1:
        hint = f"Pass for example `prefix={found[0]!r}`."
        raise value_error("log", "a log of one run", f"keys that start with {found}", hint)
    return found[0]


def _latest(lines: Iterable[Line]) -> dict[int, Line]:
    """Return the line of each step, without those of steps that were repeated afterwards.

    Lines that follow each other with the same step are one, such as the metrics of training and of
    evaluation. Lines without a loss, a norm and an outcome are ignored.
    """
    table, last = dict[int, Line](), -1
    for line in lines:
        if "sentence" in line or _ROW.isdisjoint(line):
            continue
        step = line.get("step")
        step = last + 1 if step in (None, "") else int(float(step))
        if step < last or "rewind_to" in line:
            table = {i: x for i, x in table.items() if i < step}
        if "rewind_to" not in line:
            table[step] = {**table.get(step, {}), **line}
        last = step
    return table


def _parsed(path: pathlib.Path, pattern: str) -> list[Line]:
    """Return the lines of a file that are JSON or match the pattern."""
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    if path.suffix == ".csv":
        return list(csv.DictReader(text.splitlines(), restkey="", skipinitialspace=True))
    if '"log_history"' in text:
        history = json.loads(text)["log_history"]
        return [x for x in history if "train_runtime" not in x]  # the last line has means
    lines: list[Line] = []
    for line in text.split("\n"):  # JSON strings may contain U+2028
        if re.match(r'\s*\{\s*"', line):
            with contextlib.suppress(ValueError):  # half a line of a process that was killed
                lines.append(json.loads(line))
        elif match := re.match(pattern, line):
            lines.append({key: x for key, x in match.groupdict().items() if x})
    return lines
