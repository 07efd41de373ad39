"""Convert an optimizer state to the state of another optimizer during training.

The conversion has three steps:

1. `_converters.py` converts states of `optax.MultiSteps`, of `optax.apply_if_finite` and of an
   earlier version of this package (`_earlier.py`) to a `WrapperState`, so that both states have
   the same types.
2. `_match.py` finds the counterparts of all arrays. The states of clips, guards, accumulations and
   `watch` are matched by type and by the number of accumulations around them. All other arrays must
   be the same in both optimizers, in the same order.
3. Arrays are copied to their counterparts. A state of the old optimizer without a counterpart is
   dropped, and a state of the new optimizer without a counterpart is initialized.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._checks import check_arrays, check_choice, check_transformation, is_traced
from .._errors import public, value_error
from .._format import describe, leaf_path
from .._metrics import own_metrics
from .._run_if import like_dtypes
from .._states import (
    check_one_run,
    check_optimizer_state,
    plain_arrays,
    replace_states,
    with_structure_of,
)
from .._types import Array, Path, Tree
from .._weighted_sum import WeightedSum
from ..wrappers._accumulation import AccumulationState
from ..wrappers._state import WrapperState
from ._converters import to_wrapper_states
from ._earlier import with_rule_names
from ._match import Part, field_path, matched_leaves, matched_parts


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
    type changes, all states of this type are initialized. A guard or clip that moves into or out of
    an accumulation, or whose rule changes, also starts with an initial state. A `watch` with
    another `history`, or with other clips inside, keeps only its step count. Arrays are cast to the
    dtypes of the new optimizer. Discarding accumulated micro-batches raises an error.

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
    values: dict[Path, Any] = dict(matched_leaves(new, old))
    pairs, dropped = matched_parts(new, old)
    for part, old_part in pairs:
        for path, value in jax.tree.leaves_with_path(_converted(part, old_part, reduction)):
            values[*part.path, *path] = value
    for part in dropped:
        if part.kind.state is AccumulationState:
            _check_closed(part)
    converted = _with_values(initial, values)
    converted = replace_states(converted, optax.ApplyIfFiniteState, _with_outcome)
    return with_structure_of(tx_state, like_dtypes(converted, initial))


def _with_values(state: Tree, values: Mapping[Path, Any]) -> Tree:
    """Replace arrays of a state by the values given for their paths after conversion.

    `to_wrapper_states` moves arrays to other paths. To find the new path of each array, convert a
    copy of the state that contains the index of each array in its place. For example, a value at
    `.accumulation.mini_step` replaces the first array of a state of `optax.MultiSteps`:

        state                                   MultiStepsState(mini_step=a, gradient_step=b, ...)
        state of indices                        MultiStepsState(mini_step=0, gradient_step=1, ...)
        to_wrapper_states(state of indices)     WrapperState(accumulation=(mini_step=0, ...), ...)
    """
    leaves, structure = jax.tree.flatten(state)
    indices = to_wrapper_states(structure.unflatten(range(len(leaves))))
    for path, i in jax.tree.leaves_with_path(indices):
        leaves[i] = values.get(path, leaves[i])
    return structure.unflatten(leaves)


def _with_outcome(state: optax.ApplyIfFiniteState) -> optax.ApplyIfFiniteState:
    """Set `last_finite`, which states of this package do not contain, from the count of skips."""
    return state._replace(last_finite=jnp.asarray(state.notfinite_count) == 0)


def _converted(new: Part, old: Part, reduction: str | None) -> Tree:
    """Return the state of the old part, or the initial state if the old one does not fit."""
    if new.kind.state is AccumulationState:
        return _converted_window(new, old, reduction)
    old_state = with_rule_names(new.state, old.state)
    # Explicit shardings may differ.
    new_types, old_types = [
        jax.tree.map(describe, jax.eval_shape(lambda tree: tree, x)) for x in (new.state, old_state)
    ]
    if new.kind.state is WrapperState:
        return old_state
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(old.state)]
    # An unnamed rule is named after its function, and all lambda functions have the same name.
    if new_types == old_types and not any("<lambda>" in path for path in paths):
        return old_state
    # Either the rule of a clip or guard or the history of a `watch` has changed.
    if hasattr(new.state, "continued_from"):
        return new.state.continued_from(old_state)
    return new.state


# Accumulations


def _converted_window(new: Part, old: Part, reduction: str | None) -> AccumulationState:
    """Return the window of the old accumulation as a state of the new accumulation.

    `optax.MultiSteps` stores the mean of the gradients of the window, this package their sum.
    """
    if new.has_inner_scale != old.has_inner_scale:
        _check_closed(old, "because its micro-batches are multiplied by the loss scale")
    like, window = new.state, old.state.with_total(_matched_total(new.state, old))
    if old.source == new.source:
        return window
    total = window.gradient.total
    if reduction is None and jax.tree.leaves(total) and _may_be_open(window):
        rule = '"mean" or "sum" if micro-batches may be accumulated'
        name = leaf_path("state", old.path[:-1])
        hint = f'Pass "mean" if {name} accumulates the mean of gradients.'
        raise value_error("reduction", rule, "None", hint)
    weight = window.mini_step if old.source == "optax" else window.gradient.weight
    weight, num_micro_batches = jnp.asarray(weight, jnp.float32), jnp.asarray(window.mini_step)
    # `MultiSteps` with `use_grad_mean=False` stores the sum as well.
    factor = jnp.where((weight == 0) | (reduction == "sum"), 1, weight)
    factor = 1 / factor if new.source == "optax" else factor

    def scaled(x: Array) -> Array:
        # Without micro-batches, the values are from an earlier window, and may be NaN.
        return jnp.where(num_micro_batches > 0, x * factor, jnp.zeros_like(x))

    window = window._replace(gradient=WeightedSum(jax.tree.map(scaled, total), weight))
    if new.source == "optax":
        return window
    length = like.accumulation_steps
    count = window.gradient_step * length + window.mini_step
    return window._replace(accumulation_steps=length, micro_batch_count=count)


def _check_closed(part: Part, why: str = "or convert later") -> None:
    """Raise if there may be accumulated micro-batches, which would be discarded."""
    window = part.state
    if _may_be_open(window):
        place = part.path[:-1] if part.source == "optax" else part.path
        got = f"{leaf_path('state', place)}.mini_step = {jnp.asarray(window.mini_step)}"
        hint = f"Call `flush` first, {why}."
        raise value_error("state", "a state without accumulated micro-batches", got, hint)


def _may_be_open(window: AccumulationState) -> bool:
    """Return whether a window contains micro-batches; True if the number is traced."""
    return is_traced(window.mini_step) or bool(window.mini_step > 0)


def _matched_total(like: AccumulationState, old: Part) -> Tree:
    """Return the total of the old accumulation in the structure of the new one."""
    total, old_total = like.gradient.total, old.state.gradient.total
    if not (jax.tree.leaves(total) and jax.tree.leaves(old_total)):
        _check_closed(old)  # an accumulation with `every=1` has no sum
        return total
    path = field_path(old.path, "gradient", "total")
    if old.source == "optax":
        path = field_path(old.path[:-1], "acc_grads")
    values = [value for _, value in matched_leaves(total, old_total, path)]
    return jax.tree.unflatten(jax.tree.structure(total), values)
