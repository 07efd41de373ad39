"""Several processes, as on several hosts: the numbers of one, and no process left waiting."""

import contextlib
import json
import socket
import subprocess
import sys
import time

import chex
import numpy as np
import process_worker
import pytest

import oracles
from files import environment

pytestmark = pytest.mark.slow  # each launch starts JAX anew in several processes

PATIENCE = 180  # seconds before a launch is given up; a quiet machine needs a tenth of it
HEARTBEAT = 5  # seconds until the death of a process counts
TRAINED = [*process_worker.LAYOUTS, "shard_map_window"]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_together(commands, folder):
    """Runs one process for each command, with eight devices together; `(exit code, output)` of each."""
    started, variables = time.monotonic(), environment(8 // len(commands))
    logs = [folder / f"{i}.log" for i in range(len(commands))]
    with contextlib.ExitStack() as running:
        processes = []
        for command, path in zip(commands, logs, strict=True):
            log = running.enter_context(path.open("w"))
            words = [sys.executable, *map(str, command)]
            process = subprocess.Popen(words, env=variables, stdout=log, stderr=log)
            running.callback(process.wait)
            running.callback(process.kill)
            processes.append(process)
        for process in processes:
            process.wait(timeout=max(PATIENCE - (time.monotonic() - started), 0.1))
    texts = [path.read_text(errors="replace") for path in logs]
    return [(x.returncode, text) for x, text in zip(processes, texts, strict=True)]


def launch(what, processes, folder, *options):
    """Runs the worker in so many processes."""
    common = [process_worker.__file__, what, "--of", processes, "--port", free_port(), *options]
    commands = [[*common, "--process", i, "--out", folder / f"{i}.json"] for i in range(processes)]
    return run_together(commands, folder)


def without_paths(metrics):
    """The metrics of each call whose keys do not depend on how transformations are nested."""
    return [{key: x for key, x in call.items() if "/" not in key} for call in metrics]


# One launch for all claims, since each starts JAX anew.
@pytest.mark.parametrize("processes", [2, 4])
def test_several_processes_see_what_one_device_sees(processes, tmp_path):
    ended = launch("train", processes, tmp_path)
    for i, (code, log) in enumerate(ended):
        assert code == 0, f"process {i} of {processes}:\n{log[-3000:]}"
    texts = [(tmp_path / f"{i}.json").read_text() for i in range(processes)]
    assert len(set(texts)) == 1  # bit for bit, or they would drift apart
    seen = json.loads(texts[0])
    for case, whole in {
        "huge_norm": process_worker.HUGE,
        "pipeline_stages": process_worker.values((4, 6, 3), 11),
    }.items():
        exact = oracles.global_norm([whole])
        np.testing.assert_allclose(seen[case]["norm"], exact, rtol=3e-7, err_msg=case)
    assert abs(seen["pipeline_stages"]["after"] - 1) < 1e-6
    action, _, good_step, batch_ids = seen["decision"]
    assert (action, good_step, batch_ids) == ("rewind", 0, [50, 51, 52])
    calls = process_worker.reference(process_worker.GUARDED_CALLS)
    windows = process_worker.reference(process_worker.GUARDED_WINDOWS)
    is_bad = [i == process_worker.BAD_CALL for i in range(process_worker.CALLS)]
    for case in TRAINED:
        expected, found = windows if case == "shard_map_window" else calls, seen[case]
        np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-5)
        pair = without_paths(found["metrics"]), without_paths(expected["metrics"])
        chex.assert_trees_all_close(*pair, rtol=1e-5, atol=0)
        for name, leaf in expected["params"].items():
            np.testing.assert_allclose(found["params"][name], leaf, rtol=0, atol=1e-5)
            assert np.isfinite(leaf).all()
        # The NaN came in on the last process.
        assert np.isnan(found["loss"]).tolist() == is_bad
        assert found["metrics"][-1]["skipped_nonfinite"] == 1


@pytest.mark.parametrize("who", [0, 1], ids=["coordinator", "other"])
def test_death_of_a_process_ends_the_others_with_an_error(tmp_path, who):
    started = time.monotonic()
    ended = launch("die", 2, tmp_path, "--who", who, "--heartbeat", HEARTBEAT)
    assert ended[who][0] == 7, ended[who][1][-3000:]
    code, log = ended[1 - who]
    assert code not in (0, 7), log[-3000:]
    # It worked until then, and was not killed for waiting too long. (Step `DEATH - 1`, which the
    # other process ended, it had begun; it may have been ended before it printed that.)
    assert f"{process_worker.DEATH - 2} " in log
    assert time.monotonic() - started < PATIENCE / 2
