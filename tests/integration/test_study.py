"""The study: its statistics, its tables, and that every problem and method can be traced.

What imports Matplotlib and the models is imported by the test that needs it.
"""

import jax
import pytest
from test_benchmarks import run

from files import ROOT

pytestmark = pytest.mark.slow

FOLDER = ROOT / "benchmarks" / "study"


def test_the_page_is_generated_from_the_results():
    from benchmarks.study import report, study

    page = report.page(study.Record(FOLDER))
    assert (ROOT / "docs" / "study_results.md").read_text("utf-8") == page


def test_p_values_are_corrected_as_by_holm():
    from benchmarks.study import report

    corrected = report.holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.9})
    assert corrected == pytest.approx({"a": 0.04, "b": 0.09, "c": 0.09, "d": 0.9})


def test_every_problem_and_every_method_can_be_traced():
    from benchmarks.study import study, train

    pairs = study.pairs()[::-1]
    chosen = {method.name: (problem, method) for problem, method in pairs}
    chosen |= {problem.name: (problem, method) for problem, method in pairs}
    for problem, method in chosen.values():
        trainer = train.Trainer(problem, method)
        starts = jax.eval_shape(lambda p=problem: train.make_starts.__wrapped__(p, (0, 1)))
        choices = train.Choice(*[jax.ShapeDtypeStruct((3,), "float32")] * 2)
        assert jax.eval_shape(trainer.program, trainer.test, starts, choices).shape == (2, 3)


def test_a_quick_study_goes_on_where_it_was_and_is_reported(tmp_path):
    results, docs = tmp_path / "results", tmp_path / "docs"
    study_of_few = ("study.study", "--quick", "--out", results)
    run(*study_of_few, "--only", "line, sgd")
    assert "2 done before" in run(*study_of_few)
    run("study.report", "--results", results, "--out", docs)
    assert "| StableAdamW | tuned |" in (docs / "study_results.md").read_text("utf-8")
    assert len(list((docs / "images").glob("study_*.png"))) == 2
