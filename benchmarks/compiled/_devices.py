"""Devices that are not there, to compile for: an H100, and TPUs of any number of chips.

`make bench-compiled` makes an environment for each.
"""

import functools
import importlib.util
import os
import pathlib
import resource
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Sharding, SingleDeviceSharding

from benchmarks.compiled import _hlo

Tree = Any
_H100 = pathlib.Path(__file__).parent / "h100_target_config.pbtxt"
_TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no chip is touched, so nothing needs its lock file
}


@dataclass(frozen=True)
class Compiled:
    """A program with what XLA says of it; seconds are of CPU time, so other load matters little.

    `flops` are XLA's own; it has none for a GPU, where those of the matrix products are counted.
    """

    program: _hlo.Program
    scratch: int
    flops: float
    trace_seconds: float
    compile_seconds: float
    text: str


def available() -> str | None:
    """The platform that this environment compiles for: `tpu`, `cuda` or None."""
    packages = {"tpu": "libtpu", "cuda": "jax_cuda12_plugin"}
    found = [name for name, package in packages.items() if importlib.util.find_spec(package)]
    return found[0] if found else None


@functools.cache
def devices(platform: str, topology: str | None = None) -> list[Any]:
    """Devices of this CPU, of H100s (`1x8x1` are eight), or of TPUs (`v5e:16x16`, `v5p:4x4x4`)."""
    jax.config.update("jax_platforms", "cpu")
    if platform == "cpu":
        return jax.devices("cpu")
    if platform == "cuda":
        made = topologies.get_topology_desc(
            topology_name="h100",
            platform="cuda",
            target_config=_H100.read_text(),
            topology=topology or "1x1x1",
        )
    else:
        os.environ.update(_TPU_ENVIRONMENT)
        made = topologies.get_topology_desc(platform="tpu", topology_name=topology or "v5e:4x4")
    return list(made.devices)


def one_device(platform: str) -> Sharding:
    """A sharding on one device, as that of arrays that were never sharded."""
    return SingleDeviceSharding(devices(platform)[0])


def placed(tree: Tree, sharding: Any) -> Tree:
    """The shapes of a tree, on a sharding or a tree of them."""
    shardings = sharding
    if isinstance(sharding, Sharding):
        shardings = jax.tree.map(lambda _: sharding, tree)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings
    )


def compile_for(
    platform: str,
    function: Callable[..., Any],
    *args: Any,
    donate: Any = (),
    out_shardings: Any = None,
) -> Compiled:
    """Compiles a function of shapes that are placed on devices which are not there."""
    jax.clear_caches()  # or the second of two programs would find its parts traced
    options = {} if out_shardings is None else {"out_shardings": out_shardings}
    start = _cpu_seconds()
    traced = jax.jit(function, donate_argnums=donate, **options).trace(*args)
    lowered = traced.lower(lowering_platforms=(platform,))
    middle = _cpu_seconds()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is donated and cannot be used
        compiled = lowered.compile()
    end = _cpu_seconds()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    scratch = 0 if memory is None else int(memory.temp_size_in_bytes)
    program = _hlo.analyse(text)
    flops = (compiled.cost_analysis() or {}).get("flops") or program.all.flops
    return Compiled(program, scratch, flops, middle - start, end - middle, text)


def _cpu_seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)  # ptxas
    return time.process_time() + children.ru_utime + children.ru_stime
