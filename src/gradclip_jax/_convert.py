"""Convert an optimizer state to the state of another optimizer during training.

Optimizer states are split into the states of their transformations, including those inside chains,
guards and accumulations. States of the same type are matched in order and copied. Fields are
translated between the states of Optax and of this package. A state of this package without an
unambiguous counterpart is initialized or dropped. Any other unmatched state raises an error with
its path.
"""

import collections
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._checks import check_choice, children_of, describe, is_traced, leaf_path, shortened
from ._errors import ArgumentTypeError, public, type_error, value_error
from ._rounding import RoundingState
from ._states import GATES, find_states, plain_arrays, with_structure_of
from ._types import Array, Path, Scalar, Tree
from .accumulation._state import AccumulationState
from .clipping._clip import ClipState
from .guarding._loss_scale import LossScaleState
from .guarding._skip_nonfinite import SkipNonfiniteState
from .monitoring._record import NormRecordState
from .monitoring._watch import WatchState

_INNER: Final[dict[type, str]] = GATES | {  # name of the field that contains the inner state
    optax.MultiStepsState: "inner_opt_state",
    optax.ApplyIfFiniteState: "inner_state",
    WatchState: "inner_state",
}
_KINDS: Final[dict[type, type]] = {
    optax.MultiStepsState: AccumulationState,
    optax.ApplyIfFiniteState: SkipNonfiniteState,
}
_Window: TypeAlias = AccumulationState | optax.MultiStepsState
_WINDOWS = (AccumulationState, optax.MultiStepsState)
_FRESH = (ClipState, NormRecordState, RoundingState, optax.EmptyState)
# Fields of guards and `watch` that are initialized if the threshold rules or the taps change.
_RESTARTED = ("signals", "tap_sums")
_HINT = (
    "Restore checkpoints with the old optimizer; only clips, guards and accumulations may differ."
)
_FLUSH = "Call `flush` first, or convert the state outside jit after the next optimizer step."


@public
def convert_state(
    tx: optax.GradientTransformation, state: Tree, params: Tree, *, reduction: str | None = None
) -> Tree:
    """Convert the state of an optimizer to the state of the optimizer that replaces it.

    Use this function to continue an Optax run with this package, or vice versa, and to add or
    remove a guard, an accumulation or a clip. The two optimizers may differ only in the
    transformations listed below, which may be nested inside each other and inside `chain`,
    `named_chain`, `masked`, `partition` and `inject_hyperparams`.

    | before | after | what is copied |
    | --- | --- | --- |
    | `MultiSteps` | `accumulate_gradients` | the open window, the counts, the inner state |
    | `apply_if_finite` | `skip_nonfinite` | the counts of skips, the inner state |
    | a clip of Optax | a clip | nothing: Optax's clips have no state |
    | nothing | a guard, an accumulation, a `watch` | the inner state |
    | an accumulator | one of another dtype | the open window, rounded to nearest |
    | a guard | one with another rule | the counts of skips, the inner state |
    | a `watch` | one that measures other norms | the incidents if no unit or tap changes its |
    | | | name, the inner state |
    | nothing | a clip, `record_norms` | nothing; its state is initialized |
    | nothing | `round_stochastically` | nothing; its state is initialized |

    Every conversion in the table also works in reverse. If the number of guards or clips of one
    type changes, their states are initialized. The state of a guard or clip that moves into or out
    of an accumulation is initialized as well. Discarding accumulated micro-batches raises an error.

    Args:
        tx: New optimizer; a gradient transformation or an `optax.MultiSteps`.
        state: State of the old optimizer. For an `nnx.Optimizer` or a `TrainState`, pass its
            `.opt_state`.
        params: Parameters, with the dtypes that `init` received.
        reduction: "mean" or "sum", which states whether the accumulation averages or sums its
            micro-batches. `MultiSteps` averages by default, but its state does not contain this
            option. `reduction` is therefore required to convert an unfinished accumulation between
            `MultiSteps` and `accumulate_gradients`, and for every such conversion inside `jit`.

    Returns:
        A state for `tx.update`. Its `accumulation_stats` assume that all earlier accumulation
        windows had the length of the first one. The `skip_state` of `MultiSteps` is initialized.
        `MultiSteps` closes an unfinished accumulation correctly only if it contains fewer
        micro-batches than the new window.

    Raises:
        TypeError: If part of `state` has no counterpart in the state of `tx`, or differs from it in
            shapes or dtypes.
        ValueError: If `reduction` is invalid or is required but missing, if accumulated
            micro-batches would be discarded (inside `jit`, if they could be), if they have weights
            other than 1, which `MultiSteps` does not support, or if a `dynamic_loss_scale` or a
            noise scale is added to, or the former removed from, an unfinished accumulation.

    Examples:
        >>> import jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> params = jnp.array([0.0])
        >>> old = optax.MultiSteps(optax.sgd(1.0), every_k_schedule=2)
        >>> _, state = old.update(jnp.array([2.0]), old.init(params), params)
        >>> new = gcx.accumulate_gradients(optax.sgd(1.0), every=2)
        >>> state = gcx.convert_state(new, state, params, reduction="mean")
        >>> updates, state = new.update(jnp.array([6.0]), state, params)
        >>> updates.tolist()
        [-4.0]
    """
    if not callable(getattr(tx, "init", None)):
        rule, hint = "an optimizer", "Pass an Optax transformation, or an `optax.MultiSteps`."
        raise type_error("tx", rule, shortened(tx), hint)
    if hasattr(state, "opt_state") and not isinstance(state, tuple):
        hint = "Pass its `.opt_state`."
        raise type_error("state", "the state of an Optax transformation", _name(state), hint)
    check_choice("reduction", reduction, (None, "mean", "sum"))
    like = tx.init(params)
    converted = _converted(plain_arrays(like), plain_arrays(state), reduction, ())
    return with_structure_of(like, jax.tree.map(jnp.asarray, converted))


def _converted(like: Tree, given: Tree, reduction: str | None, path: Path) -> Tree:
    """Copy the values of `given` into the structure of `like`, a new state of `tx`."""
    parts, others = list(_parts(like)), list(_parts(given, path))
    key_of = _key_function(parts, others)
    unmatched: dict[Hashable, list[_Part]] = collections.defaultdict(list)
    for part in others:
        unmatched[key_of(part)].append(part)
    counts = collections.Counter(map(key_of, parts))
    # Optional states cannot be matched in order if their numbers differ.
    restarted = {key for key, n in counts.items() if key and len(unmatched[key]) != n}
    keys = map(key_of, parts)  # `rebuilt` visits the parts in the same order

    def counterpart(node: Tree) -> Tree:
        key = next(keys)
        if key in restarted:
            return node
        if not unmatched[key]:
            raise _mismatch(_name(node), "no state", path)
        part = unmatched[key].pop(0)
        return _copied(node, part.node, reduction, part.path)

    def rebuilt(node: Tree) -> Tree:
        if type(node) is tuple:
            return tuple(map(rebuilt, node))
        new, inner = counterpart(node), _INNER.get(type(node))
        return new._replace(**{inner: rebuilt(getattr(node, inner))}) if inner else new

    converted = rebuilt(like)
    for key, found in unmatched.items():
        for part in found:
            if key is None:
                raise _mismatch("no state", _name(part.node), part.path)
            _check_closed(part.node, part.path)
    return converted


class _Part(NamedTuple):
    """The state of one transformation.

    Attributes:
        node: The state.
        path: Its path.
        depth: Number of accumulations around it.
    """

    node: Tree
    path: Path
    depth: int


def _parts(node: Tree, path: Path = (), depth: int = 0) -> Iterator[_Part]:
    """Yield the state of each transformation, also inside guards and accumulations."""
    if type(node) is tuple:
        for i, x in enumerate(node):
            yield from _parts(x, (*path, jax.tree_util.SequenceKey(i)), depth)
        return
    yield _Part(node, path, depth)
    inner = _INNER.get(type(node))
    if inner:
        depth += isinstance(node, _WINDOWS)
        yield from _parts(getattr(node, inner), (*path, jax.tree_util.GetAttrKey(inner)), depth)


def _key_function(parts: Sequence[_Part], others: Sequence[_Part]) -> Callable[[_Part], Hashable]:
    """Return a function of a part, whose results are equal for parts that may be counterparts.

    The result is None for parts that must have a counterpart.
    """

    def is_optional(part: _Part) -> bool:
        return type(part.node) in _INNER or type(part.node) in _FRESH

    def containers(parts: Sequence[_Part]) -> list[type]:
        return [type(part.node) for part in parts if not is_optional(part)]

    def has_same_number_of(kinds: type | tuple[type, ...]) -> bool:
        count = sum(isinstance(part.node, kinds) for part in parts)
        return count == sum(isinstance(part.node, kinds) for part in others)

    has_same_containers = containers(parts) == containers(others)
    has_same_windows = has_same_number_of(_WINDOWS)
    kinds = dict(_KINDS)
    if not has_same_number_of(LossScaleState):  # it may replace a guard against non-finite steps
        kinds[LossScaleState] = SkipNonfiniteState

    def key_of(part: _Part) -> Hashable:
        kind = type(part.node)
        if is_optional(part):
            # A guard or clip outside an accumulation has other statistics than one inside.
            return kinds.get(kind, kind), part.depth if has_same_windows else 0
        return None if has_same_containers or not _is_fresh(part.node) else kind

    return key_of


def _is_fresh(node: Tree) -> bool:
    """Return whether a state can be initialized or dropped during conversion."""
    parts = jax.tree.leaves(node, is_leaf=lambda x: isinstance(x, _FRESH))
    return bool(parts) and all(isinstance(x, _FRESH) for x in parts)


def _copied(like: Tree, given: Tree, reduction: str | None, path: Path) -> Tree:
    """Copy a state, except its inner state, to its counterpart in the new optimizer."""
    kind, is_same = type(like), type(like) is type(given)
    if isinstance(like, _FRESH):
        return given if _is_alike(like, given) else like
    if kind in _WINDOWS:
        _check_same_scale(like, given, path)
        given = _copied_window(like, given, reduction, path)
    elif kind in _INNER and not is_same:
        given = _copied_skips(like, given)
    if kind in _INNER:
        like, given = (x._replace(**{_INNER[type(x)]: ()}) for x in (like, given))
        for name in kind._fields:
            new, old = getattr(like, name), getattr(given, name)
            if name in _RESTARTED or new is None or old is None:
                given = given._replace(**{name: _continued(new, old)})
    if isinstance(like, WatchState):
        given = _continued_watch(like, given)
    return _copied_children(like, given, reduction, path)


def _continued(new: Tree, old: Tree) -> Tree:
    """Return the old state of a rule or, if the rules differ, the new one."""
    if isinstance(new, dict) and isinstance(old, dict):  # one rule for each signal
        return {key: old[key] if _is_alike(x, old.get(key)) else x for key, x in new.items()}
    return old if _is_alike(new, old) else new


def _continued_watch(like: WatchState, given: WatchState) -> WatchState:
    """Initialize the norms if other norms are measured, and the incidents if names differ."""
    new, old = like.incidents, given.incidents
    measured = ((x.norms, x.levels, x.incidents.names) for x in (like, given))
    if not _is_alike(*measured):
        given = given._replace(norms=like.norms, levels=like.levels)
    if _is_alike((new.names, new.tap_names), (old.names, old.tap_names)):
        latest = jnp.concatenate([new.rows, old.rows])[-len(new.rows) :]
        return given._replace(incidents=old._replace(rows=latest))
    return given._replace(incidents=new._replace(step_count=old.step_count))


def _is_alike(like: Tree, given: Tree) -> bool:
    """Return whether two trees have the same structure, shapes and dtypes."""

    def shapes(tree: Tree) -> Tree:
        leaves, structure = jax.tree.flatten(tree)
        return structure, [(np.shape(x), jnp.result_type(x)) for x in leaves]

    return shapes(like) == shapes(given)


def _copied_children(like: Tree, given: Tree, reduction: str | None, path: Path) -> Tree:
    """Convert each child of a state pytree separately."""
    if isinstance(like, dict) and isinstance(given, dict):
        names = like.keys() ^ given.keys()
        if names and all(_is_fresh({**like, **given}[name]) for name in names):
            given = like | {name: given[name] for name in like.keys() & given.keys()}
    children, structure = children_of(like)
    others, other_structure = children_of(given)
    if structure != other_structure:
        raise _mismatch(_name(like), _name(given), path)
    if structure == jax.tree.structure(0):
        if not _is_alike(like, given):
            raise _mismatch(describe(like), describe(given), path)
        return given
    pairs = zip(children, others, strict=True)
    copied = [_converted(x, y, reduction, (*path, *key)) for (key, x), (_, y) in pairs]
    return jax.tree.unflatten(structure, copied)


def _copied_skips(like: Tree, given: Tree) -> Tree:
    """Convert the counts of skipped steps between guards of this package and of Optax."""
    if isinstance(given, optax.ApplyIfFiniteState):
        skips, streak, failed = map(_count, (given.total_notfinite, given.notfinite_count, 0))
    else:
        skips, streak = given.skipped_nonfinite, given.consecutive_skips
        failed = given.guard_failed
    if isinstance(like, optax.ApplyIfFiniteState):
        return like._replace(notfinite_count=streak, last_finite=streak == 0, total_notfinite=skips)
    return like._replace(skipped_nonfinite=skips, consecutive_skips=streak, guard_failed=failed)


def _copied_window(like: _Window, given: _Window, reduction: str | None, path: Path) -> _Window:
    """Convert accumulated gradients, which `MultiSteps` may store as a mean instead of a sum."""
    noise = getattr(like, "noise", ())
    if not _is_alike(noise, getattr(given, "noise", ())):
        if jax.tree.leaves(noise):
            hint = "Call `flush` first: the noise scale needs the norms of all micro-batches."
            _check_closed(given, path, hint)
        given = given._replace(noise=noise) if isinstance(given, AccumulationState) else given
    if type(like) is type(given):
        return given._replace(acc_grads=_accumulator(like, given, 1, path))
    held, steps = _count(given.mini_step), _count(given.gradient_step)
    is_ours = isinstance(like, AccumulationState)
    if isinstance(given, AccumulationState):
        _check_weights(given, path)
    if not jax.tree.leaves(like.acc_grads):
        _check_closed(given, path)
    elif reduction is None and _may_be_open(given):
        rule = '"mean" or "sum" if micro-batches may be accumulated'
        hint = f'Pass "mean" if {leaf_path("state", path)} accumulates the mean of gradients.'
        raise value_error("reduction", rule, "None", hint)
    length = jnp.float32(1) if reduction == "sum" else jnp.maximum(held, 1).astype(jnp.float32)
    # Use zeros for an empty window, because our accumulator still contains the previous sum.
    # `MultiSteps` would add to this sum.
    is_filled = held > 0
    acc = _accumulator(like, given, is_filled * length if is_ours else is_filled / length, path)
    like = like._replace(mini_step=held, gradient_step=steps, acc_grads=acc)
    if not isinstance(like, AccumulationState):
        return like
    return like._replace(
        total_weight=held.astype(jnp.float32),
        micro_batch_count=steps * like.accumulation_steps + held,
        emitted=_count((held == 0) & (steps > 0)),
    )


def _check_same_scale(like: _Window, given: _Window, path: Path) -> None:
    """Raise if only one of two windows may contain gradients multiplied by a loss scale."""
    windows = (getattr(x, _INNER[type(x)]) for x in (like, given))
    has_scale, had_scale = (bool(find_states(x, LossScaleState)) for x in windows)
    if has_scale != had_scale and _may_be_open(given):
        rule = "a state without accumulated micro-batches if a loss scale is added or removed"
        got = f"{leaf_path('state', path)}.mini_step = {shortened(given.mini_step)}"
        hint = "Call `flush` first, because the micro-batches are multiplied by the loss scale."
        raise value_error("state", rule, got, hint)


def _check_weights(window: AccumulationState, path: Path) -> None:
    """Raise if accumulated micro-batches have weights other than 1."""
    weight, held = window.total_weight, window.mini_step
    if _is_open(window) and not is_traced(weight) and weight != held:
        place = leaf_path("state", path) + ".total_weight"
        got = f"{place} = {float(weight):g} with mini_step = {int(held)}"
        hint = "Call `flush` first, because `MultiSteps` does not support weights."
        raise value_error("state", "a state whose micro-batches have weight 1", got, hint)


def _accumulator(like: _Window, given: _Window, factor: Scalar | int, path: Path) -> Tree:
    """Multiply the accumulator of `given` by a factor and cast it to the dtypes of `like`."""

    def scaled(x: Array, like: Array) -> Array:
        if jnp.iscomplexobj(x) and not jnp.iscomplexobj(like):
            return x
        # Select instead of multiplying by 0, because an empty accumulator may contain NaN.
        x = jnp.where(factor > 0, x * factor, jnp.zeros_like(x))
        return x.astype(jnp.result_type(like))

    ours, acc = like.acc_grads, given.acc_grads
    if not jax.tree.leaves(ours):  # `every=1` needs no accumulator
        _check_closed(given, path)
    if not (jax.tree.leaves(ours) and jax.tree.leaves(acc)):
        return ours
    is_same = jax.tree.structure(ours) == jax.tree.structure(acc)
    return jax.tree.map(scaled, acc, ours) if is_same else acc


def _is_open(window: _Window) -> bool:
    """Return whether the number of accumulated micro-batches is positive and not traced."""
    return not is_traced(window.mini_step) and bool(_count(window.mini_step) > 0)


def _may_be_open(window: _Window) -> bool:
    """Return whether the number of accumulated micro-batches is positive or traced."""
    return is_traced(window.mini_step) or _is_open(window)


def _check_closed(given: Tree, path: Path, hint: str = _FLUSH) -> None:
    """Raise if there may be accumulated micro-batches."""
    if isinstance(given, _WINDOWS) and _may_be_open(given):
        got = f"{leaf_path('state', path)}.mini_step = {shortened(given.mini_step)}"
        raise value_error("state", "a state without accumulated micro-batches", got, hint)


def _count(value: Any) -> Scalar:
    return jnp.asarray(value, jnp.int32)


def _name(node: Tree) -> str:
    if isinstance(node, dict):
        return f"a dict with the keys {', '.join(map(repr, sorted(node, key=str)))}"
    if type(node) in (tuple, list):
        return f"a {type(node).__name__} of {len(node)}"
    return describe(node) if hasattr(node, "dtype") else type(node).__name__


def _mismatch(expected: str, got: str, path: Path) -> ArgumentTypeError:
    rule = "a state that matches the state of `tx`"
    place = leaf_path("state", path)
    return type_error("state", rule, f"{got} at {place} instead of {expected}", _HINT)
