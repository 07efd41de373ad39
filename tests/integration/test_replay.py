"""The recovery example: bad stretches are left out, and a hopeless run stops."""

import re

import jax.numpy as jnp
import pytest

from files import ROOT, load, python

pytestmark = pytest.mark.slow

EXAMPLE = ROOT / "examples/replay.py"


@pytest.fixture(scope="module")
def example():
    return load(EXAMPLE)


def test_without_arguments_it_prints_its_usage_and_demonstrates_that_recovery_undoes_a_stretch():
    printed = python(EXAMPLE)
    assert "Usage:" in printed and "python replay.py FOLDER" in printed
    losses = {x: float(loss) for x, loss in re.findall(r"(.+): loss (\S+)$", printed, re.M)}
    noise = abs(losses["clean"] - losses["clean, another seed"])
    assert abs(losses["spoilt, with recovery"] - losses["clean"]) < noise
    assert losses["spoilt"] > 2 * losses["clean"]


def test_exactly_the_spoilt_batches_are_left_out(tmp_path, example):
    seed, spoilt = 10, [*range(100, 110), *range(223, 240)]
    params, monitor = example.train(tmp_path, seed, spoilt)
    clean = example.test_loss(example.train_plainly(seed))
    assert set(spoilt) <= set(monitor.report.batch_ids)
    assert len(monitor.report.batch_ids) <= len(spoilt) + 10
    assert abs(example.test_loss(params) - clean) < 0.02  # the deviation over 20 seeds


def test_a_learning_rate_that_is_too_high_stops_the_run_with_that_reason(tmp_path, example):
    def learning_rate(step):
        return jnp.where(step < 200, 3e-3, 3.0)

    _, monitor = example.train(tmp_path, 0, learning_rate=learning_rate, steps=1000)
    assert monitor.report.action == "stop"
    assert "earlier rewinds did not help" in monitor.report.reason
    assert monitor.report.step < 400


def test_a_clean_run_is_not_rewound(tmp_path, example):
    _, monitor = example.train(tmp_path, 0, steps=1000)
    assert monitor.report.batch_ids == [] and monitor.report.good_step > 900
