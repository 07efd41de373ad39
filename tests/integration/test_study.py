"""The study: its statistics, its tables, and that every problem trains with every kind of method.

What imports Matplotlib and the models is imported by the test that needs it.
"""

import math
from collections import Counter

import pytest
from test_benchmarks import run

from files import ROOT

pytestmark = pytest.mark.slow

FOLDER = ROOT / "benchmarks" / "study"


def test_the_page_is_generated_from_the_results():
    from benchmarks.study import report, study

    page = report.page(study.Record(FOLDER))
    assert (ROOT / "docs" / "study_results.md").read_text("utf-8") == page


def test_the_results_are_of_every_pair_and_seed():
    from benchmarks.study import study

    record = study.Record(FOLDER)
    wanted = {(problem.name, method.name) for problem, method in study.pairs()}
    former = {"ACClip", "SPAM", "Stable-SPAM", "U-Clip"}  # no longer in the library
    record.tests = [row for row in record.tests if row.method not in former]
    record.tuning = [row for row in record.tuning if row.method not in former]
    assert record.done() == wanted
    seeds = {seed for seeds in study.TEST_SEEDS for seed in seeds}
    for setting in ("tuned", "default"):
        rows = [row for row in record.tests if row.setting == setting]
        assert len(rows) == len(wanted) * len(seeds) >= 5 * len(wanted)
        assert {row.seed for row in rows} == seeds
    assert all(math.isfinite(row.loss) for row in record.tests)
    tried = Counter(row[:2] for row in record.tuning if row.setting == "grid")
    assert tried == Counter({pair: 25 for pair in wanted})
    assert len({row[:5] for row in record.tuning}) == len(record.tuning)


def test_p_values_are_corrected_as_by_holm():
    from benchmarks.study import report

    corrected = report.holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.9})
    assert corrected == pytest.approx({"a": 0.04, "b": 0.09, "c": 0.09, "d": 0.9})


def test_a_quick_study_trains_every_problem_and_method_and_goes_on_where_it_was(tmp_path):
    results, docs = tmp_path / "results", tmp_path / "docs"
    study_of_few = ("study.study", "--quick", "--out", results)
    run(*study_of_few, "--only", "line, sgd")
    assert "18 done before" in run(*study_of_few)
    run("study.report", "--results", results, "--out", docs)
    assert "| StableAdamW | tuned |" in (docs / "study_results.md").read_text("utf-8")
    assert len(list((docs / "images").glob("study_*.png"))) == 2
