"""Clipping and accumulation in a Haiku training step."""

import functools
import math

import haiku as hk
import jax
import jax.numpy as jnp
import optax

import gradclip_jax as gcx

EVERY, STEPS = 4, 200  # micro-batches in a step; optimizer steps


@hk.without_apply_rng
@hk.transform
def network(x):
    return hk.nets.MLP([64, 64, 1], activation=jnp.tanh)(x)


def loss_fn(params, x):
    return jnp.mean((network.apply(params, x) - jnp.sin(x)) ** 2)


# The schedule counts optimizer steps: it is inside the accumulation.
optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, STEPS))
tx = gcx.accumulate_gradients(optax.chain(gcx.clip_by_global_norm(1.0), optimizer), every=EVERY)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def train_step(params, state, x):
    loss, grads = jax.value_and_grad(loss_fn)(params, x)
    params, state = gcx.apply_gradients(tx, grads, state, params)
    return params, state, loss


def main():
    data_key, init_key = jax.random.split(jax.random.key(0))
    data = jax.random.uniform(data_key, (STEPS * EVERY, 16, 1), minval=-math.pi, maxval=math.pi)
    params = network.init(init_key, data[0])
    state = tx.init(params)
    first_loss = loss_fn(params, data[0])
    for micro_batch in data:
        params, state, loss = train_step(params, state, micro_batch)
    told = gcx.metrics(state)
    print(
        f"haiku: loss {first_loss:.4f} -> {loss:.4f} in {told['gradient_step']} optimizer steps "
        f"of {EVERY} micro-batches; last gradient norm {told['grad_norm']:.4f}"
    )


if __name__ == "__main__":
    main()
