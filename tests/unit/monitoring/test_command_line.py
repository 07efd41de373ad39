"""`python -m gradclip_jax LOG`: incidents, a summary, suggestions and a plot of any log."""

import importlib.util
import json
import pathlib
import runpy
import sys

import numpy as np
import pytest

from files import ROOT
from gradclip_jax.__main__ import main

PAGE = ROOT / "docs" / "recipes" / "logging.md"  # shows the output for train.log

RNG = np.random.default_rng(0)
LOSS, NORM = 2.0 + 0.05 * RNG.standard_normal(300), np.exp(0.1 * RNG.standard_normal(300))
LOSS[200], NORM[200], NORM[250] = 9.0, 40.0, np.nan


def write(name, form):
    """Write 300 lines with the step, the loss and the norm in this form."""
    lines = map(form.format, range(1, 301), LOSS.tolist(), NORM.tolist())
    pathlib.Path(name).write_text("\n".join(["Loading the model", *lines, "done"]))


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_text_log_gives_what_the_page_on_logging_shows(tmp_path, capsys, monkeypatch):
    write("train.log", "step {:6} of 300 | lm loss: {:.6E} | grad norm: {}")
    monkeypatch.setattr(sys, "argv", ["gradclip_jax", "train.log"])
    monkeypatch.delitem(sys.modules, "gradclip_jax.__main__")
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("gradclip_jax", run_name="__main__")
    printed = capsys.readouterr().out
    shown = PAGE.read_text("utf-8").partition("```text\nstep 201")[2].partition("```")[0]
    first_shown, last_shown = f"step 201{shown}".split("...\n")
    assert printed.startswith(first_shown) and printed.endswith(last_shown)
    assert "gradient norm 40" in first_shown and "step 251: applied, gradient norm nan" in printed
    assert "suggested max_norm: 1" in printed
    assert (tmp_path / "train_incidents.png").stat().st_size > 1000


def test_one_of_two_runs_is_read_with_a_prefix_and_plotted_only_with_matplotlib(
    capsys, monkeypatch
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    write("odd.txt", '{{"step": {}, "g/loss": {}, "d/loss": {}}}')
    assert main(["odd.txt"]) == 1 and "prefix=" in capsys.readouterr().err
    assert main(["odd.txt", "--prefix", "g/"]) == 0
    printed = capsys.readouterr().out
    assert "step 201: " in printed and "steps 1 to 300" in printed and "plot" not in printed


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        (b'{"accuracy": 0.5}\n', "a loss or a gradient norm"),
        (b"[1] L=2.5 G=0.75", "a loss or a gradient norm"),
        (b'{"log_history": [{', "Expecting property name"),
    ],
)
def test_other_files_give_an_error_in_one_line(content, words, tmp_path, capsys):
    if content is not None:
        (tmp_path / "file").write_bytes(content)
    assert main(["file"]) == 1
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1 and "Traceback" not in error


@pytest.mark.slow
def test_a_nan_inside_a_streak_is_printed(capsys):
    lines = [
        f"loss: {9.0 if 100 <= i < 110 else LOSS[i]} norm: {'nan' if i == 104 else 1}"
        for i in range(200)
    ]
    pathlib.Path("train.log").write_text("\n".join(lines))
    assert main(["train.log"]) == 0
    printed = capsys.readouterr().out
    assert "step 104: " in printed and "step 105: " not in printed


@pytest.mark.slow
def test_a_long_log_needs_few_calls_of_functions_for_each_row(capsys):
    rng, counts = np.random.default_rng(0), []

    def count(frame, event, argument):
        counts[-1] += event in ("call", "c_call")

    for size in 10_000, 30_000:
        loss, norm = 2 + 0.05 * rng.standard_normal(size), np.exp(0.1 * rng.standard_normal(size))
        loss[size // 2], norm[size // 2] = 9.0, 40.0
        columns = zip(range(size), loss, norm, strict=True)
        lines = (dict(zip(("step", "loss", "grad_norm"), x, strict=True)) for x in columns)
        pathlib.Path("long.jsonl").write_text("\n".join(map(json.dumps, lines)))
        counts.append(0)
        sys.setprofile(count)
        main(["long.jsonl"])
        sys.setprofile(None)
        assert f"step {size // 2}: applied, gradient norm 40" in capsys.readouterr().out
    num_calls = (counts[1] - counts[0]) / 20_000
    assert num_calls < 40  # 200 if each row is compared on its own
