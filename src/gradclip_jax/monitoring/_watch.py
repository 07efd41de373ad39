"""Measure norms of gradients, updates and parameters during training, and detect faults."""

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._checks import (
    check_axis_name,
    check_choice,
    check_count,
    check_length,
    check_number,
    check_params,
    check_state,
    check_static,
    is_scalar,
    is_traced,
    listed,
    shortened,
)
from .._errors import public, type_error, value_error
from .._leaves import checked_leaves, measured_shapes
from .._mesh import check_bound
from .._run_if import like_dtypes
from .._states import KINDS as STATE_KINDS
from .._states import (
    find_states,
    has_stepped,
    has_updated,
    increment_where,
    plain_arrays,
    register_state,
)
from .._types import Array, AxisName, Count, HostArray, Number, Scalar, Tree
from ..clipping._granularity import Granularity, as_granularity, norm_shapes
from ..gates._extra_args import has_micro_batch
from ..guarding._detect import loss_of
from ..guarding._guard import check_guard
from ..guarding._skip_spikes import FIELDS
from ._evidence import differing_device, evidence, norms_of_step
from ._incident import NOT_GIVEN, IncidentLog, init_log, names_in, note, tap_names_in
from ._levels import KINDS, compare, init_levels
from ._taps import first_nonfinite_of, ratios, read_sums

_OF_GUARDS = {f"{key}_threshold": fields for key, fields in FIELDS.items()}
"""Fields of an incident that a guard may report, and the metrics of the guard with the value and
the number of skips."""

NOT_MEASURED = -1.0
"""Value of a norm that was not measured. NaN would raise an error with `jax_debug_nans`."""


@register_state(
    *("watch_step", "has_updated", "largest_share", "largest_share_index"),
    *("gradient_norm", "update_norm", "parameter_norm", "update_ratio", "taps"),
    inner="inner_state",
    role="watch",
)
class WatchState(NamedTuple):
    """State of `watch`: the norms of the last call and a log of training faults.

    Attributes:
        norms: float32[kinds, 1 + units], one row each for the gradient, the update and the
            parameters, as far as they are measured. The norm of the whole tree is followed by the
            norms of leaves or layers. -1 if the last call did not measure.
        levels: Statistics of previous norms and losses, as returned by `init_levels`.
        incidents: Log of incidents; its `step_count` is the metric `watch_step`.
        tap_sums: Tap statistics of the last call, float32[taps, 2, 5], zeros if none were passed;
            None for a `watch` without taps.
        inner_state: State of the inner transformation.
    """

    norms: Array
    levels: Array
    incidents: IncidentLog
    tap_sums: Tree
    inner_state: Tree

    watch_step = property(lambda state: state.incidents.step_count)
    has_updated = property(lambda state: _has_updated(state).astype(jnp.int32))
    largest_share = property(lambda state: jnp.max(_shares(state), -1))
    largest_share_index = property(lambda state: jnp.argmax(_shares(state), -1).astype(jnp.int32))
    gradient_norm = property(lambda state: _by_name(state, "gradient"))
    update_norm = property(lambda state: _by_name(state, "update"))
    parameter_norm = property(lambda state: _by_name(state, "parameter"))
    update_ratio = property(lambda state: _by_name(state, "ratio"))
    taps = property(lambda state: _of_taps(state))


def _of_taps(state: WatchState) -> dict[str, Array | HostArray] | None:
    """Return a dictionary from tap names to statistics; None without taps."""
    if state.tap_sums is None:
        return None
    sums = plain_arrays(state.tap_sums)
    sums = sums if is_traced(sums) else np.asarray(sums)
    return ratios(tap_names_in(state.incidents), sums, NOT_MEASURED)


def _has_updated(state: WatchState) -> Array:
    """Return whether the update is nonzero or, if it is not measured, whether a step was applied.

    Wrappers from other packages, such as Optax, return zero updates if they skip a step. With
    `optax.partition`, a guard or accumulation may hold only some of the parameters.
    """
    ran, norms = has_updated(state.inner_state), plain_arrays(state.norms)
    if norms.shape[-2] < 2:
        return ran
    update = norms[..., 1, 0]
    return jnp.where(update == NOT_MEASURED, ran, update != 0)


def _shares(state: WatchState) -> Array:
    """Compute each leaf's or layer's fraction of the squared gradient norm."""
    total, of_units = jnp.split(plain_arrays(state.norms)[..., 0, :], [1], -1)
    return jnp.where(total < 0, NOT_MEASURED, jnp.square(of_units / jnp.where(total > 0, total, 1)))


def _by_name(state: WatchState, kind: str) -> dict[str | None, Array | HostArray] | None:
    """Return a dictionary from leaf or layer names to norms or ratios; None if not measured."""
    norms = plain_arrays(state.norms)
    row = KINDS.index("parameter" if kind == "ratio" else kind)
    if row >= norms.shape[-2]:
        return None
    values = norms[..., row, :]
    if kind == "ratio":
        ratio = jnp.where(values > 0, norms[..., 1, :] / jnp.where(values > 0, values, 1), 0)
        values = jnp.where(values < 0, NOT_MEASURED, ratio)
    values = values if is_traced(values) else np.asarray(values)  # one transfer for all units
    return {name or None: values[..., i] for i, name in enumerate(("", *names_in(state.incidents)))}


@public
def watch(
    inner: optax.GradientTransformation,
    *,
    of: Sequence[str] = KINDS,
    granularity: Literal["global", "leaf"] | Granularity = "leaf",
    spike_threshold: Number = 6.0,
    max_incidents: Count = 16,
    axis_name: AxisName = None,
    replica_axis: AxisName = None,
    check_every: Count = 100,
    taps: Tree | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Measure the norms of gradients, updates and parameters, and record training faults.

    The update of `inner` is returned unchanged. `metrics(state)` contains `gradient_norm`,
    `update_norm`, `parameter_norm` and `update_ratio` for the whole tree and for each leaf or
    layer, such as `update_norm/decoder/layers_3/mlp/wi`. `incidents(state)` returns the recorded
    incidents.

    Wrap the whole optimizer, including clips and guards, to measure the gradient before clipping
    and to report whether the step was applied. Place `watch` inside `accumulate_gradients` to
    measure once per accumulation window.

    An incident is a non-finite gradient, update, parameter or loss; an outlier of a norm or the
    loss; a leaf or layer whose norm has risen relative to the others; a gradient that has become
    zero; a device whose parameters differ; or a step that an inner guard skipped. The loss is the
    extra argument `value` or `loss` of `update`. Outliers are not detected in the first 16 steps,
    and thresholds are wider until step 64. From step 16 to 128, a loss or a norm is also an outlier
    if it exceeds 8 times the largest previous value.

    | call | metrics and incidents |
    | --- | --- |
    | a step | its norms, `has_updated` 1 |
    | a transformation inside holds or skips the step | its gradient, `has_updated` 0 |
    | a wrapper of another library inside skips the step | the same, if updates are measured |
    | a guard or accumulation outside holds or skips the step | norms of -1, `has_updated` 0 |
    | a wrapper of another library outside skips the step | those of the last call of `watch` |
    | `flush` with an accumulation inside | gradient norms of -1; the update is measured |
    | the extra argument `measure=False`, static | norms of -1, no incident |
    | NaN or infinity in a unit | a non-finite norm; `largest_share_index` is such a unit |
    | parameters that are all zero | `update_ratio` 0 |
    | an update that is partly rounded away | the norm of `(params + update) - params` |
    | the extra argument `taps=stats` | `metrics` contains `taps/...`; an incident names the first |
    | | non-finite activation, or otherwise the first non-finite cotangent |
    | the extra argument `batch_id` | an incident contains this integer, of 32 bits |

    Args:
        inner: Any Optax transformation, except `optax.lookahead`, which must be outside.
        of: Which norms to measure in addition to the gradient norm: "update", or "parameter", which
            includes "update".
        granularity: Which elements share a norm, as in `clip_by_norm`. The name of a stacked layer
            contains its index. With "global", only the whole tree is measured. Inside `shard_map`,
            an axis that indexes layers or rows must not be sharded.
        spike_threshold: Number of standard deviations above a moving average over about 128 steps,
            > 0. The logarithms of norms are compared, the threshold is multiplied by 1.35 for their
            long tails, and the norm of a leaf is compared relative to the other leaves. A positive
            loss is an outlier only if its logarithm is also an outlier. A norm below twice its
            average (3 times for an update, 1.5 times for a loss) is never an incident. inf disables
            these thresholds.
        max_incidents: Number of incidents to keep, 1 to 2^20, static.
        axis_name: Mapped axes over which every leaf is sharded, required where the array's type
            does not carry the sharding (`pmap`, or `shard_map` with `check_vma=False`).
        replica_axis: Mapped axes along which all devices should have the same parameters, such as
            the data axis inside `shard_map` or `pmap`. None disables the check. Requires
            "parameter".
        check_every: Number of steps between two checks of the replicas, >= 1. Each check is one
            all-reduce of one norm for each leaf or layer and device. Steps 0, `check_every`,
            `2 * check_every` and so on are checked, unless they have `measure=False`.
        taps: Probes of the model from `gradclip_jax.taps.make_probes`, if statistics of taps are
            passed to `update`. Passing statistics is optional for each step.

    Returns:
        An Optax transformation with a `WatchState`. Extra arguments are passed to `inner`.

    Raises:
        ValueError: If `of` contains another name, a number is out of range, `params` is missing
            although parameters are measured, or the state belongs to another tree.
        TypeError: If `inner` is not a transformation or, during tracing, if a leaf has an integer
            dtype.


    Examples:
        >>> import jax, jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = gcx.watch(gcx.skip_nonfinite(optax.sgd(0.1)))
        >>> params = {"wi": jnp.array([3.0, 4.0]), "wo": jnp.array([1.0])}
        >>> update, state = jax.jit(tx.update), tx.init(params)
        >>> for bad in (1.0, jnp.nan):
        ...     grads = {"wi": jnp.array([0.0, 2.0]), "wo": jnp.array([bad])}
        ...     _, state = update(grads, state, params, value=3.2)
        ...     print(round(float(gcx.metrics(state)["update_ratio/wi"]), 4))
        0.04
        0.0
        >>> print(*gcx.incidents(state), sep="\n")
        step 1: skipped, gradient norm NaN; 1 non-finite element in wo; loss 3.2
    """
    axes = check_guard(inner, axis_name)
    inner = optax.with_extra_args_support(inner)
    kinds = _checked_kinds(of)
    cut = as_granularity(granularity)
    check_length("max_incidents", max_incidents)
    check_number("spike_threshold", spike_threshold, "Pass 6, or inf to disable the thresholds.")
    replicas = check_axis_name(replica_axis, "replica_axis")
    check_count("check_every", check_every, "Pass the number of steps between two checks.")
    tap_names, no_sums = ([], None) if taps is None else read_sums("taps", taps)

    def init(params: Tree) -> WatchState:
        leaves = measured_shapes(params)
        units = cut.cut(leaves, params)
        inner_state = inner.init(params)
        log = init_log(int(max_incidents), params, units, tap_names)
        sizes = np.zeros(units.size)
        for leaf, i in zip(leaves, units.entries, strict=True):
            sizes[i] += np.size(leaf)
        counts = [math.prod(shape) for shape in norm_shapes(units, leaves)]
        is_empty = np.repeat(sizes == 0, counts).tolist() or [True]
        norms = jnp.full((len(kinds), 1 + len(is_empty)), NOT_MEASURED, jnp.float32)
        # Remove weak types, which would cause recompilation after the first step.
        inner_state = like_dtypes(inner_state, inner_state)
        sums = None if no_sums is None else jnp.zeros(no_sums.shape, jnp.float32)
        return WatchState(norms, init_levels(len(kinds), is_empty), log, sums, inner_state)

    def update(updates: Tree, state: Tree, params: Tree | None = None, **extra_args: Any) -> Tree:
        measure, stats = extra_args.pop("measure", True), extra_args.pop("taps", None)
        batch_id = _checked_batch_id(extra_args.pop("batch_id", None))
        sums = no_sums if stats is None or not measure else _checked_sums(stats, tap_names)
        sums = None if sums is None else jnp.asarray(sums, jnp.float32)
        leaves = checked_leaves("updates", updates)
        check_bound(axes)
        check_bound(replicas, "replica_axis")
        check_state(state, WatchState)
        check_static("measure", measure)
        if params is not None or "parameter" in kinds:
            check_params(updates, params)
        before, log = state.inner_state, state.incidents
        output, after = inner.update(updates, before, params, **extra_args)
        if not measure:
            norms = jnp.full_like(state.norms, NOT_MEASURED)
            log = log._replace(step_count=increment_where(log.step_count))
            return output, WatchState(norms, state.levels, log, sums, after)
        units, loss = cut.cut(leaves.arrays, updates), loss_of(extra_args, axes)
        step, ran = None, has_stepped(after)
        if len(kinds) > 1:
            # If `params` is None, pass the update twice, because `(u + u) - u` is u.
            step = leaves.beside(output), leaves.beside(output if params is None else params)
        norms, bad = norms_of_step(leaves.arrays, step, units, axes)
        has_gradient = has_micro_batch(extra_args)
        norms = jnp.where(has_gradient, norms, norms.at[0].set(0))
        bad = jnp.where(has_gradient, bad, 0)
        if len(kinds) > 1:  # an update of zero does not change a non-finite parameter
            is_zero = ~ran & ~jnp.isfinite(norms[2])
            norms = norms.at[1].set(jnp.where(is_zero, 0, norms[1]))
        norms = norms[: len(kinds)]
        _check_shape(state.norms, norms)
        guards, ran, outcome = _outcome(before, after, norms, ran)
        conditions = {"has_gradient": has_gradient, "is_step": ran}
        found, levels = compare(state.levels, norms, loss, spike_threshold, **conditions)
        fields, flags = evidence(norms, bad, found)
        fields["norm"] = jnp.where(has_gradient, norms[0, 0], NOT_GIVEN)
        norms = jnp.where(has_gradient, norms, norms.at[0].set(NOT_MEASURED))
        fields["loss"] = loss
        if stats is not None:
            fields["activation"], fields["cotangent"] = first_nonfinite_of(sums)
        for key, skips, value in guards:
            if key in fields:
                # If a guard skipped the step, record its threshold and the norm of its update.
                fields[key] = jnp.where(skips, value, fields[key])
        if replicas and "parameter" in kinds:
            is_due = log.step_count % check_every == 0
            flags["replica"], fields["device"] = differing_device(norms[2], replicas, is_due)
        log = note(log, fields, flags, batch_id, **outcome)
        return output, WatchState(norms, levels, log, sums, after)

    return optax.GradientTransformationExtraArgs(init, update)


def _checked_kinds(of: Sequence[str]) -> tuple[str, ...]:
    """Validate `of`, and return the first 1, 2 or 3 of `KINDS`."""
    if isinstance(of, str) or not isinstance(of, Sequence):
        hint = 'Pass for example ("gradient", "update").'
        raise type_error("of", f"a sequence of {', '.join(map(repr, KINDS))}", shortened(of), hint)
    for kind in of:
        check_choice("of", kind, KINDS)
    return KINDS[: 1 + max(map(KINDS.index, of), default=0)]


def _checked_sums(stats: Tree, tap_names: list[str]) -> Array:
    """Stack the statistics of all taps; raise if they do not match the probes."""
    found, sums = read_sums("taps", stats)
    if found != tap_names:
        rule = (
            f"statistics of {listed(tap_names)}"
            if tap_names
            else "omitted if `watch` has no probes"
        )
        hint = "Pass the probes of the model to `watch`: `watch(optimizer, taps=probes)`."
        raise value_error("taps", rule, f"statistics of {listed(found)}", hint)
    return sums


def _checked_batch_id(batch_id: Array | int | None) -> Array | int | None:
    if batch_id is None:
        return None
    if not is_scalar(batch_id, jnp.integer):
        hint = "Pass the index of the batch in the order of the data."
        raise type_error("batch_id", "an integer", shortened(batch_id), hint)
    if not is_traced(batch_id) and abs(int(batch_id)) >= 2**31:
        rule, hint = "between -2^31 and 2^31", "Pass the index of a batch instead of an example."
        raise value_error("batch_id", rule, shortened(batch_id), hint)
    return batch_id


def _check_shape(norms: Array, measured: Array) -> None:
    """Raise if the state belongs to other parameters or to a `watch` with other arguments."""
    if norms.shape != measured.shape:
        hint = "Call `init(params)` of this `watch`, or convert with `convert_state`."
        rule = "the state of this `watch`"
        got = f"a state with norms of shape {list(norms.shape)} instead of {list(measured.shape)}"
        raise value_error("state", rule, got, hint)


def _outcome(
    before: Tree, after: Tree, norms: Array, ran: Scalar
) -> tuple[list[tuple[str, Scalar, Scalar]], Scalar, dict[str, Scalar]]:
    """Return thresholds of inner guards, whether the optimizer ran, and the outcome of the step.

    The thresholds are tuples of the name of an incident field, whether the guard skipped, and the
    value of the field.
    """
    guards: list[tuple[str, Scalar, Scalar]] = []
    skipped, factor = jnp.array(False), jnp.float32(1)
    states = find_states(before, tuple(STATE_KINDS)), find_states(after, tuple(STATE_KINDS))
    for (_, old), (_, new) in zip(*states, strict=True):
        names = STATE_KINDS[type(new)].metrics
        for x in jax.tree.leaves(new.clip_factor) if "clip_factor" in names else ():
            factor = jnp.minimum(factor, x)
        counts = [n for n in names if n.startswith("skipped_") and getattr(new, n) is not None]
        skips = {name: getattr(new, name) > getattr(old, name) for name in counts}
        skipped = functools.reduce(jnp.logical_or, skips.values(), skipped)
        for field, (name, count) in _OF_GUARDS.items():
            if count in skips:
                guards.append((field, skips[count], getattr(new, name)))
    stepped = ran
    outcome = {"skipped": skipped}
    if len(norms) > 1:
        # With `optax.partition`, some parameters may change although others are held.
        stepped = norms[1, 0] != 0
        outcome["unchanged"] = ran & ~stepped & (norms[0, 0] != 0)
        ran |= stepped
    outcome["held"] = ~skipped & ~ran
    return guards, ran, outcome | {"clipped": stepped & (factor < 1)}
