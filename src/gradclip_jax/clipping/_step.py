"""One clipping step: norm, threshold, factor, scaled tree; the path that every norm clip takes.

As pure functions here, as Optax transformations in `_transform.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._checks import (
    check_axis_name,
    check_choice,
    check_inexact,
    check_number,
    check_ord,
    check_state,
    error_message,
    is_traced,
)
from .._mesh import max_over, sum_over, varying_axes
from .._states import register_metrics
from .._types import Array, AxisName, Number, Scalar, Tree
from ._granularity import Granularity, Units
from ._norm import is_measured, measured_leaves, norm_dtype, norm_of_leaves
from ._rule import apply_rules, check_params, first_state
from ._scale import (
    Factor,
    clamp_leaf,
    clip_factor,
    fusion_barrier,
    replace_factor,
    scale_leaf,
)


@register_metrics("grad_norm", "clip_threshold", "clip_factor", "clip_fraction")
class ClipState(NamedTuple):
    """What a clip has to tell about its last step, and what its rules remember.

    The scalars are float32[]; with groups the first three are mappings from group to scalar.

    Attributes:
        grad_norm: the norm of all that was measured, before clipping.
        clip_threshold: the threshold; the smallest where there are several units.
        clip_factor: what the update was multiplied by; the smallest over units.
        clip_fraction: the fraction of units that were clipped, 0 to 1.
        rules: the states of the threshold rules.
    """

    grad_norm: Any
    clip_threshold: Any
    clip_factor: Any
    clip_fraction: Scalar
    rules: tuple[Any, ...]


def clip_by_units(
    function: str,
    granularity: Granularity,
    *,
    ord: float = 2.0,
    nonfinite: str = "propagate",
    reaction: Callable[[Array, Array], Factor] = clip_factor,
) -> optax.GradientTransformation:
    """Norm, threshold, factor, scaled tree: the one path that every norm clip takes."""
    check_choice(function, "nonfinite", nonfinite, ("propagate", "zero"))
    replacement = 0.0 if nonfinite == "zero" else jnp.nan

    def init(params: Tree) -> ClipState:
        units = granularity(params)
        nothing = [jnp.zeros(shape, jnp.float32) for shape in units.shapes]
        ones = [jnp.ones(shape, jnp.float32) for shape in units.shapes]
        state = _told(units, nothing, [one * jnp.inf for one in ones], ones, ord)
        return state._replace(rules=_remembered(_first_states(units)))

    def update(updates: Tree, state: Any, params: Tree | None = None) -> tuple[Tree, ClipState]:
        check_inexact(function, "updates", updates)
        units = granularity(updates)
        leaves = measured_leaves(updates)
        states = _rule_states(function, units, state)
        norms = units.norms(leaves)
        seen = units.seen(norms)
        params_seen = _param_norms(function, units, updates, params)
        thresholds, states = apply_rules(units.rules, seen, states, params_seen)
        factors = [reaction(n, t) for n, t in zip(seen, thresholds, strict=True)]
        bad = _is_bad(norms)
        factors = [replace_factor(factor, bad, replacement) for factor in factors]
        factors = [fusion_barrier(factor) for factor in factors]
        told = _told(units, norms, thresholds, [f.value for f in factors], ord)
        told = told._replace(clip_factor=_where(bad, replacement, told.clip_factor))
        scaled = scale_tree(updates, units.spread(factors), drops=nonfinite == "zero")
        return scaled, told._replace(rules=_remembered(states))

    return optax.GradientTransformation(init, update)


def _first_states(units: Units) -> tuple[Any, ...]:
    pairs = zip(units.rules, units.shapes, strict=True)
    return tuple(first_state(rule, shape) for rule, shape in pairs)


def _remembered(states: tuple[Any, ...]) -> tuple[Any, ...]:
    """What the state keeps: nothing of rules without a memory, however many there are."""
    return states if jax.tree.leaves(states) else ()


def _rule_states(function: str, units: Units, state: ClipState | None) -> tuple[Any, ...]:
    first = _first_states(units)
    if not _remembered(first):
        return first
    check_state(function, state, ClipState)
    assert state is not None
    return state.rules


def _param_norms(
    function: str, units: Units, updates: Tree, params: Tree | None
) -> list[Array] | None:
    if not any(rule.uses_params for rule in units.rules):
        return None
    check_params(function, updates, params)
    return units.seen(units.norms(measured_leaves(params)))


def _is_bad(norms: Sequence[Array]) -> Array:
    """Whether any norm is not finite, decided alike on all devices."""
    if not norms:
        return jnp.array(False)
    flags = jnp.stack([jnp.any(~jnp.isfinite(norm)) for norm in norms])
    return max_over(jnp.any(flags).astype(jnp.int32), _shared_axes(norms)) > 0


def _shared_axes(norms: Sequence[Array]) -> frozenset[str]:
    return frozenset[str]().union(*map(varying_axes, norms))


def _told(
    units: Units,
    norms: Sequence[Array],
    thresholds: Sequence[Array],
    factors: Sequence[Array],
    ord: float,
) -> ClipState:
    """The scalars of the state, alike on all devices; a NaN factor has no order here."""
    axes = _shared_axes(norms)
    clipped = sum((jnp.sum(~(x >= 1), dtype=jnp.float32) for x in factors), jnp.float32(0))
    count = jnp.float32(sum(x.size for x in factors))
    clipped, count = sum_over(jnp.stack([clipped, count]), axes)
    fraction = clipped / jnp.maximum(count, 1)
    if units.names:
        norm, threshold, factor = (
            {name: x.astype(jnp.float32) for name, x in zip(units.names, column, strict=True)}
            for column in (norms, thresholds, factors)
        )
        return ClipState(norm, threshold, factor, fraction, ())
    norm = norms[0] if len(norms) == 1 and norms[0].ndim == 0 else _pooled(norms, ord)
    threshold = -max_over(_largest([-x for x in thresholds]), axes)
    factor = -max_over(_largest([-x for x in factors]), axes)
    scalars = (x.astype(jnp.float32) for x in (norm, threshold, factor))
    return ClipState(*scalars, clip_fraction=fraction, rules=())


def _where(bad: Array, value: float, told: Any) -> Any:
    return jax.tree.map(lambda x: jnp.where(bad, value, x), told)


def _pooled(norms: Sequence[Array], ord: float) -> Array:
    """The norm of the whole from the norms of its parts."""
    return norm_of_leaves(list(norms), ord, None)


def _largest(arrays: Sequence[Array]) -> Array:
    tops = [jnp.max(x, initial=-jnp.inf) for x in arrays]
    return jnp.max(jnp.stack(tops)) if tops else jnp.float32(-jnp.inf)


def scale_tree(tree: Tree, factors: Sequence[Factor | None], *, drops: bool) -> Tree:
    """Each measured leaf times its factor; None leaves it alone."""
    remaining = iter(factors)

    def scale(x: Any) -> Any:
        factor = next(remaining) if is_measured(x) else None
        return x if factor is None else scale_leaf(x, factor, drops=drops)

    return jax.tree.map(scale, tree)


def clip_grad_norm(
    grads: Tree,
    max_norm: Number,
    *,
    ord: float = 2.0,
    norm: Number | None = None,
    axis_name: AxisName = None,
) -> tuple[Tree, Scalar]:
    """Scales a gradient tree so that its norm is at most `max_norm`, and tells the norm.

    The pure function behind `clip_by_global_norm`, with the same edge cases.

    Args:
        grads: floating or complex leaves of any shape.
        max_norm: the threshold in the unit of the gradients, > 0; may be traced.
        ord: order of the norm, 1, 2, inf or any number > 0.
        norm: the norm if it is already known; then it is not computed again.
        axis_name: as for `global_norm`.

    Returns:
        The clipped gradients, as they came in if the norm is within bounds, and the norm before
        clipping: float32[], or float64[] when a leaf is float64 or complex128.

    Raises:
        ValueError: `max_norm` or `ord` is not > 0.
        TypeError: a leaf is an integer or a boolean; the message names its path.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> clipped, norm = gcx.clip_grad_norm({"w": jnp.array([3.0, 4.0])}, 1.0)
        >>> float(norm), [round(x, 4) for x in clipped["w"].tolist()]
        (5.0, [0.6, 0.8])
    """
    name = "clip_grad_norm"
    check_number(name, "max_norm", max_norm, "Pass inf to only measure.")
    order, axes = check_ord(name, ord), check_axis_name(name, axis_name)
    check_inexact(name, "grads", grads)
    leaves = measured_leaves(grads)
    if norm is None:
        total = norm_of_leaves(leaves, order, axes)
    else:
        check_number(name, "norm", norm, "Pass the norm of `grads`.", closed=True, or_nan=True)
        total = jnp.asarray(norm).astype(norm_dtype(leaves))
    factor = fusion_barrier(clip_factor(total, jnp.asarray(max_norm).astype(total.dtype)))
    return scale_tree(grads, [factor] * len(leaves), drops=False), total


def clip_grad_value(grads: Tree, max_value: Number) -> Tree:
    """Clamps every element of a gradient tree to `[-max_value, max_value]`.

    Args:
        grads: floating leaves of any shape.
        max_value: the bound in the unit of the gradients, > 0; may be traced.

    Returns:
        The clamped gradients.

    Raises:
        ValueError: `max_value` is not > 0.
        TypeError: a leaf is an integer, a boolean or complex; the message names its path.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> gcx.clip_grad_value(jnp.array([-3.0, 0.5]), 1.0).tolist()
        [-1.0, 0.5]
    """
    low, high = value_bounds("clip_grad_value", max_value, None, "max_value")
    return clamp_tree("clip_grad_value", "grads", grads, low, high)


def value_bounds(
    function: str, max_value: Any, min_value: Any, argument: str = "max_delta"
) -> tuple[Any, Any]:
    """Lower and upper bound of a clamp, checked."""
    check_number(function, argument, max_value, "Pass inf to turn clipping off.")
    if min_value is None:
        # Nothing is computed of a plain number: built inside a jit, it would be a tracer.
        high = jnp.maximum(max_value, 0) if is_traced(max_value) else max_value
        return -high, high
    hint = "Leave it out for `-max_delta`."
    check_number(function, "min_delta", min_value, hint, low=-np.inf, closed=True)
    if not (is_traced(min_value) or is_traced(max_value) or min_value < max_value):
        raise ValueError(error_message(function, "min_delta", "< max_delta", repr(min_value), hint))
    return min_value, max_value


def clamp_tree(function: str, argument: str, tree: Tree, low: Any, high: Any) -> Tree:
    """Every element within the bounds."""
    check_inexact(function, argument, tree, real=True)
    return jax.tree.map(lambda x: clamp_leaf(x, low, high), tree)
