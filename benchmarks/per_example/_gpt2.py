"""GPT-2 as shapes, the loss of one text, and the programs that clip each text by itself."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import gradclip_jax as gcx

Tree = Any


def gpt_shapes(
    layers: int = 12, width: int = 768, vocabulary: int = 50257, tokens: int = 1024
) -> Tree:
    """The parameters of GPT-2 (124M with 12 layers), its head tied to the embedding, float32."""

    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    block = {
        "norm1": leaf(width),
        "qkv": leaf(width, 3 * width),
        "out": leaf(width, width),
        "norm2": leaf(width),
        "up": leaf(width, 4 * width),
        "up_bias": leaf(4 * width),
        "down": leaf(4 * width, width),
        "down_bias": leaf(width),
    }
    return {
        "embed": leaf(vocabulary, width),
        "place": leaf(tokens, width),
        "norm": leaf(width),
        "blocks": [block] * layers,
    }


def _normed(x: jax.Array, scale: jax.Array) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5) * scale


def _block(x: jax.Array, p: Tree, heads: int) -> jax.Array:
    q, k, v = jnp.split(_normed(x, p["norm1"]) @ p["qkv"], 3, -1)
    q, k, v = (y.reshape(len(x), heads, -1).transpose(1, 0, 2) for y in (q, k, v))
    scores = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1]).astype(np.float32)
    causal = np.tril(np.ones((len(x), len(x)), bool))
    mixed = jax.nn.softmax(jnp.where(causal, scores, -1e9)) @ v
    x = x + mixed.transpose(1, 0, 2).reshape(x.shape) @ p["out"]
    hidden = jax.nn.gelu(_normed(x, p["norm2"]) @ p["up"] + p["up_bias"])
    return x + hidden @ p["down"] + p["down_bias"]


def loss(params: Tree, ids: jax.Array, heads: int = 12) -> jax.Array:
    """Mean cross-entropy of the next token, one text."""
    x = params["embed"][ids] + params["place"][: len(ids)]
    for p in params["blocks"]:
        x = _block(x, p, heads)
    logits = _normed(x, params["norm"]) @ params["embed"].T
    picked = jnp.take_along_axis(logits[:-1], ids[1:, None], -1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits[:-1], -1) - picked)


def ordinary(params: Tree, batch: jax.Array, loss: Any = loss) -> Tree:
    """The gradient of the mean loss: nothing is clipped."""
    return jax.grad(lambda p: jnp.mean(jax.vmap(loss, (None, 0))(p, batch)))(params)


def ours(params: Tree, batch: jax.Array, loss: Any = loss) -> Tree:
    return gcx.per_example.value_and_grad(loss, 1.0)(params, batch)[1]
