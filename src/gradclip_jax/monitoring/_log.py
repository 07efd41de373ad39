"""Read the logs of any trainer, and append lines to a log.

A log is a list of lines, which are dictionaries. `read_lines` parses a file of any format into
dictionaries, and renames their keys to the keys of a `Monitor`.
"""

import csv
import functools
import io
import json
import math
import os
import pathlib
import re
import string
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from .._errors import type_error, value_error
from ._rows import MEASURES, Line

LogSource: TypeAlias = Sequence[Line] | str | os.PathLike[str]
"""The lines of a log as dictionaries, or the path of a file."""

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
"""The word before the name of a loss that is not the loss of training."""

_UNIT = re.compile(rf"(?:^|/)(?:{'|'.join(MEASURES)}|clip_factor)/")
"""The start of the key of a leaf or a layer, which may itself have a name such as `norm`."""


def read_lines(log: LogSource, *, prefix: str | None = None) -> list[dict[str, Any]]:
    """Return the lines of a log as dictionaries with the keys of a `Monitor`; see `read_log`."""
    lines = _parse_file(pathlib.Path(log)) if isinstance(log, (str, os.PathLike)) else log
    # The check for `dict` is fast, and enough for most lines.
    if not isinstance(lines, Sequence) or not all(
        isinstance(line, (dict, Mapping)) for line in lines
    ):
        rule = "the path of a file, or a sequence of dictionaries"
        hint = "For a table of pandas, pass `table.to_dict('records')`."
        raise type_error("log", rule, type(log).__name__, hint)
    return _rename_keys([*lines], prefix)


def append_lines(path: str | os.PathLike[str], lines: Iterable[Line]) -> None:
    """Append lines to a file of JSON lines; if this fails, the file contains none of them."""
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
    """Round floats to nine digits, and replace non-finite ones by names, which JSON lacks."""
    floats = {key: float(f"{x:.9g}") for key, x in line.items() if isinstance(x, float)}
    return {**line, **{key: x if math.isfinite(x) else str(x) for key, x in floats.items()}}


# File formats


def _parse_file(path: pathlib.Path) -> list[Line]:
    """Parse a CSV file, a JSON document, JSON lines, or lines of text."""
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    is_csv = path.suffix in (".csv", ".tsv")
    try:
        if is_csv:
            return list(_csv_lines(text, path))
        return _document_lines(json.loads(text))
    except (csv.Error, RecursionError, ValueError) as error:
        if is_csv or '"log_history"' in text:  # not several JSON values, or text
            rule, got = "a file that can be parsed", repr(str(path))
            raise value_error("log", rule, got, f"The parser says: {error}.") from error
    try:  # JSON lines
        return _document_lines(json.loads(f"[{text.strip().replace(chr(10), ',')}]"))
    except (RecursionError, ValueError):
        # JSON strings may contain U+2028, so `splitlines` would be wrong.
        return [line for x in text.split("\n") if (line := _parse_line(x))]


def _csv_lines(text: str, path: pathlib.Path) -> Iterator[Line]:
    """Yield the rows of a CSV file, without empty cells."""
    delimiter = "\t" if path.suffix == ".tsv" else ","
    file = io.StringIO(text, newline="")
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
        except (RecursionError, ValueError):  # half a line of a process that was killed
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
    """Return a name, or the word before it and the name if only both are known; "" otherwise."""
    if _VALIDATION.search(word):
        return ""
    return next((x for x in (f"{word} {name}", name) if _split_key(x)[1] in _KEYS), "")


# Names of columns


def _rename_keys(lines: list[Any], prefix: str | None) -> list[dict[str, Any]]:
    """Replace the names of step, loss and gradient norm, and remove the prefix from other keys.

    The list is changed in place, so that a long log is in memory only once.
    """
    names = _new_names({key for line in lines for key in line}, prefix)
    # Lines with the same keys are renamed in the same way.
    pairs_of = dict[tuple[str, ...], list[tuple[str, str]]]()
    for i, line in enumerate(lines):
        keys = tuple(line)
        if keys not in pairs_of:
            # Of several keys with the same new name, the one with the lowest rank is used.
            by_rank = sorted(keys, key=lambda key: names[key][1], reverse=True)
            best = {names[key][0]: key for key in by_rank}
            pairs = ((names[key][0], key) for key in keys)
            pairs_of[keys] = [(name, key) for name, key in pairs if best[name] == key]
        lines[i] = {name: line[key] for name, key in pairs_of[keys]}
    return lines


def _new_names(keys: Collection[str], prefix: str | None) -> dict[str, tuple[str, int]]:
    """Return the new name of each key, and the rank of the key among those with the same name."""
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
    """Return the only prefix of the loss, or the one of several that contains "train"."""
    outer = sorted(x for x in heads if not x.startswith(tuple({*heads} - {x})))
    outer = [x for x in outer if "train" in x.lower()] or outer or [""]
    if len(outer) > 1:
        hint = f"Pass for example `prefix={outer[0]!r}`."
        raise value_error("log", "a log of one run", f"keys that start with {outer}", hint)
    return outer[0]
