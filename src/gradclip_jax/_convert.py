"""Convert an optimizer state to the state of another optimizer during training.

The conversion has three steps:

1. `_converters.py` converts states of `optax.MultiSteps`, of `optax.apply_if_finite` and of an
   earlier version of this package to a `WrapperState`, so that both states have the same types.
2. The states of clips, guards, accumulations and `watch` are matched by type and by the number of
   accumulations around them, and copied in order. A state of the old optimizer without a
   counterpart is dropped, and a state of the new optimizer without a counterpart is initialized.
3. All other arrays are copied. They must be the same in both optimizers, in the same order.
"""

import collections
import itertools
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._checks import (
    check_arrays,
    check_choice,
    check_one_run,
    check_optimizer_state,
    check_transformation,
    describe,
    is_traced,
    leaf_path,
)
from ._converters import (
    from_wrapper_states,
    partial_state,
    to_wrapper_states,
    with_rule_names,
)
from ._errors import public, type_error, value_error
from ._metrics import metric_names, own_metrics
from ._run_if import like_dtypes
from ._states import is_own_state, plain_arrays, with_structure_of
from ._types import Array, Path, Tree
from .wrappers._accumulation import AccumulationState
from .wrappers._state import GuardState, WrapperState


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
    type changes, their states are initialized. The state of a guard or clip is also initialized if
    it moves into or out of an accumulation, or if its rule changes. A `watch` with another
    `history`, or with other clips inside, keeps only its step count. Arrays are cast to the dtypes
    of the new optimizer. Discarding accumulated micro-batches raises an error.

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
        micro-batches than the new window. It continues with their weighted mean, and then gives
        each micro-batch the same weight.

    Raises:
        TypeError: If part of `state` has no counterpart in the state of `tx`, or differs from it in
            shape, for example because `params` belong to another model, or if `state` was vmapped.
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
    check_optimizer_state(state)
    check_arrays("params", params)
    tx_state = tx.init(params)
    initial, given = plain_arrays(tx_state), plain_arrays(state)
    check_one_run(value for _, _, value in own_metrics(given))
    new, old = to_wrapper_states(initial), to_wrapper_states(given)
    values: dict[Path, Any] = dict(jax.tree.leaves_with_path(new))
    values.update(_matched_leaves(new, old))
    values.update(_matched_parts(new, old, reduction))
    converted = jax.tree.map_with_path(lambda path, _: values[path], new)
    converted = like_dtypes(from_wrapper_states(initial, converted), initial)
    return with_structure_of(tx_state, converted)


def _field(name: str) -> Hashable:
    """Return the key of a field in the path of an array."""
    return jax.tree_util.GetAttrKey(name)


# Arrays outside the states of this package


class _Leaf(NamedTuple):
    """An array that belongs to no clip, guard, accumulation or `watch`.

    Attributes:
        keys: Types of the containers around the array and its keys in them. Tuples, which are the
            states of `optax.chain`, are omitted, because chains may be nested differently.
        path: Path of the array in the optimizer state.
        value: The array.
    """

    keys: tuple[Hashable, ...]
    path: Path
    value: Array


def _leaves(node: Tree, path: Path = (), keys: tuple[Hashable, ...] = ()) -> Iterator[_Leaf]:
    """Yield the arrays that belong to no clip, guard, accumulation or `watch`."""
    if is_own_state(node):
        if hasattr(node, "inner_state"):
            yield from _leaves(node.inner_state, (*path, _field("inner_state")), keys)
        return
    children, structure = jax.tree.flatten_with_path(node, is_leaf=lambda x: x is not node)
    if structure == jax.tree.structure(0):
        yield _Leaf(keys, path, node)
        return
    for key, child in children:
        child_keys = keys if type(node) is tuple else (*keys, type(node), *key)
        yield from _leaves(child, (*path, *key), child_keys)


def _matched_leaves(new: Tree, old: Tree, old_path: Path = ()) -> Iterator[tuple[Path, Array]]:
    """Yield the path of each array in a new state, and the value of its counterpart in an old one.

    `old_path` is the path of the old state in the optimizer state, for error messages.
    """
    for like, given in itertools.zip_longest(_leaves(new), _leaves(old, old_path)):
        got = f"{_shown('state', given)} instead of {_shown('tx.init(params)', like)}"
        if like is None or given is None or like.keys != given.keys:
            rule = "a state that matches the state of `tx`"
            hint = (
                "Pass an `.opt_state` or a checkpoint of it. Only clips, guards, accumulations and "
                "`watch` may be added, removed or moved."
            )
            raise type_error("state", rule, got, hint)
        if np.shape(like.value) != np.shape(given.value):
            rule, hint = "the parameters of `state`", "Pass the parameters of its last update."
            raise type_error("params", rule, got, hint)
        yield like.path, given.value


def _shown(argument: str, leaf: _Leaf | None) -> str:
    """Describe an array, the state that contains it and its path for an error message."""
    if leaf is None:
        return "nothing"
    types = ", ".join(x.__name__ for x in leaf.keys if isinstance(x, type))
    of = f" of {types}" if types else ""
    return f"{describe(leaf.value)}{of} at {leaf_path(argument, leaf.path)}"


# States of this package


class _Part(NamedTuple):
    """A clip, a guard, an accumulation or a `watch` in an optimizer state.

    Directly nested guards share the fields `consecutive_skips` and
    `guard_failed`. These fields form an additional part, whose state is a `WrapperState` without
    guards.

    Attributes:
        kind: Type of its state. For a guard, whether it is a loss scale, and the causes of its
            skips.
        depth: Number of accumulations around it.
        path: Path of its state.
        state: Its state without the inner state. For an accumulation, the whole `WrapperState`.
    """

    kind: Hashable
    depth: int
    path: Path
    state: Any

    @property
    def is_accumulation(self) -> bool:
        """Whether this part is an accumulation."""
        return self.kind is AccumulationState


def _matched_parts(new: Tree, old: Tree, reduction: str | None) -> Iterator[tuple[Path, Array]]:
    """Yield the path of each array in a part of the new state, and its value in the counterpart.

    Parts of the same kind and depth are counterparts, in order, if their numbers are equal. Raise
    if an accumulation without a counterpart may contain micro-batches.
    """
    new_parts, old_parts = _parts_by_key(new), _parts_by_key(old)
    for key, parts in new_parts.items():
        if len(parts) == len(old_parts[key]):
            for part, old_part in zip(parts, old_parts.pop(key), strict=True):
                copied = _copied(part, old_part, reduction)
                for path, value in jax.tree.leaves_with_path(copied):
                    yield (*part.path, *path), value
    for part in itertools.chain(*old_parts.values()):
        if part.is_accumulation:
            _check_closed(part)


def _parts_by_key(state: Tree) -> dict[Hashable, list[_Part]]:
    """Return lists of the parts of a state that have the same kind and depth."""
    parts: dict[Hashable, list[_Part]] = collections.defaultdict(list)
    for part in _parts(state):
        parts[part.kind, part.depth].append(part)
    return parts


def _parts(
    state: Tree, path: Path = (), depth: int = 0, *, is_directly_inside_guards: bool = False
) -> Iterator[_Part]:
    """Yield all parts of a state, from the outermost to the innermost."""
    for place, node in jax.tree.leaves_with_path(state, is_leaf=is_own_state):
        here = (*path, *place)
        if isinstance(node, WrapperState):
            yield from _guard_parts(node.outer, (*here, _field("outer")), depth)
            inner_depth = depth + (node.accumulation is not None)
            yield from _guard_parts(node.guards, (*here, _field("guards")), inner_depth)
            if node.accumulation is not None:
                yield _Part(AccumulationState, depth, here, node)
            has_guards = bool(node.outer or node.guards)
            if has_guards and not is_directly_inside_guards:
                counts = node._replace(outer=(), guards=(), accumulation=None, inner_state=())
                yield _Part(WrapperState, depth, here, counts)
            yield from _parts(
                node.inner_state,
                (*here, _field("inner_state")),
                inner_depth,
                is_directly_inside_guards=has_guards and isinstance(node.inner_state, WrapperState),
            )
        elif hasattr(node, "inner_state"):  # `watch`
            yield _Part(type(node), depth, here, node._replace(inner_state=()))
            yield from _parts(node.inner_state, (*here, _field("inner_state")), depth)
        elif is_own_state(node):  # a clip
            yield _Part(type(node), depth, here, node)


def _guard_parts(guards: Sequence[GuardState], path: Path, depth: int) -> Iterator[_Part]:
    """Yield a part for each guard, without the fields that directly nested guards share."""
    for i, guard in enumerate(guards):
        has_scale = hasattr(guard.rule_state, "loss_scale")
        kind = has_scale, *sorted(guard.skipped)  # JAX sorts dictionaries, too
        yield _Part(kind, depth, (*path, jax.tree_util.SequenceKey(i)), guard)


def _copied(new: _Part, old: _Part, reduction: str | None) -> Tree:
    """Return the state of the old part, or the initial state if the old one does not fit."""
    if new.is_accumulation:
        window = _copied_window(new, old, reduction)
        return partial_state(WrapperState, outer=(), accumulation=window, guards=())
    old_state = with_rule_names(new.state, old.state)
    if new.kind is WrapperState or _has_same_arrays(new.state, old_state):
        return old_state
    # The rule of a clip or guard has changed, or the history of a `watch`.
    if hasattr(new.state, "continued_from"):
        return new.state.continued_from(old_state)
    return new.state


def _has_same_arrays(x: Tree, y: Tree) -> bool:
    """Return whether two states have the same structure, shapes and dtypes."""

    def types(state: Tree) -> Tree:  # without explicit shardings, which may differ
        return jax.tree.map(describe, jax.eval_shape(lambda tree: tree, state))

    return types(x) == types(y)


# Accumulations


def _is_of_optax(window: Tree) -> bool:
    """Return whether a state was converted from a state of `optax.MultiSteps`, without losses."""
    return window.loss is None


def _copied_window(new: _Part, old: _Part, reduction: str | None) -> AccumulationState:
    """Return the open window of the old accumulation as a state of the new accumulation."""
    if _has_inner_loss_scale(new.state) != _has_inner_loss_scale(old.state):
        _check_closed(old, "because its micro-batches are multiplied by the loss scale")
    like, window = new.state.accumulation, old.state.accumulation
    window = window.with_total(_copied_total(like, old))
    if _is_of_optax(window) == _is_of_optax(like):
        return window
    if reduction is None and jax.tree.leaves(window.gradient.total) and _may_be_open(window):
        rule = '"mean" or "sum" if micro-batches may be accumulated'
        hint = f'Pass "mean" if {leaf_path("state", old.path)} accumulates the mean of gradients.'
        raise value_error("reduction", rule, "None", hint)
    if not _is_of_optax(window):
        return _with_scaled_total(window, 1 / _weight_of_mean(window, reduction))
    length = like.accumulation_steps
    window = _with_scaled_total(window, _weight_of_mean(window, reduction))
    return window._replace(
        accumulation_steps=length,
        micro_batch_count=window.gradient_step * length + window.mini_step,
    )


def _copied_total(like: AccumulationState, old: _Part) -> Tree:
    """Return the sum of gradients of the old accumulation in the structure of the new one."""
    window, total = old.state.accumulation, like.gradient.total
    if not (jax.tree.leaves(total) and jax.tree.leaves(window.gradient.total)):
        _check_closed(old)  # an accumulation with `every=1` has no sum
        return total
    names = ["acc_grads"] if _is_of_optax(window) else ["accumulation", "gradient", "total"]
    path = (*old.path, *map(_field, names))
    values = [value for _, value in _matched_leaves(total, window.gradient.total, path)]
    return jax.tree.unflatten(jax.tree.structure(total), values)


def _weight_of_mean(window: AccumulationState, reduction: str | None) -> Array:
    """Return the ratio of the sum of gradients to the value that `MultiSteps` stores.

    `MultiSteps` stores the mean of the gradients, or their sum if it was created with
    `use_grad_mean=False`.
    """
    weight = jnp.asarray(window.gradient.weight, jnp.float32)
    return jnp.where((weight == 0) | (reduction == "sum"), 1, weight)


def _with_scaled_total(window: AccumulationState, factor: Array) -> AccumulationState:
    """Multiply the sum of gradients by a factor; without micro-batches, replace it by zeros."""

    def scaled(x: Array) -> Array:
        # Without micro-batches, the values are from an earlier window, and may be NaN.
        return jnp.where(jnp.asarray(window.mini_step) > 0, x * factor, jnp.zeros_like(x))

    return window.with_total(jax.tree.map(scaled, window.gradient.total))


def _has_inner_loss_scale(node: WrapperState) -> bool:
    """Return whether a loss scale inside the accumulation divides the gradients after the sum."""
    rules = [guard.rule_state for guard in node.guards]
    return "loss_scale" in metric_names((rules, node.inner_state))


def _may_be_open(window: AccumulationState) -> bool:
    """Return whether a window contains micro-batches; True if the number is traced."""
    return is_traced(window.mini_step) or bool(window.mini_step > 0)


def _check_closed(part: _Part, why: str = "or convert later") -> None:
    """Raise if there may be accumulated micro-batches, which would be discarded."""
    window = part.state.accumulation
    if _may_be_open(window):
        field = "mini_step" if _is_of_optax(window) else "accumulation.mini_step"
        got = f"{leaf_path('state', part.path)}.{field} = {jnp.asarray(window.mini_step)}"
        hint = f"Call `flush` first, {why}."
        raise value_error("state", "a state without accumulated micro-batches", got, hint)
