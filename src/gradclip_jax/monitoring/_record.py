"""Keeps the norms of the last steps in the state, and hands them back in time order."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax

from .._checks import (
    check_axis_name,
    check_count,
    check_inexact,
    check_ord,
    check_state,
    error_message,
)
from .._states import find_states, increment_where
from .._types import TWO, Array, AxisName, Order, Scalar, Tree
from ..clipping._layout import leaf_slots
from ..clipping._norm import measured_leaves, norm_of_leaves, unit_norms
from ._measure import refuse_traced


class NormRecordState(NamedTuple):
    """A ring of norms.

    Attributes:
        norms: float32[window], or float32[window, leaves].
        recorded: int32[], how many of its places are filled.
        next_place: int32[], the one that is written next.
        nonfinite_norms: int32[], steps that were left out because a norm was not finite.
    """

    norms: Array
    recorded: Scalar
    next_place: Scalar
    nonfinite_norms: Scalar


def record_norms(
    window: int = 1024,
    *,
    per_leaf: bool = False,
    ord: Order = TWO,
    axis_name: AxisName = None,
) -> optax.GradientTransformation:
    """Records the norms of the last `window` updates; the updates pass unchanged.

    Put it before a clip to see what the clip sees. A step with a norm that is not finite is
    increment_where, not recorded. Read with `norm_history`, then ask `suggest_max_norm`.

    Args:
        window: how many steps to keep, an integer >= 1.
        per_leaf: the norm of each leaf instead of the global one.
        ord: order of the norm, 1, 2, inf or any number > 0.
        axis_name: as for `clip_by_global_norm`.

    Returns:
        An Optax transformation with a `NormRecordState` of 4 * window bytes, times leaves.

    Raises:
        ValueError: `window` is < 1.
        TypeError: when traced, a leaf is not inexact.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> record = gcx.record_norms(window=2)
        >>> state = record.init(jnp.zeros(2))
        >>> for scale in (1.0, 2.0, 3.0):
        ...     _, state = record.update(scale * jnp.array([3.0, 4.0]), state)
        >>> gcx.norm_history(state).tolist()
        [10.0, 15.0]
    """
    name = "record_norms"
    check_count(name, "window", window, "Pass the number of steps to keep.")
    order, axes = check_ord(name, ord), check_axis_name(name, axis_name)

    def measure(tree: Tree) -> Array:
        leaves = measured_leaves(tree)
        if per_leaf:
            return unit_norms(leaves, leaf_slots(leaves), order, axes)
        return norm_of_leaves(leaves, order, axes)

    def init(params: Tree) -> NormRecordState:
        shape = (len(measured_leaves(params)),) if per_leaf else ()
        counts = (jnp.zeros((), jnp.int32) for _ in range(3))  # no shared buffer: donation
        return NormRecordState(jnp.zeros((int(window), *shape), jnp.float32), *counts)

    def update(
        updates: Tree, state: Any, params: Tree | None = None
    ) -> tuple[Tree, NormRecordState]:
        check_inexact(name, "updates", updates)
        check_state(name, state, NormRecordState)
        norms = measure(updates).astype(jnp.float32)
        finite = jnp.all(jnp.isfinite(norms))
        place = state.next_place
        row = jnp.where(finite, norms, state.norms[place])
        return updates, NormRecordState(
            norms=state.norms.at[place].set(row),
            recorded=jnp.minimum(state.recorded + finite.astype(jnp.int32), window),
            next_place=(place + finite.astype(jnp.int32)) % window,
            nonfinite_norms=increment_where(state.nonfinite_norms, ~finite),
        )

    return optax.GradientTransformation(init, update)


def norm_history(state: Any) -> np.ndarray[Any, Any]:
    """Hands back the recorded norms, the oldest first.

    Args:
        state: the state of `record_norms`, or any state around it.

    Returns:
        A NumPy array, float32[steps] or float32[steps, leaves] with the leaves in the order of
        `jax.tree.leaves(params)`; at most `window` steps.

    Raises:
        TypeError: the state holds no record, or is traced: call it outside jit.

    Examples:
        >>> import jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = optax.chain(gcx.record_norms(), gcx.clip_by_global_norm(1.0))
        >>> _, state = tx.update(jnp.array([3.0, 4.0]), tx.init(jnp.zeros(2)))
        >>> gcx.norm_history(state).tolist()  # before the clip
        [5.0]
    """
    found = find_states(state, NormRecordState)
    if not found:
        hint = "Put `record_norms()` into the chain."
        rule = "a state with a record of norms"
        raise TypeError(error_message("norm_history", "state", rule, type(state).__name__, hint))
    record = found[0][1]
    refuse_traced("norm_history", "state", record.norms)
    norms, recorded = np.asarray(record.norms), int(record.recorded)
    if recorded < len(norms):
        return norms[:recorded]
    return np.roll(norms, -int(record.next_place), axis=0)
