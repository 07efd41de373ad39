"""`python -m gradclip_jax LOG`: incidents, a summary, suggestions and a plot of any log."""

import json

import numpy as np
import pytest

from files import environment, python
from gradclip_jax.__main__ import main


def as_jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def as_trainer_state(rows):
    history = [{**row, "epoch": row["step"] / 100} for row in rows]
    return json.dumps({"best_metric": None, "log_history": [*history, {"eval_loss": 1.0}]})


def as_csv(rows):
    lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
    return "\n".join(lines)


def as_text(rows):
    lines = [
        f"step {row['step']:6} of 300 | lm loss: {row['loss']:.6E} | grad norm: {row['grad_norm']}"
        for row in rows
    ]
    return "\n".join(["Loading the model", *lines, "done"])


FORMATS = {
    "run.jsonl": as_jsonl,
    "trainer_state.json": as_trainer_state,
    "progress.csv": as_csv,
    "train.log": as_text,
}


@pytest.fixture
def rows():
    rng = np.random.default_rng(0)
    loss = 2.0 + 0.05 * rng.standard_normal(300)
    norm = np.exp(0.1 * rng.standard_normal(300))
    loss[200], norm[200], norm[250] = 9.0, 40.0, np.nan
    return [
        {"step": i + 1, "loss": float(x), "grad_norm": float(y)}
        for i, (x, y) in enumerate(zip(loss, norm, strict=True))
    ]


@pytest.mark.parametrize("name", FORMATS)
def test_a_log_in_any_format_gives_its_incidents(name, rows, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(FORMATS[name](rows))
    assert main([name]) == 0
    printed = capsys.readouterr().out
    incidents, _, rest = printed.partition("\n\n")
    first, second = incidents.splitlines()
    assert first.startswith("step 201: ") and "gradient norm 40" in first and "loss 9" in first
    assert second.startswith("step 251: ") and "NaN" in second
    assert "steps 1 to 300: 300 applied" in rest
    assert "suggested max_norm: 1" in rest
    assert "skip_large_norm(optimizer, 3.7), which would have skipped 2 of 300 steps" in rest
    plot = name.rpartition(".")[0] + "_incidents.png"
    assert f"plot: {plot}" in rest and (tmp_path / plot).stat().st_size > 1000


def test_a_text_log_of_an_unknown_form_is_read_by_its_pattern(rows, tmp_path, capsys):
    path, plot = tmp_path / "odd.txt", tmp_path / "odd.png"
    path.write_text("\n".join(f"[{x['step']}] L={x['loss']} G={x['grad_norm']}" for x in rows))
    assert main([str(path)]) == 1
    assert "`log` must be" in capsys.readouterr().err
    pattern = r"\[(?P<step>\d+)\] L=(?P<loss>\S+) G=(?P<norm>\S+)"
    assert main([str(path), "--pattern", pattern, "--plot", str(plot)]) == 0
    assert "step 201: " in capsys.readouterr().out and plot.exists()


def test_one_of_two_runs_in_a_log_is_read_by_its_prefix(rows, tmp_path, capsys):
    both = [
        {"step": x["step"], "g/loss": x["loss"], "d/loss": 1.0 + 0.01 * (x["step"] % 3)}
        for x in rows
    ]
    path = tmp_path / "gan.jsonl"
    path.write_text(as_jsonl(both))
    assert main([str(path)]) == 1
    assert "prefix" in capsys.readouterr().err
    assert main([str(path), "--prefix", "g/", "--plot", str(tmp_path / "gan.png")]) == 0
    assert "step 201: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        (b"", "`log` must be"),
        (b"\x00\x01\xff" * 100, "`log` must be"),
        (b'{"accuracy": 0.5}\n', "a loss or a gradient norm"),
        (b'{"log_history": []}', "`log` must be"),
        (b"a,b\n1,2\n1,2,3\n", "a loss or a gradient norm"),
    ],
)
def test_other_files_give_an_error_in_one_line(content, words, tmp_path, capsys):
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    assert main([str(path)]) == 1
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1 and "Traceback" not in error


def test_it_is_a_module_that_runs(tmp_path):
    help_text = python("-m", "gradclip_jax", "--help", cwd=tmp_path, env=environment(1))
    assert "trainer_state.json" in help_text


def test_a_bad_pattern_gives_an_error_in_one_line(tmp_path, capsys):
    path = tmp_path / "train.log"
    path.write_text("loss 1")
    assert main([str(path), "--pattern", "(loss"]) == 1
    error = capsys.readouterr().err
    assert "`pattern` must be a regular expression" in error and error.count("\n") == 1
