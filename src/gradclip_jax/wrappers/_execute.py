"""Run guards, an accumulation and the inner transformation in one call of `update`.

1. Guards around the accumulation check the micro-batch.
2. The accumulation adds the gradient to the window.
3. If the window closes, a step is taken: guards check the gradient of the window, the inner
   transformation runs, and guards with `check="step"` check the computed step.
4. The next state records the outcome of the call, the counts, and the state of each guard.

Without an accumulation, each call is a step. The inner transformation runs at most once per call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._checks import check_same_structure, dtype_of, is_float0
from .._clip_order import is_only_clips
from .._errors import named, type_error, warn
from .._format import shortened
from .._run_if import like_dtypes, run_checked_step, run_step
from .._states import increment_where
from .._types import Array, Scalar, Tree
from ..norms._leaves import checked_leaves
from ._accumulation import AccumulationState, MicroBatch, micro_batch_of
from ._extra_args import ExtraArgs
from ._guard import Measure, has_any, params_of
from ._skips import (
    Checked,
    IndexedGuard,
    Skips,
    check_gradient,
    check_step,
    check_window,
    flag_where,
)
from ._state import CallOutcome, GuardState, WrapperState, has_flag, outcome_of
from ._wrappers import Wrappers


class Call(NamedTuple):
    """The wrappers and those arguments of `update` that do not change during the call.

    Attributes:
        wrappers: The guards, the accumulation and the inner transformation.
        state: State before the call.
        outer_guards: The guards around the accumulation.
        inner_guards: The guards inside the accumulation; all guards if there is no accumulation.
        grads: The gradient as the caller passed it.
        measure: Function that measures the updates before they are added to the parameters, or
            None.
    """

    wrappers: Wrappers
    state: WrapperState
    outer_guards: list[IndexedGuard]
    inner_guards: list[IndexedGuard]
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
    observed: dict[int, Tree]
    norm: Scalar | None


def execute(
    wrappers: Wrappers,
    grads: Tree,
    state: WrapperState,
    params: Tree,
    extra_args: ExtraArgs,
    *,
    in_place: bool = False,
    measure: Measure | None = None,
) -> tuple[Step, Tree, WrapperState]:
    """Execute one call of `update`, and return the step, the parameters and the next state.

    With `in_place`, the updates are added to the parameters; otherwise the parameters are None.

    | call | counted by | window | inner state |
    | --- | --- | --- | --- |
    | a guard rejects a micro-batch | the outermost such guard | stays open | unchanged |
    | a guard rejects a micro-batch, with `flush` | the same | closes without it | updated |
    | a guard rejects a window, a step's gradient or a step | the same | dropped | unchanged |
    | the window stays open | | stays open | unchanged |
    | the window closes without weight | | dropped | unchanged |
    | no guard rejects, and the window closes | | closes | updated |

    | call | consecutive skips | state of a guard |
    | --- | --- | --- |
    | the inner transformation ran | 0 | updated if the guard accepted a gradient in this call |
    | the gradient was only accumulated | unchanged | updated in guards that accepted it |
    | a skip, or a window without weight | + 1 | updated only in the guard that skipped |

    Guards around an accumulation do not check micro-batches of weight 0. If the inner
    transformation contains a guard, for example in a chain, and this guard skips, the step counts
    as skipped.
    """
    with named(wrappers.name):
        wrappers.check_state(state)
        checked_leaves("updates", grads)
        if params is not None:
            check_same_structure(grads, params_of(params))
    call = Call(wrappers, state, *wrappers.indexed_guards(state), grads, measure)
    carry = Carry(params if in_place else None, state.inner_state)
    if wrappers.accumulation is not None:
        return _accumulate(call, params, carry, extra_args)
    step, carry = _take_step(call, grads, params, carry, extra_args)
    after = state._replace(inner_state=carry.inner_state, grad_norm=step.norm)
    has_run = jnp.asarray(step.skips.is_accepted)
    after = _recorded(call, after, step.skips, step.observed, has_run, has_run)
    return step, carry.params, after


def _accumulate(
    call: Call, params: Tree, carry: Carry, extra_args: ExtraArgs
) -> tuple[Step, Tree, WrapperState]:
    """Add a micro-batch to the window, and take a step with its gradient if the window closes."""
    wrappers, state, accumulation = call.wrappers, call.state, call.wrappers.accumulation
    assert accumulation is not None
    with named(accumulation.name):
        batch = micro_batch_of(extra_args)
    checked = _check_micro_batch(call, batch, params)
    has_arrived = checked.skips.is_accepted & batch.has_gradient
    with named(accumulation.name):
        window, closes = accumulation.add(state.accumulation, checked.grads, batch, has_arrived)

    # Without a step, `run_step` returns zeros like the outputs. Arrays that a function closes over
    # lose their explicit sharding, so they are operands.
    def close_window(
        carry: tuple[Tree, Carry], window: AccumulationState, grads: Tree, params: Tree
    ) -> tuple[Step, tuple[Tree, Carry]]:
        total, updated = carry
        mean, others, total = accumulation.close(window.with_total(total), grads, batch)
        step, updated = _take_step(call, mean, params, updated, others)
        return step, (total, updated)

    takes_step = closes & window.has_positive_weight
    is_empty = closes & ~window.has_positive_weight
    if accumulation.always_takes_step(window, batch) and not wrappers.outer_guards:
        takes_step = True  # known at trace time, so that no branch is compiled
    start = window.gradient.total, carry
    operands = window, checked.grads, params
    step, (total, carry) = run_step(takes_step, close_window, start, *operands)

    has_run = takes_step & step.skips.is_accepted
    is_used = has_arrived & batch.is_weighted & (~closes | has_run)
    norm, is_new = step.norm, takes_step
    if wrappers.outer_guards:
        norm, is_new = checked.norm, batch.is_weighted
    if norm is not None and state.grad_norm is not None:
        norm = jnp.where(is_new, norm, state.grad_norm)
    window = window.with_total(total)
    after = state._replace(
        accumulation=accumulation.finish(window, closes, is_empty, has_run),
        inner_state=carry.inner_state,
        grad_norm=norm,
    )
    # With `flush`, a guard may skip both the micro-batch and the window, but it counts one skip.
    skips = checked.skips.merged(step.skips)
    observed = checked.observed | step.observed
    flags = flag_where(CallOutcome.ACCUMULATED, has_arrived & ~closes)
    flags |= flag_where(CallOutcome.EMPTY_WINDOW, is_empty)
    after = _recorded(call, after, skips, observed, is_used, has_run, flags)
    return step, carry.params, after


def _check_micro_batch(call: Call, batch: MicroBatch, params: Tree) -> Checked:
    """Check a micro-batch with the outer guards. They accept it if its weight is 0."""
    extra_args = batch.extra_args | {"weight": batch.weight}
    arguments = call.grads, params, extra_args, Skips({})
    checked = check_gradient(call.outer_guards, *arguments, is_micro_batch=True)
    return checked._replace(skips=checked.skips.only_if(batch.is_weighted))


def _take_step(
    call: Call, grads: Tree, params: Tree, carry: Carry, extra_args: ExtraArgs
) -> tuple[Step, Carry]:
    """Check a gradient, run the inner transformation, and check the computed step."""
    wrappers, guards = call.wrappers, call.outer_guards + call.inner_guards
    skips = check_window(call.outer_guards, grads, params, extra_args)
    checked = check_gradient(call.inner_guards, grads, params, extra_args, skips)
    checks_step = any(guard.check_step for _, guard, _ in guards)

    # The gradient and the parameters are operands, as in `_accumulate`; parameters that are updated
    # in place are read from the carry.
    operands = checked.grads, params if carry.params is None else None

    def run(old: Carry, grads: Tree, params: Tree) -> tuple[tuple[Tree, Tree], Carry]:
        current = params if old.params is None else old.params
        arguments = grads, old.inner_state, current, checked.extra_args
        updates, inner_state = _run_inner(wrappers, *arguments)
        if old.params is None:
            updates = _updates_for_caller(wrappers, updates, call.grads, *arguments)
            return (updates, None), Carry(None, inner_state)
        measured = None if call.measure is None else call.measure(updates, current)
        new_params = apply_updates(current, updates)
        return (updates if checks_step else None, measured), Carry(new_params, inner_state)

    def check(output: tuple[Tree, Tree], new: Carry) -> tuple[Scalar | bool, Skips]:
        states = carry.inner_state, new.inner_state
        skips = check_step(guards, output[0], *states, params, checked.skips)
        return skips.is_accepted, skips

    if checks_step:
        skips, (output, new) = run_checked_step(check, run, carry, *operands)
    else:
        skips = checked.skips
        output, new = run_step(skips.is_accepted, run, carry, *operands, likely=True)
    updates, measured = output
    updates = updates if new.params is None else None
    return Step(updates, measured, skips, checked.observed, checked.norm), new


def _run_inner(
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


def _updates_for_caller(
    wrappers: Wrappers,
    updates: Tree,
    callers_grads: Tree,
    grads: Tree,
    state: Tree,
    params: Tree,
    extra_args: ExtraArgs,
) -> Tree:
    """Cast updates to the dtypes that the caller expects.

    With an accumulation or a loss scale, `grads` is float32. The caller expects the dtypes that the
    inner transformation would return for the original gradient.
    """
    if _dtypes(grads) == _dtypes(callers_grads):
        return updates

    def update(grads: Tree, state: Tree) -> Tree:
        return wrappers.inner.update(grads, state, params, **extra_args)[0]

    return like_dtypes(updates, jax.eval_shape(update, like_dtypes(grads, callers_grads), state))


def _dtypes(tree: Tree) -> list[jnp.dtype]:
    """Return the dtypes of the leaves of a tree."""
    return list(map(dtype_of, jax.tree.leaves(tree)))


def _recorded(
    call: Call,
    after: WrapperState,
    skips: Skips,
    observed: Mapping[int, Tree],
    is_used: Scalar | bool,
    has_run: Scalar,
    flags: Array | int = 0,
) -> WrapperState:
    """Record the state of each guard, the outcome of the call, and whether a guard has failed.

    Outer guards advance if `is_used`: no guard rejected the micro-batch, its weight is not 0, and
    it was accumulated or applied. Inner guards advance if `has_run`: the inner transformation ran.
    `flags` contains other flags of the outcome.
    """

    def advanced(guards: Sequence[IndexedGuard], advances: Scalar | bool) -> tuple[GuardState, ...]:
        return tuple(
            [
                guard.next_state(old, skips.of_guard(position), observed[position], advances)
                for position, guard, old in guards
            ]
        )

    outcome = jnp.where(has_run, outcome_of(after.inner_state), 0) | flags | skips.flags
    is_failure = has_flag(outcome, CallOutcome.SKIPPED | CallOutcome.EMPTY_WINDOW)
    streak = increment_where(call.state.consecutive_skips, is_failure)
    streak = jnp.where(has_flag(outcome, CallOutcome.APPLIED), 0, streak)
    has_failed = jnp.bool_(False)
    for position, guard, old in call.outer_guards + call.inner_guards:
        if guard.has_failed is not None:
            has_failed |= guard.has_failed(old.rule_state, has_any(skips.of_guard(position)))
        if guard.max_consecutive_skips is not None:
            has_failed |= streak >= guard.max_consecutive_skips
    return after._replace(
        consecutive_skips=streak,
        guard_failed=call.state.guard_failed | has_failed.astype(jnp.int32),
        outer_guards=advanced(call.outer_guards, is_used),
        inner_guards=advanced(call.inner_guards, has_run),
        outcome=outcome,
    )


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """Call `optax.apply_updates` with support for float0 updates and strict dtype promotion."""

    def addend(update: Tree, param: Tree) -> Tree:
        return jnp.zeros_like(param) if is_float0(update) else update

    with jax.numpy_dtype_promotion("standard"):
        return optax.apply_updates(params, jax.tree.map(addend, updates, params))
