"""Training logs: rows as dictionaries, and rows read from the log of any trainer."""

import csv
import json
import math
import os
import pathlib
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from .._checks import shortened
from .._errors import public, value_error
from .._types import HostArray
from ._rows import KINDS, MEASURED, Names, Outcome, Rows
from ._taps import STATISTICS

Line: TypeAlias = Mapping[str, Any]
LogSource: TypeAlias = Sequence[Line] | str | os.PathLike[str]
"""The lines of a log as dictionaries, or the path of a file."""

_STEPS = ("step", "watch_step", "global_step", "iteration", "iter", "_step")
_LOSSES = ("loss", "train_loss", "lm loss")
_NORMS = ("gradient_norm", "grad_norm", "norm", "gnorm", "grad norm")
"""Keys of several trainers, in the order in which they are tried."""

_UNITS = *(f"{kind}_norm" for kind in KINDS), "nonfinite_elements"
"""Keys of the values of the whole tree; those of a unit continue with a slash and its name."""

_LIMITS = {
    "skip_threshold": Outcome.HAS_NORM_LIMIT,
    "loss_threshold": Outcome.HAS_LOSS_LIMIT,
}
_TAPS = tuple(f"{start}{name}" for start in ("", "cotangent_") for name in STATISTICS)
_WORDS = {str(x.name).lower(): x for x in Outcome if not str(x.name).startswith("HAS_")}
"""The words of the key `outcome`."""

_NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+|nan|inf(?:inity)?)"
_GAP = r"[^\w.+-]{0,12}"
PATTERN = (
    rf"(?i)(?=(?:.*?(?:\b|_)(?:step|iter(?:ation)?)s?{_GAP}(?P<step>\d+))?)"
    rf"(?=.*?(?<!val.)(?<!test.)(?:\b|(?<=train_))loss{_GAP}(?P<loss>{_NUMBER}))"
    rf"(?=(?:.*?norm{_GAP}(?P<norm>{_NUMBER}))?)"
)
"""The lines of a text file that are read by default."""


@public
def read_rows(
    log: LogSource,
    *,
    prefix: str | None = None,
    pattern: str = PATTERN,
    names: Names | None = None,
) -> tuple[Rows, Names]:
    """Read the rows of a training log, also of one that another trainer wrote.

    | log | read |
    | --- | --- |
    | lines of a `Monitor`, or of `metrics(state)` | all columns |
    | any other dictionaries, JSON lines, a CSV file | step, loss and gradient norm |
    | `trainer_state.json` of Hugging Face | the same |
    | a text file | lines that match `pattern` |
    | a step that occurs again after a resumption | the last line |
    | lines without a loss, a norm and an outcome | ignored |

    Args:
        log: Sequence of dictionaries, or the path of a file.
        prefix: Start of the keys, such as `g/`. None finds it.
        pattern: Regular expression with the groups `loss` and optionally `step` and `norm`.
        names: Names of the units and taps to read, None for all.

    Returns:
        The rows, and the names of their columns.

    Raises:
        ValueError: If the log has neither a loss nor a norm, or has them under several prefixes.


    Examples:
        >>> from gradclip_jax.monitoring._log import read_rows
        >>> rows, _ = read_rows([{"g/step": 3, "g/loss": 2.0}, {"g/step": 4, "g/loss": 1.0}])
        >>> rows.step.tolist(), rows.loss.tolist()
        ([3, 4], [2.0, 1.0])
    """
    lines = read_lines(log, pattern)
    lines = [line for line in lines if "sentence" not in line and "action" not in line]
    start = _prefix(dict.fromkeys(key for line in lines for key in line), log, prefix)
    table = [{key.removeprefix(start): x for key, x in line.items()} for line in lines]
    table = _last_of_each_step(table)
    keys = list(dict.fromkeys(key for line in table for key in line))
    loss, norm = _first(_LOSSES, keys), _first(_NORMS, keys)
    table = [line for line in table if not {loss, norm, "outcome"}.isdisjoint(line)]
    found = Names(
        units=tuple(x.partition("/")[2] for x in keys if x.startswith(f"{_UNITS[0]}/")),
        clips=tuple(x for x in keys if x.partition("/")[0] == "clip_factor"),
        taps=tuple(re.findall(r"^taps/(.*)/rms$", "\n".join(keys), re.MULTILINE)),
    )
    names = found if names is None else names._replace(clips=found.clips)
    rows = Rows.zeros(len(table), names)
    rows.outcome[:] = _outcomes(table, keys)

    def fill(column: HostArray, key: str, flag: int = 0) -> HostArray:
        """Copy the values of a key to a column, set a flag in their rows, and return where."""
        found = [_number(line.get(key)) for line in table]
        is_given = np.array([x is not None for x in found], bool)
        column[:] = [x or 0 for x in found]
        rows.outcome[is_given] |= flag
        return is_given

    has_step = fill(rows.step, _first(_STEPS, keys))
    rows.step[~has_step] = np.flatnonzero(~has_step)
    fill(rows.batch_id, "batch_id", Outcome.HAS_BATCH_ID)
    fill(rows.device, "device")
    fill(rows.loss, loss, Outcome.HAS_LOSS)
    for i, (key, flag) in enumerate(_LIMITS.items()):
        fill(rows.limits[:, i], key, flag)
    for i, (key, flag) in enumerate(zip((norm, *_UNITS[1:-1]), MEASURED, strict=True)):
        fill(rows.norms[:, i, 0], key, flag)
    fill(rows.nonfinite[:, 0], _UNITS[-1])
    for i, key in enumerate(names.clips):
        fill(rows.factors[:, i], key)
    is_clipped = np.any((rows.factors > 0) & (rows.factors < 1), axis=1)
    rows.outcome[is_clipped & rows.has(Outcome.APPLIED)] |= Outcome.CLIPPED
    for place, line in enumerate(table):
        if any(f"{_UNITS[0]}/{unit}" in line for unit in names.units[:1]):
            values = [
                [_number(line.get(f"{x}/{unit}")) or 0 for unit in names.units] for x in _UNITS
            ]
            rows.norms[place, :, 1:], rows.nonfinite[place, 1:] = values[:-1], values[-1]
            rows.outcome[place] |= int(Outcome.HAS_UNITS)
        if any(f"taps/{tap}/rms" in line for tap in names.taps[:1]):
            values = [
                _number(line.get(f"taps/{tap}/{x}")) or 0 for tap in names.taps for x in _TAPS
            ]
            rows.taps[place] = np.reshape(values, rows.taps.shape[1:])
            rows.outcome[place] |= int(Outcome.HAS_TAPS)
    return rows, names


def read_lines(log: LogSource, pattern: str = PATTERN) -> Sequence[Line]:
    """Return the lines of a log as dictionaries; empty for other objects."""
    lines = _parsed(pathlib.Path(log), pattern) if isinstance(log, (str, os.PathLike)) else log
    is_log = isinstance(lines, Sequence) and all(isinstance(line, Mapping) for line in lines)
    return lines if is_log else []


def to_lines(rows: Rows, names: Names, with_units: HostArray) -> list[dict[str, Any]]:
    """Convert rows to dictionaries of JSON values; those of `with_units` include the units.

    Non-finite numbers become strings such as "nan", which `read_rows` reads.
    """
    lines: list[dict[str, Any]] = []
    for i, bits in enumerate(rows.outcome.tolist()):
        flags = Outcome(bits)
        words = [word for word, flag in _WORDS.items() if flag in flags]
        line: dict[str, Any] = {"step": int(rows.step[i]), "outcome": " ".join(words)}
        if Outcome.HAS_BATCH_ID in flags:
            line["batch_id"] = int(rows.batch_id[i])
        if Outcome.REPLICA_DIFFERS in flags:
            line["device"] = int(rows.device[i])
        values: dict[str, float] = {}
        if Outcome.HAS_LOSS in flags:
            values["loss"] = rows.loss[i]
        values |= {
            key: x
            for (key, y), x in zip(_LIMITS.items(), rows.limits[i], strict=True)
            if y in flags
        }
        tables = [
            (key, rows.norms[i, j]) for j, key in enumerate(_UNITS[:-1]) if MEASURED[j] in flags
        ]
        tables += [(_UNITS[-1], rows.nonfinite[i])] * (Outcome.HAS_GRADIENT in flags)
        values |= {key: table[0] for key, table in tables}
        values |= zip(names.clips, rows.factors[i], strict=True)
        if with_units[i] and Outcome.HAS_UNITS in flags:
            for key, table in tables:
                values |= {f"{key}/{x}": y for x, y in zip(names.units, table[1:], strict=True)}
        if with_units[i] and Outcome.HAS_TAPS in flags:
            for tap, table in zip(names.taps, rows.taps[i], strict=True):
                values |= {
                    f"taps/{tap}/{x}": y for x, y in zip(_TAPS, np.ravel(table), strict=True)
                }
        lines.append(line | {key: _json(x) for key, x in values.items()})
    return lines


def _json(x: float) -> float | str:
    """Return a number with the digits of a float32, or the name of a non-finite number."""
    return float(f"{x:.9g}") if math.isfinite(x) else str(float(x))


def _first(candidates: Sequence[str], keys: Iterable[str]) -> str:
    return next((key for key in candidates if key in keys), candidates[0])


def _prefix(keys: Iterable[str], log: LogSource, prefix: str | None) -> str:
    """Return what the keys of the loss and of the norm start with."""
    known = {*_LOSSES, *_NORMS}
    counts: dict[str, int] = {}
    for key in keys:
        parts = key.split("/")
        found = next((i for i, part in enumerate(parts) if part in known), None)
        if found is not None:
            start = "".join(f"{part}/" for part in parts[:found])
            counts[start] = counts.get(start, 0) + (found == len(parts) - 1)
    if prefix is None and "" in counts:
        return ""
    best = [x for x in counts if counts[x] == max(counts.values())]
    best = [x for x in best if "train" in x] or best
    if prefix is not None:
        best = [x for x in counts if x == prefix]
    if len(best) > 1:
        hint = f"Pass for example `prefix={best[0]!r}`."
        raise value_error("log", "a log of one run", f"keys that start with {best}", hint)
    if not best:
        hint = "Log `loss` or `gradient_norm`, or write the log with `gcx.Monitor`."
        raise value_error("log", "a log with a loss or a gradient norm", shortened(log), hint)
    return best[0]


def _last_of_each_step(lines: Sequence[Line]) -> list[Line]:
    """Drop lines of steps that were repeated after the run was resumed or rewound.

    Lines that follow each other with the same step are one, such as the metrics of training and of
    evaluation.
    """
    key = _first(_STEPS, {key for line in lines for key in line})
    kept: list[Line] = []
    steps: list[float] = []
    for line in lines:
        step = _number(line.get("rewind_to", line.get(key)))
        is_same = step is not None and bool(steps) and steps[-1] == step
        if is_same and "rewind_to" not in line:
            kept[-1] = {**kept[-1], **line}
            continue
        while step is not None and steps and steps[-1] >= step:
            kept.pop()
            steps.pop()
        if "rewind_to" not in line:
            kept.append(line)
            steps.append(-math.inf if step is None else step)
    return kept


def _outcomes(table: Sequence[Line], keys: Iterable[str]) -> list[int]:
    """Return the flags of each line, from its outcome or from the counters of `metrics`."""
    causes = [
        (f"skipped_{x}", _WORDS[f"skipped_{x}"]) for x in ("nonfinite", "large_norm", "large_loss")
    ]
    is_old = [x for x in keys if x.partition("/")[0] in ("mini_step",)]
    outcomes: list[int] = []
    before: Line = {}
    for line in table:
        flags = Outcome(0)
        if "outcome" in line:
            for word in str(line["outcome"]).split():
                flags |= _WORDS.get(word, 0)
        else:
            for key, flag in causes:
                if (_number(line.get(key)) or 0) > (_number(before.get(key)) or 0):
                    flags |= flag | Outcome.SKIPPED
            if not flags:
                is_open = any(_number(line.get(key)) for key in is_old)
                flags = Outcome.HELD if is_open else Outcome.APPLIED
        outcomes.append(int(flags))
        before = line
    return outcomes


def _parsed(path: pathlib.Path, pattern: str) -> list[Line]:
    """Read the lines of a file in one of the formats of `read_rows`."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".csv":
        table = csv.DictReader(text.splitlines(), skipinitialspace=True)
        # Values beyond the last column have the key None.
        return [{key: x for key, x in line.items() if key} for line in table]
    if text.lstrip().startswith("{"):
        try:
            return json.loads(text)["log_history"]
        except (ValueError, KeyError):
            lines = _json_lines(path, text)
        if lines:
            return lines
    try:
        found = [re.match(pattern, line) for line in text.splitlines()]
    except re.error as error:
        hint = "Pass one with the group `(?P<loss>...)`, and optionally `step` and `norm`."
        raise value_error(
            "pattern", "a regular expression", f"{pattern!r}, {error}", hint
        ) from None
    return [{key: x for key, x in match.groupdict().items() if x} for match in found if match]


def _json_lines(path: pathlib.Path, text: str) -> list[Line]:
    """Parse JSON lines, and skip damaged lines, such as an incomplete last line, with a warning."""
    lines, damaged = list[Line](), list[int]()
    for number, content in enumerate(text.split("\n"), 1):  # JSON strings may contain U+2028
        try:
            line = json.loads(content) if content.strip() else None
        except ValueError:
            line = ""
        if isinstance(line, dict):
            lines.append(line)
        elif line is not None:
            damaged.append(number)
    if damaged and lines:
        places = ", ".join(map(str, damaged[:5])) + (", ..." if damaged[5:] else "")
        warnings.warn(f"{path}: skipped {len(damaged)} damaged lines: {places}", stacklevel=4)
    return lines


def _number(value: object) -> float | None:
    """Convert a scalar, or the text of a number, to a float; None if it is neither."""
    if isinstance(value, (bool, int, float)):
        return float(value)
    if isinstance(value, (np.generic, np.ndarray, jax.Array)):
        return None if np.ndim(value) else float(value)
    try:
        return float(value) if isinstance(value, str) else None
    except ValueError:
        return None
