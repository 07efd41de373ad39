"""Small models of three kinds with the loss of one example, to measure per-example clipping."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.per_example import _gpt2

Tree = Any


def _arrays(shapes: Tree) -> Tree:
    rng = np.random.default_rng(0)

    def drawn(shape: tuple[int, ...]) -> jax.Array:
        fan_in = np.prod(shape[:-1]) if len(shape) > 1 else 1.0
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(fan_in), jnp.float32)

    return jax.tree.map(drawn, shapes, is_leaf=lambda x: isinstance(x, tuple))


def _entropy(logits: jax.Array, label: jax.Array) -> jax.Array:
    return jax.nn.logsumexp(logits) - logits[label]


def _normed(x: jax.Array, axes: Any = -1) -> jax.Array:
    x = x - x.mean(axes, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(axes, keepdims=True) + 1e-5)


def gpt() -> tuple[Any, Tree, Tree]:
    """4 layers of 128, vocabulary 2,048, 16 texts of 64 tokens."""
    shapes = jax.tree.map(lambda x: x.shape, _gpt2.gpt_shapes(4, 128, 2048, 64))
    ids = np.random.default_rng(1).integers(0, 2048, (16, 64)).astype(np.int32)
    return functools.partial(_gpt2.loss, heads=4), _arrays(shapes), ids


def _images(size: int, count: int = 16) -> Tree:
    rng = np.random.default_rng(1)
    return np.float32(rng.normal(size=(count, size, size, 3))), rng.integers(0, 10, count)


def _patches(image: jax.Array, size: int) -> jax.Array:
    n = image.shape[0] // size
    return image.reshape(n, size, n, size, 3).transpose(0, 2, 1, 3, 4).reshape(n * n, -1)


def resnet() -> tuple[Any, Tree, Tree]:
    """6 residual convolutions of 64 to 256 channels with group norm, 16 images of 32 x 32."""
    widths = [64, 64, 128, 128, 256, 256]
    pairs = list(zip([64, *widths], widths, strict=False))
    shapes = {
        "stem": (3, 3, 3, 64),
        "convs": [{"kernel": (3, 3, a, b), "skip": (1, 1, a, b), "scale": (b,)} for a, b in pairs],
        "head": (256, 10),
    }

    def conv(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), "SAME", dimension_numbers=numbers
        )

    def loss(p: Tree, example: Tree) -> jax.Array:
        image, label = example
        x = conv(image[None], p["stem"])
        for i, layer in enumerate(p["convs"]):
            stride = 2 if i in (2, 4) else 1
            y = conv(x, layer["kernel"], stride)
            y = _normed(y.reshape(*y.shape[:3], 8, -1), (1, 2, 4)).reshape(y.shape)
            x = conv(x, layer["skip"], stride) + jax.nn.relu(y * layer["scale"])
        return _entropy(x.mean((0, 1, 2)) @ p["head"], label)

    return loss, _arrays(shapes), _images(32)


def mixer() -> tuple[Any, Tree, Tree]:
    """4 layers of 256, 16 images of 64 patches."""
    n, t = 256, 64
    block = {"in": (t, 128), "out": (128, t), "up": (n, 2 * n), "down": (2 * n, n)}
    shapes = {"patch": (48, n), "head": (n, 10), "blocks": [block] * 4}

    def loss(p: Tree, example: Tree) -> jax.Array:
        image, label = example
        x = _patches(image, 4) @ p["patch"]
        for layer in p["blocks"]:
            x = x + (jax.nn.gelu(_normed(x).T @ layer["in"]) @ layer["out"]).T
            x = x + jax.nn.gelu(_normed(x) @ layer["up"]) @ layer["down"]
        return _entropy(_normed(x).mean(0) @ p["head"], label)

    return loss, _arrays(shapes), _images(32)


MODELS = {"GPT": gpt, "ResNet, group norm": resnet, "Mixer": mixer}
