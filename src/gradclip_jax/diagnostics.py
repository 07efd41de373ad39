"""Diagnostics of a training run, for use outside jit between steps.

| function | result |
| --- | --- |
| `read_log` | incidents and a summary of a log, including logs of other trainers |
| `plot_log` | plot of a log, or of rows of a `Monitor` |
| `suggest_max_norm` | a `max_norm` based on the norms of a run |
| `nonfinite_leaves` | leaves that contain NaN or infinity |
| `accumulation_stats` | numbers of micro-batches and windows |
| `noise_scale` | gradient noise scale from logged norms |
| `verify_step` | whether a device computes wrong results, and which |

Use `gcx.metrics` to log values at every step, and `gcx.Monitor` to find out what went wrong.
"""

from __future__ import annotations

import contextlib
import hashlib
import typing
from collections import abc
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from . import _checks, _errors, _types
from .accumulation._noise_scale import noise_scale as noise_scale
from .accumulation._window import AccumulationStats as AccumulationStats
from .accumulation._window import accumulation_stats as accumulation_stats
from .monitoring._detect import Incident as Incident
from .monitoring._monitor import read_log as read_log
from .monitoring._plot import plot_log as plot_log
from .monitoring._policy import Report as Report
from .monitoring._rows import Outcome as Outcome
from .monitoring._summary import suggest_max_norm as suggest_max_norm


@_errors.public
def nonfinite_leaves(tree: _types.Tree) -> dict[str, int]:
    """Count the non-finite elements of each leaf.

    When `guard_failed` becomes 1, call this function outside jit on gradients, parameters,
    activations or a whole optimizer state. The call blocks until the values are computed.

    Args:
        tree: Any pytree of arrays. Integer leaves are finite.

    Returns:
        Dictionary from the paths of leaves with non-finite elements to their number, in the order
        of the tree; empty if all elements are finite.

    Raises:
        TypeError: If called inside jit.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> tree = {"a": jnp.zeros(3), "b": jnp.array([1.0, jnp.nan, jnp.inf])}
        >>> gcx.diagnostics.nonfinite_leaves(tree)
        {"['b']": 2}
    """
    hint = "Return the tree from `jit`; inside `jit`, use `gradclip_jax.metrics`."
    _checks.check_concrete("tree", tree, hint)
    leaves = jax.tree.leaves_with_path(tree)
    leaves = [x for x in leaves if jnp.issubdtype(_checks.dtype_of(x[1]), jnp.inexact)]
    # Explicit transfers of one number for each leaf, which a transfer guard allows.
    counts = jax.device_get({jax.tree_util.keystr(path): _count_nonfinite(x) for path, x in leaves})
    return {path: int(count) for path, count in counts.items() if count}


def _count_nonfinite(x: _types.Array | _types.HostArray | float) -> _types.Array | int:
    """Count the non-finite elements of an array, on its device or on the host."""
    return _count_on_device(x) if isinstance(x, jax.Array) else np.sum(~np.isfinite(x))


@jax.jit
def _count_on_device(x: _types.Array) -> _types.Array:
    """Count the non-finite elements of an array of JAX."""
    return jnp.sum(~jnp.isfinite(x))


class Verification(typing.NamedTuple):
    """The result of `verify_step`.

    Attributes:
        verdict: "equal", "transient", "device" or "not reproducible"; see `verify_step`.
        devices: Dictionary from the path of each output leaf that differs to the ids of the devices
            that may have computed it wrongly; empty if all bits are equal.
    """

    verdict: str
    devices: dict[str, list[int]]


@_errors.public
def verify_step(
    step: abc.Callable[..., _types.Tree], *args: _types.Tree, **kwargs: _types.Tree
) -> Verification:
    """Run a step four times with the same inputs and compare every bit of its outputs.

    A step is a pure function of its arguments, so all runs give the same bits. If they do not, a
    device computes wrong results without an error ("silent data corruption"), or the program is not
    deterministic. The first two runs use the devices of the arguments. In the other two, each
    device does the work of its neighbor in the mesh. Call this function every few thousand steps,
    or after a rewind to distinguish a fault of the hardware from a fault of the data.

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
    _checks.check_callable("step", step, "Pass the training step, then its arguments.")
    _checks.check_concrete("args", (args, kwargs), "Call `verify_step(jax.jit(step), ...)`.")

    def run(args: _types.Tree, kwargs: _types.Tree) -> _Digests:
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
    """Compare the runs; the third and fourth of four are on other devices."""
    bits = [{place: digest for place, (_, digest) in run.items()} for run in runs]
    if bits.count(bits[0]) == len(bits):
        return Verification("equal", {})
    odd = [i for i, x in enumerate(bits) if bits.count(x) == 1]
    if len(odd) == 1 and len(runs) > 2:
        return Verification("transient", _suspects([(runs[odd[0]], runs[odd[0] - 1])]))
    if len(runs) == 4 and bits[0] == bits[1] and bits[2] == bits[3]:
        return Verification("device", _suspects([(runs[0], runs[2])], is_device_fault=True))
    return Verification("not reproducible", _suspects(zip(runs, runs[1:], strict=False)))


def _suspects(
    pairs: abc.Iterable[tuple[_Digests, _Digests]], *, is_device_fault: bool = False
) -> dict[str, list[int]]:
    """Return the devices that may have computed each output that differs in a pair of runs.

    By default, these are the devices of the first run. With `is_device_fault`, they are the devices
    that computed every differing part in one of the two runs.
    """
    suspects: dict[str, list[set[int]]] = {}
    for first, second in pairs:
        for place in {**first, **second}:
            found = [run[place] for run in (first, second) if place in run]
            devices = [device for device, _ in found]
            is_equal = len(found) == 2 and found[0][1] == found[1][1]
            if not is_equal:
                chosen = devices if is_device_fault else devices[:1]
                suspects.setdefault(place[0], []).append(set(chosen))
    out: dict[str, list[int]] = {}
    for path, sets in suspects.items():
        common = set.intersection(*sets) if is_device_fault else set[int]()
        out[path] = sorted(common or set.union(*sets))
    return out


def _copy(tree: _types.Tree) -> _types.Tree:
    """Copy the arrays of a tree, so that a step may donate them."""
    return jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, tree)


def _moved(tree: _types.Tree) -> _types.Tree | None:
    """Return a copy in which each device has the data of its neighbor, or None if not possible."""
    shardings = [x.sharding for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    on_mesh = [x for x in shardings if len(x.device_set) > 1]
    devices = jax.devices()
    is_named = all(isinstance(x, jax.sharding.NamedSharding) for x in on_mesh)
    if not shardings or len(devices) == 1 or jax.process_count() > 1 or not is_named:
        return None

    def move(x: _types.Tree) -> _types.Tree:
        if isinstance(x, jax.Array) and not on_mesh:
            (device,) = x.devices()
            return jax.device_put(x, devices[(devices.index(device) + 1) % len(devices)])
        sharding = x.sharding if isinstance(x, jax.Array) else None
        if not isinstance(sharding, jax.sharding.NamedSharding) or sharding not in on_mesh:
            return x
        mesh = sharding.mesh
        order = np.roll(np.asarray(mesh.devices), 1)  # of all axes together
        rolled = jax.sharding.Mesh(order, mesh.axis_names, axis_types=mesh.axis_types)
        return jax.device_put(x, jax.sharding.NamedSharding(rolled, sharding.spec))

    return jax.tree.map(move, tree)


def _digests(tree: _types.Tree) -> _Digests:
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
