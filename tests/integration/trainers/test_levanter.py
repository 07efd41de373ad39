"""levanter: its `Trainer` on a small Equinox model, with its checkpoints."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import levanter
import numpy as np
import optax
import pytest
from levanter.checkpoint import CheckpointerConfig
from levanter.tracker import NoopConfig
from levanter.trainer import Trainer, TrainerConfig
from pairs import EVERY, MAX_NORM, NAMES, STEPS, STOP, check_same, of_optax, of_ours

import gradclip_jax as gcx

rng = np.random.default_rng(0)
DATA = [
    hax.named(jnp.asarray(rng.normal(size=(16, 4)), jnp.float32), ("batch", "feature"))
    for _ in range(STEPS)
]


def loss_fn(model, x, *, key=None):
    x = x.array
    return jnp.mean((jax.vmap(model)(x) - x[:, :1]) ** 2), {}


def new_model():
    return eqx.nn.MLP(4, 1, 8, 1, activation=jnp.tanh, key=jax.random.key(0))


def train(tx, folder, batches=DATA, steps=STEPS, hooks=(), state=None, **options):
    config = TrainerConfig(
        id="run",
        tracker=NoopConfig(),
        num_train_steps=steps,
        train_batch_size=16,
        checkpointer=CheckpointerConfig(base_path=str(folder), append_run_id_to_base_path=False),
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
        state = state or trainer.initial_state(jax.random.PRNGKey(0), model_init=new_model)
        return trainer.train(state, batches).state


def params_of(state):
    return eqx.filter(state.model, eqx.is_inexact_array)


@pytest.mark.parametrize("name", NAMES)
def test_trains_as_with_optax(name, tmp_path):
    theirs = train(of_optax(name), tmp_path / "optax")
    ours = train(of_ours(name), tmp_path / "ours")
    check_same(params_of(ours), params_of(theirs))
    assert gcx.metrics(ours.opt_state)["clip_factor"] < 1


def test_goes_on_in_mid_window(tmp_path):
    whole = train(of_ours("both"), tmp_path / "whole")
    train(of_ours("both"), tmp_path / "run", steps=STOP)
    rest = train(of_ours("both"), tmp_path / "run", DATA[STOP:], load_checkpoint=True)
    assert int(rest.step) == STEPS
    check_same(params_of(rest), params_of(whole), rtol=1e-6, atol=1e-7)
    assert gcx.metrics(rest.opt_state)["gradient_step"] == STEPS // EVERY


def test_a_run_of_optax_goes_on_with_ours(tmp_path):
    half = train(of_optax("accumulated"), tmp_path / "half", steps=STOP)
    tx = of_ours("both")
    state = gcx.convert_state(tx, half.opt_state, params_of(half), reduction="mean")
    half = eqx.tree_at(lambda s: s.opt_state, half, state, is_leaf=lambda x: x is half.opt_state)
    half = type(half)(**{**vars(half), "optimizer": tx})
    rest = train(tx, tmp_path / "rest", DATA[STOP:], state=half)
    check_same(params_of(rest), params_of(train(of_optax("accumulated"), tmp_path / "whole")))


def test_the_loss_reaches_the_guard(tmp_path):
    tx = gcx.skip_spikes(of_ours("alone"), loss=lambda step: 0.0)
    assert gcx.metrics(train(tx, tmp_path).opt_state)["skipped_large_loss"] == STEPS


def test_a_hook_logs_metrics_and_the_learning_rate(tmp_path):
    def with_rate(learning_rate):
        return optax.chain(gcx.clip_by_global_norm(MAX_NORM), optax.adam(learning_rate))

    log = []

    def hook(info):
        rate = optax.tree.get(info.opt_state, "hyperparams")["learning_rate"]
        row = {"learning_rate": rate, **gcx.metrics(info.opt_state)}
        levanter.tracker.log(row, step=info.step)
        if row.get("guard_failed"):
            raise RuntimeError(f"50 consecutive steps were skipped before step {info.step}")
        log.append({name: float(x) for name, x in row.items()})  # the next step takes its buffers

    inner = optax.inject_hyperparams(with_rate)(optax.linear_schedule(1e-2, 0, STEPS // EVERY))
    tx = gcx.skip_nonfinite(gcx.accumulate_gradients(inner, every=EVERY))
    train(tx, tmp_path, hooks=[hook])
    assert log[0]["learning_rate"] == pytest.approx(1e-2)
    assert log[-1]["learning_rate"] == pytest.approx(1e-2 / 5)  # of the fifth and last step
