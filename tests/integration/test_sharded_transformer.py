"""examples/sharded_transformer.py learns, and resumes in the middle of a window on any mesh."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from test_processes import free_port, run_together

from files import ROOT, load

SCRIPT = ROOT / "examples/sharded_transformer.py"
SIZES = {"batch-size": 16, "length": 32, "layers": 1, "width": 32, "every": 4}
TINY = [word for name, size in SIZES.items() for word in (f"--{name}", str(size))]
STEPS, SAVED = 42, 21  # calls; the second leaves one micro-batch in the window
LONG = [*TINY, "--steps", str(STEPS), "--checkpoint-every", str(SAVED), "--learning-rate", "0.02"]


def run_here(folder, *words):
    """Runs the example in this process; what it summed up."""
    summary = folder / "summary.json"
    load(SCRIPT).main([*words, "--summary", str(summary)])
    return json.loads(summary.read_text())


def run_in_two_processes(folder, *words):
    """What it summed up there, and the log of the first one."""
    summary, coordinator = folder / "summary.json", f"127.0.0.1:{free_port()}"
    command = [SCRIPT, *words, "--summary", summary, "--coordinator", coordinator]
    command += ["--num-processes", 2, "--process-id"]
    ended = run_together([[*command, i] for i in range(2)], folder)
    assert [code for code, _ in ended] == [0, 0], "\n".join(text[-3000:] for _, text in ended)
    return json.loads(summary.read_text()), ended[0][1]


def copied(folder, name, step):
    """A folder that knows of one checkpoint only."""
    (folder / name).mkdir()
    shutil.copytree(folder / "whole" / str(step), folder / name / str(step))
    return str(folder / name)


@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices")
@pytest.mark.slow
def test_learns_and_resumes_in_the_middle_of_a_window(tmp_path):
    mesh = ["--data", "4", "--model", "2", "--fsdp"]
    folder = str(tmp_path / "whole")
    whole = run_here(tmp_path, *LONG, *mesh, "--checkpoint-dir", folder)
    assert np.mean(whole["losses"][:4]) - np.mean(whole["losses"][-4:]) > 1.0
    assert whole["metrics"]["gradient_step"] == STEPS // 4
    assert whole["metrics"]["mini_step"] == STEPS % 4

    options = ["--checkpoint-dir", copied(tmp_path, "same", SAVED), "--resume"]
    resumed = run_here(tmp_path, *LONG, *mesh, *options)
    assert resumed["first_call"] == SAVED
    assert resumed["losses"] == whole["losses"][SAVED:]

    with pytest.raises(SystemExit, match="--resume: the checkpoint does not fit"):
        wide = ["--width", "64", "--checkpoint-dir", folder, "--resume"]
        run_here(tmp_path, *LONG, *mesh, *wide)

    # On another mesh, in two processes: the same numbers added up in another order, in bfloat16.
    two = copied(tmp_path, "two", SAVED)
    options = ["--data", "8", "--checkpoint-dir", two, "--resume"]
    resumed, log = run_in_two_processes(tmp_path, *LONG, *options)
    assert "2 process(es)" in log and "tokens per second" in log
    assert resumed["first_call"] == SAVED
    rest = whole["losses"][SAVED:]
    np.testing.assert_allclose(resumed["losses"][:3], rest[:3], rtol=0.005)
    np.testing.assert_allclose(resumed["losses"], rest, rtol=0.05)
    assert (Path(two) / str(STEPS)).is_dir()
