"""A GPT of 1B parameters on many chips: ours beside Optax's, sharded in three ways."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import _devices
import _trees as trees
import jax
import jax.numpy as jnp
import numpy as np
from _programs import PROGRAMS, Case
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Tree = Any
TITLES = (
    "clip",
    "clip + AdamW",
    "hold (and emission inside), apply_gradients",
    "skip_nonfinite(clip + AdamW), apply_gradients",
    "skip_nonfinite(accumulation), apply_gradients",
)
# Topologies, and how their chips are split over data and model where both are used.
CHIPS = {
    "tpu": {"v5e:4x4": (4, 4), "v5e:16x16": (16, 16), "v5p:4x4x4": (16, 4)},
    "cuda": {"1x8x1": (4, 2)},
}
IN_BY_OUT = ("qkv", "up")  # tensor parallel by columns; the others by rows


def gpt(layers: int = 20, width: int = 2048, vocabulary: int = 51200) -> trees.Shapes:
    """1.1B parameters, stacked for a scan over the layers."""
    return {
        "embed": (vocabulary, width),
        "qkv": (layers, width, 3 * width),
        "out": (layers, width, width),
        "up": (layers, width, 4 * width),
        "down": (layers, 4 * width, width),
        "norms": (layers, 4, width),
        "biases": (layers, 9 * width),
    }


def spec_of(name: str, ways: tuple[str | None, str | None]) -> P:
    """How a leaf lies on the mesh; `ways` are the axes of data (FSDP) and of tensor parallelism."""
    data, model = ways
    if name == "embed":
        return P(model, data)
    if name in ("norms", "biases"):
        return P(*[None] * (1 + (name == "norms")), data)
    return P(None, data, model) if name in IN_BY_OUT else P(None, model, data)


def meshes(platform: str, topology: str) -> dict[str, tuple[Mesh, tuple[str | None, str | None]]]:
    """The three ways to shard."""
    chips = np.array(_devices.devices(platform, topology))
    both = chips.reshape(CHIPS[platform][topology])
    return {
        "FSDP": (Mesh(chips, ("data",)), ("data", None)),
        "tensor parallel": (Mesh(chips, ("model",)), (None, "model")),
        "FSDP x tensor parallel": (Mesh(both, ("data", "model")), ("data", "model")),
    }


def cases(
    platform: str, quick: bool, wanted: Callable[[str], bool]
) -> Iterator[tuple[tuple[str, str], tuple[_devices.Compiled, int]]]:
    """Section and title of each row, its program, and the bytes of the parameters on a chip."""
    shapes = gpt(2, 512, 5120) if quick else gpt()
    tree = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}
    for topology in list(CHIPS[platform])[: 1 if quick else None]:
        for way, (mesh, axes) in meshes(platform, topology).items():
            section = f"GPT 1.1B, {topology}, {way}"
            shardings = {name: NamedSharding(mesh, spec_of(name, axes)) for name in tree}
            size = sum(_on_a_chip(x, shardings[name]) for name, x in tree.items())
            for title in TITLES:
                if wanted(f"{section}: {title}"):
                    for who, make in PROGRAMS[title].makers().items():
                        compiled = _compiled(platform, make(), tree, shardings, mesh)
                        yield (section, f"{title}: {who}"), (compiled, size)


def _on_a_chip(x: Any, sharding: NamedSharding) -> int:
    return math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize


def _compiled(
    platform: str, case: Case, tree: Tree, shardings: dict[str, Any], mesh: Mesh
) -> _devices.Compiled:
    def place(path: Any, x: Any) -> NamedSharding:
        name = getattr(path[-1], "key", None)
        shaped = name in tree and tree[name].shape == x.shape
        return shardings[name] if shaped else NamedSharding(mesh, P())

    args = case.args(tree)
    placed = _devices.placed(args, jax.tree_util.tree_map_with_path(place, args))
    out = jax.tree_util.tree_map_with_path(place, jax.eval_shape(case.function, *args))
    return _devices.compile_for(
        platform, case.function, *placed, donate=case.donate, out_shardings=out
    )
