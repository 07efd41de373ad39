"""How the parameters and the batch of a GPT in `scan` lie on many chips."""

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks._models import Model
from benchmarks.compiled import _devices

Tree = Any
# Chips by data (FSDP) and by model (tensor parallelism), and the topology that they form.
MESHES = {"tpu": ("v5e:4x4", (4, 4)), "cuda": ("1x8x1", (4, 2))}
BY_ROWS = ("out", "down")  # the second matrix of attention and of the MLP; others by columns


def mesh(platform: str, chips: tuple[str, tuple[int, int]] | None = None) -> Mesh:
    """The devices, by data and model."""
    topology, shape = chips or MESHES[platform]
    return Mesh(np.array(_devices.devices(platform, topology)).reshape(shape), ("data", "model"))


def placed(model: Model, state: Tree, mesh: Mesh) -> tuple[tuple[Tree, Tree, Tree], int]:
    """Parameters, state and batch as shapes on the mesh, and the bytes of parameters on a chip.

    What has the path and the shape of a parameter lies as that does.
    """

    def spec(name: str, shape: tuple[int, ...]) -> P:
        if name == "embed":
            return P("model", "data")
        if len(shape) < 2:
            return P()
        if len(shape) == 2:  # of every layer a vector
            return P(None, "data")
        return P(None, "model", "data") if name in BY_ROWS else P(None, "data", "model")

    of_params = {
        jax.tree_util.keystr(path): (x.shape, NamedSharding(mesh, spec(path[-1].key, x.shape)))
        for path, x in jax.tree.leaves_with_path(model.params)
    }

    def place(path: Any, x: Any) -> Any:
        tails = (jax.tree_util.keystr(path[i:]) for i in range(len(path)))
        shape, sharding = next((of_params[t] for t in tails if t in of_params), (None, None))
        if shape != x.shape:
            sharding = NamedSharding(mesh, P())
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    params, state = jax.tree_util.tree_map_with_path(place, (model.params, state))
    batch = _devices.placed(model.batch, NamedSharding(mesh, P("data")))
    size = sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(params)
    )
    return (params, state, batch), size
