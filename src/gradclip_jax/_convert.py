"""Convert an optimizer state to the state of another optimizer during training.

Optimizer states are split into the states of their transformations, including those inside chains,
guards and accumulations. States of the same type are matched in order and copied. Fields are
translated between the states of Optax and of this package. A guard, clip, accumulation or `watch`
without an unambiguous counterpart is initialized or dropped. Any other unmatched state raises an
error with its path.
"""

import collections
from collections.abc import Hashable, Iterator
from typing import Any, Final, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._checks import check_choice, children_of, describe, is_traced, leaf_path, shortened
from ._errors import ArgumentTypeError, public, type_error, value_error
from ._states import KINDS, find_states, plain_arrays, with_structure_of
from ._types import Array, Path, Scalar, Tree
from .accumulation._state import AccumulationState
from .clipping._clip import ClipState
from .guarding._loss_scale import LossScaleState
from .guarding._skip_nonfinite import SkipNonfiniteState
from .monitoring._watch import WatchState

_INNER: Final[dict[type, str]] = {  # name of the field that contains the inner state
    **{kind: x.inner for kind, x in KINDS.items() if x.inner},
    WatchState: "inner_state",
    optax.MultiStepsState: "inner_opt_state",
    optax.ApplyIfFiniteState: "inner_state",
}
_KINDS: Final[dict[type, type]] = {
    optax.MultiStepsState: AccumulationState,
    optax.ApplyIfFiniteState: SkipNonfiniteState,
}
_Window: TypeAlias = AccumulationState | optax.MultiStepsState
_WINDOWS = (AccumulationState, optax.MultiStepsState)
_CLIPS = (ClipState, optax.EmptyState)
_HINT = (
    "Restore checkpoints with the old optimizer; only clips, guards, accumulations and `watch` may "
    "be added, removed or moved."
)
_FLUSH = "Call `flush` first, or convert the state outside jit after the next optimizer step."


class _Context(NamedTuple):
    """Arguments of `convert_state` that all parts of a state share.

    Attributes:
        reduction: The argument of the same name.
        shapes: Shapes of the parameters.
    """

    reduction: str | None
    shapes: frozenset[tuple[int, ...]]


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
    | nothing | a clip | nothing; its state is initialized |

    Every conversion in the table also works in reverse. If the number of guards or clips of one
    type changes, their states are initialized. The state of a guard or clip that moves into or out
    of an accumulation is initialized as well, and so is that of a clip with another rule.
    Discarding accumulated micro-batches raises an error.

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
            shapes or dtypes, for example because `params` are other parameters.
        ValueError: If `reduction` is invalid or is required but missing, if accumulated
            micro-batches would be discarded (inside `jit`, if they could be), if they have weights
            other than 1, which `MultiSteps` does not support, or if a `dynamic_loss_scale` is added
            to, or removed from, an unfinished accumulation.

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
    shapes = frozenset(map(np.shape, jax.tree.leaves(params)))
    converted = _converted(plain_arrays(like), plain_arrays(state), _Context(reduction, shapes), ())
    return with_structure_of(like, jax.tree.map(jnp.asarray, converted))


def _converted(like: Tree, given: Tree, context: _Context, path: Path) -> Tree:
    """Copy the values of `given` into the structure of `like`, a new state of `tx`."""
    parts, others = list(_parts(like)), list(_parts(given, path))
    has_same_windows = _num_windows(parts) == _num_windows(others)
    has_same_containers = _containers(parts) == _containers(others)

    def key_of(part: _Part) -> Hashable:
        """Return a key that is equal for counterparts, or None if a counterpart is required."""
        kind = type(part.node)
        if _is_optional(part):
            # A guard or clip outside an accumulation has other statistics than one inside.
            return _KINDS.get(kind, kind), part.depth if has_same_windows else 0
        return None if has_same_containers or not _is_clip(part.node) else kind

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
        return _copied(node, part.node, context, part.path)

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


def _num_windows(parts: list[_Part]) -> int:
    return sum(isinstance(part.node, _WINDOWS) for part in parts)


def _is_optional(part: _Part) -> bool:
    return type(part.node) in _INNER or type(part.node) in _CLIPS


def _containers(parts: list[_Part]) -> list[type]:
    return [type(part.node) for part in parts if not _is_optional(part)]


def _is_clip(node: Tree) -> bool:
    """Return whether a state, such as that of a masked clip, contains only states of clips."""
    parts = jax.tree.leaves(node, is_leaf=lambda x: isinstance(x, _CLIPS))
    return bool(parts) and all(isinstance(x, _CLIPS) for x in parts)


def _copied(like: Tree, given: Tree, context: _Context, path: Path) -> Tree:
    """Copy a state, except its inner state, to its counterpart in the new optimizer."""
    kind = type(like)
    if kind in _CLIPS:
        return given if _types(like) == _types(given) else like
    if kind in _WINDOWS:
        _check_same_scale(like, given, path)
        given = _copied_window(like, given, context.reduction, path)
    elif kind in _INNER and kind is not type(given):
        given = _copied_skips(like, given)
    if kind in _INNER:
        like, given = (x._replace(**{_INNER[type(x)]: ()}) for x in (like, given))
    return _copied_children(like, given, context, path)


def _types(tree: Tree) -> tuple[Any, list[tuple[tuple[int, ...], np.dtype]]]:
    """Return the structure of a tree, and the shapes and dtypes of its leaves."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(np.shape(x), jnp.result_type(x)) for x in leaves]


def _copied_children(like: Tree, given: Tree, context: _Context, path: Path) -> Tree:
    """Convert each child of a state pytree separately."""
    if isinstance(like, dict) and isinstance(given, dict):  # the states of a `named_chain`
        names = like.keys() ^ given.keys()
        if names and all(_is_clip({**like, **given}[name]) for name in names):
            given = like | {name: given[name] for name in like.keys() & given.keys()}
    children, structure = children_of(like)
    others, other_structure = children_of(given)
    if structure != other_structure:
        raise _mismatch(_name(like), _name(given), path)
    if structure == jax.tree.structure(0):
        return _copied_leaf(like, given, context, path)
    pairs = zip(children, others, strict=True)
    copied = [_converted(x, y, context, (*path, *key)) for (key, x), (_, y) in pairs]
    return jax.tree.unflatten(structure, copied)


def _copied_leaf(like: Any, given: Any, context: _Context, path: Path) -> Array:
    """Return a leaf, or raise if its shape or dtype differs."""
    if np.shape(like) != np.shape(given) and np.shape(like) in context.shapes:
        rule = "the parameters with which `state` was initialized"
        got = f"{describe(like)} where {leaf_path('state', path)} is {describe(given)}"
        raise type_error("params", rule, got, "Pass the parameters that belong to `state`.")
    if _types(like) != _types(given):
        raise _mismatch(describe(like), describe(given), path)
    return given


def _copied_skips(like: Tree, given: Tree) -> Tree:
    """Convert the counts of skipped steps between guards of this package and of Optax."""
    if isinstance(like, optax.ApplyIfFiniteState):
        streak = given.consecutive_skips
        return like._replace(
            notfinite_count=streak,
            last_finite=streak == 0,
            total_notfinite=given.skipped_nonfinite,
        )
    return like._replace(
        skipped_nonfinite=_count(given.total_notfinite),
        consecutive_skips=_count(given.notfinite_count),
    )


def _copied_window(like: _Window, given: _Window, reduction: str | None, path: Path) -> _Window:
    """Convert accumulated gradients, which `MultiSteps` may store as a mean instead of a sum."""
    new, old = like.acc_grads, given.acc_grads
    has_both = bool(jax.tree.leaves(new)) and bool(jax.tree.leaves(old))
    if not jax.tree.leaves(new):  # `every=1` needs no accumulator
        _check_closed(given, path)
    if type(like) is type(given):
        return given if has_both else given._replace(acc_grads=new)
    if isinstance(given, AccumulationState):
        _check_weights(given, path)
    if jax.tree.leaves(new) and reduction is None and _may_be_open(given):
        rule = '"mean" or "sum" if micro-batches may be accumulated'
        hint = f'Pass "mean" if {leaf_path("state", path)} accumulates the mean of gradients.'
        raise value_error("reduction", rule, "None", hint)
    held, steps = _count(given.mini_step), _count(given.gradient_step)
    length = jnp.float32(1) if reduction == "sum" else jnp.maximum(held, 1).astype(jnp.float32)
    is_ours = isinstance(like, AccumulationState)

    def converted(x: Array, like: Array) -> Array:
        # Our accumulator of an empty window contains the previous sum, to which `MultiSteps` would
        # add. It is selected, because it may be NaN.
        sums = jnp.where(held > 0, x * length if is_ours else x / length, jnp.zeros_like(x))
        return sums.astype(jnp.result_type(like))

    if has_both:  # otherwise `_copied_children` raises an error with the path of the difference
        is_alike = jax.tree.structure(new) == jax.tree.structure(old)
        new = jax.tree.map(converted, old, new) if is_alike else old
    like = like._replace(mini_step=held, gradient_step=steps, acc_grads=new)
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
    if has_scale != had_scale:
        hint = "Call `flush` first, because the micro-batches are multiplied by the loss scale."
        _check_closed(given, path, hint)


def _check_weights(window: AccumulationState, path: Path) -> None:
    """Raise if accumulated micro-batches have weights other than 1."""
    weight, held = window.total_weight, window.mini_step
    if not is_traced(weight) and held > 0 and weight != held:
        place = leaf_path("state", path) + ".total_weight"
        got = f"{place} = {float(weight):g} with mini_step = {int(held)}"
        hint = "Call `flush` first, because `MultiSteps` does not support weights."
        raise value_error("state", "a state whose micro-batches have weight 1", got, hint)


def _may_be_open(window: _Window) -> bool:
    """Return whether the number of accumulated micro-batches is positive or traced."""
    return is_traced(window.mini_step) or bool(_count(window.mini_step) > 0)


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
    return describe(node)


def _mismatch(expected: str, got: str, path: Path) -> ArgumentTypeError:
    rule = "a state that matches the state of `tx`"
    place = leaf_path("state", path)
    return type_error("state", rule, f"{got} at {place} instead of {expected}", _HINT)
