"""Measure norms of gradients, updates and parameters, and write them to a ring buffer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from .._checks import check_choice, check_count, check_length, check_params
from .._devices import MAX_STACKED_SIZE, fusion_barrier, pair_of_sums, stack, stackable
from .._errors import named, public, type_error, value_error
from .._format import listed
from .._metrics import collect_metrics
from .._run_if import like_dtypes
from .._states import check_optimizer_state, check_state, find_states, plain_arrays
from .._types import Array, AxisName, Count, Scalar, Tree, as_pytree
from ..guarding._loss_scale import LossScaleState
from ..norms._granularity import Granularity, as_granularity
from ..norms._groups import NormGroups, num_slices
from ..norms._leaves import checked_leaves, leaves_at, norm_dtype, wide_dtype
from ..norms._mask import Mask, included_places, mask_leaves
from ..norms._mesh import axis_index, axis_names, check_axis_name, replicated, reshard_like
from ..norms._reduce import reduce_axes, reduce_groups, squares
from ..wrappers._accumulation import AccumulationState, micro_batch_of
from ..wrappers._execute import apply_updates
from ..wrappers._extra_args import ExtraArgs, loss_argument, loss_of
from ..wrappers._guard import Measure, check_guard_arguments
from ..wrappers._state import has_flag, outcome_of
from ..wrappers._update import InPlaceUpdate
from ._layout import (
    MEASURED,
    Names,
    Outcome,
    PackedRows,
    RowValues,
    layout,
    names_of,
    num_columns,
)
from ._taps import SHAPE, read_sums, tap_names


class WatchState(NamedTuple):
    """State of `watch`: a ring buffer with one row for each call.

    Attributes:
        step_count: int32[], number of calls.
        rows: Ring buffer of the last rows: a `PackedRows` whose values are int32[history, columns].
        inner_state: State of the inner transformation.
    """

    step_count: Scalar
    rows: PackedRows
    inner_state: Tree

    def step_metrics(self) -> dict[str, Array]:
        """Return the measurements of the whole tree in the last row, as entries of `metrics`."""
        names = "nonfinite_elements", "grad_norm", "update_norm", "parameter_norm"
        values = _last_measurements(self.rows.values, self.step_count)
        return dict(zip(names, values, strict=True))

    def continued_from(self, earlier: WatchState) -> WatchState:
        """Return this initial state with the step count of a state that has another `history`."""
        return self._replace(step_count=earlier.step_count)


@jax.jit
def _last_measurements(rows: Array, step_count: Array) -> tuple[Array, ...]:
    """Return the measurements of the whole tree in the row that was written last."""
    of_tree = layout(Names())["norms"].columns  # the columns of the units, if any, follow
    bits = _last(rows, step_count)[..., of_tree]
    return tuple(jnp.moveaxis(lax.bitcast_convert_type(bits, jnp.float32), -1, 0))


@jax.jit  # outside jit, constants would be transferred to the device one by one
def _last(rows: Array, step_count: Array) -> Array:
    """Return the row that was written last."""
    place = jnp.expand_dims((step_count - 1) % rows.shape[-2], (-2, -1))
    return jnp.take_along_axis(rows, place, -2)[..., 0, :]


@public
def last_row(state: Tree) -> PackedRows:
    """Return the row that the last call of `watch` wrote, for use as an output of `lax.scan`.

    A training loop inside `lax.scan` may run for more than `history` steps. Return this row from
    each step, and pass the stack of rows to `Monitor.read`.

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
    return watched.rows._replace(values=_last(watched.rows.values, watched.step_count))


def find_watch(state: Tree, which: int | None = None) -> WatchState:
    """Return the state of `watch` in an optimizer state; `which` selects one of several."""
    check_optimizer_state(state)
    hint = "Pass 0 for the outermost `watch`."
    if which is not None:
        check_count("which", which, hint, low=0)
    found = find_states(plain_arrays(state), WatchState)
    if not found or (which is None and len(found) > 1):
        places = [jax.tree_util.keystr(path) or "the state itself" for path, _ in found]
        rule, got = "a state with one state of `watch`", listed(places) or type(state).__name__
        hint = "Pass the state of one `gcx.watch`, or its index as `gcx.Monitor(params, which=0)`."
        raise type_error("state", rule, got, hint)
    if which is not None and which >= len(found):
        rule = f"the index of one of {len(found)} states of `watch`"
        raise value_error("which", rule, which, hint)
    return found[which or 0][1]


@public
def watch(
    inner: optax.GradientTransformation,
    *,
    history: Count = 64,
    of: Sequence[str] = tuple(MEASURED),
    granularity: Literal["global", "leaf"] | Granularity = "leaf",
    trainable: Mask = None,
    axis_name: AxisName = None,
    replica_axis: AxisName = None,
    check_every: Count = 100,
    taps: Tree | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Measure the norms of gradients, updates and parameters, for a `Monitor` to read.

    The update of `inner` is returned unchanged. Each call writes one row into a ring buffer in the
    state: the norms of the whole tree and of each leaf or layer, the loss, the outcome of the step,
    and the factors of clips inside `inner`. `Monitor.read(state)` reads the rows since its last
    call on the host, detects faults and writes a log. `metrics(state)` contains `grad_norm`,
    `update_norm`, `parameter_norm` and `nonfinite_elements` of the whole tree.

    Wrap the whole optimizer, including clips and guards, to measure the gradient before clipping
    and to report whether the step was applied. Place `watch` inside `accumulate_gradients` to
    measure once per accumulation window.

    The loss is the extra argument `value` or `loss` of `update`. All extra arguments are also
    passed to `inner`.

    | call | row |
    | --- | --- |
    | a step | its norms; "applied" |
    | a guard inside skips the step | its gradient; "skipped" |
    | an accumulation inside only adds the micro-batch | its gradient; "accumulated" |
    | a wrapper of another library inside skips the step | "accumulated" |
    | a guard or accumulation outside does not run `watch` | no row |
    | `flush` with an accumulation inside | no gradient |
    | NaN or infinity in a unit | a non-finite norm, and the number of such elements |
    | an update that is partly rounded away | the norm of `(params + update) - params` |
    | a `dynamic_loss_scale` inside | gradient norms after division by the scale |
    | the extra argument `taps=stats` | statistics of taps |
    | the extra argument `batch_id` | this integer, of 32 bits |

    Args:
        inner: Any Optax transformation, except `optax.lookahead`, which must be outside.
        history: Number of rows to keep, a static integer from 1 to 2^20, at least the number of
            steps between two reads. A row has 4 floats for each leaf or layer.
        of: Norms to measure: `("gradient",)`, or also "update" and "parameter", which are measured
            together.
        granularity: Which elements share a norm, as in `clip_by_norm`. The name of a stacked layer
            contains its index. With "global", only the whole tree is measured. Inside `shard_map`,
            an axis that indexes layers or rows must not be sharded.
        trainable: Leaves to measure, as a prefix tree of bools or a function `params -> bools`;
            None measures all leaves. Other leaves may have any dtype, and their updates do not
            change.
        axis_name: Mapped axes over which every leaf is sharded, required where the array's type
            does not carry the sharding (`pmap`, or `shard_map` with `check_vma=False`), but not
            after `psum` or `pmean`.
        replica_axis: Mapped axes along which all devices should have the same parameters, such as
            the data axis inside `shard_map` or `pmap`. None disables the check. The check also
            measures updates and parameters, even if `of` does not contain them.
        check_every: Number of steps between two checks of the replicas, >= 1. Each check is one
            all-reduce of one norm for each leaf or layer and device. Steps 0, `check_every`,
            `2 * check_every` and so on are checked.
        taps: Probes of the model from `gradclip_jax.taps.make_probes`, required if `update`
            receives statistics of taps. Any step may omit the statistics.

    Returns:
        An Optax transformation with a `WatchState`.

    Raises:
        ValueError: If a number is out of range, if `params` is required but missing, or if the
            state was initialized for another tree.
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
    check_guard_arguments(inner, axis_name, trainable)
    check_axis_name(replica_axis, "replica_axis")
    if not isinstance(of, Sequence) or isinstance(of, str):
        hint = 'Pass for example `of=("gradient",)`.'
        raise type_error("of", "a sequence of names", type(of).__name__, hint)
    for kind in of:
        check_choice("of", kind, tuple(MEASURED))
    check_length("history", history, "Pass the number of steps to keep.")
    check_count("check_every", check_every, "Pass the number of steps between two checks.")
    update = WatchUpdate(
        optax.with_extra_args_support(inner),
        granularity=as_granularity(granularity),
        trainable=trainable,
        axis_name=axis_name,
        replica_axis=replica_axis,
        with_step=bool(replica_axis) or not {*of} <= {"gradient"},
        check_every=int(check_every),
        taps=tuple(tap_names("taps", taps)),
    )
    init = jax.tree_util.Partial(_init, update, int(history))
    return optax.GradientTransformationExtraArgs(init, update)


class Units(NamedTuple):
    """The leaves that one call measures, and their norm groups.

    Attributes:
        gradient: Measured leaves of the gradient.
        groups: Norm groups of these leaves.
        places: Indices of the measured leaves among all leaves of the gradient.
        axis_name: Mapped axes over which every leaf is sharded.
    """

    gradient: list[Array]
    groups: NormGroups
    places: list[int]
    axis_name: AxisName

    def leaves_of(self, tree: Tree) -> list[Array]:
        """Return the measured leaves of a tree with the structure of the gradient."""
        return leaves_at(tree, self.places)


@as_pytree
@dataclasses.dataclass(frozen=True, eq=False)
class WatchUpdate(InPlaceUpdate):
    """The `update` function of `watch`.

    Attributes:
        inner: Transformation that is watched.
        granularity: Which elements share a norm.
        trainable: Leaves that are measured.
        axis_name: Mapped axes over which every leaf is sharded.
        replica_axis: Mapped axes along which all devices should have the same parameters.
        with_step: Whether updates and parameters are measured.
        check_every: Number of steps between two checks of the replicas.
        taps: Names of the taps of the model.
    """

    __name__: ClassVar[str] = "update"
    inner: optax.GradientTransformationExtraArgs
    granularity: Granularity
    trainable: Mask
    axis_name: AxisName
    replica_axis: AxisName
    with_step: bool
    check_every: int
    taps: tuple[str, ...]

    @named("watch")
    def __call__(
        self, updates: Tree, state: Tree, params: Tree | None = None, **extra_args: Any
    ) -> tuple[Tree, Tree]:
        """Return the update of the inner transformation, and the state with a new row."""
        units = self._units(updates, state, params)
        output, inner_state = self.inner.update(updates, state.inner_state, params, **extra_args)
        step_sums = self._measure_step(units, output, params)
        return output, self._record(units, step_sums, state, inner_state, extra_args)

    @named("watch")
    def apply(
        self, grads: Tree, state: Tree, params: Tree, extra_args: ExtraArgs, measure: Measure | None
    ) -> tuple[Tree, Tree, Tree]:
        """Implement `apply_gradients`, and measure updates before they are added to parameters."""
        update = self.inner.update
        if not isinstance(update, InPlaceUpdate):
            updates, state = self(grads, state, params, **extra_args)
            measured = None if measure is None else measure(updates, params)
            return apply_updates(params, updates), state, measured
        units = self._units(grads, state, params)

        def measure_step(updates: Tree, params: Tree) -> tuple[Tree, Tree]:
            measured = None if measure is None else measure(updates, params)
            return self._measure_step(units, updates, params), measured

        new_params, inner_state, (step_sums, measured) = update.apply(
            grads, state.inner_state, params, extra_args, measure_step
        )
        if step_sums is not None:
            # If the inner transformation did not run, only the parameters are measured.
            has_run = has_flag(outcome_of(inner_state), Outcome.APPLIED)
            dtype = step_sums.dtype

            def unchanged(leaves: list[Array]) -> Array:
                return sums_of_params(units, leaves).astype(dtype)

            leaves = units.leaves_of(new_params)
            step_sums = lax.cond(has_run, lambda _: step_sums, unchanged, leaves)
        new_state = self._record(units, step_sums, state, inner_state, extra_args)
        return new_params, new_state, measured

    def _units(self, grads: Tree, state: Tree, params: Tree | None) -> Units:
        """Return the leaves that are measured, or raise if an argument of `update` is invalid."""
        check_state(state, WatchState, "step_count")
        if params is not None or self.with_step:
            check_params(grads, params)
        masked = mask_leaves(self.trainable, grads, params)
        leaves = checked_leaves("updates", masked)
        groups = self.granularity.partition(leaves.arrays, masked)
        included = included_places(grads, masked)
        places = [included[i] for i in leaves.places]
        return Units(leaves.arrays, groups, places, self.axis_name)

    def _measure_step(self, units: Units, updates: Tree, params: Tree) -> Array | None:
        """Return the result of `sums_of_step`, or None if updates are not measured."""
        if not self.with_step:
            return None
        return sums_of_step(units, units.leaves_of(updates), units.leaves_of(params))

    def _record(
        self,
        units: Units,
        step_sums: Array | None,
        state: WatchState,
        inner_state: Tree,
        extra_args: ExtraArgs,
    ) -> WatchState:
        """Measure the gradient, and return the state with a new row.

        `step_sums` are the sums of squares of updates and parameters, or None if not measured.
        """
        sums = sums_of_gradient(units)
        step_sums = jnp.zeros_like(sums) if step_sums is None else step_sums
        norms = norm_table(sums, step_sums, units.groups)
        # The gradient is still multiplied by the loss scale of the old state.
        norms /= jnp.array([[1, _loss_scale(state.inner_state), 1, 1]], jnp.float32)
        phase = state.step_count % self.check_every
        differs, device = _other_replica(norms[:, -1], self.replica_axis, phase)
        inner_metrics = collect_metrics(inner_state)
        outcome = _outcome(inner_state, inner_metrics, extra_args, self.with_step)
        outcome |= jnp.where(differs, int(Outcome.REPLICA_DIFFERS), 0)
        loss, batch_id = loss_of(extra_args, self.axis_name), extra_args.get("batch_id")
        if batch_id is not None:
            check_count("batch_id", batch_id, "Pass the index of the batch.", low=-(2**31))
        row = RowValues(
            step=state.step_count,
            batch_id=0 if batch_id is None else batch_id,
            outcome=outcome,
            device=device,
            loss=0 if loss is None else loss,
            norm_limit=inner_metrics.get("skip_threshold", 0),
            loss_limit=inner_metrics.get("loss_threshold", 0),
            norms=norms,
            taps=self._tap_sums(extra_args),
            clip_factors=list(_clip_factors(inner_metrics).values()),
        )
        return _written(state, row)._replace(inner_state=inner_state)

    def _tap_sums(self, extra_args: ExtraArgs) -> Array:
        """Return the sums of the taps, or zeros if no statistics were passed."""
        if (stats := extra_args.get("taps")) is None:
            return jnp.zeros((len(self.taps), *SHAPE), jnp.float32)
        found, sums = read_sums("taps", stats)
        if tuple(found) != self.taps:
            hint = "Pass the probes of the model to `watch`: `watch(optimizer, taps=probes)`."
            raise value_error("taps", f"statistics of {listed(self.taps)}", listed(found), hint)
        return sums


@named("watch")
def _init(update: WatchUpdate, history: int, params: Tree) -> WatchState:
    """Return a state without rows."""
    inner_state = update.inner.init(params)
    # Remove weak types, which would cause recompilation after the first step.
    inner_state = like_dtypes(inner_state, inner_state)
    names = names_of(params, update.granularity, update.trainable)._replace(taps=update.taps)
    clips = dict.fromkeys(_clip_factors(collect_metrics(inner_state)))
    names = names._replace(clips=tuple(clips))
    values = jnp.zeros((history, num_columns(names)), jnp.int32)
    return WatchState(
        jnp.int32(0), PackedRows(values, clips, jnp.uint32(names.checksum)), inner_state
    )


def sums_of_gradient(units: Units) -> Array:
    """Return the number of non-finite elements and the sum of squares of each norm group.

    The result is float[groups, 2].
    """
    dtype = norm_dtype(units.gradient)

    def terms(g: Array, axes: tuple[int, ...]) -> Array:
        return _two_sums(axes, ~jnp.isfinite(g), squares(g, dtype))

    return _sums_of_groups(units, terms, units.gradient)


def sums_of_step(units: Units, updates: Sequence[Array], params: Sequence[Array]) -> Array:
    """Return the sums of squares of updates and parameters of each norm group, float[groups, 2].

    The update is measured as `(p + u) - p` with the sum rounded to the dtype of the parameters,
    which is the change that `optax.apply_updates` makes. XLA reuses `p + u` from the optimizer
    step, so the sum is not computed twice.
    """
    dtype = norm_dtype(updates)

    def terms(u: Array, axes: tuple[int, ...], p: Array) -> Array:
        old, wide = (x.astype(wide_dtype(x.dtype, dtype)) for x in (p, u))
        new, info = old + wide, jnp.finfo(p.dtype)
        if info.bits < 32:  # XLA would remove a conversion to the narrow dtype and back
            new = lax.reduce_precision(new, 8, info.nmant)  # like bfloat16, without underflow
        return _two_sums(axes, squares(new - old, dtype), squares(old, dtype))

    return _sums_of_groups(units, terms, updates, params)


def sums_of_params(units: Units, params: Sequence[Array]) -> Array:
    """Return the sums of squares of zero updates and of parameters, float[groups, 2].

    Unlike a call of `sums_of_step` with zero updates, it reads each parameter only once. For
    bfloat16 on a CPU, a step with an accumulation then accesses 14 % fewer bytes.
    """
    dtype = norm_dtype(params)

    def terms(p: Array, axes: tuple[int, ...]) -> Array:
        total = replicated(reduce_axes(jnp.sum, squares(p, dtype), axes)).reshape(-1)
        return jnp.stack([jnp.zeros_like(total), total], -1)

    return _sums_of_groups(units, terms, params)


def _sums_of_groups(units: Units, terms: Callable[..., Array], *columns: Sequence[Array]) -> Array:
    """Return a table with two sums over the leaves of each norm group, float[groups, 2].

    `terms(leaf, axes, *others)` returns two sums for each slice of a leaf, float[slices, 2].
    `columns[0]` contains the leaves. Small leaves of equal type and slices are reduced by one
    kernel.
    """
    # With `jit`, the terms are traced once for all leaves of the same shape.
    terms = jax.jit(terms, static_argnums=1)
    leaves, groups = columns[0], units.groups
    labels = groups.group_of_leaf if groups.axes is None else groups.axes
    stacks = stackable(*columns, labels=labels, max_size=MAX_STACKED_SIZE)
    parts = reduce_groups(
        terms,
        *[stack(column, stacks) for column in columns],
        groups=groups.of_stacks(stacks),
        axis_name=units.axis_name,
    )
    zeros = jnp.zeros((1, 2), norm_dtype(leaves))  # for a group without leaves
    table = jnp.concatenate([zeros[:0], *(x if x.ndim else zeros for x in parts)])
    if groups.axes is not None and leaves:
        # Each row is one slice of a leaf. The rows are in the order of the stacks; restore the
        # order of the leaves.
        ends = np.cumsum([num_slices(x, axes) for x, axes in zip(leaves, groups.axes, strict=True)])
        rows_of_leaf = np.split(np.arange(ends[-1]), ends[:-1])
        order = np.concatenate([rows_of_leaf[i] for indices in stacks for i in indices])
        table = table[np.argsort(order)]
    # Without the barrier, XLA:CPU duplicates kernels of all leaves for each consumer.
    return fusion_barrier(table)


def norm_table(of_gradient: Array, of_step: Array, groups: NormGroups) -> Array:
    """Return four numbers for the whole tree and for each norm group, float32[1 + groups, 4].

    They are the number of non-finite elements of the gradient, and the norms of gradient, update
    and parameters. The arguments are the results of `sums_of_gradient` and `sums_of_step`.
    """
    table = jnp.concatenate([of_gradient, of_step], 1)
    if groups.axes is not None or groups.labels:
        table = jnp.concatenate([jnp.sum(table, 0, keepdims=True), table])
    # Unlike slicing, `jnp.where` is fused with the operations that read the table.
    return jnp.where(jnp.arange(4) == 0, table, jnp.sqrt(table)).astype(jnp.float32)


def _two_sums(axes: tuple[int, ...], x: Array, y: Array) -> Array:
    """Return the sums of two arrays over the given axes for each slice, float[slices, 2]."""
    return replicated(pair_of_sums(axes, x, y)).reshape(-1, 2)


def _other_replica(norms: Array, axis_name: AxisName, phase: Scalar) -> tuple[Scalar, Scalar]:
    """Return whether the parameter norms of a replica differ, and the index of this replica.

    If several replicas differ from the median, the index of the one that differs most is returned.
    The norms are compared if `phase` is 0. Replicas execute the same program on the same inputs, so
    their norms are identical bit for bit.
    """
    for name in axis_names(axis_name):
        axis_index(name, "replica_axis")  # raises if the axis is not mapped

    def compare(norms: Array) -> tuple[Scalar, Scalar]:
        count = lax.axis_size(axis_name)
        is_own = jnp.arange(count)[:, None] == lax.axis_index(axis_name)
        # `psum`, unlike `all_gather`, returns an array whose type is replicated.
        rows = lax.psum(jnp.where(is_own, norms, 0), axis_name)
        typical = jnp.sort(rows, axis=0)[count // 2]
        distance = jnp.max(jnp.abs(rows - typical), axis=1)
        device = jnp.argmax(distance).astype(jnp.int32)  # the first NaN is the largest
        return (distance[device] != 0) & jnp.isfinite(typical).all(), device

    none = jnp.bool_(False), jnp.int32(0)
    return lax.cond(phase == 0, compare, lambda _: none, norms) if axis_name else none


def _loss_scale(state: Tree) -> Array | int:
    """Return the loss scale in a state; 1 without `dynamic_loss_scale`."""
    found = find_states(state, LossScaleState)
    return jnp.asarray(found[0][1].loss_scale) if found else 1


def _clip_factors(inner_metrics: dict[str, Array]) -> dict[str, Array]:
    """Return the metrics that contain clip factors."""
    return {key: x for key, x in inner_metrics.items() if key.startswith("clip_factor")}


def _outcome(
    inner_state: Tree, inner_metrics: dict[str, Array], extra_args: ExtraArgs, with_step: bool
) -> Array:
    """Return the flags of a row.

    They describe the outcome of the call, the measured norms and the passed arguments.
    """
    flags = outcome_of(inner_state) | int(Outcome.HAS_UNITS)
    windows = [window for _, window in find_states(inner_state, AccumulationState)]
    for window in windows:  # a guard may have skipped a micro-batch of an open window
        flags |= jnp.where(window.mini_step > 0, int(Outcome.ACCUMULATED), 0)
    # Without an accumulation, `weight` may be an argument of the inner transformation.
    has_gradient = micro_batch_of(extra_args).has_gradient if windows else True
    flags |= jnp.where(has_gradient, int(Outcome.HAS_GRADIENT), 0)
    flags |= jnp.where(inner_metrics.get("guard_failed", 0) > 0, int(Outcome.GUARD_FAILED), 0)
    known = {
        Outcome.HAS_UPDATE | Outcome.HAS_PARAMETER: with_step,
        Outcome.HAS_LOSS: loss_argument(extra_args)[1] is not None,
        Outcome.HAS_BATCH_ID: extra_args.get("batch_id") is not None,
        Outcome.HAS_TAPS: extra_args.get("taps") is not None,
    }
    return flags | sum(int(flag) for flag, is_set in known.items() if is_set)


def _written(state: WatchState, values: RowValues) -> WatchState:
    """Write a row into the ring buffer."""
    rows = state.rows.values
    row = values.packed()[None]
    if row.shape[1] != rows.shape[1]:
        got = f"a state with {rows.shape[1]} values for each row instead of {row.shape[1]}"
        hint = "Call `init(params)` of this `watch`, or convert with `convert_state`."
        raise value_error("state", "the state of this `watch`", got, hint)
    # With explicit mesh axes, norms of sharded leaves have the mesh in their type.
    rows = reshard_like(rows, row)
    next_count = jnp.asarray(optax.safe_increment(state.step_count))
    # `last_row` reads at `step_count - 1`. Write there, so that both agree if the count saturates.
    rows = lax.dynamic_update_slice_in_dim(rows, row, (next_count - 1) % len(rows), 0)
    return state._replace(step_count=next_count, rows=state.rows._replace(values=rows))
