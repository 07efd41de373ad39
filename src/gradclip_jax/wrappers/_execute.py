"""One call of guards and an accumulation around a transformation, in the order of events.

1. Guards around the accumulation check the micro-batch.
2. The accumulation adds it to the window.
3. If the window closes, the step follows: guards check the gradient of the window, the inner
   transformation runs, and guards with `check="step"` check the computed step.
4. The next state records the outcome of the call, the counts, and the state of each guard.

Without an accumulation, each call is a step. The inner transformation runs at most once per call.

A guard skips with flags of `Outcome`, which contain the cause; they are 0 if it does not skip.
"""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from .._checks import check_same_structure, dtype_of, is_float0, shortened
from .._errors import named, type_error
from .._run_if import compute_step, like_dtypes, run_step, select_step
from .._states import increment_where, is_only_clips
from .._types import Array, Scalar, Tree
from ..norms._leaves import checked_leaves
from ._accumulation import micro_batch_of
from ._guard import ExtraArgs, Guard, Observe, Rejections, params_of
from ._nesting import Wrappers
from ._state import GuardState, Outcome, WrapperState, has_flag, outcome_of

SkipFlags: TypeAlias = Array | int
"""Flags of `Outcome` with which a guard skips; the Python number 0 if it checks nothing."""


class _Call(NamedTuple):
    """The arguments of one call, except for the extra arguments, which an accumulation changes.

    Attributes:
        wrappers: The guards, the accumulation and the inner transformation.
        grads: The gradient as the caller passed it.
        state: State before the call.
        params: Parameters, or None.
        observe: Function that measures updates, or None.
    """

    wrappers: Wrappers
    grads: Tree
    state: WrapperState
    params: Tree
    observe: Observe | None


class _Check(NamedTuple):
    """What guards found in a gradient.

    Attributes:
        skips: For each guard, the flags with which it skips; only the first guard that rejects the
            gradient skips.
        observed: For each guard, what its check returned for `Guard.advance`.
        norm: Norm of the gradient that the first guard received; None without guards.
    """

    skips: list[SkipFlags]
    observed: list[Tree]
    norm: Scalar | None


class _Step(NamedTuple):
    """The result of a step. All arrays are zeros if no step was taken.

    Attributes:
        output: The updates, which are omitted if they were added to the parameters, and the
            measurements.
        skips: For each guard, the flags with which it skips the step.
        check: What the guards inside the accumulation found in the gradient.
    """

    output: tuple[Tree, Tree]
    skips: list[Array]
    check: _Check


class _GuardCall(NamedTuple):
    """What one guard did in a call.

    Attributes:
        skip: The flags with which it skipped the micro-batch or the step.
        observed: What its check returned for `Guard.advance`.
        is_accepted: Whether the guard accepted a gradient that was applied or accumulated.
    """

    skip: Array
    observed: Tree
    is_accepted: Scalar


def execute(
    wrappers: Wrappers,
    grads: Tree,
    state: WrapperState,
    params: Tree,
    target: Tree,
    extra_args: ExtraArgs,
    observe: Observe | None = None,
) -> tuple[tuple[Tree, Tree], Tree, WrapperState]:
    """Execute one call; return updates and measurements, the new `target`, and the next state.

    `target` are the parameters to which the updates are added, or None to return the updates.

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
    | the gradient was only accumulated | unchanged | the same |
    | a skip, or a window without weight | + 1 | updated only in the guard that skipped |

    Guards around an accumulation do not check micro-batches of weight 0, which it ignores.
    """
    with named(wrappers.name):
        wrappers.check_state(state)
        checked_leaves("updates", grads)
        if params is not None:
            check_same_structure(grads, params_of(params))
    call, carry = _Call(wrappers, grads, state, params, observe), (target, state.inner_state)
    if wrappers.accumulation is not None:
        return _accumulate(call, carry, extra_args)
    step, (target, inner_state) = _step(call, grads, carry, extra_args)
    has_run = jnp.asarray(_is_accepted(step.skips))
    guards = [_GuardCall(*x, has_run) for x in zip(step.skips, step.check.observed, strict=True)]
    return step.output, target, _next_state(call, guards, has_run, step.check.norm, inner_state)


def _accumulate(
    call: _Call, carry: tuple[Tree, Tree], extra_args: ExtraArgs
) -> tuple[tuple[Tree, Tree], Tree, WrapperState]:
    """Add a micro-batch to the window, and take a step with its gradient if the window closes."""
    wrappers, state, accumulation = call.wrappers, call.state, call.wrappers.accumulation
    assert accumulation is not None
    with named(accumulation.name):
        batch = micro_batch_of(extra_args)
    given = batch.extra_args | {"weight": batch.weight}
    received = wrappers.outer, state.outer, call.grads, call.params, given
    grads, check = _receive(*received, is_micro_batch=True)
    is_weighted = batch.weight != 0  # also for NaN, which guards reject
    skips = [jnp.where(is_weighted, skip, 0) for skip in check.skips]
    is_accepted = jnp.asarray(_is_accepted(skips))

    with named(accumulation.name):
        window, closes = accumulation.add(state.accumulation, grads, batch, is_accepted)
    has_weight = window.gradient.weight > 0

    # Arrays are passed, because those that `step` closes over would lose their sharding.
    def step(carry: Tree, window: Tree, grads: Tree, params: Tree) -> tuple[_Step, Tree]:
        total, carry = carry
        mean, others, total = accumulation.close(window.with_total(total), grads, batch)
        result, carry = _step(call._replace(params=params), mean, carry, others)
        return result, (total, carry)

    takes_step = closes & has_weight
    if not (accumulation.has_sum(window) or wrappers.outer or batch.has_weight):
        takes_step = True  # known at trace time: each micro-batch is a window
    given = (window.gradient.total, carry), window, grads, call.params
    result, (total, carry) = run_step(takes_step, step, *given)

    has_run = closes & has_weight & _is_accepted(result.skips)
    is_accumulated = is_accepted & batch.is_given & ~closes
    flags = _flag(Outcome.ACCUMULATED, is_accumulated)
    flags |= _flag(Outcome.EMPTY_WINDOW, closes & ~has_weight)
    # A guard around the accumulation checks the micro-batch and, after a skip, a flushed window.
    is_used = is_accepted & is_weighted & (is_accumulated | has_run)
    num_outer = len(wrappers.outer)
    outer = zip(skips, result.skips[:num_outer], check.observed, strict=True)
    guards = [_GuardCall(first | later, observed, is_used) for first, later, observed in outer]
    inner = zip(result.skips[num_outer:], result.check.observed, strict=True)
    guards += [_GuardCall(skip, observed, has_run) for skip, observed in inner]

    norm = check.norm if wrappers.outer else result.check.norm
    if norm is not None and state.grad_norm is not None:
        is_measured = is_weighted if wrappers.outer else closes & has_weight
        norm = jnp.where(is_measured, norm, state.grad_norm)
    after = _next_state(call, guards, has_run, norm, carry[1], flags)
    window = accumulation.finish(window.with_total(total), closes, has_run)
    return result.output, carry[0], after._replace(accumulation=window)


def _receive(
    guards: tuple[Guard, ...],
    states: tuple[GuardState, ...],
    grads: Tree,
    params: Tree,
    extra_args: ExtraArgs,
    is_micro_batch: bool = False,
) -> tuple[Tree, _Check]:
    """Pass a gradient through guards, which unscale, mask and check it."""
    skips: list[SkipFlags] = []
    observed: list[Tree] = []
    norms: list[Scalar] = []
    for guard, state in zip(guards, states, strict=True):
        with named(guard.name):
            grads = guard.receive(grads, state.rule_state, params)
            norms.append(guard.norm(grads))
            check = (is_micro_batch and guard.check_micro_batch) or guard.check
            rejections, seen = check(grads, norms[-1], state.rule_state, params, extra_args)
        skips.append(_skip_flags(rejections))
        observed.append(seen)
    norm = norms[0].astype(jnp.float32) if norms else None
    return grads, _Check(_of_first_guard(skips), observed, norm)


def _step(
    call: _Call, grads: Tree, carry: tuple[Tree, Tree], extra_args: ExtraArgs
) -> tuple[_Step, tuple[Tree, Tree]]:
    """Check a gradient, run the inner transformation, and check the computed step.

    `carry` contains the parameters to update, or None, and the inner state.
    """
    wrappers, params = call.wrappers, call.params
    skips = _check_window(call, grads, extra_args)
    received, found = _receive(wrappers.guards, call.state.guards, grads, params, extra_args)
    skips = _of_first_guard([*skips, *found.skips])
    is_accepted = _is_accepted(skips)
    step_checks = [guard.check_step for guard in (*wrappers.outer, *wrappers.guards)]

    def run(carry: tuple[Tree, Tree]) -> tuple[tuple[Tree, Tree], tuple[Tree, Tree]]:
        target, inner_state = carry
        updates, inner_state = _run_inner(call, received, inner_state, target, extra_args)
        measured = None if call.observe is None else call.observe(updates, target)
        new = None if target is None else apply_updates(target, updates)
        if target is not None and not any(step_checks):
            updates = None  # nobody reads them
        return (updates, measured), (new, inner_state)

    if any(step_checks):
        program, computed = compute_step(run, carry)
        (updates, _), (_, after) = computed
        given = updates, carry[1], after, params
        of_step = [_skip_flags(check(*given) if check else {}) for check in step_checks]
        pairs = zip(_of_first_guard(of_step), skips, strict=True)
        skips = [jnp.where(is_accepted, *pair) for pair in pairs]
        output, carry = select_step(_is_accepted(skips), program, computed, carry)
    else:
        output, carry = run_step(is_accepted, run, carry, likely=True)
    return _Step(output, [jnp.asarray(skip, jnp.int32) for skip in skips], found), carry


def _check_window(call: _Call, grads: Tree, extra_args: ExtraArgs) -> list[SkipFlags]:
    """Return the flags with which guards around an accumulation skip the gradient of a window."""
    skips: list[SkipFlags] = []
    for guard, state in zip(call.wrappers.outer, call.state.outer, strict=True):
        rejections: Rejections = {}
        if guard.checks_window:
            given = grads, guard.norm(grads), state.rule_state, call.params
            rejections, _ = guard.check(*given, extra_args)
        skips.append(_skip_flags(rejections))
    return skips


def _run_inner(
    call: _Call, grads: Tree, state: Tree, target: Tree, extra_args: ExtraArgs
) -> tuple[Tree, Tree]:
    """Run the inner transformation, and check its state.

    An accumulation or a loss scale computes gradients in float32. Updates that are returned to the
    caller have the dtypes that the transformation returns for the gradient of the caller.
    """
    params = call.params if target is None else target

    def run(grads: Tree, state: Tree) -> tuple[Tree, Tree]:
        return call.wrappers.inner.update(grads, state, params, **extra_args)

    updates, after = run(grads, state)
    if jax.tree.structure(after) != jax.tree.structure(state):
        hint = (
            "If a checkpoint contains lists instead of tuples, restore its leaves into the "
            "structure of `tx.init(params)` with `jax.tree.unflatten`."
        )
        rule = "a state whose structure the inner transformation keeps, with tuples and no lists"
        with named(call.wrappers.name):
            raise type_error("state", rule, shortened(state), hint)
    is_identity = updates is grads and not jax.tree.leaves(state)
    if is_identity or is_only_clips(state):
        warnings.warn(
            "The transformation inside this guard or accumulation contains no optimizer. Place the "
            "optimizer inside: outside, it runs on zeros if a step is skipped or accumulated.",
            stacklevel=2,
        )
    own, given = ([dtype_of(x) for x in jax.tree.leaves(tree)] for tree in (grads, call.grads))
    if target is None and own != given:
        expected, _ = jax.eval_shape(run, like_dtypes(grads, call.grads), state)
        updates = like_dtypes(updates, expected)
    return updates, after


def _next_state(
    call: _Call,
    calls: Sequence[_GuardCall],
    has_run: Scalar,
    norm: Scalar | None,
    inner_state: Tree,
    flags: Array | int = 0,
) -> WrapperState:
    """Return the next state of all but the accumulation, whose flags are added to the outcome."""
    state, wrappers = call.state, call.wrappers
    outcome = jnp.where(has_run, outcome_of(inner_state), 0) | flags
    for guard_call in calls:
        outcome |= guard_call.skip

    is_failure = has_flag(outcome, Outcome.SKIPPED | Outcome.EMPTY_WINDOW)
    is_failure &= ~has_flag(outcome, Outcome.ACCUMULATED)
    streak = increment_where(state.consecutive_skips, is_failure)
    streak = jnp.where(has_flag(outcome, Outcome.APPLIED), 0, streak)

    has_failed = state.guard_failed > 0
    guards: list[GuardState] = []
    every_guard = wrappers.outer + wrappers.guards
    rows = zip(every_guard, state.outer + state.guards, calls, strict=True)
    for guard, own, guard_call in rows:
        guards.append(_next_guard_state(guard, own, guard_call))
        has_failed |= guard.has_failed(own.rule_state, guard_call.skip != 0)
        if guard.max_consecutive_skips is not None:
            has_failed |= streak >= guard.max_consecutive_skips
    return WrapperState(
        outcome=outcome,
        grad_norm=norm,
        consecutive_skips=streak,
        guard_failed=has_failed.astype(jnp.int32),
        outer=tuple(guards[: len(wrappers.outer)]),
        accumulation=state.accumulation,
        guards=tuple(guards[len(wrappers.outer) :]),
        inner_state=inner_state,
    )


def _next_guard_state(guard: Guard, state: GuardState, call: _GuardCall) -> GuardState:
    """Count a skip by its causes, and advance the state of the guard itself."""
    counts = {
        cause: increment_where(count, has_flag(call.skip, Outcome.of_cause(cause)))
        for cause, count in state.skipped.items()
    }
    is_skipped = call.skip != 0
    with named(guard.name):
        advanced = guard.advance(state.rule_state, call.observed, is_skipped)
    is_advanced = is_skipped | call.is_accepted
    return GuardState(counts, optax.tree.where(is_advanced, advanced, state.rule_state))


def _skip_flags(rejections: Rejections) -> SkipFlags:
    """Return the flags of a skip by these causes, or 0 if no cause rejects."""
    flags = (
        _flag(Outcome.SKIPPED | Outcome.of_cause(cause), is_rejected)
        for cause, is_rejected in rejections.items()
    )
    return functools.reduce(operator.or_, flags, 0)


def _of_first_guard(skips: Sequence[SkipFlags]) -> list[SkipFlags]:
    """Keep the flags of the first guard that skips, and set those of later guards to 0."""
    kept: list[SkipFlags] = []
    for skip in skips:
        is_first = _is_accepted(kept)
        # Flags that are known at trace time stay known, so that they need no branch.
        is_known = is_first is True or isinstance(skip, int)
        kept.append(skip if is_known else jnp.where(is_first, skip, 0))
    return kept


def _is_accepted(skips: Sequence[SkipFlags]) -> Scalar | bool:
    """Return whether no guard skips; the Python bool True if no guard checks anything."""
    return functools.reduce(operator.or_, skips, 0) == 0


def _flag(flag: Outcome, is_set: Scalar | bool) -> Array:
    """Return the bits of a flag if it is set, otherwise 0."""
    return jnp.where(is_set, jnp.int32(int(flag)), 0)


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """Call `optax.apply_updates` with support for float0 updates and strict dtype promotion."""

    def addend(update: Array, param: Array) -> Array:
        return jnp.zeros_like(param) if is_float0(update) else update

    with jax.numpy_dtype_promotion("standard"):
        return optax.apply_updates(params, jax.tree.map(addend, updates, params))
