"""Generate docs/study.md, docs/study_results.md and their plots from the CSV files of the study.

The prose is in page.md, the frame of the tables in results.md; all numbers and tables are computed.
"""

import argparse
import itertools
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np

from benchmarks._report import THEME
from benchmarks.study.claims import CLAIMS, check, count
from benchmarks.study.compare import (
    FIXED,
    RECORDED,
    Entry,
    Losses,
    PercentileRatio,
    geometric_mean,
    percentile_ratios,
    sensitivity,
)
from benchmarks.study.methods import METHODS
from benchmarks.study.plots import draw_rates, draw_ratios, draw_sensitivity
from benchmarks.study.study import FOLDER, TUNING_SEEDS, Record

DOCS = FOLDER.parents[1] / "docs"
PAGES = {"study.md": "page.md", "study_results.md": "results.md"}
SWEEPS = ["tanh RNN, sgd", "LSTM, adam", "GPT, adam"]


def markdown(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


class Summary(NamedTuple):
    """An entry beside the best fixed threshold, over all problems it ran on."""

    entry: Entry
    problems: int
    better: int
    equal: int
    worse: int
    unclear: int
    mean: float  # of the ratios of the losses, geometric
    largest: float
    where: str
    failed: int
    runs: int
    spread: float  # over the range of the hyperparameter, median of the problems
    above_recorded: int  # problems on which it is better than a threshold from recorded norms
    below_recorded: int


def summarise(record: Record, losses: Losses) -> list[Summary]:
    compared, summaries = losses.beside(losses.entries, FIXED), []
    recorded = losses.beside(losses.entries, RECORDED)
    for entry in losses.entries:
        found = {p: c for (p, e), c in compared.items() if e == entry}
        if found:
            verdicts, ratios = count(found.values()), {p: c.ratio for p, c in found.items()}
            where = max(ratios, key=ratios.__getitem__)
            beside_recorded = count(c for (_, e), c in recorded.items() if e == entry)
            spreads = [sensitivity(record, problem, entry.method).max() for problem in found]
            summaries.append(
                Summary(
                    entry, len(found), *(verdicts[word] for word in Summary._fields[2:6]),
                    geometric_mean(ratios.values()), ratios[where], where,
                    sum(losses.failed(problem, entry) for problem in found),
                    sum(len(losses.of(problem, entry)) for problem in found),
                    float(np.median(spreads)),
                    *(beside_recorded[word] for word in ("better", "worse")),
                )
            )  # fmt: skip
    return summaries


def summary_table(summaries: list[Summary]) -> str:
    rows = [
        [*x.entry, *x[1:6], f"{x.mean:.2f}", f"{x.largest:.2f} ({x.where})"]
        + [f"{x.failed} of {x.runs}", f"{x.spread:.2f}" if x.entry.setting == "tuned" else ""]
        + [f"{x.above_recorded}, {x.below_recorded}" if x.entry != RECORDED else ""]
        for x in summaries
    ]
    head = ["method", "setting", *Summary._fields[1:6]]
    head += ["mean ratio", "largest ratio", "failed runs", "spread over its range"]
    head += ["better, worse than recorded"]
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


def percentile_table(record: Record, losses: Losses, method: str) -> str:
    """Each percentile, with the rate that is best for it and with the best rate of no clipping."""
    rows: dict[float, list[PercentileRatio]] = {}
    for problem in losses.problems:
        for value, found in percentile_ratios(record, problem, method).items():
            rows.setdefault(value, []).append(found)
    lines = []
    for value, found in rows.items():
        tuned, kept = ([getattr(x, field) for x in found] for field in ("tuned", "kept"))
        line: list[object] = [f"{value:g}"]
        for ratios in (tuned, kept):
            for optimizer in ("sgd", "adam"):
                chosen = [r for r, x in zip(ratios, found, strict=True) if x.optimizer == optimizer]
                line += [f"{f(chosen):.2f}" if chosen else "" for f in (geometric_mean, max)]
        lines.append(line)
    sides = [f"{rate} rate, {name}" for rate in ("best", "same") for name in ("SGD", "Adam")]
    head = ["percentile", *itertools.chain(*((side, "largest") for side in sides))]
    return markdown(head, lines)


def claim_table(losses: Losses) -> str:
    rows = []
    for claim in CLAIMS:
        verdict, found = check(claim, losses)
        counts = ", ".join(f"{found[word]} {word}" for word in found)
        entry, other = (f"{e.method}, {e.setting}" for e in (claim.entry, claim.other))
        rows.append([claim.source, claim.words, f"{entry} / {other}", counts, verdict])
    return markdown(["source", "claim", "compared here", "on how many problems", "verdict"], rows)


def pages(record: Record) -> dict[str, str]:
    """The text of each page, by file name."""
    losses = Losses(record)
    summaries = summarise(record, losses)
    facts: dict[str, object] = json.loads((record.folder / "about.json").read_text())
    facts |= {
        "runs": f"{len(TUNING_SEEDS) * len(record.tuning) + len(record.tests):,}",
        "problems": len(losses.problems),
        "methods": len({entry.method for entry in losses.entries}),
        "summary": summary_table(summaries),
        "claims": claim_table(losses),
        "recorded_percentiles": percentile_table(record, losses, "recorded"),
        "autoclip_percentiles": percentile_table(record, losses, "AutoClip"),
        "choices": choice_table(record, losses),
    }
    for found in summaries:  # for the sentences: {{AutoClip.default.mean}}
        for field, value in found._asdict().items():
            text = f"{value:.2f}" if isinstance(value, float) else value
            facts[".".join((*found.entry, field))] = text
    for optimizer, setting in itertools.product(("sgd", "adam"), ("tuned", "default")):
        facts[f"{optimizer}_{setting}"] = loss_table(losses, optimizer, setting)

    def value_of(name: str) -> str:
        return str(facts[" ".join(name.split())])  # a line may end within {{fixed.a tenth.mean}}

    found: dict[str, str] = {}
    for page, template in PAGES.items():
        text = (FOLDER / template).read_text(encoding="utf-8")
        # A line of the template may end within a placeholder, such as {{fixed.a tenth.mean}}.
        found[page] = re.sub(
            r"{{(.+?)}}",
            lambda match: str(facts[" ".join(match[1].split())]),
            text,
            flags=re.DOTALL,
        )
    return found


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
    for name, text in pages(record).items():
        (args.out / name).write_text(text, encoding="utf-8")
    with matplotlib.rc_context(THEME):
        draw(record, args.out / "images")
    print(f"Written: {args.out / 'study.md'}")


if __name__ == "__main__":
    main()
