"""Norms of gradient, update and parameters, unit by unit, and the incidents of a run."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._checks import check_bound, check_choice, check_number, check_state, check_static, is_traced
from .._errors import public
from .._run_if import like_dtypes
from .._states import has_updated, increment_where, plain_arrays, register_metrics
from .._tree_checks import check_inexact
from .._types import UNBOUNDED, Array, AxisName, Count, Number, Tree
from ..clipping._clip import leaves_beside
from ..clipping._granularity import Granularity, as_granularity
from ..clipping._norm import measured_leaves
from ..clipping._threshold import check_params
from ..guarding._guard import check_guard
from ..guarding._signal import loss_of
from ._evidence import evidence, measure_step, measure_units
from ._incident import OF_GUARDS, IncidentLog, log_maker, names_in, note
from ._metrics import metrics
from ._spikes import compare

_KINDS = ("gradient", "update", "parameter")


@register_metrics(
    *("watch_step", "has_updated", "largest_share", "largest_share_index"),
    *("gradient_norm", "update_norm", "parameter_norm", "update_ratio"),
)
class WatchState(NamedTuple):
    """What `watch` measured at the last call, and the last incidents.

    Attributes:
        norms: for each of "gradient", "update" and "parameter" that is watched float32[1 + units]:
            the norm of all, then of each unit; NaN at a step that was not measured. The "ratio" of
            the last two if both are watched.
        levels: float32[3, 3 + units], what norms and losses are compared with.
        incidents: the `IncidentLog`; its `step_count` is the metric `watch_step`.
        inner_state: the state of the inner transformation.
    """

    norms: dict[str, Array]
    levels: Array
    incidents: IncidentLog
    inner_state: Any

    watch_step = property(lambda state: state.incidents.step_count)
    has_updated = property(lambda state: has_updated(state.inner_state).astype(jnp.int32))
    largest_share = property(lambda state: jnp.max(_shares(state), -1))
    largest_share_index = property(lambda state: jnp.argmax(_shares(state), -1).astype(jnp.int32))
    gradient_norm = property(lambda state: _by_name(state, "gradient"))
    update_norm = property(lambda state: _by_name(state, "update"))
    parameter_norm = property(lambda state: _by_name(state, "parameter"))
    update_ratio = property(lambda state: _by_name(state, "ratio"))


def _shares(state: WatchState) -> Array:
    """The share of each unit in the squared norm of the gradient."""
    total, of_units = jnp.split(plain_arrays(state.norms["gradient"]), [1], -1)
    return jnp.square(of_units / jnp.where(total > 0, total, 1))


def _by_name(state: WatchState, kind: str) -> dict[str | None, Any] | None:
    """The norms, or their ratios, of all and of each unit; None where they are not watched."""
    if kind not in state.norms:
        return None
    values = plain_arrays(state.norms[kind])
    values = values if is_traced(values) else np.asarray(values)  # one transfer for all units
    return {name or None: values[..., i] for i, name in enumerate(("", *names_in(state.incidents)))}


@public
def watch(
    inner: optax.GradientTransformation,
    *,
    of: Sequence[str] = ("gradient", "update", "parameter"),
    granularity: Literal["global", "leaf"] | Granularity = "leaf",
    spike_threshold: Number = 6.0,
    max_incidents: Count = 16,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Measures gradient, update and parameters, unit by unit, and keeps the last incidents.

    The update of `inner` passes unchanged. `metrics(state)` has `gradient_norm`, `update_norm`,
    `parameter_norm` and `update_ratio`, each of the whole tree and of each unit, such as
    `update_norm/decoder/layers_3/mlp/wi`. `incidents(state)` says what happened.

    Put it around everything, clips and guards too: then it sees the gradient as it came in and
    whether the step was taken. Put it inside an accumulation whose held steps are to cost nothing.

    An incident is a gradient, update or loss that is not finite, a gradient norm or a loss far
    above its usual level, a unit that has risen far beside the others, or a step that a guard
    inside skipped. The loss is the extra argument `value` or `loss` of `update`.

    | call | what is reported |
    | --- | --- |
    | a step | its norms, `has_updated` 1 |
    | held or skipped by what is inside | its gradient, an update of 0, `has_updated` 0 |
    | held or skipped by what is around it | nothing new: `watch_step` stays |
    | with the extra argument `measure=False`, static | NaN for all norms, and no incident |
    | NaN or infinity in a unit | its norm so; `largest_share_index` is such a unit |
    | parameters that are all zero | `update_ratio` 0 |
    | an update that is rounded away | its norm is of what is added: `(params + update) - params` |

    Args:
        inner: any Optax transformation.
        of: what is measured: "update", "parameter", and the gradient, which always is.
        granularity: of what norms are taken, as for `clip_by_norm`. A stacked layer is named by
            its index. "global" names no unit. Inside `shard_map` no unit of a leaf may be spread
            over devices along an axis that indexes units.
        spike_threshold: in standard deviations of the logarithm above its moving average of
            about 128 steps, > 0; of a loss both of its logarithm, if it has one, and of itself. A
            unit is compared in proportion to the others, by half as many again. inf for none.
        max_incidents: how many are kept, 1 to 2^20, static.
        axis_name: mapped axes over which every leaf is a shard, where types cannot tell (inside
            `pmap`, or `shard_map` with `check_vma=False`).

    Returns:
        An Optax transformation with a `WatchState`. It passes extra arguments on.

    Raises:
        ValueError: `of` names something else; a number is out of range; `params` is missing where
            parameters are watched.
        TypeError: `inner` is no transformation; when traced, a leaf is not inexact.

    Examples:
        >>> import jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = gcx.watch(gcx.skip_nonfinite(optax.sgd(0.1)))
        >>> params = {"wi": jnp.array([3.0, 4.0]), "wo": jnp.array([1.0])}
        >>> state = tx.init(params)
        >>> for bad in (1.0, jnp.nan):
        ...     grads = {"wi": jnp.array([0.0, 2.0]), "wo": jnp.array([bad])}
        ...     _, state = tx.update(grads, state, params, value=3.2)
        ...     print(round(float(gcx.metrics(state)["update_ratio/wi"]), 4))
        0.04
        0.0
        >>> print(*gcx.incidents(state), sep="\n")
        step 1: skipped, gradient norm NaN; 1 bad element in wo; loss 3.2
    """
    axes = check_guard(inner, axis_name)
    inner = optax.with_extra_args_support(inner)
    for kind in of:
        check_choice("of", kind, _KINDS)
    cut, make_log = as_granularity(granularity), log_maker(max_incidents)
    check_number("spike_threshold", spike_threshold, "OLMo-core uses 6; pass inf for none.")

    kinds = ("gradient", *of, *(["ratio"] if {"update", "parameter"} <= {*of} else []))

    def init(params: Tree) -> WatchState:
        inner_state, log = inner.init(params), make_log(params, cut.cut(params))
        size = 1 + max(len(names_in(log)), 1)  # all leaves together are one unit without a name
        norms = {kind: jnp.zeros(size, jnp.float32) for kind in kinds}
        # Not weakly typed, as what comes out of a step is not: one trace for all steps.
        inner_state = like_dtypes(inner_state, inner_state)
        return WatchState(norms, jnp.zeros((3, size + 2), jnp.float32), log, inner_state)

    def update(updates: Tree, state: Any, params: Tree | None = None, **extra_args: Any) -> Any:
        measure = extra_args.pop("measure", True)
        check_inexact("updates", updates)
        check_bound(axes)
        check_state(state, WatchState)
        check_static("measure", measure)
        if params is not None or "parameter" in of:
            check_params(updates, params)
        before, log = state.inner_state, state.incidents
        output, after = inner.update(updates, before, params, **extra_args)
        if not measure:
            norms = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), state.norms)
            log = log._replace(step_count=increment_where(log.step_count))
            return output, WatchState(norms, state.levels, log, after)
        units, loss = cut.cut(updates), loss_of(extra_args, axes)
        gradient, bad = measure_units(measured_leaves(updates), units, axes)
        norms = {"gradient": gradient}
        if {"update", "parameter"} & {*of}:
            # Without parameters the update takes their place: (u + u) - u is u.
            trees = output, output if params is None else params
            added, before_it = (leaves_beside(updates, tree) for tree in trees)
            update, parameter = measure_step(added, before_it, units, axes)
            ratio = jnp.where(parameter > 0, update / jnp.where(parameter > 0, parameter, 1), 0)
            norms |= dict(update=update, parameter=parameter, ratio=ratio)
        norms = {kind: norms[kind] for kind in kinds}
        thresholds, rises, levels = compare(state.levels, gradient, loss, spike_threshold)
        fields = evidence(gradient, bad, rises) | thresholds
        fields |= {"loss": loss, "update_threshold": UNBOUNDED}
        fields["update_norm"] = norms["update"][0] if "update" in of else None
        return output, WatchState(norms, levels, _noted(log, fields, before, after), after)

    return optax.GradientTransformationExtraArgs(init, update)


def _noted(log: IncidentLog, fields: dict[str, Any], before: Any, after: Any) -> IncidentLog:
    """The incidents after a step, with what the clips and guards inside say of it."""
    past, present = metrics(before), metrics(after)

    def skips(report: dict[str, Array]) -> Any:
        return sum(count for key, count in report.items() if key.startswith("skipped_"))

    skipped = jnp.asarray(skips(present) > skips(past))
    # A guard that skipped had thresholds of its own, and may have measured the update, now zero.
    for key, name in OF_GUARDS.items():
        if key in fields and name in present:
            fields[key] = jnp.where(skipped, present[name], fields[key])
    stepped, factor = has_updated(after), present.get("clip_factor", 1)
    clipped, held = stepped & (factor < 1), ~skipped & ~stepped
    return note(log, fields, skipped=skipped, held=held, clipped=clipped)
