"""Kauldron: its `Trainer` on a small Linen model, with its checkpoints."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import linen as nn
from kauldron import kd
from pairs import BATCHES, STEPS, STOP, Run, TrainerTests, of_ours

import gradclip_jax as gcx


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


def trainer(tx, steps, folder=None):
    data = {"x": BATCHES[0]}
    saves = kd.ckpts.Checkpointer(save_interval_steps=STOP)
    return kd.train.Trainer(
        seed=0,
        workdir=folder or "/nowhere",
        train_ds=kd.data.InMemoryPipeline(loader=lambda: data, batch_size=16, shuffle=False),
        model=Model(),
        train_losses={"squares": Squares()},
        num_train_steps=steps - 1,  # Kauldron trains for one step more
        optimizer=tx,
        writer=kd.train.metric_writer.NoopWriter(),
        checkpointer=saves if folder else kd.ckpts.NoopCheckpointer(),
    )


class TestKauldron(TrainerTests):
    def train(self, tx, first=0, last=STEPS, start=None):
        if isinstance(start, kd.train.TrainState):
            state, run = start, trainer(tx, last)
            batches = iter(run.train_ds.device_put())
            for _ in range(first, last):
                state, _ = run.trainstep.step(state, next(batches))
        else:  # from the last checkpoint in a folder, or from the beginning
            state, _ = trainer(tx, last, start).train()
        assert len(jax.tree.leaves(state.params)[0].sharding.device_set) == jax.device_count()
        return Run(state.params, state.opt_state, state)

    def restored(self, tx, folder):
        trainer(tx, STOP + 1, folder).train()  # stores its state after `STOP` steps
        return self.train(tx, STOP, STOP, folder)._replace(rest=folder)

    def converted(self, tx, half, folder):
        state = gcx.convert_state(of_ours("both"), half.opt_state, half.params, reduction="mean")
        state = half.replace(opt_state=state)
        return state
