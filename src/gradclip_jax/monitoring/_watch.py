"""Measure norms of gradients, updates and parameters, and write them to a ring buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from .._checks import (
    check_choice,
    check_count,
    check_length,
    check_params,
    check_state,
    listed,
)
from .._errors import public, type_error, value_error
from .._leaves import checked_leaves, measured_shapes
from .._mask import Mask, mask_leaves
from .._run_if import like_dtypes
from .._states import find_role, find_states, increment_where, plain_arrays, register_state
from .._types import Array, AxisName, Count, Scalar, Tree
from ..clipping._granularity import Granularity, as_granularity
from ..gates._extra_args import has_micro_batch, loss_of
from ..gates._gate import ExtraArgs, check_guard
from ._measure import compare_replicas, measure
from ._metrics import clip_factors
from ._outcome import compare_norms, compare_states, flag_if
from ._rows import KINDS, MEASURED, TREE, Names, Outcome, Row
from ._taps import read_sums
from ._unit_names import name_units


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

    watch_step = property(lambda state: jnp.maximum(state.step_count - 1, 0))
    gradient_norm = property(lambda state: _of_tree(state, 0))
    update_norm = property(lambda state: _of_tree(state, 1))
    parameter_norm = property(lambda state: _of_tree(state, 2))
    nonfinite_elements = property(lambda state: _of_tree(state, 3))

    @property
    def update_ratio(self) -> Array:
        """Ratio of the update norm to the parameter norm; 0 if the latter is 0."""
        norm = self.parameter_norm
        return jnp.where(norm > 0, self.update_norm / jnp.where(norm > 0, norm, 1), 0)


def _last(state: WatchState) -> dict[str, Array]:
    """Return the integers and floats of the last row."""
    place = jnp.expand_dims((state.step_count - 1) % state.ints.shape[-2], (-2, -1))
    tables = {"ints": state.ints, "floats": state.floats}
    return {k: jnp.take_along_axis(x, place, -2)[..., 0, :] for k, x in tables.items()}


def _of_tree(state: WatchState, column: int) -> Array:
    return _last(state)["floats"][..., TREE + column]


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
    watched = find_watch(plain_arrays(state))
    return rows_of(watched)._replace(**_last(watched))


def rows_of(state: WatchState) -> Row:
    """Return all rows that a state holds, in any order."""
    clips = jax.eval_shape(clip_factors, state.inner_state)
    return Row(state.ints, state.floats, dict.fromkeys(clips), state.checksum)


def find_watch(state: Tree, which: int | None = None) -> WatchState:
    """Return the state of `watch` inside an optimizer state, or number `which` of several."""
    found = find_states(state, WatchState)
    if len(found) != 1 and (not found or which is None):
        places = [jax.tree_util.keystr(path) or "the state itself" for path, _ in found]
        rule, got = "a state with one state of `watch`", listed(places) or type(state).__name__
        hint = "Pass the state of one `gcx.watch`, or its index as `gcx.Monitor(params, which=0)`."
        raise type_error("state", rule, got, hint)
    return found[which or 0][1]


def names_of(params: Tree, granularity: Granularity, mask: Mask, taps: Tree | None) -> Names:
    """Return the names of the units and taps that `watch` measures."""
    tree = mask_leaves(mask, params, params)
    names = name_units(granularity.cut(measured_shapes(tree), tree), tree)
    return Names(units=tuple(names), taps=tuple(read_sums("taps", taps)[0]))


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
            the data axis inside `shard_map` or `pmap`. None disables the check. Requires
            "parameter".
        check_every: Number of steps between two checks of the replicas, >= 1. Each check is one
            all-reduce of one norm for each leaf or layer and device. Steps 0, `check_every`,
            `2 * check_every` and so on are checked.
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
    check_guard(inner, axis_name, mask)
    for kind in of:
        check_choice("of", kind, KINDS)
    measures_step = any(kind != "gradient" for kind in of)
    if replica_axis and not measures_step:
        hint = "Replicas are compared by the norms of their parameters."
        raise value_error("of", 'a sequence with "parameter" for `replica_axis`', of, hint)
    check_length("history", history, "Pass the number of steps to keep.")
    check_count("check_every", check_every, "Pass the number of steps between two checks.")
    inner, cut = optax.with_extra_args_support(inner), as_granularity(granularity)
    probes = read_sums("taps", taps)

    def init(params: Tree) -> WatchState:
        # Remove weak types, which would cause recompilation after the first step.
        inner_state = inner.init(params)
        inner_state = like_dtypes(inner_state, inner_state)
        names = names_of(params, cut, mask, taps)
        names = names._replace(clips=tuple(clip_factors(inner_state)))
        floats = jnp.zeros((history, sum(names.sizes)), jnp.float32)
        ints, checksum = jnp.zeros((history, 4), jnp.int32), jnp.uint32(names.checksum)
        return WatchState(jnp.zeros((), jnp.int32), ints, floats, checksum, inner_state)

    def update(updates: Tree, state: Tree, params: Tree | None = None, **extra_args: Any) -> Tree:
        masked = mask_leaves(mask, updates, params)
        leaves = checked_leaves("updates", masked)
        check_state(state, WatchState)
        if params is not None or measures_step:
            check_params(updates, params)
        outcome, batch_id, loss = _read_extra_args(extra_args, axis_name)
        sums = _sums_of_taps(extra_args.get("taps"), *probes)
        output, after = inner.update(updates, state.inner_state, params, **extra_args)

        step = (output, params) if measures_step else ()
        step = [leaves.beside(mask_leaves(mask, x, params)) for x in step]
        table = measure(
            leaves.arrays, *step, units=cut.cut(leaves.arrays, masked), axis_name=axis_name
        )
        happened, limits, factors = compare_states(state.inner_state, after)
        outcome |= happened | (sum(MEASURED[1:]) if measures_step else 0)
        outcome, table = compare_norms(outcome, _unscaled(table, state.inner_state))
        flags, device = compare_replicas(
            table[:, 2], replica_axis, state.step_count % check_every == 0
        )
        ints = [state.step_count, batch_id, outcome | flags, device]
        return output, _with_row(state, after, ints, [loss, *limits, table, sums, *factors])

    return optax.GradientTransformationExtraArgs(init, update)


def _unscaled(table: Array, state: Tree) -> Array:
    """Divide the gradient norms by the loss scale of a `dynamic_loss_scale` inside `watch`."""
    for _, scaled in find_role(state, "loss scale"):
        table = table.at[:, 0].divide(scaled.loss_scale)
    return table


def _read_extra_args(
    extra_args: ExtraArgs, axes: AxisName
) -> tuple[Scalar, Scalar | int, Scalar | int]:
    """Return flags, the batch id and the loss."""
    outcome = flag_if(Outcome.HAS_GRADIENT, has_micro_batch(extra_args)) | int(Outcome.HAS_UNITS)
    batch_id, loss = extra_args.get("batch_id"), loss_of(extra_args, axes)
    if batch_id is not None:
        check_count("batch_id", batch_id, "Pass the index of the batch.", low=-(2**31))
    given = batch_id, loss, extra_args.get("taps")
    flags = Outcome.HAS_BATCH_ID, Outcome.HAS_LOSS, Outcome.HAS_TAPS
    outcome |= sum(flag for flag, x in zip(flags, given, strict=True) if x is not None)
    return outcome, 0 if batch_id is None else batch_id, 0 if loss is None else loss


def _sums_of_taps(stats: Tree | None, names: list[str], no_sums: Array) -> Array:
    """Stack the statistics of all taps; raise if they do not match the probes."""
    if stats is None:
        return no_sums
    found, sums = read_sums("taps", stats)
    if found != names:
        rule = f"statistics of {listed(names) or 'no tap'}"
        hint = "Pass the probes of the model to `watch`: `watch(optimizer, taps=probes)`."
        raise value_error("taps", rule, f"statistics of {listed(found)}", hint)
    return sums


def _with_row(state: WatchState, inner_state: Tree, *rows: Sequence[Any]) -> WatchState:
    """Write the parts of a row of integers and of a row of floats."""
    rings: list[Array] = []
    for ring, parts in zip((state.ints, state.floats), rows, strict=True):
        row = jnp.concatenate([jnp.ravel(jnp.asarray(x, ring.dtype)) for x in parts])
        if row.size != ring.shape[1]:
            hint = "Call `init(params)` of this `watch`, or convert with `convert_state`."
            got = f"a state with {ring.shape[1]} values for each row instead of {row.size}"
            raise value_error("state", "the state of this `watch`", got, hint)
        if jax.typeof(ring).sharding.mesh != jax.typeof(row).sharding.mesh:
            # With explicit mesh axes, norms of sharded leaves have the mesh in their type.
            ring = jnp.where(np.True_, ring, row[None])
        place = state.step_count % len(ring)
        rings.append(lax.dynamic_update_index_in_dim(ring, row, place, 0))
    ints, floats = rings
    return WatchState(increment_where(state.step_count), ints, floats, state.checksum, inner_state)
