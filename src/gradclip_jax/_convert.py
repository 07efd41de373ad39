"""Convert an optimizer state to the state of another optimizer during training.

Guards, clips, accumulations and `watch` are matched by type and by the number of accumulations
around them, and copied in order. Those without a counterpart are initialized or dropped. All other
arrays must be the same in both optimizers, in the same order.
"""

import collections
from collections.abc import Hashable, Iterator
from itertools import zip_longest
from typing import Final, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._checks import check_choice, check_transformation, describe, is_traced, leaf_path
from ._errors import public, type_error, value_error
from ._run_if import like_dtypes
from ._states import KINDS, find_states, plain_arrays, with_structure_of
from ._types import Array, Path, Tree
from .accumulation._state import AccumulationState
from .clipping._clip import ClipState
from .guarding._loss_scale import LossScaleState
from .guarding._skip_nonfinite import SkipNonfiniteState
from .monitoring._watch import WatchState

_INNER: Final[dict[type, str]] = {  # name of the field that contains the inner state
    **{kind: x.inner for kind, x in KINDS.items() if x.inner},
    optax.MultiStepsState: "inner_opt_state",
    optax.ApplyIfFiniteState: "inner_state",
}
_KINDS: Final[dict[type, type]] = {
    optax.MultiStepsState: AccumulationState,
    optax.ApplyIfFiniteState: SkipNonfiniteState,
}
_Window: TypeAlias = AccumulationState | optax.MultiStepsState
_WINDOWS = (AccumulationState, optax.MultiStepsState)


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
    of an accumulation is initialized as well, and so is that of one with another rule. A `watch`
    with another `history`, or with other clips inside, keeps only its step count. Arrays are cast
    to the dtypes of the new optimizer. Discarding accumulated micro-batches raises an error.

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
        micro-batches than the new window. It continues with their weighted mean, in which each
        micro-batch then has the same weight.

    Raises:
        TypeError: If part of `state` has no counterpart in the state of `tx`, or differs from it in
            shape, for example because `params` are other parameters.
        ValueError: If `reduction` is invalid or is required but missing, if accumulated
            micro-batches would be discarded (inside `jit`, if they could be), or if a
            `dynamic_loss_scale` is added to, or removed from, an unfinished accumulation.

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
    check_transformation("tx", tx)
    check_choice("reduction", reduction, (None, "mean", "sum"))
    like = tx.init(params)
    new, old = plain_arrays(like), plain_arrays(state)
    values = dict(jax.tree.leaves_with_path(new))
    values.update((path, value) for path, value in _pairs(new, old))
    unmatched = _parts(old)
    for key, parts in _parts(new).items():
        if len(parts) != len(unmatched[key]):
            continue
        for (path, x), (old_path, y) in zip(parts, unmatched.pop(key), strict=True):
            copied = _without_inner(_copied(x, y, reduction, old_path))
            values.update(((*path, *rest), v) for rest, v in jax.tree.leaves_with_path(copied))
    for parts in unmatched.values():
        for path, x in parts:
            _check_closed(x, path)
    converted = jax.tree.map_with_path(lambda path, _: values[path], new)
    return with_structure_of(like, like_dtypes(converted, new))


class _Leaf(NamedTuple):
    """An array of a state.

    Attributes:
        keys: Types of the states and containers around it except tuples, with the keys in them.
        path: Its path.
        value: The array.
    """

    keys: tuple[Hashable, ...]
    path: Path
    value: Array


def _leaves(node: Tree, path: Path = (), keys: tuple[Hashable, ...] = ()) -> Iterator[_Leaf]:
    """Yield all arrays except those of clips, guards, accumulations and `watch` themselves."""
    kind = type(node)
    if kind in _INNER:
        name = _INNER[kind]
        yield from _leaves(getattr(node, name), (*path, jax.tree_util.GetAttrKey(name)), keys)
    elif kind is not ClipState:
        children, structure = jax.tree.flatten_with_path(node, is_leaf=lambda x: x is not node)
        if structure == jax.tree.structure(0):
            yield _Leaf(keys, path, node)
            return
        for key, child in children:
            inside = keys if kind is tuple else (*keys, kind, *key)  # chains may be nested
            yield from _leaves(child, (*path, *key), inside)


def _pairs(like: Tree, given: Tree, path: Path = ()) -> Iterator[tuple[Path, Array]]:
    """Yield the path of each array of `like` with the value of its counterpart in `given`."""
    for new, old in zip_longest(_leaves(like), _leaves(given, path)):
        got = f"{_shown('state', old)} instead of {_shown('tx.init(params)', new)}"
        if new is None or old is None or new.keys != old.keys:
            rule = "a state that matches the state of `tx`"
            hint = (
                "Pass an `.opt_state` or a checkpoint of it. Only clips, guards, accumulations and "
                "`watch` may be added, removed or moved."
            )
            raise type_error("state", rule, got, hint)
        if np.shape(new.value) != np.shape(old.value):
            rule, hint = "the parameters of `state`", "Pass the parameters of its last update."
            raise type_error("params", rule, got, hint)
        yield new.path, old.value


def _shown(argument: str, leaf: _Leaf | None) -> str:
    if leaf is None:
        return "nothing"
    state = next((f" of {x.__name__}" for x in leaf.keys if isinstance(x, type)), "")
    return f"{describe(leaf.value)}{state} at {leaf_path(argument, leaf.path)}"


def _parts(state: Tree) -> dict[Hashable, list[tuple[Path, Tree]]]:
    """Group clips, guards, accumulations and `watch` by type and accumulations around them."""
    found = find_states(state, (*_INNER, ClipState))
    windows = [path for path, x in found if isinstance(x, _WINDOWS)]
    parts: dict[Hashable, list[tuple[Path, Tree]]] = collections.defaultdict(list)
    for path, x in found:
        depth = sum(path[: len(window)] == window for window in windows)
        parts[_KINDS.get(type(x), type(x)), depth].append((path, x))
    return parts


def _without_inner(node: Tree) -> Tree:
    return node._replace(**{_INNER[type(node)]: ()}) if type(node) in _INNER else node


def _copied(like: Tree, given: Tree, reduction: str | None, path: Path) -> Tree:
    """Convert a clip, guard, accumulation or `watch`, except its inner state."""
    if isinstance(like, _WINDOWS):
        return _copied_window(like, given, reduction, path)
    if type(like) is type(given):
        old, new = (jax.eval_shape(_without_inner, x) for x in (given, like))
        is_alike = jax.tree.structure(old) == jax.tree.structure(new)
        if is_alike and old == new:
            return given
        if isinstance(like, WatchState):  # with another history, or other clips inside
            return like._replace(step_count=given.step_count)
        return like  # it may have another rule
    if isinstance(like, SkipNonfiniteState):
        total, streak = given.total_notfinite, given.notfinite_count
        return like._replace(skipped_nonfinite=total, consecutive_skips=streak)
    total, streak = given.skipped_nonfinite, given.consecutive_skips
    return like._replace(total_notfinite=total, notfinite_count=streak, last_finite=streak == 0)


def _copied_window(like: _Window, given: _Window, reduction: str | None, path: Path) -> _Window:
    """Convert accumulated gradients, which `MultiSteps` may store as a mean instead of a sum."""
    scales = [bool(find_states(x.inner_opt_state, LossScaleState)) for x in (like, given)]
    if scales[0] != scales[1]:
        _check_closed(given, path, "because its micro-batches are multiplied by the loss scale")
    sums = like.acc_grads
    if jax.tree.leaves(sums) and jax.tree.leaves(given.acc_grads):
        place = (*path, jax.tree_util.GetAttrKey("acc_grads"))
        copied = [value for _, value in _pairs(sums, given.acc_grads, place)]
        sums = jax.tree.unflatten(jax.tree.structure(sums), copied)
    else:  # `every=1` needs no accumulator
        _check_closed(given, path)
    if type(like) is type(given):
        return given._replace(acc_grads=sums)
    held, steps = jnp.asarray(given.mini_step), jnp.asarray(given.gradient_step)
    if jax.tree.leaves(sums) and reduction is None and (is_traced(held) or held > 0):
        rule = '"mean" or "sum" if micro-batches may be accumulated'
        hint = f'Pass "mean" if {leaf_path("state", path)} accumulates the mean of gradients.'
        raise value_error("reduction", rule, "None", hint)
    weight = given.total_weight if isinstance(given, AccumulationState) else jnp.float32(held)
    length = jnp.where((weight == 0) | (reduction == "sum"), 1, weight)
    factor = length if isinstance(like, AccumulationState) else 1 / length
    # An accumulator with an empty window contains the last sum, which may be NaN.
    sums = jax.tree.map(lambda x: jnp.where(held > 0, x * factor, jnp.zeros_like(x)), sums)
    like = like._replace(mini_step=held, gradient_step=steps, acc_grads=sums)
    if not isinstance(like, AccumulationState):
        return like
    return like._replace(
        total_weight=held,
        micro_batch_count=steps * like.accumulation_steps + held,
        emitted=(held == 0) & (steps > 0),
    )


def _check_closed(given: Tree, path: Path, why: str = "or convert after the next step") -> None:
    """Raise if there may be accumulated micro-batches."""
    if not isinstance(given, _WINDOWS):
        return
    held = jnp.asarray(given.mini_step)
    if is_traced(held) or held > 0:
        got = f"{leaf_path('state', path)}.mini_step = {held}"
        hint = f"Call `flush` first, {why}."
        raise value_error("state", "a state without accumulated micro-batches", got, hint)
