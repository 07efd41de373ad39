"""Clipping, accumulation, a guard and a monitor in an Equinox training step."""

import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import gradclip_jax as gcx

EVERY, STEPS = 4, 200  # micro-batches in a step; optimizer steps

# The schedule counts optimizer steps: it is inside the accumulation.
optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, STEPS))
tx = gcx.accumulate_gradients(optax.chain(gcx.clip_by_global_norm(1.0), optimizer), every=EVERY)
tx = gcx.watch(gcx.skip_nonfinite(tx))
BAD = 330  # a micro-batch with NaN


def loss_fn(params, static, x):
    model = eqx.combine(params, static)
    return jnp.mean((jax.vmap(model)(x) - jnp.sin(x)) ** 2)


@functools.partial(eqx.filter_jit, donate="all-except-first")
def train_step(batch, params, state):
    static, x = batch
    loss, grads = jax.value_and_grad(loss_fn)(params, static, x)
    params, state = gcx.apply_gradients(tx, grads, state, params, value=loss)
    return params, state, loss


def main():
    data_key, init_key = jax.random.split(jax.random.key(0))
    data = jax.random.uniform(data_key, (STEPS * EVERY, 16, 1), minval=-math.pi, maxval=math.pi)
    model = eqx.nn.MLP(1, 1, width_size=64, depth=2, activation=jnp.tanh, key=init_key)
    # A model also holds functions; its parameters are the same tree with None in their place.
    params, static = eqx.partition(model, eqx.is_inexact_array)
    state = tx.init(params)
    first_loss = loss_fn(params, static, data[0])
    monitor = gcx.Monitor(params)
    for i, micro_batch in enumerate(data.at[BAD, 0].set(jnp.nan)):
        params, state, loss = train_step((static, micro_batch), params, state)
        if i % 50 == 49:
            report = monitor.read(state)  # one transfer: all rows since the last read
            for incident in report.incidents:
                print(incident)
    told = gcx.metrics(state)
    print(
        f"equinox: loss {first_loss:.4f} -> {loss:.4f} in {told['gradient_step']} optimizer steps "
        f"of {EVERY} micro-batches; last gradient norm {told['grad_norm']:.4f}"
    )


if __name__ == "__main__":
    main()
