"""A transformer: the loss of one example, its parameters and a batch; and random arrays."""

import jax
import jax.numpy as jnp
import numpy as np

WIDTH, TOKENS, EXAMPLES, VOCABULARY = 16, 3, 3, 40


def array(*shape, seed=0):
    return (np.random.default_rng(seed).normal(size=shape) * 0.4).astype(np.float32)


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


def gpt():
    """One block by itself, two in a scan, and a tied embedding."""

    def loss(p, ids):
        x = block(p["embed"].at[ids].get(mode="clip") + p["place"], p["first"], custom_attention)
        step = jax.checkpoint(lambda x, layer: (block(x, layer), None))
        x, _ = jax.lax.scan(step, x, p["blocks"])
        logits = jax.nn.log_softmax(x @ p["embed"].T)
        return -jnp.mean(jnp.take_along_axis(logits, ids[:, None] % VOCABULARY, -1))

    params = {"embed": array(VOCABULARY, WIDTH, seed=20), "place": array(TOKENS, WIDTH, seed=21)}
    # Token numbers with repeats, and some that no embedding has.
    ids = np.array([[1, 2, 2], [0, 5, -1], [39, 55, 3]], np.int32)
    return loss, {**params, "first": blocks(seed=10), "blocks": blocks(2)}, ids


def conv(x, kernel, strides=(1, 1), padding="SAME", **options):
    return jax.lax.conv_general_dilated(
        x, kernel, strides, padding, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options
    )
