"""Compares fault detectors on public training logs that a person has labelled, and replays them.

    python -m benchmarks.faults.logs FOLDER [--fetch]

`sources.json` names the repository, commit and path of each log, and the checksum of its rows.
`--fetch` downloads them from GitHub into FOLDER; a log without a public path must be there already.
Each is a file of JSON lines with `step`, `loss` and `grad_norm`. `labels.json` has what a person
saw in each log before any detector ran:

| key | meaning |
| --- | --- |
| class | "ok" for healthy runs, "rl" for reinforcement learning, "div" for runs that diverge |
| incidents | first step, last step, kind, and "obvious" or "arguable" |
| watch | the same for lasting onsets, where the last step is the latest for an alarm |

A label is found if there is an incident in its rows, or within 2 rows of them; of an onset, also up
to 12 rows after it. Incidents with at most 8 rows between them are one event; an event is false if
none of its rows belongs to a label, obvious or arguable. A row is healthy if it has no label.

In the replay, the policy reads every 25 rows, and there is a checkpoint every 100 rows.
"""

import argparse
import hashlib
import itertools
import json
import pathlib
import re
import urllib.request

import numpy as np

from benchmarks._report import table
from gradclip_jax.monitoring.host._detect import Detector
from gradclip_jax.monitoring.host._lines import to_rows
from gradclip_jax.monitoring.host._log import parse_file, read_columns
from gradclip_jax.monitoring.host._policy import Policy

TOLERANCE, GAP, SOON, EVERY, SAVE_EVERY = 2, 8, 12, 25, 100
GITHUB = "https://raw.githubusercontent.com"
HERE = pathlib.Path(__file__).parent
KEYS = {"step": "step", "loss": "loss", "gradient_norm": "grad_norm"}


def olmo_core(values):
    """OLMo-core's `SkipStepOptimizer`: 6 standard deviations from the mean of the last 128 values.

    github.com/allenai/OLMo-core, 067267c, src/olmo_core/optim/skip_step_optimizer.py. It needs 64
    values. Values that are not finite are left out of the mean, as in its later versions.
    """
    for t in range(len(values)):
        past = values[max(t - 128, 0) : t]
        past = past[np.isfinite(past)]
        yield len(past) >= 63 and abs(values[t] - past.mean()) > 6 * past.std(ddof=1)


def lightning(values):
    """Lightning's `SpikeDetection`: 2 times its mean away from the mean of the last 10 others.

    github.com/Lightning-AI/pytorch-lightning, 0c94c0e, src/lightning/fabric/utilities/spike.py. A
    value that is not above the last other one is no spike.
    """
    usual = np.zeros(0)
    for value in values:
        mean = usual.mean() if len(usual) else np.inf
        is_spike = len(usual) > 0 and value > usual[-1] and abs(value - mean) >= 2 * abs(mean)
        usual = usual if is_spike or not np.isfinite(value) else np.append(usual, value)[-10:]
        yield is_spike


def megatron(values):
    """Megatron's rerun machine: 10 times the largest of the first 100 finite magnitudes.

    github.com/NVIDIA/Megatron-LM, 00caa53, megatron/core/rerun_state_machine.py.
    """
    is_finite = np.isfinite(values)
    largest = abs(values[is_finite][:100]).max()
    return (np.cumsum(is_finite) > 100) & (abs(values) >= 10 * largest)


def twice(values):
    """2 times the mean of the last 100 finite values."""
    for t in range(len(values)):
        past = values[max(t - 100, 0) : t]
        past = past[np.isfinite(past)]
        yield len(past) >= 10 and values[t] > 2 * past.mean()


RULES = {"OLMo-core": olmo_core, "Lightning": lightning, "10 x max": megatron, "2 x": twice}


def alarms(rule, columns):
    """The rows in which the rule or a value that is not finite is an alarm for loss or norm."""
    found = np.zeros(len(columns[0]), bool)
    for values in columns:
        if np.isfinite(values).any():
            found |= ~np.isfinite(values) | np.array([*rule(values)], bool)
    return np.flatnonzero(found)


def numbered_rows(lines):
    """The rows of a log and their names, with the number of the row as its step."""
    # Some logs have the rows of a restart appended, with the same steps.
    rows, names, _ = to_rows(read_columns([x | {"step": i} for i, x in enumerate(lines)]))
    return rows, names


def first_action(rows, incidents, **options):
    """The first action other than to save, and its row."""
    policy = Policy(**options)
    for start in range(0, len(rows.step), EVERY):
        kept = rows.take(slice(max(start + EVERY - 1024, 0), start + EVERY))
        found = [x for x in incidents if kept.step[0] <= x.step < kept.end]
        action = policy.update(kept, found, start, range(0, kept.end + 1, SAVE_EVERY)).action
        if action not in ("continue", "save"):
            return action, policy.last.step - 1
    return "none", len(rows.step)


def parts(labels, steps):
    """The rows of each label, as slices."""
    starts = np.searchsorted(steps, [x[0] for x in labels])
    stops = np.searchsorted(steps, [x[1] for x in labels], "right")
    return [slice(max(a - TOLERANCE, 0), b) for a, b in zip(starts, stops, strict=True)]


def count(found, steps, entry):
    """Found incidents, onsets and onsets soon found, each of all; false events of rows."""
    incidents, watch = entry["incidents"], entry.get("watch", [])
    is_healthy, numbers = np.ones(len(steps), bool), np.zeros((4, 2), int)
    if np.any(np.diff(steps) <= 0):  # labels of steps that occur twice have no place
        return numbers
    for label, part in zip(incidents, parts(incidents, steps), strict=True):
        is_healthy[part.start : part.stop + TOLERANCE] = False
        if label[3] == "obvious":
            inside = (found >= part.start) & (found < part.stop + TOLERANCE)
            numbers[0] += [inside.any(), 1]
    for label, part in zip(watch, parts(watch, steps), strict=True):
        is_healthy[part.start : part.stop + SOON] = False
        if label[3] == "obvious":
            delay = min(found[found >= part.start], default=len(steps)) - part.start - TOLERANCE
            is_found = part.start + delay < part.stop + SOON
            numbers[1:3] += [[is_found, 1], [delay <= SOON, 1]]
    events = np.split(found, np.flatnonzero(np.diff(found) > GAP) + 1)
    numbers[3] = sum(len(x) > 0 and is_healthy[x].all() for x in events), is_healthy.sum()
    return numbers


def wilson(found, total):
    """A share and its Wilson interval of 95 %, in percent."""
    if not total:
        return "-"
    share, z = found / total, 1.96
    middle = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z * np.sqrt(share * (1 - share) / total + (z / (2 * total)) ** 2) / (1 + z * z / total)
    low, high = 100 * (middle - half), 100 * (middle + half)
    return f"{found} of {total}, {low:.0f} to {high:.0f} %"


def fetch(name, source, path, server):
    """Download a log, and keep its rows with six significant digits."""
    address = f"{server}/" + "{repository}/{commit}/{path}".format(**source)
    original = path.with_name(f"{name}-{pathlib.Path(source['path']).name}")
    with urllib.request.urlopen(address, timeout=60) as answer:
        original.write_bytes(answer.read())
    if "pattern" in source:  # for logs of text
        lines = [x.groupdict() for x in re.finditer(source["pattern"], original.read_text())]
    else:
        parsed = list(parse_file(original))
        items = read_columns(parsed).items()
        lines = [{k: v[i] for k, v in items if v.get(i, "") != ""} for i in range(len(parsed))]
        # AlgoPerf leaves NaN empty; rows with other values are those of an evaluation.
        has_loss = ("loss" in x or len(y) == 1 for x, y in zip(lines, parsed, strict=True))
        lines = [dict.fromkeys(KEYS, "nan") | x for x in itertools.compress(lines, has_loss)]
    first = source.get("first_row", 1) - 1
    rows = lines[first : first + source["rows"]]
    if "first_step" in source:  # for logs without steps, or with other ones than the labels
        rows = [x | {"step": i} for i, x in enumerate(rows, source["first_step"])]
    has_norm = any(x.get("gradient_norm", "nan") != "nan" for x in rows)
    keys = {old: new for old, new in KEYS.items() if has_norm or new != "grad_norm"}
    rows = [{new: float(f"{float(x[old]):.6g}") for old, new in keys.items()} for x in rows]
    path.write_text("".join(json.dumps(x) + "\n" for x in rows))


def checksum(lines):
    """A checksum of the numbers in the rows, however they are written."""
    numbers = [[None if x.get(k) is None else float(x[k]) for k in KEYS.values()] for x in lines]
    return hashlib.sha256(json.dumps(numbers).encode()).hexdigest()


def read(folder, name, source, server=""):
    """The lines of a log, whose checksum is compared."""
    paths = [*folder.rglob(f"{name}.jsonl")] or [folder / f"{name}.jsonl"]
    if not paths[0].exists() and server and source.get("path"):
        fetch(name, source, paths[0], server)
    if not paths[0].exists():
        return []
    lines = [json.loads(line) for line in paths[0].open()]
    if checksum(lines) != source["sha256"]:
        print(f"{name}: its checksum differs from sources.json")
    return lines


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--fetch", nargs="?", const=GITHUB, default="", metavar="ADDRESS")
    args = parser.parse_args()
    sources = json.loads((HERE / "sources.json").read_text())
    labels = json.loads((HERE / "labels.json").read_text())
    totals = {rule: np.zeros((4, 2), int) for rule in ("gradclip_jax", *RULES)}
    logs, absent = [], []
    for name, entry in sorted(labels.items()):
        lines = read(args.folder, name, sources[name], args.fetch)
        if not lines:
            absent.append(name)
            continue
        steps = np.array([x["step"] for x in lines])
        columns = [
            np.array([x.get(k) if x.get(k) is not None else np.nan for x in lines], float)
            for k in ("loss", "grad_norm")
        ]
        rows, names = numbered_rows(lines)
        incidents = Detector(names).update(rows)
        found = np.array([x.step for x in incidents], int)
        totals["gradclip_jax"] += (own := count(found, steps, entry))
        for rule, of_values in RULES.items():
            totals[rule] += count(alarms(of_values, columns), steps, entry)
        cells = {"log": name, "class": entry["class"], "rows": len(steps)}
        for key, (part, total) in zip(("incidents", "onsets", "soon", "false"), own, strict=True):
            cells[key] = f"{part} of {total}" if key != "false" else part
        for key, rise in (("action", False), ("on every rise", True)):
            cells[key] = "{} {}".format(*first_action(rows, incidents, rewind_on_rise=rise))
        logs.append(cells)
    print(table(logs))
    rows = []
    for rule, numbers in totals.items():
        (a, b, c), (false, healthy) = (wilson(*x) for x in numbers[:3]), numbers[3]
        cells = {"rule": rule, "obvious incidents": a, "obvious onsets": b, "within 12 rows": c}
        rows.append(cells | {"false events in 1,000 healthy rows": f"{1000 * false / healthy:.2f}"})
    print("", table(rows), f"healthy rows: {healthy:,}; absent: {absent or 'none'}", sep="\n")


if __name__ == "__main__":
    main()
