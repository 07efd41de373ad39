"""The benchmarks run at a small size, and the instruction counter counts correctly."""

import jax
import jax.numpy as jnp
import pytest
from benchmarks import _report, tables
from benchmarks.compiled import _hlo

from files import ROOT, environment, python

QUICK = {
    "steps.times --only PPO:skip_nonfinite": ("skip_nonfinite / optax apply_if_finite", "%"),
    "steps.gpu --small --no-tests --only PPO --out build/gpu": (
        *("| PPO in a scan: clip |", "watch |", "per-example"),
        *("Over the floor: 0.2 M", "Workarounds, PPO in a scan"),
    ),
    "study.bfloat16": ("| bfloat16, at random |", "| float32 copies |"),
    "per_example.speed": ("per_example.value_and_grad", "CPU ms per example", "Mixer"),
    "faults.detect": ("| NaN in one element | 100% of 2 |", "gru: 0 incidents in 800"),
}
TREE = jax.ShapeDtypeStruct((256, 256), jnp.float32)
SIZE = 256 * 256 * 4


def run(name, *options):
    """What a script prints on one device."""
    return python("-m", f"benchmarks.{name}", *options, cwd=ROOT, env=environment(1), timeout=900)


@pytest.mark.slow
@pytest.mark.parametrize("script", QUICK)
def test_script_prints_its_tables(script):
    printed = run(*script.split(), *([] if "--small" in script else ["--quick"]))
    for words in QUICK[script]:
        assert words in printed


@pytest.mark.slow
def test_the_tables_are_generated_from_the_stored_results():
    stored = {path: path.read_text() for path in _report.RESULTS.glob("*.md")}
    tables.main()
    written = {path: path.read_text() for path in _report.RESULTS.glob("*.md")}
    assert written == stored, "run `python -m benchmarks.tables`"


@pytest.mark.slow
def test_a_step_is_compiled_once_and_then_known(tmp_path):
    words = ["compiled.steps", f"--results={tmp_path}/steps.json", "--only=PPO:clip_by_leaf_norm"]
    first, second = run(*words), run(*words)
    assert "known" not in first
    assert first.count("CPU: PPO: ") == second.count(", known\n") == 3


def program_of(fun, *args):
    return _hlo.analyse(jax.jit(fun).lower(*args).compile().as_text())


def test_a_scaled_array_is_read_and_written_once():
    program = program_of(lambda x: 2 * x, TREE)
    assert (program.all.moved, program.all.launches, program.all.stops) == (2 * SIZE, 1, 0)


def test_a_scan_counts_once_and_stops_nothing():
    program = program_of(lambda x: jax.lax.scan(lambda x, _: (x @ x, None), x, None, 5)[0], TREE)
    assert program.optional == []
    assert program.all.stops == 0
    assert program.all.moved >= 2 * SIZE


def test_a_loop_of_zero_or_one_trip_is_held_or_emitted():
    def step(flag, x):
        def body(carry):
            return False, jnp.sin(carry[1]) @ carry[1]

        return jax.lax.while_loop(lambda carry: carry[0], body, (flag, x))[1]

    program = program_of(step, jax.ShapeDtypeStruct((), bool), TREE)
    assert len(program.optional) == program.always.stops == 1
    assert program.emitted.moved == program.all.moved >= program.held.moved + 2 * SIZE


def test_of_a_conditional_the_larger_branch_counts():
    def step(flag, x):
        return jax.lax.cond(flag, lambda x: jnp.sin(x) @ x, lambda x: x, x)

    program = program_of(step, jax.ShapeDtypeStruct((), bool), TREE)
    assert program.all.stops == 1
    assert program.all.moved >= 2 * SIZE
