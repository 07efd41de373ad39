"""Makes the page of the study, docs/study.md, and its plots from the CSV files beside this script.

What is written by hand stands in page.md; every number and table in it is computed here.
"""

import argparse
import itertools
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from claims import CLAIMS, check, count
from compare import FIXED, Entry, Losses, geometric_mean, sensitivity
from methods import METHODS
from plots import draw_rates, draw_ratios, draw_sensitivity
from study import FOLDER, Record

DOCS = FOLDER.parents[1] / "docs"
SWEEPS = ["tanh RNN, sgd", "LSTM, adam", "GPT, adam"]


def markdown(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def summary_table(record: Record, losses: Losses) -> str:
    """Each entry beside the best fixed threshold, over all problems."""
    compared = losses.beside(losses.entries, FIXED)
    rows = []
    for entry in losses.entries:
        found = {p: c for (p, e), c in compared.items() if e == entry}
        if not found:
            continue
        verdicts, ratios = count(found.values()), {p: c.ratio for p, c in found.items()}
        worst = max(ratios, key=ratios.__getitem__)
        failed = sum(losses.failed(problem, entry) for problem in found)
        spreads = [sensitivity(record, problem, entry.method) for problem in found]
        row = [entry.method, entry.setting, len(found)]
        row += [verdicts[word] for word in ("better", "equal", "worse", "unclear")]
        row += [f"{geometric_mean(ratios.values()):.2f}", f"{ratios[worst]:.2f} ({worst})"]
        row += [f"{failed} of {sum(len(losses.of(p, entry)) for p in found)}"]
        tuned = entry.setting == "tuned"
        row += [f"{np.median([s.spread for s in spreads if s]):.2f}" if tuned else ""]
        rows.append(row)
    head = ["method", "setting", "problems", "better", "equal", "worse", "unclear"]
    head += ["mean ratio", "largest ratio", "failed runs", "spread over its range"]
    return markdown(head, rows)


def loss_table(losses: Losses, optimizer: str, setting: str) -> str:
    """Median and quartiles of the test loss; in bold the lowest of a problem."""
    problems = [problem for problem in losses.problems if problem.endswith(optimizer)]
    entries = [e for e in losses.entries if e.setting == setting]
    entries = [e for e in entries if any(losses.of(p, e) is not None for p in problems)]
    medians = {
        (p, e): float(np.median(found))
        for p, e in itertools.product(problems, entries)
        if (found := losses.of(p, e)) is not None
    }
    lowest = {p: min(m for (q, _), m in medians.items() if q == p) for p in problems}

    def cell(problem: str, entry: Entry) -> str:
        if (problem, entry) not in medians:
            return ""
        low, median, high = np.percentile(losses.of(problem, entry), [25, 50, 75])
        failed = losses.failed(problem, entry)
        text = f"{median:.3g}"
        text = f"**{text}**" if medians[problem, entry] == lowest[problem] else text
        return f"{text} ({low:.3g}, {high:.3g})" + (f", {failed} failed" if failed else "")

    head = ["", *(problem.removesuffix(f", {optimizer}") for problem in problems)]
    return markdown(head, [[e.method, *(cell(p, e) for p in problems)] for e in entries])


def choice_table(record: Record, losses: Losses) -> str:
    """What the tuning chose."""
    chosen: dict[tuple[str, str], tuple[float, float]] = {}
    for row in record.tests:
        if row.setting == "tuned":
            chosen[row.problem, row.method] = row.learning_rate, row.value
    methods = [method for method in METHODS if any(m == method.name for _, m in chosen)]
    rows = []
    for method in methods:
        cells = [chosen.get((problem, method.name)) for problem in losses.problems]
        texts = [f"{cell[0]:.2g}, {cell[1]:.3g}" if cell else "" for cell in cells]
        rows.append([method.name, method.hyperparameter, f"{method.default:g}", *texts])
    return markdown(["method", "hyperparameter", "default", *losses.problems], rows)


def percentile_table(record: Record, losses: Losses) -> str:
    """Each percentile of recorded norms as the fixed threshold, beside the best percentile."""
    ratios: dict[float, dict[str, list[float]]] = {}
    for problem in losses.problems:
        rows = [r for r in record.tuning if r.problem == problem and r.method == "recorded"]
        best = min((row.median for row in rows), default=np.nan)
        for value in sorted({row.value for row in rows}):
            at_best_rate = min(row.median for row in rows if row.value == value)
            for key in ("all", problem.rsplit(", ")[-1]):
                ratios.setdefault(value, {}).setdefault(key, []).append(at_best_rate / best)
    rows = [
        [f"{value:g}", *(f"{geometric_mean(found[key]):.3f}" for key in ("sgd", "adam", "all"))]
        + [f"{max(found['all']):.2f}", sum(ratio <= 1.02 for ratio in found["all"])]
        for value, found in ratios.items()
    ]
    head = ["percentile", "mean ratio, SGD", "mean ratio, Adam", "mean ratio", "largest ratio"]
    return markdown([*head, "problems within 2 % of the best"], rows)


def claim_table(losses: Losses) -> str:
    rows = []
    for claim in CLAIMS:
        verdict, found = check(claim, losses)
        counts = ", ".join(f"{found[word]} {word}" for word in found)
        entry, other = (f"{e.method}, {e.setting}" for e in (claim.entry, claim.other))
        rows.append([claim.source, claim.words, f"{entry} / {other}", counts, verdict])
    return markdown(["source", "claim", "compared here", "on how many problems", "verdict"], rows)


def page(record: Record) -> str:
    losses = Losses(record)
    facts: dict[str, object] = json.loads((record.folder / "about.json").read_text())
    facts |= {
        "runs": f"{sum(5 for _ in record.tuning) + len(record.tests):,}",
        "problems": len(losses.problems),
        "methods": len({entry.method for entry in losses.entries}),
        "summary": summary_table(record, losses),
        "claims": claim_table(losses),
        "percentiles": percentile_table(record, losses),
        "choices": choice_table(record, losses),
    }
    for optimizer, setting in itertools.product(("sgd", "adam"), ("tuned", "default")):
        facts[f"{optimizer}_{setting}"] = loss_table(losses, optimizer, setting)
    text = (FOLDER / "page.md").read_text(encoding="utf-8")
    for name, value in facts.items():
        text = text.replace("{{" + name + "}}", str(value))
    return text


def draw(record: Record, folder: Path) -> None:
    losses = Losses(record)
    methods = list(dict.fromkeys(entry.method for entry in losses.entries))
    for setting in ("tuned", "default"):
        draw_ratios(folder / f"study_{setting}.png", losses, methods, setting)
    draw_sensitivity(folder / "study_sensitivity.png", record, losses.problems, methods)
    sweeps = [problem for problem in SWEEPS if problem in losses.problems]
    if sweeps:
        draw_rates(folder / "study_rates.png", record, sweeps)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=FOLDER, help="folder of the CSV files")
    parser.add_argument("--out", type=Path, default=DOCS, help="folder of the page")
    args = parser.parse_args(words)
    record = Record(args.results)
    if not record.tests:
        parser.error(f"argument --results: no tests.csv in {args.results}; run study.py first")
    (args.out / "images").mkdir(parents=True, exist_ok=True)
    (args.out / "study.md").write_text(page(record), encoding="utf-8")
    draw(record, args.out / "images")
    print(f"Written: {args.out / 'study.md'}")


if __name__ == "__main__":
    main()
