"""Measure norms of gradients, updates and parameters, and write them to a ring buffer."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from .._checks import (
    check_axis_name,
    check_choice,
    check_count,
    check_length,
    check_params,
    check_state,
    check_static,
    is_scalar,
    is_traced,
    listed,
    shortened,
)
from .._errors import public, type_error, value_error
from .._leaves import Leaves, checked_leaves, measured_shapes
from .._mask import Mask, check_mask, mask_leaves
from .._mesh import check_bound
from .._run_if import like_dtypes
from .._states import KINDS as STATE_KINDS
from .._states import (
    find_states,
    has_stepped,
    increment_where,
    plain_arrays,
    register_state,
)
from .._types import Array, AxisName, Count, Scalar, Tree
from ..clipping._granularity import Granularity, as_granularity
from ..gates._extra_args import has_micro_batch
from ..gates._gate import ExtraArgs
from ..guarding._detect import loss_of
from ..guarding._guard import check_guard
from ._measure import differing_device, measure
from ._metrics import clip_factors
from ._rows import KINDS, TREE, WIDTH, Names, Outcome, Row
from ._taps import read_sums
from ._unit_names import name_units

Flags: TypeAlias = dict[Outcome, Any]
"""Whether each flag is set, bool[] or a Python bool."""

LIMITS = {
    "skip_threshold": ("skipped_large_norm", Outcome.HAS_NORM_LIMIT),
    "loss_threshold": ("skipped_large_loss", Outcome.HAS_LOSS_LIMIT),
}
"""Thresholds of guards, and the metric that counts the steps that exceeded them."""


@register_state(
    *("watch_step", "gradient_norm", "update_norm", "parameter_norm", "update_ratio"),
    "nonfinite_elements",
    inner="inner_state",
    role="watch",
)
class WatchState(NamedTuple):
    """State of `watch`: a ring buffer with one row for each call; see `Row`.

    Attributes:
        step_count: int32[], number of calls.
        ints: int32[history, 4]: step, batch id, outcome, and the device that differs.
        floats: float32[history, columns].
        checksum: uint32[], a checksum of the names of units and taps.
        inner_state: State of the inner transformation.
    """

    step_count: Scalar
    ints: Array
    floats: Array
    checksum: Scalar
    inner_state: Tree

    watch_step = property(lambda state: jnp.maximum(plain_arrays(state.step_count) - 1, 0))
    gradient_norm = property(lambda state: _of_tree(state, 0))
    update_norm = property(lambda state: _of_tree(state, 1))
    parameter_norm = property(lambda state: _of_tree(state, 2))
    nonfinite_elements = property(lambda state: _of_tree(state, 3))

    @property
    def update_ratio(self) -> Array:
        """Ratio of the update norm to the parameter norm; 0 if the latter is 0."""
        norm = self.parameter_norm
        return jnp.where(norm > 0, self.update_norm / jnp.where(norm > 0, norm, 1), 0)


def _last(state: WatchState) -> tuple[Array, Array]:
    """Return the integers and floats of the last row."""
    count, ints, floats = plain_arrays(state[:3])
    place = jnp.expand_dims((count - 1) % ints.shape[-2], (-2, -1))
    last = [jnp.take_along_axis(x, place, -2)[..., 0, :] for x in (ints, floats)]
    return last[0], last[1]


def _of_tree(state: WatchState, column: int) -> Array:
    return _last(state)[1][..., TREE + column]


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
        TypeError: If `state` contains no state of `watch`.
        ValueError: If `state` contains several states of `watch`.

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
    ints, floats = _last(watched)
    factors = clip_factors(watched.inner_state)
    floats = floats[..., : floats.shape[-1] - len(factors)]
    return Row(ints, floats, factors, plain_arrays(watched.checksum))


def find_watch(state: Tree, which: int | None = None) -> WatchState:
    """Return the state of `watch` inside an optimizer state, or number `which` of several."""
    found = find_states(state, WatchState)
    if not found:
        rule, hint = "a state of `watch`", "Pass the state of an optimizer inside `gcx.watch`."
        raise type_error("state", rule, type(state).__name__, hint)
    if which is None and len(found) > 1:
        places = [jax.tree_util.keystr(path) or "the state itself" for path, _ in found]
        hint = "Pass one of them, or its number as `gcx.Monitor(params, which=0)`."
        got = f"{len(found)}: {listed(places)}"
        raise value_error("state", "a state with one state of `watch`", got, hint)
    return found[which or 0][1]


def names_of(params: Tree, granularity: Granularity, mask: Mask, taps: Tree | None) -> Names:
    """Return the names of the units and taps that `watch` measures."""
    tree = mask_leaves(mask, params, params)
    names = name_units(granularity.cut(measured_shapes(tree), tree), tree)
    return Names(units=tuple(names), taps=() if taps is None else tuple(read_sums("taps", taps)[0]))


@public
def watch(
    inner: optax.GradientTransformation,
    *,
    history: Count = 64,
    of: Sequence[str] = KINDS,
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
    `update_norm`, `parameter_norm`, `update_ratio` and `nonfinite_elements` of the whole tree.

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
    | the extra argument `measure=False`, static | no norms |
    | NaN or infinity in a unit | a non-finite norm, and the number of such elements |
    | an update that is partly rounded away | the norm of `(params + update) - params` |
    | the extra argument `taps=stats` | statistics of taps |
    | the extra argument `batch_id` | this integer, of 32 bits |

    Args:
        inner: Any Optax transformation, except `optax.lookahead`, which must be outside.
        history: Number of rows to keep, at least the number of steps between two reads, 1 to 2^20,
            static. A row has 4 floats for each unit.
        of: Which norms to measure in addition to the gradient norm: "update", or "parameter", which
            includes "update".
        granularity: Which elements share a norm, as in `clip_by_norm`. The name of a stacked layer
            contains its index. With "global", only the whole tree is measured. Inside `shard_map`,
            an axis that indexes layers or rows must not be sharded.
        mask: Leaves to measure, as a prefix tree of bools or a function from the parameters to one,
            None for all. The other leaves may have any dtype.
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
        An Optax transformation with a `WatchState`.

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
        >>> monitor = gcx.Monitor(params)
        >>> for bad in (1.0, jnp.nan):
        ...     grads = {"wi": jnp.array([0.0, 2.0]), "wo": jnp.array([bad])}
        ...     _, state = update(grads, state, params, value=3.2)
        >>> print(*monitor.read(state).incidents, sep="\n")
        step 1: skipped, gradient norm NaN; 1 non-finite element in wo; loss 3.2
    """
    axes = check_guard(inner, axis_name)
    inner = optax.with_extra_args_support(inner)
    kinds = _checked_kinds(of)
    cut = as_granularity(granularity)
    check_length("history", history, "Pass the number of steps to keep.")
    check_mask(mask)
    replicas = check_axis_name(replica_axis, "replica_axis")
    if replicas and len(kinds) < len(KINDS):
        hint = "Replicas are compared by the norms of their parameters."
        raise value_error("of", 'a sequence with "parameter" for `replica_axis`', of, hint)
    check_count("check_every", check_every, "Pass the number of steps between two checks.")
    tap_names, no_sums = ([], jnp.zeros(0)) if taps is None else read_sums("taps", taps)

    def init(params: Tree) -> WatchState:
        # Remove weak types, which would cause recompilation after the first step.
        inner_state = inner.init(params)
        inner_state = like_dtypes(inner_state, inner_state)
        names = names_of(params, cut, mask, taps)
        size = TREE + WIDTH * (1 + len(names.units)) + np.size(no_sums)
        size += len(clip_factors(inner_state))
        return WatchState(
            step_count=jnp.zeros((), jnp.int32),
            ints=jnp.zeros((int(history), 4), jnp.int32),
            floats=jnp.zeros((int(history), size), jnp.float32),
            checksum=jnp.uint32(names.checksum),
            inner_state=inner_state,
        )

    def check(updates: Tree, state: Tree, params: Tree | None, extra_args: ExtraArgs) -> Leaves:
        leaves = checked_leaves("updates", mask_leaves(mask, updates, params))
        check_bound(axes)
        check_bound(replicas, "replica_axis")
        check_state(state, WatchState)
        check_static("measure", extra_args.get("measure"))
        _check_batch_id(extra_args.get("batch_id"))
        if params is not None or "parameter" in kinds:
            check_params(updates, params)
        return leaves

    def measured(leaves: Leaves, output: Tree, params: Tree | None) -> Array:
        grads = leaves.replace(leaves.arrays)
        units, of_update, of_params = cut.cut(leaves.arrays, grads), None, None
        if "update" in kinds:
            of_update = leaves.beside(mask_leaves(mask, output, params))
            if params is not None:
                of_params = leaves.beside(mask_leaves(mask, params, params))
        step = leaves.arrays, of_update, of_params
        return measure(*step, units, axes, measures_params="parameter" in kinds)

    def update(updates: Tree, state: Tree, params: Tree | None = None, **extra_args: Any) -> Tree:
        leaves = check(updates, state, params, extra_args)
        stats, batch_id = extra_args.get("taps"), extra_args.get("batch_id")
        sums = no_sums if stats is None else _checked_sums(stats, tap_names)
        output, after = inner.update(updates, state.inner_state, params, **extra_args)

        loss, factors = loss_of(extra_args, axes), list(clip_factors(after).values())
        flags, limits = _outcome(state.inner_state, after)
        flags[Outcome.CLIPPED] = functools.reduce(jnp.logical_or, [x < 1 for x in factors], False)
        flags[Outcome.HAS_LOSS] = loss is not None
        flags[Outcome.HAS_BATCH_ID] = batch_id is not None
        flags[Outcome.HAS_TAPS] = stats is not None
        size = state.floats.shape[1] - TREE - sums.size - len(factors)
        table, device = jnp.zeros((size // WIDTH, WIDTH)), 0
        if extra_args.get("measure", True):
            table = measured(leaves, output, params)
            _check_size(table.size, size)
            has_gradient = has_micro_batch(extra_args)
            table = jnp.where(has_gradient | _OF_STEP, table, 0)
            flags[Outcome.HAS_GRADIENT] = has_gradient
            flags[Outcome.HAS_UPDATE] = "update" in kinds
            flags[Outcome.HAS_PARAMETER] = "parameter" in kinds
            flags[Outcome.HAS_UNITS] = True
            if replicas:
                is_due = state.step_count % check_every == 0
                flags[Outcome.REPLICAS_CHECKED] = is_due
                differs, device = differing_device(table[:, 2], replicas, is_due)
                flags[Outcome.REPLICA_DIFFERS] = differs
        table = _finish(flags, table)
        ints = [state.step_count, 0 if batch_id is None else batch_id, _bits(flags), device]
        floats = [0 if loss is None else loss, *limits, table, sums, *factors]
        place = state.step_count % history
        return output, WatchState(
            step_count=increment_where(state.step_count),
            ints=_written(state.ints, ints, place),
            floats=_written(state.floats, floats, place),
            checksum=state.checksum,
            inner_state=after,
        )

    return optax.GradientTransformationExtraArgs(init, update)


_OF_STEP, _OF_UPDATE = np.array([[[False, True, True, False]], [[False, True, False, False]]])
"""The columns of `measure` that a call without a gradient has, and that of the update."""


def _outcome(before: Tree, after: Tree) -> tuple[Flags, list[Scalar]]:
    """Compare the states of guards, accumulations and clips before and after a step.

    Return what happened, and the thresholds of the guard that skipped, or else of the outermost.
    """
    flags: Flags = {Outcome.APPLIED: has_stepped(after)}
    limits: dict[str, Scalar] = {}
    kinds = tuple(STATE_KINDS)
    pairs = zip(find_states(before, kinds), find_states(after, kinds), strict=True)

    def note(flag: Outcome, happened: Scalar) -> None:
        flags[flag] = happened | flags.get(flag, False)

    for (_, old), (_, new) in pairs:
        values = {x: getattr(new, x) for x in STATE_KINDS[type(new)].metrics}
        grown = {
            name: x > getattr(old, name)
            for name, x in values.items()
            if x is not None and (name.startswith("skipped") or name == "empty_windows")
        }
        for name, has_grown in grown.items():
            if name.upper() in Outcome.__members__:
                note(Outcome[name.upper()], has_grown)
            note(Outcome.EMPTY_WINDOW if name == "empty_windows" else Outcome.SKIPPED, has_grown)
        if "guard_failed" in values:
            note(Outcome.GUARD_FAILED, values["guard_failed"] > 0)
        for name, (count, flag) in LIMITS.items():
            limit = values.get(name)
            if limit is not None:
                flags[flag] = True
                limits[name] = jnp.where(grown[count], limit, limits.get(name, jnp.asarray(limit)))
    return flags, [limits.get(name, jnp.zeros(())) for name in LIMITS]


def _finish(flags: Flags, table: Array) -> Array:
    """Determine the fate of a step from its update, and clear the norm of an update of zero."""
    ran = has_changed = flags[Outcome.APPLIED]
    if flags.get(Outcome.HAS_UPDATE):
        # An update of zero does not change a non-finite parameter.
        table = jnp.where(ran | jnp.isfinite(table) | ~_OF_UPDATE, table, 0)
        has_changed = table[0, 1] != 0
        has_gradient = flags[Outcome.HAS_GRADIENT] & (table[0, 0] != 0)
        flags[Outcome.UNCHANGED] = ran & ~has_changed & has_gradient
        # With `optax.partition`, some parameters may change although others are held.
        ran |= has_changed
    flags[Outcome.APPLIED] = ran
    flags[Outcome.CLIPPED] &= has_changed
    flags[Outcome.HELD] = ~ran & ~jnp.asarray(flags.get(Outcome.SKIPPED, False))
    return table


def _bits(flags: Flags) -> Scalar:
    """Return the flags as one integer."""
    return functools.reduce(jnp.bitwise_or, [jnp.where(x, int(y), 0) for y, x in flags.items()])


def _written(ring: Array, parts: Sequence[Any], place: Scalar) -> Array:
    """Write the parts of a row at an index of a ring buffer."""
    row = jnp.concatenate([jnp.ravel(jnp.asarray(x, ring.dtype)) for x in parts])
    if jax.typeof(ring).sharding.mesh != jax.typeof(row).sharding.mesh:
        # With explicit mesh axes, norms of sharded leaves have the mesh in their type.
        ring = jnp.where(np.True_, ring, row[None])
    return lax.dynamic_update_index_in_dim(ring, row, place, 0)


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


def _check_batch_id(batch_id: Array | int | None) -> None:
    if batch_id is None:
        return
    if not is_scalar(batch_id, jnp.integer):
        hint = "Pass the index of the batch in the order of the data."
        raise type_error("batch_id", "an integer", shortened(batch_id), hint)
    if not is_traced(batch_id) and abs(int(batch_id)) >= 2**31:
        rule, hint = "between -2^31 and 2^31", "Pass the index of a batch instead of an example."
        raise value_error("batch_id", rule, shortened(batch_id), hint)


def _check_size(num_values: int, expected: int) -> None:
    """Raise if the state belongs to other parameters or to a `watch` with other arguments."""
    if num_values != expected:
        hint = "Call `init(params)` of this `watch`, or convert with `convert_state`."
        got = f"a state with {expected} values for each row instead of {num_values}"
        raise value_error("state", "the state of this `watch`", got, hint)
