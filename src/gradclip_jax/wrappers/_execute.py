"""Run guards, an accumulation and the inner transformation in one call of `update`.

1. Guards around the accumulation check the micro-batch.
2. The accumulation adds the gradient to the window.
3. If the window closes, the step follows: guards check the gradient of the window, the inner
   transformation runs, and guards with `check="step"` check the computed step; see `take_step`.
4. The next state records the outcome of the call, the counts, and the state of each guard.

Without an accumulation, each call is a step. The inner transformation runs at most once per call.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._checks import check_same_structure
from .._errors import named
from .._run_if import run_step
from .._states import increment_where
from .._types import Array, Scalar, Tree
from ..norms._leaves import checked_leaves
from ._accumulation import AccumulationState, MicroBatch, micro_batch_of
from ._extra_args import ExtraArgs
from ._guard import Measure, has_any, params_of
from ._nesting import Wrappers
from ._skips import Checked, PlacedGuard, Skips, flag_where, receive
from ._state import CallOutcome, GuardState, WrapperState, has_flag, outcome_of
from ._step import Call, Carry, Step, take_step


class Result(NamedTuple):
    """The result of one call. Updates and measurements are zeros if no step was taken.

    Attributes:
        updates: The updates; None if they were added to the parameters.
        measured: The measurements of `measure`, or None.
        params: The new parameters; None if updates are returned.
        state: The next state.
    """

    updates: Tree
    measured: Tree
    params: Tree
    state: WrapperState


def execute(
    wrappers: Wrappers,
    grads: Tree,
    state: WrapperState,
    params: Tree,
    extra_args: ExtraArgs,
    *,
    in_place: bool = False,
    measure: Measure | None = None,
) -> Result:
    """Execute one call; with `in_place`, add the updates to the parameters.

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

    Guards around an accumulation do not check micro-batches of weight 0. If a guard further inside,
    such as in a chain, skips its step, the inner transformation counts as skipped.
    """
    with named(wrappers.name):
        wrappers.check_state(state)
        checked_leaves("updates", grads)
        if params is not None:
            check_same_structure(grads, params_of(params))
    states, num_outer = state.outer_guards + state.inner_guards, len(wrappers.outer_guards)
    guards = list(map(PlacedGuard, itertools.count(), wrappers.all_guards, states))
    call = Call(wrappers, state, guards[:num_outer], guards[num_outer:], grads, measure)
    carry = Carry(params if in_place else None, state.inner_state)
    if wrappers.accumulation is not None:
        return _accumulate(call, params, carry, extra_args)
    step, carry = take_step(call, grads, params, carry, extra_args)
    after = state._replace(inner_state=carry.inner_state, grad_norm=step.norm)
    has_run = jnp.asarray(step.skips.is_accepted)
    after = _recorded(call, after, step.skips, step.observed, has_run, has_run)
    return Result(step.updates, step.measured, carry.params, after)


def _accumulate(call: Call, params: Tree, carry: Carry, extra_args: ExtraArgs) -> Result:
    """Add a micro-batch to the window, and take a step with its gradient if the window closes."""
    wrappers, state, accumulation = call.wrappers, call.state, call.wrappers.accumulation
    assert accumulation is not None
    with named(accumulation.name):
        batch = micro_batch_of(extra_args)
    checked = _check_micro_batch(call, batch, params)
    is_accepted = checked.skips.is_accepted
    with named(accumulation.name):
        window, closes = accumulation.add(state.accumulation, checked.grads, batch, is_accepted)

    # Without a step, `run_step` returns zeros like the outputs. Arrays that a function closes over
    # lose their explicit sharding, so they are operands.
    def close_window(
        carry: tuple[Tree, Carry], window: AccumulationState, grads: Tree, params: Tree
    ) -> tuple[Step, tuple[Tree, Carry]]:
        total, updated = carry
        mean, others, total = accumulation.close(window.with_total(total), grads, batch)
        step, updated = take_step(call, mean, params, updated, others)
        return step, (total, updated)

    takes_step = closes & window.has_positive_weight
    if accumulation.always_closes(window, batch) and not wrappers.outer_guards:
        takes_step = True  # known at trace time, so that no branch is compiled
    start = window.gradient.total, carry
    operands = window, checked.grads, params
    step, (total, carry) = run_step(takes_step, close_window, start, *operands)

    has_run = takes_step & step.skips.is_accepted
    is_accumulated = is_accepted & batch.passes_gradient & ~closes
    is_used = is_accepted & batch.counts & (is_accumulated | has_run)
    is_empty = closes & ~window.has_positive_weight
    # With `flush`, a guard may skip both the micro-batch and the window, but it counts one skip.
    skips = checked.skips.merged(step.skips)
    norm, is_new = step.norm, takes_step
    if wrappers.outer_guards:
        norm, is_new = checked.norm, batch.counts
    if norm is not None and state.grad_norm is not None:
        norm = jnp.where(is_new, norm, state.grad_norm)
    after = state._replace(
        accumulation=accumulation.finish(window.with_total(total), closes, has_run),
        inner_state=carry.inner_state,
        grad_norm=norm,
    )
    observed = checked.observed + step.observed
    flags = flag_where(CallOutcome.ACCUMULATED, is_accumulated)
    flags |= flag_where(CallOutcome.EMPTY_WINDOW, is_empty)
    after = _recorded(call, after, skips, observed, is_used, has_run, flags)
    return Result(step.updates, step.measured, carry.params, after)


def _check_micro_batch(call: Call, batch: MicroBatch, params: Tree) -> Checked:
    """Check a micro-batch with the outer guards. They accept it if its weight is 0."""
    extra_args = batch.extra_args | {"weight": batch.weight}
    arguments = call.grads, params, extra_args, Skips({})
    checked = receive(call.outer_guards, *arguments, is_micro_batch=True)
    skips = jax.tree.map(functools.partial(jnp.logical_and, batch.counts), checked.skips)
    return checked._replace(skips=skips)


def _recorded(
    call: Call,
    after: WrapperState,
    skips: Skips,
    observed: Sequence[Tree],
    is_used: Scalar | bool,
    has_run: Scalar,
    flags: Array | int = 0,
) -> WrapperState:
    """Record the state of each guard, the outcome of the call, and whether a guard has failed.

    Outer guards advance if `is_used`: no guard rejected the micro-batch, its weight is not 0, and
    it was accumulated or applied. Inner guards advance if `has_run`: the inner transformation ran.
    `flags` contains other flags of the outcome.
    """
    outcome = jnp.where(has_run, outcome_of(after.inner_state), 0) | flags | skips.flags
    is_failure = has_flag(outcome, CallOutcome.SKIPPED | CallOutcome.EMPTY_WINDOW)
    streak = increment_where(call.state.consecutive_skips, is_failure)
    streak = jnp.where(has_flag(outcome, CallOutcome.APPLIED), 0, streak)
    states: list[GuardState] = []
    has_failed = jnp.bool_(False)
    num_outer = len(call.outer_guards)
    for place, guard, old in call.outer_guards + call.inner_guards:
        causes = skips.of_guard(place)
        advances = is_used if place < num_outer else has_run
        states.append(guard.next_state(old, causes, observed[place], advances))
        if guard.has_failed is not None:
            has_failed |= guard.has_failed(old.rule_state, has_any(causes))
        if guard.max_consecutive_skips is not None:
            has_failed |= streak >= guard.max_consecutive_skips
    return after._replace(
        consecutive_skips=streak,
        guard_failed=call.state.guard_failed | has_failed.astype(jnp.int32),
        outer_guards=tuple(states[:num_outer]),
        inner_guards=tuple(states[num_outer:]),
        outcome=outcome,
    )
