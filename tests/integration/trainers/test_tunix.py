"""Tunix: `PeftTrainer` on a small model, with its checkpoints."""

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from pairs import BATCHES, EVERY, MAX_NORM, STEPS, STOP, Run, TrainerTests
from tunix.sft import peft_trainer

import gradclip_jax as gcx

DATA = [{"x": x} for x in BATCHES]
MESH = Mesh(jax.devices(), ("fsdp",))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.last = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.last(jnp.tanh(self.first(x)))


def loss_fn(model, x):
    return jnp.mean((model(x) - x[:, :1]) ** 2)


class WithLoss(peft_trainer.PeftTrainer):
    def _train_step(self, model, optimizer, inputs):
        loss, grads = nnx.value_and_grad(self.loss_fn)(model, **self.gen_model_input_fn(inputs))
        optimizer.update(model, grads, loss=loss)
        return loss, None, gcx.metrics(optimizer.opt_state)["grad_norm"]


def trainer(tx, steps=STEPS, folder=None, kind=peft_trainer.PeftTrainer):
    config = peft_trainer.TrainingConfig(
        max_steps=steps,
        eval_every_n_steps=100,
        checkpoint_root_directory=folder and str(folder),
        checkpointing_options=ocp.CheckpointManagerOptions(save_interval_steps=STOP),
    )
    model = Model(nnx.Rngs(0))
    nnx.update(model, jax.device_put(nnx.state(model), NamedSharding(MESH, P())))
    return kind(model, tx, config).with_loss_fn(loss_fn)


def as_run(trained):
    params = nnx.to_pure_dict(nnx.state(trained.model, nnx.Param))
    return Run(params, trained.optimizer.opt_state, trained)


class TestTunix(TrainerTests):
    def train(self, tx, first=0, last=STEPS, start=None, **options):
        trained = start or trainer(tx, last, **options)
        with MESH:
            trained.train(DATA[first - trained.train_steps :])  # it skips what it has seen
        return as_run(trained)

    def restored(self, tx, folder):
        self.train(tx, 0, STOP, folder=folder)
        return as_run(trainer(tx, STEPS, folder))

    def converted(self, tx, half, folder):
        rest = trainer(tx, STEPS - STOP)
        nnx.update(rest.model, nnx.state(half.model))
        state = gcx.convert_state(
            tx, half.optimizer.opt_state, nnx.state(half.model, nnx.Param), reduction="mean"
        )
        nnx.update(rest.optimizer.opt_state, nnx.state(state))
        return rest

    def test_a_subclass_passes_the_loss_to_the_guard(self):
        tx = gcx.skip_spikes(optax.sgd(1e-2), loss=lambda step: 0.0)
        assert gcx.metrics(self.train(tx, kind=WithLoss).state)["skipped_large_loss"] == STEPS


def with_rate(learning_rate):
    return optax.chain(gcx.clip_by_global_norm(MAX_NORM), optax.adam(learning_rate))


def gated(learning_rate):
    return gcx.skip_nonfinite(gcx.accumulate_gradients(with_rate(learning_rate), every=EVERY))


def test_the_learning_rate_is_logged_under_one_gate_and_around_two():
    schedule = optax.linear_schedule(1e-2, 0, STEPS)
    for gate in (gcx.skip_nonfinite, lambda tx: gcx.accumulate_gradients(tx, EVERY)):
        tx = gate(optax.inject_hyperparams(with_rate)(schedule))
        assert trainer(tx)._try_get_learning_rate() == 1e-2
    # Outside, its schedule counts micro-batches.
    ours = TestTunix().train(optax.inject_hyperparams(gated)(schedule)).rest
    assert ours._try_get_learning_rate() < 1e-2
    assert gcx.metrics(ours.optimizer.opt_state)["gradient_step"] == STEPS // EVERY
