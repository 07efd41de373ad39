"""Training logs on the host: columns, incidents, and a summary."""

import json
import os
import pathlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from .._checks import check_count, shortened
from .._errors import public, value_error
from .._types import HostArray

Row: TypeAlias = Mapping[str, Any]
LogSource: TypeAlias = Sequence[Row] | str | os.PathLike[str]
"""The rows of a log, or the path of a JSON Lines file."""

_NUMBERS = (bool, int, float, np.generic, np.ndarray, jax.Array)
_NON_FINITE = ("nan", "inf", "-inf")
_NORMS = ("gradient_norm", "update_norm", "parameter_norm", "update_ratio", "largest_share")


class Log(NamedTuple):
    """Metric columns and incidents that were read from a training log.

    Attributes:
        steps: float64[rows], step of each row.
        columns: Values of each key, masked in rows where the key was not measured.
        has_stepped: bool[rows], whether the optimizer ran in the step of each row.
        is_held: bool[rows], whether each row is a micro-step that only accumulated gradients.
        incidents: Pairs of step and sentence.
    """

    steps: HostArray
    columns: dict[str, np.ma.MaskedArray]
    has_stepped: HostArray
    is_held: HostArray
    incidents: list[tuple[float, str]]


@public
def summarize_log(log: LogSource, *, window: int = 1000) -> dict[str, float]:
    """Summarize a training run from its logged `metrics`.

    | key | meaning |
    | --- | --- |
    | `steps` | number of rows, without micro-steps that only accumulate |
    | `taken` | share of these steps that were applied |
    | `clipped`, with a path if there are several clips | share of clipped gradients |
    | `skipped_nonfinite`, `skipped_large_norm`, `skipped_large_loss` | number of skipped steps |
    | `guard_failed` | 1 if a guard has failed |
    | `incident_count` | number of incidents of `watch` |
    | `spike_score/loss`, also of `grad_norm`, `gradient_norm`, `update_norm` | share of values |
    | | that are non-finite, or more than 6 standard deviations from the mean of the last `window` |

    Clipping inside an accumulation or a guard is counted once per optimizer step, although
    micro-steps and skipped steps log it as well. If `step` (or `watch_step`) decreases because
    training resumed from a checkpoint, the later rows replace the earlier rows of the same steps.
    Consecutive rows with the same `step` are merged. Invalid lines of a file, such as an incomplete
    last line, are skipped with a warning. Rows with the key "sentence", such as
    `Incident.to_dict()`, do not count as steps.

    Args:
        log: Sequence of dictionaries with the metrics of one step each, or the path of a JSON Lines
            file.
        window: Number of preceding values to which each value is compared in the spike score. At
            least 100 values are required, or `window` values if it is smaller.

    Returns:
        Dictionary of numbers. Keys whose column is missing in the log are omitted.

    Raises:
        ValueError: If `log` is empty or is not a sequence of mappings, or `window` is < 1.


    Examples:
        >>> import gradclip_jax as gcx
        >>> log = [{"loss": 3.0 + 0.1 * (i % 3), "clip_fraction": i % 2} for i in range(199)]
        >>> gcx.diagnostics.summarize_log([*log, {"loss": 9.0, "clip_fraction": 1.0}])
        {'steps': 200.0, 'clipped': 0.5, 'spike_score/loss': 0.005}
    """
    check_count("window", window, "Pass the number of values to compare with.")
    steps, columns, has_stepped, is_held, _ = read_log_file(log)
    summary = {"steps": float(len(steps) - np.sum(is_held))}
    for key, values in sorted(columns.items()):
        name, _, place = key.partition("/")
        is_skipped = is_held & (name in ("has_updated", "update_norm"))
        if name in ("grad_norm", "clip_fraction"):
            # If the optimizer does not run, a clip inside it repeats its last norm.
            norms = columns.get(f"grad_norm/{place}" if place else "grad_norm", values).filled(-1)
            is_repeated = np.isclose(norms, np.append(norms[:1], norms[:-1]), 0, 0, equal_nan=True)
            is_skipped = ~has_stepped & is_repeated
        fresh = values[~is_skipped].compressed()
        if not fresh.size:
            continue
        if key == "has_updated":
            summary["taken"] = float(np.mean(fresh))
        elif name == "clip_fraction":
            summary["clipped/" + place if place else "clipped"] = float(np.mean(fresh > 0))
        elif name.startswith("skipped_") or key == "incident_count":
            summary[key] = float(fresh[-1])
        elif key == "guard_failed":
            summary[key] = float(np.max(fresh))
        elif key in ("loss", "grad_norm", "gradient_norm", "update_norm"):
            summary[f"spike_score/{key}"] = _spike_score(fresh, window)
    return summary


def _spike_score(values: HostArray, window: int) -> float:
    is_spike = ~np.isfinite(values)
    for i, value in enumerate(values):
        past = values[max(i - window, 0) : i]
        past = past[np.isfinite(past)]
        if len(past) >= min(window, 100):
            is_spike[i] |= abs(value - past.mean()) > 6 * past.std()
    return float(is_spike.mean())


def read_log_file(log: LogSource) -> Log:
    """Read the metric columns and incidents of a log, or raise if it has no rows."""
    hint = "Append `metrics(state)` at each step, or name a file of JSON lines."
    rows = _parsed(log) if isinstance(log, (str, os.PathLike)) else log
    is_log = isinstance(rows, Sequence) and all(isinstance(row, Mapping) for row in rows)
    steps = [row for row in rows if "sentence" not in row] if is_log else []
    if not steps:
        raise value_error("log", "a non-empty list of dicts, or a path", shortened(log), hint)
    found = [(_number(x.get("step"), np.nan), str(x["sentence"])) for x in rows if "sentence" in x]
    steps = _last_of_each_step(steps)
    keys = dict.fromkeys(key for row in steps for key in row)
    columns = {key: x for key in keys if (x := _column(key, steps)).count()}
    count = np.arange(len(steps), dtype=np.float64)
    # `watch_step` includes the call of the row.
    counter = columns.get("step", columns.get("watch_step", count + 1) - 1)
    has_stepped = _has_stepped(columns, len(steps))
    skips = sum(columns[key].filled(0) for key in columns if key.startswith("skipped_"))
    is_held = ~has_stepped & (np.diff(np.broadcast_to(skips, len(steps)), prepend=0) <= 0)
    is_held &= any(key.partition("/")[0] == "mini_step" for key in columns)
    return Log(np.ma.filled(counter, np.nan), columns, has_stepped, is_held, found)


def _has_stepped(columns: Mapping[str, np.ma.MaskedArray], size: int) -> HostArray:
    """Return whether the optimizer ran in the step of each row."""
    if "has_updated" in columns:  # only `watch` reports it
        return columns["has_updated"].filled(1) > 0
    has_stepped = np.ones(size, bool)
    if "gradient_step" in columns:
        counts = columns["gradient_step"].filled(0)
        # The log may begin in the middle of a run, so the first row is compared with no other.
        open_windows = [x.filled(0)[0] for key, x in columns.items() if key.startswith("mini_step")]
        has_stepped = np.append(not any(open_windows), np.diff(counts) > 0)
    if "consecutive_skips" in columns:
        has_stepped &= columns["consecutive_skips"].filled(0) == 0
    return has_stepped


def _parsed(path: str | os.PathLike[str]) -> list[Row]:
    """Parse a JSON Lines file, and skip invalid lines with a warning."""
    rows, damaged = list[Row](), list[int]()
    text = pathlib.Path(path).read_text(encoding="utf-8", errors="replace")
    for number, line in enumerate(text.split("\n"), 1):  # JSON strings may contain U+2028
        try:
            row = json.loads(line) if line.strip() else None
        except ValueError:
            row = ""
        if isinstance(row, dict):
            rows.append(row)
        elif row is not None:
            damaged.append(number)
    if damaged:
        places = ", ".join(map(str, damaged[:5])) + (", ..." if damaged[5:] else "")
        warnings.warn(f"{path}: skipped {len(damaged)} damaged lines: {places}", stacklevel=5)
    return rows


def _last_of_each_step(rows: Sequence[Row]) -> list[Row]:
    """Drop the earlier rows of steps that were repeated after resuming from a checkpoint."""
    key = "step" if any("step" in row for row in rows) else "watch_step"

    def is_micro_step(row: Row) -> bool:
        return any(name.startswith("mini_step") for name in row)

    # Several rows share a step number if they are micro-steps or if `watch` did not count a step.
    # Otherwise they are one row, such as the metrics of training and of evaluation.
    kept: list[Row] = []
    steps: list[float] = []
    for row in rows:
        step = _number(row.get(key), np.inf)
        if steps and np.inf > steps[-1] > step:
            while steps and steps[-1] >= step:
                kept.pop()
                steps.pop()
        is_unique = key == "step" and not is_micro_step(row)
        if is_unique and steps and np.inf > steps[-1] == step:
            kept[-1] = {**kept[-1], **row}
        else:
            kept.append(row)
            steps.append(step)
    return kept


def _column(key: str, rows: Sequence[Row]) -> np.ma.MaskedArray:
    """Return the values of a key, masked where a value is missing, not a number or not measured."""
    found = [_number(row.get(key), None) for row in rows]
    values, is_missing = np.array(found, np.float64), [x is None for x in found]
    name = key.partition("/")[0]
    is_unmeasured = (name in _NORMS) & (values < 0) | (name == "taps") & (values == -1)
    return np.ma.array(values, mask=is_missing | is_unmeasured)


def _number(value: object, default: Any) -> Any:
    """Convert a scalar, or the name of a non-finite number, to a float."""
    if isinstance(value, _NUMBERS) and not np.ndim(value):
        return float(value)
    return float(value) if isinstance(value, str) and value in _NON_FINITE else default
