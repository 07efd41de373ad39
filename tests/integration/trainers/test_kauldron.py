"""Kauldron: its `Trainer` on a small Linen model, with its checkpoints."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from kauldron import kd
from pairs import EVERY, NAMES, STEPS, STOP, check_same, of_optax, of_ours

import gradclip_jax as gcx

DATA = {"x": np.random.default_rng(0).normal(size=(16, 4)).astype("float32")}


class Model(nn.Module):
    x: kd.kontext.Key = "batch.x"

    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(jnp.tanh(nn.Dense(8)(x)))


@dataclasses.dataclass(kw_only=True, frozen=True, eq=False)
class Squares(kd.losses.Loss):
    preds: kd.kontext.Key = "preds"
    x: kd.kontext.Key = "batch.x"

    def get_values(self, preds, x):
        return (preds - x[:, :1]) ** 2


def trainer(tx, folder=None, steps=STEPS, **options):
    return kd.train.Trainer(
        seed=0,
        workdir=folder or "/nowhere",
        train_ds=kd.data.InMemoryPipeline(loader=lambda: DATA, batch_size=16, shuffle=False),
        model=Model(),
        train_losses={"squares": Squares()},
        num_train_steps=steps,
        optimizer=tx,
        writer=kd.train.metric_writer.NoopWriter(),
        checkpointer=kd.ckpts.Checkpointer(save_interval_steps=STOP)
        if folder
        else kd.ckpts.NoopCheckpointer(),
        **options,
    )


def train(*args, **options):
    return trainer(*args, **options).train()[0]


@pytest.mark.parametrize("name", NAMES)
def test_trains_as_with_optax(name):
    ours, theirs = train(of_ours(name)), train(of_optax(name))
    check_same(ours.params, theirs.params)
    assert len(jax.tree.leaves(ours.params)[0].sharding.device_set) == jax.device_count()
    assert gcx.metrics(ours.opt_state)["clip_factor"] < 1


def test_goes_on_in_mid_window(tmp_path):
    whole = train(of_ours("both"))
    half = train(of_ours("both"), tmp_path, STOP)
    # Kauldron takes one step more than `num_train_steps`.
    assert gcx.metrics(half.opt_state)["mini_step"] == (STOP + 1) % EVERY
    rest = train(of_ours("both"), tmp_path)
    check_same(rest.params, whole.params, rtol=1e-6, atol=1e-7)
    assert gcx.metrics(rest.opt_state)["gradient_step"] == STEPS // EVERY


def test_a_run_of_optax_goes_on_with_ours():
    half = train(of_optax("accumulated"), None, STOP)
    run = trainer(of_ours("both"))
    state = gcx.convert_state(of_ours("both"), half.opt_state, half.params, reduction="mean")
    state = half.replace(opt_state=state)
    batches = iter(run.train_ds.device_put())
    for _ in range(STOP, STEPS):
        state, _ = run.trainstep.step(state, next(batches))
    check_same(state.params, train(of_optax("accumulated")).params)
