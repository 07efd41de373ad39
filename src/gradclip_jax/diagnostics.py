"""Diagnostics of a training run, for use outside jit between steps.

| function | result |
| --- | --- |
| `read_log` | incidents and a summary of a log, also of another trainer |
| `plot_log` | plot of a log, or of rows of a `Monitor` |
| `suggest_max_norm` | a `max_norm` based on the norms of a run |
| `nonfinite_leaves` | leaves that contain NaN or infinity |
| `accumulation_stats` | numbers of micro-batches and windows |
| `noise_scale` | gradient noise scale from logged norms |
| `verify_step` | leaves and devices for which two runs of a step differ |

Use `gcx.metrics` to log values at every step, and `gcx.Monitor` to learn what went wrong.
"""

from __future__ import annotations

import hashlib
from collections import abc

import jax
import jax.numpy as jnp
import numpy as np

from . import _checks, _errors, _types
from .accumulation._noise_scale import noise_scale as noise_scale
from .accumulation._window import AccumulationStats as AccumulationStats
from .accumulation._window import accumulation_stats as accumulation_stats
from .monitoring._detect import Incident as Incident
from .monitoring._monitor import read_log as read_log
from .monitoring._monitor import suggest_max_norm as suggest_max_norm
from .monitoring._plot import plot_log as plot_log
from .monitoring._policy import Report as Report
from .monitoring._rows import Outcome as Outcome


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
    leaves = jax.tree.leaves_with_path(tree)
    if any(_checks.is_traced(x) for _, x in leaves):
        hint = "Return the tree from `jit`; inside `jit`, use `gradclip_jax.metrics`."
        raise _errors.type_error("tree", "passed outside `jit`", "a traced array", hint)
    leaves = [x for x in leaves if jnp.issubdtype(_checks.dtype_of(x[1]), jnp.inexact)]
    # Explicit transfers of one number for each leaf, which a transfer guard allows.
    counts = jax.device_get({jax.tree_util.keystr(path): _count_nonfinite(x) for path, x in leaves})
    return {path: int(count) for path, count in counts.items() if count}


def _count_nonfinite(x: _types.Array | _types.HostArray | float) -> _types.Array | int:
    """Count non-finite elements, where the array is."""
    return _count_on_device(x) if isinstance(x, jax.Array) else np.sum(~np.isfinite(x))


@jax.jit
def _count_on_device(x: _types.Array) -> _types.Array:
    return jnp.sum(~jnp.isfinite(x))


@_errors.public
def verify_step(
    step: abc.Callable[..., _types.Tree], *args: _types.Tree, **kwargs: _types.Tree
) -> dict[str, list[int]]:
    """Run a step twice with the same inputs and compare every bit of its outputs.

    A step is a pure function of its arguments, so two runs on the same devices give the same bits.
    If they do not, a device computes wrong results without an error ("silent data corruption").
    Call this function every few thousand steps, or after a rewind to distinguish a fault of the
    hardware from a fault of the data.

    | case | result |
    | --- | --- |
    | a device that gives the same wrong bits in both runs | not detected; run on other devices |
    | a fault before an all-reduce | all devices that receive the sum are listed |
    | a GPU without `XLA_FLAGS=--xla_gpu_deterministic_ops=true` | atomic additions may differ |
    | donated arguments | `args` stay valid, because each run receives a copy |
    | outputs that are not arrays of JAX | not compared |
    | several processes | each process compares its own devices |

    Args:
        step: A function of arrays, such as a jitted training step.
        args: Arguments of the step: pytrees of arrays and other objects.
        kwargs: Keyword arguments of the step.

    Returns:
        Dictionary from the path of each output leaf that differs to the ids of the devices on which
        it differs; empty if all bits are equal.

    Raises:
        TypeError: If `step` is not callable.

    Examples:
        >>> import jax, jax.numpy as jnp, gradclip_jax as gcx
        >>> gcx.diagnostics.verify_step(jax.jit(lambda w: {"w": 0.9 * w}), jnp.ones(3))
        {}

    References:
        Dixit et al. 2021, Silent Data Corruptions at Scale, arXiv 2102.11245.
    """
    _checks.check_callable("step", step, "Pass the training step, then its arguments.")
    first, second = (_digests(step(*_copy(args), **_copy(kwargs))) for _ in range(2))
    differing: dict[str, list[int]] = {}
    for (path, device), digest in first.items():
        if second[path, device] != digest:
            differing.setdefault(path, []).append(device)
    return differing


def _copy(tree: _types.Tree) -> _types.Tree:
    return jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, tree)


def _digests(tree: _types.Tree) -> dict[tuple[str, int], bytes]:
    """Return a hash for each leaf and device, so that values need not stay in memory."""
    digests: dict[tuple[str, int], bytes] = {}
    arrays = [(path, x) for path, x in jax.tree.leaves_with_path(tree) if isinstance(x, jax.Array)]
    for path, x in arrays:
        bits = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for shard in bits.addressable_shards:
            data = np.asarray(shard.data).tobytes()
            digests[jax.tree_util.keystr(path), shard.device.id] = hashlib.sha256(data).digest()
    return digests
