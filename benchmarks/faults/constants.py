"""Measures what goes wrong without each constant of the detector, on labelled public logs.

    python -m benchmarks.faults.constants FOLDER [--longest 2000]

The logs and the counts are those of `benchmarks.faults.logs`; longer logs are left out. Each row
changes one constant to a value that disables it.
"""

import argparse
import json
import math
import pathlib

import numpy as np

from benchmarks._report import table
from benchmarks.faults.logs import HERE, count, read
from gradclip_jax.monitoring import _detect, _outliers
from gradclip_jax.monitoring._lines import to_rows
from gradclip_jax.monitoring._log import read_lines

CHANGES = {
    # name: the changed value, or the changed entry of a dictionary
    "none": {},
    "WINDOW": 32,
    "HISTORY": 128,
    "WIDTH": {"tree": 0.0, "other": 0.0},
    "TAIL": {"tree": math.inf, "other": math.inf},
    "RATIO": {"tree": 1.0, "part": 1.0, "loss": 1.0},
    "BLOCK": 4,
    "RISE": 1.1,
    "NUM_ROUTINE": 0,
    "STREAKS": {"zero": 1},
    "EXPLODED": math.inf,
    "UNLEARNED": 0,
    "PERIOD": 1,
}
"""`STARVING` and the streak of clips need the factors of a clip, which these logs do not have."""


def set_constant(name, value):
    """Change a constant in the modules that use it, and return the old value of each."""
    old = {}
    for module in (_outliers, _detect):
        if hasattr(module, name):
            before = old[module] = getattr(module, name)
            setattr(module, name, before | value if isinstance(value, dict) else value)
    return old


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--longest", type=int, default=2000)
    args = parser.parse_args()
    sources = json.loads((HERE / "sources.json").read_text())
    labels, logs, results = json.loads((HERE / "labels.json").read_text()), [], []
    for name, entry in sorted(labels.items()):
        lines = read(args.folder, name, sources[name], has_network=False)
        if 0 < len(lines) <= args.longest:
            steps = np.array([x["step"] for x in lines])
            logs.append((entry, steps, *to_rows(read_lines(lines))[:2]))
    for name, value in CHANGES.items():
        old, total = set_constant(name, value), np.zeros((4, 2), int)
        for entry, steps, rows, names in logs:
            found = [x.step for x in _detect.Detector(names).update(rows)]
            total += count(np.flatnonzero(np.isin(steps, found)), steps, entry)
        for module, before in old.items():
            setattr(module, name, before)
        cells = [f"{part} of {number}" for part, number in total[:3]]
        keys = "obvious incidents", "obvious onsets", "within 12 rows"
        row = {"constant": name, "changed to": str(value)} | dict(zip(keys, cells, strict=True))
        results.append(row | {"false events": total[3, 0], "healthy rows": total[3, 1]})
        print(table(results[-1:]).splitlines()[-1], flush=True)
    print(table(results))


if __name__ == "__main__":
    main()
