"""levanter: its `Trainer` on a small Equinox model, with its checkpoints."""

import tempfile

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import levanter
import optax
import pytest
from levanter.checkpoint import CheckpointerConfig
from levanter.tracker import NoopConfig
from levanter.trainer import Trainer, TrainerConfig
from pairs import BATCHES, EVERY, MAX_NORM, STEPS, STOP, Run, TrainerTests

import gradclip_jax as gcx

DATA = [hax.named(jnp.asarray(x), ("batch", "feature")) for x in BATCHES]


def loss_fn(model, x, *, key=None):
    x = x.array
    return jnp.mean((jax.vmap(model)(x) - x[:, :1]) ** 2), {}


def new_model():
    return eqx.nn.MLP(4, 1, 8, 1, activation=jnp.tanh, key=jax.random.key(0))


def params_of(state):
    return eqx.filter(state.model, eqx.is_inexact_array)


def as_run(state):
    return Run(params_of(state), state.opt_state, state)


def with_state(tx, half):
    state = gcx.convert_state(tx, half.opt_state, params_of(half), reduction="mean")
    half = eqx.tree_at(lambda s: s.opt_state, half, state, is_leaf=lambda x: x is half.opt_state)
    return type(half)(**{**vars(half), "optimizer": tx})


class TestLevanter(TrainerTests):
    passes_loss = True

    def train(self, tx, first=0, last=STEPS, start=None, folder=None, hooks=(), **options):
        folder = folder or tempfile.mkdtemp()
        config = TrainerConfig(
            id="run",
            tracker=NoopConfig(),
            num_train_steps=last,
            train_batch_size=16,
            checkpointer=CheckpointerConfig(str(folder), append_run_id_to_base_path=False),
            require_accelerator=False,
            log_jaxprs=False,
            log_xla_hlo=False,
            crash_on_nan=False,  # the guard's business
            crash_on_inf=False,
            **options,
        )
        with Trainer(config, tx, loss_fn) as trainer:
            for hook in hooks:
                trainer.add_hook(hook)
            state = start or trainer.initial_state(jax.random.PRNGKey(0), model_init=new_model)
            return as_run(trainer.train(state, DATA[first:]).state if first < last else state)

    def restored(self, tx, folder):
        self.train(tx, 0, STOP, folder=folder)
        return self.train(tx, STOP, STOP, folder=folder, load_checkpoint=True)

    def converted(self, tx, half, folder):
        return with_state(tx, half)

    def test_a_hook_logs_metrics_and_the_learning_rate(self):
        def with_rate(learning_rate):
            return optax.chain(gcx.clip_by_global_norm(MAX_NORM), optax.adam(learning_rate))

        log = []

        def hook(info):
            rate = optax.tree.get(info.opt_state, "hyperparams")["learning_rate"]
            row = {"learning_rate": rate, **gcx.metrics(info.opt_state)}
            levanter.tracker.log(row, step=info.step)
            if row.get("guard_failed"):
                raise RuntimeError(f"50 consecutive steps were skipped before step {info.step}")
            log.append(float(rate))  # the next step takes its buffer

        inner = optax.inject_hyperparams(with_rate)(optax.linear_schedule(1e-2, 0, STEPS // EVERY))
        self.train(gcx.skip_nonfinite(gcx.accumulate_gradients(inner, every=EVERY)), hooks=[hook])
        # The first and the last of five steps.
        assert [log[0], log[-1]] == [pytest.approx(1e-2), pytest.approx(1e-2 / 5)]
