"""Write docs/study_results.md and draw its figures from the CSV files of the study."""

import argparse
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from scipy.stats import wilcoxon

from benchmarks import _report
from benchmarks.study.study import FOLDER, Record

DOCS = FOLDER.parents[1] / "docs"
SIGNIFICANT = 0.05
EQUAL = 0.02  # losses that differ by less are equal
SETTINGS = {"tuned": "with tuned hyperparameters", "default": "with default hyperparameters"}


class Entry(NamedTuple):
    """A method with one of the settings of tests.csv."""

    method: str
    setting: str


FIXED = Entry("fixed", "tuned")


class Comparison(NamedTuple):
    """The losses of an entry on one problem, divided by those of the best fixed threshold."""

    ratio: float  # median over the seeds
    p_value: float  # of Wilcoxon's signed-rank test, corrected as by Holm

    @property
    def verdict(self) -> str:
        if abs(self.ratio - 1) <= EQUAL:
            return "equal"
        if self.p_value >= SIGNIFICANT:
            return "unclear"
        return "better" if self.ratio < 1 else "worse"


class Losses:
    """Test losses by problem and entry, one for each seed; failed runs by the same keys."""

    def __init__(self, record: Record):
        rows = sorted(record.tests, key=lambda row: row.seed)
        self.losses: dict[tuple[str, Entry], list[float]] = {}
        self.failed: Counter[tuple[str, Entry]] = Counter()
        for row in rows:
            key = row.problem, Entry(row.method, row.setting)
            self.losses.setdefault(key, []).append(row.loss)
            self.failed[key] += row.failed
        order = [(row.problem, Entry(row.method, row.setting)) for row in record.tests]
        self.problems = list(dict.fromkeys(problem for problem, _ in order))
        self.entries = list(dict.fromkeys(entry for _, entry in order))

    def compare(self, problem: str) -> dict[Entry, Comparison]:
        """Compare each entry with the best fixed threshold on one problem."""
        ratios, p_values = {}, {}
        for entry in self.entries:
            if entry != FIXED and (problem, entry) in self.losses:
                pair = self.losses[problem, entry], self.losses[problem, FIXED]
                logs = np.subtract(*np.log(pair))
                ratios[entry] = float(np.exp(np.median(logs)))
                p_values[entry] = float(wilcoxon(logs).pvalue) if logs.any() else 1.0
        corrected = holm(p_values)
        return {entry: Comparison(ratio, corrected[entry]) for entry, ratio in ratios.items()}


def holm(p_values: dict) -> dict:
    """Correct p-values for the number of tests by Holm's step-down method."""
    corrected, largest = {}, 0.0
    for rank, key in enumerate(sorted(p_values, key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[key]))
        corrected[key] = largest
    return corrected


Compared = dict[str, dict[Entry, Comparison]]


def summary_rows(losses: Losses, compared: Compared) -> Iterable[dict[str, object]]:
    """Yield a row for each entry: its verdicts and ratios over all problems."""
    for entry in losses.entries:
        found = {p: rows[entry] for p, rows in compared.items() if entry in rows}
        if found:
            verdicts = Counter(x.verdict for x in found.values())
            ratios = {p: x.ratio for p, x in found.items()}
            worst = max(ratios, key=ratios.__getitem__)
            runs = sum(len(losses.losses[p, entry]) for p in found)
            yield {
                **entry._asdict(),
                "problems": len(found),
                **{word: verdicts[word] for word in ("better", "equal", "worse", "unclear")},
                "mean ratio": f"{np.exp(np.mean(np.log(list(ratios.values())))):.2f}",
                "largest ratio": f"{ratios[worst]:.2f} ({worst})",
                "failed runs": f"{sum(losses.failed[p, entry] for p in found)} of {runs}",
            }


def loss_rows(losses: Losses, optimizer: str, setting: str) -> Iterable[dict[str, object]]:
    """Yield a row for each method: the median and quartiles of its test loss on each problem."""
    problems = [problem for problem in losses.problems if problem.endswith(optimizer)]
    for entry in losses.entries:
        row: dict[str, object] = {"method": entry.method}
        for problem in problems:
            found = losses.losses.get((problem, entry))
            text = ""
            if found:
                low, median, high = np.percentile(found, [25, 50, 75])
                text = f"{median:.3g} ({low:.3g}, {high:.3g})"
            row[problem.removesuffix(f", {optimizer}")] = text
        if entry.setting == setting and any(list(row.values())[1:]):
            yield row


def page(record: Record) -> str:
    """Return the text of docs/study_results.md."""
    losses = Losses(record)
    compared = {problem: losses.compare(problem) for problem in losses.problems}
    sections = {"Compared with the best fixed threshold": summary_rows(losses, compared)}
    for setting, words in SETTINGS.items():
        for name, optimizer in (("SGD", "sgd"), ("Adam", "adam")):
            sections[f"Test losses of {name}, {words}"] = loss_rows(losses, optimizer, setting)
    tables = [f"## {title}\n\n{_report.table(list(rows))}\n" for title, rows in sections.items()]
    head = "# Tables of the study\n\n<!-- Generated by `make study`; do not edit. -->\n\n"
    head += "The conclusions from these tables are in the [study](study.md).\n\n"
    return head + "\n".join(tables)


def draw(path: Path, losses: Losses, setting: str) -> None:
    """Draw the loss of every method divided by that of the best fixed threshold."""
    entries = [x for x in losses.entries if x.setting == setting and x != FIXED]
    ratios = np.full((len(entries), len(losses.problems)), np.nan)
    for j, problem in enumerate(losses.problems):
        for entry, found in losses.compare(problem).items():
            if entry in entries:
                ratios[entries.index(entry), j] = found.ratio
    # As wide as the page, where 100 pixels are an inch: the numbers have the size of its tables.
    figure = Figure(figsize=(7.6, 9), layout="constrained")
    axes = figure.subplots()
    shown = np.log2(ratios)
    image = axes.imshow(shown, cmap="RdBu_r", norm=TwoSlopeNorm(0, -1, 3), aspect="auto")
    for (i, j), ratio in np.ndenumerate(ratios):
        if np.isfinite(ratio):
            color = "white" if not -0.8 < shown[i, j] < 1.8 else "black"
            text = f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"
            axes.text(j, i, text, ha="center", va="center", fontsize=7.5, color=color)
    axes.set_yticks(range(len(entries)), [entry.method for entry in entries])
    axes.set_xticks(range(len(losses.problems)), losses.problems, rotation=90)
    options = {"location": "bottom", "shrink": 0.6, "aspect": 40}
    bar = figure.colorbar(image, ax=axes, ticks=[-1, 0, 1, 2, 3], **options)
    bar.ax.set_xticklabels(["1/2", "1", "2", "4", "8"])
    bar.set_label("test loss divided by that of the best fixed threshold")
    axes.set_title(f"Methods, {setting}: median over the seeds (blue is better, empty: not run)")
    figure.savefig(path, dpi=160)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=FOLDER, help="folder of the CSV files")
    parser.add_argument("--out", type=Path, default=DOCS, help="folder of the page")
    args = parser.parse_args(words)
    record = Record(args.results)
    if not record.tests:
        parser.error(f"argument --results: no tests.csv in {args.results}; run study.py first")
    (args.out / "images").mkdir(parents=True, exist_ok=True)
    (args.out / "study_results.md").write_text(page(record), encoding="utf-8")
    with matplotlib.rc_context(_report.THEME):
        for setting in SETTINGS:
            draw(args.out / "images" / f"study_{setting}.png", Losses(record), setting)
    print(f"Written: {args.out / 'study_results.md'}")


if __name__ == "__main__":
    main()
