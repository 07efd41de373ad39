"""Every example runs, and the demo says what its numbers say."""

import csv
import json
import math
import re
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.slow  # compiles many programs; .ci/run and the workflow run it

EXAMPLES = Path(__file__).parents[2] / "examples"
RUNS = ["no clipping", "clipping", "clipping + accumulation"]
TINY = ["--steps=6", "--batch-size=4", "-k=2", "--max-norm=0.5"]


@pytest.fixture(scope="module", autouse=True)
def examples_on_the_path():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield


def run_demo(folder: Path) -> list[dict[str, str]]:
    import_module("demo").main([*TINY, f"--out={folder}"])
    with (folder / "demo.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def column(rows: list[dict[str, str]], run: str, name: str) -> np.ndarray:
    return np.array([float(row[name]) for row in rows if row["run"] == run])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("demo") / "made" / "when missing"


@pytest.fixture(scope="module")
def rows(folder):
    return run_demo(folder)


def make_run(name: str, bits: list[float]):
    steps = np.ones(len(bits))
    run = import_module("demo_report").Run
    return run(name, 1, np.array(bits), 3 * steps, steps / 3, seconds=1.0, scratch_mib=None)


def make_runs(*losses: list[float]):
    return [make_run(name, bits) for name, bits in zip(RUNS, losses, strict=True)]


# The demo from end to end


def test_demo_writes_a_row_for_each_step_of_each_run(rows):
    assert list(rows[0]) == ["run", "step", "bits_per_character", "grad_norm", "clip_factor"]
    assert [(row["run"], int(row["step"])) for row in rows] == [
        (run, step) for run in RUNS for step in range(1, 7)
    ]


def test_demo_clips_to_the_threshold_and_only_where_asked(rows):
    for run in RUNS[1:]:
        expected = np.minimum(1, 0.5 / column(rows, run, "grad_norm"))
        np.testing.assert_allclose(column(rows, run, "clip_factor"), expected, rtol=1e-5)
    assert (column(rows, "no clipping", "clip_factor") == 1).all()


@pytest.mark.parametrize("name", ["bits_per_character", "grad_norm"])
def test_demo_accumulates_to_the_numbers_of_the_whole_batch(rows, name):
    whole, accumulated = column(rows, RUNS[1], name), column(rows, RUNS[2], name)
    # The same sums in another order, through six steps of a network that enlarges differences.
    np.testing.assert_allclose(accumulated, whole, rtol=1e-2)


def test_demo_writes_a_summary_that_any_reader_of_json_takes(rows, folder):
    def refuse(word):
        pytest.fail(f"{word} is no JSON")

    found = json.loads((folder / "demo.json").read_text(), parse_constant=refuse)
    assert found["settings"] | {"out": ""} == {
        "steps": 6,
        "learning_rate": 1.0,
        "max_norm": 0.5,
        "micro_batches": 2,
        "batch_size": 4,
        "seed": 0,
        "out": "",
    }
    assert list(found["runs"]) == RUNS
    for run in RUNS:
        summary = found["runs"][run]
        bits = column(rows, run, "bits_per_character")
        assert summary["best_bits"] == pytest.approx(bits.min())
        assert summary["final_bits"] == pytest.approx(bits[-1])
        assert summary["max_grad_norm"] == pytest.approx(column(rows, run, "grad_norm").max())
        assert summary["nonfinite_steps"] == 0
        assert summary["ms_per_step"] > 0


def test_demo_draws_a_picture(rows, folder):
    picture = (folder / "demo.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000


# What it says about numbers made up here


@pytest.mark.parametrize(
    ("without", "with_clip", "words"),
    [
        ([6.0, math.nan], [6.0, 2.0], "Without clipping the run did not train"),
        ([6.0, 20.0], [6.0, 2.0], "Without clipping the run did not train"),
        ([6.0, 5.9], [6.0, 2.0], "Without clipping the run did not train"),
        ([6.0, 3.0], [6.0, 2.0], "with clipping better"),
        ([6.0, 2.01], [6.0, 2.0], "the gap is small"),
        ([6.0, 2.0], [6.0, 3.0], "without clipping better"),
        ([6.0, 2.0], [6.0, 7.0], "With clipping too the run did not train"),
        ([6.0, math.nan], [6.0, math.nan], "With clipping too the run did not train"),
    ],
)
def test_verdict_follows_the_numbers(without, with_clip, words):
    first, _ = import_module("demo_report").verdict(make_runs(without, with_clip, with_clip))
    assert words in first


def test_verdict_counts_the_steps_on_which_accumulation_agrees():
    runs = make_runs([6.0, 5.0, 4.0], [6.0, 5.0, 4.0], [6.0, 5.005, 3.0])
    assert "for the first 2 of 3 steps" in import_module("demo_report").verdict(runs)[1]


def test_lost_steps_are_counted_and_reported_as_null(tmp_path):
    report = import_module("demo_report")
    runs = make_runs([6.0, 5.0, math.nan, math.nan], [6.0] * 4, [6.0] * 4)
    report.write_files(tmp_path, runs, {"max_norm": 1.0})
    summary = json.loads((tmp_path / "demo.json").read_text())["runs"]["no clipping"]
    assert summary["nonfinite_steps"] == 2
    assert summary["final_bits"] is None and summary["best_bits"] == 5.0
    assert "nan" in report.table(runs)


# Its command line


@pytest.mark.parametrize(
    ("word", "argument"),
    [
        ("--steps=0", "--steps"),
        ("--steps=1.5", "--steps"),
        ("--max-norm=-1", "--max-norm"),
        ("--learning-rate=nan", "--learning-rate"),
        ("--learning-rate=fast", "--learning-rate"),
        ("-k=0", "-k/--micro-batches"),
        ("--batch-size=6", "--micro-batches"),
        ("--seed=-1", "--seed"),
        (f"--out={__file__}", "--out"),
    ],
)
def test_bad_value_is_refused_before_any_training(word, argument, capsys):
    with pytest.raises(SystemExit) as stopped:
        import_module("demo").main([word])
    assert stopped.value.code == 2
    assert argument in capsys.readouterr().err


# The short examples


def test_haiku_step_trains(capsys):
    _check_it_trained("haiku_step", capsys)


def test_equinox_step_trains(capsys):
    _check_it_trained("equinox_step", capsys)


def _check_it_trained(name, capsys):
    import_module(name).main()
    said = capsys.readouterr().out
    first, last = map(float, re.search(r"loss (\S+) -> (\S+) in 200 optimizer", said).groups())
    assert last < first / 10


def test_flax_states_count_optimizer_steps(capsys):
    import_module("flax_step").main()
    said = capsys.readouterr().out
    assert [float(loss) < 0.1 for loss in re.findall(r"loss (\S+) after 200 ", said)] == [True] * 2
