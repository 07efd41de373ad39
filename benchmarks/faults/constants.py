"""Measures what goes wrong with other constants of the detector and of the policy, on public logs.

    python -m benchmarks.faults.constants FOLDER [--only WINDOW ...]

The logs and the counts are those of `benchmarks.faults.logs`. Each constant is halved and doubled,
and ratios and `FLAT` are replaced by their root and square; a cell with one number has it for both.
"Actions" are logs with an obvious onset that lead to an action, with `rewind_on_rise` and without
it; "for nothing" are healthy logs that do so with it, and logs of PPO that do so without it.
"""

import argparse
import json
import pathlib

import numpy as np

from benchmarks._report import table
from benchmarks.faults.logs import HERE, count, first_action, numbered_rows, read
from gradclip_jax.monitoring import _detect, _evidence, _outliers
from gradclip_jax.monitoring._detect import Detector

CONSTANTS = (
    *("WINDOW", "PERIOD", "BLOCK", "UNLEARNED", "WIDTH tree", "WIDTH other", "TAIL tree"),
    *("TAIL other", "RATIO tree", "RATIO part", "RATIO loss", "BAD_ROWS"),
)
"""The other constants of the policy change nothing in these logs, which do not have the factors of
clips either; the tests show what they are for."""


def scale(constant, factor):
    """Scale a constant in the modules that use it, and return what undoes it and the new value."""
    name, *entry = constant.split()
    undo, new = [], None
    for module in (_outliers, _detect, _evidence):
        if hasattr(module, name):
            old = getattr(module, name)
            undo.append((module, name, old))
            value = old[entry[0]] if entry else old
            new = value**factor if name == "RATIO" else type(value)(value * factor)
            setattr(module, name, {**old, entry[0]: new} if entry else new)
    return undo, new


def measure(logs, incidents):
    """Count what the incidents of all logs find, and the logs that lead to an action."""
    total, actions, healthy = np.zeros((4, 2), int), np.zeros(2, int), 0
    for (entry, steps, rows, _), found in zip(logs, incidents, strict=True):
        own = count(np.array([x.step for x in found], int), steps, entry)
        total += own
        acts = [
            bool(found) and first_action(rows, found, rewind_on_rise=x)[0] != "none"
            for x in (True, False)
        ]
        actions += np.array(acts) * (own[1, 1] > 0)
        healthy += acts[0] if entry["class"] == "ok" else acts[1] * (entry["class"] == "rl")
    keys = "obvious incidents", "onsets", "within 12 rows"
    cells = {f"{key} of {b}": a for key, (a, b) in zip(keys, total[:3], strict=True)}
    cells |= {"false events": total[3, 0], "actions": "{}, {}".format(*actions)}
    return cells | {"for nothing": healthy}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--only", nargs="*", default=CONSTANTS, help="constants, as in this file")
    args = parser.parse_args()
    sources = json.loads((HERE / "sources.json").read_text())
    labels, logs = json.loads((HERE / "labels.json").read_text()), []
    for name, entry in sorted(labels.items()):
        lines = read(args.folder, name, sources[name])
        if lines:
            logs.append((entry, np.array([x["step"] for x in lines]), *numbered_rows(lines)))

    def measured():
        return measure(logs, [Detector(names).update(rows) for *_, rows, names in logs])

    results = [{"constant": "none", "changed to": ""} | measured()]
    print(*results[-1].values(), sep=" | ", flush=True)
    for constant in args.only:
        both = []
        for factor in (0.5, 2):
            undo, new = scale(constant, factor)
            both.append({"changed to": f"{new:.3g}"} | measured())
            for change in undo:
                setattr(*change)
        pairs = {key: dict.fromkeys(str(x[key]) for x in both) for key in both[0]}
        name, *entry = constant.split()
        row = {"constant": ", ".join([f"`{name}`", *entry])}
        results.append(row | {key: "; ".join(x) for key, x in pairs.items()})
        print(*results[-1].values(), sep=" | ", flush=True)
    print(table(results))


if __name__ == "__main__":
    main()
