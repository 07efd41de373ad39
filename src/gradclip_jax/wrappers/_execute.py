"""Run guards, an accumulation and the inner transformation in one call of `update`.

1. Guards around the accumulation check the micro-batch.
2. The accumulation adds it to the window.
3. If the window closes, the step follows: guards check the gradient of the window, the inner
   transformation runs, and guards with `check="step"` check the computed step.
4. The next state records the outcome of the call, the counts, and the state of each guard.

Without an accumulation, each call is a step. The inner transformation runs at most once per call.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp

from .._checks import check_same_structure
from .._errors import named
from .._run_if import compute_step, run_step, select_step
from .._states import increment_where
from .._types import Array, Scalar, Tree
from ..norms._leaves import checked_leaves
from ._accumulation import AccumulationState, MicroBatch, micro_batch_of
from ._guard import ExtraArgs, GradientCheck, Guard, Observe, params_of
from ._inner import apply_updates, run_inner, updates_for_caller
from ._nesting import Wrappers
from ._skips import Skips, flag_where
from ._state import CallOutcome, GuardState, WrapperState, has_flag, outcome_of


class Result(NamedTuple):
    """The result of one call. Updates and measurements are zeros if no step was taken.

    Attributes:
        updates: The updates; None if they were added to the parameters.
        measured: The measurements of `observe`, or None.
        params: The new parameters; None if updates are returned.
        state: The next state.
    """

    updates: Tree
    measured: Tree
    params: Tree
    state: WrapperState


class _PlacedGuard(NamedTuple):
    """A guard, its place in `Skips.flags`, and its state before the call."""

    place: int
    guard: Guard
    state: GuardState


class _Call(NamedTuple):
    """The wrappers and the arguments that all parts of a call share.

    Attributes:
        wrappers: The guards, the accumulation and the inner transformation.
        state: State before the call.
        grads: The gradient as the caller passed it.
        observe: Function that measures the updates before they are added to the parameters, or
            None.
    """

    wrappers: Wrappers
    state: WrapperState
    grads: Tree
    observe: Observe | None

    @property
    def outer(self) -> list[_PlacedGuard]:
        """The guards around the accumulation."""
        return self._placed_guards[: len(self.wrappers.outer)]

    @property
    def inner(self) -> list[_PlacedGuard]:
        """The guards inside the accumulation, or all guards without one."""
        return self._placed_guards[len(self.wrappers.outer) :]

    @property
    def _placed_guards(self) -> list[_PlacedGuard]:
        """All guards, from the outermost to the innermost."""
        states = self.state.outer + self.state.guards
        return list(map(_PlacedGuard, itertools.count(), self.wrappers.all_guards, states))


class _Checked(NamedTuple):
    """A gradient that guards have received and checked.

    Attributes:
        grads: The gradient, unscaled and masked.
        extra_args: The extra arguments, in which a gradient `grad` is unscaled as well.
        skips: Which guards skip the gradient.
        observed: Second result of the check of each of these guards; see `Guard.advance`.
        norm: Norm of the gradient that the first of these guards checked; None without guards.
    """

    grads: Tree
    extra_args: ExtraArgs
    skips: Skips
    observed: list[Tree]
    norm: Scalar | None


class _Carry(NamedTuple):
    """Arrays that a step updates in place.

    Attributes:
        params: Parameters to which the updates are added; None to return the updates.
        inner_state: State of the inner transformation.
    """

    params: Tree
    inner_state: Tree


class _Step(NamedTuple):
    """The result of a step. All arrays are zeros if no step was taken.

    Attributes:
        updates: The updates; None if they were added to the parameters.
        measured: The measurements of `observe`, or None.
        skips: Which guards skip the step.
        observed: See `_Checked`; of the guards inside the accumulation.
        norm: See `_Checked`; of the guards inside the accumulation.
    """

    updates: Tree
    measured: Tree
    skips: Skips
    observed: list[Tree]
    norm: Scalar | None


def execute(
    wrappers: Wrappers,
    grads: Tree,
    state: WrapperState,
    params: Tree,
    extra_args: ExtraArgs,
    *,
    in_place: bool = False,
    observe: Observe | None = None,
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

    Guards around an accumulation do not check micro-batches of weight 0.
    """
    with named(wrappers.name):
        wrappers.check_state(state)
        checked_leaves("updates", grads)
        if params is not None:
            check_same_structure(grads, params_of(params))
    call = _Call(wrappers, state, grads, observe)
    carry = _Carry(params if in_place else None, state.inner_state)
    if wrappers.accumulation is not None:
        return _accumulate(call, params, carry, extra_args)
    step, carry = _take_step(call, grads, params, carry, extra_args)
    after = state._replace(inner_state=carry.inner_state, grad_norm=step.norm)
    has_run = jnp.asarray(step.skips.is_accepted)
    after = _recorded(call, after, step.skips, step.observed, has_run, has_run)
    return Result(step.updates, step.measured, carry.params, after)


def _accumulate(call: _Call, params: Tree, carry: _Carry, extra_args: ExtraArgs) -> Result:
    """Add a micro-batch to the window, and take a step with its gradient if the window closes."""
    wrappers, state, accumulation = call.wrappers, call.state, call.wrappers.accumulation
    assert accumulation is not None
    with named(accumulation.name):
        batch = micro_batch_of(extra_args)
    checked = _check_micro_batch(call, batch, params)
    is_accepted = checked.skips.is_accepted
    with named(accumulation.name):
        window, closes = accumulation.add(state.accumulation, checked.grads, batch, is_accepted)

    # `run_step` creates zeros like these arrays, so `take_step` must not close over them.
    def take_step(
        carry: tuple[Tree, _Carry], window: AccumulationState, grads: Tree, params: Tree
    ) -> tuple[_Step, tuple[Tree, _Carry]]:
        total, updated = carry
        mean, others, total = accumulation.close(window.with_total(total), grads, batch)
        step, updated = _take_step(call, mean, params, updated, others)
        return step, (total, updated)

    takes_step = closes & window.has_positive_weight
    if accumulation.always_closes(window, batch) and not wrappers.outer:
        takes_step = True  # known at trace time, so that no branch is compiled
    start = window.gradient.total, carry
    operands = window, checked.grads, params
    step, (total, carry) = run_step(takes_step, take_step, start, *operands)

    has_run = takes_step & step.skips.is_accepted
    is_accumulated = is_accepted & batch.passes_gradient & ~closes
    is_used = is_accepted & batch.counts & (is_accumulated | has_run)
    is_empty = closes & ~window.has_positive_weight
    # With `flush`, a guard may skip both the micro-batch and the window, but it counts one skip.
    skips = checked.skips.merged(step.skips)
    norm, is_new = (checked.norm, batch.counts) if wrappers.outer else (step.norm, takes_step)
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


def _check_micro_batch(call: _Call, batch: MicroBatch, params: Tree) -> _Checked:
    """Check a micro-batch with the outer guards. They accept it if its weight is 0."""
    extra_args = batch.extra_args | {"weight": batch.weight}
    checks = [guard.check_micro_batch for guard in call.wrappers.outer]
    skips = Skips.none(len(call.wrappers.all_guards))
    checked = _receive(call.outer, checks, call.grads, params, extra_args, skips)
    return checked._replace(skips=checked.skips.where(batch.counts))


def _take_step(
    call: _Call, grads: Tree, params: Tree, carry: _Carry, extra_args: ExtraArgs
) -> tuple[_Step, _Carry]:
    """Check a gradient, run the inner transformation, and check the computed step."""
    wrappers = call.wrappers
    skips = _check_window(call, grads, params, extra_args)
    checks = [guard.check for guard in wrappers.guards]
    checked = _receive(call.inner, checks, grads, params, extra_args, skips)
    skips = checked.skips
    checks_step = any(guard.check_step for guard in wrappers.all_guards)

    def run(carry: _Carry) -> tuple[tuple[Tree, Tree], _Carry]:
        in_place_params, inner_state = carry
        current = params if in_place_params is None else in_place_params
        arguments = checked.grads, inner_state, current, checked.extra_args
        updates, inner_state = run_inner(wrappers, *arguments)
        if in_place_params is None:
            updates = updates_for_caller(wrappers, updates, call.grads, *arguments)
            return (updates, None), _Carry(None, inner_state)
        measured = None if call.observe is None else call.observe(updates, in_place_params)
        new_params = apply_updates(in_place_params, updates)
        return (updates if checks_step else None, measured), _Carry(new_params, inner_state)

    if checks_step:
        traced, computed = compute_step(run, carry)
        (updates, _), after = computed
        states = carry.inner_state, after.inner_state
        skips = _check_step(call, updates, *states, params, skips)
        (updates, measured), carry = select_step(skips.is_accepted, traced, computed, carry)
    else:
        (updates, measured), carry = run_step(skips.is_accepted, run, carry, likely=True)
    updates = updates if carry.params is None else None
    return _Step(updates, measured, skips.as_arrays(), checked.observed, checked.norm), carry


def _receive(
    guards: Sequence[_PlacedGuard],
    checks: Sequence[GradientCheck],
    grads: Tree,
    params: Tree,
    extra_args: ExtraArgs,
    skips: Skips,
) -> _Checked:
    """Pass a gradient through guards, which unscale, mask and check it."""
    observed: list[Tree] = []
    norms: list[Scalar] = []
    for (i, guard, state), check in zip(guards, checks, strict=True):
        with named(guard.name):
            grads, extra_args = guard.receive(grads, extra_args, state.rule_state, params)
            norms.append(guard.norm(grads))
            rejections, seen = check(grads, norms[-1], state.rule_state, params, extra_args)
        skips = skips.rejected_by(i, rejections)
        observed.append(seen)
    norm = norms[0].astype(jnp.float32) if norms else None
    return _Checked(grads, extra_args, skips, observed, norm)


def _check_window(call: _Call, grads: Tree, params: Tree, extra_args: ExtraArgs) -> Skips:
    """Check the gradient of a window with the guards around the accumulation."""
    skips = Skips.none(len(call.wrappers.all_guards))
    for i, guard, state in call.outer:
        if guard.check_window is not None:
            with named(guard.name):
                norm, rule_state = guard.norm(grads), state.rule_state
                # The second result is not needed: micro-batches update the state of this guard.
                rejections, _ = guard.check_window(grads, norm, rule_state, params, extra_args)
            skips = skips.rejected_by(i, rejections)
    return skips


def _check_step(
    call: _Call, updates: Tree, before: Tree, after: Tree, params: Tree, skips: Skips
) -> Skips:
    """Check a computed step and the inner states before and after it with all guards."""
    for i, guard, _ in call.outer + call.inner:
        if guard.check_step is not None:
            with named(guard.name):
                rejections = guard.check_step(updates, before, after, params)
            skips = skips.rejected_by(i, rejections)
    return skips


def _recorded(
    call: _Call,
    after: WrapperState,
    skips: Skips,
    observed: Sequence[Tree],
    is_used: Scalar | bool,
    has_run: Scalar,
    flags: Array | int = 0,
) -> WrapperState:
    """Record the state of each guard, the outcome of the call, and whether a guard has failed.

    `is_used` is True if the micro-batch was accumulated or applied, and `has_run` if the inner
    transformation ran. `flags` contains other flags of the outcome.
    """

    def states(guards: Sequence[_PlacedGuard], is_used: Scalar | bool) -> tuple[GuardState, ...]:
        return tuple(
            [
                guard.next_state(old, skips.flags[i], observed[i], is_used)
                for i, guard, old in guards
            ]
        )

    outcome = jnp.where(has_run, outcome_of(after.inner_state), 0) | flags | skips.union
    is_failure = has_flag(outcome, CallOutcome.SKIPPED | CallOutcome.EMPTY_WINDOW)
    is_failure &= ~has_flag(outcome, CallOutcome.ACCUMULATED)
    streak = increment_where(call.state.consecutive_skips, is_failure)
    streak = jnp.where(has_flag(outcome, CallOutcome.APPLIED), 0, streak)
    has_failed = call.state.guard_failed > 0
    for i, guard, old in call.outer + call.inner:
        has_failed |= guard.has_failed(old.rule_state, jnp.asarray(skips.flags[i] != 0))
        if guard.max_consecutive_skips is not None:
            has_failed |= streak >= guard.max_consecutive_skips
    return after._replace(
        consecutive_skips=streak,
        guard_failed=has_failed.astype(jnp.int32),
        outer=states(call.outer, is_used),
        guards=states(call.inner, has_run),
        outcome=outcome,
    )
