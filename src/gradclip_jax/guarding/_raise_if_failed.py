"""Stop training if a guard has failed, and find the leaves that are not finite."""

from __future__ import annotations

from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import check_concrete, dtype_of
from .._errors import public
from .._format import listed
from .._metrics import metrics
from .._states import check_optimizer_state, find_states, plain_arrays
from .._types import Array, HostArray, Tree
from .._weighted_sum import WeightedSum
from ..wrappers._state import GuardState, WrapperState
from ._loss_scale import LossScaleState
from ._skip_spikes import SpikeState

_NAMES: Final[dict[type, str]] = {
    LossScaleState: "dynamic_loss_scale",
    SpikeState: "skip_spikes",
}
"""A mapping from the types of guards' states to their public functions."""


def _name_of(guard: GuardState) -> str:
    """Return the name of the public function that created a guard."""
    default = "skip_if" if "other" in guard.skipped else "skip_nonfinite"
    return _NAMES.get(type(guard.rule_state), default)


@public
def raise_if_failed(state: Tree) -> None:
    """Raise an error if a guard has reached its limit of consecutive skips.

    Guards never raise errors, because they run inside jit. Call this function on the host, for
    example every 100 steps or before a checkpoint is saved. It waits for the device.

    Args:
        state: Optimizer state, or a pytree that contains optimizer states.

    Raises:
        TypeError: If called inside jit.
        RuntimeError: If `guard_failed` is set. The message contains the guards, their numbers of
            skipped steps, and the paths of non-finite leaves in the state.

    Examples:
        >>> import jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = gcx.skip_nonfinite(optax.sgd(0.1), max_consecutive_skips=1)
        >>> params = jnp.ones(1)
        >>> _, state = tx.update(jnp.array([jnp.nan]), tx.init(params), params)
        >>> gcx.raise_if_failed(state)
        Traceback (most recent call last):
        ...
        RuntimeError: raise_if_failed: 1 consecutive skips (skip_nonfinite: 1 nonfinite). ...
    """
    check_optimizer_state(state)
    hint = "Return the state from `jit`; inside `jit`, use `metrics(state)['guard_failed']`."
    check_concrete("state", state, hint)
    found = jax.device_get(metrics(state))
    if not np.any(found.get("guard_failed", 0)):
        return
    counts = [
        f"{_name_of(guard)}: {count} {cause}"
        for _, node in find_states(plain_arrays(state), WrapperState)
        for guard in node.outer_guards + node.inner_guards
        for cause, count in guard.skipped.items()
    ]
    arrays = jax.tree.map(_in_use, plain_arrays(state), is_leaf=_is_sum)
    bad = [f"state{path}" for path in nonfinite_leaves(arrays)]
    skips = f"{found['consecutive_skips']} consecutive skips"
    if not np.any(found["consecutive_skips"]):
        skips = "a guard failed in an earlier step, after which steps were applied"
    message = f"raise_if_failed: {skips} ({', '.join(counts)}). "
    message += f"Non-finite leaves: {listed(bad)}. " if bad else "The state is finite. "
    raise RuntimeError(message + "Restore a checkpoint, and lower the learning rate.")


def _is_sum(node: object) -> bool:
    """Return whether a node of a state is a sum over the micro-batches of a window."""
    return isinstance(node, WeightedSum)


def _in_use(node: Tree) -> Tree:
    """Return None for scalars, which may be infinite, and for the sum of an empty window."""
    if _is_sum(node):
        return node if np.any(jax.device_get(node.weight)) else None
    return node if np.ndim(node) else None


@public
def nonfinite_leaves(tree: Tree) -> dict[str, int]:
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
    check_concrete("tree", tree, hint)
    leaves = jax.tree.leaves_with_path(tree)
    leaves = [x for x in leaves if jnp.issubdtype(dtype_of(x[1]), jnp.inexact)]
    # A transfer guard allows explicit transfers. One number is transferred for each leaf.
    counts = jax.device_get({jax.tree_util.keystr(path): _count_nonfinite(x) for path, x in leaves})
    return {path: int(count) for path, count in counts.items() if count}


def _count_nonfinite(x: Array | HostArray | float) -> Array | int:
    """Count the non-finite elements of an array, on its device or on the host."""
    return _count_on_device(x) if isinstance(x, jax.Array) else np.sum(~np.isfinite(x))


@jax.jit
def _count_on_device(x: Array) -> Array:
    """Count the non-finite elements of a JAX array."""
    return jnp.sum(~jnp.isfinite(x))
