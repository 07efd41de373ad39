"""Convert an optimizer state to the state of another optimizer during training.

States of `optax.MultiSteps` and `optax.apply_if_finite`, and those of earlier versions of this
package, are first converted to states of this package. Guards, clips, accumulations and `watch` are
then matched by type and by the number of accumulations around them, and copied in order. Those
without a counterpart are initialized or dropped. All other arrays must be the same in both
optimizers, in the same order.
"""

import collections
from collections.abc import Hashable, Iterator
from itertools import zip_longest
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._checks import (
    check_arrays,
    check_choice,
    check_one_run,
    check_transformation,
    describe,
    is_traced,
    leaf_path,
)
from ._converters import from_own, to_own
from ._errors import public, type_error, value_error
from ._run_if import like_dtypes
from ._states import is_own_state, metric_names, metrics, plain_arrays, with_structure_of
from ._types import Array, Path, Tree
from .wrappers._accumulation import AccumulationState
from .wrappers._state import WrapperState


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
    | guards and accumulations of versions with one state for each | the same | everything |

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
            shape, for example because `params` are other parameters, or if `state` was vmapped.
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
    check_arrays("params", params)
    check_one_run(metrics(state).values())
    like = tx.init(params)
    new, old = (to_own(plain_arrays(x)) for x in (like, state))
    values = dict(jax.tree.leaves_with_path(new))
    values.update((path, value) for path, value in _pairs(new, old))
    unmatched = _parts(old)
    for key, parts in _parts(new).items():
        if len(parts) != len(unmatched[key]):
            continue
        for (path, x), (old_path, y) in zip(parts, unmatched.pop(key), strict=True):
            copied = _copied(x, y, old_path, reduction)
            values.update(((*path, *rest), v) for rest, v in jax.tree.leaves_with_path(copied))
    for parts in unmatched.values():
        for path, x in parts:
            if isinstance(x, WrapperState) and x.accumulation is not None:
                _check_closed(x, path)
    converted = jax.tree.map_with_path(lambda path, _: values[path], new)
    converted = from_own(plain_arrays(like), converted)
    return with_structure_of(like, like_dtypes(converted, plain_arrays(like)))


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
    if is_own_state(node):
        place = (*path, jax.tree_util.GetAttrKey("inner_state"))
        yield from _leaves(getattr(node, "inner_state", ()), place, keys)
    else:
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
    types = ", ".join(x.__name__ for x in leaf.keys if isinstance(x, type))
    of = f" of {types}" if types else ""
    return f"{describe(leaf.value)}{of} at {leaf_path(argument, leaf.path)}"


def _parts(state: Tree) -> dict[Hashable, list[tuple[Path, Tree]]]:
    """Collect the states of clips, guards, accumulations and `watch` in an optimizer state.

    Returns a dictionary from the type of a state, and the number of accumulations around it, to
    pairs of a path and a state. An accumulation is listed as the `WrapperState` that contains it.
    The fields `consecutive_skips` and `guard_failed` are listed once, as a `WrapperState` without
    guards, for all guards that are directly around each other.
    """
    parts: dict[Hashable, list[tuple[Path, Tree]]] = collections.defaultdict(list)

    def visit(state: Tree, path: Path, depth: int, has_counts: bool) -> None:
        for place, node in jax.tree.leaves_with_path(state, is_leaf=is_own_state):
            if not is_own_state(node):
                continue
            here, inside = (*path, *place), depth
            if not isinstance(node, WrapperState):
                parts[type(node), depth].append((here, _without_inner(node)))
            else:
                inside += node.accumulation is not None
                for field, level in (("outer", depth), ("guards", inside)):
                    for i, guard in enumerate(getattr(node, field)):
                        key = type(guard.rule_state), tuple(guard.skipped), level
                        index = jax.tree_util.SequenceKey(i)
                        parts[key].append(((*here, jax.tree_util.GetAttrKey(field), index), guard))
                if node.accumulation is not None:
                    parts[AccumulationState, depth].append((here, node))
                if not has_counts and (node.outer or node.guards):
                    counts = node._replace(outer=(), guards=(), accumulation=None)
                    parts[WrapperState, depth].append((here, _without_inner(counts)))
            if hasattr(node, "inner_state"):
                inner_path = (*here, jax.tree_util.GetAttrKey("inner_state"))
                is_guard = isinstance(node, WrapperState) and bool(node.outer or node.guards)
                is_direct = isinstance(node.inner_state, WrapperState)
                visit(node.inner_state, inner_path, inside, is_guard and is_direct)

    visit(state, (), 0, False)
    return parts


def _without_inner(node: Tree) -> Tree:
    """Return a state without the state of the inner transformation."""
    return node._replace(inner_state=()) if hasattr(node, "inner_state") else node


def _copied(like: Tree, given: Tree, path: Path, reduction: str | None) -> Tree:
    """Copy a state of the old optimizer, or return the new initial state `like` if it differs.

    Both are states of a clip, a guard, an accumulation or `watch`.
    """
    if isinstance(like, WrapperState):
        if like.accumulation is None:
            return given
        window = _copied_window(like, given, path, reduction)
        return like._replace(accumulation=window, outer=(), guards=(), inner_state=())
    # The sharding, which is part of a type with explicit mesh axes, may differ.
    old, new = (jax.tree.map(describe, jax.eval_shape(lambda x: x, x)) for x in (given, like))
    if old == new:
        return given
    # A clip or a guard may have another rule, and `watch` another history.
    return like.continued_from(given) if hasattr(like, "continued_from") else like


def _copied_window(
    like: WrapperState, given: WrapperState, path: Path, reduction: str | None
) -> AccumulationState:
    """Copy the micro-batches of an accumulation to the state of another accumulation."""
    scales = [_has_inner_loss_scale(node) for node in (like, given)]
    if scales[0] != scales[1]:
        _check_closed(given, path, "because its micro-batches are multiplied by the loss scale")
    window, total = given.accumulation, like.accumulation.gradient.total
    if jax.tree.leaves(total) and jax.tree.leaves(window.gradient.total):
        fields = ("acc_grads",) if window.loss is None else ("accumulation", "gradient", "total")
        keys = map(jax.tree_util.GetAttrKey, fields)
        values = [value for _, value in _pairs(total, window.gradient.total, (*path, *keys))]
        total = jax.tree.unflatten(jax.tree.structure(total), values)
    else:  # `every=1` needs no sum
        _check_closed(given, path)
    window = window._replace(gradient=window.gradient._replace(total=total))
    is_from_optax, is_for_optax = (x.accumulation.loss is None for x in (given, like))
    if is_from_optax == is_for_optax:
        return window
    # `MultiSteps` may store the mean of the gradients instead of their sum.
    held = jnp.asarray(window.mini_step)
    if jax.tree.leaves(total) and reduction is None and (is_traced(held) or held > 0):
        rule = '"mean" or "sum" if micro-batches may be accumulated'
        hint = f'Pass "mean" if {leaf_path("state", path)} accumulates the mean of gradients.'
        raise value_error("reduction", rule, "None", hint)
    weight = jnp.asarray(window.gradient.weight, jnp.float32)
    weight = jnp.where((weight == 0) | (reduction == "sum"), 1, weight)
    factor = weight if is_from_optax else 1 / weight
    # The sum of an empty window is the last one, which may be NaN.
    total = jax.tree.map(lambda x: jnp.where(held > 0, x * factor, jnp.zeros_like(x)), total)
    window = window._replace(gradient=window.gradient._replace(total=total))
    length = like.accumulation.accumulation_steps
    if is_from_optax:
        count = window.gradient_step * length + held
        window = window._replace(accumulation_steps=length, micro_batch_count=count)
    return window


def _has_inner_loss_scale(node: WrapperState) -> bool:
    """Return whether a loss scale is inside the accumulation, whose sum is then scaled."""
    rules = [guard.rule_state for guard in node.guards]
    return "loss_scale" in metric_names((rules, node.inner_state))


def _check_closed(given: WrapperState, path: Path, why: str = "or convert later") -> None:
    """Raise if there may be accumulated micro-batches."""
    held = jnp.asarray(given.accumulation.mini_step)
    if is_traced(held) or held > 0:
        field = "mini_step" if given.accumulation.loss is None else "accumulation.mini_step"
        got = f"{leaf_path('state', path)}.{field} = {held}"
        hint = f"Call `flush` first, {why}."
        raise value_error("state", "a state without accumulated micro-batches", got, hint)
