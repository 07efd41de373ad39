"""brax: PPO on its small test environment, and its update function of one's own loop.

brax 0.14.2 calls `jax.device_put_replicated`, which JAX 0.10 no longer has.
"""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import optax
import pytest
from brax import envs
from brax.training import gradients
from brax.training.agents.ppo import train as ppo
from brax.training.agents.ppo.networks import make_ppo_networks
from pairs import STEPS, STOP, Run, TrainerTests, check_same, of_optax, of_ours

import gradclip_jax as gcx

small_networks = functools.partial(
    make_ppo_networks, policy_hidden_layer_sizes=(8,), value_hidden_layer_sizes=(8,)
)
environment = envs.get_environment("fast")
SIZES = {"episode_length": 16, "num_envs": 8, "unroll_length": 5, "batch_size": 8}
SIZES |= {"num_minibatches": 1, "num_updates_per_batch": 4, "num_timesteps": STEPS // 4 * 40}
NETWORK = small_networks(4, 2).policy_network


def loss_fn(params, x):
    return jnp.mean((NETWORK.apply(None, params, x) - 1.0) ** 2)


def first_of(tree):
    """The copy on the first device."""
    return jax.tree.map(lambda x: x[0], tree)


class TestLoopOfOnesOwn(TrainerTests):
    def train(self, tx, first=0, last=STEPS, start=None):
        update = gradients.gradient_update_fn(loss_fn, tx, "i")
        step = jax.pmap(lambda p, s, x: update(p, x, optimizer_state=s)[1:], "i", in_axes=(0, 0, 0))
        params, state = start or self.start(tx)
        x = jax.random.normal(jax.random.key(1), (jax.device_count(), 8, 4))
        for _ in range(first, last):
            params, state = step(params, state, x)
        return Run(params, first_of(state), (params, state))

    def start(self, tx):
        params = NETWORK.init(jax.random.key(0))
        pair = params, tx.init(params)
        return jax.tree.map(lambda x: jnp.stack([x] * jax.device_count()), pair)

    def restored(self, tx, folder):
        return self.train(tx, 0, STOP)  # storing them is left to the user

    def converted(self, tx, half, folder):
        params, state = half
        convert = functools.partial(gcx.convert_state, tx, reduction="mean")
        return params, jax.vmap(convert)(state, params)


def train_ppo(tx, **options):
    """PPO makes its optimizer itself, `optax.adam(learning_rate)`: `tx` takes its place."""
    options |= SIZES | {"run_evals": False, "network_factory": small_networks}
    with mock.patch.object(optax, "adam", lambda learning_rate: tx):
        _, params, _ = ppo.train(environment, **options)
    jax.effects_barrier()
    return params


def reporting(tx, log):
    """The state stays inside `ppo.train`: what is to be logged is sent out of the step."""

    def update(grads, state, params=None, **extra_args):
        updates, state = tx.update(grads, state, params, **extra_args)
        jax.debug.callback(lambda row: log.append(row), gcx.metrics(state))
        return updates, state

    return optax.GradientTransformationExtraArgs(tx.init, update)


@pytest.mark.parametrize("name", ["alone", "guarded", "accumulated"])
def test_ppo_trains_as_with_optax(name):
    log = []
    theirs, ours = train_ppo(of_optax(name)), train_ppo(reporting(of_ours(name), log))
    # Adam divides a gradient near zero by itself: its rounding errors are those of a whole step.
    check_same(ours, theirs, rtol=1e-4, atol=2e-5)
    assert len(log) == STEPS * jax.device_count()
    assert any(row["clip_factor"] < 1 for row in log)


def test_checkpoints_of_ppo_hold_no_optimizer_state(tmp_path):
    log = []
    train_ppo(of_ours("both"), save_checkpoint_path=str(tmp_path))
    (path,) = tmp_path.glob("[0-9]*")
    train_ppo(reporting(of_ours("both"), log), restore_checkpoint_path=str(path))
    assert int(log[0]["mini_step"]) == 1  # a run that is restored begins a new window
