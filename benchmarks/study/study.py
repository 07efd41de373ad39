"""Trains every problem with every method, tuned alike, and writes down how it ended.

For each pair, five learning rates times five values of the method's hyperparameter are tried with
five seeds. The best pair, and the default with its best learning rate, are then trained with
fifteen other seeds: only those are compared. A stopped study goes on where it was. The page and its
plots are made by report.py.
"""

import argparse
import concurrent.futures
import csv
import itertools
import multiprocessing
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from benchmarks.study.methods import METHODS, Method
from benchmarks.study.problems import PROBLEMS, Problem
from benchmarks.study.train import Choice, Result, Trainer, usual_norms

FOLDER = Path(__file__).parent
QUICK = ("fixed", "AutoClip", "StableAdamW")
TUNING_SEEDS = (0, 1, 2, 3, 4)
TEST_SEEDS = tuple(tuple(range(first, first + 5)) for first in (10, 15, 20))


class Tuning(NamedTuple):
    """A row of tuning.csv: one choice, the median and quartiles over the tuning seeds."""

    problem: str
    method: str
    setting: str  # "grid" or "default"
    learning_rate: float
    value: float
    median: float
    low: float
    high: float
    failed: int


class Test(NamedTuple):
    """A row of tests.csv: one choice with one test seed."""

    problem: str
    method: str
    setting: str  # "tuned", "default", and of a fixed threshold "a tenth" and "tenfold"
    learning_rate: float
    value: float
    seed: int
    loss: float
    failed: int


def pairs() -> list[tuple[Problem, Method]]:
    product = itertools.product(PROBLEMS, METHODS)
    return [
        (problem, method) for problem, method in product if problem.optimizer in method.optimizers
    ]


def run_pair(problem_name: str, method_name: str, quick: bool) -> tuple[list[Tuning], list[Test]]:
    """Tunes and tests; in a process of its own, which finds problem and method by name."""
    problem = next(problem for problem in PROBLEMS if problem.name == problem_name)
    method = next(method for method in METHODS if method.name == method_name)
    problem = problem._replace(steps=4) if quick else problem
    trainer = Trainer(problem, method)
    values = method.values(usual_norms(problem, TUNING_SEEDS))
    grid = [Choice(*pair) for pair in itertools.product(problem.learning_rates, values)]
    defaults = [Choice(rate, method.default) for rate in problem.learning_rates]
    choices = list(dict.fromkeys(grid + defaults))  # most defaults are part of the grid
    results = dict(zip(choices, trainer(choices, TUNING_SEEDS), strict=True))
    tuning = [
        tuning_row(problem, method, "grid" if choice in grid else "default", choice, found)
        for choice, found in results.items()
    ]
    settings = {"tuned": best(grid, results), "default": best(defaults, results)}
    if method.name == "fixed":
        rate, value = settings["tuned"]
        settings |= {"a tenth": Choice(rate, value / 10), "tenfold": Choice(rate, value * 10)}
    tests: list[Test] = []
    for seeds in TEST_SEEDS[: 1 if quick else None]:
        found = trainer(list(settings.values()), seeds)
        for (setting, choice), losses in zip(settings.items(), found, strict=True):
            tests += [
                Test(problem_name, method.name, setting, *choice, seed, loss, int(failed))
                for seed, (loss, failed) in zip(seeds, losses, strict=True)
            ]
    return tuning, tests


def best(choices: list[Choice], results: dict[Choice, list[Result]]) -> Choice:
    """The lowest median; of equals the smaller learning rate."""
    return min(choices, key=lambda choice: np.median([result.loss for result in results[choice]]))


def tuning_row(
    problem: Problem, method: Method, setting: str, choice: Choice, results: list[Result]
) -> Tuning:
    losses = [result.loss for result in results]
    low, median, high = np.percentile(losses, [25, 50, 75])
    failed = sum(result.failed for result in results)
    return Tuning(problem.name, method.name, setting, *choice, median, low, high, failed)


# Files


def read_rows(path: Path, kind: Any) -> list[Any]:
    """The rows of a CSV file, each field as `kind` annotates it; [] if there is no file."""
    if not path.exists():
        return []
    types = kind.__annotations__
    with path.open(newline="", encoding="utf-8") as file:
        return [
            kind(**{field: types[field](word) for field, word in row.items()})
            for row in csv.DictReader(file)
        ]


def write_rows(path: Path, rows: list[Any]) -> None:
    """All at once: a study that is stopped here leaves the file as it was."""
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(rows[0]._fields)
        for row in rows:
            writer.writerow([f"{x:.6g}" if isinstance(x, float) else x for x in row])
    unfinished.replace(path)


class Record:
    """The results in a folder, in the order of the study however they arrive."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.tuning: list[Tuning] = read_rows(folder / "tuning.csv", Tuning)
        self.tests: list[Test] = read_rows(folder / "tests.csv", Test)

    def done(self) -> set[tuple[str, str]]:
        return {(row.problem, row.method) for row in self.tests}

    def add(self, tuning: list[Tuning], tests: list[Test]) -> None:
        order = {(p.name, m.name): i for i, (p, m) in enumerate(pairs())}
        pair = tests[0][:2]

        def with_new(rows: list[Any], new: list[Any]) -> list[Any]:
            others = [row for row in rows if row[:2] != pair and row[:2] in order]
            return sorted(others + new, key=lambda row: order[row[:2]])

        self.tuning, self.tests = with_new(self.tuning, tuning), with_new(self.tests, tests)
        write_rows(self.folder / "tuning.csv", self.tuning)
        write_rows(self.folder / "tests.csv", self.tests)


# The command line


def read_arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, default=FOLDER, metavar="DIR", help="folder of the CSV files")
    add("--only", default="", metavar="WORDS", help="problems or methods with these words in them")
    add("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes")
    add("--quick", action="store_true", help="does it run? 4 steps, few pairs")
    args = parser.parse_args(words)
    if args.quick and args.out == FOLDER:
        parser.error("argument --quick: needs --out, so that it does not replace the real results")
    args.out.mkdir(parents=True, exist_ok=True)
    return args


def main(words: list[str] | None = None) -> None:
    args = read_arguments(words)
    chosen = [(p.name, m.name) for p, m in pairs() if args.only in p.name or args.only in m.name]
    if args.quick:
        chosen = [pair for pair in chosen if "line" in pair[0] and pair[1] in QUICK]
    record = Record(args.out)
    left = [pair for pair in chosen if pair not in record.done()]
    print(f"{len(chosen)} pairs of problem and method, {len(chosen) - len(left)} done before.")
    # Each process has one thread to compute with, or they would get in each other's way.
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"
    )
    context = multiprocessing.get_context("spawn")
    with (
        concurrent.futures.ProcessPoolExecutor(args.jobs, context) as pool,
        tqdm(total=len(left), unit="pair", smoothing=0) as bar,
    ):
        futures = {pool.submit(run_pair, *pair, args.quick): pair for pair in left}
        try:
            for future in concurrent.futures.as_completed(futures):
                record.add(*future.result())
                bar.set_postfix_str(", ".join(futures[future]), refresh=False)
                bar.update()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    print(f"Written: {args.out}/tests.csv")
    print("The page and its plots: python -m benchmarks.study.report")


if __name__ == "__main__":
    main()
