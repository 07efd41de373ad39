"""Each optimizer of Optax beside the one of this package that takes its place, in every trainer."""

from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gradclip_jax as gcx

STEPS, EVERY = 20, 4
STOP = 10  # in the middle of a window
MAX_NORM = 0.1  # low, so that most steps are clipped
BATCHES = np.random.default_rng(0).normal(size=(STEPS, 16, 4)).astype("float32")

MESH = Mesh(jax.devices(), ("data",))
EVERYWHERE = NamedSharding(MESH, P())  # a copy on each device
SPREAD = NamedSharding(MESH, P("data"))  # rows over all devices


def of_optax(name):
    tx = optax.chain(optax.clip_by_global_norm(MAX_NORM), optax.adam(1e-2))
    if name == "guarded":
        tx = optax.apply_if_finite(tx, max_consecutive_errors=3)
    if name == "accumulated":
        tx = optax.MultiSteps(tx, EVERY).gradient_transformation()
    return tx


def of_ours(name):
    tx = optax.chain(gcx.clip_by_global_norm(MAX_NORM), optax.adam(1e-2))
    if name in ("accumulated", "both"):
        tx = gcx.accumulate_gradients(tx, EVERY)
    return gcx.skip_nonfinite(tx) if name in ("guarded", "both") else tx


def check_same(found, expected, rtol=1e-5, atol=1e-6):
    """Two trees hold the same numbers, all finite, to float32 rounding of 20 steps."""
    found, expected = jax.tree.leaves(found), jax.tree.leaves(expected)
    assert len(expected) > 0
    for x, y in zip(found, expected, strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.isfinite(y).all()
        np.testing.assert_allclose(x, y, rtol=rtol, atol=atol)


class Run(NamedTuple):
    """A run after some steps: its parameters, its optimizer state, and what it goes on from."""

    params: Any
    state: Any
    rest: Any


class TrainerTests:
    """The tests of every trainer. A subclass says how it trains, stores and restores.

    Attributes:
        beside_optax: tolerance of the difference from a run with Optax.
        beside_itself: tolerance of the difference between a run with and without a pause.
        passes_loss: whether the trainer passes the loss to the optimizer.
    """

    beside_optax = {"rtol": 1e-5, "atol": 1e-6}
    beside_itself = {"rtol": 1e-6, "atol": 1e-7}
    passes_loss = False

    def train(self, tx, first=0, last=STEPS, start=None) -> Run:
        """Train from one step to another, from the beginning or from the `rest` of a run."""

    def restored(self, tx, folder) -> Run:
        """A run that was stored after `STOP` steps and is restored from the folder."""

    def converted(self, tx, half, folder) -> Any:
        """The `rest` of a run with Optax, from which the same run goes on with `tx`."""

    @pytest.mark.parametrize("name", ["alone", "guarded", "accumulated"])
    def test_trains_as_with_optax(self, name):
        ours, theirs = self.train(of_ours(name)), self.train(of_optax(name))
        check_same(ours.params, theirs.params, **self.beside_optax)
        assert gcx.metrics(ours.state)["clip_factor"] < 1

    def test_goes_on_in_mid_window(self, tmp_path):
        tx = of_ours("both")
        half = self.restored(tx, tmp_path)
        assert gcx.metrics(half.state)["mini_step"] == STOP % EVERY
        rest = self.train(tx, STOP, STEPS, half.rest)
        check_same(rest.params, self.train(tx).params, **self.beside_itself)

    def test_a_run_of_optax_goes_on_with_ours(self, tmp_path):
        theirs, tx = of_optax("accumulated"), of_ours("both")
        half = self.train(theirs, 0, STOP).rest
        rest = self.train(tx, STOP, STEPS, self.converted(tx, half, tmp_path))
        check_same(rest.params, self.train(theirs).params, **self.beside_optax)

    def test_the_loss_reaches_the_guard(self):
        if not self.passes_loss:
            pytest.skip("this trainer does not pass the loss")
        tx = gcx.skip_spikes(of_ours("alone"), loss=lambda step: 0.0)  # no loss is as small
        assert gcx.metrics(self.train(tx).state)["skipped_large_loss"] == STEPS
