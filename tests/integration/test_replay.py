"""The replay example: the same incident in another process, rewinding undoes a bad stretch, and kills."""

import contextlib
import io
import json
import re
import subprocess
import sys
import time

import numpy as np
import pytest

from files import ROOT, environment, load, python

pytestmark = pytest.mark.slow

EXAMPLE = ROOT / "examples/replay.py"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replay")
    return folder, python(EXAMPLE, "train", folder)


@pytest.fixture(scope="module")
def example():
    return load(EXAMPLE)


def test_a_fresh_process_comes_to_the_same_verdict_bit_for_bit(trained):
    folder, printed = trained
    (first,) = re.findall(r"step 330: applied.*", printed)
    again = python(EXAMPLE, "replay", folder / "incident")
    assert first in again and "in batch 330" in again
    assert "the same verdict, bit for bit" in again


def test_the_batches_of_an_incident_are_kept(trained, example):
    folder, _ = trained
    kept = np.load(folder / "incident.npz")
    assert kept["ids"].tolist() == [325, 326, 327, 328, 329, 330]
    x, _ = example.make_data(0, range(330, 390))
    np.testing.assert_array_equal(kept["x"], x[kept["ids"]])
    rows = [json.loads(line) for line in (folder / "incidents.jsonl").read_text().splitlines()]
    assert rows[0]["batch"] == 330 and rows[0]["sentence"].startswith("step 330")


def test_with_rewinding_the_loss_is_that_of_a_clean_run_and_without_it_is_not(trained):
    losses = {
        name: float(loss) for name, loss in re.findall(r"(.+): loss (\S+)$", trained[1], re.M)
    }
    clean = [losses["clean"], losses["clean, another seed"]]
    assert abs(losses["spoilt, with rewinding"] - losses["clean"]) < np.ptp(clean)
    assert losses["spoilt"] > 3 * max(clean)


@pytest.mark.parametrize(
    ("seed", "stretches"),
    [
        (3, [range(55, 155)]),
        (4, [range(198, 208)]),
        (0, [range(40, 41)]),
        (10, [range(100, 110), range(123, 140)]),
    ],
)
def test_rewinding_finds_the_stretches(tmp_path, example, seed, stretches):
    clean = example.test_loss(example.train_plainly(seed, ()))
    with contextlib.redirect_stdout(io.StringIO()):
        params, left_out = example.train(tmp_path, seed, [i for x in stretches for i in x])
    assert left_out == stretches
    assert abs(example.test_loss(params) - clean) < 0.018  # the deviation over 20 seeds


def test_a_cause_in_the_model_stops_the_run(tmp_path, example, monkeypatch):
    def outlier(params, state, x, y):
        scale = 100.0 if int(state.incidents.step_count) in (60, 80, 100) else 1.0
        grads = example.jax.tree.map(lambda w: scale * w, params)
        _, state = example.tx.update(grads, state, params)
        return params, state, example.loss_fn(params, x, y)

    monkeypatch.setattr(example, "step_fn", outlier)
    with pytest.raises(RuntimeError, match="rewinding does not help"):
        example.train(tmp_path, 0, ())


KILLED = """
import pathlib, sys, replay
replay.STEPS = 200
params, _ = replay.train(pathlib.Path(sys.argv[1]), 0, range(100, 120))
print(replay.test_loss(params))
"""


def test_a_run_that_is_killed_during_a_save_loses_nothing(tmp_path, example, monkeypatch):
    monkeypatch.setattr(example, "STEPS", 200)
    with contextlib.redirect_stdout(io.StringIO()):
        params, _ = example.train(tmp_path / "whole", 0, range(100, 120))

    def start():
        command = [sys.executable, "-c", KILLED, str(tmp_path / "killed")]
        return subprocess.Popen(command, env=environment(8), stdout=subprocess.PIPE, text=True)

    last = 0
    for delay in (0.0, 0.03):
        process = start()
        saves = 0
        for line in process.stdout:
            saves += line.startswith("saving")
            if saves == 2:
                time.sleep(delay)
                process.kill()
                break
        process.communicate()
        checkpoint = example.Checkpoints(tmp_path / "killed", 0).load()
        step = int(checkpoint[0]["step"])
        assert step >= last  # each run continues where the one before it had saved
        last = step
    assert last > 0
    assert start().communicate()[0].splitlines()[-1] == str(example.test_loss(params))
