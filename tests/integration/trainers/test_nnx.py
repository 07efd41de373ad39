"""Flax NNX: `nnx.Optimizer` as it is. The page of NNX resumes from Orbax, bit for bit."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from pairs import BATCHES, EVERYWHERE, SPREAD, STEPS, STOP, Run, TrainerTests, of_ours

import gradclip_jax as gcx


@nnx.jit
def step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - x[:, :1]) ** 2))(model)
    optimizer.update(model, grads, value=loss)
    return loss


def on_all_devices(pair):
    nnx.update(pair, jax.device_put(nnx.state(pair), EVERYWHERE))
    return pair


class TestNnx(TrainerTests):
    passes_loss = True

    def train(self, tx, first=0, last=STEPS, start=None):
        rngs = nnx.Rngs(0)
        model = nnx.Sequential(nnx.Linear(4, 8, rngs=rngs), jnp.tanh, nnx.Linear(8, 1, rngs=rngs))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        model, optimizer = on_all_devices(start or (model, optimizer))
        for x in BATCHES[first:last]:
            step(model, optimizer, jax.device_put(x, SPREAD))
        params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        return Run(params, optimizer.opt_state, (model, optimizer))

    def restored(self, tx, folder):
        half = self.train(tx, 0, STOP)
        return half._replace(rest=nnx.merge(*nnx.split(half.rest)))

    def converted(self, tx, half, folder):
        model, optimizer = half
        params = nnx.state(model, nnx.Param)
        state = gcx.convert_state(tx, optimizer.opt_state, params, reduction="mean")
        ours = nnx.Optimizer(model, tx, wrt=nnx.Param)
        nnx.update(ours.opt_state, nnx.state(state))
        return model, ours

    @pytest.mark.parametrize("is_flushed", [True, False])
    def test_one_line_copies_a_changed_state_into_an_optimizer(self, is_flushed):
        model, optimizer = self.train(of_ours("both"), 0, STOP).rest
        state, params = optimizer.opt_state, nnx.state(model, nnx.Param)
        if is_flushed:
            _, state = gcx.flush(optimizer.tx, state, params)
        else:
            state = gcx.reset_accumulation(state)
        expected = gcx.metrics(state)
        nnx.update(optimizer.opt_state, nnx.state(state))
        assert gcx.metrics(optimizer.opt_state) == expected
        rest = self.train(optimizer.tx, STOP, STOP + 1, (model, optimizer))
        assert gcx.metrics(rest.state)["mini_step"] == int(expected["mini_step"]) + 1
