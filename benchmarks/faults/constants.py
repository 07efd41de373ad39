"""Measures what goes wrong with other constants of the detector and of the policy, on public logs.

    python -m benchmarks.faults.constants FOLDER

The logs and the counts are those of `benchmarks.faults.logs`. Each constant is halved and doubled.
"Actions" are logs with an obvious onset that lead to an action,
with `rewind_on_rise` and without it; "for nothing" are healthy logs, and logs of PPO without it.
"""

import argparse
import json
import pathlib

import numpy as np

from benchmarks._report import table
from benchmarks.faults.logs import HERE, count, detect, first_action, read
from gradclip_jax.monitoring import _detect, _outliers, _policy

DETECTOR = (
    *("WINDOW", "PERIOD", "BLOCK", "UNLEARNED", "WIDTH tree", "WIDTH other", "TAIL tree"),
    *("TAIL other", "RATIO tree", "RATIO part", "RATIO loss"),
)
POLICY = ("BAD_ROWS",)
"""The other constants of the policy change nothing in these logs, which do not have the factors of
clips either; the tests show what they are for."""


def scale(constant, factor):
    """Scale a constant in the modules that use it, and return what undoes it and the new value."""
    name, *entry = constant.split()
    undo, new = [], None
    for module in (_outliers, _detect, _policy):
        if hasattr(module, name):
            old = getattr(module, name)
            undo.append((module, name, old))
            value = old[entry[0]] if entry else old
            # The ratios are compared with 1.
            is_ratio = name == "RATIO"
            new = value**factor if is_ratio else type(value)(value * factor)
            setattr(module, name, {**old, entry[0]: new} if entry else new)
    return undo, new


def measure(logs, incidents):
    """Count what the incidents of all logs find, and the logs that lead to an action."""
    total, actions, healthy = np.zeros((4, 2), int), np.zeros(2, int), 0
    for (entry, steps, _, rows), found in zip(logs, incidents, strict=True):
        own = count(np.array([x.step for x in found], int), steps, entry)
        total += own
        acts = [first_action(rows, found, rewind_on_rise=x)[0] != "none" for x in (True, False)]
        actions += np.array(acts) * (own[1, 1] > 0)
        healthy += acts[0] if entry["class"] == "ok" else acts[1] * (entry["class"] == "rl")
    keys = "obvious incidents", "obvious onsets", "within 12 rows"
    cells = {key: f"{a} of {b}" for key, (a, b) in zip(keys, total[:3], strict=True)}
    cells |= {"false events": total[3, 0], "actions": "{}, {}".format(*actions)}
    return cells | {"for nothing": healthy}, total[3, 1]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    args = parser.parse_args()
    sources = json.loads((HERE / "sources.json").read_text())
    labels, logs, usual = json.loads((HERE / "labels.json").read_text()), [], []
    for name, entry in sorted(labels.items()):
        lines = read(args.folder, name, sources[name])
        if lines:
            rows, _, found = detect(lines)
            logs.append((entry, np.array([x["step"] for x in lines]), lines, rows))
            usual.append(found)
    cells, healthy = measure(logs, usual)
    results = [{"constant": "none", "changed to": ""} | cells]
    print(healthy, "healthy rows;", results[0], flush=True)
    for constant in (*DETECTOR, *POLICY):
        for factor in (0.5, 2):
            undo, new = scale(constant, factor)
            found = usual if constant in POLICY else [detect(x[2])[2] for x in logs]
            cells = measure(logs, found)[0]
            for change in undo:
                setattr(*change)
            row = {"constant": f"`{constant}`", "changed to": f"{new:.3g}"}
            results.append(row | cells)
            print(table(results[-1:]).splitlines()[-1], flush=True)
    print(table(results))


if __name__ == "__main__":
    main()
