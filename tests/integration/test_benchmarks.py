"""The benchmarks run at a small size, the rest is traced, and the instruction counter is right."""

import functools

import jax
import jax.numpy as jnp
import pytest
from benchmarks import _report, tables
from benchmarks.compiled import _hlo
from benchmarks.per_example import _models, speed
from benchmarks.study import report, study, train

from files import ROOT, environment, python

pytestmark = pytest.mark.slow

QUICK = {
    "steps.times --quick --only PPO:skip_nonfinite": ("skip_nonfinite / optax apply_if_finite",),
    "steps.gpu --small --parts steps,floor --only PPO --out build/gpu": (
        *("| PPO in a scan: nothing |", "clip |", "clip, guard |", "watch |", "per-example"),
        "AdamW alone: 0.2 M",
    ),
    "faults.detect --quick": ("| NaN in one element | 100% of 2 |", "gru: 0 incidents in 800"),
    "faults.streams --steps 200 --seeds 1": ("zero in 5 % of steps | 2 |", "restarts | 0 |"),
}
TREE = jax.ShapeDtypeStruct((256, 256), jnp.float32)
SIZE = 256 * 256 * 4


def run(name, *options):
    """What a script prints on one device."""
    return python("-m", f"benchmarks.{name}", *options, cwd=ROOT, env=environment(1), timeout=900)


@pytest.mark.parametrize("script", QUICK)
def test_script_prints_its_tables(script):
    printed = run(*script.split())
    assert all(words in printed for words in QUICK[script]), printed


def test_a_quick_study_goes_on_where_it_was_and_is_reported(tmp_path):
    results, docs = tmp_path / "results", tmp_path / "docs"
    study_of_few = ("study.study", "--quick", "--out", results)
    run(*study_of_few, "--only", "line, sgd")
    assert "1 done before" in run(*study_of_few)
    run("study.report", "--results", results, "--out", docs)
    assert "| StableAdamW | tuned |" in (docs / "study_results.md").read_text("utf-8")
    assert len(list((docs / "images").glob("study_*.png"))) == 2


def test_the_closed_loop_goes_on_where_it_was_unless_its_sources_have_changed(tmp_path):
    path, name = tmp_path / "runs.jsonl", ("faults.closed_loop", "--small", "--runs")
    first = run(*name, path)
    lines = path.read_text().splitlines(keepends=True)
    other = lines[1].replace('"sources": "', '"sources": "other')
    path.write_text("".join([*lines[2:], other, lines[0][:-9]]))  # the last write was cut off
    second, table = run(*name, path), first[first.index("**Fault and model") :]
    assert "6 of these runs are in" in second and second.endswith(table)
    words = [
        *("0 decisions without a fault", "| bad batches | 1 / 0 / 0 / 0 |", "| kills | 4 |"),
        *("| all | 8 / 0 / 0 / 0 |", "that lost something | 0 |", "that differ | 0 |"),
    ]
    assert all(x in first for x in words), first


def test_a_step_is_compiled_once_and_then_known(tmp_path):
    words = ["compiled.steps", f"--results={tmp_path}/steps.json", "--only=PPO:clip_by_leaf_norm"]
    first, second = run(*words), run(*words)
    assert "known" not in first
    assert first.count("CPU: PPO: ") == second.count(", known\n") == 3


def test_every_problem_and_every_method_can_be_traced():
    pairs = study.pairs()[::-1]
    chosen = {method.name: (problem, method) for problem, method in pairs}
    chosen |= {problem.name: (problem, method) for problem, method in pairs}
    for problem, method in chosen.values():
        trainer = train.Trainer(problem, method)
        starts = jax.eval_shape(lambda p=problem: train.make_starts.__wrapped__(p, (0, 1)))
        choices = train.Choice(*[jax.ShapeDtypeStruct((3,), "float32")] * 2)
        assert jax.eval_shape(trainer.program, trainer.test, starts, choices).shape == (2, 3)


def test_every_way_to_clip_each_example_can_be_traced():
    loss, params, batch = _models.MODELS["GPT"]()
    for program in speed.programs().values():
        grads = jax.eval_shape(functools.partial(program, loss=loss), params, batch)
        assert jax.tree.structure(grads) == jax.tree.structure(params)


def test_the_page_and_the_tables_are_generated_from_the_stored_results():
    page = report.page(study.Record(ROOT / "benchmarks/study"))
    assert (ROOT / "docs/study_results.md").read_text("utf-8") == page
    stored = {path: path.read_text() for path in _report.RESULTS.glob("*.md")}
    tables.main()
    written = {path: path.read_text() for path in _report.RESULTS.glob("*.md")}
    assert written == stored, "run `python -m benchmarks.tables`"


def test_p_values_are_corrected_as_by_holm():
    corrected = report.holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.9})
    assert corrected == pytest.approx({"a": 0.04, "b": 0.09, "c": 0.09, "d": 0.9})


# What is counted in a compiled program


def program_of(fun, *args):
    return _hlo.analyse(jax.jit(fun).lower(*args).compile().as_text())


def test_a_scaled_array_is_read_and_written_once():
    program = program_of(lambda x: 2 * x, TREE)
    assert (program.all.moved, program.all.launches, program.all.stops) == (2 * SIZE, 1, 0)


def test_a_scan_counts_once():
    program = program_of(lambda x: jax.lax.scan(lambda x, _: (x @ x, None), x, None, 5)[0], TREE)
    assert (program.optional, program.all.stops) == ([], 0)
    assert program.all.moved >= 2 * SIZE


def zero_or_one_trip(flag, x):
    step = (lambda carry: carry[0], lambda carry: (False, jnp.sin(carry[1]) @ carry[1]))
    return jax.lax.while_loop(*step, (flag, x))[1]


def branch_or_none(flag, x):
    return jax.lax.cond(flag, lambda x: jnp.sin(x) @ x, lambda x: x, x)


@pytest.mark.parametrize(("step", "stops"), [(zero_or_one_trip, 1), (branch_or_none, 0)])
def test_what_is_optional_is_held_or_emitted(step, stops):
    program = program_of(step, jax.ShapeDtypeStruct((), bool), TREE)
    assert (len(program.optional), program.all.stops) == (1, stops)
    assert program.emitted.moved == program.all.moved >= program.held.moved + 2 * SIZE
