"""Implementation of all functions that clip by norm."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from .._checks import check_number, check_ord, check_params, is_scalar, is_traced
from .._errors import public, type_error
from .._format import describe
from .._types import UNBOUNDED, Array, AxisName, Number, Order, Scalar, Tree
from ..norms._granularity import Granularity, as_granularity, select_labels
from ..norms._groups import PerGroup, tree_groups
from ..norms._leaves import checked_leaves, inexact_leaves_or_placeholders, norm_dtype
from ..norms._mesh import MeshAxes, check_axis_name, max_over, num_devices, shard_axes, sum_over
from ..norms._reduce import group_norms, norm_of_leaves, root_mean_squares
from ._formula import Reaction, check_reaction, factor_of, scale_factor, scale_leaf
from ._threshold import Rule, Threshold, apply_rules, as_rule, init_rules


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
        rules: States of the threshold rules, in dictionaries keyed by the name of the rule.
    """

    grad_norm: Scalar | dict[str, Scalar]
    clip_threshold: Scalar | dict[str, Scalar]
    clip_factor: Scalar | dict[str, Scalar]
    clip_fraction: Scalar
    rules: tuple[Tree, ...]

    is_clip = True

    def step_metrics(self) -> dict[str, Scalar]:
        """Return the entries of `metrics` for this state, with the label of a group in its keys."""
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
            does not carry the sharding (`pmap`, or `shard_map` with `check_vma=False`). Omit axes
            over which leaves are equal, as after `psum` or `pmean`; see `global_norm`. `()`
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
    limit = check_number("max_norm", max_norm, "Pass inf to compute the norm without clipping.")
    order = check_ord(ord)
    check_axis_name(axis_name)
    leaves = checked_leaves("grads", grads)
    dtype = norm_dtype(leaves.arrays)
    if norm is None:
        grad_norm = norm_of_leaves(leaves.arrays, order, axis_name)
    else:
        grad_norm = _checked_norm(norm).astype(dtype)
    factor = scale_factor(grad_norm, jnp.asarray(limit, dtype))
    factors = PerGroup([factor], tree_groups(leaves.arrays))
    clipped = _scale_leaves(leaves.arrays, factors, jnp.isfinite(grad_norm))
    return leaves.replace(clipped), grad_norm


def _checked_norm(norm: Number) -> Array:
    """Return the argument `norm` as an array, or raise if it is not a scalar >= 0 or NaN."""
    hint = "Pass the result of `global_norm`."
    if not is_scalar(norm, jnp.floating, jnp.integer):
        raise type_error("norm", "a real scalar", describe(norm), hint)
    if not is_traced(norm) and norm == norm:  # not NaN
        norm = check_number("norm", norm, hint, "[0, inf]")
    return jnp.asarray(norm)


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
    named_thresholds: dict[str, Any] = {argument: threshold}
    labels = None
    if granularity.is_group and isinstance(threshold, Mapping):  # a threshold for each label
        named_thresholds = {f"{argument}[{key!r}]": x for key, x in threshold.items()}
        labels = tuple(threshold)
    rules = [as_rule(name, x) for name, x in named_thresholds.items()]
    order = check_ord(ord)
    check_reaction(reaction)
    check_axis_name(axis_name)
    uses_params = any(rule.uses_params for rule in rules)
    # Without `jit`, the factors of a user-defined reaction can be checked in eager mode.
    factors_of = _factors if callable(reaction) else _jitted_factors

    def init(params: Tree) -> ClipState:
        if labels is not None:  # `optax.tree.map_params` passes a placeholder without labels
            return _init_state(rules, labels, len(labels))
        leaves = inexact_leaves_or_placeholders(params)
        groups = granularity.partition(leaves, params)
        return _init_state(rules, groups.labels, groups.num_norms(leaves))

    def update(updates: Tree, state: Tree, params: Tree | None = None) -> tuple[Tree, ClipState]:
        leaves = checked_leaves("updates", updates)
        groups = granularity.partition(leaves.arrays, updates)
        if labels is not None:
            groups = select_labels(argument, groups, labels)
        # Only local norms, such as the norms of rows, may differ between devices.
        norm_axes = axis_name if groups.is_local else ()

        norms = group_norms(leaves.arrays, groups, order, axis_name)
        if norms.is_scalar:
            total = norms.arrays[0]
        else:
            total = norm_of_leaves(norms.arrays, order, norm_axes)
        param_norms = norms  # rules without `uses_params` ignore them
        if uses_params:
            check_params(updates, params)
            param_norms = group_norms(leaves.leaves_like(params), groups, order, axis_name)
        if granularity.is_rms:
            norms = root_mean_squares(norms, leaves.arrays, axis_name)
            param_norms = root_mean_squares(param_norms, leaves.arrays, axis_name)

        is_finite = jnp.isfinite(total)
        # Without a state, `update(grads, None)` is allowed if no rule has a state.
        states = state.rules if isinstance(state, ClipState) else ()
        thresholds, states = apply_rules(argument, rules, norms, param_norms, states, is_finite)
        factors = factors_of(norms, thresholds, reaction)
        clipped = _scale_leaves(leaves.arrays, factors, is_finite)
        metrics = _metrics(total, norms, thresholds, factors, norm_axes)
        return leaves.replace(clipped), ClipState(*metrics, rules=states)

    return optax.GradientTransformation(init, update)


def _init_state(rules: Sequence[Rule], labels: Sequence[Hashable], num_norms: int) -> ClipState:
    """Return the initial state, whose arrays do not share buffers, so that it can be donated."""

    def filled(value: float) -> Scalar | dict[str, Scalar]:
        by_label = {str(label): jnp.full((), value, jnp.float32) for label in labels}
        return by_label or jnp.full((), value, jnp.float32)

    fraction, states = jnp.zeros((), jnp.float32), init_rules(rules, num_norms)
    return ClipState(filled(0.0), filled(UNBOUNDED), filled(1.0), fraction, states)


def _factors(norms: PerGroup, thresholds: PerGroup, reaction: Reaction) -> PerGroup:
    """Compute the clipping factor of each norm group."""
    return norms.map(functools.partial(factor_of, reaction), thresholds)


_jitted_factors = jax.jit(_factors, static_argnums=2)


@jax.jit
def _scale_leaves(leaves: list[Array], factors: PerGroup, is_finite: Scalar) -> list[Array]:
    """Multiply each leaf by the factor of its norm group, or by NaN if any norm is not finite."""
    factors = factors.map(_nan_unless, is_finite)
    return list(map(scale_leaf, leaves, factors.for_leaves(leaves)))


def _nan_unless(factor: Array, is_finite: Array) -> Array:
    """Return the factor, or NaN if a norm is not finite."""
    return jnp.where(is_finite, factor, jnp.nan)


@functools.partial(jax.jit, static_argnums=4)
def _metrics(
    total: Scalar, norms: PerGroup, thresholds: PerGroup, factors: PerGroup, axis_name: AxisName
) -> Tree:
    """Return norm, threshold, factor and fraction as in `ClipState`.

    Norm, threshold and factor are dictionaries by label, or scalars if the groups have no labels.
    """
    is_finite = jnp.isfinite(total)
    mesh_axes = [shard_axes(x, axis_name) for x in factors.arrays]
    summary = _summary(thresholds, factors, is_finite)
    if any(mesh_axes):
        summary = _summary_over_devices(thresholds, factors, mesh_axes, is_finite)
    metrics: Any = total, *summary
    if factors.groups.labels:
        bounds = thresholds.map(functools.partial(jnp.minimum, UNBOUNDED))
        reported = factors.map(_nan_unless, is_finite)
        metrics = norms.by_label(), bounds.by_label(), reported.by_label(), summary[2]
    return optax.tree.cast(metrics, jnp.float32)


_Summary: TypeAlias = tuple[Scalar, Scalar, Scalar]
"""The smallest threshold, the smallest factor and the fraction of norms that were clipped.

If any norm is not finite, the factor is NaN and the fraction is 1. NaN is inserted after the
minimum and not before it, because XLA on GPU would otherwise need more kernels.
"""


def _summary(thresholds: PerGroup, factors: PerGroup, is_finite: Scalar) -> _Summary:
    """Summarize norms that are equal on all devices."""
    bound = thresholds.min(UNBOUNDED)
    if factors.is_scalar:  # XLA on GPU then needs one kernel for the factor and the fraction
        factor = _nan_unless(factors.arrays[0], is_finite)
        return bound, factor, _is_clipped(factor)
    num_norms = sum(x.size for x in factors.arrays)
    fraction = factors.count(_is_clipped) / max(num_norms, 1)
    return bound, _nan_unless(factors.min(1.0), is_finite), jnp.where(is_finite, fraction, 1)


def _summary_over_devices(
    thresholds: PerGroup, factors: PerGroup, mesh_axes: Sequence[MeshAxes], is_finite: Scalar
) -> _Summary:
    """Summarize norms of slices that are sharded over mesh axes, given the axes of each leaf."""
    all_mesh_axes = frozenset[str]().union(*mesh_axes)
    # The minimum is a negated maximum. `max_over` turns NaN into infinity, so -inf means NaN.
    smallest = jnp.stack([thresholds.min(UNBOUNDED), factors.min(1.0)])
    smallest = -max_over(-smallest, all_mesh_axes)
    bound, factor = jnp.where(smallest > -jnp.inf, smallest, jnp.nan)
    # Each device counts its clipped norms and divides by the number of replicas, because the sum
    # over devices counts each replica.
    columns = list(zip(factors.arrays, mesh_axes, strict=True))
    counts = [jnp.sum(_is_clipped(x)) / num_devices(all_mesh_axes - axes) for x, axes in columns]
    num_clipped = sum_over(jnp.sum(jnp.stack(counts)), all_mesh_axes)
    num_norms = sum(x.size * num_devices(axes) for x, axes in columns)
    fraction = num_clipped / max(num_norms, 1)
    return bound, _nan_unless(factor, is_finite), jnp.where(is_finite, fraction, 1)


def _is_clipped(factor: Array) -> Array:
    """Return a mask of the factors that are not 1; NaN counts as not 1."""
    return factor != 1
