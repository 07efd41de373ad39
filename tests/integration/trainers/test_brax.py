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
from pairs import EVERY, NAMES, STEPS, STOP, check_same, of_optax, of_ours

import gradclip_jax as gcx

small_networks = functools.partial(
    make_ppo_networks, policy_hidden_layer_sizes=(8,), value_hidden_layer_sizes=(8,)
)

SIZES = {"episode_length": 16, "num_envs": 8, "unroll_length": 5, "batch_size": 8}
SIZES |= {"num_minibatches": 1, "num_updates_per_batch": 4}


def train(tx, **options):
    """PPO makes its optimizer itself, `optax.adam(learning_rate)`: `tx` takes its place."""
    with mock.patch.object(optax, "adam", lambda learning_rate: tx):
        _, params, _ = ppo.train(
            envs.get_environment("fast"),
            num_timesteps=STEPS // 4 * 40,
            **SIZES,
            run_evals=False,
            network_factory=small_networks,
            **options,
        )
    return params


def reporting(tx, log):
    """The state stays inside `ppo.train`: what is to be logged is sent out of the step."""

    def update(grads, state, params=None, **extra_args):
        updates, state = tx.update(grads, state, params, **extra_args)
        jax.debug.callback(lambda row: log.append(row), gcx.metrics(state))
        return updates, state

    return optax.GradientTransformationExtraArgs(tx.init, update)


@pytest.mark.parametrize("name", NAMES)
def test_trains_as_with_optax(name):
    log = []
    theirs, ours = train(of_optax(name)), train(reporting(of_ours(name), log))
    jax.effects_barrier()
    # Adam divides a gradient near zero by itself: its rounding errors are those of a whole step.
    check_same(ours, theirs, rtol=1e-4, atol=2e-5)
    assert len(log) == STEPS * jax.device_count()
    assert any(row["clip_factor"] < 1 for row in log)


def test_its_checkpoints_hold_no_optimizer_state(tmp_path):
    log = []
    train(of_ours("both"), save_checkpoint_path=str(tmp_path))
    (path,) = tmp_path.glob("[0-9]*")
    train(reporting(of_ours("both"), log), restore_checkpoint_path=str(path))
    jax.effects_barrier()
    assert int(log[0]["mini_step"]) == 1  # a run that is restored begins a new window


def test_a_loop_of_ones_own_resumes_in_mid_window():
    network = small_networks(4, 2).policy_network
    x = jax.random.normal(jax.random.key(1), (jax.device_count(), 8, 4))

    def loss_fn(params, x):
        return jnp.mean((network.apply(None, params, x) - 1.0) ** 2)

    def run(tx, params, state, steps):
        update = gradients.gradient_update_fn(loss_fn, tx, "i")
        step = jax.pmap(lambda p, s, x: update(p, x, optimizer_state=s)[1:], "i", in_axes=(0, 0, 0))
        for _ in range(steps):
            params, state = step(params, state, x)
        return params, state

    def start(tx):
        params = network.init(jax.random.key(0))
        return jax.tree.map(
            lambda a: jnp.stack([a] * jax.device_count()), (params, tx.init(params))
        )

    tx, optax_tx = of_ours("both"), of_optax("accumulated")
    whole = run(tx, *start(tx), STEPS)
    half = run(tx, *start(tx), STOP)
    assert gcx.metrics(jax.tree.map(lambda a: a[0], half[1]))["mini_step"] == STOP % EVERY
    check_same(run(tx, *half, STEPS - STOP), whole, rtol=0, atol=0)

    theirs = run(optax_tx, *start(optax_tx), STEPS)
    params, state = run(optax_tx, *start(optax_tx), STOP)
    state = jax.vmap(lambda s, p: gcx.convert_state(tx, s, p, reduction="mean"))(state, params)
    check_same(run(tx, params, state, STEPS - STOP)[0], theirs[0])
