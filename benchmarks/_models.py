"""Models whose training steps are measured: shapes of parameters and batch, and the loss.

Plain JAX, float32. `scan` stacks the blocks of a GPT and runs them in `lax.scan` with remat.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Sharding

Tree = Any


@dataclasses.dataclass(frozen=True)
class Model:
    """A model to train.

    Attributes:
        params: the parameters as shapes.
        batch: a batch as shapes.
        loss: `(params, batch) -> float32[]`.
        ranges: for each integer leaf of the batch, in order, the number of its values.
    """

    params: Tree
    batch: Tree
    loss: Callable[[Tree, Tree], jax.Array]
    ranges: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """N, the bytes of the parameters."""
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(self.params))

    @functools.cached_property
    def arrays(self) -> tuple[Tree, Tree]:
        """Random parameters and a random batch, made once: the largest take seconds."""
        random, ranges = np.random.default_rng(0), iter(self.ranges)

        def weight(x: Any) -> jax.Array:
            if len(x.shape) == 1:
                return jnp.ones(x.shape, x.dtype)
            fan_in = math.prod(x.shape[-4:-1] if len(x.shape) == 4 else x.shape[-2:-1])
            return jnp.asarray(random.normal(size=x.shape) / fan_in**0.5, x.dtype)

        def example(x: Any) -> jax.Array:
            if jnp.issubdtype(x.dtype, jnp.integer):
                return jnp.asarray(random.integers(next(ranges), size=x.shape), x.dtype)
            return jnp.asarray(random.normal(size=x.shape), x.dtype)

        return jax.tree.map(weight, self.params), jax.tree.map(example, self.batch)


def _f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    logits = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(logits, labels[..., None], -1))


def _layer_norm(x: jax.Array, p: Tree) -> jax.Array:
    mean = jnp.mean(x, -1, keepdims=True)
    variance = jnp.mean(jnp.square(x - mean), -1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * p["scale"] + p["bias"]


def _block_shapes(width: int, *stacked: int, experts: int = 0) -> Tree:
    def leaf(*shape: int) -> Any:
        return _f32(*stacked, *shape)

    norm = {"scale": leaf(width), "bias": leaf(width)}
    of_experts = {
        "router": leaf(width, experts),
        "up": leaf(experts, width, 4 * width),
        "down": leaf(experts, 4 * width, width),
    }
    return {
        "norm1": norm,
        "qkv": leaf(width, 3 * width),
        "qkv_bias": leaf(3 * width),
        "out": leaf(width, width),
        "out_bias": leaf(width),
        "norm2": norm,
        "up": leaf(width, 4 * width),
        "up_bias": leaf(4 * width),
        "down": leaf(4 * width, width),
        "down_bias": leaf(width),
    } | (of_experts if experts else {})


def _routed(x: jax.Array, p: Tree) -> jax.Array:
    """The MLP of one expert for each token; tokens beyond twice an expert's share have no MLP."""
    count = p["router"].shape[-1]
    gates = jax.nn.softmax(x @ p["router"])
    chosen = jax.nn.one_hot(jnp.argmax(gates, -1), count)
    places = jnp.cumsum(chosen, 1) * chosen - 1  # one_hot of -1 is zero
    slots = jax.nn.one_hot(places, 2 * x.shape[1] // count)
    hidden = jnp.einsum("btec,btd,edh->ebch", slots, x, p["up"], optimize=[(0, 1), (0, 1)])
    hidden = jax.nn.gelu(hidden + p["up_bias"])
    out = jnp.einsum("ebch,ehd->ebcd", hidden, p["down"])
    return jnp.einsum("btec,bte,ebcd->btd", slots, gates, out)


def _block(x: jax.Array, p: Tree, *, heads: int) -> jax.Array:
    tokens = x.shape[1]
    qkv = _layer_norm(x, p["norm1"]) @ p["qkv"] + p["qkv_bias"]
    q, k, v = jnp.moveaxis(qkv.reshape(*x.shape[:2], 3, heads, -1), 2, 0)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    scores = jnp.where(np.tri(tokens, dtype=bool), scores, -1e9)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    x = x + mixed.reshape(x.shape) @ p["out"] + p["out_bias"]
    normed = _layer_norm(x, p["norm2"])
    if "router" in p:
        return x + _routed(normed, p) + p["down_bias"]
    return x + jax.nn.gelu(normed @ p["up"] + p["up_bias"]) @ p["down"] + p["down_bias"]


def _blocks(x: jax.Array, blocks: Tree, *, heads: int) -> jax.Array:
    """A list of blocks one after the other, a stacked tree of them in `scan` with remat."""
    block = functools.partial(_block, heads=heads)
    if isinstance(blocks, list):
        for p in blocks:
            x = block(x, p)
        return x
    return lax.scan(jax.checkpoint(lambda x, p: (block(x, p), None)), x, blocks)[0]


def gpt(
    layers: int,
    width: int,
    vocabulary: int,
    batch: int,
    tokens: int,
    *,
    scan: bool,
    experts: int = 0,
    activations: Sharding | None = None,
) -> Model:
    """A GPT with heads of 64 whose embedding is also its last layer; with `experts`, a mixture.

    `activations` is the sharding of the embedded texts; if it is None, XLA chooses one.
    """
    stacked = (layers,) if scan else ()
    block = _block_shapes(width, *stacked, experts=experts)
    params = {
        "embed": _f32(vocabulary, width),
        "position": _f32(tokens, width),
        "norm": {"scale": _f32(width), "bias": _f32(width)},
        "blocks": block if scan else [block] * layers,
    }

    def loss(params: Tree, ids: jax.Array) -> jax.Array:
        x = params["embed"][ids[:, :-1]] + params["position"]
        if activations is not None:
            x = lax.with_sharding_constraint(x, activations)
        x = _blocks(x, params["blocks"], heads=width // 64)
        return _cross_entropy(_layer_norm(x, params["norm"]) @ params["embed"].T, ids[:, 1:])

    return Model(params, _i32(batch, tokens + 1), loss, (vocabulary,))


def _conv(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    layout = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (stride,) * 2, "SAME", dimension_numbers=layout)


def _conv_norm_shapes(*kernel: int) -> Tree:
    return {"kernel": _f32(*kernel), "scale": _f32(kernel[-1]), "bias": _f32(kernel[-1])}


def _conv_norm(x: jax.Array, p: Tree, stride: int = 1) -> jax.Array:
    """A convolution and the batch norm of training."""
    x = _conv(x, p["kernel"], stride)
    mean = jnp.mean(x, (0, 1, 2))
    variance = jnp.mean(jnp.square(x), (0, 1, 2)) - jnp.square(mean)
    return (x - mean) * (lax.rsqrt(variance + 1e-5) * p["scale"]) + p["bias"]


def resnet(blocks: tuple[int, ...], width: int, batch: int, side: int, classes: int) -> Model:
    """A ResNet of bottleneck blocks; ResNet-50 is (3, 4, 6, 3) of width 64 on 224 x 224."""
    params: Tree = {"stem": _conv_norm_shapes(7, 7, 3, width)}
    inputs = width
    for stage, count in enumerate(blocks):
        inner = width * 2**stage
        for i in range(count):
            params[f"stage{stage}block{i}"] = block = {
                "reduce": _conv_norm_shapes(1, 1, inputs, inner),
                "conv": _conv_norm_shapes(3, 3, inner, inner),
                "expand": _conv_norm_shapes(1, 1, inner, 4 * inner),
            }
            if i == 0:
                block["skip"] = _conv_norm_shapes(1, 1, inputs, 4 * inner)
            inputs = 4 * inner
    params |= {"head": _f32(inputs, classes), "head_bias": _f32(classes)}

    def loss(params: Tree, batch: Tree) -> jax.Array:
        images, labels = batch
        x = jax.nn.relu(_conv_norm(images, params["stem"], 2))
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for stage, count in enumerate(blocks):
            for i in range(count):
                p, stride = params[f"stage{stage}block{i}"], 2 if stage > 0 and i == 0 else 1
                y = jax.nn.relu(_conv_norm(x, p["reduce"]))
                y = jax.nn.relu(_conv_norm(y, p["conv"], stride))
                y = _conv_norm(y, p["expand"])
                x = jax.nn.relu(y + (_conv_norm(x, p["skip"], stride) if "skip" in p else x))
        return _cross_entropy(jnp.mean(x, (1, 2)) @ params["head"] + params["head_bias"], labels)

    return Model(params, (_f32(batch, side, side, 3), _i32(batch)), loss, (classes,))


def ppo(inputs: int = 8, width: int = 64, actions: int = 4, batch: int = 512) -> Model:
    """Actor and critic of two hidden layers each, 12 leaves, by the clipped surrogate."""

    def network(outputs: int) -> Tree:
        sizes = (inputs, width, width, outputs)
        layers = zip(sizes, sizes[1:], strict=False)
        return [{"weight": _f32(a, b), "bias": _f32(b)} for a, b in layers]

    def run(layers: Tree, x: jax.Array) -> jax.Array:
        for p in layers[:-1]:
            x = jnp.tanh(x @ p["weight"] + p["bias"])
        return x @ layers[-1]["weight"] + layers[-1]["bias"]

    def loss(params: Tree, batch: Tree) -> jax.Array:
        seen, taken, old_log_prob, advantage, returned = batch
        log_probs = jax.nn.log_softmax(run(params["actor"], seen))
        ratio = jnp.exp(jnp.take_along_axis(log_probs, taken[:, None], -1)[:, 0] - old_log_prob)
        gains = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
        entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, -1)
        errors = jnp.square(run(params["critic"], seen)[:, 0] - returned)
        return jnp.mean(0.5 * errors - gains - 0.01 * entropy)

    params = {"actor": network(actions), "critic": network(1)}
    numbers = [_f32(batch)] * 3
    return Model(params, (_f32(batch, inputs), _i32(batch), *numbers), loss, (actions,))


def deep(layers: int = 150, width: int = 32, batch: int = 16) -> Model:
    """A multilayer perceptron with two small leaves for each layer."""
    params = [{"weight": _f32(width, width), "bias": _f32(width)} for _ in range(layers)]

    def loss(params: Tree, x: jax.Array) -> jax.Array:
        for p in params:
            x = jnp.tanh(x @ p["weight"] + p["bias"])
        return jnp.mean(jnp.square(x))

    return Model(params, _f32(batch, width), loss)


# The small ones compile in seconds and show what the large ones show.
MODELS: dict[str, Callable[[], Model]] = {
    "PPO": ppo,
    "scan GPT, small": lambda: gpt(4, 256, 8192, 8, 128, scan=True),
    "GPT, small": lambda: gpt(4, 256, 8192, 8, 128, scan=False),
    "conv net, small": lambda: resnet((1, 1), 32, 16, 32, 10),
    "GPT-2 124M in scan": lambda: gpt(12, 768, 50257, 8, 1024, scan=True),
    "ResNet-50": lambda: resnet((3, 4, 6, 3), 64, 32, 224, 1000),
    "GPT-2 124M": lambda: gpt(12, 768, 50257, 8, 1024, scan=False),
    "150 layers": deep,
}
