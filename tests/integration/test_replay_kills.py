"""The recovery example is killed at random points: it loses no decision and no good checkpoint."""

import os
import re
import subprocess
import sys
import time

import numpy as np
import pytest

import gradclip_jax as gcx
from files import ROOT, environment, load

pytestmark = pytest.mark.slow

EXAMPLE = ROOT / "examples/replay.py"
NUM_KILLS = int(os.environ.get("NUM_KILLS", "4"))

# The learning rate is too high after 60 steps, so that the run is lowered, and stops.
DRIVER = """
import pathlib, sys
import jax.numpy as jnp, optax, replay

class Checkpoints(replay.Checkpoints):
    def resume(self, report, run):
        run = super().resume(report, run)
        size = float(optax.tree.get(run["state"], "step_size"))
        print("resumed", report.num_lowers, size, flush=True)
        return run

replay.Checkpoints = Checkpoints
rate = lambda step: jnp.where(step < 60, 3e-3, 3.0)
replay.train(pathlib.Path(sys.argv[1]), 0, learning_rate=rate, steps=1000)
print("stopped", flush=True)
"""


def run_and_kill(folder, rng):
    """Run until a random time after a random line; return the lines that were printed."""
    command = [sys.executable, "-c", DRIVER, str(folder)]
    options = {"env": environment(1), "cwd": EXAMPLE.parent, "text": True}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, **options)
    last, lines = rng.integers(1, 10), []
    for line in process.stdout:
        lines.append(line)
        if len(lines) == last:
            time.sleep(rng.exponential(0.1))
            process.kill()
    process.communicate()
    return lines


def cut_last_line(path, rng):
    """Truncate the last line, as a crash of the machine would."""
    text = path.read_bytes()
    if len(text) > 1:
        start = text.rfind(b"\n", 0, -1) + 1
        path.write_bytes(text[: rng.integers(start, len(text))])


def test_a_run_that_is_killed_keeps_its_lowered_learning_rate_and_its_good_checkpoint(tmp_path):
    example, rng = load(EXAMPLE), np.random.default_rng(int(os.environ.get("SEED", "0")))
    params, lowers, num_resumed_lower, runs, good = example.init(0), 0, 0, 0, 0
    folder = tmp_path / "0"
    folder.mkdir()
    for kill in range(NUM_KILLS):
        lines = run_and_kill(folder, rng)
        for line in lines:
            if found := re.match(r"resumed (\d+) (\S+)", line):
                num, size = int(found[1]), float(found[2])
                assert num >= lowers, f"kill {kill}: {lines}"
                assert size == pytest.approx(0.3**num), f"kill {kill}: {lines}"
                num_resumed_lower += num > 0
                lowers = num
            lowers += line.startswith("lower")
        log = folder / "run.jsonl"
        if kill % 2 and log.exists():
            cut_last_line(log, rng)
        if log.exists():  # the log can be continued
            monitor = gcx.Monitor(params, log=log, resume=True)
            assert monitor.report.num_lowers >= lowers
        checkpoints = example.Checkpoints(folder / "checkpoints")
        assert min(checkpoints.all_steps(), default=good) >= good  # older ones have been deleted
        good = min(checkpoints.all_steps(), default=good)
        checkpoints.close()
        if "stopped\n" in lines:
            runs, lowers, good = runs + 1, 0, 0
            folder = tmp_path / str(runs)
            folder.mkdir()
    assert num_resumed_lower  # otherwise, nothing was tested
    print(f"{NUM_KILLS} kills, {runs} runs ended, {num_resumed_lower} resumed after lower")
