"""One step: check its gradient, run the inner transformation, and check the result."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._checks import dtype_of, is_float0, shortened
from .._clip_order import is_only_clips
from .._errors import named, type_error, warn
from .._run_if import compute_step, like_dtypes, run_step, select_step
from .._types import Scalar, Tree
from ._extra_args import ExtraArgs
from ._guard import Measure
from ._nesting import Wrappers
from ._skips import PlacedGuard, Skips, receive
from ._state import WrapperState


class Call(NamedTuple):
    """The wrappers and the arguments that all parts of a call share.

    Attributes:
        wrappers: The guards, the accumulation and the inner transformation.
        state: State before the call.
        outer_guards: The guards around the accumulation.
        inner_guards: The guards inside the accumulation, or all guards without one.
        grads: The gradient as the caller passed it.
        measure: Function that measures the updates before they are added to the parameters, or
            None.
    """

    wrappers: Wrappers
    state: WrapperState
    outer_guards: list[PlacedGuard]
    inner_guards: list[PlacedGuard]
    grads: Tree
    measure: Measure | None


class Carry(NamedTuple):
    """Arrays that a step updates in place.

    Attributes:
        params: Parameters to which the updates are added; None to return the updates.
        inner_state: State of the inner transformation.
    """

    params: Tree
    inner_state: Tree


class Step(NamedTuple):
    """The result of a step. All arrays are zeros if no step was taken.

    Attributes:
        updates: The updates; None if they were added to the parameters.
        measured: The measurements of `measure`, or None.
        skips: Which guards skip the step.
        observed: See `Checked`; of the guards inside the accumulation.
        norm: See `Checked`; of the guards inside the accumulation.
    """

    updates: Tree
    measured: Tree
    skips: Skips
    observed: list[Tree]
    norm: Scalar | None


def take_step(
    call: Call, grads: Tree, params: Tree, carry: Carry, extra_args: ExtraArgs
) -> tuple[Step, Carry]:
    """Check a gradient, run the inner transformation, and check the computed step."""
    wrappers = call.wrappers
    skips = _check_window(call, grads, params, extra_args)
    checked = receive(call.inner_guards, grads, params, extra_args, skips, is_micro_batch=False)
    skips = checked.skips
    checks_step = any(guard.check_step for guard in wrappers.all_guards)

    def run(carry: Carry, grads: Tree, params: Tree) -> tuple[tuple[Tree, Tree], Carry]:
        in_place_params, inner_state = carry
        current = params if in_place_params is None else in_place_params
        arguments = grads, inner_state, current, checked.extra_args
        updates, inner_state = run_inner(wrappers, *arguments)
        if in_place_params is None:
            updates = updates_for_caller(wrappers, updates, call.grads, *arguments)
            return (updates, None), Carry(None, inner_state)
        measured = None if call.measure is None else call.measure(updates, in_place_params)
        new_params = apply_updates(in_place_params, updates)
        return (updates if checks_step else None, measured), Carry(new_params, inner_state)

    operands = checked.grads, params if carry.params is None else None
    if checks_step:
        traced, computed = compute_step(run, carry, *operands)
        (updates, _), after = computed
        states = carry.inner_state, after.inner_state
        skips = _check_step(call, updates, *states, params, skips)
        (updates, measured), carry = select_step(skips.is_accepted, traced, computed, carry)
    else:
        (updates, measured), carry = run_step(skips.is_accepted, run, carry, *operands, likely=True)
    updates = updates if carry.params is None else None
    return Step(updates, measured, skips, checked.observed, checked.norm), carry


def _check_window(call: Call, grads: Tree, params: Tree, extra_args: ExtraArgs) -> Skips:
    """Check the gradient of a window with the guards around the accumulation."""
    skips = Skips({})
    for place, guard, state in call.outer_guards:
        if guard.check_window is not None:
            with named(guard.name):
                norm, rule_state = guard.norm(grads), state.rule_state
                # The second result is not needed: micro-batches update the state of this guard.
                rejections, _ = guard.check_window(grads, norm, rule_state, params, extra_args)
            skips = skips.rejected_by(place, rejections)
    return skips


def _check_step(
    call: Call, updates: Tree, before: Tree, after: Tree, params: Tree, skips: Skips
) -> Skips:
    """Check a computed step and the inner states before and after it with all guards."""
    for place, guard, _ in call.outer_guards + call.inner_guards:
        if guard.check_step is not None:
            with named(guard.name):
                rejections = guard.check_step(updates, before, after, params)
            skips = skips.rejected_by(place, rejections)
    return skips


def run_inner(
    wrappers: Wrappers,
    grads: Tree,
    state: Tree,
    params: Tree,
    extra_args: ExtraArgs,
) -> tuple[Tree, Tree]:
    """Run the inner transformation, and raise if it changes the structure of its state."""
    updates, after = wrappers.inner.update(grads, state, params, **extra_args)
    if jax.tree.structure(after) != jax.tree.structure(state):
        hint = (
            "If a checkpoint contains lists instead of tuples, restore its leaves into the "
            "structure of `tx.init(params)` with `jax.tree.unflatten`."
        )
        rule = "a state whose structure the inner transformation keeps, with tuples and no lists"
        with named(wrappers.name):
            raise type_error("state", rule, shortened(state), hint)
    is_identity = updates is grads and not jax.tree.leaves(state)
    if is_identity or is_only_clips(state):
        warn(
            "The transformation inside this guard or accumulation contains no optimizer. Place the "
            "optimizer inside: outside, it runs on zeros if a step is skipped or accumulated.",
        )
    return updates, after


def updates_for_caller(
    wrappers: Wrappers,
    updates: Tree,
    callers_grads: Tree,
    grads: Tree,
    state: Tree,
    params: Tree,
    extra_args: ExtraArgs,
) -> Tree:
    """Cast updates to the dtypes that the caller expects.

    An accumulation or a loss scale computes the gradient `grads` in float32. The caller expects the
    dtypes that the inner transformation returns for the gradient of the caller.
    """
    if _dtypes(grads) == _dtypes(callers_grads):
        return updates

    def update(grads: Tree, state: Tree) -> Tree:
        return wrappers.inner.update(grads, state, params, **extra_args)[0]

    return like_dtypes(updates, jax.eval_shape(update, like_dtypes(grads, callers_grads), state))


def _dtypes(tree: Tree) -> list[jnp.dtype]:
    """Return the dtypes of the leaves of a tree."""
    return list(map(dtype_of, jax.tree.leaves(tree)))


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """Call `optax.apply_updates` with support for float0 updates and strict dtype promotion."""

    def addend(update: Tree, param: Tree) -> Tree:
        return jnp.zeros_like(param) if is_float0(update) else update

    with jax.numpy_dtype_promotion("standard"):
        return optax.apply_updates(params, jax.tree.map(addend, updates, params))
