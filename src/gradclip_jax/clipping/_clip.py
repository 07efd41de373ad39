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
    check_length,
    check_number,
    check_ord,
    check_state,
    error_message,
)
from .._mesh import replica_count, shard_axes, varying_axes
from .._states import register_metrics
from .._tree_checks import check_inexact
from .._types import UNBOUNDED, Array, AxisName, Count, Number, Order, Scalar, Threshold, Tree
from ._formula import norm_dtype, scale_factor, scale_leaf, zero_factor
from ._granularity import (
    Granularity,
    Norms,
    Units,
    as_granularity,
    is_measured,
    leaf_units,
    measured_shapes,
    norm_shapes,
    root_mean_squares,
    select_groups,
    tree_units,
)
from ._incident import IncidentLog, Kind, causes, empty_log, gather, note
from ._norm import measured_leaves, norm_of_leaves, totals, unit_norms
from ._threshold import (
    Assignment,
    apply_rules,
    as_rules,
    assign_rules,
    check_params,
    first_states,
    group_name,
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
    name = "clip_grad_norm"
    check_number(name, "max_norm", max_norm, "Pass inf to only measure.")
    order, axes = check_ord(name, ord), check_axis_name(name, axis_name)
    check_inexact(name, "grads", grads)
    check_bound(name, axes)
    leaves = measured_leaves(grads)
    if norm is None:
        norm = norm_of_leaves(leaves, order, axes)
    else:
        check_number(name, "norm", norm, "Pass the norm of `grads`.", closed=True, or_nan=True)
        norm = jnp.asarray(norm).astype(norm_dtype(leaves))
    factor = scale_factor(norm, jnp.asarray(max_norm).astype(norm.dtype))
    factor = jnp.where(jnp.isfinite(norm), factor, jnp.nan)
    return with_leaves(grads, scale_leaves(leaves, tree_units(leaves), factor[None])), norm


def clip_by_norm(
    threshold: Threshold,
    *,
    granularity: Literal["global", "leaf"] | Granularity = "global",
    reaction: Reaction = "scale",
    ord: Order = 2.0,
    axis_name: AxisName = None,
    nonfinite: Literal["propagate", "zero"] = "propagate",
    incidents: Count | None = None,
) -> optax.GradientTransformation:
    """Clips by norm: of what, to what threshold, and what happens above it are three choices.

    `factor_i = reaction(norm_i, threshold_i)` for each unit i, and each element is multiplied by
    the factor of its unit. All named clips are lines over this one.

    | granularity | a unit is |
    | --- | --- |
    | `"global"` | the whole tree |
    | `"leaf"` | each leaf |
    | `gcx.granularities.group(param_labels)` | the leaves that share a label |
    | `gcx.granularities.layer(stack_axes)` | each layer of leaves stacked for `lax.scan` |
    | `gcx.granularities.axis(axis)` | each row, column or filter |

    | reaction | factor |
    | --- | --- |
    | `"scale"` | `min(1, threshold / norm)` |
    | `"zero"` | 1 up to the threshold, 0 above it |
    | a function | `reaction(norm, threshold)`, elementwise, in [0, 1] |

    | step | update |
    | --- | --- |
    | norm <= threshold, or all zero | unchanged, bit for bit |
    | a NaN or infinity, `nonfinite="propagate"` | every measured leaf NaN |
    | a NaN or infinity, `nonfinite="zero"` | zero; `metrics` report a factor of 0 |
    | traced threshold <= 0 | zero |

    Args:
        threshold: in the unit of the gradients: a number > 0 (inf never clips), a traced scalar, a
            schedule of the step count, a rule from `gcx.thresholds`, a prefix tree of those, or,
            for groups, a mapping from label to one of those.
        granularity: of what norms are taken.
        reaction: what happens to a unit above its threshold.
        ord: order of the norm, 1, 2, inf or any number > 0.
        axis_name: mapped axes over which every leaf is a shard, where types cannot tell (inside
            `pmap`, or `shard_map` with `check_vma=False`).
        nonfinite: "propagate" or "zero".
        incidents: how many of the last steps that were clipped, or not finite, it keeps for
            `incidents`, 1 to 2^20, static; None for none.

    Returns:
        An Optax transformation with a `ClipState`. `update(grads, None)` works unless the
        threshold keeps a state (a schedule, or a rule fed by the history of norms), or it keeps
        incidents.

    Raises:
        ValueError: a number is out of range, or a name is none of those above.
        TypeError: `threshold` is no threshold; when traced, a leaf is not inexact.

    Examples:
        Skip leaves whose norm is far above its own history, layer by layer:

        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> clip = gcx.clip_by_norm(
        ...     gcx.thresholds.percentile(50.0),
        ...     granularity=gcx.granularities.layer(1),
        ...     reaction="zero",
        ... )
        >>> grads = jnp.array([[3.0, 4.0], [0.0, 1.0]])
        >>> state = clip.init(grads)
        >>> for scale in (1.0, jnp.array([[2.0], [1.0]])):
        ...     updates, state = clip.update(scale * grads, state)
        >>> updates.tolist()
        [[0.0, 0.0], [0.0, 1.0]]

    References:
        Pascanu, Mikolov and Bengio, 2013, arXiv 1211.5063.
    """
    return norm_clip(
        ("clip_by_norm", "threshold"),
        threshold,
        granularity,
        reaction=reaction,
        ord=ord,
        axis_name=axis_name,
        nonfinite=nonfinite,
        incidents=incidents,
    )


def norm_clip(
    named: tuple[str, str],
    threshold: Threshold,
    granularity: Literal["global", "leaf"] | Granularity = "global",
    *,
    reaction: Reaction = "scale",
    ord: Order = 2.0,
    axis_name: AxisName = None,
    nonfinite: str = "propagate",
    incidents: Any = None,
) -> optax.GradientTransformation:
    """`clip_by_norm`, under the name of the function and the argument that errors begin with."""
    function, argument = named
    check_choice(function, "nonfinite", nonfinite, ("propagate", "zero"))
    cut, factor_of = as_granularity(function, granularity), _as_factor(function, reaction)
    order, axes = check_ord(function, ord), check_axis_name(function, axis_name)
    by_label = cut.is_group and isinstance(threshold, Mapping)
    rules = as_rules(function, argument, threshold, by_label=by_label)
    drops = nonfinite == "zero"
    if incidents is not None:
        check_length(function, "incidents", incidents)

    def units_of(tree: Tree) -> Units:
        units = cut.cut(function, tree)
        return select_groups(function, argument, units, tuple(rules)) if by_label else units

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def clip_leaves(
        units: Units, assigned: tuple[Assignment, ...], leaves: Any, params: Any, states: Any
    ) -> tuple[list[Array], ClipState]:
        norms = unit_norms(leaves, units, order, axes)
        param_norms = None if params is None else unit_norms(params, units, order, axes)
        measured, of_params = (
            root_mean_squares(x, units, leaves, axes) for x in (norms, param_norms)
        )
        thresholds, states = apply_rules(assigned, units, measured, states, of_params)
        factors = jax.tree.map(factor_of, measured, thresholds)
        total, report = _report(units, norms, thresholds, factors, order, axes)
        # One bad norm decides for all leaves, and alike on all devices.
        is_bad, factor_if_bad = ~jnp.isfinite(total), 0 if drops else jnp.nan
        factors, clip_factor = jax.tree.map(
            lambda factor: jnp.where(is_bad, factor_if_bad, factor), (factors, report.clip_factor)
        )
        fraction = jnp.where(is_bad, 1, report.clip_fraction)
        clipped = scale_leaves(leaves, units, factors, drops=drops)
        return clipped, report._replace(
            clip_factor=clip_factor, clip_fraction=fraction, rules=states
        )

    def init(params: Tree) -> ClipState:
        # The labels of a mapping are known before a tree is.
        units = Units((), (), len(rules), tuple(rules)) if by_label else units_of(params)
        shapes = norm_shapes(units, [] if by_label else measured_shapes(params))
        states = first_states(assign_rules(function, argument, rules, units, params), shapes)

        def scalar(value: float) -> Scalar:
            return jnp.full((), value, jnp.float32)  # one that two fields share cannot be donated

        def by_name(value: float) -> Any:
            names = [group_name(name) for name in units.names]
            return {name: scalar(value) for name in names} if units.names else scalar(value)

        log = None
        if incidents is not None:
            log = empty_log(incidents, leaf_units(measured_shapes(params)), params)
        fields = by_name(0.0), by_name(UNBOUNDED), by_name(1.0), scalar(0.0)
        return ClipState(*fields, states, log)

    def update(updates: Tree, state: Any, params: Tree | None = None) -> tuple[Tree, ClipState]:
        check_inexact(function, "updates", updates)
        check_bound(function, axes)
        units, leaves = units_of(updates), measured_leaves(updates)
        assigned = assign_rules(function, argument, rules, units, updates)
        states = first_states(assigned, norm_shapes(units, leaves))
        log = None
        if states or incidents is not None:
            check_state(function, state, ClipState)
            states, log = state.rules, state.incidents
        if states:
            _check_sharded_alike(function, argument, units, leaves)
        param_leaves = None
        if any(rule.uses_params for rule, _ in assigned):
            check_params(function, updates, params)
            param_leaves = leaves_beside(updates, params)
        clipped, state = clip_leaves(units, assigned, leaves, param_leaves, states)
        if log is not None:
            state = state._replace(incidents=_noted(log, leaves, state, axes))
        return with_leaves(updates, clipped), state

    return optax.GradientTransformation(init, update)


@functools.partial(jax.jit, static_argnames=("units", "drops"))
def scale_leaves(
    leaves: Sequence[Array], units: Units, factors: Norms, *, drops: bool = False
) -> list[Array]:
    """Each leaf times the factors of its units."""
    clipped = [i for i, axes in enumerate(units.axes) if axes is not None]
    of_leaves = [factors[units.entry[i]] for i in clipped]
    if units.is_vector and clipped:
        # Kernels that read entries of a vector are merged, kernels that read one scalar are not.
        of_leaves = list(lax.optimization_barrier(jnp.stack(of_leaves)))
    scaled = list(leaves)
    for i, factor in zip(clipped, of_leaves, strict=True):
        scaled[i] = scale_leaf(leaves[i], factor, drops=drops)
    return scaled


def _as_factor(function: str, reaction: Any) -> Callable[[Array, Array], Array]:
    """A reaction by name, or a user's own: from norms that are finite to factors in [0, 1]."""
    named = {"scale": scale_factor, "zero": zero_factor}
    if isinstance(reaction, str):
        check_choice(function, "reaction", reaction, tuple(named))
        return named[reaction]
    hint = 'Pass "scale", "zero" or a function (norm, threshold) -> factor.'
    check_callable(function, "reaction", reaction, hint)

    def factor_of(norm: Array, threshold: Array) -> Array:
        factor = jnp.asarray(reaction(jnp.where(jnp.isfinite(norm), norm, 1), threshold))
        return jnp.clip(jnp.broadcast_to(factor.astype(norm.dtype), norm.shape), 0, 1)

    return factor_of


def _check_sharded_alike(function: str, argument: str, units: Units, leaves: list[Array]) -> None:
    """Refuses a vector of norms that stay on their devices, where leaves vary over other axes."""
    if units.is_local and len(set(map(varying_axes, leaves))) > 1:
        rule = "without a state where leaves are sharded along different mesh axes"
        hint = "Treat leaves that are sharded alike together, with `optax.partition`."
        got = "a rule that keeps a history"
        raise ValueError(error_message(function, argument, rule, got, hint))


def _report(
    units: Units, norms: Norms, thresholds: Norms, factors: Norms, ord: float, axis_name: AxisName
) -> tuple[Scalar, ClipState]:
    """The norm of all that was measured, and what the state says of a step that is finite.

    Both are alike on all devices; the norm is not finite where one of the norms is not.
    """
    over = axis_name if units.is_local else None
    columns: Any = [jax.tree.leaves(column) for column in (norms, thresholds, factors)]
    if units.is_vector and units.size == 1 and not (units.names or units.is_local):
        total, threshold, factor = norms[0], jnp.minimum(thresholds[0], UNBOUNDED), factors[0]
        report = (total, threshold, factor, ~(factor >= 1))
        return total, ClipState(*(x.astype(jnp.float32) for x in report), rules=())
    total = norm_of_leaves(columns[0], ord, over)
    count = sum(x.size * replica_count(frozenset(), shard_axes(x, over)) for x in columns[2])
    clips = totals(columns[2], tree_units(columns[2]), over, _clipped_count)[0]
    if units.names:
        names = [group_name(name) for name in units.names]
        values: Any = [dict(zip(names, x, strict=True)) for x in (norms, thresholds, factors)]
    else:
        values = [total, _smallest(columns[1], UNBOUNDED, over), _smallest(columns[2], 1.0, over)]
    values = jax.tree.map(lambda x: x.astype(jnp.float32), values)
    fraction = clips.astype(jnp.float32) / max(count, 1)
    return total, ClipState(*values, clip_fraction=fraction, rules=())


def _noted(
    log: IncidentLog, leaves: list[Array], state: ClipState, axis_name: AxisName
) -> IncidentLog:
    """The incidents after a step; one that was clipped, or was not finite, is one."""
    threshold, factor = (
        functools.reduce(jnp.minimum, jax.tree.leaves(x))
        for x in (state.clip_threshold, state.clip_factor)
    )
    _, evidence = gather(leaves, leaf_units(leaves), axis_name)
    bounds, is_clipped = (threshold, UNBOUNDED, UNBOUNDED), ~(factor >= 1)
    flags = causes((evidence.norm, None, None), bounds, jnp.array(False))
    # Of several units one may be clipped though their norm is below the smallest threshold.
    flags[Kind.NORM] = flags[Kind.CLIPPED] = jnp.isfinite(evidence.norm) & is_clipped
    return note(log, is_clipped, flags, evidence, bounds, clip_factor=factor)


def _clipped_count(factors: Array, axes: Any, index: int) -> Array:
    return jnp.sum(~(factors >= 1), dtype=jnp.float32)


def _smallest(arrays: list[Array], at_most: float, axis_name: AxisName) -> Scalar:
    if not arrays:
        return jnp.full((), at_most, jnp.float32)

    def share_of(x: Array, axes: Any, index: int) -> Array:
        return jnp.max(-x, initial=-at_most)

    return -totals(arrays, tree_units(arrays), axis_name, share_of, is_sum=False)[0]


def leaves_beside(tree: Tree, other: Tree) -> list[Array]:
    """The leaves of another tree at the places of the measured ones of the first."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    return [jnp.asarray(y) for x, y in pairs if is_measured(x)]


def with_leaves(tree: Tree, leaves: Sequence[Array]) -> Tree:
    """The tree with others in the place of its measured leaves."""
    in_order = iter(leaves)
    return jax.tree.map(lambda x: next(in_order) if is_measured(x) else x, tree)
