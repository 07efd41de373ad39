"""Several processes, as on several hosts: the numbers of one."""

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

from files import environment

pytestmark = pytest.mark.slow  # each launch starts JAX anew in several processes

PATIENCE = 180  # seconds before a launch is given up; a quiet machine needs a tenth of it


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


def without_paths(metrics):
    """The metrics of each call whose keys do not depend on how transformations are nested."""
    return [{key: x for key, x in call.items() if "/" not in key} for call in metrics]


# One launch for all claims, since each starts JAX anew.
def test_two_processes_see_what_one_device_sees(tmp_path):
    outs, port = [tmp_path / f"{i}.json" for i in range(2)], free_port()
    worker = process_worker.__file__
    ended = run_together([[worker, i, 2, port, out] for i, out in enumerate(outs)], tmp_path)
    assert [code for code, _ in ended] == [0, 0], "\n".join(log[-3000:] for _, log in ended)
    texts = [out.read_text() for out in outs]
    assert texts[0] == texts[1]  # bit for bit, or they would drift apart
    seen = json.loads(texts[0])
    _, action, _, good_step, batch_ids, *_ = seen["decision"]
    assert (action, good_step, batch_ids) == ("rewind", 0, [50, 51, 52])
    assert seen["failing_write"] == "continue"
    assert seen["one_monitor"] and seen["different_logs"].startswith("Monitor.read: `log` must be")
    calls = process_worker.reference(process_worker.GUARDED_CALLS)
    windows = process_worker.reference(process_worker.GUARDED_WINDOWS)
    is_bad = [i == process_worker.BAD_CALL for i in range(process_worker.CALLS)]
    for case, expected in (("by_jit", calls), ("shard_map_window", windows)):
        found = seen[case]
        np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-5)
        pair = without_paths(found["metrics"]), without_paths(expected["metrics"])
        chex.assert_trees_all_close(*pair, rtol=1e-5, atol=0)
        chex.assert_trees_all_close(found["params"], expected["params"], rtol=0, atol=1e-5)
        # The NaN came in on the last process.
        assert np.isnan(found["loss"]).tolist() == is_bad
        assert found["metrics"][-1]["skipped_nonfinite"] == 1
