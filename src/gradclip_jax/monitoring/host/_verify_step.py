"""Verify that the devices compute the same step in every run."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from ..._checks import check_callable, check_concrete
from ..._errors import public
from ..._types import Tree


class Verification(NamedTuple):
    """The result of `verify_step`.

    Attributes:
        verdict: "equal", "transient", "device" or "not reproducible"; see `verify_step`.
        devices: Dictionary from the path of each output leaf that differs to the ids of the devices
            that may have computed it wrongly; empty if all bits are equal.
    """

    verdict: str
    devices: dict[str, list[int]]


@public
def verify_step(step: Callable[..., Tree], *args: Tree, **kwargs: Tree) -> Verification:
    """Run a step four times with the same inputs and compare every bit of its outputs.

    A step is a pure function of its arguments, so all runs should return bitwise equal outputs. If
    they do not, a device computes wrong results without an error ("silent data corruption"), or the
    program is not deterministic. The first two runs use the devices that hold the arguments. In the
    other two, each device does the work of its neighbor in the mesh. Call this function every few
    thousand steps, or after a rewind to distinguish a fault of the hardware from a fault of the
    data.

    | verdict | runs that differ | cause |
    | --- | --- | --- |
    | equal | none | no fault |
    | transient | one of the four | a device fault that occurs only once |
    | device | runs on different devices, but not on the same | a device that is always wrong |
    | not reproducible | any others | by design, such as atomic additions on a GPU without \
      `XLA_FLAGS=--xla_gpu_deterministic_ops=true`; or a device that is wrong at random |

    | case | result |
    | --- | --- |
    | a fault before an all-reduce | all devices that receive the sum are listed |
    | a step that contains its devices, such as `shard_map` with a mesh; several processes; \
      one device | only the first two runs, and a third if they differ; "device" is not found |
    | donated arguments | `args` stay valid, because each run receives a copy |
    | outputs that are not arrays of JAX | not compared |
    | several processes | each process compares its own devices |

    Args:
        step: A function of arrays, such as a jitted training step.
        args: Arguments of the step: pytrees of arrays and other objects.
        kwargs: Keyword arguments of the step.

    Returns:
        The verdict, and the leaves and devices that differ.

    Raises:
        TypeError: If `step` is not callable, or if called inside jit.

    Examples:
        >>> import jax, jax.numpy as jnp, gradclip_jax as gcx
        >>> gcx.diagnostics.verify_step(jax.jit(lambda w: {"w": 0.9 * w}), jnp.ones(3)).verdict
        'equal'

    References:
        Dixit et al. 2021, Silent Data Corruptions at Scale, arXiv 2102.11245. The verdicts are
        those of the rerun state machine of Megatron-LM.
    """
    check_callable("step", step, "Pass the training step, then its arguments.")
    check_concrete("args", (args, kwargs), "Call `verify_step(jax.jit(step), ...)`.")

    def run(args: Tree, kwargs: Tree) -> _Digests:
        return _digests(step(*_copy(args), **_copy(kwargs)))

    runs = [run(args, kwargs) for _ in range(2)]
    moved = _moved((args, kwargs))
    if moved is not None:
        with contextlib.suppress(ValueError):  # the step contains its devices
            runs += [run(*moved) for _ in range(2)]
    if len(runs) == 2 and runs[0] != runs[1] and runs[0].keys() == runs[1].keys():
        runs.append(run(args, kwargs))
    return _verdict(runs)


_Digests: TypeAlias = dict[tuple[str, int], tuple[int, bytes]]
"""The device and a hash of the bits, for each path and each position in the mesh."""


def _verdict(runs: list[_Digests]) -> Verification:
    """Compare the runs; if there are four, the third and fourth used other devices."""
    bits = [{place: digest for place, (_, digest) in run.items()} for run in runs]
    if bits.count(bits[0]) == len(bits):
        return Verification("equal", {})
    odd = [i for i, x in enumerate(bits) if bits.count(x) == 1]
    if len(odd) == 1 and len(runs) > 2:
        return Verification("transient", _devices(_differences(runs[odd[0]], runs[odd[0] - 1])))
    if len(runs) == 4 and bits[0] == bits[1] and bits[2] == bits[3]:
        return Verification("device", _common_devices(_differences(runs[0], runs[2])))
    pairs = map(_differences, runs, runs[1:])
    return Verification("not reproducible", _devices(itertools.chain(*pairs)))


def _differences(first: _Digests, second: _Digests) -> Iterator[tuple[str, list[int]]]:
    """Yield the path and the devices of each part of an output that differs between two runs."""
    for place in {**first, **second}:
        found = [run[place] for run in (first, second) if place in run]
        if len(found) == 1 or found[0][1] != found[1][1]:
            yield place[0], [device for device, _ in found]


def _devices(differences: Iterable[tuple[str, list[int]]]) -> dict[str, list[int]]:
    """Return the devices that computed the differing parts of each output in the first run."""
    devices: dict[str, set[int]] = {}
    for path, (device, *_) in differences:
        devices.setdefault(path, set()).add(device)
    return {path: sorted(x) for path, x in devices.items()}


def _common_devices(differences: Iterable[tuple[str, list[int]]]) -> dict[str, list[int]]:
    """Return the devices that computed each differing part in one of two runs.

    If there is no such device, return all devices that computed a differing part.
    """
    devices: dict[str, list[set[int]]] = {}
    for path, of_part in differences:
        devices.setdefault(path, []).append(set(of_part))
    return {path: sorted(set.intersection(*x) or set.union(*x)) for path, x in devices.items()}


def _copy(tree: Tree) -> Tree:
    """Copy the arrays of a tree, so that a step may donate them."""
    return jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, tree)


def _moved(tree: Tree) -> Tree | None:
    """Return a copy in which devices have their neighbors' data; None if impossible."""
    shardings = [x.sharding for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    on_mesh = [x for x in shardings if len(x.device_set) > 1]
    devices = jax.devices()
    is_named = all(isinstance(x, NamedSharding) for x in on_mesh)
    if not shardings or len(devices) == 1 or jax.process_count() > 1 or not is_named:
        return None

    def move(x: Tree) -> Tree:
        if not isinstance(x, jax.Array):
            return x
        if not on_mesh:
            (device,) = x.devices()
            return jax.device_put(x, devices[(devices.index(device) + 1) % len(devices)])
        if not isinstance(x.sharding, NamedSharding) or x.sharding not in on_mesh:
            return x
        mesh = x.sharding.mesh
        order = np.roll(np.asarray(mesh.devices), 1)  # of all axes together
        rolled = Mesh(order, mesh.axis_names, axis_types=mesh.axis_types)
        return jax.device_put(x, NamedSharding(rolled, x.sharding.spec))

    return jax.tree.map(move, tree)


def _digests(tree: Tree) -> _Digests:
    """Return a hash for each leaf and position, so that values need not stay in memory."""
    digests: _Digests = {}
    arrays = [(path, x) for path, x in jax.tree.leaves_with_path(tree) if isinstance(x, jax.Array)]
    for path, x in arrays:
        bits = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        mesh = getattr(bits.sharding, "mesh", None)
        order = [] if mesh is None else [device.id for device in mesh.devices.ravel()]
        for i, shard in enumerate(bits.addressable_shards):
            data, device = np.asarray(shard.data).tobytes(), shard.device.id
            position = order.index(device) if device in order else i
            place = jax.tree_util.keystr(path), position
            digests[place] = device, hashlib.sha256(data).digest()
    return digests
