"""Tunix: `PeftTrainer` on a small model, with its checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from pairs import EVERY, MAX_NORM, NAMES, STEPS, STOP, check_same, of_optax, of_ours
from tunix.sft import peft_trainer

import gradclip_jax as gcx

rng = np.random.default_rng(0)
DATA = [{"x": rng.normal(size=(16, 4)).astype("float32")} for _ in range(STEPS)]
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


def trainer(tx, steps=STEPS, folder=None, kind=peft_trainer.PeftTrainer, **config):
    config = peft_trainer.TrainingConfig(
        max_steps=steps,
        eval_every_n_steps=100,
        checkpoint_root_directory=folder and str(folder),
        checkpointing_options=ocp.CheckpointManagerOptions(save_interval_steps=STOP),
        **config,
    )
    model = Model(nnx.Rngs(0))
    nnx.update(model, jax.device_put(nnx.state(model), NamedSharding(MESH, P())))
    return kind(model, tx, config).with_loss_fn(loss_fn)


def train(*args, **options):
    with MESH:
        trained = trainer(*args, **options)
        trained.train(DATA)
    return trained


def params_of(trained):
    return nnx.to_pure_dict(nnx.state(trained.model, nnx.Param))


@pytest.mark.parametrize("name", NAMES)
def test_trains_as_with_optax(name):
    theirs, ours = train(of_optax(name)), train(of_ours(name))
    check_same(params_of(ours), params_of(theirs))
    assert gcx.metrics(ours.optimizer.opt_state)["clip_factor"] < 1


def test_goes_on_in_mid_window(tmp_path):
    whole = train(of_ours("both"))
    train(of_ours("both"), STOP, tmp_path)
    rest = trainer(of_ours("both"), STEPS, tmp_path)
    assert rest.train_steps == STOP
    assert gcx.metrics(rest.optimizer.opt_state)["mini_step"] == STOP % EVERY
    with MESH:
        rest.train(DATA)
    check_same(params_of(rest), params_of(whole), rtol=1e-6, atol=1e-7)


def test_a_run_of_optax_goes_on_with_ours():
    half = train(of_optax("accumulated"), STOP)
    tx = of_ours("both")
    rest = trainer(tx, STEPS - STOP)
    nnx.update(rest.model, nnx.state(half.model))
    state = gcx.convert_state(
        tx, half.optimizer.opt_state, nnx.state(half.model, nnx.Param), reduction="mean"
    )
    nnx.update(rest.optimizer.opt_state, nnx.state(state))
    with MESH:
        rest.train(DATA[STOP:])
    check_same(params_of(rest), params_of(train(of_optax("accumulated"))))


def test_the_loss_reaches_the_guard():
    tx = gcx.skip_spikes(of_ours("alone"), loss=lambda step: 0.0)
    ours = train(tx, kind=WithLoss)
    assert gcx.metrics(ours.optimizer.opt_state)["skipped_large_loss"] == STEPS


def with_rate(learning_rate):
    return optax.chain(gcx.clip_by_global_norm(MAX_NORM), optax.adam(learning_rate))


@pytest.mark.parametrize(
    "gate", [gcx.skip_nonfinite, lambda tx: gcx.accumulate_gradients(tx, EVERY)]
)
def test_the_learning_rate_is_logged_under_one_gate(gate):
    schedule = optax.linear_schedule(1e-2, 0, STEPS)
    tx = gate(optax.inject_hyperparams(with_rate)(schedule))
    assert trainer(tx)._try_get_learning_rate() == 1e-2


def test_the_learning_rate_is_logged_under_two_gates():
    def gated(learning_rate):
        return gcx.skip_nonfinite(gcx.accumulate_gradients(with_rate(learning_rate), every=EVERY))

    # Outside, its schedule counts micro-batches.
    tx = optax.inject_hyperparams(gated)(optax.linear_schedule(1e-2, 0, STEPS * EVERY))
    ours = train(tx)
    assert ours._try_get_learning_rate() < 1e-2
    assert gcx.metrics(ours.optimizer.opt_state)["gradient_step"] == STEPS // EVERY
