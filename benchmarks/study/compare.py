"""Paired comparisons over the test seeds."""

import functools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from scipy.stats import wilcoxon

from benchmarks.study.study import Record

SIGNIFICANT = 0.05
EQUAL = 0.02  # losses this near to each other count as the same


class Entry(NamedTuple):
    """A method as it was set: the settings are those of tests.csv."""

    method: str
    setting: str


NONE, FIXED, RECORDED = (Entry(method, "tuned") for method in ("none", "fixed", "recorded"))


class Comparison(NamedTuple):
    """How an entry did beside another on one problem."""

    ratio: float  # median over the seeds of the quotient of the two losses
    p_value: float  # of Wilcoxon's signed-rank test, corrected after Holm

    @property
    def verdict(self) -> str:
        if self.p_value < SIGNIFICANT and abs(self.ratio - 1) > EQUAL:
            return "better" if self.ratio < 1 else "worse"
        return "equal" if abs(self.ratio - 1) <= EQUAL else "unclear"


class Losses:
    """Test losses by problem and entry, one for each test seed."""

    def __init__(self, record: Record):
        rows: dict[tuple[str, Entry], dict[int, tuple[float, int]]] = {}
        for row in record.tests:
            entry = Entry(row.method, row.setting)
            rows.setdefault((row.problem, entry), {})[row.seed] = row.loss, row.failed
        self._rows = rows
        self.problems = list(dict.fromkeys(problem for problem, _ in rows))
        self.entries = list(dict.fromkeys(entry for _, entry in rows))

    def of(self, problem: str, entry: Entry) -> np.ndarray | None:
        """Sorted by seed; None if this was not run."""
        found = self._rows.get((problem, entry))
        return None if found is None else np.array([found[seed][0] for seed in sorted(found)])

    def failed(self, problem: str, entry: Entry) -> int:
        return sum(failed for _, failed in self._rows.get((problem, entry), {}).values())

    def compare(
        self, pairs: Iterable[tuple[str, Entry, Entry]]
    ) -> dict[tuple[str, Entry, Entry], Comparison]:
        """Compares first with second entry, on each problem; one family of tests for Holm."""
        ratios, p_values = {}, {}
        for problem, entry, other in pairs:
            mine, theirs = self.of(problem, entry), self.of(problem, other)
            if mine is not None and theirs is not None:
                logs = np.log(mine) - np.log(theirs)
                key = problem, entry, other
                ratios[key] = float(np.exp(np.median(logs)))
                p_values[key] = float(wilcoxon(logs).pvalue) if logs.any() else 1.0
        corrected = holm(p_values)
        return {key: Comparison(ratio, corrected[key]) for key, ratio in ratios.items()}

    def beside(self, entries: list[Entry], other: Entry) -> dict[tuple[str, Entry], Comparison]:
        """Each entry beside `other`, corrected for their number within each problem."""
        found = {}
        for problem in self.problems:
            rows = self.compare((problem, entry, other) for entry in entries if entry != other)
            found |= {(problem, entry): result for (_, entry, _), result in rows.items()}
        return found


def holm(p_values: dict) -> dict:
    """Holm's step-down correction for the number of tests."""
    ordered, corrected, largest = sorted(p_values, key=p_values.__getitem__), {}, 0.0
    for rank, key in enumerate(ordered):
        largest = max(largest, min(1.0, (len(ordered) - rank) * p_values[key]))
        corrected[key] = largest
    return corrected


def geometric_mean(values: Iterable[float]) -> float:
    return float(np.exp(np.mean(np.log(list(values)))))


@functools.cache
def _grid(record: Record) -> dict[tuple[str, str], list]:
    found: dict[tuple[str, str], list] = {}
    for row in record.tuning:
        if row.setting == "grid":
            found.setdefault((row.problem, row.method), []).append(row)
    return found


def sensitivity(record: Record, problem: str, method: str) -> np.ndarray:
    """Medians over the range of the hyperparameter divided by the lowest, at the best rate of all.

    Empty if this was not run.
    """
    rows = _grid(record).get((problem, method), [])
    best = min(rows, key=lambda row: row.median, default=None)
    medians = [row.median for row in rows if row.learning_rate == best.learning_rate]
    return np.array(medians) / best.median if best else np.array([])


def best_by_rate(record: Record, problem: str, method: str) -> tuple[list[float], list[float]]:
    """Learning rates, and for each the median at the best value of the hyperparameter."""
    by_rate: dict[float, list[float]] = {}
    for row in _grid(record).get((problem, method), []):
        if method == "none" and row.value != 1:
            continue  # it multiplies the rate
        by_rate.setdefault(row.learning_rate, []).append(row.median)
    return list(by_rate), [min(medians) for medians in by_rate.values()]


class PercentileRatio(NamedTuple):
    """What a percentile of the norms gives as a threshold, on one problem."""

    optimizer: str
    tuned: float  # the median loss at its best rate, divided by the best of all percentiles
    kept: float  # at the best rate of no clipping, divided by the loss of no clipping


def percentile_ratios(record: Record, problem: str, method: str) -> dict[float, PercentileRatio]:
    """By percentile, over the tuning seeds; {} if this was not run, or not without clipping."""
    rows = _grid(record).get((problem, method), [])
    unclipped = [row for row in _grid(record).get((problem, "none"), []) if row.value == 1]
    if not rows or not unclipped:
        return {}
    without = min(unclipped, key=lambda row: row.median)
    best, found = min(row.median for row in rows), {}
    for value in sorted({row.value for row in rows}):
        by_rate = {row.learning_rate: row.median for row in rows if row.value == value}
        kept = by_rate[without.learning_rate] / without.median
        optimizer = problem.rsplit(", ")[-1]
        found[value] = PercentileRatio(optimizer, min(by_rate.values()) / best, kept)
    return found
