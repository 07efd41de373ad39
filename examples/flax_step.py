"""Clipping and accumulation with the train states of Flax: Linen's and NNX's.

Both count `step` once a call. Here that of Linen counts optimizer steps, as the schedule does; for
NNX the recipe "Train states" has a class that does, and takes the fast path. The NNX program is
guarded and watched as well: one micro-batch contains NaN, and the monitor says which.
"""

import functools
import math

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx
from flax.training import train_state

import gradclip_jax as gcx

EVERY, STEPS = 4, 200  # micro-batches in a step; optimizer steps
BAD = 330  # a micro-batch with NaN, in the program that is watched

# The schedule counts optimizer steps: it is inside the accumulation.
optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, STEPS))
tx = gcx.accumulate_gradients(optax.chain(gcx.clip_by_global_norm(1.0), optimizer), every=EVERY)


class TrainState(train_state.TrainState):
    def apply_gradients(self, *, grads, **replaced):
        params, state = gcx.apply_gradients(self.tx, grads, self.opt_state, self.params)
        step = self.step + gcx.has_updated(state)
        return self.replace(step=step, params=params, opt_state=state, **replaced)


@functools.partial(jax.jit, donate_argnums=0)
def linen_step(state, x):
    def loss_fn(params):
        return jnp.mean((state.apply_fn(params, x) - jnp.sin(x)) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


@functools.partial(nnx.jit, donate_argnums=(0, 1))
def nnx_step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - jnp.sin(x)) ** 2))(model)
    optimizer.update(model, grads, value=loss)
    return loss


def main():
    data_key, init_key = jax.random.split(jax.random.key(0))
    data = jax.random.uniform(data_key, (STEPS * EVERY, 16, 1), minval=-math.pi, maxval=math.pi)

    net = nn.Sequential([nn.Dense(64), jnp.tanh, nn.Dense(64), jnp.tanh, nn.Dense(1)])
    state = TrainState.create(apply_fn=net.apply, params=net.init(init_key, data[0]), tx=tx)
    for micro_batch in data:
        state, loss = linen_step(state, micro_batch)
    print(f"flax linen: loss {loss:.4f} after {state.step} optimizer steps of {EVERY}")

    linear = functools.partial(nnx.Linear, rngs=nnx.Rngs(0))
    model = nnx.Sequential(linear(1, 64), jnp.tanh, linear(64, 64), jnp.tanh, linear(64, 1))
    watched = gcx.watch(gcx.skip_nonfinite(tx))
    optimizer = nnx.Optimizer(model, watched, wrt=nnx.Param)
    monitor = gcx.Monitor(nnx.state(model, nnx.Param))
    for i, micro_batch in enumerate(data.at[BAD, 0].set(jnp.nan)):
        loss = nnx_step(model, optimizer, micro_batch)
        if i % 50 == 49:
            report = monitor.read(optimizer.opt_state)  # one transfer: all rows since the last read
            for incident in report.incidents:
                print(incident)
    steps = gcx.diagnostics.accumulation_stats(optimizer.opt_state).total_updates
    print(f"flax nnx: loss {loss:.4f} after {steps} optimizer steps of {EVERY}")


if __name__ == "__main__":
    main()
