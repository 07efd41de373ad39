"""Execution of nested guards and accumulations.

Directly nested guards and accumulations share one `GatedUpdate`, and `_execute` runs the innermost
transformation at most once per call.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._checks import check_same_structure, check_state, check_transformation, is_float0
from .._errors import named, public
from .._leaves import check_leaves
from .._run_if import Flag, compute_step, run_step, select_step
from .._states import (
    discard_windows,
    find_role,
    has_stepped,
    increment_where,
    plain_arrays,
    with_structure_of,
)
from .._types import Array, Tree
from ._dtypes import update_in_dtypes
from ._extra_args import check_extra_args, has_weight, warn_of_identity, warn_of_weight
from ._gate import Accumulation, ExtraArgs, Guard, Observed, Step, params_of


@dataclasses.dataclass(frozen=True)
class GatedUpdate:
    """The `update` function of guards and accumulations.

    The function is a callable object instead of a closure, so that an outer guard can find the
    inner guards even if a trainer has rebuilt the transformation from `init` and `update`.
    `jax.named_call` requires `__name__`.

    Attributes:
        innermost: Transformation inside all guards and the accumulation.
        execute: The function `_execute`, with the name of the public function in its errors.
        outside: Guards outside the accumulation, from the outermost to the innermost.
        accumulation: The accumulation, or None.
        inside: Guards inside the accumulation, or all guards without one.
    """

    __name__: ClassVar[str] = "update"
    innermost: optax.GradientTransformationExtraArgs
    execute: Callable[..., tuple[Tree, Tree]]
    outside: tuple[Guard, ...] = ()
    accumulation: Accumulation | None = None
    inside: tuple[Guard, ...] = ()

    def __call__(
        self, updates: Tree, state: Tree, params: Tree | None = None, *args: Any, **extra_args: Any
    ) -> tuple[Tree, Tree]:
        """Return the update of the innermost transformation, or zeros if it does not run."""
        return self.execute(self, updates, state, params, args, extra_args, applies=False)

    def named(self, function: str) -> "GatedUpdate":
        """Return a copy whose error messages start with `function`."""
        return dataclasses.replace(self, execute=named(_execute, function))


def gated(
    gate: Guard | Accumulation,
    inner: optax.GradientTransformation,
    init: Callable[[Tree, Tree], Tree],
) -> optax.GradientTransformationExtraArgs:
    """Wrap a transformation in a guard or an accumulation.

    `init` maps the state of `inner` and the parameters to the state of the guard or accumulation.
    """
    update = inner.update
    if not isinstance(update, GatedUpdate):
        update = GatedUpdate(optax.with_extra_args_support(inner), _execute)
    if not isinstance(gate, Guard):  # its `init` raises if `inner` contains an accumulation
        update = dataclasses.replace(update, accumulation=gate)
    elif update.accumulation:
        update = dataclasses.replace(update, outside=(gate, *update.outside))
    else:
        update = dataclasses.replace(update, inside=(gate, *update.inside))

    def init_gate(params: Tree) -> Tree:
        return init(inner.init(params), params)

    return optax.GradientTransformationExtraArgs(init_gate, update)


@public
@jax.named_scope("apply_gradients")
def apply_gradients(
    tx: optax.GradientTransformation, grads: Tree, state: Tree, params: Tree, **extra_args: Any
) -> tuple[Tree, Tree]:
    """Run `update` and `optax.apply_updates` in one call.

    The result equals that of the two separate calls, except that bfloat16 gradients accumulated by
    `accumulate_gradients` are rounded only once, when they are added to the parameters.
    `apply_gradients` is faster for accumulations and guards. If the optimizer does not run,
    parameters and optimizer state are not read or written, whereas `update` must return a tree of
    zeros. Donate `params` and `state` to the jitted step; otherwise they are copied.

    Args:
        tx: Gradient transformation.
        grads: Gradients with the structure of `params`.
        state: State of `tx`.
        params: Parameters; may be Flax NNX variables.
        **extra_args: Extra arguments for `tx.update`.

    Returns:
        The new parameters, with unchanged dtypes and types, and the new state.

    Raises:
        TypeError: If `tx` is not a gradient transformation.

    Examples:
        >>> import jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = gcx.accumulate_gradients(optax.sgd(1.0), every=2)
        >>> params = jnp.array([0.0])
        >>> state = tx.init(params)
        >>> for grads in (jnp.array([1.0]), jnp.array([3.0])):
        ...     params, state = gcx.apply_gradients(tx, grads, state, params)
        >>> params.tolist()
        [-2.0]
    """
    check_transformation("tx", tx)
    arrays = plain_arrays((grads, state, params))
    if jax.tree.structure(arrays) != jax.tree.structure((grads, state, params)):
        params_and_state = apply_gradients(tx, *arrays, **extra_args)
        return with_structure_of((params, state), params_and_state)
    if not find_role(state, "accumulation"):
        warn_of_weight(extra_args)
    if isinstance(tx.update, GatedUpdate):
        return tx.update.execute(tx.update, grads, state, params, (), extra_args, applies=True)
    update = optax.with_extra_args_support(tx).update
    updates, state = update(grads, state, params, **extra_args)
    return _apply_updates(params, updates), state


class _Call(NamedTuple):
    """One call of `update` or `apply_gradients`.

    Attributes:
        gates: The guards, the accumulation and the innermost transformation.
        incoming: The incoming gradient.
        params: The parameters, or None.
    """

    gates: GatedUpdate
    incoming: Tree
    params: Tree


class _Progress(NamedTuple):
    """What a step of the innermost transformation changes.

    Attributes:
        target: Parameters to which the updates are added, or None if the caller needs the updates.
        guards: States of the guards inside the accumulation, without their inner states.
        state: State of the innermost transformation.
    """

    target: Tree
    guards: list[Tree]
    state: Tree


class _Outcome(NamedTuple):
    """What a call means for the guards on one side of an accumulation, as bool[].

    Attributes:
        passed: Whether all checks passed and the gradient has a positive weight.
        given: Whether the gradient has a positive weight, or none was passed.
        missed: Whether a step was due and no update was applied, although the gradient has a
            positive weight; or whether a window closed without weight.
        applied: Whether an update was applied.
    """

    passed: Array
    given: Flag
    missed: Array
    applied: Array


def _execute(
    update: GatedUpdate,
    incoming: Tree,
    state: Tree,
    params: Tree,
    args: tuple[object, ...],
    extra_args: ExtraArgs,
    *,
    applies: bool,
) -> tuple[Tree, Tree]:
    """Execute one call of `update`; return updates or new parameters, and the next state.

    Gradients are passed from the outermost to the innermost guard or accumulation. Guards outside
    an accumulation check the gradient of the micro-batch. Guards inside an accumulation, or all
    guards without one, check the gradient of the step. When an accumulation window closes, outer
    guards also check the accumulated gradient. Finally, guards that define `check_step` validate
    the computed update. Only the first guard whose check fails increments its skip counters.

    | failed check | counted by | window | innermost state |
    | --- | --- | --- | --- |
    | a micro-batch, by an outer guard | the outermost failing guard | stays open | unchanged |
    | the same, with `flush` or `emit` | the same | emitted without this micro-batch | updated |
    | the gradient of a step | the outermost failing inner guard | emitted | unchanged |
    | a window, by an outer guard | the innermost failing outer guard | dropped | unchanged |
    | the computed step | the innermost failing guard | dropped if it is an outer one | unchanged |
    | none, and the window stays open | no guard | stays open | unchanged |
    | none, and the window closes without weight | no guard | dropped | unchanged |
    | none | no guard | emitted | updated |

    | guard | consecutive skips | state of its rules |
    | --- | --- | --- |
    | the guard that counts the skip | + 1 | updated |
    | other guards, if a check fails | + 1 | unchanged |
    | guards that ran, if no check fails | 0 | updated |
    | all guards, if the window closes without weight | + 1 | unchanged |
    | all guards, if an update was applied although a micro-batch was skipped | 0 | as above |
    | guards inside an accumulation whose window stays open | unchanged | unchanged |
    | guards outside an accumulation that do not skip, if the weight is 0 | unchanged | unchanged |

    Guards outside an accumulation do not check a micro-batch of weight 0, which it ignores.
    """
    check_extra_args(args, extra_args)
    check_leaves("updates", incoming)
    if params is not None:
        check_same_structure(incoming, params_of(params))
    call, target = _Call(update, incoming, params), params if applies else None
    if update.accumulation is not None:
        output, target, state = _accumulate(call, update.accumulation, target, state, extra_args)
    else:
        progress = _Progress(target, *_unstacked(update.inside, state))
        output, progress, *_ = _step(call, [], incoming, progress, extra_args)
        target, state = progress.target, _stacked(progress.guards, progress.state)
    return (target if applies else output), state


def _accumulate(
    call: _Call, accumulation: Accumulation, target: Tree, state: Tree, extra_args: ExtraArgs
) -> tuple[Tree, Tree, Tree]:
    """Add a micro-batch, and run the step if the window closes.

    Return the updates or zeros, the new target, and the next state.
    """
    outside, inside = call.gates.outside, call.gates.inside
    outer, state = _unstacked(outside, state)
    given = has_weight(extra_args)
    grads, observed, checks = _check(outside, outer, call, call.incoming, extra_args, given)
    accepted, refused = _tally(len(outer), enumerate(checks))
    window = accumulation.open(grads, state, accepted if outer else None, extra_args)

    def close(carry: Tree) -> tuple[Tree, Tree]:
        progress, accumulator, _ = carry
        mean, accumulator = window.read(accumulator)
        output, progress, *results = _step(call, outer, mean, progress, window.extra_args)
        return output, (progress, accumulator, tuple(results))

    progress = _Progress(target, *_unstacked(inside, state.inner_opt_state))
    nothing = jnp.array(False), [jnp.array(False) for _ in outer]
    carry = progress, state.acc_grads, nothing
    output, (progress, accumulator, (applied, failed)) = run_step(window.emits, close, carry)
    inner = [_count(*x, missed=window.is_empty) for x in zip(inside, progress.guards, strict=True)]
    kept = functools.reduce(jnp.logical_and, map(jnp.logical_not, failed), window.emits)
    state = window.next_state(_stacked(inner, progress.state), accumulator, kept)
    missed = window.is_empty | given & ~applied & (~accepted | window.emits)
    outcome = _Outcome(accepted & ~missed & given, given, missed, applied)
    counted = list(map(jnp.logical_or, refused, failed))
    outer = _next(outside, outer, observed, counted, outcome)
    return output, progress.target, _stacked(outer, state)


def _step(
    call: _Call, outer: Sequence[Tree], grads: Tree, progress: _Progress, extra_args: ExtraArgs
) -> tuple[Tree, _Progress, Array, list[Array]]:
    """Run the innermost transformation if the checks of all guards pass.

    Return the updates or zeros, the progress, whether the step was applied, and for each outer
    guard whether it counts a skip.
    """
    inside = call.gates.inside
    guards = (*call.gates.outside, *inside)
    windows = find_role(progress.state, "accumulation")  # in a chain, for example
    given = has_weight(extra_args) if windows else True
    grads, observed, checks = _check(inside, progress.guards, call, grads, extra_args, given)
    if given is not True:  # an accumulation ignores a gradient of weight 0, which may be NaN
        grads = jax.tree.map(lambda x: x if is_float0(x) else jnp.where(given, x, 0), grads)
    verdicts = list(enumerate(checks, len(outer)))
    for i in reversed(range(len(outer))):
        check_window = guards[i].check_window
        if check_window:
            verdicts.append((i, check_window(grads, outer[i], call.params, extra_args)))
    accepted, failed = _tally(len(guards), verdicts)
    output, target, after, verdicts = _run(call, grads, progress, extra_args, accepted)
    applied, also_failed = _tally(len(guards), verdicts, accepted)
    failed = list(map(jnp.logical_or, failed, also_failed))
    is_empty = jnp.array(False)
    for (_, old), (_, new) in zip(windows, find_role(after, "accumulation"), strict=True):
        is_empty |= new.empty_windows > old.empty_windows
    outcome = _Outcome(
        passed=applied & given & ~is_empty,
        given=given,
        missed=given & ~applied | is_empty,
        applied=applied & ~is_empty & (True if given is True else given | has_stepped(after)),
    )
    states = _next(inside, progress.guards, observed, failed[len(outer) :], outcome)
    return output, _Progress(target, states, after), applied, failed[: len(outer)]


def _run(
    call: _Call, grads: Tree, progress: _Progress, extra_args: ExtraArgs, accepted: Array
) -> tuple[Tree, Tree, Tree, list[tuple[int, Array]]]:
    """Run the innermost transformation if `accepted`, and check the computed step.

    Return the updates or zeros, the new target and state, and the index of each guard that checks
    the step, from the innermost to the outermost, with the result of its check.
    """
    gates, params = call.gates, call.params
    guards = (*gates.outside, *gates.inside)
    checking = [i for i in reversed(range(len(guards))) if guards[i].check_step]

    def compute(carry: tuple[Tree, Tree]) -> tuple[Tree, tuple[Tree, Tree]]:
        target, before = carry
        current = params if target is None else target

        def run(grads: Tree, state: Tree) -> tuple[Tree, Tree]:
            return gates.innermost.update(grads, state, current, **extra_args)

        updates, after = update_in_dtypes(run, grads, before, call.incoming, target is None)
        if updates is grads and not jax.tree.leaves(before):
            warn_of_identity()
        if target is None:
            return updates, (None, after)
        return updates if checking else None, (_apply_updates(target, updates), after)

    carry = progress.target, progress.state
    if not guards:
        output, carry = compute(carry)
        return output, *carry, []
    if not checking:
        output, carry = run_step(accepted, compute, carry, usually=True)
        return output, *carry, []
    program, computed = compute_step(compute, carry)
    updates, (_, after) = computed
    step = Step(grads, updates, progress.state, after, params)
    verdicts: list[tuple[int, Array]] = []
    for i in checking:
        check_step = guards[i].check_step
        assert check_step is not None
        verdicts.append((i, check_step(step)))
    applied, _ = _tally(len(guards), verdicts, accepted)
    output, (target, after) = select_step(applied, program, computed, carry)
    # An accumulator that overflows would make all later steps fail the check.
    return output, target, discard_windows(after, accepted & ~applied), verdicts


def _check(
    guards: Sequence[Guard],
    states: Sequence[Tree],
    call: _Call,
    grads: Tree,
    extra_args: ExtraArgs,
    given: Flag,
) -> tuple[Tree, list[Observed], list[Array]]:
    """Check a gradient with all guards, from the outermost to the innermost.

    Return the gradient for the inner transformation, and what each guard observed and whether its
    check passed. A gradient without weight passes all checks.
    """
    observations: list[Observed] = []
    checks: list[Array] = []
    for guard, state in zip(guards, states, strict=True):
        passed, grads, observed = guard.check(grads, state, call.params, extra_args)
        checks.append(passed if given is True else passed | ~jnp.asarray(given))
        observations.append(observed)
    return grads, observations, checks


def _tally(
    num_guards: int, verdicts: Iterable[tuple[int, Array]], accepted: Array | None = None
) -> tuple[Array, list[Array]]:
    """Return whether all checks passed, and for each guard whether it was the first to fail.

    `verdicts` are indices of guards and the results of their checks, in the order of the checks.
    """
    ok = jnp.array(True) if accepted is None else accepted
    failed = [jnp.array(False) for _ in range(num_guards)]
    for i, passed in verdicts:
        failed[i] = failed[i] | ok & ~passed
        ok = ok & passed
    return ok, failed


def _next(
    guards: Sequence[Guard],
    states: Sequence[Tree],
    observations: Sequence[Observed],
    counted: Sequence[Array],
    outcome: _Outcome,
) -> list[Tree]:
    """Return the next states of guards, without their inner states."""
    passed, given, missed, applied = outcome
    after: list[Tree] = []
    for guard, state, observed, counts in zip(guards, states, observations, counted, strict=True):
        new = guard.advance(state, observed, counts)
        new = optax.tree.where(counts | passed, new, state)
        norm = jnp.where(given, observed.grad_norm, state.grad_norm)
        new = new._replace(grad_norm=norm, consecutive_skips=state.consecutive_skips)
        after.append(_count(guard, new, missed | counts & ~applied, reset=applied | passed))
    return after


def _count(guard: Guard, state: Tree, missed: Flag, reset: Flag = False) -> Tree:
    """Count a step without an applied update in the state of a guard."""
    streak = increment_where(state.consecutive_skips, missed)
    streak = jnp.where(reset, 0, streak)
    limit, has_failed = guard.max_consecutive_skips, state.guard_failed
    if limit is not None:
        has_failed = jnp.where(streak >= limit, 1, has_failed)
    return state._replace(consecutive_skips=streak, guard_failed=has_failed)


def _unstacked(guards: Sequence[Guard], state: Tree) -> tuple[list[Tree], Tree]:
    """Return the states of nested guards without their inner states, and the state inside them."""
    states: list[Tree] = []
    for guard in guards:
        check_state(state, guard.kind)
        states.append(state._replace(inner_state=()))
        state = state.inner_state
    return states, state


def _stacked(states: Sequence[Tree], inner_state: Tree) -> Tree:
    """Return the state of nested guards."""
    for state in reversed(states):
        inner_state = state._replace(inner_state=inner_state)
    return inner_state


def _apply_updates(params: Tree, updates: Tree) -> Tree:
    """Call `optax.apply_updates` with support for float0 updates and strict dtype promotion."""

    def addend(update: Array, param: Array) -> Array:
        return jnp.zeros_like(param) if is_float0(update) else update

    with jax.numpy_dtype_promotion("standard"):
        return optax.apply_updates(params, jax.tree.map(addend, updates, params))
