"""How the parameters and the batch of a GPT are sharded over many devices."""

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks._models import Model
from benchmarks.compiled import _devices

Tree = Any
# A topology, and the number of devices by data (FSDP) and by model (tensor or expert parallelism).
MESHES = {"tpu": ("v5e:4x4", (4, 4)), "cuda": ("1x8x1", (4, 2))}
BY_ROWS = ("out", "down")  # the second matrix of attention and of the MLP; others by columns


def mesh(platform: str, devices: tuple[str, tuple[int, int]] | None = None) -> Mesh:
    """The devices, by data and model."""
    topology, shape = devices or MESHES[platform]
    return Mesh(np.array(_devices.devices(platform, topology)).reshape(shape), ("data", "model"))


def _spec(path: Any, shape: tuple[int, ...], *, scan: bool) -> P:
    """The axes of the mesh over which a parameter is sharded; layers of a scan are not."""
    name, stacked = path[-1].key, (None,) * (scan and path[0].key == "blocks")
    sizes = shape[len(stacked) :]
    if name == "embed":
        return P("model", "data")
    if name in ("position", "router") or (len(sizes) == 1 and path[0].key == "blocks"):
        return P(*stacked, *(None,) * (name == "position"), "data")
    if len(sizes) == 1:
        return P()
    if len(sizes) == 3:  # experts
        return P(*stacked, "model", "data")
    return P(*stacked, *(("model", "data") if name in BY_ROWS else ("data", "model")))


def placed(model: Model, state: Tree, mesh: Mesh) -> tuple[tuple[Tree, Tree, Tree], int]:
    """Parameters, state and batch as shapes on the mesh, and the bytes of parameters on a device.

    A leaf of the state with the path and the shape of a parameter is sharded as the parameter is.
    """
    scan = isinstance(model.params["blocks"], dict)
    of_params = {
        jax.tree_util.keystr(path): (
            x.shape,
            NamedSharding(mesh, _spec(path, x.shape, scan=scan)),
        )
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
