"""Random losses against float64 `vmap(grad)`; a few in the suite, others without end in `make fuzz`."""

import os

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from oracle import assert_sound, methods

pytestmark = pytest.mark.slow

W, VOCABULARY = 12, 20
ON_ONE_DEVICE = NamedSharding(Mesh(jax.devices()[:1], ("model",)), PartitionSpec(None, "model"))
SHAPES = {
    "a": (W, W),
    "b": (W, W),
    "big": (2 * W, 2 * W),
    "stack": (3, W, W),
    "image kernel": (3, 2, W // 2, W // 2),
    "kernel of groups": (2, 1, W // 2, W),
    "gates": (2 * W, 4 * W),
    "table": (VOCABULARY, W),
    "bias": (W,),
}


def conv(x, kernel, strides=(1, 1), padding="SAME", **options):
    return jax.lax.conv_general_dilated(
        x, kernel, strides, padding, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options
    )


@jax.custom_vjp
def through(x, w):
    return x @ w


through.defvjp(
    lambda x, w: (x @ w, (x, w)), lambda saved, g: (g @ saved[1].T, 2.0 * saved[0].T @ g)
)


def recurrent(p, h, ids):
    return jax.lax.scan(lambda c, x: (jnp.tanh(c @ p["a"] + x), c), 0 * h[0], h)[1]


def lstm(p, h, ids):
    def step(carry, x):
        h, c = carry
        i, f, g, o = jnp.split(jnp.concatenate([h, x]) @ p["gates"], 4)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    return jax.lax.scan(step, (0 * h[0], 0 * h[0]), h)[1]


def image_conv(p, h, **options):
    return conv(h.reshape(1, -1, 2, W // 2), p["image kernel"], **options).reshape(h.shape)


def layers(p, h, ids):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), h, p["stack"])[0]


def carried(p, h, change):
    def step(carry, x):
        w, y = carry
        return (change(w), jnp.tanh(x @ w + y)), y

    return jax.lax.scan(step, (p["a"], 0 * h[0]), h)[1]


# Each takes parameters, tokens of an example, [T, W], and its numbers, [T], to new tokens.
STEPS = {
    "dense": lambda p, h, ids: h @ p["a"],
    "transposed": lambda p, h, ids: h @ p["a"].T,
    "squared": lambda p, h, ids: h @ p["a"] @ p["a"],
    "low rank": lambda p, h, ids: h @ (p["a"][:, :2] @ p["b"][:2]),
    "block": lambda p, h, ids: h @ p["big"][1 : 1 + W, 3 : 3 + W],
    "heads": lambda p, h, ids: jnp.einsum("td,dkn->tkn", h, p["b"].reshape(W, 3, 4)).reshape(-1, W),
    "joined": lambda p, h, ids: (h @ jnp.concatenate([p["a"], p["b"]], 1)).reshape(-1, 2, W)[:, 1],
    "split": lambda p, h, ids: sum(jnp.tile(h, (1, 2)) @ w for w in jnp.split(p["gates"], 2, 1))[
        :, :W
    ],
    "masked": lambda p, h, ids: h @ jnp.where(np.arange(W) % 3 > 0, p["a"], 0.0),
    "picked": lambda p, h, ids: h @ p["stack"][ids[0] % 3],
    "picked, number out of range": lambda p, h, ids: (
        h @ jax.lax.dynamic_index_in_dim(p["stack"], ids[0] - 9, keepdims=False)
    ),
    "experts": lambda p, h, ids: jnp.einsum("td,tdp->tp", h, p["stack"][ids % 3]),
    "sharded": lambda p, h, ids: h @ jax.lax.with_sharding_constraint(p["a"], ON_ONE_DEVICE),
    "frozen": lambda p, h, ids: h @ jax.lax.stop_gradient(p["a"]),
    "weight norm": lambda p, h, ids: h @ (p["bias"] * p["a"] / jnp.linalg.norm(p["a"], axis=0)),
    "complex": lambda p, h, ids: jnp.real((h * (1 + 2j)) @ (p["a"] * (0.5 - 1j))),
    "custom": lambda p, h, ids: through(h, p["a"]),
    "embedded": lambda p, h, ids: h + p["table"][ids],
    "embedded by token": lambda p, h, ids: h + jax.vmap(lambda i: p["table"][i])(ids),
    "one hot": lambda p, h, ids: h + jax.nn.one_hot(ids, VOCABULARY, dtype=h.dtype) @ p["table"],
    "tied head": lambda p, h, ids: jax.nn.log_softmax(h @ p["table"].T)[:, :W],
    "bias": lambda p, h, ids: h + p["bias"],
    "gain": lambda p, h, ids: h * p["bias"],
    "convolution": lambda p, h, ids: image_conv(p, h),
    "convolution, dilated": lambda p, h, ids: image_conv(p, h, rhs_dilation=(2, 1)),
    "convolution, transposed": lambda p, h, ids: image_conv(
        p, h, strides=(2, 1), padding=((1, 1), (1, 0)), lhs_dilation=(2, 1)
    ),
    "convolution of groups": lambda p, h, ids: conv(
        h[None, :, None], p["kernel of groups"], feature_group_count=2
    )[0, :, 0],
    "recurrent": recurrent,
    "lstm": lstm,
    "layers": layers,
    "carried": lambda p, h, ids: carried(p, h, lambda w: 0.5 * (w + w)),
    "carried, changed": lambda p, h, ids: carried(p, h, lambda w: w + jnp.sin(w)),
    "branch": lambda p, h, ids: jax.lax.cond(ids[0] > 9, jnp.sin, jnp.cos, h @ p["a"]),
    "branch of weights": lambda p, h, ids: jax.lax.cond(
        ids[0] > 9, jnp.dot, lambda h, w: h @ w.T, h, p["b"]
    ),
    "jitted": lambda p, h, ids: jax.jit(lambda w, x: jnp.tanh(x @ w))(p["a"], h),
    "checkpointed": lambda p, h, ids: jax.checkpoint(lambda w, x: jnp.tanh(x @ w))(p["b"], h),
    "by token": lambda p, h, ids: jax.vmap(lambda x: x @ p["a"])(h),
    "attention": lambda p, h, ids: jax.nn.softmax(h @ h.T) @ h,
    "normalised": lambda p, h, ids: jax.nn.standardize(h, epsilon=0.1),
    "convolutions of one kernel": lambda p, h, ids: image_conv(p, jnp.sin(image_conv(p, h))),
    "convolution in a loop": lambda p, h, ids: jax.lax.fori_loop(
        0, 2, lambda _, x: jnp.tanh(image_conv(p, x)), h
    ),
    "convolution of layers": lambda p, h, ids: jax.lax.scan(
        lambda x, w: (conv(x, w), None),
        h.reshape(1, -1, 2, W // 2),
        jnp.stack([p["image kernel"], 2 * p["image kernel"]]),
    )[0].reshape(h.shape),
    "all but one token": lambda p, h, ids: jnp.pad((h @ p["b"])[:-1], ((1, 0), (0, 0))),
}


def loss_of(names):
    def loss(p, example):
        h, ids = example
        for name in names:
            h = jnp.sin(STEPS[name](p, h, ids))
        return jnp.sum(h * jnp.cos(jnp.arange(h.size, dtype=h.dtype)).reshape(h.shape))

    return loss


def params_and_batch(tokens, seed):
    rng = np.random.default_rng(seed)
    params = {k: np.float32(0.4 * rng.normal(size=shape)) for k, shape in SHAPES.items()}
    numbers = rng.normal(size=(3, tokens, W)), rng.integers(0, VOCABULARY, (3, tokens))
    return params, (np.float32(numbers[0]), numbers[1])


@settings(**({} if os.environ.get("FUZZ") else {"max_examples": 6}))
@given(
    st.lists(st.sampled_from(list(STEPS)), min_size=1, max_size=5),
    st.sampled_from([1, 2, 5, 8]),
    st.integers(0, 2**31 - 1),
)
def test_random_loss_is_clipped_as_its_written_gradients(names, tokens, seed):
    # What float32 itself loses in a chain of layers, at a tenth of what a wrong rule would show.
    loss, (params, batch) = loss_of(names), params_and_batch(tokens, seed)
    assert_sound(loss, params, batch, rtol=5e-5, atol=1e-6, of_mean=1e-4)


@pytest.mark.parametrize("first", range(8))
def test_every_step_is_exact(first):
    loss, (params, batch) = loss_of(list(STEPS)[first::8]), params_and_batch(2, 0)
    assert_sound(loss, params, batch, atol=1e-6, of_mean=5e-5)


def test_gradients_of_weights_are_kept_as_factors():
    changed = {"low rank", "block", "heads", "masked", "weight norm", "complex", "bias", "gain"}
    changed |= {"convolutions of one kernel", "convolution in a loop", "convolution of layers"}
    for name in STEPS.keys() - changed - {"carried", "carried, changed", "branch of weights"}:
        loss, (params, batch) = loss_of([name]), params_and_batch(2, 0)
        assert "materialized" not in methods(loss, params, batch).values(), name
