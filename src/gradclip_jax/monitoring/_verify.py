"""Silent data corruption: run a training step twice and compare every bit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from .._checks import check_callable
from .._errors import public
from .._types import Tree


@public
def verify_step(step: Callable[..., Tree], *args: Any, **kwargs: Any) -> dict[str, list[int]]:
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
    check_callable("step", step, "Pass the training step, then its arguments.")
    first, second = (_digests(step, args, kwargs) for _ in range(2))
    differing: dict[str, list[int]] = {}
    for path, device in first | second:
        if first.get((path, device)) != second.get((path, device)):
            differing.setdefault(path, []).append(device)
    return differing


def _digests(step: Callable[..., Tree], args: Any, kwargs: Any) -> dict[tuple[str, int], bytes]:
    """Run the step on copies; return a hash for each output leaf and device."""
    args, kwargs = jax.tree.map(
        lambda x: x.copy() if isinstance(x, jax.Array) else x, (args, kwargs)
    )
    digests: dict[tuple[str, int], bytes] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(step(*args, **kwargs)):
        parts: dict[int, Any] = {-1: leaf}
        if isinstance(leaf, jax.Array):
            is_key = jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            bits = jax.random.key_data(leaf) if is_key else leaf
            parts = {shard.device.id: shard.data for shard in bits.addressable_shards}
        for device, part in parts.items():
            # A hash instead of the values: the outputs of the first run need not stay in memory.
            digest = hashlib.sha256(np.asarray(part).tobytes()).digest()
            digests[jax.tree_util.keystr(path), device] = digest
    return digests
