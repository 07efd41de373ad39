"""A record of the norms of the last steps, kept in the optimizer state."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax

from .._checks import (
    check_axis_name,
    check_ord,
    check_state,
    check_static,
    check_window,
    error_message,
    refuse_traced,
)
from .._states import find_states, increment_where, register_metrics
from .._tree_checks import check_inexact
from .._types import TWO, Array, AxisName, Count, Order, Scalar, Tree
from ..clipping._norm import measured_leaves, norm_of_leaves, unit_norms
from ..clipping._units import leaf_units


@register_metrics("nonfinite_norms")
class NormRecordState(NamedTuple):
    """A ring buffer of norms.

    Attributes:
        norms: float32[window], or float32[window, leaves].
        step_count: int32[], steps in the buffer, at most `window`.
        position: int32[], where the next step goes.
        nonfinite_norms: int32[], steps left out because a norm was not finite, saturating.
    """

    norms: Array
    step_count: Scalar
    position: Scalar
    nonfinite_norms: Scalar


def record_norms(
    window: Count = 1024,
    *,
    per_leaf: bool = False,
    ord: Order = TWO,
    axis_name: AxisName = None,
) -> optax.GradientTransformation:
    """Records the norms of the last `window` updates; the updates pass unchanged.

    Put it before a clip to record norms before clipping. A step whose norm is NaN or infinite is
    counted but not recorded. Read the norms with `norm_history`, and pass them to
    `suggest_max_norm`.

    Args:
        window: how many steps are kept, 1 to 2^20, static.
        per_leaf: record the norm of each leaf instead of the global norm; static.
        ord: order of the norm, 1, 2, inf or any number > 0, static.
        axis_name: mapped axes over which the leaves are sharded, where types do not tell.

    Returns:
        An Optax transformation with a `NormRecordState`: 4 * window bytes, for each leaf if
        `per_leaf`.

    Raises:
        ValueError: `window` is out of range.
        TypeError: a static argument is traced; when traced, a leaf is not inexact.

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
    check_window(name, "window", window)
    check_static(name, "per_leaf", per_leaf)
    order, axes = check_ord(name, ord), check_axis_name(name, axis_name)

    def measure(tree: Tree) -> Array:
        leaves = measured_leaves(tree)
        if per_leaf:
            return unit_norms(leaves, leaf_units(leaves), order, axes)
        return norm_of_leaves(leaves, order, axes)

    def init(params: Tree) -> NormRecordState:
        shape = (len(measured_leaves(params)),) if per_leaf else ()
        # A buffer for each count: one buffer cannot be donated twice.
        counts = (jnp.zeros((), jnp.int32) for _ in range(3))
        return NormRecordState(jnp.zeros((int(window), *shape), jnp.float32), *counts)

    def update(
        updates: Tree, state: Any, params: Tree | None = None
    ) -> tuple[Tree, NormRecordState]:
        check_inexact(name, "updates", updates)
        check_state(name, state, NormRecordState)
        norms = measure(updates).astype(jnp.float32)
        finite = jnp.all(jnp.isfinite(norms))
        row = jnp.where(finite, norms, state.norms[state.position])
        return updates, NormRecordState(
            norms=state.norms.at[state.position].set(row),
            step_count=jnp.minimum(state.step_count + finite.astype(jnp.int32), window),
            position=(state.position + finite.astype(jnp.int32)) % window,
            nonfinite_norms=increment_where(state.nonfinite_norms, ~finite),
        )

    return optax.GradientTransformation(init, update)


def norm_history(state: Any) -> np.ndarray[Any, Any]:
    """The recorded norms, the oldest first.

    Args:
        state: the state of `record_norms`, or any state that contains it. If it contains
            several, the first is read.

    Returns:
        A NumPy array, float32[steps] or float32[steps, leaves] with the leaves in the order of
        `jax.tree.leaves(params)`; at most `window` steps.

    Raises:
        TypeError: the state contains no record, or it is traced: call this outside jit.

    Examples:
        >>> import jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = optax.chain(gcx.record_norms(), gcx.clip_by_global_norm(1.0))
        >>> _, state = tx.update(jnp.array([3.0, 4.0]), tx.init(jnp.zeros(2)))
        >>> gcx.norm_history(state).tolist()  # before the clip
        [5.0]
    """
    name = "norm_history"
    found = find_states(state, NormRecordState)
    if not found:
        hint = "Put `record_norms()` into the chain."
        rule = "a state with a record of norms"
        raise TypeError(error_message(name, "state", rule, type(state).__name__, hint))
    _, record = found[0]
    refuse_traced(name, "state", record.norms)
    norms, count = np.asarray(record.norms), int(record.step_count)
    return norms[:count] if count < len(norms) else np.roll(norms, -int(record.position), axis=0)
