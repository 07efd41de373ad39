"""Clipping by norm: norm, threshold, factor, scaled tree. The one path of every norm clip."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import lax

from .._checks import (
    check_axis_name,
    check_bound,
    check_callable,
    check_choice,
    check_number,
    check_ord,
    check_state,
)
from .._devices import joined, shared
from .._errors import public, type_error, value_error
from .._mesh import max_over, replica_count, shard_axes, sum_over, varying_axes
from .._states import register_metrics
from .._tree_checks import check_inexact
from .._types import UNBOUNDED, Array, AxisName, Number, Order, Scalar, Threshold, Tree
from ._formula import norm_dtype, norm_of_squares, scale_factor, scale_leaf, squares, zero_factor
from ._granularity import (
    Granularity,
    Norms,
    Units,
    alike,
    as_granularity,
    is_measured,
    map_norms,
    measured_shapes,
    norm_shapes,
    root_mean_squares,
    select_groups,
    stack,
    tree_units,
)
from ._norm import measured_leaves, norm_of_leaves, norms_of_two, unit_norms
from ._threshold import (
    Assignment,
    apply_rules,
    as_rules,
    assign_rules,
    check_params,
    group_name,
    init_states,
)

Reaction: TypeAlias = Literal["scale", "zero"] | Callable[[Array, Array], Any]
"""What happens to a unit: a name, or `(norm, threshold) -> factor`, elementwise, in [0, 1]."""


@register_metrics("grad_norm", "clip_threshold", "clip_factor", "clip_fraction")
class ClipState(NamedTuple):
    """What a clip reports of its last step, and what its threshold rules remember.

    The scalars are float32[]; with groups the first three are mappings from group to scalar.

    Attributes:
        grad_norm: the norm of all that was measured, before clipping.
        clip_threshold: the threshold; the smallest where there are several units. The largest
            float32 before the first step.
        clip_factor: what the update was multiplied by; the smallest over units.
        clip_fraction: the fraction of units that were clipped, 0 to 1.
        rules: the states of the threshold rules.
        incidents: an `IncidentLog`, or None.
    """

    grad_norm: Any
    clip_threshold: Any
    clip_factor: Any
    clip_fraction: Scalar
    rules: tuple[Any, ...]
    incidents: Any = None


@public
def clip_grad_norm(
    grads: Tree,
    max_norm: Number,
    *,
    ord: Order = 2.0,
    norm: Number | None = None,
    axis_name: AxisName = None,
) -> tuple[Tree, Scalar]:
    """Scales a gradient tree so that its norm is at most `max_norm`, and returns the norm.

    The pure function behind `clip_by_global_norm`, with the same edge cases.

    Args:
        grads: floating or complex leaves of any shape.
        max_norm: the threshold in the unit of the gradients, > 0; may be traced.
        ord: order of the norm, 1, 2, inf or any number > 0.
        norm: the norm if it is already known; then it is not computed again.
        axis_name: mapped axes over which every leaf is a shard, where types cannot tell (inside
            `pmap`, or `shard_map` with `check_vma=False`).

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
    check_number("max_norm", max_norm, "Pass inf to only measure.")
    order, axes = check_ord(ord), check_axis_name(axis_name)
    check_inexact("grads", grads)
    check_bound(axes)
    leaves = measured_leaves(grads)
    if norm is None:
        norm = norm_of_leaves(leaves, order, axes)
    else:
        check_number("norm", norm, "Pass the norm of `grads`.", closed=True, or_nan=True)
        norm = jnp.asarray(norm).astype(norm_dtype(leaves))
    factor = scale_factor(norm, jnp.asarray(max_norm).astype(norm.dtype))
    factor = jnp.where(jnp.isfinite(norm), factor, jnp.nan)
    return with_leaves(grads, scale_leaves(leaves, tree_units(leaves), [factor])), norm


def norm_clip(
    argument: str,
    threshold: Threshold,
    granularity: Literal["global", "leaf"] | Granularity = "global",
    *,
    reaction: Reaction = "scale",
    ord: Order = 2.0,
    axis_name: AxisName = None,
    nonfinite: str = "propagate",
    incidents: Any = None,
) -> optax.GradientTransformation:
    """`clip_by_norm`; `argument` is the name of the threshold in error messages."""
    check_choice("nonfinite", nonfinite, ("propagate", "zero"))
    cut, factor_of = as_granularity(granularity), _as_factor(reaction)
    order, axes = check_ord(ord), check_axis_name(axis_name)
    by_label = cut.is_group and isinstance(threshold, Mapping)
    rules = as_rules(argument, threshold, by_label=by_label)
    clip_leaves = jax.jit(
        functools.partial(
            _clip_leaves, factor_of=factor_of, ord=order, axis_name=axes, drops=nonfinite == "zero"
        ),
        static_argnums=(0, 1),
    )

    def units_of(tree: Tree) -> Units:
        units = cut.cut(tree)
        return select_groups(argument, units, tuple(rules)) if by_label else units

    def init(params: Tree) -> ClipState:
        # The labels of a mapping are known before a tree is.
        units = Units((), (), len(rules), tuple(rules)) if by_label else units_of(params)
        shapes = norm_shapes(units, [] if by_label else measured_shapes(params))
        states = init_states(assign_rules(argument, rules, units, params), shapes)
        return _first_state(units, states)

    def update(updates: Tree, state: Any, params: Tree | None = None) -> tuple[Tree, ClipState]:
        check_inexact("updates", updates)
        check_bound(axes)
        units, leaves = units_of(updates), measured_leaves(updates)
        assigned = assign_rules(argument, rules, units, updates)
        states = init_states(assigned, norm_shapes(units, leaves))
        if states:
            check_state(state, ClipState)
            if jax.tree.structure(states) != jax.tree.structure(state.rules):
                rule, hint = f"a `ClipState` of this `{argument}`", "Call `init(params)` first."
                raise type_error("state", rule, "that of another", hint)
            states = state.rules
        if states:
            _check_sharded_alike(argument, units, leaves)
        param_leaves = None
        if any(rule.uses_params for rule, _ in assigned):
            check_params(updates, params)
            param_leaves = leaves_beside(updates, params)
        clipped, state = clip_leaves(units, assigned, leaves, param_leaves, states)
        return with_leaves(updates, clipped), state

    return optax.GradientTransformation(init, update)


def _clip_leaves(
    units: Units,
    assigned: tuple[Assignment, ...],
    leaves: list[Array],
    params: list[Array] | None,
    states: Any,
    *,
    factor_of: Callable[[Array, Array], Array],
    ord: float,
    axis_name: AxisName,
    drops: bool,
) -> tuple[list[Array], ClipState]:
    """Norm, threshold, factor, scaled leaves; and the next state."""
    if params is None:
        norms, param_norms = unit_norms(leaves, units, ord, axis_name), None
    else:
        norms, param_norms = norms_of_two(leaves, params, units, ord, axis_name)
    measured, of_params = (
        root_mean_squares(x, units, leaves, axis_name) for x in (norms, param_norms)
    )
    thresholds, states = apply_rules(assigned, units, measured, states, of_params)
    factors = map_norms(factor_of, measured, thresholds)
    over = axis_name if units.is_local else None
    is_single = units.is_vector and units.size == 1
    if is_single:
        total, threshold, factor, fraction = norms[0], thresholds[0], factors[0], 0
    else:
        total, threshold, factor, fraction = _summary(norms, thresholds, factors, ord, over)
    is_good = jnp.isfinite(total)  # One bad norm decides for all leaves, and alike on all devices.

    def if_good(value: Array) -> Array:
        return jnp.where(is_good, value, 0 if drops else jnp.nan)

    # After the summary, of factors as they were: no reduction waits for the norm of the whole.
    factor = if_good(factor)
    if is_single:
        applied, fraction = [factor], factor != 1
    else:
        applied, fraction = list(map_norms(if_good, factors)), jnp.where(is_good, fraction, 1)
    clipped = scale_leaves(leaves, units, applied, drops=drops)
    report = (total, jnp.minimum(threshold, UNBOUNDED), factor)
    if units.names:
        names = [group_name(name) for name in units.names]
        report = (dict(zip(names, x, strict=True)) for x in (norms, thresholds, applied))
    report = jax.tree.map(lambda x: x.astype(jnp.float32), (*report, fraction))
    return clipped, ClipState(*report, rules=states)


def _first_state(units: Units, rule_states: Any) -> ClipState:
    def scalar(value: float) -> Scalar:
        return jnp.full((), value, jnp.float32)  # one that two fields share cannot be donated

    def by_name(value: float) -> Any:
        names = [group_name(name) for name in units.names]
        return {name: scalar(value) for name in names} if units.names else scalar(value)

    fields = by_name(0.0), by_name(UNBOUNDED), by_name(1.0), scalar(0.0)
    return ClipState(*fields, rule_states)


@functools.partial(jax.jit, static_argnames=("units", "drops"))
def scale_leaves(
    leaves: Sequence[Array], units: Units, factors: Norms, *, drops: bool = False
) -> list[Array]:
    """Each leaf times the factors of its units."""
    clipped = [i for i, axes in enumerate(units.axes) if axes is not None]
    factors = shared(factors)
    scaled = list(leaves)
    for i in clipped:
        scaled[i] = scale_leaf(leaves[i], factors[units.entry[i]], drops=drops)
    return scaled


def _as_factor(reaction: Any) -> Callable[[Array, Array], Array]:
    """A reaction by name, or a user's own: from norms that are finite to factors in [0, 1]."""
    named = {"scale": scale_factor, "zero": zero_factor}
    if isinstance(reaction, str):
        check_choice("reaction", reaction, tuple(named))
        return named[reaction]
    hint = 'Pass "scale", "zero" or a function (norm, threshold) -> factor.'
    check_callable("reaction", reaction, hint)

    def factor_of(norm: Array, threshold: Array) -> Array:
        factor = jnp.asarray(reaction(jnp.where(jnp.isfinite(norm), norm, 1), threshold))
        return jnp.clip(jnp.broadcast_to(factor.astype(norm.dtype), norm.shape), 0, 1)

    return factor_of


def _check_sharded_alike(argument: str, units: Units, leaves: list[Array]) -> None:
    """Refuses a vector of norms that stay on their devices, where leaves vary over other axes."""
    if units.is_local and len(set(map(varying_axes, leaves))) > 1:
        rule = "without a state where leaves are sharded along different mesh axes"
        hint = "Treat leaves that are sharded alike together, with `optax.partition`."
        got = "a rule that keeps a history"
        raise value_error(argument, rule, got, hint)


def _summary(
    norms: Norms, thresholds: Norms, factors: Norms, ord: float, axis_name: AxisName
) -> tuple[Scalar, Scalar, Scalar, Scalar]:
    """The norm of all, the smallest threshold and factor, and the fraction of factors not 1."""
    if not (isinstance(factors, list) and factors):
        norms, thresholds, factors = map(jnp.asarray, (norms, thresholds, factors))
        smallest = jnp.min(thresholds, initial=UNBOUNDED), jnp.min(factors, initial=1)
        fraction = jnp.sum(factors != 1) / max(factors.size, 1)
        return norm_of_leaves([norms], ord, axis_name), *smallest, fraction
    places = alike(norms)
    columns = [stack(x, places) for x in (norms, thresholds, factors)]
    shards = [shard_axes(factor, axis_name) for factor in columns[-1]]
    everywhere = frozenset[str]().union(*shards)
    reports: list[tuple[Array, ...]] = []
    size = 0

    def join(a: Any, b: Any) -> tuple[Array, ...]:
        return a[0] + b[0], a[1] + b[1], jnp.maximum(a[2], b[2]), jnp.maximum(a[3], b[3])

    for norm, threshold, factor, over in zip(*columns, shards, strict=True):
        # One reduction for all four, which has no derivative: nobody needs that of a report.
        is_clipped = (factor != 1).astype(factor.dtype)
        row = lax.stop_gradient((squares(norm, norm.dtype), is_clipped, -threshold, -factor))
        first = tuple(jnp.full_like(factor, x, shape=()) for x in (0.0, 0.0, -UNBOUNDED, -1.0))
        *sums, top, last = lax.reduce(row, first, join, tuple(range(factor.ndim)))
        copies = replica_count(over, everywhere)
        reports.append((*(x / copies for x in sums), top, last))
        size += factor.size * replica_count(frozenset(), over)
    *sums, tops, lasts = zip(*reports, strict=True)
    sums = jnp.stack([joined(x, is_sum=True) for x in sums])
    tops = jnp.stack([joined(x, is_sum=False) for x in (tops, lasts)])
    (square, count), (top, last) = sum_over(sums, everywhere), max_over(tops, everywhere)
    total = norm_of_squares(square) if ord == 2.0 else norm_of_leaves(norms, ord, axis_name)
    return total, -top, -last, count / max(size, 1)


def leaves_beside(tree: Tree, other: Tree) -> list[Array]:
    """The leaves of another tree at the places of the measured ones of the first."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    return [jnp.asarray(y) for x, y in pairs if is_measured(x)]


def with_leaves(tree: Tree, leaves: Sequence[Array]) -> Tree:
    """The tree with others in the place of its measured leaves."""
    in_order = iter(leaves)
    return jax.tree.map(lambda x: next(in_order) if is_measured(x) else x, tree)
