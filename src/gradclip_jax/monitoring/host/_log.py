"""Read the logs of any trainer, and append lines to a log.

A log is a sequence of lines, which are dictionaries. `read_columns` parses a file of any format,
collects the values of each key, and converts the keys to the keys of a `Monitor`.
"""

import collections
import csv
import functools
import json
import math
import os
import pathlib
import re
import string
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO, TypeAlias

from ..._errors import type_error, value_error
from .._layout import MEASURES
from ._lines import KEYS
from ._rows import Columns, Line

LogSource: TypeAlias = Sequence[Line] | str | os.PathLike[str]
"""The lines of a log as dictionaries, or the path of a file."""

Log: TypeAlias = str | os.PathLike[str] | Callable[[dict[str, Any]], object] | None
"""The argument `log` of `Monitor`."""

NAMES = {
    "step": ("step", "_step", "global_step", "iteration", "iter", "watch_step"),
    "loss": ("loss", "train_loss", "training_loss", "lm_loss"),
    "gradient_norm": ("gradient_norm", "grad_norm", "gnorm", "norm"),
}
"""Names of the step, the loss and the gradient norm in logs, best first.

Names are compared in lower case, with underscores instead of spaces and hyphens.
"""

_KEYS = {name: key for key, names in NAMES.items() for name in names}
_RANKS = {name: rank for rank, name in enumerate(_KEYS)}

_PAIR = re.compile(
    r"(step|loss|norm|iter|iteration)[^\w.+-]{1,12}([-+]?(?:[\d.,]*\d(?:e[-+]?\d+)?|nan|inf))(?!\w)"
)
"""The end of a name and its number in a line of text, such as `loss=2.5` or `norm: 2.5e+00`."""

_NAME_CHARACTERS = string.ascii_lowercase + string.digits + "_-/"
_VALIDATION = re.compile(r"\b(?:val|valid|validation|eval|evaluation|test|dev)\W*$")
"""Words before the name of a loss that is not the training loss."""

_PART = 2**18
"""Number of characters of the JSON lines that are parsed together."""

_UNIT = re.compile(rf"(?:^|/)(?:{'|'.join(MEASURES)}|clip_factor)/")
"""Prefix of the keys of a leaf or layer, whose own name may be a word such as `norm`."""


def read_columns(log: LogSource, *, prefix: str | None = None) -> Columns:
    """Return the columns of a log under the keys that a `Monitor` uses; see `read_log`.

    The columns of other keys are left empty, because a long log may not fit in memory as a whole.
    """
    columns = Columns()

    @functools.cache  # many lines have the same keys
    def columns_of(keys: tuple[str, ...]) -> list[tuple[str, dict[int, Any]]]:
        columns.update({key: {} for key in keys if key not in columns})
        return [(key, columns[key]) for key in keys if _is_read(key)]

    for i, line in enumerate(_lines_of(log)):
        for key, column in columns_of(tuple(line)):
            column[i] = line[key]
    return _rename(columns, prefix)


def _lines_of(log: LogSource) -> Iterable[Line]:
    """Return the lines of a log, or of a file; raise if `log` is neither."""
    if isinstance(log, (str, os.PathLike)):
        return parse_file(pathlib.Path(log))
    # The check for `dict` is fast, and sufficient for most lines.
    if isinstance(log, Sequence) and all(isinstance(line, (dict, Mapping)) for line in log):
        return log
    rule = "the path of a file, or a sequence of dictionaries"
    hint = (
        "For an optimizer state, read it with a `Monitor`, and pass the monitor. For a table of "
        "pandas, pass `table.to_dict('records')`."
    )
    raise type_error("log", rule, type(log).__name__, hint)


class LogWriter:
    """Write lines to a file, or pass each line to a function.

    Args:
        log: Path of a file of JSON lines, a function of a dictionary, or None to write nothing.

    Attributes:
        unsent: Lines that the function has not accepted yet.
    """

    def __init__(self, log: Log):
        self.log, self.unsent = log, collections.deque[Line]()

    def append(self, lines: Iterable[Line]) -> None:
        """Append lines to the file, or keep them for the next call of `send`."""
        if callable(self.log):
            self.unsent.extend(lines)
        elif self.log is not None:
            append_lines(self.log, lines)

    def send(self) -> None:
        """Call the function with each line; after an exception, the line is sent again."""
        while callable(self.log) and self.unsent:
            self.log(dict(self.unsent[0]))
            self.unsent.popleft()


def append_lines(path: str | os.PathLike[str], lines: Iterable[Line]) -> None:
    """Append lines to a file of JSON lines; if writing fails, remove the partial output."""
    text = "".join(json.dumps(to_json(line)) + "\n" for line in lines)
    with open(path, "ab+", buffering=0) as file:
        if size := file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            # A process that was killed may have written half a line.
            text = text if file.read(1) == b"\n" else "\n" + text
        rest = memoryview(text.encode())
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:  # such as a full disk
            file.truncate(size)
            raise


def to_json(line: Line) -> dict[str, Any]:
    """Round floats to nine digits, and write non-finite ones as strings, for JSON."""
    floats = {key: float(f"{x:.9g}") for key, x in line.items() if isinstance(x, float)}
    return {**line, **{key: x if math.isfinite(x) else str(x) for key, x in floats.items()}}


# File formats


def parse_file(path: pathlib.Path) -> Iterator[Line]:
    """Yield the lines of a file that contains CSV, a JSON document, JSON lines, or plain text."""
    is_csv = path.suffix in (".csv", ".tsv")
    newline = "" if is_csv else None
    with path.open(encoding="utf-8-sig", errors="replace", newline=newline) as file:
        text = "" if is_csv else file.read()
        try:
            yield from _csv_lines(file, path) if is_csv else _document_lines(json.loads(text))
            return
        except (csv.Error, RecursionError, ValueError) as error:
            if is_csv or '"log_history"' in text:  # not several JSON values, or text
                rule, got = "a file that can be parsed", repr(str(path))
                raise value_error("log", rule, got, f"The parser says: {error}.") from error
        del text
        file.seek(0)
        # JSON strings may contain U+2028, so `splitlines` would be wrong.
        while lines := file.readlines(_PART):
            try:  # JSON lines are parsed faster together
                yield from _document_lines(json.loads(f"[{','.join(lines)}]"))
            except (RecursionError, ValueError):
                yield from map(_parse_line, lines)


def _csv_lines(file: TextIO, path: pathlib.Path) -> Iterator[Line]:
    """Yield the rows of a CSV file, without empty cells."""
    delimiter = "\t" if path.suffix == ".tsv" else ","
    header, names = list[str](), set[str]()
    for row in csv.reader(file, delimiter=delimiter, skipinitialspace=True):
        # A trainer that resumes may write the header again, even with other columns.
        if not names or (not names.isdisjoint(row) and 2 * len(names.intersection(row)) > len(row)):
            header = [cell.strip() for cell in row]
            names = {name for name in header if name}
            if header == ["Wall time", "Step", "Value"]:  # of TensorBoard: one file for each number
                header[2] = next((x for x in ("loss", "norm") if x in path.stem.lower()), "Value")
        else:
            yield {key: cell for key, cell in zip(header, row, strict=False) if cell}


def _document_lines(document: Any) -> list[Line]:
    """Return the lines in a JSON document: an array, or an object that contains arrays."""
    if isinstance(document, dict):
        if "log_history" in document:  # `trainer_state.json` of Hugging Face
            # The last line has means over the run.
            document = [x for x in document["log_history"] if "train_runtime" not in x]
        elif document and all(isinstance(x, list) for x in document.values()):
            # `History.history` of Keras
            cells = zip(*document.values(), strict=False)
            document = [dict(zip(document, x, strict=True)) for x in cells]
        else:
            document = [document]
    return [x for x in document if isinstance(x, dict)] if isinstance(document, list) else []


def _parse_line(line: str) -> Line:
    """Return the object in a JSON line, or the numbers after known names in a line of text."""
    if line.lstrip()[:1] == "{" and line.lstrip("{ \t")[:1] == '"':
        try:
            return json.loads(line)
        except (RecursionError, ValueError):  # a partial line from a process that was killed
            return {}
    line, found = line.lower(), dict[str, str]()
    for match in _PAIR.finditer(line):
        before = line[max(0, match.start() - 32) : match.start()]
        rest = before.rstrip(_NAME_CHARACTERS)
        word = "".join(rest.split()[-1:])
        name = before[len(rest) :] + match[1]
        if name := _known_name("" if word[-1:].isdigit() else word, name):
            found.setdefault(name, match[2])  # the first of several losses
    return found


@functools.lru_cache(4096)  # the same few names occur in all lines
def _known_name(word: str, name: str) -> str:
    """Return the first of `word name` and `name` that is a known name; "" if neither is known."""
    if _VALIDATION.search(word):
        return ""
    return next((x for x in (f"{word} {name}".lstrip(), name) if _split_key(x)[1] in _KEYS), "")


# Names of columns


def _rename(columns: Columns, prefix: str | None) -> Columns:
    """Replace the names of step, loss and gradient norm, and remove the prefix from other keys."""
    names, renamed = _new_names(columns, prefix), Columns()
    # If several keys of a line have the same new name, use the key with the lowest rank.
    for key in sorted(columns, key=lambda key: names[key][1], reverse=True):
        name, column = names[key][0], columns[key]
        if renamed.get(name):
            column = dict(sorted({**renamed[name], **column}.items()))
        renamed[name] = column
    return renamed


def _is_read(key: str) -> bool:
    """Return whether a key, after its prefix, may belong to a `Monitor` or is in `NAMES`."""
    name = _split_key(key)[1]
    return name in _KEYS or name in KEYS or bool(_UNIT.search(name))


def _new_names(keys: Collection[str], prefix: str | None) -> dict[str, tuple[str, int]]:
    """Return the new name of each key, and its rank among keys with the same new name."""
    parts = {key: _split_key(key) for key in keys}
    found = {(_KEYS.get(name), head) for head, name in parts.values()}
    found = {x for x in found if not _VALIDATION.search(x[1].lower())}
    heads = {number: {head for key, head in found if key == number} for number in NAMES}
    start = prefix
    if start is None:
        start = _find_prefix(heads["loss"] or heads["gradient_norm"])
    names = dict[str, tuple[str, int]]()
    for key, (head, name) in parts.items():
        number = _KEYS.get(name)
        # The step may have a prefix of its own, such as `trainer/global_step`.
        if number and (head in (start, "") or prefix is None and heads[number] == {head}):
            names[key] = number, _RANKS[name] + len(_RANKS) * (head != start)
        else:
            names[key] = _escape(str(key).removeprefix(start)), 0
    return names


def _escape(text: str) -> str:
    """Escape control characters, so that terminals and plots show them."""
    if text.isprintable():
        return text
    return "".join(x if x.isprintable() else x.encode("unicode_escape").decode() for x in text)


def _split_key(key: str) -> tuple[str, str]:
    """Split a key into its prefix, such as `train/` or `run - ` (of a W&B export), and its name."""
    if _UNIT.search(key := str(key)):
        return "", key
    place = max(key.rfind("/") + 1, key.rfind(" - ") + 3 if " - " in key else 0)
    return key[:place], re.sub(r"[\s-]+", "_", key[place:].strip().lower())


def _find_prefix(heads: Collection[str]) -> str:
    """Return the prefix of the loss; if there are several, the one that contains "train"."""
    outer = sorted(x for x in heads if not x.startswith(tuple({*heads} - {x})))
    outer = [x for x in outer if "train" in x.lower()] or outer or [""]
    if len(outer) > 1:
        hint = f"Pass for example `prefix={outer[0]!r}`."
        raise value_error("log", "a log of one run", f"keys that start with {outer}", hint)
    return outer[0]
