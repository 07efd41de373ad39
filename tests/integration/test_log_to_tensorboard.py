"""The logging example: a real event file, and in it what `metrics` said."""

from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
KEYS = {
    "loss",
    "grad_norm",
    "clip_threshold",
    "clip_factor",
    "clip_fraction",
    "skipped_nonfinite",
    "consecutive_skips",
    "guard_failed",
}


@pytest.fixture(scope="module")
def example():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield import_module("log_to_tensorboard")


@pytest.fixture(scope="module")
def logged(example, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    rows, file = example.main(folder)
    assert [file] == list(folder.iterdir())
    return rows, file


def test_the_event_file_holds_what_metrics_said(example, logged):
    rows, file = logged
    scalars = example.read_scalars(file)
    assert set(scalars) == KEYS
    for name, points in scalars.items():
        values = np.float32([row[name] for row in rows])
        steps = np.flatnonzero(np.isfinite(values))
        assert [step for step, _ in points] == steps.tolist()
        np.testing.assert_array_equal(np.float32([v for _, v in points]), values[steps])


def test_the_keys_are_the_same_at_every_step(logged):
    assert all(set(row) == KEYS for row in logged[0])


def test_the_bad_batch_is_on_record_and_did_no_harm(logged):
    rows, _ = logged
    assert [row["skipped_nonfinite"] for row in rows] == 20 * [0.0] + 40 * [1.0]
    assert [row["consecutive_skips"] for row in rows] == 20 * [0.0] + [1.0] + 39 * [0.0]
    assert [step for step, row in enumerate(rows) if not np.isfinite(row["loss"])] == [20]
    assert rows[-1]["loss"] < rows[0]["loss"] / 100
