"""Logs of training runs, also of other trainers: files, and lines, which are dictionaries."""

import contextlib
import csv
import json
import math
import os
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from .._errors import value_error
from ._rows import Line

LogSource: TypeAlias = Sequence[Line] | str | os.PathLike[str]
"""The lines of a log as dictionaries, or the path of a file."""

_ALIASES = {
    **dict.fromkeys(("watch_step", "global_step", "iteration", "iter", "_step"), "step"),
    **dict.fromkeys(("train_loss", "lm loss"), "loss"),
    **dict.fromkeys(("grad_norm", "norm", "gnorm", "grad norm"), "gradient_norm"),
}
"""Keys of other trainers, and ours."""

_KNOWN = "|".join([*_ALIASES, *dict.fromkeys(_ALIASES.values())])
_NUMBER = r"[-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|\.\d+|nan|inf)"
_PAIR = rf"(?<![\w/])(?<!val )(?<!test )((?:\w+/)*(?:{_KNOWN}))[^\w.+-]{{1,12}}({_NUMBER})"
"""A known key and its number in a line of text, such as `train/loss=2.5` or `lm loss: 2.5E+00`."""


def read_lines(log: LogSource, *, prefix: str | None = None) -> list[dict[str, Any]]:
    """Return the lines of a log as dictionaries with the keys of a `Monitor`; see `read_log`."""
    lines = _parsed(pathlib.Path(log)) if isinstance(log, (str, os.PathLike)) else log
    start = _prefix({key for line in lines for key in line}) if prefix is None else prefix
    short = [{key.removeprefix(start): x for key, x in line.items()} for line in lines]
    return [{_ALIASES[x]: line[x] for x in line if x in _ALIASES} | line for line in short]


def append_lines(path: str | os.PathLike[str], lines: Iterable[Line]) -> None:
    """Append lines to a file of JSON lines."""
    text = "".join(json.dumps(to_json(line)) + "\n" for line in lines)
    with open(path, "ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            # A process that was killed may have written half a line.
            text = text if file.read() == b"\n" else "\n" + text
        file.write(text.encode())


def to_json(line: Line) -> dict[str, Any]:
    """Shorten floats to the digits of a float32; name non-finite ones, which JSON does not have."""
    floats = {key: float(f"{x:.9g}") for key, x in line.items() if isinstance(x, float)}
    return {**line, **{key: x if math.isfinite(x) else str(x) for key, x in floats.items()}}


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


def _parsed(path: pathlib.Path) -> list[Line]:
    """Return the lines of a file: those that are JSON, and pairs of a key and a number in text."""
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    if path.suffix == ".csv":
        return list(csv.DictReader(text.splitlines(), restkey="", skipinitialspace=True))
    if '"log_history"' in text:
        # The last line has means.
        return [x for x in json.loads(text)["log_history"] if "train_runtime" not in x]
    lines: list[Line] = []
    for line in text.split("\n"):  # JSON strings may contain U+2028
        with contextlib.suppress(ValueError):  # half a line of a process that was killed
            is_json = re.match(r'\s*\{\s*"', line)
            pairs = json.loads(line) if is_json else reversed(re.findall(_PAIR, line.lower()))
            lines.append(dict(pairs))  # the first of several losses
    return lines
