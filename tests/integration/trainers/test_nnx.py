"""Flax NNX: `nnx.Optimizer` as it is. The page of NNX resumes from Orbax, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from pairs import EVERYWHERE, NAMES, STEPS, STOP, check_same, of_optax, of_ours, on_all_devices

import gradclip_jax as gcx

rng = np.random.default_rng(0)
X = [on_all_devices(rng.normal(size=(16, 4)).astype("float32")) for _ in range(STEPS)]


def start(tx):
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(4, 8, rngs=rngs), jnp.tanh, nnx.Linear(8, 1, rngs=rngs))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    nnx.update((model, optimizer), jax.device_put(nnx.state((model, optimizer)), EVERYWHERE))
    return model, optimizer


@nnx.jit
def step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - x[:, :1]) ** 2))(model)
    optimizer.update(model, grads, value=loss)
    return loss


def train(model, optimizer, batches=X):
    for x in batches:
        step(model, optimizer, x)
    return model, optimizer


def params_of(pair):
    return nnx.to_pure_dict(nnx.state(pair[0], nnx.Param))


@pytest.mark.parametrize("name", NAMES)
def test_trains_as_with_optax(name):
    theirs, ours = train(*start(of_optax(name))), train(*start(of_ours(name)))
    check_same(params_of(ours), params_of(theirs))
    assert gcx.metrics(ours[1].opt_state)["clip_factor"] < 1


def test_a_run_of_optax_goes_on_with_ours():
    model, optimizer = train(*start(of_optax("accumulated")), X[:STOP])
    tx = of_ours("both")
    params = nnx.state(model, nnx.Param)
    state = gcx.convert_state(tx, optimizer.opt_state, params, reduction="mean")
    ours = nnx.Optimizer(model, tx, wrt=nnx.Param)
    nnx.update(ours, jax.device_put(nnx.state(ours), EVERYWHERE))
    nnx.update(ours.opt_state, nnx.state(state))
    check_same(
        params_of(train(model, ours, X[STOP:])), params_of(train(*start(of_optax("accumulated"))))
    )


def flushed(model, optimizer):
    params = nnx.state(model, nnx.Param)
    return gcx.flush(optimizer.tx, optimizer.opt_state, params)[1]


def reset(model, optimizer):
    return gcx.reset_accumulation(optimizer.opt_state)


@pytest.mark.parametrize("change", [flushed, reset])
def test_one_line_copies_a_changed_state_into_an_optimizer(change):
    model, optimizer = train(*start(of_ours("both")), X[:STOP])
    state = change(model, optimizer)
    expected = gcx.metrics(state)
    nnx.update(optimizer.opt_state, nnx.state(state))
    assert gcx.metrics(optimizer.opt_state) == expected
    at = int(expected["mini_step"])
    train(model, optimizer, X[STOP : STOP + 1])
    assert gcx.metrics(optimizer.opt_state)["mini_step"] == at + 1
