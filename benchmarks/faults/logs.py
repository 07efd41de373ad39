"""Counts the labelled incidents of public training logs that `read_log` finds.

    python -m benchmarks.faults.logs FOLDER

FOLDER has logs as JSON lines with `step`, `loss` and `grad_norm`, and `labels.json`:
`{name: {"incidents": [[first_step, last_step, kind, "obvious" or "arguable"], ...]}}`.

A label is found if there is an incident in its rows, or within 2 rows of them. Incidents with at
most 8 rows between them are one event; an event is false if none of its rows belongs to a label,
obvious or arguable. The rule of OLMo-core (a value that is not finite, or more than 6 standard
deviations above the mean of at least 64 of the last 128 finite values) is counted in the same way.
"""

import argparse
import json
import pathlib

import numpy as np

import gradclip_jax as gcx
from benchmarks._report import table

TOLERANCE, GAP = 2, 8


def detector(path, steps):
    """The rows that the detector reports."""
    found = [incident.step for incident in gcx.diagnostics.read_log(path).incidents]
    return np.flatnonzero(np.isin(steps, found))


def olmo_core(path, steps):
    """The rows that the rule of OLMo-core reports."""
    found = np.zeros(len(steps), bool)
    for key in ("loss", "grad_norm"):
        lines = [json.loads(line) for line in path.open()]
        values = np.array([np.nan if x.get(key) is None else x[key] for x in lines], float)
        for t, value in enumerate(values if np.isfinite(values).any() else []):
            past = values[max(t - 128, 0) : t]
            past = past[np.isfinite(past)]
            is_far = len(past) >= 64 and value > past.mean() + 6 * past.std()
            found[t] |= is_far or not np.isfinite(value)
    return np.flatnonzero(found)


def count(found, steps, labels):
    """The number of labels that are found, obvious and arguable ones, and of false events."""
    is_labelled = np.zeros(len(steps), bool)
    counts = {"obvious": 0, "arguable": 0}
    for first, last, _, certainty in labels:
        start, stop = np.searchsorted(steps, first), np.searchsorted(steps, last, "right")
        part = slice(max(start - TOLERANCE, 0), stop + TOLERANCE)
        is_labelled[part] = True
        counts[certainty] += np.isin(np.arange(len(steps))[part], found).any()
    events = np.split(found, np.flatnonzero(np.diff(found) > GAP) + 1)
    is_false = [len(event) > 0 and not is_labelled[event].any() for event in events]
    return np.array([counts["obvious"], counts["arguable"], sum(is_false)])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    folder = parser.parse_args().folder
    labels = json.loads((folder / "labels.json").read_text())
    rows, total = [], np.zeros((2, 3), int)
    num_rows, certainties = 0, []
    for name, entry in sorted(labels.items()):
        path = folder / f"{name}.jsonl"
        steps = np.array([json.loads(line)["step"] for line in path.open()])
        incidents = entry["incidents"]
        counts = np.array([count(f(path, steps), steps, incidents) for f in (detector, olmo_core)])
        total += counts
        num_rows += len(steps)
        own = [incident[3] for incident in incidents]
        certainties += own
        rows.append(row(name, len(steps), own, counts))
    print(table([*rows, row("all", num_rows, certainties, total)]))


def row(name, num_rows, certainties, counts):
    own = f"{certainties.count('obvious')}, {certainties.count('arguable')}"
    cells = {"log": name, "rows": num_rows, "obvious, arguable": own}
    for rule, (obvious, arguable, false) in zip(("found", "OLMo-core"), counts, strict=True):
        cells[rule] = f"{obvious}, {arguable}"
        cells[f"{rule}: false in 1,000"] = round(1000 * false / num_rows, 2)
    return cells


if __name__ == "__main__":
    main()
