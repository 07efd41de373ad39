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


def refuse(word):
    pytest.fail(f"{word} is no JSON")


def test_demo_clips_and_accumulates_to_the_numbers_of_the_whole_batch(tmp_path):
    folder = tmp_path / "made" / "when missing"
    words = f"--steps={STEPS} --batch-size=4 -k=2 --max-norm=0.5".split()
    import_module("demo").main([*words, f"--out={folder}"])
    with (folder / "demo.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    bits, norms, factors = (
        {run: np.array([float(row[name]) for row in rows if row["run"] == run]) for run in RUNS}
        for name in ("bits_per_character", "grad_norm", "clip_factor")
    )
    np.testing.assert_array_equal(factors[RUNS[0]], np.ones(STEPS))
    for run in RUNS[1:]:
        np.testing.assert_allclose(factors[run], np.minimum(1, 0.5 / norms[run]), rtol=1e-5)
    for column in (bits, norms):
        # The same sums in another order, through six steps of a network that enlarges differences.
        np.testing.assert_allclose(column[RUNS[2]], column[RUNS[1]], rtol=1e-2)
    assert (folder / "demo.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((folder / "demo.json").read_text(), parse_constant=refuse)
    assert (found["settings"]["steps"], found["settings"]["max_norm"]) == (STEPS, 0.5)
    for run in RUNS:
        summary = found["runs"][run]
        assert summary["best_bits"] == pytest.approx(bits[run].min())
        assert summary["max_grad_norm"] == pytest.approx(norms[run].max())
        assert summary["nonfinite_steps"] == 0 < summary["ms_per_step"]


@pytest.mark.parametrize(
    ("without", "with_clip", "words"),
    [
        ([6.0, math.nan], [6.0, 2.0], "Without clipping the run did not train"),
        ([6.0, 3.0], [6.0, 2.0], "with clipping better"),
        ([6.0, 2.0], [6.0, 7.0], "With clipping too the run did not train"),
    ],
)
def test_verdict_of_the_demo_follows_the_numbers(without, with_clip, words):
    report, steps = import_module("demo_report"), np.ones(2)
    runs = [
        report.Run(name, 1, np.array(bits), steps, steps, seconds=1.0, scratch_mib=None)
        for name, bits in zip(RUNS, (without, with_clip, with_clip), strict=True)
    ]
    assert words in report.verdict(runs)[0]


@pytest.mark.parametrize(
    ("example", "words", "argument"),
    [
        ("demo", "--steps=0", "--steps"),
        ("demo", "--batch-size=6", "--micro-batches"),
        (SHARDED, "--resume", "--resume"),
        (SHARDED, "--batch-size 12 --micro-batches 8 --data 1", "--batch-size"),
    ],
)
def test_bad_value_is_refused_before_any_training(example, words, argument, capsys):
    with pytest.raises(SystemExit) as stopped:
        import_module(example).main(words.split())
    assert stopped.value.code == 2
    assert argument in capsys.readouterr().err


def test_without_qk_clip_the_logits_grow_and_with_it_the_model_learns(capsys):
    import_module("qk_clip").main()
    without, with_clip = capsys.readouterr().out.splitlines()
    assert without.endswith("loss below 0.1: False, logits above 1,000: True")
    assert with_clip.endswith("loss below 0.1: True, logits above 1,000: False")


def test_private_training_says_its_epsilon(capsys):
    pytest.importorskip("jax_privacy")
    import_module("private_training").main()
    assert capsys.readouterr().out == "epsilon 1.57 at delta 1e-05\n"


@pytest.mark.parametrize(
    ("name", "skipped"), [("haiku_step", False), ("equinox_step", True), ("flax_step", True)]
)
def test_step_trains_counts_optimizer_steps_and_names_the_bad_micro_batch(name, skipped, capsys):
    import_module(name).main()
    said = capsys.readouterr().out
    found = re.findall(r"loss (?:\S+ -> )?(\S+) (?:in|after) (?:199|200) ", said)
    assert found and max(map(float, found)) < 0.1
    assert ("step 330: skipped, gradient norm nan" in said) == skipped


def test_the_event_file_of_tensorboard_holds_what_metrics_said_of_a_bad_batch(tmp_path):
    example = import_module("log_to_tensorboard")
    rows, file = example.main(tmp_path)
    scalars = example.read_scalars(file)
    assert all(row.keys() == scalars.keys() for row in rows)
    for name, points in scalars.items():
        values = np.float32([row[name] for row in rows])
        steps = np.flatnonzero(np.isfinite(values))
        np.testing.assert_array_equal(
            np.float32(points), np.float32([*zip(steps, values[steps], strict=True)])
        )
    assert [row["consecutive_skips"] for row in rows] == 20 * [0.0] + [1.0] + 39 * [0.0]
    assert rows[-1]["loss"] < rows[0]["loss"] / 100


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
