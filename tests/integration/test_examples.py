"""Every example runs, and the demo says what its numbers say."""

import csv
import json
import math
import re
from importlib import import_module

import numpy as np
import pytest

from files import ROOT

pytestmark = pytest.mark.slow  # compiles many programs; .ci/run and the workflow run it

RUNS = ["no clipping", "clipping", "clipping + accumulation"]
STEPS = 6
SHARDED = "sharded_transformer"
TINY = [f"--steps={STEPS}", "--batch-size=4", "-k=2", "--max-norm=0.5"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "made" / "when missing"
    import_module("demo").main([*TINY, f"--out={folder}"])
    return folder


@pytest.fixture(scope="module")
def columns(folder):
    """What the demo wrote of each run, by name."""
    with (folder / "demo.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    numbers = ("bits_per_character", "grad_norm", "clip_factor")
    return {
        run: {name: np.array([float(r[name]) for r in rows if r["run"] == run]) for name in numbers}
        for run in RUNS
    }


def make_runs(*losses: list[float]):
    run, steps = import_module("demo_report").Run, np.ones(len(losses[0]))
    return [
        run(name, 1, np.array(bits), 3 * steps, steps / 3, seconds=1.0, scratch_mib=None)
        for name, bits in zip(RUNS, losses, strict=True)
    ]


# The demo from end to end


def test_demo_clips_to_the_threshold_and_only_where_asked(columns):
    for run in RUNS[1:]:
        expected = np.minimum(1, 0.5 / columns[run]["grad_norm"])
        np.testing.assert_allclose(columns[run]["clip_factor"], expected, rtol=1e-5)
    np.testing.assert_array_equal(columns["no clipping"]["clip_factor"], np.ones(STEPS))


@pytest.mark.parametrize("name", ["bits_per_character", "grad_norm"])
def test_demo_accumulates_to_the_numbers_of_the_whole_batch(columns, name):
    # The same sums in another order, through six steps of a network that enlarges differences.
    np.testing.assert_allclose(columns[RUNS[2]][name], columns[RUNS[1]][name], rtol=1e-2)


def test_demo_draws_a_picture_and_writes_a_summary_that_any_reader_of_json_takes(columns, folder):
    assert (folder / "demo.png").read_bytes().startswith(b"\x89PNG")

    def refuse(word):
        pytest.fail(f"{word} is no JSON")

    found = json.loads((folder / "demo.json").read_text(), parse_constant=refuse)
    assert (found["settings"]["steps"], found["settings"]["max_norm"]) == (STEPS, 0.5)
    assert found["runs"].keys() == columns.keys()
    for run, summary in found["runs"].items():
        bits = columns[run]["bits_per_character"]
        assert summary["best_bits"] == pytest.approx(bits.min())
        assert summary["final_bits"] == pytest.approx(bits[-1])
        assert summary["max_grad_norm"] == pytest.approx(columns[run]["grad_norm"].max())
        assert summary["nonfinite_steps"] == 0 < summary["ms_per_step"]


# What it says about numbers made up here


@pytest.mark.parametrize(
    ("without", "with_clip", "words"),
    [
        ([6.0, math.nan], [6.0, 2.0], "Without clipping the run did not train"),
        ([6.0, 3.0], [6.0, 2.0], "with clipping better"),
        ([6.0, 2.0], [6.0, 7.0], "With clipping too the run did not train"),
    ],
)
def test_verdict_follows_the_numbers(without, with_clip, words):
    first, _ = import_module("demo_report").verdict(make_runs(without, with_clip, with_clip))
    assert words in first


def test_lost_steps_are_counted_and_reported_as_null(tmp_path):
    report = import_module("demo_report")
    runs = make_runs([6.0, 5.0, math.nan, math.nan], [6.0] * 4, [6.0] * 4)
    report.write_files(tmp_path, runs, {"max_norm": 1.0})
    summary = json.loads((tmp_path / "demo.json").read_text())["runs"]["no clipping"]
    assert summary["nonfinite_steps"] == 2
    assert summary["final_bits"] is None and summary["best_bits"] == 5.0
    assert "nan" in report.table(runs)


# Command lines


@pytest.mark.parametrize(
    ("example", "words", "argument"),
    [
        ("demo", "--steps=0", "--steps"),
        ("demo", "--batch-size=6", "--micro-batches"),
        (SHARDED, "--steps 0", "--steps"),
        (SHARDED, "--resume", "--resume"),
        (SHARDED, "--data 512", "--data"),
        (SHARDED, "--batch-size 12 --micro-batches 8 --data 1", "--batch-size"),
    ],
)
def test_bad_value_is_refused_before_any_training(example, words, argument, capsys):
    with pytest.raises(SystemExit) as stopped:
        import_module(example).main(words.split())
    assert stopped.value.code == 2
    assert argument in capsys.readouterr().err


# The short examples


@pytest.mark.parametrize("name", ["haiku_step", "equinox_step"])
def test_step_trains(name, capsys):
    import_module(name).main()
    said = capsys.readouterr().out
    first, last = map(float, re.search(r"loss (\S+) -> (\S+) in (?:199|200) opt", said).groups())
    assert last < first / 10
    assert ("step 330: skipped, gradient norm NaN" in said) == (name == "equinox_step")


def test_flax_states_count_optimizer_steps(capsys):
    import_module("flax_step").main()
    said = capsys.readouterr().out
    losses = re.findall(r"loss (\S+) after (\d+) ", said)
    assert [(float(loss) < 0.1, steps) for loss, steps in losses] == [(True, "200"), (True, "199")]
    assert "step 330: skipped, gradient norm NaN" in said  # the monitor names the bad micro-batch


def test_the_event_file_of_tensorboard_holds_what_metrics_said_of_a_bad_batch(tmp_path):
    example = import_module("log_to_tensorboard")
    rows, file = example.main(tmp_path)
    scalars = example.read_scalars(file)
    assert all(row.keys() == scalars.keys() for row in rows)
    for name, points in scalars.items():
        values = np.float32([row[name] for row in rows])
        steps = np.flatnonzero(np.isfinite(values))
        assert [step for step, _ in points] == steps.tolist()
        np.testing.assert_array_equal(np.float32([v for _, v in points]), values[steps])
    assert [row["skipped_nonfinite"] for row in rows] == 20 * [0.0] + 40 * [1.0]
    assert [row["consecutive_skips"] for row in rows] == 20 * [0.0] + [1.0] + 39 * [0.0]
    assert [step for step, row in enumerate(rows) if not np.isfinite(row["loss"])] == [20]
    assert rows[-1]["loss"] < rows[0]["loss"] / 100


# One bad batch


def test_one_bad_batch_ends_a_run_with_optax_and_not_one_with_this_library(tmp_path):
    losses = import_module("adopt").main(["--out", f"{tmp_path}/adopt.png"])
    assert (tmp_path / "adopt.png").read_bytes().startswith(b"\x89PNG")
    assert np.isnan(losses["Optax"][-100:]).all()
    assert np.isnan(losses["gradclip_jax"]).sum() == 1
    assert np.mean(losses["gradclip_jax"][-20:]) < 0.5 * np.mean(losses["gradclip_jax"][:10])


def test_the_difference_in_the_readme_is_that_of_the_example():
    example = (ROOT / "examples" / "adopt.py").read_text()
    (difference,) = re.findall(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    lines = [x[1:].split("  #")[0].strip() for x in difference.splitlines() if x[0] in "+-"]
    assert len(lines) == 5
    assert [x for x in lines[:4] if x.split(" = ")[-1] not in example] == []
