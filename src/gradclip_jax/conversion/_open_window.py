"""Convert the window of an accumulation, which may contain micro-batches.

`optax.MultiSteps` stores the mean of the gradients of the window, this package their sum.
"""

import jax
import jax.numpy as jnp

from .._checks import is_traced, leaf_path
from .._errors import value_error
from .._types import Array, Tree
from ..wrappers._accumulation import AccumulationState
from ._match import Part, field_path, matched_leaves


def converted_window(new: Part, old: Part, reduction: str | None) -> AccumulationState:
    """Return the window of the old accumulation as a state of the new accumulation."""
    if new.has_inner_scale != old.has_inner_scale:
        check_closed(old, "because its micro-batches are multiplied by the loss scale")
    like, window = new.state, old.state.with_total(_matched_total(new.state, old))
    if _is_of_optax(window) == _is_of_optax(like):
        return window
    if reduction is None and jax.tree.leaves(window.gradient.total) and _may_be_open(window):
        rule = '"mean" or "sum" if micro-batches may be accumulated'
        name = leaf_path("state", old.path[:-1])
        hint = f'Pass "mean" if {name} accumulates the mean of gradients.'
        raise value_error("reduction", rule, "None", hint)
    # `MultiSteps` with `use_grad_mean=False` stores the sum as well.
    weight = jnp.asarray(window.gradient.weight, jnp.float32)
    weight = jnp.where((weight == 0) | (reduction == "sum"), 1, weight)
    if _is_of_optax(like):
        return _with_scaled_total(window, 1 / weight)
    length = like.accumulation_steps
    return _with_scaled_total(window, weight)._replace(
        accumulation_steps=length,
        micro_batch_count=window.gradient_step * length + window.mini_step,
    )


def check_closed(part: Part, why: str = "or convert later") -> None:
    """Raise if there may be accumulated micro-batches, which would be discarded."""
    window = part.state
    if _may_be_open(window):
        place = part.path[:-1] if _is_of_optax(window) else part.path
        got = f"{leaf_path('state', place)}.mini_step = {jnp.asarray(window.mini_step)}"
        hint = f"Call `flush` first, {why}."
        raise value_error("state", "a state without accumulated micro-batches", got, hint)


def _may_be_open(window: AccumulationState) -> bool:
    """Return whether a window contains micro-batches; True if the number is traced."""
    return is_traced(window.mini_step) or bool(window.mini_step > 0)


def _is_of_optax(window: Tree) -> bool:
    """Return whether a state was converted from a state of `optax.MultiSteps`, without losses."""
    return window.loss is None


def _matched_total(like: AccumulationState, old: Part) -> Tree:
    """Return the total of the old accumulation in the structure of the new one."""
    total, old_total = like.gradient.total, old.state.gradient.total
    if not (jax.tree.leaves(total) and jax.tree.leaves(old_total)):
        check_closed(old)  # an accumulation with `every=1` has no sum
        return total
    path = field_path(old.path, "gradient", "total")
    if _is_of_optax(old.state):
        path = field_path(old.path[:-1], "acc_grads")
    values = [value for _, value in matched_leaves(total, old_total, path)]
    return jax.tree.unflatten(jax.tree.structure(total), values)


def _with_scaled_total(window: AccumulationState, factor: Array) -> AccumulationState:
    """Multiply the total by a factor; without micro-batches, replace it by zeros."""

    def scaled(x: Array) -> Array:
        # Without micro-batches, the values are from an earlier window, and may be NaN.
        return jnp.where(jnp.asarray(window.mini_step) > 0, x * factor, jnp.zeros_like(x))

    return window.with_total(jax.tree.map(scaled, window.gradient.total))
