"""Implementation of all functions that clip by norm."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import lax

from .._checks import (
    check_axis_name,
    check_choice,
    check_number,
    check_ord,
    check_params,
    check_state,
    is_scalar,
    shortened,
)
from .._devices import fusion_barrier, groups_of_type, map_arrays, shared
from .._errors import public, type_error, value_error
from .._leaves import checked_leaves, measured_shapes
from .._mesh import check_bound, max_over, replica_count, shard_axes, sum_over, varying_axes
from .._states import register_state
from .._types import UNBOUNDED, Array, AxisName, Number, Order, Scalar, Tree
from ._formula import REACTIONS, apply_reaction, scale_factor, scale_leaf
from ._granularity import Granularity, as_granularity, norm_shapes, select_groups
from ._norm import Groups, Norms, Slices, Units, norm_dtype, norm_of_leaves, tree_units, unit_norms
from ._threshold import (
    Assignment,
    Threshold,
    apply_rules,
    apply_stateless,
    as_rules,
    assign_rules,
    group_name,
    init_state,
    init_states,
)

Reaction: TypeAlias = Literal["scale", "zero"] | Callable[[Array, Array], Array]
"""Reaction to a norm above its threshold, a name or a function `(norm, threshold) -> factor`."""


@register_state("grad_norm", "clip_threshold", "clip_factor", "clip_fraction")
class ClipState(NamedTuple):
    """Metrics of the last step, and the state of each threshold rule.

    The scalars are float32[]. When clipping by group, norm, threshold and factor are dictionaries
    of scalars.

    Attributes:
        grad_norm: Norm of all measured leaves before clipping.
        clip_threshold: Threshold (the smallest one if several norms are clipped); the largest
            float32 before the first step.
        clip_factor: Factor that multiplies the update (the smallest one if several norms are
            clipped).
        clip_fraction: Fraction of the norms that were clipped, between 0 and 1.
        rules: States of the threshold rules.
    """

    grad_norm: Scalar | dict[str, Scalar]
    clip_threshold: Scalar | dict[str, Scalar]
    clip_factor: Scalar | dict[str, Scalar]
    clip_fraction: Scalar
    rules: tuple[Tree, ...]


@public
def clip_grad_norm(
    grads: Tree,
    max_norm: Number,
    *,
    ord: Order | None = None,
    norm: Number | None = None,
    axis_name: AxisName = None,
) -> tuple[Tree, Scalar]:
    """Scale a gradient tree to a norm of at most `max_norm`, and return the original norm.

    The result is `g * min(1, max_norm / norm(g))`. This is the functional form of
    `clip_by_global_norm`, with the same edge cases.

    Args:
        grads: Pytree of floating-point or complex leaves.
        max_norm: Maximum norm in the units of `grads`; a positive number, which may be traced.
        ord: Order of the norm: 1, 2 or inf. None means 2.
        norm: Norm of `grads`, if it is already known, to avoid computing it again.
        axis_name: Mapped axes over which every leaf is sharded, required where the array's type
            does not carry the sharding (`pmap`, or `shard_map` with `check_vma=False`).

    Returns:
        The clipped gradients, unchanged if the norm is at most `max_norm`, and the norm before
        clipping, float32[], or float64[] if a leaf is float64 or complex128.

    Raises:
        ValueError: If `max_norm` is not positive, or if `ord` is not 1, 2 or inf.
        TypeError: If a leaf has an integer or boolean dtype; the message contains its path.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> clipped, norm = gcx.clip_grad_norm({"w": jnp.array([3.0, 4.0])}, 1.0)
        >>> float(norm), [round(x, 4) for x in clipped["w"].tolist()]
        (5.0, [0.6, 0.8])
    """
    check_number("max_norm", max_norm, "Pass inf to compute the norm without clipping.")
    order, axes = check_ord(ord), check_axis_name(axis_name)
    leaves = checked_leaves("grads", grads)
    check_bound(axes)
    units = tree_units(leaves.arrays)
    if norm is None:
        known = unit_norms(leaves.arrays, units, order, axes)[0]
    else:
        check_number("norm", norm, "Pass the norm of `grads`.", closed=True, or_nan=True)
        known = jnp.asarray(norm).astype(norm_dtype(leaves.arrays))
    factor = scale_factor(known, jnp.asarray(max_norm, known.dtype))
    factor = jnp.where(jnp.isfinite(known), factor, jnp.nan)
    return leaves.replace(scale_leaves(leaves.arrays, units, [factor])), known


def norm_clip(
    argument: str,
    threshold: Threshold | Mapping[Any, Threshold],
    granularity: Literal["global", "leaf"] | Granularity = "global",
    *,
    reaction: Reaction = "scale",
    ord: Order | None = None,
    axis_name: AxisName = None,
    nonfinite: str = "propagate",
) -> optax.GradientTransformation:
    """Implement `clip_by_norm`; `argument` is the name of the threshold in error messages."""
    check_choice("nonfinite", nonfinite, ("propagate", "zero"))
    granularity, factor_of = as_granularity(granularity), _as_factor(reaction)
    order, axes = check_ord(ord), check_axis_name(axis_name)
    by_label = granularity.is_group and isinstance(threshold, Mapping)
    rules = as_rules(argument, threshold, by_label=by_label)
    names = tuple(rules) if isinstance(rules, dict) else ()
    # Pass a number, instead of its rule, as an argument of the compiled function.
    number = threshold if is_scalar(threshold, jnp.floating, jnp.integer) else None
    if isinstance(number, int):  # an int above 2^31 is not an int32
        number = float(number)
    every_rule = list(rules.values()) if isinstance(rules, dict) else [rules]
    # `eval_shape`, because an array would start the backend when the transformation is created.
    has_state = bool(jax.tree.leaves(jax.eval_shape(lambda: list(map(init_state, every_rule)))))
    clip_leaves = jax.jit(
        functools.partial(
            _clip_leaves, factor_of=factor_of, ord=order, axis_name=axes, drop=nonfinite == "zero"
        ),
        static_argnums=(0, 1),
    )

    def cut_groups(leaves: Sequence[Array], tree: Tree) -> Units:
        units = granularity.cut(leaves, tree)
        assert isinstance(units, Groups)  # because of `is_group`
        return select_groups(argument, units, names)

    cut = cut_groups if by_label else granularity.cut

    def init(params: Tree) -> ClipState:
        # The keys of a mapping determine the groups, so no tree is needed.
        leaves = [] if by_label else measured_shapes(params)
        units = Groups((), len(names), names) if by_label else cut(leaves, params)
        shapes = norm_shapes(units, leaves)
        states = init_states(assign_rules(rules, units), shapes)
        return _init_state(units, states)

    def update(updates: Tree, state: Tree, params: Tree | None = None) -> tuple[Tree, ClipState]:
        leaves = checked_leaves("updates", updates)
        check_bound(axes)
        units = cut(leaves.arrays, updates)
        if number is not None:
            clipped, state = clip_leaves(units, (), leaves.arrays, None, (), number)
            return leaves.replace(clipped), state
        assigned, states = assign_rules(rules, units), ()
        if has_state and assigned:
            check_state(state, ClipState)
            expected = tuple(init_state(rule) for rule, _ in assigned)
            if jax.tree.structure(expected) != jax.tree.structure(state.rules):
                hint = "Pass the state that its `init(params)` returned."
                got = "the state of another clip"
                raise type_error("state", "the state of this clip", got, hint)
            states = state.rules
            if units.is_local and len(set(map(varying_axes, leaves.arrays))) > 1:
                rule = "a threshold without state if leaves are sharded over different mesh axes"
                hint = "Clip leaves with different sharding separately with `optax.partition`."
                raise value_error(argument, rule, "a rule with state", hint)
        param_leaves = None
        if any(rule.uses_params for rule, _ in assigned):
            check_params(updates, params)
            param_leaves = leaves.beside(params)
        clipped, state = clip_leaves(units, assigned, leaves.arrays, param_leaves, states, None)
        return leaves.replace(clipped), state

    return optax.GradientTransformation(init, update)


def _clip_leaves(
    units: Units,
    assigned: tuple[Assignment, ...],
    leaves: list[Array],
    params: list[Array] | None,
    states: Tree,
    number: Number | None,
    *,
    factor_of: Callable[[Array, Array], Array],
    ord: float,
    axis_name: AxisName,
    drop: bool,
) -> tuple[list[Array], ClipState]:
    """Compute norms, thresholds and factors; return the scaled leaves and the next state."""
    over = axis_name if units.is_local else None
    norms = unit_norms(leaves, units, ord, axis_name)
    param_norms = None if params is None else unit_norms(params, units, ord, axis_name)
    whole = norms
    if isinstance(units, Slices) and units.is_rms:
        roots = _root_sizes(units, leaves, axis_name)
        norms = _divided(norms, roots)
        param_norms = None if param_norms is None else _divided(param_norms, roots)
        # If `whole` were the norms before the division, XLA:CPU would store both.
        whole = map_arrays(jnp.multiply, norms, [jnp.asarray(x, norms[0].dtype) for x in roots])
    is_single = len(norms) == 1 and not norms[0].ndim
    total = whole[0] if is_single else norm_of_leaves(_stacked(whole, whole), ord, over)
    is_finite, bad = jnp.isfinite(total), 0 if drop else jnp.nan

    def respond(norm: Array, threshold: Array) -> Array:
        # A non-finite norm makes every leaf NaN or zero, on every device.
        return factor_of(norm, lax.select(is_finite, threshold, jnp.full_like(threshold, bad)))

    if number is None:
        thresholds, states = apply_rules(assigned, norms, states, param_norms)
    else:
        thresholds = [jnp.asarray(number, total.dtype)] * units.size
    factors = map_arrays(respond, norms, thresholds)
    clipped = scale_leaves(leaves, units, factors, drop=drop)
    if is_single:
        (threshold,), (factor,) = thresholds, factors
        fraction = (factor != 1).astype(factor.dtype)
    else:
        # If the factors were stacked, XLA on CPU would compile a separate kernel for each leaf
        # (JAX 0.10.2, 300 leaves: 12 s instead of 3.5 s).
        stacks = _stacked(norms, norms)
        if number is not None:
            limits = thresholds[:1] * len(stacks)
        elif len(assigned) == 1 and not states:  # an elementwise rule also works on stacks
            columns = [stacks] if param_norms is None else [stacks, _stacked(param_norms, norms)]
            limits = list(map(functools.partial(apply_stateless, assigned[0].rule), *columns))
        else:
            limits = _stacked(thresholds, norms)
        threshold, factor, fraction = _summary(limits, list(map(respond, stacks, limits)), over)
    columns: Any = (total, jnp.minimum(threshold, UNBOUNDED), factor)
    if units.names:
        names = [group_name(name) for name in units.names]
        columns = (dict(zip(names, x, strict=True)) for x in (norms, thresholds, factors))
    columns = optax.tree.cast((*columns, fraction), jnp.float32)
    return clipped, ClipState(*columns, rules=states)


def _root_sizes(units: Slices, leaves: Sequence[Array], axis_name: AxisName) -> list[float]:
    """Return the square root of the number of elements in each norm."""
    sizes: list[int] = []
    for x, axes in zip(leaves, units.axes, strict=True):
        shards = replica_count(frozenset(), shard_axes(x, axis_name))
        sizes.append(shards * math.prod(x.shape[axis] for axis in axes))
    return [math.sqrt(max(size, 1)) for size in sizes]


def _divided(norms: Norms, roots: list[float]) -> Norms:
    """Convert norms to root mean squares."""
    # XLA:CPU would recompute a division by a constant in every kernel that reads the result.
    dtype = norm_dtype(norms)
    divisors = {root: fusion_barrier(jnp.asarray(root, dtype)) for root in set(roots)}
    return [norm / divisors[root] for norm, root in zip(norms, roots, strict=True)]


def _stacked(values: Norms, norms: Norms) -> list[Array]:
    """Stack the values whose norms have the same shape, dtype and sharding."""
    return [jnp.stack([values[i] for i in group]) for group in groups_of_type(norms)]


def _init_state(units: Units, rule_states: Tree) -> ClipState:
    def scalar(value: float) -> Scalar:
        return jnp.full((), value, jnp.float32)  # a state with shared buffers cannot be donated

    def by_name(value: float) -> Scalar | dict[str, Scalar]:
        return {group_name(name): scalar(value) for name in units.names} or scalar(value)

    return ClipState(by_name(0.0), by_name(UNBOUNDED), by_name(1.0), scalar(0.0), rule_states)


def scale_leaves(
    leaves: Sequence[Array], units: Units, factors: Norms, *, drop: bool = False
) -> list[Array]:
    """Multiply each leaf by its clipping factors."""
    if len(factors) == 1:  # several factors are already slices of vectors, see `map_arrays`
        factors = [shared(factors[0])]
    scaled = list(leaves)
    for i, entry in enumerate(units.entries):
        if entry is not None:
            scaled[i] = scale_leaf(leaves[i], factors[entry], drop=drop)
    return scaled


def _as_factor(reaction: Reaction) -> Callable[[Array, Array], Array]:
    """Convert `reaction` to a function of norm and threshold that returns a factor in [0, 1]."""
    if isinstance(reaction, str):
        check_choice("reaction", reaction, tuple(REACTIONS))
        return REACTIONS[reaction]
    if not callable(reaction):
        rule = '"scale", "zero" or a function'
        hint = "Pass a function of the norm and the threshold that returns a factor."
        raise type_error("reaction", rule, shortened(reaction), hint)

    def factor_of(norm: Array, threshold: Array) -> Array:
        factor = apply_reaction(reaction, norm, threshold)
        return jnp.clip(jnp.broadcast_to(factor, norm.shape), 0, 1)

    return factor_of


def _summary(
    thresholds: list[Array], factors: list[Array], axis_name: AxisName
) -> tuple[Scalar, Scalar, Scalar]:
    """The smallest threshold, the smallest factor, and the fraction of factors below 1."""
    shards = [shard_axes(x, axis_name) for x in factors]
    everywhere = frozenset[str]().union(*shards)
    dtype, size = norm_dtype(factors), 0
    bound, factor, num_clipped = (jnp.asarray(x, dtype) for x in (UNBOUNDED, 1, 0))
    for threshold, x, axes in zip(thresholds, factors, shards, strict=True):
        bound = jnp.minimum(bound, jnp.min(threshold, initial=UNBOUNDED))
        factor = jnp.minimum(factor, jnp.min(x, initial=1))
        num_clipped += jnp.sum(x != 1, dtype=dtype) / replica_count(axes, everywhere)
        size += x.size * replica_count(frozenset(), axes)
    lowest = -max_over(-jnp.stack([bound, factor]), everywhere)
    if everywhere:  # `max_over` replaces NaN by infinity
        lowest = jnp.where(lowest > -jnp.inf, lowest, jnp.nan)
    bound, factor = lowest
    return bound, factor, sum_over(num_clipped, everywhere) / max(size, 1)
