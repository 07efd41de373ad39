"""Measure norms of gradients, updates and parameters, and write them to a ring buffer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from .._checks import check_choice, check_count, check_length, check_params, check_state, listed
from .._devices import fusion_barrier, pair_of_sums
from .._errors import public, type_error, value_error
from .._run_if import Flag, like_dtypes
from .._states import find_states, has_stepped, metrics, plain_arrays, register_state
from .._types import Array, AxisName, Count, Scalar, Tree
from ..gates._extra_args import has_micro_batch, loss_argument, loss_of
from ..gates._gate import ExtraArgs, check_guard
from ..norms._granularity import Granularity, as_granularity
from ..norms._groups import NormGroups, reduce_axes, table_of_sums
from ..norms._leaves import checked_leaves, norm_dtype, wide_dtype
from ..norms._mask import Mask, mask_leaves
from ..norms._mesh import replicated, reshard_like
from ..norms._norm import squares
from ._rows import MEASURED, MEASURES, TREE, WORDS, Outcome, Row, names_of
from ._taps import read_sums


def _of_tree(column: int) -> property:
    """Return a property with one of the measurements of the whole tree in the last row."""
    return property(lambda x: lax.bitcast_convert_type(_last(x)[..., TREE + column], jnp.float32))


@register_state(*MEASURES, inner="inner_state", role="watch")
class WatchState(NamedTuple):
    """State of `watch`: a ring buffer with one row for each call.

    Attributes:
        step_count: int32[], number of calls.
        rows: The last rows, int32[history, columns], and what they measure.
        inner_state: State of the inner transformation.
    """

    step_count: Scalar
    rows: Row
    inner_state: Tree

    nonfinite_elements, gradient_norm, update_norm, parameter_norm = map(_of_tree, range(4))


def _last(state: WatchState) -> Array:
    """Return the row that was written last."""
    rows = state.rows.values
    place = jnp.expand_dims((state.step_count - 1) % rows.shape[-2], (-2, -1))
    return jnp.take_along_axis(rows, place, -2)[..., 0, :]


@public
def last_row(state: Tree) -> Row:
    """Return the row that the last call of `watch` wrote, for use as an output of `lax.scan`.

    A training loop inside `lax.scan` may be longer than `history`. Return this row from each step,
    and pass the stack of rows to `Monitor.read`.

    Args:
        state: Optimizer state with one state of `watch`.

    Returns:
        A small pytree of arrays.

    Raises:
        TypeError: If `state` contains no state of `watch`, or several.

    Examples:
        >>> import jax, jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = gcx.watch(optax.sgd(0.1))
        >>> params = {"w": jnp.ones(2)}
        >>> def step(state, grads):
        ...     state = tx.update(grads, state, params)[1]
        ...     return state, gcx.last_row(state)
        >>> grads = {"w": jnp.ones((100, 2))}
        >>> _, rows = jax.lax.scan(step, tx.init(params), grads)
        >>> gcx.Monitor(params).read(rows).rows.step[[0, -1]].tolist()
        [0, 99]
    """
    watched = find_watch(state)
    return watched.rows._replace(values=_last(watched))


def find_watch(state: Tree, which: int | None = None) -> WatchState:
    """Return the state of `watch` inside an optimizer state, or number `which` of several."""
    found = find_states(plain_arrays(state), WatchState)
    if not found or (which is None and len(found) > 1):
        places = [jax.tree_util.keystr(path) or "the state itself" for path, _ in found]
        rule, got = "a state with one state of `watch`", listed(places) or type(state).__name__
        hint = "Pass the state of one `gcx.watch`, or its index as `gcx.Monitor(params, which=0)`."
        raise type_error("state", rule, got, hint)
    return found[which or 0][1]


@public
def watch(
    inner: optax.GradientTransformation,
    *,
    history: Count = 64,
    of: Sequence[str] = tuple(MEASURED),
    granularity: Literal["global", "leaf"] | Granularity = "leaf",
    mask: Mask = None,
    axis_name: AxisName = None,
    replica_axis: AxisName = None,
    check_every: Count = 100,
    taps: Tree | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Measure the norms of gradients, updates and parameters, for a `Monitor` to read.

    The update of `inner` is returned unchanged. Each call writes one row into a ring buffer in the
    state: the norms of the whole tree and of each leaf or layer, the loss, what happened to the
    step, and the factors of clips inside. `Monitor.read(state)` reads the rows since its last call
    on the host, detects faults and writes a log. `metrics(state)` contains `gradient_norm`,
    `update_norm`, `parameter_norm` and `nonfinite_elements` of the whole tree.

    Wrap the whole optimizer, including clips and guards, to measure the gradient before clipping
    and to report whether the step was applied. Place `watch` inside `accumulate_gradients` to
    measure once per accumulation window.

    The loss is the extra argument `value` or `loss` of `update`. All extra arguments are also
    passed to `inner`.

    | call | row |
    | --- | --- |
    | a step | its norms; "applied" |
    | a transformation inside skips or holds the step | its gradient; "skipped" or "held" |
    | a wrapper of another library inside skips the step | "held" or, if unknown, "unchanged" |
    | a guard or accumulation outside skips or holds the step | no row |
    | `flush` with an accumulation inside | no gradient |
    | NaN or infinity in a unit | a non-finite norm, and the number of such elements |
    | an update that is partly rounded away | the norm of `(params + update) - params` |
    | a `dynamic_loss_scale` inside | gradient norms after division by the scale |
    | the extra argument `taps=stats` | statistics of taps |
    | the extra argument `batch_id` | this integer, of 32 bits |

    Args:
        inner: Any Optax transformation, except `optax.lookahead`, which must be outside.
        history: Number of rows to keep, at least the number of steps between two reads, 1 to 2^20,
            static. A row has 4 floats for each unit.
        of: Whether to measure only the norm of the "gradient", or also those of the "update" and
            the "parameter", which are measured together.
        granularity: Which elements share a norm, as in `clip_by_norm`. The name of a stacked layer
            contains its index. With "global", only the whole tree is measured. Inside `shard_map`,
            an axis that indexes layers or rows must not be sharded.
        mask: Leaves to measure, as a prefix tree of bools or a function from the parameters to one,
            None for all. The other leaves may have any dtype.
        axis_name: Mapped axes over which every leaf is sharded, required where the array's type
            does not carry the sharding (`pmap`, or `shard_map` with `check_vma=False`).
        replica_axis: Mapped axes along which all devices should have the same parameters, such as
            the data axis inside `shard_map` or `pmap`. None disables the check, which measures the
            parameters whatever `of` contains.
        check_every: Number of steps between two checks of the replicas, >= 1. Each check is one
            all-reduce of one norm for each leaf or layer and device. Steps 0, `check_every`,
            `2 * check_every` and so on are checked.
        taps: Probes of the model from `gradclip_jax.taps.make_probes`, if statistics of taps are
            passed to `update`. Passing statistics is optional for each step.

    Returns:
        An Optax transformation with a `WatchState`.

    Raises:
        ValueError: If a number is out of range, `params` is missing although parameters are
            measured, or the state belongs to another tree.
        TypeError: If `inner` is not a transformation or, during tracing, if a leaf has an integer
            dtype.

    Examples:
        >>> import jax, jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = gcx.watch(gcx.skip_nonfinite(optax.sgd(0.1)))
        >>> params = {"wi": jnp.array([3.0, 4.0]), "wo": jnp.array([1.0])}
        >>> update, state = jax.jit(tx.update), tx.init(params)
        >>> monitor = gcx.Monitor(params)
        >>> for bad in (1.0, jnp.nan):
        ...     grads = {"wi": jnp.array([0.0, 2.0]), "wo": jnp.array([bad])}
        ...     _, state = update(grads, state, params, value=3.2)
        >>> print(*monitor.read(state).incidents, sep="\n")
        step 1: skipped, gradient norm nan, 1 non-finite element, 100 % in wo
    """
    check_guard(inner, axis_name, mask)
    with_step = bool(replica_axis) or not {*of} <= {"gradient"}
    for kind in of:
        check_choice("of", kind, tuple(MEASURED))
    check_length("history", history, "Pass the number of steps to keep.")
    check_count("check_every", check_every, "Pass the number of steps between two checks.")
    inner, parts = optax.with_extra_args_support(inner), as_granularity(granularity)
    tap_names, tap_sums = read_sums("taps", taps)

    def init(params: Tree) -> WatchState:
        # Remove weak types, which would cause recompilation after the first step.
        inner_state = inner.init(params)
        inner_state = like_dtypes(inner_state, inner_state)
        names, clips = names_of(params, parts, mask, taps), _clip_factors(metrics(inner_state))
        size = TREE + 4 * (1 + len(names.units)) + tap_sums.size + len(clips)
        values, clips = jnp.zeros((history, size), jnp.int32), dict.fromkeys(clips)
        return WatchState(jnp.int32(0), Row(values, clips, jnp.uint32(names.checksum)), inner_state)

    def update(updates: Tree, state: Tree, params: Tree | None = None, **extra_args: Any) -> Tree:
        check_state(state, WatchState)
        masked = mask_leaves(mask, updates, params)
        leaves = checked_leaves("updates", masked)
        if params is not None or with_step:
            check_params(updates, params)
        loss, batch_id = loss_of(extra_args, axis_name), extra_args.get("batch_id")
        if batch_id is not None:
            check_count("batch_id", batch_id, "Pass the index of the batch.", low=-(2**31))
        stats = extra_args.get("taps")
        found, sums = read_sums("taps", taps if stats is None else stats)
        if found != tap_names:
            hint = "Pass the probes of the model to `watch`: `watch(optimizer, taps=probes)`."
            raise value_error("taps", f"statistics of {listed(tap_names)}", listed(found), hint)
        output, inner_state = inner.update(updates, state.inner_state, params, **extra_args)

        step = [
            leaves.leaves_like(mask_leaves(mask, x, params)) for x in (output, params) if with_step
        ]
        groups = parts.partition(leaves.arrays, masked)
        table = _measure(leaves.arrays, *step, groups=groups, axis_name=axis_name)
        before, after = metrics(state.inner_state), metrics(inner_state)
        table /= jnp.array([[1, before.get("loss_scale", 1), 1, 1]], jnp.float32)
        differs, device = _other_replica(table[:, -1], replica_axis, state.step_count % check_every)
        events = (Outcome.APPLIED, has_stepped(inner_state)), (Outcome.REPLICA_DIFFERS, differs)
        outcome = _combined(*events, *_flags(extra_args, before, after, with_step))
        ints = 0 if batch_id is None else batch_id, outcome, device
        limits = after.get("skip_threshold", 0), after.get("loss_threshold", 0)
        floats = 0 if loss is None else loss, *limits, table, sums, *_clip_factors(after).values()
        return output, _written(state, ints, floats)._replace(inner_state=inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _measure(
    gradient: Sequence[Array], *step: Sequence[Array], groups: NormGroups, axis_name: AxisName
) -> Array:
    """Measure the whole tree and each norm group, float32[1 + groups, 4].

    The columns are the number of non-finite elements of the gradient, and the norms of gradient,
    update and parameters. Without `step`, the updates and the parameters, their norms are 0.

    The update is measured as `(p + u) - p` with the sum rounded to the dtype of the parameters,
    which is the change that `optax.apply_updates` makes. XLA reuses `p + u` from the optimizer
    step, so the sum is not computed twice.
    """
    dtype = norm_dtype(gradient)

    def of_gradient(g: Array, axes: tuple[int, ...]) -> Array:
        return _sums(axes, (~jnp.isfinite(g)).astype(dtype), squares(g, dtype))

    def of_step(u: Array, axes: tuple[int, ...], p: Array) -> Array:
        old, wide = (x.astype(wide_dtype(x.dtype, dtype)) for x in (p, u))
        new, info = old + wide, jnp.finfo(p.dtype)
        if info.bits < 32:  # XLA would remove a conversion to the narrow dtype and back
            new = lax.reduce_precision(new, 8, info.nmant)  # like bfloat16, without underflow
        return _sums(axes, squares(new - old, dtype), squares(old, dtype))

    def of_groups(terms: Callable[..., Array], *columns: Sequence[Array]) -> Array:
        # With `jit`, the terms are traced once for all leaves of the same shape.
        terms = jax.jit(terms, static_argnums=1)
        # Without the barrier, XLA:CPU duplicates kernels of all leaves for each consumer.
        return fusion_barrier(table_of_sums(terms, *columns, groups=groups, axis_name=axis_name))

    # The sums are separate, because inside `shard_map` the gradient may vary over mesh axes over
    # which `inner` averages it. The sums of the step are then not reduced over these axes.
    sums = of_groups(of_gradient, gradient)
    table = jnp.concatenate([sums, of_groups(of_step, *step) if step else jnp.zeros_like(sums)], 1)
    if groups.axes is not None or groups.labels:
        table = jnp.concatenate([jnp.sum(table, 0, keepdims=True), table])
    # A selection, unlike slices, is fused with the operations that read the table.
    return jnp.where(jnp.arange(4) == 0, table, jnp.sqrt(table)).astype(jnp.float32)


def _sums(axes: tuple[int, ...], *terms: Array) -> Array:
    """Return two sums for each norm of a leaf, float[norms, 2]."""
    sums = pair_of_sums(functools.partial(reduce_axes, jnp.sum, axes=axes), *terms)
    return replicated(sums).reshape(-1, 2)


def _other_replica(norms: Array, axis_name: AxisName, phase: Scalar) -> tuple[Scalar, Scalar]:
    """Return whether the norms of a replica differ, and the index of the one that differs most.

    They are compared in phase 0 of the steps between two checks. Replicas execute the same program
    on the same inputs, so their norms are identical bit for bit.
    """

    def compare(norms: Array) -> tuple[Scalar, Scalar]:
        count = lax.axis_size(axis_name)
        is_own = jnp.arange(count)[:, None] == lax.axis_index(axis_name)
        # `psum`, unlike `all_gather`, returns an array whose type is replicated.
        rows = lax.psum(jnp.where(is_own, norms, 0), axis_name)
        typical = jnp.sort(rows, axis=0)[count // 2]
        distance = jnp.max(jnp.abs(rows - typical), axis=1)
        device = jnp.argmax(distance).astype(jnp.int32)  # of the first NaN, if there is one
        return (distance[device] != 0) & jnp.isfinite(typical).all(), device

    none = jnp.bool_(False), jnp.int32(0)
    return lax.cond(phase == 0, compare, lambda _: none, norms) if axis_name else none


def _clip_factors(found: dict[str, Array]) -> dict[str, Array]:
    """Return the factors of all clips and groups among metrics."""
    return {key: x for key, x in found.items() if key.startswith("clip_factor")}


def _combined(*flags: tuple[int, Flag]) -> Array:
    """Return an integer with all flags that are set."""
    return functools.reduce(jnp.bitwise_or, [jnp.where(x, int(flag), 0) for flag, x in flags])


def _flags(
    extra_args: ExtraArgs, before: dict[str, Array], after: dict[str, Array], with_step: bool
) -> Iterator[tuple[int, Flag]]:
    """Yield flags, and whether they are set, from the arguments and the metrics of a step."""
    yield Outcome.HAS_UNITS, True
    yield Outcome.HAS_GRADIENT, has_micro_batch(extra_args)
    yield Outcome.HAS_UPDATE | Outcome.HAS_PARAMETER, with_step
    yield Outcome.HAS_LOSS, loss_argument(extra_args)[1] is not None
    yield Outcome.HAS_BATCH_ID, extra_args.get("batch_id") is not None
    yield Outcome.HAS_TAPS, extra_args.get("taps") is not None
    yield Outcome.GUARD_FAILED, after.get("guard_failed", 0) > 0
    for key, value in after.items():
        name = key.partition("/")[0]
        if name.startswith("skipped_"):  # the flag of a cause has the name of its metric
            yield Outcome.SKIPPED | WORDS.get(name, 0), value > before[key]
        elif name == "empty_windows":
            yield Outcome.EMPTY_WINDOW, value > before[key]


def _written(state: WatchState, ints: Iterable[Any], floats: Iterable[Any]) -> WatchState:
    """Write a row into the ring buffer."""
    count, values = state.step_count, state.rows.values
    wide = jnp.concatenate([jnp.ravel(jnp.asarray(x, jnp.float32)) for x in floats])
    bits = lax.bitcast_convert_type(wide, jnp.int32)
    row = jnp.concatenate([jnp.array([count, *ints], jnp.int32), bits])[None]
    if row.shape[1] != values.shape[1]:
        got = f"a state with {values.shape[1]} values for each row instead of {row.size}"
        hint = "Call `init(params)` of this `watch`, or convert with `convert_state`."
        raise value_error("state", "the state of this `watch`", got, hint)
    # With explicit mesh axes, norms of sharded leaves have the mesh in their type.
    values = reshard_like(values, row)
    values = lax.dynamic_update_slice_in_dim(values, row, count % len(values), 0)
    rows, count = state.rows._replace(values=values), jnp.asarray(optax.safe_increment(count))
    return state._replace(step_count=count, rows=rows)
