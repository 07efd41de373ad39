"""Implementation of all functions that clip by norm."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import lax

from .._checks import check_choice, check_number, check_ord, check_params
from .._devices import groups_of_type, map_arrays, shared, stack
from .._errors import public
from .._types import UNBOUNDED, Array, AxisName, Number, Order, Scalar, Tree
from ..norms._granularity import Granularity, as_granularity, count_norms, select_groups
from ..norms._leaves import checked_leaves, measured_shapes
from ..norms._mesh import max_over, replica_count, shard_axes, sum_over
from ..norms._norm import Norms, Units, norm_dtype, norm_of_leaves, unit_norms, unit_sizes
from ._formula import factor_of, scale_factor, scale_leaf
from ._threshold import Elementwise, Threshold, apply_rules, as_rules, init_rules

Reaction: TypeAlias = Literal["scale", "zero"] | Callable[[Array, Array], Array]
"""Reaction to a norm above its threshold, a name or a function `(norm, threshold) -> factor`."""


class ClipState(NamedTuple):
    """Metrics of the last step, and the state of each threshold rule.

    The scalars are float32[]. When clipping by group, norm, threshold and factor are dictionaries
    of scalars.

    Attributes:
        grad_norm: Norm of all leaves that are clipped, before clipping.
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

    is_clip = True

    def step_metrics(self) -> dict[str, Scalar]:
        """Return the entries of `metrics` for this state; those of groups end in their label."""
        found: dict[str, Scalar] = {}
        for name in ("grad_norm", "clip_threshold", "clip_factor", "clip_fraction"):
            value = getattr(self, name)
            if isinstance(value, dict):
                found |= {f"{name}/{label}": x for label, x in value.items()}
            else:
                found[name] = value
        return found


@public
@jax.named_scope("clip_grad_norm")
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
            does not carry the sharding (`pmap`, or `shard_map` with `check_vma=False`). `()`
            clips on each device by its own norm.

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
    order = check_ord(ord)
    leaves = checked_leaves("grads", grads)
    dtype = norm_dtype(leaves.arrays)
    known = norm_of_leaves(leaves.arrays, order, axis_name) if norm is None else jnp.asarray(norm)
    known = known.astype(dtype)
    factor = scale_factor(known, jnp.asarray(max_norm, dtype))
    factor = jnp.where(jnp.isfinite(known), factor, jnp.nan)
    factors = shared(factor, leaves.arrays)
    return leaves.replace(list(map(scale_leaf, leaves.arrays, factors))), known


def norm_clip(
    argument: str,
    threshold: Threshold | Mapping[Any, Threshold],
    granularity: Literal["global", "leaf"] | Granularity = "global",
    *,
    reaction: Reaction = "scale",
    ord: Order | None = None,
    axis_name: AxisName = None,
) -> optax.GradientTransformation:
    """Implement `clip_by_norm`; `argument` is the name of the threshold in error messages."""
    granularity = as_granularity(granularity)
    rules, labels = as_rules(argument, threshold, is_group=granularity.is_group)
    if not callable(reaction):
        check_choice("reaction", reaction, ("scale", "zero"))
    order = check_ord(ord)
    uses_params = any(rule.uses_params for rule in rules)

    def init(params: Tree) -> ClipState:
        leaves = measured_shapes(params)
        if labels is None:
            units = granularity.cut(leaves, params)
        else:  # `optax.tree.map_params` passes a placeholder without labels
            units = Units((None,) * len(leaves), len(labels), labels)
        norm, threshold, factor = (_filled(x, units.names) for x in (0.0, UNBOUNDED, 1.0))
        states = init_rules(rules, count_norms(units, leaves))
        return ClipState(norm, threshold, factor, jnp.zeros((), jnp.float32), states)

    def update(updates: Tree, state: Tree, params: Tree | None = None) -> tuple[Tree, ClipState]:
        leaves = checked_leaves("updates", updates)
        arrays = leaves.arrays
        units = granularity.cut(arrays, updates)
        if labels is not None:
            units = select_groups(argument, units, labels)
        norms, stacks, total = _measure(arrays, units, order, axis_name)
        param_norms = norms
        if uses_params:
            check_params(updates, params)
            beside = leaves.beside(params)
            param_norms = unit_norms(beside, units, order, axis_name)
            param_norms = unit_sizes(param_norms, beside, units, axis_name)
        states = state.rules if isinstance(state, ClipState) else ()
        thresholds, states = apply_rules(rules, norms, param_norms, states, jnp.isfinite(total))
        limits: list[Array] = []
        if labels is None and isinstance(rules[0], Elementwise):
            # From a stack of thresholds, XLA on CPU would compute each of them in two kernels.
            param_stacks = _stacked(param_norms, norms)
            limits, _ = apply_rules(rules, stacks, param_stacks, (), jnp.isfinite(total))
        columns = norms, thresholds, stacks, limits
        clipped, metrics = _clipped(arrays, total, *columns, units, reaction, axis_name)
        return leaves.replace(clipped), ClipState(*metrics, rules=states)

    return optax.GradientTransformation(init, update)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _measure(
    leaves: list[Array], units: Units, ord: float, axis_name: AxisName
) -> tuple[Norms, list[Array], Scalar]:
    """Compute the norms, or root mean squares, of all units, their stacks, and the total norm."""
    norms = unit_norms(leaves, units, ord, axis_name)
    stacks = _stacked(norms, norms)
    is_single = len(norms) == 1 and not norms[0].ndim
    over = axis_name if units.is_local else ()
    total = norms[0] if is_single else norm_of_leaves(stacks, ord, over)
    if units.is_rms:
        norms = unit_sizes(norms, leaves, units, axis_name)
        stacks = _stacked(norms, norms)
    return norms, stacks, total


@functools.partial(jax.jit, static_argnums=(6, 7, 8))
def _clipped(
    leaves: list[Array],
    total: Scalar,
    norms: Norms,
    thresholds: list[Any],
    stacks: list[Array],
    limits: list[Any],
    units: Units,
    reaction: Reaction,
    axis_name: AxisName,
) -> tuple[list[Array], Any]:
    """Return the clipped leaves, and the metrics of the step.

    `limits` are the stacked thresholds, or empty if they are not known.
    """
    respond = functools.partial(_factor, is_finite=jnp.isfinite(total), reaction=reaction)
    if len(thresholds) == 1:  # one threshold for all norms
        limits, thresholds = thresholds * len(stacks), thresholds * len(norms)
    limits = limits or _stacked(thresholds, norms)
    factors = map_arrays(respond, norms, thresholds)
    # Stacks of several factors would make XLA on CPU compile a separate kernel for each leaf.
    stacked = factors if len(factors) == 1 else list(map(respond, stacks, limits))
    metrics = total, *_summary(limits, stacked, axis_name if units.is_local else ())
    if units.names:
        bounds = [jnp.minimum(x, UNBOUNDED) for x in thresholds]
        columns = (zip(units.names, x, strict=True) for x in (norms, bounds, factors))
        metrics = *({str(name): x for name, x in pairs} for pairs in columns), metrics[-1]
    entries = units.entries
    measured = [x for x, i in zip(leaves, entries, strict=True) if i is not None]
    by_leaf = [factors[i] for i in entries if i is not None]
    if len(factors) == 1:  # several factors are already slices of vectors, see `map_arrays`
        by_leaf = shared(factors[0], measured)
    scaled = map(scale_leaf, measured, by_leaf)
    clipped = [x if i is None else next(scaled) for x, i in zip(leaves, entries, strict=True)]
    return clipped, optax.tree.cast(metrics, jnp.float32)


@functools.partial(jax.jit, static_argnames="reaction")
def _factor(norm: Array, threshold: Array, is_finite: Scalar, reaction: Reaction) -> Array:
    """Return the factor of each norm; NaN on every device if any norm is not finite."""
    threshold = jnp.broadcast_to(jnp.asarray(threshold, norm.dtype), norm.shape)
    threshold = lax.select(is_finite, threshold, jnp.full_like(threshold, jnp.nan))
    factor = factor_of(reaction, norm, threshold)
    return factor if isinstance(reaction, str) else jnp.clip(factor, 0, 1)


def _stacked(values: Sequence[Array], norms: Norms) -> list[Array]:
    """Stack the values whose norms have the same type."""
    stacks: list[Array] = []
    for group in groups_of_type(norms):
        like = norms[group[0]]
        own = [jnp.broadcast_to(jnp.asarray(values[i], like.dtype), like.shape) for i in group]
        stacks.append(stack(own))
    return stacks


def _summary(
    thresholds: list[Any], factors: list[Array], axis_name: AxisName
) -> tuple[Scalar, Scalar, Scalar]:
    """Return the smallest threshold, the smallest factor, and the fraction of factors below 1."""
    shards = [shard_axes(x, axis_name) for x in factors]
    everywhere = frozenset[str]().union(*shards)
    dtype, size = norm_dtype(factors), 0
    if len(factors) == 1 and not factors[0].ndim and not everywhere:
        # On TPU, each reduction of one scalar would be a kernel of its own.
        bound = jnp.minimum(jnp.asarray(thresholds[0], dtype), UNBOUNDED)
        return bound, factors[0], (factors[0] != 1).astype(dtype)
    bound, factor, num_clipped = (jnp.asarray(x, dtype) for x in (UNBOUNDED, 1, 0))
    for threshold, x, axes in zip(thresholds, factors, shards, strict=True):
        # Without the inner minimum, XLA on CPU reduces each part of a stack separately.
        threshold = jnp.minimum(jnp.asarray(threshold, dtype), UNBOUNDED)
        bound = jnp.minimum(bound, jnp.min(threshold, initial=UNBOUNDED))
        factor = jnp.minimum(factor, jnp.min(x, initial=1))
        num_clipped += jnp.sum(x != 1, dtype=dtype) / replica_count(axes, everywhere)
        size += x.size * replica_count(frozenset(), axes)
    if everywhere:  # `max_over` replaces NaN by infinity
        lowest = -max_over(-jnp.stack([bound, factor]), everywhere)
        bound, factor = jnp.where(lowest > -jnp.inf, lowest, jnp.nan)
    return bound, factor, sum_over(num_clipped, everywhere) / max(size, 1)


def _filled(value: float, names: Sequence[Hashable]) -> Scalar | dict[str, Scalar]:
    """Return a scalar, or one for each name, with its own buffer, so that it can be donated."""
    scalars = {str(name): jnp.full((), value, jnp.float32) for name in names}
    return scalars or jnp.full((), value, jnp.float32)
