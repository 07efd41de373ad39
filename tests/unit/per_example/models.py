"""Transformers: losses of one example, their parameters and a batch."""

import jax
import jax.numpy as jnp
import numpy as np

WIDTH, TOKENS, EXAMPLES, VOCABULARY = 16, 3, 3, 40


def array(*shape, seed=0):
    return (np.random.default_rng(seed).normal(size=shape) * 0.4).astype(np.float32)


def texts():
    """Token numbers with repeats, and some that no embedding has."""
    return np.array([[1, 2, 2], [0, 5, -1], [39, 55, 3]], np.int32)


def attention(q, k, v):
    return jax.nn.softmax(q @ k.T / 4.0) @ v


@jax.custom_vjp
def custom_attention(q, k, v):
    return attention(q, k, v)


custom_attention.defvjp(
    lambda q, k, v: jax.vjp(attention, q, k, v), lambda backward, g: backward(g)
)


def block(x, p, attend=attention):
    q, k, v = jnp.split(x @ p["qkv"], 3, -1)
    x = x + attend(q, k, v) @ p["out"]
    return x + jax.nn.gelu(x @ p["up"] + p["bias"]) @ p["down"]


def blocks(*lead, seed=0):
    n = WIDTH
    shapes = {"qkv": (n, 3 * n), "out": (n, n), "up": (n, 2 * n), "bias": (2 * n,)}
    shapes["down"] = (2 * n, n)
    return {k: array(*lead, *shape, seed=seed + i) for i, (k, shape) in enumerate(shapes.items())}


def next_token_loss(x, embed, ids):
    logits = jax.nn.log_softmax(x @ embed.T)
    return -jnp.mean(jnp.take_along_axis(logits, ids[:, None] % VOCABULARY, -1))


def gpt():
    def loss(p, ids):
        x = p["embed"].at[ids].get(mode="clip") + p["place"]
        for layer, attend in zip(p["blocks"], (attention, custom_attention), strict=True):
            x = block(x, layer, attend)
        return next_token_loss(x, p["embed"], ids)

    params = {"embed": array(VOCABULARY, WIDTH, seed=20), "place": array(TOKENS, WIDTH, seed=21)}
    return loss, {**params, "blocks": [blocks(), blocks(seed=10)]}, texts()


def gpt_in_scan():
    def loss(p, ids):
        step = jax.checkpoint(lambda x, layer: (block(x, layer), None))
        x, _ = jax.lax.scan(step, p["embed"][ids], p["blocks"])
        return next_token_loss(x, p["embed"], ids)

    return loss, {"embed": array(VOCABULARY, WIDTH, seed=20), "blocks": blocks(2)}, texts()


def conv(x, kernel, strides=(1, 1), padding="SAME", **options):
    return jax.lax.conv_general_dilated(
        x, kernel, strides, padding, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options
    )


MODELS = {"gpt": gpt, "gpt_in_scan": gpt_in_scan}
