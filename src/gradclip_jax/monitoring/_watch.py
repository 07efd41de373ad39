"""Norms of gradient, update and parameters, unit by unit, and the incidents of a run."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from .._checks import (
    check_axis_name,
    check_bound,
    check_choice,
    check_length,
    check_number,
    check_state,
    check_static,
    check_transformation,
    is_traced,
)
from .._run_if import like_dtypes
from .._states import increment_where, plain_arrays, register_metrics, step_taken
from .._tree_checks import check_inexact
from .._types import Array, AxisName, Count, Number, Scalar, Tree
from ..clipping._clip import leaves_beside
from ..clipping._granularity import Granularity, as_granularity
from ..clipping._incident import IncidentLog, empty_log, gather, names_in, norms_by_unit
from ..clipping._threshold import check_params, first_state
from ._observe import level_rules, loss_of, observe, was_skipped

_NAME = "watch"
_KINDS = ("gradient", "update", "parameter")


@register_metrics(
    *("watch_step", "step_taken", "largest_share", "largest_share_index"),
    *("gradient_norm", "update_norm", "parameter_norm", "update_ratio"),
)
class WatchState(NamedTuple):
    """What `watch` measured at the last call, and the last incidents.

    Attributes:
        step_taken: int32[], 1 if the last call took a step, 0 if it was held or skipped.
        norms: for each of "gradient", "update" and "parameter" that is watched float32[1 + units]:
            the norm of all, then of each unit; NaN at a step that was not measured.
        largest_share: float32[], the largest share of a unit in the squared gradient norm.
        largest_share_index: int32[], which unit it is; `watched_names` has its name.
        levels: the recent norms and losses that a spike is compared with.
        incidents: the `IncidentLog`; its `step_count` is the metric `watch_step`.
        inner_state: the state of the inner transformation.
    """

    step_taken: Scalar
    norms: dict[str, Array]
    largest_share: Scalar
    largest_share_index: Scalar
    levels: Any
    incidents: IncidentLog
    inner_state: Any

    watch_step = property(lambda state: state.incidents.step_count)
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
    return {name or None: values[..., i] for i, name in enumerate(("", *names_in(state.incidents)))}


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
        spike: in standard deviations above the mean of the last 128 values, > 0; both of
            a norm or loss and of its logarithm. inf for none.
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
    check_length(_NAME, "incidents", incidents)
    check_number(_NAME, "spike", spike, "OLMo-core uses 6; pass inf for none.")

    def init(params: Tree) -> WatchState:
        inner_state = inner.init(params)
        log = empty_log(incidents, cut.cut(_NAME, params), params)
        size = 1 + len(names_in(log))
        return WatchState(
            step_taken=jnp.zeros((), jnp.int32),
            norms={kind: jnp.zeros(size, jnp.float32) for kind in ("gradient", *of)},
            largest_share=jnp.zeros((), jnp.float32),
            largest_share_index=jnp.zeros((), jnp.int32),
            levels={key: first_state(rule) for key, rule in level_rules(spike).items()},
            incidents=log,
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
        units, size = cut.cut(_NAME, updates), state.norms["gradient"].size

        def norms_of(tree: Tree) -> Array:
            return norms_by_unit(leaves_beside(updates, tree), units, axes)[:size]

        norms, before = {}, state.inner_state
        if measure and "parameter" in of:
            norms["parameter"], before = _read_first(norms_of(params), before)
        output, after = inner.update(updates, before, params, **extra_args)
        skipped = was_skipped(before, after)
        stepped = step_taken(after).astype(jnp.int32)
        state = state._replace(step_taken=stepped, inner_state=after)
        if not measure:
            norms = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), state.norms)
            log = state.incidents._replace(step_count=increment_where(state.watch_step))
            return output, state._replace(norms=norms, incidents=log)
        gradient, evidence = gather(leaves_beside(updates, updates), units, axes)
        norms["gradient"] = gradient[:size]
        if "update" in of:
            norms["update"] = norms_of(output)
        return output, observe(state, norms, evidence, loss_of(extra_args, axes), skipped, spike)

    return optax.GradientTransformationExtraArgs(init, update)


def _read_first(norms: Array, state: Any) -> tuple[Array, Any]:
    """The norms of the parameters, and the inner state, whose scalars have to wait for them.

    Most optimizers need such a scalar, as a step count, for each update. Without the wait XLA reads
    the parameters while it replaces them, and copies them for that: 2 N more on an H100.
    """
    leaves, structure = jax.tree.flatten(state)
    scalars = [i for i, x in enumerate(leaves) if not np.ndim(x) and _is_number(x)]
    norms, waited = lax.optimization_barrier((norms, [leaves[i] for i in scalars]))
    for i, x in zip(scalars, waited, strict=True):
        leaves[i] = x
    return norms, jax.tree.unflatten(structure, leaves)


def _is_number(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.number)  # a key of random numbers is none
