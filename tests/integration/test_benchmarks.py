"""The benchmarks run, on small models, for what they print; what counts instructions counts right."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
QUICK = {
    "steps.py --only PPO:skip_nonfinite": ("skip_nonfinite / optax apply_if_finite", "%"),
    "suite.py --only zero": ("hold step: loop", "window of 8 calls: select"),
    "features_compiled.py --only qk_clip": ("`qk_clip` in a step of AdamW",),
    "devices.py": ("8 devices: gcx, jit", "1 all-reduce"),
    "rounding.py": ("bfloat16, stochastic", "| float32 |"),
    "bfloat16.py": ("| bfloat16, at random |", "| float32 copies | 14.0 | 0.0 |"),
    "per_example_speed.py": ("per_example.value_and_grad", "CPU ms per example", "Mixer"),
    "faults/detect.py": ("| GPT | NaN in a leaf | 100% | 100% |", "RNN: 0 false alarms in 10"),
    "end_to_end.py": ("gcx.accumulate_gradients", "optax.MultiSteps"),
}
TREE = jax.ShapeDtypeStruct((256, 256), jnp.float32)
SIZE = 256 * 256 * 4


@pytest.fixture
def hlo(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import _hlo

    return _hlo


@pytest.mark.slow
@pytest.mark.parametrize("script", QUICK)
def test_script_prints_its_tables(script):
    name, *options = script.split()
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    command = [sys.executable, str(FOLDER / name), *options, "--quick"]
    printed = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert printed.returncode == 0, printed.stderr[-3000:]
    for words in QUICK[script]:
        assert words in printed.stdout


def test_the_charts_show_the_stored_results(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import charts

    for device in charts.DEVICES:
        drawn = charts.path_of(device).read_text()
        pairs = charts.bars(charts.results(), device).values()
        missing = [x for pair in pairs for x in pair if f">{charts.words(x)}<" not in drawn]
        assert not missing, f"{device}: run `python benchmarks/charts.py`"


@pytest.mark.slow
def test_a_step_is_compiled_once_and_then_known(tmp_path):
    results = tmp_path / "steps.json"
    command = [sys.executable, str(FOLDER / "compiled.py"), f"--results={results}"]
    command += ["--only=PPO:clip_by_leaf_norm"]
    first, second = (
        subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout
        for _ in range(2)
    )
    names = ["optax AdamW alone", "optax clip_by_block_rms", "gcx clip_by_leaf_norm"]
    assert [line for line in first.splitlines() if "{" not in line] == [
        f"CPU: PPO: {name}" for name in names
    ]
    assert second.splitlines() == [f"CPU: PPO: {name}, known" for name in names]


def program_of(hlo, fun, *args):
    return hlo.analyse(jax.jit(fun).lower(*args).compile().as_text())


def test_a_scaled_array_is_read_and_written_once(hlo):
    program = program_of(hlo, lambda x: 2 * x, TREE)
    assert (program.all.moved, program.all.launches, program.all.stops) == (2 * SIZE, 1, 0)


def test_a_scan_counts_once_and_stops_nothing(hlo):
    program = program_of(
        hlo, lambda x: jax.lax.scan(lambda x, _: (x @ x, None), x, None, 5)[0], TREE
    )
    assert program.optional == []
    assert program.all.stops == 0
    assert program.all.moved >= 2 * SIZE


def test_a_loop_of_zero_or_one_trip_is_held_or_emitted(hlo):
    def step(flag, x):
        def body(carry):
            return False, jnp.sin(carry[1]) @ carry[1]

        return jax.lax.while_loop(lambda carry: carry[0], body, (flag, x))[1]

    program = program_of(hlo, step, jax.ShapeDtypeStruct((), bool), TREE)
    assert len(program.optional) == program.always.stops == 1
    assert program.emitted.moved == program.all.moved >= program.held.moved + 2 * SIZE


def test_of_a_conditional_the_larger_branch_counts(hlo):
    def step(flag, x):
        return jax.lax.cond(flag, lambda x: jnp.sin(x) @ x, lambda x: x, x)

    program = program_of(hlo, step, jax.ShapeDtypeStruct((), bool), TREE)
    assert program.all.stops == 1
    assert program.all.moved >= 2 * SIZE
