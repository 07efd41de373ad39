"""Run guards, an accumulation and the inner transformation in one call of `update`.

1. Guards around the accumulation check the micro-batch.
2. The accumulation adds it to the window.
3. If the window closes, the step follows: guards check the gradient of the window, the inner
   transformation runs, and guards with `check="step"` check the computed step.
4. The next state records the outcome of the call, the counts, and the state of each guard.

Without an accumulation, each call is a step. The inner transformation runs at most once per call.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import optax

from .._checks import check_same_structure
from .._errors import named
from .._run_if import compute_step, run_step, select_step
from .._states import increment_where
from .._types import Array, Scalar, Tree
from ..norms._leaves import checked_leaves
from ._accumulation import AccumulationState, MicroBatch, micro_batch_of
from ._guard import ExtraArgs, GradientCheck, Guard, Observe, Rejections, is_gradient, params_of
from ._inner import apply_updates, run_inner, updates_for_caller
from ._nesting import Wrappers
from ._skips import SkipFlags, first_skip, flag_where, is_accepted_by_all, skip_flags
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


class _Call(NamedTuple):
    """The arguments of one call, except for the extra arguments, which an accumulation changes.

    Attributes:
        wrappers: The guards, the accumulation and the inner transformation.
        grads: The gradient as the caller passed it.
        state: State before the call.
        params: Parameters, or None.
        observe: Function that measures the updates before they are added to the parameters, or
            None.
    """

    wrappers: Wrappers
    grads: Tree
    state: WrapperState
    params: Tree
    observe: Observe | None


class _Carry(NamedTuple):
    """Arrays that a step updates in place.

    Attributes:
        params: Parameters to which the updates are added; None to return the updates.
        inner_state: State of the inner transformation.
    """

    params: Tree
    inner_state: Tree


class _Findings(NamedTuple):
    """Results of checking one gradient; the lists have one entry for each guard.

    Attributes:
        skips: Skip flags of each guard. Only the first guard that rejects the gradient skips it.
        observed: Second result of each check, which `Guard.advance` receives.
        norm: Norm of the gradient that the first guard received; None without guards.
    """

    skips: list[SkipFlags]
    observed: list[Tree]
    norm: Scalar | None


class _StepResult(NamedTuple):
    """The result of a step. All arrays are zeros if no step was taken.

    Attributes:
        updates: The updates; None if they were added to the parameters.
        measured: The measurements of `observe`, or None.
        skips: Skip flags of each guard, from the outermost to the innermost.
        findings: Results of the guards inside the accumulation.
    """

    updates: Tree
    measured: Tree
    skips: list[Array]
    findings: _Findings


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
    call = _Call(wrappers, grads, state, params, observe)
    carry = _Carry(params if in_place else None, state.inner_state)
    if wrappers.accumulation is not None:
        return _accumulate(call, carry, extra_args)
    step, carry = _take_step(call, grads, carry, extra_args)
    skips, found = step.skips, step.findings
    has_run = jnp.asarray(is_accepted_by_all(skips))
    after = state._replace(
        guards=_next_guards(wrappers.guards, state.guards, skips, found.observed, has_run),
        inner_state=carry.inner_state,
        grad_norm=found.norm,
    )
    return Result(
        step.updates, step.measured, carry.params, _with_outcome(call, after, skips, has_run)
    )


def _accumulate(call: _Call, carry: _Carry, extra_args: ExtraArgs) -> Result:
    """Add a micro-batch to the window, and take a step with its gradient if the window closes."""
    wrappers, state, accumulation = call.wrappers, call.state, call.wrappers.accumulation
    assert accumulation is not None
    with named(accumulation.name):
        batch = micro_batch_of(extra_args)
    grads, found = _check_micro_batch(call, batch)
    is_accepted = jnp.asarray(is_accepted_by_all(found.skips))
    with named(accumulation.name):
        window, closes = accumulation.add(state.accumulation, grads, batch, is_accepted)

    # `step` creates zeros like these arrays, so they must be operands; see `run_step`.
    def step(
        carry: tuple[Tree, _Carry], window: AccumulationState, grads: Tree, params: Tree
    ) -> tuple[_StepResult, tuple[Tree, _Carry]]:
        total, updated = carry
        mean, others, total = accumulation.close(window.with_total(total), grads, batch)
        result, updated = _take_step(call._replace(params=params), mean, updated, others)
        return result, (total, updated)

    takes_step = closes & window.has_positive_weight
    # With `every=1`, without an outer guard and a weight, `takes_step` is true in every call.
    each_is_a_window = not (
        accumulation.has_sum(window) or wrappers.outer or batch.is_weight_passed
    )
    result, (total, carry) = run_step(
        True if each_is_a_window else takes_step,  # if known at trace time, no branch is compiled
        step,
        (window.gradient.total, carry),
        window,
        grads,
        call.params,
    )

    has_run = takes_step & is_accepted_by_all(result.skips)
    is_accumulated = is_accepted & batch.passes_gradient & ~closes
    is_used = is_accepted & batch.counts & (is_accumulated | has_run)
    # With `flush`, an outer guard may reject both the micro-batch and the window. It counts one
    # skip.
    num_outer = len(wrappers.outer)
    outer_skips = [x | y for x, y in zip(found.skips, result.skips[:num_outer], strict=True)]
    inner_skips, inner_found = result.skips[num_outer:], result.findings
    after = state._replace(
        outer=_next_guards(wrappers.outer, state.outer, outer_skips, found.observed, is_used),
        accumulation=accumulation.finish(window.with_total(total), closes, has_run),
        guards=_next_guards(
            wrappers.guards, state.guards, inner_skips, inner_found.observed, has_run
        ),
        inner_state=carry.inner_state,
        grad_norm=_last_norm(call, found, batch.counts, inner_found, takes_step),
    )
    flags = flag_where(CallOutcome.ACCUMULATED, is_accumulated)
    flags |= flag_where(CallOutcome.EMPTY_WINDOW, closes & ~window.has_positive_weight)
    after = _with_outcome(call, after, [*outer_skips, *inner_skips], has_run, flags)
    return Result(result.updates, result.measured, carry.params, after)


def _check_micro_batch(call: _Call, batch: MicroBatch) -> tuple[Tree, _Findings]:
    """Check a micro-batch with the outer guards. They accept it if its weight is 0."""
    guards = call.wrappers.outer
    checks = [guard.check_micro_batch or guard.check for guard in guards]
    extra_args = batch.extra_args | {"weight": batch.weight}
    grads, found = _receive(guards, checks, call.state.outer, call.grads, call.params, extra_args)
    skips = [jnp.where(batch.counts, skip, 0) for skip in found.skips]
    return grads, found._replace(skips=skips)


def _last_norm(
    call: _Call, micro_batch: _Findings, counts: Scalar, window: _Findings, takes_step: Scalar
) -> Scalar | None:
    """Return the norm of the last gradient that the outermost guard checked."""
    if call.wrappers.outer:
        norm, is_measured = micro_batch.norm, counts
    else:
        norm, is_measured = window.norm, takes_step
    if norm is None or call.state.grad_norm is None:
        return None
    return jnp.where(is_measured, norm, call.state.grad_norm)


def _receive(
    guards: Sequence[Guard],
    checks: Sequence[GradientCheck],
    states: Sequence[GuardState],
    grads: Tree,
    params: Tree,
    extra_args: ExtraArgs,
) -> tuple[Tree, _Findings]:
    """Pass a gradient through guards, which unscale, mask and check it."""
    skips: list[SkipFlags] = []
    observed: list[Tree] = []
    norms: list[Scalar] = []
    for guard, check, state in zip(guards, checks, states, strict=True):
        with named(guard.name):
            grads = guard.receive(grads, state.rule_state, params)
            norms.append(guard.norm(grads))
            rejections, seen = check(grads, norms[-1], state.rule_state, params, extra_args)
        skips.append(skip_flags(rejections))
        observed.append(seen)
    norm = norms[0].astype(jnp.float32) if norms else None
    return grads, _Findings(first_skip(skips), observed, norm)


def _take_step(
    call: _Call, grads: Tree, carry: _Carry, extra_args: ExtraArgs
) -> tuple[_StepResult, _Carry]:
    """Check a gradient, run the inner transformation, and check the computed step."""
    wrappers, guards, params = call.wrappers, call.wrappers.guards, call.params
    skips = _check_window(call, grads, extra_args)
    checks = [guard.check for guard in guards]
    received, found = _receive(guards, checks, call.state.guards, grads, params, extra_args)
    if is_gradient(extra_args, grads):
        for guard, state in zip(guards, call.state.guards, strict=True):
            unscaled = guard.unscale(extra_args["grad"], state.rule_state)
            extra_args = extra_args | {"grad": unscaled}
    skips = first_skip([*skips, *found.skips])
    is_accepted = is_accepted_by_all(skips)
    checks_step = any(guard.check_step for guard in wrappers.all_guards)

    def run(carry: _Carry) -> tuple[tuple[Tree, Tree], _Carry]:
        in_place_params, inner_state = carry
        current = params if in_place_params is None else in_place_params
        arguments = received, inner_state, current, extra_args
        updates, after = run_inner(wrappers, *arguments)
        if in_place_params is None:
            updates = updates_for_caller(wrappers, updates, call.grads, *arguments)
            return (updates, None), _Carry(None, after)
        measured = None if call.observe is None else call.observe(updates, in_place_params)
        new_params = apply_updates(in_place_params, updates)
        return (updates if checks_step else None, measured), _Carry(new_params, after)

    if checks_step:
        traced, computed = compute_step(run, carry)
        (updates, _), after = computed
        step_skips = _check_step(call, updates, carry.inner_state, after.inner_state)
        skips = [
            jnp.where(is_accepted, of_step, of_gradient)
            for of_step, of_gradient in zip(step_skips, skips, strict=True)
        ]
        is_accepted = is_accepted_by_all(skips)
        (updates, measured), carry = select_step(is_accepted, traced, computed, carry)
    else:
        (updates, measured), carry = run_step(is_accepted, run, carry, likely=True)
    skips = [jnp.asarray(skip, jnp.int32) for skip in skips]
    updates = updates if carry.params is None else None
    return _StepResult(updates, measured, skips, found), carry


def _check_window(call: _Call, grads: Tree, extra_args: ExtraArgs) -> list[SkipFlags]:
    """Check the gradient of a window with the outer guards, and return their skip flags."""
    skips: list[SkipFlags] = []
    for guard, state in zip(call.wrappers.outer, call.state.outer, strict=True):
        rejections: Rejections = {}
        if guard.check_window is not None:
            norm, rule_state = guard.norm(grads), state.rule_state
            # The second result is not needed: micro-batches update the state of an outer guard.
            rejections, _ = guard.check_window(grads, norm, rule_state, call.params, extra_args)
        skips.append(skip_flags(rejections))
    return skips


def _check_step(call: _Call, updates: Tree, before: Tree, after: Tree) -> list[SkipFlags]:
    """Check a computed step with all guards, and return their skip flags."""
    skips: list[SkipFlags] = []
    for guard in call.wrappers.all_guards:
        rejections: Rejections = {}
        if guard.check_step is not None:
            rejections = guard.check_step(updates, before, after, call.params)
        skips.append(skip_flags(rejections))
    return first_skip(skips)


def _next_guards(
    guards: Sequence[Guard],
    states: Sequence[GuardState],
    skips: Sequence[Array],
    observed: Sequence[Tree],
    is_used: Scalar,
) -> tuple[GuardState, ...]:
    """Count the skips of each guard by cause, and update its own state.

    `is_used` is True if all guards accepted the gradient and it was applied or accumulated.
    """
    after: list[GuardState] = []
    for guard, state, skip, seen in zip(guards, states, skips, observed, strict=True):
        counts = {
            cause: increment_where(count, has_flag(skip, CallOutcome.of_cause(cause)))
            for cause, count in state.skipped.items()
        }
        is_skipped = skip != 0
        with named(guard.name):
            advanced = guard.advance(state.rule_state, seen, is_skipped)
        is_advanced = is_skipped | is_used
        rule_state = optax.tree.where(is_advanced, advanced, state.rule_state)
        after.append(GuardState(counts, rule_state))
    return tuple(after)


def _with_outcome(
    call: _Call,
    after: WrapperState,
    skips: Sequence[Array],
    has_run: Scalar,
    flags: Array | int = 0,
) -> WrapperState:
    """Record the outcome of a call, consecutive skips, and whether a guard has failed.

    `skips` has one entry for each guard. `flags` describes the accumulation.
    """
    before, guards = call.state, call.wrappers.all_guards
    outcome = jnp.where(has_run, outcome_of(after.inner_state), 0) | flags
    outcome = functools.reduce(operator.or_, skips, outcome)

    is_failure = has_flag(outcome, CallOutcome.SKIPPED | CallOutcome.EMPTY_WINDOW)
    is_failure &= ~has_flag(outcome, CallOutcome.ACCUMULATED)
    streak = increment_where(before.consecutive_skips, is_failure)
    streak = jnp.where(has_flag(outcome, CallOutcome.APPLIED), 0, streak)

    has_failed = before.guard_failed > 0
    for guard, state, skip in zip(guards, before.outer + before.guards, skips, strict=True):
        has_failed |= guard.has_failed(state.rule_state, skip != 0)
        if guard.max_consecutive_skips is not None:
            has_failed |= streak >= guard.max_consecutive_skips
    return after._replace(
        consecutive_skips=streak, guard_failed=has_failed.astype(jnp.int32), outcome=outcome
    )
