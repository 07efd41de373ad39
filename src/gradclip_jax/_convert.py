"""The state of one optimizer as the state of another: changing over in the middle of a run.

Chains, guards and accumulations are opened, so each state is a sequence of parts. Parts of one kind
are matched in order, and copied; the fields of a transformation of Optax are translated to those of
its counterpart here, or back. A part of this package that only one of the two has starts anew or is
dropped. All else is refused, with its path.
"""

import collections
import itertools
from collections.abc import Iterator
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._checks import check_choice, describe, is_traced, leaf_path, shortened
from ._errors import ArgumentTypeError, public, type_error, value_error
from ._rounding import RoundingState
from ._states import GATES, find_states, plain_arrays, replace_states, with_structure_of
from ._tree_checks import children_of
from ._types import Scalar, Tree
from .accumulation._reduction import init_with_reductions
from .accumulation._state import AccumulationState
from .clipping._clip import ClipState
from .guarding._loss_scale import LossScaleState
from .guarding._skip_nonfinite import SkipNonfiniteState
from .monitoring._record import NormRecordState
from .monitoring._watch import WatchState

_INNER: Final[dict[type, str]] = GATES | {  # what is around another state, and where that is
    optax.MultiStepsState: "inner_opt_state",
    optax.ApplyIfFiniteState: "inner_state",
    WatchState: "inner_state",
}
_KINDS: Final[dict[type, type]] = {
    optax.MultiStepsState: AccumulationState,
    optax.ApplyIfFiniteState: SkipNonfiniteState,
    LossScaleState: SkipNonfiniteState,
}
_FRESH = (ClipState, NormRecordState, RoundingState, optax.EmptyState)
_HINT = (
    "Leave the rest of the chain as it was; restore a checkpoint into the `init(params)` of the "
    "transformation that wrote it before it is converted."
)


@public
def convert_state(
    tx: optax.GradientTransformation, state: Any, params: Tree, *, reduction: str | None = None
) -> Any:
    """The state of `tx` that continues a run from the state of the optimizer it replaces.

    For a run that was started with Optax and continues with this package, or vice versa, and
    for a run that gets a guard, an accumulation or a clip, or loses one. The two optimizers must be
    alike except for the parts in this table, wherever they are: inside `chain`,
    `named_chain`, `masked`, `partition`, `inject_hyperparams`, or one another.

    | before | after | what is carried over |
    | --- | --- | --- |
    | `MultiSteps` | `accumulate_gradients` | the open window, the counts, the inner state |
    | `apply_if_finite` | `skip_nonfinite` | the counts of skips, the inner state |
    | a clip of Optax | a clip | nothing: Optax's have no state. Rules and schedules start anew |
    | nothing | a guard, an accumulation, a `watch` | it starts anew around what is there |
    | an accumulator | one of another dtype | the open window, rounded to nearest |
    | nothing | a clip, `record_norms` | it starts anew, and so do others of its kind |
    | nothing | `round_stochastically` | the same |

    Each row may be read backwards. A window that would be lost is refused while it is open.

    Args:
        tx: the optimizer that goes on: a transformation, or an `optax.MultiSteps`.
        state: the state of the optimizer it replaces; that of an `nnx.Optimizer` as it is.
        params: the parameters.
        reduction: "mean" or "sum": whether the accumulation of the two optimizers averages. None
            asks `tx`, for an `optax.MultiSteps` by one call of its `update`.

    Returns:
        A state for `tx.update`. `accumulation_stats` counts past micro-batches as if all windows
        had been as long as the first; a `skip_state` of `MultiSteps` starts anew.

    Raises:
        TypeError: a part of `state` has no counterpart in that of `tx`, or other shapes or
            dtypes; the message names its path.
        ValueError: an open window has weights other than 1 and goes to `MultiSteps`, which has
            none, or goes to an optimizer that has no room for it; `reduction` is another word,
            or is not that of `tx`.

    Examples:
        >>> import jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> params = jnp.array([0.0])
        >>> old = optax.MultiSteps(optax.sgd(1.0), every_k_schedule=2)
        >>> _, state = old.update(jnp.array([2.0]), old.init(params), params)
        >>> new = gcx.accumulate_gradients(optax.sgd(1.0), every=2)
        >>> state = gcx.convert_state(new, state, params)
        >>> updates, state = new.update(jnp.array([6.0]), state, params)
        >>> updates.tolist()
        [-4.0]
    """
    if not callable(getattr(tx, "init", None)):
        rule, hint = "an optimizer", "Pass an Optax transformation, or an `optax.MultiSteps`."
        raise type_error("tx", rule, shortened(tx), hint)
    check_choice("reduction", reduction, (None, "mean", "sum"))
    like, reductions = init_with_reductions(tx.init, params)
    if reduction is None:
        averages = _averages(tx, like, params, reductions)
    elif any(own in ("mean", "sum") and own != reduction for own in reductions):
        rule, hint = f"that of `tx`, {reductions[0]!r}", "Leave it out: `tx` is asked."
        raise value_error("reduction", rule, repr(reduction), hint)
    else:
        averages = reduction == "mean"
    arrays = plain_arrays(like), plain_arrays(state)
    return with_structure_of(like, jax.tree.map(jnp.asarray, _converted(*arrays, averages, ())))


def _averages(tx: Any, like: Any, params: Tree, reductions: list[Any]) -> Any:
    """Whether the accumulation of `tx` averages: bool, bool[] inside jit, or None if unknown."""
    if reductions:
        first = reductions[0]
        is_known = first in ("mean", "sum") and all(other == first for other in reductions)
        return first == "mean" if is_known else None
    if not find_states(like, optax.MultiStepsState):
        return None

    def with_large_sum(state: Any) -> Any:
        return state._replace(acc_grads=jax.tree.map(lambda x: x + 2.0**15, state.acc_grads))

    # `MultiSteps` has no field for it, but its mean of one gradient forgets what it held before.
    state = replace_states(like, optax.MultiStepsState, with_large_sum)
    _, state = tx.update(jax.tree.map(jnp.zeros_like, params), state, params)
    windows = [window.acc_grads for _, window in find_states(state, optax.MultiStepsState)]
    sums = [jnp.any(jnp.real(x) > 2.0**14) for x in jax.tree.leaves(windows)]
    return ~jnp.stack(sums).any() if sums else True


def _converted(like: Any, given: Any, averages: Any, path: Any) -> Any:
    """The values of `given` in the structure of `like`, a fresh state.

    `averages` is whether accumulations do: bool, bool[], or None if that is not known.
    """
    of_kind: dict[Any, list[tuple[Any, Any]]] = collections.defaultdict(list)
    for place, part in _parts(given, path):
        of_kind[_kind(part)].append((place, part))
    counts = collections.Counter(_kind(part) for _, part in _parts(like))
    # Which of several clips is new cannot be known.
    anew = {kind for kind, parts in of_kind.items() if len(parts) != counts[kind]}

    def counterpart(node: Any) -> Any:
        kind = _kind(node)
        if (_is_fresh(node) and kind in anew) or not of_kind[kind]:
            if kind is None:
                raise _mismatch(_name(node), "nothing", path)
            return node
        place, part = of_kind[kind].pop(0)
        return _copied(node, part, averages, place)

    def rebuilt(node: Any) -> Any:
        if type(node) is tuple:
            return tuple(map(rebuilt, node))
        new, inner = counterpart(node), _INNER.get(type(node))
        return new._replace(**{inner: rebuilt(getattr(node, inner))}) if inner else new

    converted = rebuilt(like)
    for place, part in itertools.chain(*of_kind.values()):
        if _kind(part) is None:
            raise _mismatch("nothing", _name(part), place)
        _check_closed(part, place)
    return converted


def _parts(node: Any, path: Any = ()) -> Iterator[tuple[Any, Any]]:
    """The path and the state of all that is in chains, guards and accumulations, and of these."""
    if type(node) is tuple:
        for i, x in enumerate(node):
            yield from _parts(x, (*path, jax.tree_util.SequenceKey(i)))
        return
    yield path, node
    inner = _INNER.get(type(node))
    if inner:
        yield from _parts(getattr(node, inner), (*path, jax.tree_util.GetAttrKey(inner)))


def _kind(part: Any) -> type | None:
    """What a part is matched by; None for one that must have a counterpart."""
    may_start_anew = type(part) in _INNER or _is_fresh(part)
    return _KINDS.get(type(part), type(part)) if may_start_anew else None


def _is_fresh(node: Any) -> bool:
    """Whether a state may start anew, or be left behind: that of clips, records, or nothing."""
    parts = jax.tree.leaves(node, is_leaf=lambda x: isinstance(x, _FRESH))
    return bool(parts) and all(isinstance(x, _FRESH) for x in parts)


def _copied(like: Any, given: Any, averages: Any, path: Any) -> Any:
    """The values of one part in its counterpart; the state inside a guard is left as it is."""
    kind, is_same = _kind(like), type(like) is type(given)
    if is_same and hasattr(like, "incidents") and not _is_alike(like.incidents, given.incidents):
        given = given._replace(incidents=like.incidents)
    if isinstance(like, _FRESH):
        return given if _is_alike(like, given) else like
    if kind is AccumulationState:
        given = _copied_window(like, given, averages, path)
    elif kind is SkipNonfiniteState and not is_same:
        given = _copied_skips(like, given)
    if kind in _INNER:
        like, given = (x._replace(**{_INNER[type(x)]: ()}) for x in (like, given))
    return _copied_children(like, given, averages, path)


def _is_alike(like: Any, given: Any) -> bool:
    """Whether all shapes and dtypes are the same."""

    def shapes(tree: Any) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        return structure, [(np.shape(x), jnp.result_type(x)) for x in leaves]

    return shapes(like) == shapes(given)


def _copied_children(like: Any, given: Any, averages: Any, path: Any) -> Any:
    """The values of `given`, child by child."""
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
    copied = [_converted(x, y, averages, (*path, *key)) for (key, x), (_, y) in pairs]
    return jax.tree.unflatten(structure, copied)


def _copied_skips(like: Any, given: Any) -> Any:
    """The counts of skips, where one of the two is Optax's guard or a loss scale."""
    if isinstance(given, optax.ApplyIfFiniteState):
        skips, streak, failed = map(_count, (given.total_notfinite, given.notfinite_count, 0))
    else:
        skips, streak = given.skipped_nonfinite, given.consecutive_skips
        failed = given.guard_failed
    if isinstance(like, optax.ApplyIfFiniteState):
        return like._replace(notfinite_count=streak, last_finite=streak == 0, total_notfinite=skips)
    return like._replace(skipped_nonfinite=skips, consecutive_skips=streak, guard_failed=failed)


def _copied_window(like: Any, given: Any, averages: Any, path: Any) -> Any:
    """A window; that of Optax holds the mean, if it averages, and ours always the sum."""
    held, steps = _count(given.mini_step), _count(given.gradient_step)
    if type(like) is type(given):
        return given._replace(acc_grads=_accumulator(like, given, 1, path))
    if averages is None:
        rule = 'given, "mean" or "sum", where `tx` does not decide it for all its leaves'
        hint = f"A window at {leaf_path('state', path)} is one or the other."
        raise value_error("reduction", rule, "None", hint)
    length = jnp.where(averages, jnp.maximum(held, 1), 1).astype(jnp.float32)
    # Zero for an empty window: ours still holds the sum of the last one, Optax adds to it.
    is_filled, is_ours = held > 0, isinstance(like, AccumulationState)
    acc = _accumulator(like, given, is_filled * length if is_ours else is_filled / length, path)
    like = like._replace(mini_step=held, gradient_step=steps, acc_grads=acc)
    if not is_ours:
        weight = given.total_weight
        if _is_open(given) and not is_traced(weight) and weight != held:  # Optax has no weights
            place = leaf_path("state", path) + ".total_weight"
            rule, hint = "a window of weights 1", "`flush` the window first."
            got = f"a weight of {float(weight):g} in {int(held)} micro-batches at {place}"
            raise value_error("state", rule, got, hint)
        return like
    return like._replace(
        total_weight=held.astype(jnp.float32),
        micro_batch_count=steps * like.accumulation_steps + held,
        emitted=_count((held == 0) & (steps > 0)),
    )


def _accumulator(like: Any, given: Any, factor: Any, path: Any) -> Tree:
    """The accumulator of `given` times a factor, in the dtypes of that of `like`."""

    def scaled(x: Any, like: Any) -> Any:
        if jnp.iscomplexobj(x) and not jnp.iscomplexobj(like):
            return x
        # Selected, not multiplied: an empty window may hold anything.
        x = jnp.where(factor > 0, x * factor, jnp.zeros_like(x))
        return x.astype(jnp.result_type(like))

    ours, acc = like.acc_grads, given.acc_grads
    if not jax.tree.leaves(ours):  # with `every=1` there is none
        _check_closed(given, path)
    if not (jax.tree.leaves(ours) and jax.tree.leaves(acc)):
        return ours
    is_same = jax.tree.structure(ours) == jax.tree.structure(acc)
    return jax.tree.map(scaled, acc, ours) if is_same else acc


def _is_open(window: Any) -> bool:
    """Whether micro-batches wait in a window, as far as that is known."""
    return not is_traced(window.mini_step) and bool(window.mini_step > 0)


def _check_closed(given: Any, path: Any) -> None:
    """Refuses to leave an open window behind."""
    if isinstance(given, (AccumulationState, optax.MultiStepsState)) and _is_open(given):
        place = leaf_path("state", path) + ".mini_step"
        rule = "between two windows where `tx` has no room for one"
        got = f"{int(_count(given.mini_step))} held micro-batches at {place}"
        hint = "`flush` the window first, or convert after the next step."
        raise value_error("state", rule, got, hint)


def _count(value: Any) -> Scalar:
    return jnp.asarray(value, jnp.int32)


def _name(node: Any) -> str:
    if isinstance(node, dict):
        return f"a dict with the keys {', '.join(map(repr, sorted(node, key=str)))}"
    if type(node) in (tuple, list):
        return f"a {type(node).__name__} of {len(node)}"
    return describe(node) if hasattr(node, "dtype") else type(node).__name__


def _mismatch(expected: str, got: str, path: Any) -> ArgumentTypeError:
    rule = "a state that maps on that of `tx`"
    place = leaf_path("state", path)
    return type_error("state", rule, f"{got} where `tx` has {expected} at {place}", _HINT)
