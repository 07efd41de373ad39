"""Execution of nested guards and accumulations.

Directly nested guards and accumulations share one `GatedUpdate`, which runs the innermost
transformation at most once per call.
"""

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Final, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._checks import check_same_structure, check_state, check_transformation, dtype_of, is_float0
from .._errors import named, public
from .._leaves import checked_leaves
from .._run_if import Flag, compute_step, like_dtypes, run_step, select_step
from .._states import (
    discard_windows,
    find_role,
    has_stepped,
    increment_where,
    plain_arrays,
    with_structure_of,
)
from .._types import Array, Tree
from ._extra_args import has_weight, warn_of_misspelled, warn_of_unread_weight
from ._gate import Accumulation, ExtraArgs, Guard, params_of

_NOBODY: Final = -1
"""Index of the guard that counts a skip, if no check failed."""


@dataclasses.dataclass(frozen=True, eq=False)
class GatedUpdate:
    """The `update` function of guards and accumulations.

    The function is a callable object instead of a closure, so that an outer guard can find the
    inner guards even if a trainer has rebuilt the transformation from `init` and `update`.
    `jax.named_call` requires `__name__`.

    Attributes:
        innermost: Transformation inside all guards and the accumulation.
        gates: Guards and at most one accumulation, from the outermost to the innermost.
        execute: The function `_execute`, with the name of the public function in its errors.
    """

    __name__: ClassVar[str] = "update"
    innermost: optax.GradientTransformationExtraArgs
    gates: tuple[Guard | Accumulation, ...]
    execute: Callable[..., tuple[Tree, Tree]]

    def __call__(
        self, updates: Tree, state: Tree, params: Tree | None = None, **extra_args: Any
    ) -> tuple[Tree, Tree]:
        """Return the update of the innermost transformation, or zeros if it does not run."""
        return self.execute(self, updates, state, params, None, extra_args)


def gated(
    gate: Guard | Accumulation, inner: optax.GradientTransformation, init: Callable[..., Tree]
) -> optax.GradientTransformationExtraArgs:
    """Wrap a transformation in a guard or an accumulation.

    `init` maps the state of `inner` and the parameters to the state of the guard or accumulation.
    """
    update = inner.update
    if not isinstance(update, GatedUpdate):
        update = GatedUpdate(optax.with_extra_args_support(inner), (), _execute)
    execute = named(gate.function)(_execute)
    update = dataclasses.replace(update, gates=(gate, *update.gates), execute=execute)

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
    warn_of_unread_weight(extra_args, state)
    if isinstance(tx.update, GatedUpdate):
        return tx.update.execute(tx.update, grads, state, params, params, extra_args)
    update = optax.with_extra_args_support(tx).update
    updates, state = update(grads, state, params, **extra_args)
    return _apply_updates(params, updates), state


class _Call(NamedTuple):
    """One call of `update` or `apply_gradients`, as a gate receives it.

    Attributes:
        update: All gates and the innermost transformation.
        incoming: The gradient that the outermost gate received.
        params: The parameters, or None.
        target: Parameters to which the updates are added, or None if the caller needs the updates.
        grads: The gradient that the gate around this one passes on.
        state: State of the gate.
        extra_args: Extra arguments of `update`.
        passed: Whether the checks of all guards around the gate passed.
        outer: The index and the state of each guard around the gate.
    """

    update: GatedUpdate
    incoming: Tree
    params: Tree
    target: Tree
    grads: Tree
    state: Tree
    extra_args: ExtraArgs
    passed: Flag = True
    outer: tuple[tuple[int, Guard, Tree], ...] = ()


class _Result(NamedTuple):
    """What a gate returns to the gate around it.

    Attributes:
        output: The updates, or zeros if no step was applied.
        target: The new parameters, or None.
        state: The next state.
        passed: Whether the checks of all guards passed. For guards around an accumulation, these
            are the checks of the micro-batch.
        applied: Whether an update was applied, or a micro-batch with a weight was accumulated.
        is_empty: Whether a window closed without weight.
        skipper: Index of the guard that counts a skip because of a check of the window or of the
            step, or `_NOBODY`.
    """

    output: Tree
    target: Tree
    state: Tree
    passed: Flag
    applied: Array
    is_empty: Flag
    skipper: Array


def _execute(
    update: GatedUpdate, grads: Tree, state: Tree, params: Tree, target: Tree, extra_args: ExtraArgs
) -> tuple[Tree, Tree]:
    """Execute one call of `update`; return updates or the new `target`, and the next state.

    Gradients are passed from the outermost to the innermost guard or accumulation. Guards outside
    an accumulation check the gradient of the micro-batch and, when a window closes, the accumulated
    gradient. Guards inside an accumulation, or all guards without one, check the gradient of the
    step. Finally, guards that define `check_step` validate the computed update. Only the first
    guard whose check fails increments its skip counters.

    | failed check | counted by | window | innermost state |
    | --- | --- | --- | --- |
    | a micro-batch, by an outer guard | the outermost failing guard | stays open | unchanged |
    | the same, with `flush` or `emit` | the same | emitted without this micro-batch | updated |
    | a window, by an outer guard | the innermost failing outer guard | dropped | unchanged |
    | the gradient of a step | the outermost failing inner guard | emitted | unchanged |
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
    warn_of_misspelled(extra_args)
    checked_leaves("updates", grads)
    if params is not None:
        check_same_structure(grads, params_of(params))
    result = _run(_Call(update, grads, params, target, grads, state, extra_args), 0)
    return (result.output if target is None else result.target), result.state


def _run(call: _Call, i: int) -> _Result:
    """Run the gate with index `i` and everything inside it."""
    if i == len(call.update.gates):
        return _optimize(call)
    gate = call.update.gates[i]
    return _guard(call, i, gate) if isinstance(gate, Guard) else _accumulate(call, i, gate)


def _guard(call: _Call, i: int, guard: Guard) -> _Result:
    """Check a gradient, run what is inside the guard, and count a skip."""
    state = call.state
    check_state(state, guard.kind)
    given = has_weight(call.extra_args, state)
    with named(guard.function):
        passed, gradient, observed = guard.inspect(call.grads, state, call.params, call.extra_args)
    if given is not True:
        passed |= jnp.logical_not(given)
    inner = call._replace(grads=gradient.tree, state=state.inner_state)
    inner = inner._replace(passed=call.passed & passed, outer=(*call.outer, (i, guard, state)))
    result = _run(inner, i + 1)
    skipped = call.passed & ~passed | (result.skipper == i)
    old = state._replace(inner_state=())
    new = guard.advance(old, observed, skipped)
    new = optax.tree.where(skipped | result.passed & given & result.applied, new, old)
    norm = jnp.where(given, gradient.norm.astype(jnp.float32), state.grad_norm)
    missed = result.is_empty | (given | skipped) & ~result.applied
    new = _count(guard, new, missed, reset=result.applied)
    return result._replace(state=new._replace(grad_norm=norm, inner_state=result.state))


def _count(guard: Guard, state: Tree, missed: Flag, reset: Flag = False) -> Tree:
    """Count a step without an applied update in the state of a guard."""
    streak = jnp.where(reset, 0, increment_where(state.consecutive_skips, missed))
    limit, has_failed = guard.max_consecutive_skips, state.guard_failed
    if limit is not None:
        has_failed = jnp.where(streak >= limit, 1, has_failed)
    return state._replace(consecutive_skips=streak, guard_failed=has_failed)


def _accumulate(call: _Call, i: int, accumulation: Accumulation) -> _Result:
    """Add a micro-batch, and run what is inside the accumulation if the window closes."""
    state, accepted = call.state, call.passed if call.outer else None
    micro_step = accumulation.micro_step(call.grads, state, accepted, call.extra_args)

    def close(carry: Tree) -> tuple[Tree, Tree]:
        target, inner_state, accumulator, *_ = carry
        mean, accumulator = micro_step.emit(accumulator)
        checks: list[tuple[int, Array]] = []
        for j, guard, outer in reversed(call.outer):
            if guard.checks_window:
                check = guard.inspect(mean, outer, call.params, micro_step.extra_args, is_mean=True)
                checks.append((j, check[0]))
        passed, dropper = _first_failure(True, checks)
        inner = call._replace(target=target, grads=mean, state=inner_state, passed=passed)
        result = _run(inner._replace(extra_args=micro_step.extra_args), i + 1)
        skipper = jnp.where(passed, result.skipper, dropper)
        return result.output, (result.target, result.state, accumulator, result.applied, skipper)

    applied = jnp.asarray(call.passed & has_weight(call.extra_args, state))
    carry = call.target, state.inner_opt_state, state.acc_grads, applied, jnp.int32(_NOBODY)
    output, carry = run_step(micro_step.emits, close, carry)
    target, inner_state, accumulator, applied, skipper = carry
    inner_state = _count_empty(call.update.gates[i + 1 :], inner_state, micro_step.is_empty)
    is_kept = (skipper == _NOBODY) | (skipper > i)
    state = micro_step.finish(inner_state, accumulator, micro_step.emits & is_kept)
    applied &= jnp.logical_not(micro_step.is_empty)
    return _Result(output, target, state, call.passed, applied, micro_step.is_empty, skipper)


def _count_empty(guards: Sequence[Any], state: Tree, is_empty: Flag) -> Tree:
    """Count a window without weight in the states of the guards inside the accumulation."""
    if not guards:
        return state
    inner_state = _count_empty(guards[1:], state.inner_state, is_empty)
    return _count(guards[0], state, is_empty)._replace(inner_state=inner_state)


def _optimize(call: _Call) -> _Result:
    """Run the innermost transformation if the checks of all guards passed."""
    grads, before, passed = call.grads, call.state, call.passed
    checking = [(i, x.check_step) for i, x, _ in reversed(call.outer) if x.check_step]
    given = has_weight(call.extra_args, before)
    if given is not True:  # an accumulation ignores a gradient of weight 0, which may be NaN
        grads = jax.tree.map(lambda x: x if is_float0(x) else jnp.where(given, x, 0), grads)

    def compute(carry: tuple[Tree, Tree]) -> tuple[Tree, tuple[Tree, Tree]]:
        target, state = carry
        updates, after = _update(call, grads, state, target)
        if target is None:
            return updates, (None, after)
        return updates if checking else None, (_apply_updates(target, updates), after)

    carry, skipper = (call.target, before), jnp.int32(_NOBODY)
    if checking:
        program, computed = compute_step(compute, carry)
        updates, (_, after) = computed
        checks = [(i, check(updates, before, after, call.params)) for i, check in checking]
        applied, skipper = _first_failure(passed, checks)
        output, (target, after) = select_step(applied, program, computed, carry)
        # An accumulator that overflows would make all later steps fail the check.
        after = discard_windows(after, passed & jnp.logical_not(applied))
        passed = applied
    else:
        output, (target, after) = run_step(passed, compute, carry, usually=True)
    # An accumulation in a chain, for example, may close a window without weight.
    windows = [[x for _, x in find_role(state, "accumulation")] for state in (before, after)]
    num_empty, num_empty_after = (sum(x.empty_windows for x in states) for states in windows)
    is_empty = jnp.asarray(num_empty < num_empty_after)
    applied = passed & ~is_empty
    if given is not True:
        applied &= given | has_stepped(after)
    return _Result(output, target, after, passed, applied, is_empty, skipper)


def _update(call: _Call, grads: Tree, state: Tree, target: Tree) -> tuple[Tree, Tree]:
    """Return the updates and the next state of the innermost transformation.

    An accumulator or a loss scale computes gradients in float32. For transformations that raise for
    float32 gradients of 16-bit parameters, such as `optax.novograd` and `optax.apply_if_finite`,
    they are cast to the dtypes of the incoming gradients. Without a target, updates have the dtypes
    that the transformation returns for the incoming gradients.
    """
    params = call.params if target is None else target

    def run(grads: Tree, state: Tree) -> tuple[Tree, Tree]:
        return call.update.innermost.update(grads, state, params, **call.extra_args)

    pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(call.incoming), strict=True)
    is_widened = any(dtype_of(x) != dtype_of(y) for x, y in pairs)
    try:
        updates, after = run(grads, state)
    except (TypeError, ValueError):
        if not is_widened:
            raise
        return run(like_dtypes(grads, call.incoming), state)
    if updates is grads and not jax.tree.leaves(state):
        warnings.warn(
            "The transformation inside this guard or accumulation returns gradients unchanged. "
            "Place the optimizer inside: outside, it runs on zeros if a step is held or skipped.",
            stacklevel=2,
        )
    if target is None and is_widened:
        expected, _ = jax.eval_shape(run, like_dtypes(grads, call.incoming), state)
        updates = like_dtypes(updates, expected)
    return updates, after


def _first_failure(passed: Flag, checks: Iterable[tuple[int, Array]]) -> tuple[Flag, Array]:
    """Return whether all checks passed, and the index of the guard of the first that failed.

    `checks` are indices of guards and results of their checks.
    """
    skipper = jnp.int32(_NOBODY)
    for i, ok in checks:
        skipper = jnp.where(passed & ~ok, i, skipper)
        passed &= ok
    return passed, skipper


def _apply_updates(params: Tree, updates: Tree) -> Tree:
    """Call `optax.apply_updates` with support for float0 updates and strict dtype promotion."""

    def addend(update: Array, param: Array) -> Array:
        return jnp.zeros_like(param) if is_float0(update) else update

    with jax.numpy_dtype_promotion("standard"):
        return optax.apply_updates(params, jax.tree.map(addend, updates, params))
