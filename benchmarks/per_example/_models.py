"""GPT-2 and a ResNet with the loss of one example, to measure per-example clipping."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Tree = Any


def _normed(x: jax.Array, axes: Any = -1) -> jax.Array:
    x = x - x.mean(axes, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(axes, keepdims=True) + 1e-5)


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


def _block(x: jax.Array, p: Tree, heads: int) -> jax.Array:
    q, k, v = jnp.split(_normed(x) * p["norm1"] @ p["qkv"], 3, -1)
    q, k, v = (y.reshape(len(x), heads, -1).transpose(1, 0, 2) for y in (q, k, v))
    scores = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1]).astype(np.float32)
    causal = np.tril(np.ones((len(x), len(x)), bool))
    mixed = jax.nn.softmax(jnp.where(causal, scores, -1e9)) @ v
    x = x + mixed.transpose(1, 0, 2).reshape(x.shape) @ p["out"]
    hidden = jax.nn.gelu(_normed(x) * p["norm2"] @ p["up"] + p["up_bias"])
    return x + hidden @ p["down"] + p["down_bias"]


def gpt_loss(params: Tree, ids: jax.Array, heads: int = 12) -> jax.Array:
    """Mean cross-entropy of the next token, one text."""
    x = params["embed"][ids] + params["place"][: len(ids)]
    for p in params["blocks"]:
        x = _block(x, p, heads)
    logits = _normed(x) * params["norm"] @ params["embed"].T
    picked = jnp.take_along_axis(logits[:-1], ids[1:, None], -1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits[:-1], -1) - picked)


def resnet_shapes() -> Tree:
    """The parameters of 7 convolutions of 64 to 256 channels and a head for 10 classes."""
    widths = [64, 64, 64, 128, 128, 256, 256]
    shapes = {
        "stem": (3, 3, 3, 64),
        "convs": [
            {"kernel": (3, 3, a, b), "skip": (1, 1, a, b), "scale": (b,)}
            for a, b in zip(widths, widths[1:], strict=False)
        ],
        "head": (256, 10),
    }
    leaf = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    return jax.tree.map(leaf, shapes, is_leaf=lambda x: isinstance(x, tuple))


def _conv(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=numbers
    )


def resnet_loss(p: Tree, example: Tree) -> jax.Array:
    """Cross-entropy of one image; residual convolutions with group norm."""
    image, label = example
    x = _conv(image[None], p["stem"])
    for i, layer in enumerate(p["convs"]):
        stride = 2 if i in (2, 4) else 1
        y = _conv(x, layer["kernel"], stride)
        y = _normed(y.reshape(*y.shape[:3], 8, -1), (1, 2, 4)).reshape(y.shape)
        x = _conv(x, layer["skip"], stride) + jax.nn.relu(y * layer["scale"])
    logits = x.mean((0, 1, 2)) @ p["head"]
    return jax.nn.logsumexp(logits) - logits[label]


def _arrays(shapes: Tree) -> Tree:
    rng = np.random.default_rng(0)

    def drawn(x: jax.ShapeDtypeStruct) -> jax.Array:
        fan_in = np.prod(x.shape[:-1]) if len(x.shape) > 1 else 1.0
        return jnp.asarray(rng.normal(size=x.shape) / np.sqrt(fan_in), jnp.float32)

    return jax.tree.map(drawn, shapes)


def gpt() -> tuple[Any, Tree, Tree]:
    """4 layers of 128, vocabulary 2,048, 16 texts of 64 tokens."""
    ids = np.random.default_rng(1).integers(0, 2048, (16, 64)).astype(np.int32)
    return functools.partial(gpt_loss, heads=4), _arrays(gpt_shapes(4, 128, 2048, 64)), ids


def resnet() -> tuple[Any, Tree, Tree]:
    """6 residual convolutions of 64 to 256 channels with group norm, 16 images of 32 x 32."""
    rng = np.random.default_rng(1)
    images = np.float32(rng.normal(size=(16, 32, 32, 3)))
    return resnet_loss, _arrays(resnet_shapes()), (images, rng.integers(0, 10, 16))


MODELS = {"GPT": gpt, "ResNet, group norm": resnet}
