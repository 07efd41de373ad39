"""Training logs: rows as dictionaries, and rows read from the log of any trainer."""

import csv
import json
import math
import os
import pathlib
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

_ALIASES = {
    "step": ("watch_step", "global_step", "iteration", "iter", "_step"),
    "loss": ("train_loss", "lm loss"),
    "gradient_norm": ("grad_norm", "norm", "gnorm", "grad norm"),
}
"""Keys of other trainers, in the order in which they are tried."""

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
    start = _prefix({key for line in lines for key in line}, log, prefix)
    table = [{key.removeprefix(start): x for key, x in line.items()} for line in lines]
    keys = dict.fromkeys(key for line in table for key in line)
    for key, others in _ALIASES.items():
        other = next((x for x in others if x in keys and key not in keys), key)
        table = [{key if x == other else x: y for x, y in line.items()} for line in table]
    table = _last_of_each_step(table)
    table = [line for line in table if not {"loss", "gradient_norm", "outcome"}.isdisjoint(line)]
    found = Names(
        units=tuple(x.partition("/")[2] for x in keys if x.startswith("gradient_norm/")),
        clips=tuple(x for x in keys if x.partition("/")[0] == "clip_factor"),
        taps=tuple(re.findall(r"^taps/(.*(?<!/cotangent))/rms$", "\n".join(keys), re.MULTILINE)),
    )
    names = found if names is None else names._replace(clips=found.clips)
    rows = Rows.zeros(len(table), names)
    rows.step[:] = [_number(line.get("step", i)) or 0 for i, line in enumerate(table)]
    rows.outcome[:] = _outcomes(table)
    # Only some lines have norms of units and statistics of taps, which may be thousands of keys.
    parts = {"gradient_norm", "taps"}
    has_units = [any(x.partition("/")[0] in parts and "/" in x for x in line) for line in table]
    for key, column, flags in _columns(rows, names):
        places = np.flatnonzero(has_units) if flags & _SPARSE else range(len(table))
        for i in places:
            value = _number(table[i].get(key))
            if value is not None:
                column[i] = value
                rows.outcome[i] |= int(flags)
    is_clipped = np.any((rows.factors > 0) & (rows.factors < 1), axis=1)
    rows.outcome[is_clipped & rows.has(Outcome.APPLIED)] |= int(Outcome.CLIPPED)
    return rows, names


def read_lines(log: LogSource, pattern: str = PATTERN) -> Sequence[Line]:
    """Return the lines of a log as dictionaries; empty for other objects."""
    lines = _parsed(pathlib.Path(log), pattern) if isinstance(log, (str, os.PathLike)) else log
    is_log = isinstance(lines, Sequence) and all(isinstance(line, Mapping) for line in lines)
    return lines if is_log else []


def to_lines(rows: Rows, names: Names, with_units: HostArray) -> list[dict[str, Any]]:
    """Convert rows to the lines of a log; those of `with_units` include units and taps."""
    lines: list[dict[str, Any]] = []
    for step, bits in zip(rows.step.tolist(), rows.outcome.tolist(), strict=True):
        words = [word for word, flag in _WORDS.items() if flag & bits]
        lines.append({"step": step, "outcome": " ".join(words)})
    for key, column, flags in _columns(rows, names):
        is_known = rows.outcome & int(flags) == int(flags)
        for i in np.flatnonzero(is_known & (with_units if flags & _SPARSE else True)):
            lines[i][key] = column[i].item()
    return lines


_SPARSE = Outcome.HAS_UNITS | Outcome.HAS_TAPS


def _columns(rows: Rows, names: Names) -> Iterator[tuple[str, HostArray, Outcome]]:
    """Yield the key of each number in a line, its column, and the flags of rows that have it."""
    yield "batch_id", rows.batch_id, Outcome.HAS_BATCH_ID
    yield "device", rows.device, Outcome.REPLICA_DIFFERS
    yield "loss", rows.loss, Outcome.HAS_LOSS
    yield "skip_threshold", rows.limits[:, 0], Outcome.HAS_NORM_LIMIT
    yield "loss_threshold", rows.limits[:, 1], Outcome.HAS_LOSS_LIMIT
    tables = [(f"{kind}_norm", rows.norms[:, i], MEASURED[i]) for i, kind in enumerate(KINDS)]
    for key, table, flag in [*tables, ("nonfinite_elements", rows.nonfinite, MEASURED[0])]:
        yield key, table[:, 0], flag
        for i, unit in enumerate(names.units, 1):
            yield f"{key}/{unit}", table[:, i], flag | Outcome.HAS_UNITS
    for i, key in enumerate(names.clips):
        yield key, rows.factors[:, i], Outcome(0)
    for i, tap in enumerate(names.taps):
        for j, kind in enumerate(("", "cotangent_")):
            for k, name in enumerate(STATISTICS):
                yield f"taps/{tap}/{kind}{name}", rows.taps[:, i, j, k], Outcome.HAS_TAPS


def _prefix(keys: Iterable[str], log: LogSource, prefix: str | None) -> str:
    """Return what the keys of the loss and of the norm start with."""
    known = {x for key in ("loss", "gradient_norm") for x in (key, *_ALIASES[key])}
    found: dict[str, int] = {}
    for parts in (key.split("/") for key in keys):
        at = next((i for i, part in enumerate(parts) if part in known), None)
        if at is not None:
            start = "".join(f"{part}/" for part in parts[:at])
            found[start] = found.get(start, 0) + (at == len(parts) - 1)
    most = max(found.values(), default=0)
    best = [x for x in sorted(found) if x == prefix or prefix is None and found[x] == most]
    best = [x for x in best if x == "" or "train" in x][:1] or best
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
    kept: list[tuple[float, Line]] = []
    for line in lines:
        step = _number(line.get("rewind_to", line.get("step")))
        if step is None:
            kept.append((-math.inf, line))
            continue
        is_rewind = "rewind_to" in line
        same = kept.pop()[1] if kept and kept[-1][0] == step and not is_rewind else {}
        while kept and kept[-1][0] >= step:
            kept.pop()
        if not is_rewind:
            kept.append((step, {**same, **line}))
    return [line for _, line in kept]


def _outcomes(table: Sequence[Line]) -> list[int]:
    """Return the flags of each line, from its outcome or from the counters of `metrics`."""
    outcomes: list[int] = []
    before: Line = {}
    for line in table:
        flags = Outcome(0)
        for word in str(line.get("outcome", "")).split():
            flags |= _WORDS.get(word, Outcome(0))
        if "outcome" not in line:
            for key in ("skipped_nonfinite", "skipped_large_norm", "skipped_large_loss"):
                if (_number(line.get(key)) or 0) > (_number(before.get(key)) or 0):
                    flags |= _WORDS[key] | Outcome.SKIPPED
            is_open = any(x.startswith("mini_step") and _number(y) for x, y in line.items())
            flags = flags or (Outcome.HELD if is_open else Outcome.APPLIED)
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
