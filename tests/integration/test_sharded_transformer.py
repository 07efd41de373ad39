"""examples/sharded_transformer.py learns, and resumes in the middle of a window on any mesh."""

import json
import os
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from test_processes import environment_of_users, free_port, run_together

from files import ROOT, load

SCRIPT = ROOT / "examples/sharded_transformer.py"
SIZES = {"batch-size": 16, "length": 32, "layers": 1, "width": 32, "every": 4}
TINY = [word for name, size in SIZES.items() for word in (f"--{name}", str(size))]
STEPS, SAVED = 42, 21  # calls; the second leaves one micro-batch in the window
LONG = [*TINY, "--steps", str(STEPS), "--checkpoint-every", str(SAVED), "--learning-rate", "0.02"]

needs_eight = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices")


def run_here(folder, *words):
    """Runs the example in this process; what it summed up."""
    summary = folder / "summary.json"
    load(SCRIPT).main([*words, "--summary", str(summary)])
    return json.loads(summary.read_text())


def run_apart(folder, *words, processes=1):
    """Runs the example as users do, in so many processes with eight devices together."""
    environment = environment_of_users()
    # Compiled as in this process: numbers are compared to the last bit.
    environment["XLA_FLAGS"] = re.sub(
        r"(device_count=)\d+", rf"\g<1>{8 // processes}", os.environ["XLA_FLAGS"]
    )
    environment["JAX_PLATFORMS"] = "cpu"
    summary = folder / "summary.json"
    command = [SCRIPT, *words, "--summary", summary]
    if processes > 1:
        command += ["--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", processes]
    own = [["--process-id", i] if processes > 1 else [] for i in range(processes)]
    ended = run_together([[*command, *one] for one in own], folder, environment)
    assert [code for code, _ in ended] == [0] * processes, "\n".join(x[-3000:] for _, x in ended)
    return json.loads(summary.read_text()), ended[0][1]


def copied(folder, name, step):
    """A folder that knows of one checkpoint only."""
    (folder / name).mkdir()
    shutil.copytree(folder / "whole" / str(step), folder / name / str(step))
    return str(folder / name)


def final_state(folder):
    path = Path(folder) / str(STEPS) / "default"
    handler = ocp.PyTreeCheckpointHandler()
    with ocp.Checkpointer(handler) as checkpointer:
        tree = checkpointer.metadata(path).item_metadata.tree
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        return checkpointer.restore(path, ocp.args.PyTreeRestore(restore_args=as_numpy))


@needs_eight
@pytest.mark.slow
def test_learns_and_resumes_in_the_middle_of_a_window(tmp_path):
    mesh = ["--data", "4", "--model", "2", "--fsdp"]
    folder = str(tmp_path / "whole")
    whole, log = run_apart(tmp_path, *LONG, *mesh, "--checkpoint-dir", folder)
    assert "tokens per second" in log
    assert np.mean(whole["losses"][:4]) - np.mean(whole["losses"][-4:]) > 1.0
    assert whole["metrics"]["gradient_step"] == STEPS // 4
    assert whole["metrics"]["mini_step"] == STEPS % 4

    same_mesh = copied(tmp_path, "same", SAVED)
    resumed = run_here(tmp_path, *LONG, *mesh, "--checkpoint-dir", same_mesh, "--resume")
    assert resumed["first_call"] == SAVED
    assert resumed["losses"] == whole["losses"][SAVED:]
    jax.tree.map(np.testing.assert_array_equal, final_state(same_mesh), final_state(folder))

    with pytest.raises(SystemExit, match="--resume: the checkpoint does not fit"):
        wide = ["--width", "64", "--checkpoint-dir", folder, "--resume"]
        run_here(tmp_path, *LONG, *mesh, *wide)

    other_mesh = copied(tmp_path, "other", SAVED)
    options = ["--data", "8", "--checkpoint-dir", other_mesh, "--resume"]
    resumed = run_here(tmp_path, *LONG, *options)
    # The same numbers added up in another order, in bfloat16, for twenty calls.
    np.testing.assert_allclose(resumed["losses"][:3], whole["losses"][SAVED:][:3], rtol=0.005)
    np.testing.assert_allclose(resumed["losses"], whole["losses"][SAVED:], rtol=0.05)

    two = copied(tmp_path, "two", SAVED)
    options = [*mesh, "--checkpoint-dir", two, "--resume"]
    resumed, log = run_apart(tmp_path, *LONG, *options, processes=2)
    assert "2 process(es)" in log and resumed["first_call"] == SAVED
    np.testing.assert_allclose(resumed["losses"][:3], whole["losses"][SAVED:][:3], rtol=0.005)
    np.testing.assert_allclose(resumed["losses"], whole["losses"][SAVED:], rtol=0.05)
    assert (Path(two) / str(STEPS)).is_dir()


def test_resume_from_a_folder_that_is_not_there_is_refused_and_creates_nothing(tmp_path, capsys):
    missing = tmp_path / "missing"
    with pytest.raises(SystemExit) as stopped:
        load(SCRIPT).main([*TINY, "--data", "1", "--checkpoint-dir", str(missing), "--resume"])
    assert stopped.value.code == 2
    assert f"argument --resume: there is no folder {missing}" in capsys.readouterr().err
    assert not missing.exists()
