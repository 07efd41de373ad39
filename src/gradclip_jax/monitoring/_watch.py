"""Norms of gradient, update and parameters, unit by unit, and the incidents of a run."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._checks import (
    check_axis_name,
    check_bound,
    check_choice,
    check_number,
    check_state,
    check_static,
    check_transformation,
    check_window,
    error_message,
    is_traced,
)
from .._run_if import like_dtypes
from .._states import find_states, increment_where, plain_arrays, register_metrics, step_taken
from .._tree_checks import check_inexact
from .._types import Array, AxisName, Count, Number, Scalar, Tree
from ..clipping._clip import leaves_beside
from ..clipping._granularity import Granularity, as_granularity
from ..clipping._threshold import check_params, first_state
from ._incident import ROW
from ._names import unit_names
from ._observe import (
    bad_elements,
    joined_norms,
    level_rules,
    loss_of,
    observe,
    was_skipped,
)

_NAME = "watch"
_KINDS = ("gradient", "update", "parameter")
_COUNTS = ("watch_step", "step_taken", "largest_share_index", "incident_count", "incident_kind")


@register_metrics(
    *(*_COUNTS, "incident_step", "largest_share"),
    *("gradient_norm", "update_norm", "parameter_norm", "update_ratio"),
)
class WatchState(NamedTuple):
    """What `watch` measured at the last call, and the last incidents.

    Attributes:
        watch_step: int32[], calls so far, saturating.
        step_taken: int32[], 1 if the last call took a step, 0 if it was held or skipped.
        norms: for each of "gradient", "update" and "parameter" that is watched float32[1 + units]:
            the norm of all, then of each unit; NaN at a step that was not measured.
        largest_share: float32[], the largest share of a unit in the squared gradient norm.
        largest_share_index: int32[], which unit it is; `watched_names` has its name.
        incident_count: int32[], saturating.
        incident_step: int32[], the step of the last incident, counted from 0; -1 before the first.
        incident_kind: int32[], its kind, a sum of the flags of `incidents`.
        incident_rows: int32[incidents, columns], the last incidents; `incidents` reads them.
        levels: the recent norms and losses, from which a spike stands out.
        names: a dict with one key, the names of all units, and no leaf: a checkpoint has no place
            for strings.
        inner_state: the state of the inner transformation.
    """

    watch_step: Scalar
    step_taken: Scalar
    norms: dict[str, Array]
    largest_share: Scalar
    largest_share_index: Scalar
    incident_count: Scalar
    incident_step: Scalar
    incident_kind: Scalar
    incident_rows: Array
    levels: Any
    names: Any
    inner_state: Any

    gradient_norm = property(lambda state: _by_name(state, "gradient"))
    update_norm = property(lambda state: _by_name(state, "update"))
    parameter_norm = property(lambda state: _by_name(state, "parameter"))
    update_ratio = property(lambda state: _by_name(state, "update", over="parameter"))


def _by_name(state: WatchState, kind: str, over: str | None = None) -> dict[str | None, Any] | None:
    """The norms, or their ratios, of all and of each unit; None where they are not watched."""
    if kind not in state.norms or over not in (None, *state.norms):
        return None
    # One transfer for all units, in place of an operation for each.
    norms = jax.tree.map(lambda x: x if is_traced(x) else np.asarray(x), plain_arrays(state.norms))
    values = norms[kind]
    if over:
        is_zero = (norms[over] == 0).astype(values.dtype)  # as before the first step
        values = values / (norms[over] + is_zero) * (1 - is_zero)
    return {name or None: values[..., i] for i, name in enumerate(("", *names_in(state)))}


def names_in(state: WatchState) -> list[str]:
    """The names of the units."""
    (joined,) = state.names
    return joined.split("\n") if joined else []


def watch(
    inner: optax.GradientTransformation,
    *,
    of: Sequence[str] = ("gradient", "update", "parameter"),
    granularity: Literal["global", "leaf"] | Granularity = "leaf",
    spike: Number = 6.0,
    incidents: Count = 16,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Measures gradient, update and parameters, unit by unit, and keeps the last incidents.

    The update of `inner` passes unchanged. `metrics(state)` has `gradient_norm`, `update_norm`,
    `parameter_norm` and `update_ratio`, each of the whole tree and of each unit, such as
    `update_norm/decoder/layers_3/mlp/wi`. `incidents(state)` says what happened.

    Put it around everything, clips and guards too: then it sees the gradient as it came in and
    whether the step was taken. Put it inside an accumulation whose held steps are to cost nothing.

    An incident is a gradient, update or loss that is not finite, a gradient norm or a loss far
    above its last 128 values, or a step that a guard inside skipped. The loss is the extra
    argument `value` or `loss` of `update`.

    | call | what is reported |
    | --- | --- |
    | a step | its norms, `step_taken` 1 |
    | held or skipped by what is inside | its gradient, an update of 0, `step_taken` 0 |
    | held or skipped by what is around it | nothing new: `watch_step` stays |
    | with the extra argument `measure=False`, static | NaN for all norms, and no incident |
    | NaN or infinity in a unit | its norm so; `largest_share_index` is the unit with most |
    | parameters that are all zero | `update_ratio` 0 |

    Args:
        inner: any Optax transformation.
        of: what is measured: "update", "parameter", and the gradient, which always is.
        granularity: of what norms are taken, as for `clip_by_norm`. A stacked layer is named by
            its index. "global" names no unit. Inside `shard_map` no unit of a leaf may be spread
            over devices along an axis that indexes units.
        spike: in standard deviations above the mean of the last 128 values, > 0; for a norm both of
            itself and of its logarithm. inf for none.
        incidents: how many are kept, 1 to 2^20, static.
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
    check_transformation(_NAME, "inner", inner)
    inner = optax.with_extra_args_support(inner)
    for kind in of:
        check_choice(_NAME, "of", kind, _KINDS)
    cut, axes = as_granularity(_NAME, granularity), check_axis_name(_NAME, axis_name)
    check_window(_NAME, "incidents", incidents)
    check_number(_NAME, "spike", spike, "OLMo-core uses 6; pass inf for none.")

    def init(params: Tree) -> WatchState:
        inner_state = inner.init(params)
        names = unit_names(cut.cut(_NAME, params), params)
        return WatchState(
            **{name: jnp.zeros((), jnp.int32) for name in _COUNTS},
            norms={kind: jnp.zeros(1 + len(names), jnp.float32) for kind in ("gradient", *of)},
            largest_share=jnp.zeros((), jnp.float32),
            incident_step=jnp.full((), -1, jnp.int32),
            incident_rows=jnp.zeros((int(incidents), len(ROW)), jnp.int32),
            levels={key: first_state(rule) for key, rule in level_rules(spike).items()},
            names={"\n".join(names): None},
            # Not weakly typed, as what comes out of a step is not: one trace for all steps.
            inner_state=like_dtypes(inner_state, inner_state),
        )

    def update(
        updates: Tree,
        state: Any,
        params: Tree | None = None,
        measure: bool = True,
        **extra_args: Any,
    ) -> tuple[Tree, WatchState]:
        check_inexact(_NAME, "updates", updates)
        check_bound(_NAME, axes)
        check_state(_NAME, state, WatchState)
        check_static(_NAME, "measure", measure)
        if "parameter" in of:
            check_params(_NAME, updates, params)
        before = state.inner_state
        output, after = inner.update(updates, before, params, **extra_args)
        skipped = was_skipped(before, after)
        state = state._replace(
            watch_step=increment_where(state.watch_step),
            step_taken=step_taken(after).astype(jnp.int32),
            inner_state=after,
        )
        if not measure:
            norms = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), state.norms)
            return output, state._replace(norms=norms)
        trees = {"gradient": updates, "update": output, "parameter": params}
        units = cut.cut(_NAME, updates)
        leaves = {kind: leaves_beside(updates, trees[kind]) for kind in state.norms}
        size = state.norms["gradient"].size
        norms = {kind: joined_norms(x, units, size, axes) for kind, x in leaves.items()}
        bad = bad_elements(leaves["gradient"], units, axes)
        loss = loss_of(extra_args, axes)
        return output, observe(state, norms, bad, loss, skipped, spike)

    return optax.GradientTransformationExtraArgs(init, update)


def watch_state(function: str, state: Any) -> WatchState:
    """The first `WatchState` in a state."""
    found = find_states(state, WatchState)
    if not found:
        rule, hint = "a state with a `WatchState`", "Put `gcx.watch` around the optimizer."
        raise TypeError(error_message(function, "state", rule, type(state).__name__, hint))
    return found[0][1]
