"""The study: its statistics, its page, and that every problem trains with every kind of method."""

import math
from collections import Counter

import pytest
from benchmarks.study import claims, compare, study
from test_benchmarks import run

from files import ROOT

FOLDER = ROOT / "benchmarks" / "study"
COLUMNS = "problem,method,setting,learning_rate,value,seed,loss,failed"


def losses_of(tmp_path, **by_method):
    rows = [COLUMNS]
    for method, losses in by_method.items():
        rows += [f"p,{method},tuned,0.1,1,{seed},{loss},0" for seed, loss in enumerate(losses)]
    (tmp_path / "tests.csv").write_text("\n".join(rows))
    return compare.Losses(study.Record(tmp_path))


@pytest.mark.slow
def test_the_pages_are_generated_from_the_results():
    from benchmarks.study import report

    for name, text in report.pages(study.Record(FOLDER)).items():
        assert (ROOT / "docs" / name).read_text("utf-8") == text


def test_the_results_are_of_every_pair_and_seed():
    record = study.Record(FOLDER)
    wanted = {(problem.name, method.name) for problem, method in study.pairs()}
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
    corrected = compare.holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.9})
    assert corrected == pytest.approx({"a": 0.04, "b": 0.09, "c": 0.09, "d": 0.9})


@pytest.mark.slow
def test_a_verdict_needs_a_test_and_a_difference(tmp_path):
    base = [1.0 + 0.01 * seed for seed in range(15)]
    losses = losses_of(
        tmp_path,
        fixed=base,
        lower=[0.9 * x for x in base],
        higher=[1.1 * x for x in base],
        near=[1.01 * x for x in base],
        noisy=[x * (1.3 if seed % 2 else 0.8) for seed, x in enumerate(base)],
    )
    found = losses.beside(losses.entries, compare.FIXED)
    verdicts = {entry.method: result.verdict for (_, entry), result in found.items()}
    assert verdicts == {"lower": "better", "higher": "worse", "near": "equal", "noisy": "unclear"}


@pytest.mark.parametrize(
    ("counts", "as_good", "verdict"),
    [
        ({"better": 2, "equal": 1}, False, "repeated"),
        ({"better": 2, "worse": 1}, False, "cannot tell"),
        ({"equal": 2, "better": 1}, False, "not repeated"),
        ({"equal": 2, "unclear": 1}, True, "repeated"),
        ({"unclear": 2, "better": 1}, False, "cannot tell"),
        ({"worse": 2, "better": 1}, True, "not repeated"),
        ({"equal": 1}, False, "cannot tell"),
    ],
)
def test_a_claim_is_repeated_where_most_problems_say_so_and_none_contradicts(
    counts, as_good, verdict
):
    examples = {
        "better": (0.5, 0.01),
        "worse": (2.0, 0.01),
        "equal": (1.0, 1.0),
        "unclear": (2.0, 1.0),
    }
    found = [compare.Comparison(*examples[word]) for word, n in counts.items() for _ in range(n)]
    assert claims.judge(as_good, found) == verdict


@pytest.mark.slow
def test_a_quick_study_trains_every_problem_and_method_and_goes_on_where_it_was(tmp_path):
    results, docs = tmp_path / "results", tmp_path / "docs"
    study_of_few = ("study.study", "--quick", "--out", results)
    run(*study_of_few, "--only", "line, sgd")
    assert "20 done before" in run(*study_of_few)
    run("study.report", "--results", results, "--out", docs)
    assert "| StableAdamW | tuned |" in (docs / "study_results.md").read_text("utf-8")
    assert len(list((docs / "images").glob("study_*.png"))) == 4
