"""Losses of one example, their parameters and a batch: networks of several kinds."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

WIDTH, TOKENS, EXAMPLES, VOCABULARY = 16, 3, 3, 40


SEEDS = itertools.count()


def array(*shape, seed=None):
    rng = np.random.default_rng(next(SEEDS) if seed is None else seed)
    return (rng.normal(size=shape) * 0.4).astype(np.float32)


def texts():
    """Token numbers with repeats, and some that no embedding has."""
    return np.array([[1, 2, 2], [0, 5, -1], [39, 55, 3]], np.int32)


def sequences():
    return array(EXAMPLES, TOKENS, WIDTH, seed=1)


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


def blocks(*lead):
    n = WIDTH
    return {
        "qkv": array(*lead, n, 3 * n),
        "out": array(*lead, n, n),
        "up": array(*lead, n, 2 * n),
        "bias": array(*lead, 2 * n),
        "down": array(*lead, 2 * n, n),
    }


def next_token_loss(x, embed, ids):
    logits = jax.nn.log_softmax(x @ embed.T)
    return -jnp.mean(jnp.take_along_axis(logits, ids[:, None] % VOCABULARY, -1))


def gpt(attend=attention):
    def loss(p, ids):
        x = p["embed"].at[ids].get(mode="clip") + p["place"]
        for layer in p["blocks"]:
            x = block(x, layer, attend)
        return next_token_loss(x, p["embed"], ids)

    params = {"embed": array(VOCABULARY, WIDTH), "place": array(TOKENS, WIDTH)}
    return loss, {**params, "blocks": [blocks(), blocks()]}, texts()


def gpt_in_scan():
    def loss(p, ids):
        step = jax.checkpoint(lambda x, layer: (block(x, layer), None))
        x, _ = jax.lax.scan(step, p["embed"][ids], p["blocks"])
        return next_token_loss(x, p["embed"], ids)

    return loss, {"embed": array(VOCABULARY, WIDTH), "blocks": blocks(2)}, texts()


def lstm():
    def loss(p, xs):
        def step(carry, x):
            h, c = carry
            i, f, g, o = jnp.split(jnp.concatenate([h, x]) @ p["w"] + p["b"], 4)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

        start = jnp.zeros(WIDTH, xs.dtype)
        (h, _), _ = jax.lax.scan(step, (start, start), xs)
        return jnp.sum(h**2)

    return loss, {"w": array(2 * WIDTH, 4 * WIDTH), "b": array(4 * WIDTH)}, sequences()


def conv(x, kernel, **options):
    numbers = ("NHWC", "HWIO", "NHWC")
    strides = options.pop("strides", (1, 1))
    padding = options.pop("padding", "SAME")
    return jax.lax.conv_general_dilated(
        x, kernel, strides, padding, dimension_numbers=numbers, **options
    )


def group_norm(x, scale):
    y = x.reshape(*x.shape[:-1], 4, -1)
    y = y - y.mean((1, 2, 4), keepdims=True)
    y = y * jax.lax.rsqrt(jnp.square(y).mean((1, 2, 4), keepdims=True) + 1e-3)
    return y.reshape(x.shape) * scale


def resnet():
    def loss(p, x):
        x = conv(x[None], p["stem"], strides=(2, 2))
        y = conv(jax.nn.gelu(group_norm(x, p["scale"])), p["first"])
        x = x + conv(jnp.tanh(y), p["second"], padding="SAME", rhs_dilation=(2, 1))
        return jnp.sum(jnp.sin(x.mean((1, 2)) @ p["head"]))

    n = WIDTH
    params = {"stem": array(3, 3, 8, n), "first": array(3, 3, n, n), "second": array(2, 3, n, n)}
    return loss, {**params, "scale": array(n), "head": array(n, 8)}, array(EXAMPLES, 4, 4, 8)


def depthwise():
    def loss(p, x):
        x = conv(x[None], p["depth"], feature_group_count=WIDTH)
        x = conv(jnp.tanh(x), p["groups"], feature_group_count=2, strides=(2, 1))
        x = conv(jnp.tanh(x), p["up"], lhs_dilation=(2, 2), padding=((0, 1), (0, 0)))
        return jnp.sum(jnp.sin(x))

    n = WIDTH
    params = {"depth": array(3, 3, 1, n), "groups": array(2, 2, n // 2, 2 * n)}
    return loss, {**params, "up": array(2, 1, 2 * n, n)}, array(EXAMPLES, 3, 2, n)


MODELS = {
    "gpt": gpt,
    "gpt_with_custom_attention": lambda: gpt(custom_attention),
    "gpt_in_scan": gpt_in_scan,
    "lstm": lstm,
    "resnet": resnet,
    "depthwise": depthwise,
}


def made(name):
    """A model whose numbers do not depend on what was made before."""
    global SEEDS
    SEEDS = itertools.count()
    return MODELS[name]()
