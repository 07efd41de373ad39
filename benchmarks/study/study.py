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
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from benchmarks.study.methods import METHODS, Method
from benchmarks.study.problems import PROBLEMS, Problem
from benchmarks.study.train import Choice, Result, Trainer, usual_norms

FOLDER = Path(__file__).parent
QUICK = ("fixed", "StableAdamW")
TUNING_SEEDS = (0, 1, 2, 3, 4)
TEST_SEEDS = tuple(tuple(range(first, first + 5)) for first in (10, 15, 20))


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


def run_pair(problem_name: str, method_name: str, quick: bool) -> list[Test]:
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
    return tests


def best(choices: list[Choice], results: dict[Choice, list[Result]]) -> Choice:
    """The lowest median; of equals the smaller learning rate."""
    return min(choices, key=lambda choice: np.median([result.loss for result in results[choice]]))


# Files


class Record:
    """The results in a folder, in the order of the study however they arrive."""

    def __init__(self, folder: Path):
        self.path = folder / "tests.csv"
        self.tests: list[Test] = []
        if self.path.exists():
            types = Test.__annotations__
            with self.path.open(newline="", encoding="utf-8") as file:
                for row in csv.DictReader(file):
                    self.tests.append(Test(**{name: types[name](x) for name, x in row.items()}))

    def done(self) -> set[tuple[str, str]]:
        return {row[:2] for row in self.tests}

    def add(self, tests: list[Test]) -> None:
        order = {(p.name, m.name): i for i, (p, m) in enumerate(pairs())}
        others = [row for row in self.tests if row[:2] != tests[0][:2] and row[:2] in order]
        self.tests = sorted(others + tests, key=lambda row: order[row[:2]])
        # All at once: a study that is stopped here leaves the file as it was.
        unfinished = self.path.with_suffix(".unfinished")
        with unfinished.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(Test._fields)
            for row in self.tests:
                writer.writerow([f"{x:.6g}" if isinstance(x, float) else x for x in row])
        unfinished.replace(self.path)


# The command line


def read_arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, default=FOLDER, metavar="DIR", help="folder of tests.csv")
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
                record.add(future.result())
                bar.set_postfix_str(", ".join(futures[future]), refresh=False)
                bar.update()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    print(f"Written: {args.out}/tests.csv")
    print("The page and its plots: python -m benchmarks.study.report")


if __name__ == "__main__":
    main()
