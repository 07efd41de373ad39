"""Measures what goes wrong with other constants of the detector and of the policy, on public logs.

    python -m benchmarks.faults.constants FOLDER [--only WINDOW ...] [--halves]

The logs and the counts are those of `benchmarks.faults.logs`. Each constant is halved and doubled,
ratios are replaced by their root and square, STARVING changes by 100 and STARVING_ROWS by 4; a cell
with one number has it for both. "Actions"
are logs with an obvious onset that lead to an action, with `rewind_on_rise` and without it; "for
nothing" are healthy logs that do so with it, and logs of PPO that do so without it. In "all
actions", logs with an onset go on after each rewind, at the same row, until they end or stop.
"Starved" are logs of norms with an incident `clip`, if a clip had the threshold 1.

With `--halves`, each of the constants that were chosen on all logs is chosen again on a random half
of them, 1,000 times, and compared with its value on the other half.
"""

import argparse
import collections
import json
import pathlib

import numpy as np

from benchmarks._report import table
from benchmarks.faults.logs import EVERY, HERE, SAVE_EVERY, count, first_action, numbered_rows, read
from gradclip_jax.monitoring.host import _detect, _evidence, _losses, _outliers, _policy
from gradclip_jax.monitoring.host._detect import Detector
from gradclip_jax.monitoring.host._policy import Policy

CONSTANTS = (
    *("WINDOW", "HISTORY", "PERIOD", "BLOCK", "UNLEARNED", "GAP", "WIDTH tree", "WIDTH other"),
    *("TAIL tree", "TAIL other", "RATIO tree", "RATIO part", "RATIO loss", "BAD_ROWS"),
    *("QUIET", "MOST_REWINDS", "FORGET", "STARVING", "STARVING_ROWS"),
)
"""LONGEST_WINDOW is missing, because these logs have no accumulation."""

ON_ALL_LOGS = {
    "WIDTH other": (2.0, 3.0, 3.5, 4.0, 4.5, 5.0, 6.0, 8.0),
    "RATIO loss": (1.18, 1.3, 1.35, 1.4, 1.5, 1.6),
}


def replace(constant, change):
    """Change a constant in the modules that use it, and return what undoes it and the value."""
    name, *entry = constant.split()
    undo, new = [], None
    for module in (_outliers, _losses, _detect, _evidence, _policy):
        if hasattr(module, name):
            old = getattr(module, name)
            undo.append((module, name, old))
            new = change(old[entry[0]] if entry else old)
            setattr(module, name, {**old, entry[0]: new} if entry else new)
    if name == "HISTORY":
        undo.append((_outliers, "BUFFER_SIZE", _outliers.BUFFER_SIZE))
        _outliers.BUFFER_SIZE = new + _outliers.WINDOW
    return undo, new


def all_actions(rows, incidents):
    """How many rewinds, lower rates and stops there are if the log goes on after each of them."""
    policy, numbers = Policy(rewind_on_rise=True), collections.Counter()
    for start in range(0, len(rows.step), EVERY):
        kept = rows.take(slice(max(start + EVERY - 1024, 0), start + EVERY))
        found = [x for x in incidents if kept.step[0] <= x.step < kept.end]
        action = policy.update(kept, found, start, range(0, kept.end + 1, SAVE_EVERY)).action
        numbers[action] += 1
        if action == "stop":
            break
        if policy.is_pending:
            policy.rewound(kept.end)
    return [numbers[x] for x in ("rewind", "lower", "stop")]


def is_starved(rows, names):
    """Whether a clip with the threshold 1 is an incident."""
    rows = rows._replace(factors=np.fmin(1 / rows.norms[:, 0, :1].clip(1e-30), 1))
    return any("clip" in x.kinds for x in Detector(names._replace(clips=("clip",))).update(rows))


def measure(logs):
    """What is found in each log, and whether it leads to an action, int[logs, 14]."""
    counts = []
    for entry, steps, rows, names in logs:
        found = Detector(names).update(rows)
        own = count(np.array([x.step for x in found], int), steps, entry)
        acts = [
            bool(found) and first_action(rows, found, rewind_on_rise=x)[0] != "none"
            for x in (True, False)
        ]
        of_onset = np.array(acts) * (own[1, 1] > 0)
        nothing = acts[0] if entry["class"] == "ok" else acts[1] * (entry["class"] == "rl")
        counts.append([*own[:3].ravel(), own[3, 0], *of_onset, nothing])
        counts[-1] += [x * bool(own[1, 1]) for x in all_actions(rows, found)]
        counts[-1].append(is_starved(rows, names))
    return np.array(counts, int)


def cells_of(counts):
    """The cells of a row of the table."""
    keys, total = ("obvious incidents", "onsets", "within 12 rows"), counts.sum(0)
    cells = {f"{key} of {total[2 * i + 1]}": total[2 * i] for i, key in enumerate(keys)}
    cells |= {"false events": total[6], "actions": "{}, {}".format(*total[7:9])}
    cells |= {"for nothing": total[9], "all actions": "{}, {}, {}".format(*total[10:13])}
    return cells | {"starved": total[13]}


def errors(counts):
    """Missed incidents and onsets, late onsets, false events, and 5 for an action for nothing."""
    return counts[:, :10] @ np.array([-1, 1, -1, 1, -1, 1, 1, 0, 0, 5])


def choose_on_halves(constant, values, logs):
    """Choose a constant on halves of the logs, and test it on the others."""
    of_value = []
    for value in values:
        undo, _ = replace(constant, lambda _, value=value: value)
        of_value.append(errors(measure(logs)))
        for old in undo:
            setattr(*old)
    name, entry = constant.split()
    of_value, rng = np.array(of_value), np.random.default_rng(0)
    halves = [rng.permutation(len(logs)) < len(logs) // 2 for _ in range(1000)]
    best = [int(of_value[:, half].sum(1).argmin()) for half in halves]
    used = values.index(getattr(_outliers, name)[entry])
    pairs = zip(best, halves, strict=True)
    other = np.mean([of_value[[i, used]][:, ~half].sum(1) for i, half in pairs], 0)
    chosen = collections.Counter(best).most_common()
    return {
        "constant": constant,
        "values": ", ".join(map(str, values)),
        "all logs": ", ".join(map(str, of_value.sum(1))),
        "chosen on halves": ", ".join(f"{values[i]} in {n / 10:.0f} %" for i, n in chosen),
        "errors on the other half": f"{other[0]:.1f}; with {values[used]}: {other[1]:.1f}",
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--only", nargs="*", default=CONSTANTS, help="constants, as in this file")
    parser.add_argument("--halves", action="store_true")
    args = parser.parse_args()
    sources = json.loads((HERE / "sources.json").read_text())
    labels, logs = json.loads((HERE / "labels.json").read_text()), []
    for name, entry in sorted(labels.items()):
        lines = read(args.folder, name, sources[name])
        if lines:
            logs.append((entry, np.array([x["step"] for x in lines]), *numbered_rows(lines)))
    if args.halves:
        print(table([choose_on_halves(*item, logs) for item in ON_ALL_LOGS.items()]))
        return

    results = [{"constant": "none", "changed to": ""} | cells_of(measure(logs))]
    print(*results[-1].values(), sep=" | ", flush=True)
    for constant in args.only:
        by, both = {"STARVING": 100, "STARVING_ROWS": 4}.get(constant, 2), []
        changes = (lambda x, by=by: type(x)(x / by), lambda x, by=by: x * by)
        if constant.startswith("RATIO"):
            changes = (lambda x: x**0.5, lambda x: x**2)
        for change in changes:
            undo, new = replace(constant, change)
            both.append({"changed to": f"{new:.3g}"} | cells_of(measure(logs)))
            for old in undo:
                setattr(*old)
        pairs = {key: dict.fromkeys(str(x[key]) for x in both) for key in both[0]}
        name, *entry = constant.split()
        row = {"constant": ", ".join([f"`{name}`", *entry])}
        results.append(row | {key: "; ".join(x) for key, x in pairs.items()})
        print(*results[-1].values(), sep=" | ", flush=True)
    print(table(results))


if __name__ == "__main__":
    main()
