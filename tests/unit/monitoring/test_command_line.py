"""`python -m gradclip_jax LOG`: incidents, a summary, suggestions and a plot of any log."""

import importlib.util
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
ROWS = [
    {"step": i + 1, "loss": float(x), "grad_norm": float(y)}
    for i, (x, y) in enumerate(zip(LOSS, NORM, strict=True))
]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_text_log_gives_its_incidents_as_the_page_on_logging_shows_them(tmp_path, capsys):
    line = "step {step:6} of 300 | lm loss: {loss:.6E} | grad norm: {grad_norm}"
    lines = ["Loading the model", *(line.format(**x) for x in ROWS), "done"]
    (tmp_path / "train.log").write_text("\n".join(lines))
    assert main(["train.log"]) == 0
    printed = capsys.readouterr().out
    shown = PAGE.read_text("utf-8").partition("```text\nstep 201")[2].partition("```")[0]
    first_shown, last_shown = f"step 201{shown}".split("...\n")
    assert printed.startswith(first_shown) and printed.endswith(last_shown)
    incidents, _, rest = printed.partition("\n\n")
    first, second = incidents.splitlines()
    assert first.startswith("step 201: ") and "gradient norm 40" in first and "loss 9" in first
    assert second.startswith("step 251: ") and "NaN" in second
    assert "suggested max_norm: 1" in rest
    assert (tmp_path / "train_incidents.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("line", "error", "options"),
    [
        (
            "[{step}] L={loss} G={grad_norm}",
            "`log` must be",
            ["--pattern", r"\[(?P<step>\d+)\] L=(?P<loss>\S+) G=(?P<norm>\S+)"],
        ),
        ('{{"step": {step}, "g/loss": {loss}, "d/loss": 1}}', "prefix=", ["--prefix", "g/"]),
    ],
)
def test_a_log_of_another_form_is_read_with_an_option_and_plotted_only_with_matplotlib(
    line, error, options, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (tmp_path / "odd.txt").write_text("\n".join(line.format(**x) for x in ROWS))
    assert main(["odd.txt"]) == 1 and error in capsys.readouterr().err
    assert main(["odd.txt", *options]) == 0
    printed = capsys.readouterr().out
    assert "step 201: " in printed and "steps 1 to 300" in printed and "plot" not in printed


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        (None, [], "No such file"),
        (b"", [], "`log` must be"),
        (b"\x00\x01\xff" * 100, [], "`log` must be"),
        (b'{"accuracy": 0.5}\n', [], "a loss or a gradient norm"),
        (b'{"log_history": [{', [], "Expecting property name"),
        (b"loss 1", ["--pattern", "(loss"], "unterminated subpattern"),
    ],
)
def test_other_files_give_an_error_in_one_line(content, options, words, tmp_path, capsys):
    if content is not None:
        (tmp_path / "file").write_bytes(content)
    assert main(["file", *options]) == 1
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1 and "Traceback" not in error


def test_it_is_a_module_that_runs(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gradclip_jax", "--help"])
    monkeypatch.delitem(sys.modules, "gradclip_jax.__main__")
    with pytest.raises(SystemExit):
        runpy.run_module("gradclip_jax", run_name="__main__")
    assert "trainer_state.json" in capsys.readouterr().out
