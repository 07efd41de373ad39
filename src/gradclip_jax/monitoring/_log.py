"""The log of a run, read on the host: its columns, and the run in numbers."""

import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from .._checks import shortened
from .._errors import public, value_error


@public
def summarize_log(log: Any, *, window: int = 1000) -> dict[str, float]:
    """Sums up a run from what was logged of `metrics` at its steps.

    | key | meaning |
    | --- | --- |
    | `steps`, `taken` | rows of the log; the share of them whose step was taken |
    | `clipped`, with a place if there are several clips | the share of steps that were clipped |
    | `skipped_nonfinite`, `skipped_large_norm`, `skipped_large_loss` | how many, by each guard |
    | `incident_count` | of `watch` |
    | `spike_score/loss`, of `grad_norm`, `gradient_norm`, `update_norm` too | the share of values |
    | | that are not finite, or more than 6 standard deviations from the mean of the last `window` |

    Args:
        log: a sequence of mappings from name to number, one for each step, or the path of a file of
            JSON lines.
        window: how many values a spike is compared with, from the hundredth on.

    Returns:
        Key to number; without those of which the log says nothing.

    Raises:
        ValueError: `log` is no list, or empty.

    Examples:
        >>> import gradclip_jax as gcx
        >>> log = [{"loss": 3.0 + 0.1 * (i % 3), "clip_fraction": i % 2} for i in range(199)]
        >>> gcx.diagnostics.summarize_log([*log, {"loss": 9.0, "clip_fraction": 1.0}])
        {'steps': 200.0, 'clipped': 0.5, 'spike_score/loss': 0.005}
    """
    columns = read_columns(log)
    summary = {"steps": float(max(map(len, columns.values()), default=0))}
    for key, values in sorted(columns.items()):
        name, _, place = key.partition("/")
        if name == "has_updated":
            summary["taken"] = float(np.nanmean(values))
        elif name == "clip_fraction":
            summary["clipped/" + place if place else "clipped"] = float(np.nanmean(values > 0))
        elif name.startswith("skipped_") or key == "incident_count":
            summary[key] = float(values[-1])
        elif key in ("loss", "grad_norm", "gradient_norm", "update_norm"):
            summary[f"spike_score/{key}"] = _spike_score(values, window)
    return summary


def _spike_score(values: Any, window: int) -> float:
    is_spike = ~np.isfinite(values)
    for i, value in enumerate(values):
        past = values[max(i - window, 0) : i]
        past = past[np.isfinite(past)]
        if len(past) >= min(window, 100):
            is_spike[i] |= abs(value - past.mean()) > 6 * past.std()
    return float(is_spike.mean())


def read_columns(log: Any) -> dict[str, np.ndarray[Any, Any]]:
    """The values of each key of a log, NaN where a row has none; refuses what is no log."""
    hint = "Append `metrics(state)` at each step, or name a file of JSON lines."
    if isinstance(log, (str, os.PathLike)):
        lines = pathlib.Path(log).read_text(encoding="utf-8").splitlines()
        log = [json.loads(line) for line in lines if line.strip()]
    if not isinstance(log, Sequence) or not log:
        rule = "a list of at least one dict"
        raise value_error("log", rule, shortened(log), hint)
    keys = dict.fromkeys(key for row in log for key in row)
    return {key: np.array([row.get(key) for row in log], np.float64) for key in keys}
