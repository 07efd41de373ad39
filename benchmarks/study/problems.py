"""The problems of the study: small enough for two cores, each with another reason to clip.

Every batch is drawn from a random key, so all methods see the same batches in the same order, and
seeds and hyperparameters can be mapped over with `jax.vmap`.
"""

import functools
from collections.abc import Callable
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

Params = dict[str, jax.Array]
Batch = Any


class Problem(NamedTuple):
    """A model, its data, and the optimizer and learning rates to train it with."""

    name: str
    optimizer: str  # "sgd", with a momentum of 0.9, or "adam"
    learning_rates: tuple[float, ...]
    steps: int
    init: Callable[[jax.Array], Params]  # of a random key; the last layer is named "head"
    draw: Callable[[jax.Array, jax.Array], Batch]  # of a random key and the step
    loss: Callable[[Params, Batch], jax.Array]
    test: Callable[[], Batch]  # clean and held out
    constant_loss: Callable[[Batch], jax.Array]  # of the best prediction that ignores its input
    dtype: Any = jnp.float32  # of the computation; parameters are always float32


def dense(key: jax.Array, *shape: int) -> jax.Array:
    return jax.random.normal(key, shape) * shape[0] ** -0.5


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def label_entropy(labels: jax.Array) -> jax.Array:
    shares = jnp.bincount(labels.ravel()) / labels.size
    return -jnp.sum(jax.scipy.special.xlogy(shares, shares))


# Text: the manual that ships with every CPython, one character at a time

SYMBOLS = " \n.,'\"`_()=abcdefghijklmnopqrstuvwxyz"  # and one for all others
VOCABULARY = len(SYMBOLS) + 1
HIDDEN = 32


@functools.cache
def read_text() -> tuple[np.ndarray, np.ndarray]:
    """Training and test text, int32[characters]: the last tenth is for the test."""
    text = "\n\n".join(topics[name] for name in sorted(topics)).lower()
    index = {symbol: i for i, symbol in enumerate(SYMBOLS)}
    tokens = np.array([index.get(symbol, VOCABULARY - 1) for symbol in text], np.int32)
    return tuple(np.split(tokens, [len(tokens) * 9 // 10]))


def stretches(key: jax.Array, text: np.ndarray, batch: int, length: int) -> jax.Array:
    """Random stretches of the text with the character that follows, int32[batch, length + 1]."""
    starts = jax.random.randint(key, (batch, 1), 0, len(text) - length)
    return jnp.asarray(text)[starts + jnp.arange(length + 1)]


def text_problem(
    name: str, init: Any, logits: Any, length: int, batch: int,
    optimizer: str, learning_rates: tuple[float, ...], steps: int = 300,
) -> Problem:  # fmt: skip
    def loss(params: Params, tokens: jax.Array) -> jax.Array:
        return cross_entropy(logits(params, tokens[:, :-1]), tokens[:, 1:])

    def draw(key: jax.Array, step: jax.Array) -> jax.Array:
        return stretches(key, read_text()[0], batch, length)

    def test() -> jax.Array:
        return stretches(jax.random.key(0), read_text()[1], 256, length)

    def constant_loss(tokens: jax.Array) -> jax.Array:
        return label_entropy(tokens[:, 1:])

    name = f"{name}, {optimizer}"
    return Problem(name, optimizer, learning_rates, steps, init, draw, loss, test, constant_loss)


def over_time(cell: Any, start: Any, tokens: jax.Array) -> jax.Array:
    """The outputs of a recurrent cell, [batch, time, units]."""
    return jnp.moveaxis(jax.lax.scan(cell, start, tokens.T)[1], 0, 1)


def rnn_init(key: jax.Array) -> Params:
    keys = jax.random.split(key, 3)
    return {
        "embedding": dense(keys[0], VOCABULARY, HIDDEN),
        "recurrent": jax.random.orthogonal(keys[1], HIDDEN),
        "bias": jnp.zeros(HIDDEN),
        "head": dense(keys[2], HIDDEN, VOCABULARY),
    }


def rnn(params: Params, tokens: jax.Array) -> jax.Array:
    def cell(hidden: jax.Array, token: jax.Array):
        before = params["embedding"][token] + hidden @ params["recurrent"] + params["bias"]
        return (hidden := jnp.tanh(before)), hidden

    return over_time(cell, jnp.zeros((len(tokens), HIDDEN)), tokens) @ params["head"]


def lstm_init(key: jax.Array) -> Params:
    keys = jax.random.split(key, 3)
    return {
        "embedding": dense(keys[0], VOCABULARY, 4 * HIDDEN),
        "recurrent": dense(keys[1], HIDDEN, 4 * HIDDEN),
        "bias": jnp.zeros(4 * HIDDEN),
        "head": dense(keys[2], HIDDEN, VOCABULARY),
    }


def lstm(params: Params, tokens: jax.Array) -> jax.Array:
    def cell(carry: tuple[jax.Array, jax.Array], token: jax.Array):
        hidden, memory = carry
        gates = params["embedding"][token] + hidden @ params["recurrent"] + params["bias"]
        candidate, into, keep, out = jnp.split(gates, 4, axis=-1)
        keep = jax.nn.sigmoid(keep + 1)
        memory = keep * memory + jax.nn.sigmoid(into) * jnp.tanh(candidate)
        hidden = jax.nn.sigmoid(out) * jnp.tanh(memory)
        return (hidden, memory), hidden

    zeros = jnp.zeros((len(tokens), HIDDEN))
    return over_time(cell, (zeros, zeros), tokens) @ params["head"]


GPT_LAYERS, GPT_HEADS, GPT_WIDTH, GPT_LENGTH = 2, 2, 24, 32


def gpt_init(key: jax.Array) -> Params:
    keys = jax.random.split(key, 7)

    def stacked(key: jax.Array, inputs: int, outputs: int) -> jax.Array:
        return jax.random.normal(key, (GPT_LAYERS, inputs, outputs)) * inputs**-0.5

    return {
        "embedding": dense(keys[0], VOCABULARY, GPT_WIDTH),
        "position": 0.1 * dense(keys[1], GPT_LENGTH, GPT_WIDTH),
        "attention_in": stacked(keys[2], GPT_WIDTH, 3 * GPT_WIDTH),
        "attention_out": stacked(keys[3], GPT_WIDTH, GPT_WIDTH),
        "mlp_in": stacked(keys[4], GPT_WIDTH, 2 * GPT_WIDTH),
        "mlp_out": stacked(keys[5], 2 * GPT_WIDTH, GPT_WIDTH),
        "head": dense(keys[6], GPT_WIDTH, VOCABULARY),
    }


def gpt(params: Params, tokens: jax.Array) -> jax.Array:
    def normalised(x: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)

    x = params["embedding"][tokens] + params["position"]
    for layer in range(GPT_LAYERS):
        packed = normalised(x) @ params["attention_in"][layer]
        heads = packed.reshape(*x.shape[:2], GPT_HEADS, -1)
        query, value_of, key = jnp.split(heads, 3, axis=-1)
        mixed = jax.nn.dot_product_attention(query, key, value_of, is_causal=True)
        x = x + mixed.reshape(x.shape) @ params["attention_out"][layer]
        x = x + jax.nn.gelu(normalised(x) @ params["mlp_in"][layer]) @ params["mlp_out"][layer]
    return normalised(x) @ params["head"]


HASHES, CONTEXT = 2048, 3


def hashed_init(key: jax.Array) -> Params:
    keys = jax.random.split(key)
    return {
        "embedding": dense(keys[0], HASHES, HIDDEN),
        "head": dense(keys[1], HIDDEN, VOCABULARY),
    }


def hashed(params: Params, tokens: jax.Array) -> jax.Array:
    """The last three characters have one row together: most rows are used rarely."""
    row = (tokens[:, 0] * 31 + tokens[:, 1]) * 37 + tokens[:, 2]
    return (params["embedding"][row % HASHES] @ params["head"])[:, None]


def hashed_problem(optimizer: str, learning_rates: tuple[float, ...]) -> Problem:
    problem = text_problem(
        "sparse embedding", hashed_init, hashed, CONTEXT, 64, optimizer, learning_rates
    )

    def loss(params: Params, tokens: jax.Array) -> jax.Array:
        return cross_entropy(hashed(params, tokens[:, :-1]), tokens[:, -1:])

    return problem._replace(loss=loss, constant_loss=lambda tokens: label_entropy(tokens[:, -1]))


# Regression: a line with heavy tails, and a network whose targets change their size

INPUTS = 20


def half_variance(batch: Batch) -> jax.Array:
    return 0.5 * jnp.var(batch[1])


def line_problem(optimizer: str, learning_rates: tuple[float, ...]) -> Problem:
    """Noise of the labels, and so of the gradient, is Student's t: it has no variance."""
    target = dense(jax.random.key(0), INPUTS, 1)

    def draw(key: jax.Array, step: jax.Array) -> Batch:
        keys = jax.random.split(key)
        x = jax.random.normal(keys[0], (8, INPUTS))
        return x, x @ target + jax.random.t(keys[1], 1.5, (8, 1))

    def loss(params: Params, batch: Batch) -> jax.Array:
        x, y = batch
        return 0.5 * jnp.mean(jnp.square(x @ params["head"] - y))

    def test() -> Batch:
        x = jax.random.normal(jax.random.key(1), (512, INPUTS))
        return x, x @ target

    return Problem(
        f"heavy-tailed line, {optimizer}", optimizer, learning_rates, 500,
        lambda key: {"head": jnp.zeros((INPUTS, 1))}, draw, loss, test, half_variance,
    )  # fmt: skip


def network_init(key: jax.Array, *sizes: int) -> Params:
    keys = jax.random.split(key)
    inputs, hidden, outputs = sizes
    return {
        "hidden": dense(keys[0], inputs, hidden),
        "bias": jnp.zeros(hidden),
        "head": dense(keys[1], hidden, outputs),
    }


def network(params: Params, x: jax.Array) -> jax.Array:
    return jax.nn.relu(x @ params["hidden"] + params["bias"]) @ params["head"]


def level_problem(optimizer: str, factor: float, learning_rates: tuple[float, ...]) -> Problem:
    """In the middle of the run the targets, and so the norms, are multiplied by `factor`."""
    steps, sizes = 500, (INPUTS, HIDDEN, 1)
    teacher = network_init(jax.random.key(0), *sizes)

    def draw(key: jax.Array, step: jax.Array) -> Batch:
        keys = jax.random.split(key)
        x = jax.random.normal(keys[0], (16, INPUTS))
        noisy = network(teacher, x) + 0.5 * jax.random.normal(keys[1], (16, 1))
        return x, jnp.where(step < steps // 2, 1.0, factor) * noisy

    def loss(params: Params, batch: Batch) -> jax.Array:
        x, y = batch
        return 0.5 * jnp.mean(jnp.square(network(params, x) - y))

    def test() -> Batch:
        x = jax.random.normal(jax.random.key(1), (512, INPUTS))
        return x, factor * network(teacher, x)

    name = f"norms times {factor:g}, {optimizer}"
    return Problem(
        name, optimizer, learning_rates, steps,
        lambda key: network_init(key, *sizes), draw, loss, test, half_variance,
    )  # fmt: skip


# Handwritten digits


@functools.cache
def read_digits() -> tuple[np.ndarray, ...]:
    """Images and labels of the training and the test part."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images, labels = (images[order] / 16).astype(np.float32), labels[order].astype(np.int32)
    return images[:1347], labels[:1347], images[1347:], labels[1347:]


def unspoilt(key: jax.Array, images: jax.Array, labels: jax.Array) -> Batch:
    return images, labels, jnp.ones(len(labels))


def heavy_tailed(key: jax.Array, images: jax.Array, labels: jax.Array) -> Batch:
    """Each example has a random weight of mean 1 that has no variance."""
    return images, labels, 1 + jax.random.t(key, 1.5, labels.shape)


def mislabelled(key: jax.Array, images: jax.Array, labels: jax.Array) -> Batch:
    """One batch of five has random labels."""
    keys = jax.random.split(key)
    wrong = jax.random.randint(keys[0], labels.shape, 0, 10)
    labels = jnp.where(jax.random.bernoulli(keys[1], 0.2), wrong, labels)
    return images, labels, jnp.ones(len(labels))


def corrupted(key: jax.Array, images: jax.Array, labels: jax.Array) -> Batch:
    """One batch of fifty has images that are a hundred times too bright."""
    images = jnp.where(jax.random.bernoulli(key, 0.02), 100 * images, images)
    return images, labels, jnp.ones(len(labels))


def digits_problem(
    name: str,
    spoil: Any,
    optimizer: str,
    learning_rates: tuple[float, ...],
    dtype: Any = jnp.float32,
) -> Problem:
    def draw(key: jax.Array, step: jax.Array) -> Batch:
        keys = jax.random.split(key)
        images, labels, *_ = read_digits()
        rows = jax.random.randint(keys[0], (32,), 0, len(labels))
        return spoil(keys[1], jnp.asarray(images)[rows], jnp.asarray(labels)[rows])

    def loss(params: Params, batch: Batch) -> jax.Array:
        images, labels, weights = batch
        params = jax.tree.map(lambda x: x.astype(dtype), params)
        logits = network(params, images.astype(dtype)).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.mean(weights * losses)

    def test() -> Batch:
        *_, images, labels = read_digits()
        return jnp.asarray(images), jnp.asarray(labels), jnp.ones(len(labels))

    return Problem(
        f"{name}, {optimizer}", optimizer, learning_rates, 400,
        lambda key: network_init(key, 64, HIDDEN, 10), draw, loss, test,
        lambda batch: label_entropy(batch[1]), dtype,
    )  # fmt: skip


def five_from(lowest: float) -> tuple[float, ...]:
    """A hundredfold range."""
    return tuple(lowest * 10 ** (i / 2) for i in range(5))


SMALL = {"sgd": five_from(0.01), "adam": five_from(0.001)}

PROBLEMS = (
    text_problem("tanh RNN", rnn_init, rnn, 48, 16, "sgd", five_from(0.03)),
    text_problem("LSTM", lstm_init, lstm, 48, 8, "adam", five_from(0.001), 200),
    text_problem("GPT", gpt_init, gpt, GPT_LENGTH, 4, "adam", five_from(0.001), 240),
    hashed_problem("sgd", five_from(0.3)),
    hashed_problem("adam", five_from(0.003)),
    *(line_problem(name, rates) for name, rates in SMALL.items()),
    *(digits_problem("heavy-tailed digits", heavy_tailed, *pair) for pair in SMALL.items()),
    *(digits_problem("mislabelled digits", mislabelled, *pair) for pair in SMALL.items()),
    *(digits_problem("corrupted digits", corrupted, *pair) for pair in SMALL.items()),
    *(level_problem(name, 5.0, rates) for name, rates in SMALL.items()),
    *(level_problem(name, 0.2, rates) for name, rates in SMALL.items()),
    digits_problem("float16 digits", unspoilt, "adam", SMALL["adam"], jnp.float16),
)  # fmt: skip
