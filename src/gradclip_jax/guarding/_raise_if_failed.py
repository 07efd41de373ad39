"""Stop training if a guard has failed."""

from __future__ import annotations

from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import check_concrete, check_optimizer_state, leaf_path, listed
from .._errors import public
from .._metrics import metrics
from .._states import find_states, plain_arrays
from .._types import Tree
from ..norms._leaves import is_inexact
from ..wrappers._state import GuardState, WrapperState
from ._loss_scale import LossScaleState
from ._skip_spikes import SpikeState

_NAMES: Final[dict[type, str]] = {
    LossScaleState: "dynamic_loss_scale",
    SpikeState: "skip_spikes",
}
"""A mapping from the types of guards' states to their public functions."""


def _name_of(guard: GuardState) -> str:
    """Return the name of the public function of a guard."""
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
        for guard in node.outer + node.guards
        for cause, count in guard.skipped.items()
    ]
    bad = [
        leaf_path("state", path)
        for path, x in jax.tree.leaves_with_path(plain_arrays(state))
        if is_inexact(x) and np.ndim(x) and not np.all(jnp.isfinite(x))
    ]
    message = f"raise_if_failed: {found['consecutive_skips']} consecutive skips"
    message += f" ({', '.join(counts)}). "
    message += f"Non-finite leaves: {listed(bad)}. " if bad else "The state is finite. "
    raise RuntimeError(message + "Restore a checkpoint, and lower the learning rate.")
