"""Record recent norms in a ring buffer in the optimizer state."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax

from .._checks import (
    check_axis_name,
    check_length,
    check_ord,
    check_percentile,
    check_state,
    check_static,
    refuse_traced,
    shortened,
)
from .._errors import public, type_error, value_error
from .._leaves import checked_leaves, measured_leaves
from .._mesh import check_bound
from .._states import find_states, increment_where, plain_arrays, register_state
from .._types import Array, AxisName, Count, HostArray, Order, Scalar, Tree
from ..clipping._norm import leaf_units, tree_units, unit_norms
from ..gates._extra_args import has_micro_batch
from ._unit_names import leaf_names


@register_state("nonfinite_norms")
class NormRecordState(NamedTuple):
    """A ring buffer of norms.

    Attributes:
        norms: Recorded norms, float32[window] or float32[window, leaves].
        step_count: int32[], number of steps in the buffer, at most `window`.
        position: int32[], index at which the next step is written.
        nonfinite_norms: int32[], number of steps with a non-finite norm; saturates.
    """

    norms: Array
    step_count: Scalar
    position: Scalar
    nonfinite_norms: Scalar


@public
def record_norms(
    window: Count = 1024,
    *,
    per_leaf: bool = False,
    ord: Order = 2.0,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    """Record the norms of the last `window` updates, and return the updates unchanged.

    Place this transformation before clipping to record unclipped norms. Non-finite norms are
    recorded and counted. The zero gradient that `flush` passes is not recorded. Read the norms with
    `norm_history` or `leaf_norm_history`. `suggest_max_norm` computes a threshold from the norms.

    Args:
        window: Number of steps to keep, a static integer from 1 to 2^20.
        per_leaf: Whether to record the norm of each leaf instead of the global norm; static.
        ord: Order of the norm: 1, 2 or inf.
        axis_name: Mapped axes over which every leaf is sharded. Required if array types do not
            carry the sharding.

    Returns:
        An Optax transformation with a `NormRecordState` of 4 * window bytes, or as many for each
        leaf with `per_leaf`.

    Raises:
        ValueError: If `window` is out of range.
        TypeError: If a static argument is traced, or if a leaf of the updates has an integer dtype.


    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> record = gcx.record_norms(window=2)
        >>> state = record.init(jnp.zeros(2))
        >>> for scale in (1.0, 2.0, 3.0):
        ...     _, state = record.update(scale * jnp.array([3.0, 4.0]), state)
        >>> gcx.diagnostics.norm_history(state).tolist()
        [10.0, 15.0]
    """
    check_length("window", window)
    check_static("per_leaf", per_leaf)
    order, axes = check_ord(ord), check_axis_name(axis_name)

    units_of = leaf_units if per_leaf else tree_units

    def init(params: Tree) -> NormRecordState:
        shape = (len(measured_leaves(params)),) if per_leaf else ()
        # Allocate each counter separately, because a buffer cannot be donated twice.
        counts = (jnp.zeros((), jnp.int32) for _ in range(3))
        return NormRecordState(jnp.zeros((int(window), *shape), jnp.float32), *counts)

    def update(
        updates: Tree, state: Tree, params: Tree | None = None, **extra_args: Any
    ) -> tuple[Tree, NormRecordState]:
        leaves = checked_leaves("updates", updates).arrays
        check_bound(axes)
        check_state(state, NormRecordState)
        shape = (int(window), len(leaves)) if per_leaf else (int(window),)
        if state.norms.shape != shape:
            rule, hint = f"a record of shape {list(shape)}", "Call `init(params)` again."
            raise value_error("state", rule, f"shape {list(state.norms.shape)}", hint)
        norms = jnp.asarray(unit_norms(leaves, units_of(leaves), order, axes), jnp.float32)
        after = NormRecordState(
            norms=state.norms.at[state.position].set(norms if per_leaf else norms[0]),
            step_count=jnp.minimum(state.step_count + 1, window),
            position=jnp.where(state.position < window - 1, state.position + 1, 0),
            nonfinite_norms=increment_where(state.nonfinite_norms, ~jnp.all(jnp.isfinite(norms))),
        )
        is_recorded = has_micro_batch(extra_args)
        return updates, optax.tree.where(is_recorded, after, state)

    return optax.GradientTransformationExtraArgs(init, update)


@public
def norm_history(state: Tree) -> HostArray:
    """Return the recorded norms, ordered from oldest to newest.

    Args:
        state: State of `record_norms`, or any pytree that contains it. The first record is
            returned.

    Returns:
        NumPy array, float32[steps], or float32[steps, leaves] with the leaves in the order of
        `jax.tree.leaves(params)`, with at most `window` steps. If the state was vmapped over seeds,
        the array has a leading axis of seeds.

    Raises:
        TypeError: If called inside jit, or if `state` contains no state of `record_norms`.
        ValueError: If vmapped seeds have recorded different numbers of steps.


    Examples:
        >>> import jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = optax.chain(gcx.record_norms(), gcx.clip_by_global_norm(1.0))
        >>> _, state = tx.update(jnp.array([3.0, 4.0]), tx.init(jnp.zeros(2)))
        >>> gcx.diagnostics.norm_history(state).tolist()  # before the clip
        [5.0]
    """
    records = find_states(state, NormRecordState)
    if not records:
        hint = "Add `record_norms()` to the optimizer, and pass the state of the optimizer."
        rule = "a state with a record of norms"
        raise type_error("state", rule, type(state).__name__, hint)
    record = plain_arrays(records[0][1])
    refuse_traced("state", record.norms)
    norms, counts, positions = map(np.asarray, record[:3])
    axis, count = counts.ndim, int(counts.flat[0])
    if np.any(counts != count):  # a guard or an accumulation around the record held some seeds
        hint = "Pass the state of one seed, `jax.tree.map(lambda x: x[0], state)`."
        got = f"numbers of steps from {counts.min()} to {counts.max()}"
        raise value_error("state", "a state whose seeds have recorded as many steps", got, hint)
    window = norms.shape[axis]
    order = np.arange(count) + (positions[..., None] if count == window else 0)
    order = np.broadcast_to(order % window, (*counts.shape, count))
    order = order.reshape(*order.shape, *[1] * (norms.ndim - order.ndim))
    return np.take_along_axis(norms, order, axis)


@public
def leaf_norm_history(state: Tree, params: Tree) -> dict[str, HostArray]:
    """Return the recorded norms of each leaf, ordered from oldest to newest.

    Args:
        state: State of `record_norms(per_leaf=True)`, or any pytree that contains it.
        params: Parameters, or any pytree with the same structure.

    Returns:
        Dictionary from paths, such as `decoder/mlp/wi`, to float32[steps].

    Raises:
        TypeError: If called inside jit, or if `state` contains no state of `record_norms`.
        ValueError: If the recorded norms do not match the leaves of `params`.


    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> record = gcx.record_norms(per_leaf=True)
        >>> grads = {"wi": jnp.array([3.0, 4.0]), "wo": jnp.array([jnp.nan])}
        >>> _, state = record.update(grads, record.init(grads))
        >>> {
        ...     name: norms.tolist()
        ...     for name, norms in gcx.diagnostics.leaf_norm_history(state, grads).items()
        ... }
        {'wi': [5.0], 'wo': [nan]}
    """
    norms, names = norm_history(state), leaf_names(params)
    if norms.ndim < 2 or norms.shape[-1] != len(names):
        rule = f"a record of the norms of {len(names)} leaves"
        got, hint = f"a record of shape {list(norms.shape)}", "Record with `per_leaf=True`."
        raise value_error("state", rule, got, hint)
    return {name: norms[..., i] for i, name in enumerate(names)}


@public
def suggest_max_norm(norms: Any, percentile: float = 50.0) -> float:
    """Suggest a `max_norm` as a percentile of recorded norms.

    The default is the median, which performed best among five percentiles in docs/study.md. A
    threshold at the median clips half of the steps, so consider a larger learning rate. The 90th
    percentile clips only outliers.

    Args:
        norms: Array of norms of any shape, such as `norm_history(state)` for one or several seeds.
            Non-finite norms are ignored.
        percentile: Percentage of steps that should not be clipped, from 0 to 100.

    Returns:
        The percentile of the finite norms.

    Raises:
        ValueError: If no norm is finite, or if `percentile` is outside [0, 100].
        TypeError: If called inside jit, or if `norms` are not real numbers.


    Examples:
        >>> import gradclip_jax as gcx
        >>> gcx.diagnostics.suggest_max_norm([1.0, 2.0, 3.0, float("nan")], percentile=100.0)
        3.0
    """
    refuse_traced("norms", norms)
    check_percentile("percentile", percentile)
    try:
        values = np.asarray(norms, np.float64)
    except (TypeError, ValueError):
        rule, hint = "an array of real numbers", "Pass for example `norm_history(state)`."
        raise type_error("norms", rule, shortened(norms), hint) from None
    finite = values[np.isfinite(values)]
    if not finite.size:
        hint = "Record steps with finite gradients first."
        got = f"{values.size} non-finite norms" if values.size else "an empty array"
        raise value_error("norms", "an array with at least one finite norm", got, hint)
    return float(np.percentile(finite, percentile))
