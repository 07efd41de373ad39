"""Losses of one example, their parameters and a batch: one of each kind of use of a weight."""

import functools
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


def mlp():
    def loss(p, x):
        return jnp.sum(jnp.tanh(jnp.tanh(x @ p["a"] + p["b"]) @ p["c"]) ** 2)

    return loss, {"a": array(8, 16), "b": array(16), "c": array(16, 8)}, array(EXAMPLES, 8)


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


def rnn():
    def loss(p, xs):
        def step(h, x):
            h = jnp.tanh(h @ p["u"] + x @ p["w"] + p["b"])
            return h, h

        h, ys = jax.lax.scan(step, 0 * xs[0], xs)
        return jnp.sum(h**2) + jnp.sum(jnp.sin(ys))

    return (
        loss,
        {"u": array(WIDTH, WIDTH), "w": array(WIDTH, WIDTH), "b": array(WIDTH)},
        sequences(),
    )


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


def square():
    return lambda w, x: jnp.sum(jnp.sin(x @ w @ w)), array(WIDTH, WIDTH), sequences()


def gram():
    return lambda w, x: jnp.sum(jnp.sin(x @ (w.T @ w))), array(WIDTH, WIDTH), sequences()


def weight_norm():
    def loss(p, x):
        return jnp.sum(jnp.sin(x @ (p["g"] * p["v"] / jnp.linalg.norm(p["v"], axis=0))))

    return loss, {"g": array(WIDTH), "v": array(WIDTH, WIDTH)}, sequences()


def masked():
    """Pruned weights, a frozen leaf, and one of which half the columns are frozen."""
    mask = np.float32(np.arange(WIDTH**2).reshape(WIDTH, WIDTH) % 3 == 0)

    def loss(p, x):
        stop = jax.lax.stop_gradient
        x = jnp.sin(x @ (p["pruned"] * mask)) @ stop(p["frozen"])
        half = jnp.where(np.arange(WIDTH) % 2, p["half"], stop(p["half"]))
        return jnp.sum(jnp.sin(jnp.sin(x @ half) @ p["last"]))

    return loss, {k: array(WIDTH, WIDTH) for k in ("pruned", "frozen", "half", "last")}, sequences()


def l2():
    def loss(w, x):
        return jnp.sum(jnp.sin(x @ w)) + 0.3 * jnp.sum(w**2)

    return loss, array(WIDTH, WIDTH), sequences()


def lora():
    def loss(p, x):
        x = jnp.sin(x @ jax.lax.stop_gradient(p["frozen"]) + x @ p["a"] @ p["b"])
        return jnp.sum(jnp.sin(x @ (p["merged"] + p["a"] @ p["b"])))

    n = WIDTH
    params = {"frozen": array(n, n), "a": array(n, 4), "b": array(4, n), "merged": array(n, n)}
    return loss, params, sequences()


def experts():
    def loss(p, x):
        chosen = jnp.argmax(x @ p["router"], -1)
        y = jnp.einsum("td,tdp->tp", x, p["experts"][chosen])
        return jnp.sum(jnp.sin(y)) + jnp.sum(jax.nn.softmax(x @ p["router"]) ** 2)

    return loss, {"router": array(WIDTH, 4), "experts": array(4, WIDTH, WIDTH)}, sequences()


def stacked_by_hand():
    def loss(p, x):
        for i in range(3):
            x = jnp.tanh(x @ p[i])
        return jnp.sum(x**2)

    return loss, array(3, WIDTH, WIDTH), sequences()


def picked():
    def loss(p, example):
        number, x = example
        return jnp.sum(jnp.sin(x @ p["w"][number]) @ p["flat"][: WIDTH**2].reshape(WIDTH, WIDTH))

    params = {"w": array(3, WIDTH, WIDTH), "flat": array(WIDTH**2 + 5)}
    return loss, params, (np.array([0, 2, 1], np.int32), sequences())


def joined():
    def loss(p, ids):
        x = jnp.concatenate([p["words"], p["prompts"]])[ids]
        x = jnp.sin(x @ jnp.concatenate([p["q"], p["k"]], 1))
        x = (
            jnp.sin(x @ jnp.stack([p["a"], p["b"]])[1])
            + x @ jnp.concatenate([p["a"], p["b"]])[:WIDTH]
        )
        return jnp.sum(jnp.einsum("td,kdp->ktp", x, jnp.stack([p["a"], p["b"]], 0)) ** 2)

    half = WIDTH // 2
    params = {"words": array(30, WIDTH), "prompts": array(10, WIDTH)}
    params |= {"q": array(WIDTH, half), "k": array(WIDTH, half)}
    params |= {"a": array(WIDTH, WIDTH), "b": array(WIDTH, WIDTH)}
    return loss, params, texts() % VOCABULARY


def complex_weights():
    def loss(w, x):
        return jnp.sum(jnp.abs(jnp.sin(x @ w) @ w) ** 2)

    w = array(WIDTH, WIDTH) + 1j * array(WIDTH, WIDTH)
    return loss, w.astype(np.complex64), sequences()


def dropout():
    def loss(w, example):
        key, x = example
        kept = jax.random.bernoulli(key, np.float32(0.5), (TOKENS, WIDTH))
        return jnp.sum(jnp.sin(jnp.where(kept, x, 0) @ w))

    keys = jax.random.split(jax.random.key(0), EXAMPLES)
    return loss, array(WIDTH, WIDTH), (keys, sequences())


def jitted():
    @jax.jit
    def layer(w, x):
        return jnp.sin(x @ w)

    def loss(p, x):
        return jnp.sum(jax.checkpoint(layer)(p["b"], layer(p["a"].T, x)))

    return loss, {"a": array(WIDTH, WIDTH), "b": array(WIDTH, WIDTH)}, sequences()


def one_hot_and_wide():
    """A head whose gradient is smaller than its factors, and logits that outnumber all weights."""

    def loss(p, ids):
        x = jax.nn.one_hot(ids, VOCABULARY, dtype=p["embed"].dtype) @ p["embed"]
        return jnp.sum(jnp.sin(x @ p["head"]) ** 2)

    ids = np.arange(2 * 16, dtype=np.int32).reshape(2, 16)
    return loss, {"embed": array(VOCABULARY, 4), "head": array(4, 150)}, ids


def branches():
    def loss(p, x):
        return jnp.sum(jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x @ p) ** 2)

    return loss, array(WIDTH, WIDTH), sequences()


MODELS = {
    f.__name__: f
    for f in (
        mlp,
        gpt,
        gpt_in_scan,
        rnn,
        lstm,
        resnet,
        depthwise,
        square,
        gram,
        weight_norm,
        masked,
        l2,
        lora,
        experts,
        stacked_by_hand,
        joined,
        picked,
        complex_weights,
        dropout,
        jitted,
        one_hot_and_wide,
        branches,
    )
}
MODELS["gpt_with_custom_attention"] = functools.partial(gpt, custom_attention)


def made(name):
    """A model whose numbers do not depend on what was made before."""
    global SEEDS
    SEEDS = itertools.count()
    return MODELS[name]()
