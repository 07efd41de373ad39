"""Clipping by norm: norm, threshold, factor, scaled tree. The one path of every norm clip."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._checks import check_axis_name, check_choice, check_ord
from .._mesh import max_over, sum_over, varying_axes
from .._states import register_metrics
from .._tree_checks import check_inexact
from .._types import TWO, UNBOUNDED, Array, AxisName, Order, Scalar, Threshold, Tree
from ._assign import (
    Served,
    apply_assigned,
    assign_rules,
    assign_to_part,
    check_labels,
    check_thresholds,
    current_states,
    first_states,
    group_name,
    needed_params,
)
from ._granularity import Granularity, as_granularity
from ._norm import measured_leaves, norm_of_leaves, unit_norms
from ._scale import Reaction, as_root, scale_units
from ._units import (
    Part,
    Units,
    is_measured,
    named_units,
    select_groups,
    split_by_sharding,
    unit_sizes,
)


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
    """

    grad_norm: Any
    clip_threshold: Any
    clip_factor: Any
    clip_fraction: Scalar
    rules: tuple[Any, ...]


class _Clipped(NamedTuple):
    """What was found for units that share a vector, arrays of shape (units,).

    Attributes:
        norms: before clipping.
        thresholds: for the norms, or for the root mean squares.
        roots: the square roots of the factors.
    """

    norms: Array
    thresholds: Array
    roots: Array


def clip_by_norm(
    threshold: Threshold,
    *,
    granularity: Literal["global", "leaf"] | Granularity = "global",
    reaction: Reaction = "scale",
    ord: Order = TWO,
    axis_name: AxisName = None,
    nonfinite: Literal["propagate", "zero"] = "propagate",
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

    Returns:
        An Optax transformation with a `ClipState`. `update(grads, None)` works unless the
        threshold keeps a state (a schedule, or a rule fed by the history of norms).

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
    )


def norm_clip(
    named: tuple[str, str],
    threshold: Threshold,
    granularity: Literal["global", "leaf"] | Granularity = "global",
    *,
    reaction: Reaction = "scale",
    ord: Order = TWO,
    axis_name: AxisName = None,
    nonfinite: str = "propagate",
) -> optax.GradientTransformation:
    """`clip_by_norm`, under the name of the function and the argument that errors begin with."""
    function, argument = named
    check_choice(function, "nonfinite", nonfinite, ("propagate", "zero"))
    cut, root_of = as_granularity(function, granularity), as_root(function, reaction)
    order, axes = check_ord(function, ord), check_axis_name(function, axis_name)
    by_label = cut.is_group and isinstance(threshold, Mapping)
    if by_label:
        check_labels(function, argument, threshold)
    check_thresholds(function, argument, threshold)
    drops = nonfinite == "zero"

    def units_of(tree: Tree) -> Units:
        units = cut.cut(function, tree)
        return select_groups(function, argument, units, tuple(threshold)) if by_label else units

    def clip_units(
        leaves: list[Array], params: list[Array] | None, units: Units, served: Served, states: Any
    ) -> tuple[_Clipped, Any]:
        norms = unit_norms(leaves, units, order, axes)
        sizes = unit_sizes(units, leaves, axes).astype(norms.dtype)
        of_params = None if params is None else unit_norms(params, units, order, axes) / sizes
        thresholds, states = apply_assigned(served, norms / sizes, states, of_params)
        # A norm that is not finite stands aside: its slope would be NaN.
        roots = root_of(jnp.where(jnp.isfinite(norms), norms / sizes, 1), thresholds)
        return _Clipped(norms, thresholds, roots), states

    def init(params: Tree) -> ClipState:
        units = named_units(tuple(threshold)) if by_label else units_of(params)
        served = assign_rules(function, argument, threshold, units, params)
        nothing = _Clipped(*(jnp.full(units.size, x) for x in (0.0, UNBOUNDED, 1.0)))
        return _report(units, [nothing], order, first_states(served))

    def update(updates: Tree, state: Any, params: Tree | None = None) -> tuple[Tree, ClipState]:
        check_inexact(function, "updates", updates)
        units, leaves = units_of(updates), measured_leaves(updates)
        served = assign_rules(function, argument, threshold, units, updates)
        states = current_states(function, served, state, ClipState)
        param_leaves = needed_params(function, served, updates, params)
        parts = split_by_sharding(units, leaves)
        clipped: list[_Clipped] = []
        for part in parts:
            of_part = assign_to_part(function, served, part.units, alone=len(parts) == 1)
            of_params = None if param_leaves is None else part.pick(param_leaves)
            result, states = clip_units(part.pick(leaves), of_params, part.units, of_part, states)
            clipped.append(result)
        clipped = _replace_if_bad(clipped, 0.0 if drops else jnp.nan)
        scaled = scale_tree(updates, parts, [x.roots for x in clipped], drops=drops)
        return scaled, _report(units, clipped, order, states)

    return optax.GradientTransformation(init, update)


def _replace_if_bad(clipped: Sequence[_Clipped], root: float) -> list[_Clipped]:
    """One root for all units if any norm is not finite, decided alike on all devices."""
    flags = jnp.stack([jnp.any(~jnp.isfinite(result.norms)) for result in clipped])
    axes = _varying([result.norms for result in clipped])
    bad = max_over(jnp.any(flags).astype(jnp.int32), axes) > 0
    return [x._replace(roots=jnp.where(bad, root, x.roots)) for x in clipped]


def scale_tree(tree: Tree, parts: Sequence[Part], roots: Sequence[Array], *, drops: bool) -> Tree:
    """Each measured leaf times the factors of its units."""
    leaves = measured_leaves(tree)
    scaled: dict[int, Array] = {}
    for part, of_units in zip(parts, roots, strict=True):
        of_leaves = scale_units(part.pick(leaves), of_units, part.units, drops=drops)
        scaled |= dict(zip(part.positions, of_leaves, strict=True))
    in_order = (scaled[i] for i in range(len(leaves)))
    return jax.tree.map(lambda x: next(in_order) if is_measured(x) else x, tree)


def _report(
    units: Units, clipped: Sequence[_Clipped], ord: float, rules: tuple[Any, ...]
) -> ClipState:
    """The state: its scalars, alike on all devices, and what the rules remember."""
    rules = rules if jax.tree.leaves(rules) else ()
    norms, thresholds, roots = (list(column) for column in zip(*clipped, strict=True))
    axes, factors = _varying(norms), [root * root for root in roots]
    clips = sum((jnp.sum(~(x >= 1), dtype=jnp.float32) for x in factors), jnp.float32(0))
    count = jnp.float32(sum(x.size for x in factors))
    clips, count = sum_over(jnp.stack([clips, count]), axes)
    fraction = clips / jnp.maximum(count, 1)
    if units.names:
        names = [group_name(name) for name in units.names]
        columns = (x[0].astype(jnp.float32) for x in (norms, thresholds, factors))
        by_name = (dict(zip(names, column, strict=True)) for column in columns)
        return ClipState(*by_name, clip_fraction=fraction, rules=rules)
    norm = norms[0][0] if units.is_scalar and units.size else norm_of_leaves(norms, ord, None)
    threshold, factor = _smallest(thresholds, UNBOUNDED, axes), _smallest(factors, 1.0, axes)
    scalars = (x.astype(jnp.float32) for x in (norm, threshold, factor))
    return ClipState(*scalars, clip_fraction=fraction, rules=rules)


def _smallest(arrays: Sequence[Array], if_none: float, axes: frozenset[str]) -> Scalar:
    lowest = [jnp.min(x, initial=if_none) for x in arrays]
    return -max_over(-jnp.min(jnp.stack(lowest)), axes)


def _varying(arrays: Sequence[Array]) -> frozenset[str]:
    return frozenset[str]().union(*map(varying_axes, arrays))
