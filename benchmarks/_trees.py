"""Parameter trees shaped like real models, scaled to fit where a limit of bytes is given."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Shapes = dict[str, tuple[int, ...]]


def gpt2(layers: int = 12, width: int = 768, vocabulary: int = 50257) -> Shapes:
    """GPT-2 124M."""
    shapes: Shapes = {"wte": (vocabulary, width), "wpe": (1024, width), "ln_f": (2 * width,)}
    for i in range(layers):
        shapes |= {
            f"h{i}.ln_1": (2, width),
            f"h{i}.attn": (width, 3 * width),
            f"h{i}.attn_b": (3 * width,),
            f"h{i}.proj": (width, width),
            f"h{i}.proj_b": (width,),
            f"h{i}.ln_2": (2, width),
            f"h{i}.fc": (width, 4 * width),
            f"h{i}.fc_b": (4 * width,),
            f"h{i}.out": (4 * width, width),
            f"h{i}.out_b": (width,),
        }
    return shapes


def llama(
    layers: int = 16, width: int = 2048, hidden: int = 8192, vocabulary: int = 32000
) -> Shapes:
    """A Llama-like model of 1.2B parameters, scan-stacked: few large leaves."""
    return {
        "embed": (vocabulary, width),
        "q": (layers, width, width),
        "k": (layers, width, width // 4),
        "v": (layers, width, width // 4),
        "o": (layers, width, width),
        "gate": (layers, width, hidden),
        "up": (layers, width, hidden),
        "down": (layers, hidden, width),
        "norms": (layers, 2, width),
    }


def resnet50() -> Shapes:
    """ResNet-50: 161 leaves, convolutions HWIO and batch-norm vectors."""
    shapes: Shapes = {"conv1": (7, 7, 3, 64), "bn1": (64,), "bn1_b": (64,), "fc": (2048, 1000)}
    inputs = 64
    for stage, (blocks, width) in enumerate([(3, 64), (4, 128), (6, 256), (3, 512)]):
        for block in range(blocks):
            name = f"s{stage}b{block}"
            convolutions = [(1, 1, inputs, width), (3, 3, width, width), (1, 1, width, 4 * width)]
            if block == 0:
                convolutions.append((1, 1, inputs, 4 * width))
            for i, shape in enumerate(convolutions):
                shapes |= {
                    f"{name}c{i}": shape,
                    f"{name}n{i}": shape[-1:],
                    f"{name}o{i}": shape[-1:],
                }
            inputs = 4 * width
    return shapes


def many_small(leaves: int = 2000) -> Shapes:
    """Leaves of 64 x 8 to 23."""
    return {f"leaf{i}": (64, 8 + i % 16) for i in range(leaves)}


def few_large(leaves: int = 8, side: int = 2048) -> Shapes:
    """Square matrices."""
    return {f"w{i}": (side, side) for i in range(leaves)}


def random_tree(shapes: Shapes, dtype: Any = "float32", seed: int = 0) -> dict[str, jax.Array]:
    """Normal numbers; `mixed` takes bfloat16 for matrices and float32 for the rest."""
    keys = jax.random.split(jax.random.key(seed), len(shapes))

    def leaf(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        kind = ("bfloat16" if len(shape) > 1 else "float32") if dtype == "mixed" else dtype
        return 1e-2 * jax.random.normal(key, shape, jnp.dtype(kind))

    return {name: leaf(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}


def num_elements(shapes: Shapes) -> int:
    """Parameters of the model."""
    return sum(int(np.prod(shape)) for shape in shapes.values())
