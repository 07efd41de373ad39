"""Attention logits that grow until training fails, with and without QK-clip (Flax Linen)."""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import gradclip_jax as gcx

HEADS, HEAD_DIM = 4, 8


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        names = ("query", "key", "value")
        query, key, value = (nn.DenseGeneral((HEADS, HEAD_DIM), name=name)(x) for name in names)
        logits = jnp.einsum("bqhd,bkhd->bhqk", query, key) / HEAD_DIM**0.5
        causal = jnp.tril(jnp.ones(logits.shape[-2:], bool))
        logits = jnp.where(causal, logits, -jnp.inf)  # excludes masked logits
        self.sow("intermediates", "max_logits", logits.max(axis=(0, 2, 3)))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", nn.softmax(logits), value)
        return nn.DenseGeneral(x.shape[-1], axis=(-2, -1), name="out")(mixed)


class Model(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(32, 32)(tokens) + nn.Embed(16, 32)(jnp.arange(16))
        for i in range(2):
            x = x + Attention(name=f"attention{i}")(x)
        return nn.Dense(32)(x)


def loss_fn(params, tokens):  # predict the token three positions before
    outputs, sown = Model().apply({"params": params}, tokens, mutable="intermediates")
    target = jnp.roll(tokens, 3, axis=1)
    losses = optax.softmax_cross_entropy_with_integer_labels(outputs, target)
    return jnp.mean(losses[:, 3:]), sown["intermediates"]


tx = gcx.skip_nonfinite(optax.adam(0.025))


@jax.jit
def train_step(params, state, tokens, tau):
    (loss, sown), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, tokens)
    params, state = gcx.apply_gradients(tx, grads, state, params, value=loss)
    logits = {name: layer["max_logits"][0] for name, layer in sown.items()}
    for name, of_heads in logits.items():
        layer = params[name]
        query, key = gcx.qk_clip(layer["query"], layer["key"], of_heads, tau)
        params = {**params, name: {**layer, "query": query, "key": key}}
    return params, state, loss, jnp.stack(list(logits.values())).max()


def train(tau, steps=200):
    params = Model().init(jax.random.key(0), jnp.zeros((1, 16), int))["params"]
    state, history = tx.init(params), []
    for key in jax.random.split(jax.random.key(1), steps):
        tokens = jax.random.randint(key, (16, 16), 0, 32)
        params, state, *found = train_step(params, state, tokens, tau)
        history.append(found)
    return jnp.array(history[-50:]).T


def main():
    for tau in (jnp.inf, 30.0):
        losses, logits = train(tau)
        learned, is_large = bool(losses.mean() < 0.1), bool(logits.max() > 1_000)
        print(f"tau = {tau}: loss below 0.1: {learned}, logits above 1,000: {is_large}")


if __name__ == "__main__":
    main()
