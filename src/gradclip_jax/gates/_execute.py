"""Execution of nested guards and accumulations.

Directly nested guards and accumulations share one `GatedUpdate`, which runs the innermost
transformation at most once per call.
"""

import dataclasses
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Final, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._checks import check_same_structure, check_state, check_transformation, dtype_of, is_float0
from .._errors import named, public
from .._run_if import Flag, compute_step, like_dtypes, run_step, select_step
from .._states import discard_windows, find_role, has_stepped, increment_where, plain_arrays
from .._types import Array, Tree
from ..norms._leaves import checked_leaves
from ._extra_args import has_weight, warn_of_misspelled, warn_of_unread_weight
from ._gate import AccumulationGate, Call, ExtraArgs, Guard, check_guard, params_of

_NOBODY: Final = jnp.iinfo(jnp.int32).max
"""Index of the guard that rejected a step, if none did; larger than all others."""


@dataclasses.dataclass(frozen=True, eq=False)
class GatedUpdate:
    """The `update` function of guards and accumulations.

    The function is a callable object instead of a closure, so that an outer guard can find the
    inner guards even if a trainer has rebuilt the transformation from `init` and `update`.
    `jax.named_call` requires `__name__`.

    Attributes:
        innermost: Transformation inside all guards and the accumulation.
        gates: Guards and at most one accumulation, from the outermost to the innermost.
    """

    __name__: ClassVar[str] = "update"
    innermost: optax.GradientTransformationExtraArgs
    gates: tuple[Guard | AccumulationGate, ...]

    def __call__(
        self, updates: Tree, state: Tree, params: Tree | None = None, **extra_args: Any
    ) -> tuple[Tree, Tree]:
        """Return the update of the innermost transformation, or zeros if it does not run."""
        return _execute(self, updates, state, params, None, extra_args)


def gated(
    gate: Guard | AccumulationGate, inner: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """Wrap a transformation in a guard or an accumulation."""
    if isinstance(gate, Guard):
        check_guard(inner, gate.axis_name, gate.mask, gate.max_consecutive_skips)
    innermost, gates = optax.with_extra_args_support(inner), ()
    if isinstance(inner.update, GatedUpdate):
        innermost, gates = inner.update.innermost, inner.update.gates

    def init(params: Tree) -> Tree:
        return gate.init(inner.init(params), params)

    return optax.GradientTransformationExtraArgs(init, GatedUpdate(innermost, (gate, *gates)))


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
        leaves = jax.tree.leaves(apply_gradients(tx, *arrays, **extra_args))
        return jax.tree.unflatten(jax.tree.structure((params, state)), leaves)
    warn_of_unread_weight(extra_args, state)
    if isinstance(tx.update, GatedUpdate):
        return _execute(tx.update, grads, state, params, params, extra_args)
    update = optax.with_extra_args_support(tx).update
    updates, state = update(grads, state, params, **extra_args)
    return _apply_updates(params, updates), state


class _Result(NamedTuple):
    """What a gate returns to the gate around it.

    Attributes:
        output: The updates, or zeros if no step was applied.
        target: The new parameters, or None.
        state: The next state.
        accepted: Whether all guards accepted the gradient of this call and, without an
            accumulation, the computed step.
        applied: Whether the call applied a step. An accumulation may apply a step although a guard
            rejected the gradient of this call.
        progressed: Whether the call applied a step, or accumulated the gradient with a weight.
        is_empty: Whether a window closed without weight.
        rejected_by: Index of the guard that rejected the gradient of a window or the computed step,
            or `_NOBODY`.
    """

    output: Tree
    target: Tree
    state: Tree
    accepted: Flag
    applied: Array
    progressed: Array
    is_empty: Flag
    rejected_by: Array


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
    | guards that ran, if an update was applied | 0 | updated |
    | outer guards, if no check fails and the window stays open | unchanged | updated |
    | all guards, if an update was applied although a micro-batch was skipped | 0 | as above |
    | guards inside an accumulation whose window stays open | unchanged | unchanged |
    | guards outside an accumulation that do not skip, if the weight is 0 | unchanged | unchanged |
    | all guards, if the window closes without weight | + 1 | unchanged |

    The last row that applies holds. Guards outside an accumulation do not check a micro-batch of
    weight 0, which it ignores.
    """
    with named(update.gates[0].function):
        warn_of_misspelled(extra_args)
        checked_leaves("updates", grads)
        if params is not None:
            check_same_structure(grads, params_of(params))
        is_weighted = has_weight(extra_args, state)
        given = grads, params, target, grads, state, extra_args, is_weighted
        result = _run_gate(Call(update.innermost, update.gates, *given), 0)
    return (result.output if target is None else result.target), result.state


def _run_gate(call: Call, i: int) -> _Result:
    """Run the gate with index `i` and everything inside it."""
    if i == len(call.gates):
        return _optimize(call)
    gate = call.gates[i]
    return _guard(call, i, gate) if isinstance(gate, Guard) else _accumulate(call, i, gate)


def _guard(call: Call, i: int, guard: Guard) -> _Result:
    """Check a gradient, run what is inside the guard, and count a skip."""
    state, is_weighted = call.state, call.is_weighted
    check_state(state, guard.kind)
    with named(guard.function):
        inner = call._replace(grads=guard.unscale(call.grads, state))
        accepts, grads, norm, observed = guard.inspect(inner)
    if is_weighted is not True:
        accepts |= jnp.logical_not(is_weighted)
    inner = call._replace(grads=grads, state=state.inner_state, accepted=call.accepted & accepts)
    result = _run_gate(inner._replace(outer=(*call.outer, (i, guard, state))), i + 1)

    skipped = call.accepted & ~accepts | (result.rejected_by == i)
    old = state._replace(inner_state=())
    new = guard.advance(old, observed, skipped)
    # Rules also observe the gradients that their own guard skips.
    is_observed = skipped | result.accepted & result.progressed & is_weighted
    new = optax.tree.where(is_observed, new, old)
    has_failed = result.is_empty | (is_weighted | skipped) & ~result.progressed
    new = _count(guard, new, has_failed, reset=result.applied)
    norm = jnp.where(is_weighted, norm.astype(jnp.float32), state.grad_norm)
    return result._replace(state=new._replace(grad_norm=norm, inner_state=result.state))


def _count(guard: Guard, state: Tree, has_failed: Flag, reset: Flag = False) -> Tree:
    """Count a step without an applied update in the state of a guard."""
    streak = jnp.where(reset, 0, increment_where(state.consecutive_skips, has_failed))
    limit, failed = guard.max_consecutive_skips, state.guard_failed
    failed = failed if limit is None else jnp.where(streak >= limit, 1, failed)
    return state._replace(consecutive_skips=streak, guard_failed=failed)


def _accumulate(call: Call, i: int, accumulation: AccumulationGate) -> _Result:
    """Add a micro-batch, and run what is inside the accumulation if the window closes."""
    state, accepted = call.state, call.accepted if call.outer else None
    micro_step = accumulation.micro_step(call.grads, state, accepted, call.extra_args)

    def emit(carry: Tree) -> tuple[Tree, Tree]:
        target, inner_state, accumulator, *_ = carry
        grads, accumulator = micro_step.window_gradient(accumulator)
        inner = call._replace(target=target, grads=grads, state=inner_state)
        inner = inner._replace(extra_args=micro_step.extra_args, is_weighted=True)
        checking = [x for x in reversed(call.outer) if x[1].checks_window]
        checks = [(j, guard.inspect(inner._replace(state=x))[0]) for j, guard, x in checking]
        accepted, rejected_by = _first_rejection(True, checks)
        result = _run_gate(inner._replace(accepted=accepted), i + 1)
        rejected_by = jnp.where(accepted, result.rejected_by, rejected_by)
        flags = result.applied, result.progressed
        return result.output, (result.target, result.state, accumulator, flags, rejected_by)

    is_added = jnp.asarray(call.accepted & call.is_weighted)
    flags = jnp.array(False), is_added
    carry = call.target, state.inner_opt_state, state.acc_grads, flags, jnp.int32(_NOBODY)
    output, carry = run_step(micro_step.emits, emit, carry)
    target, inner_state, accumulator, flags, rejected_by = carry
    is_empty = micro_step.is_empty
    inner_state = _count_empty(call.gates[i + 1 :], inner_state, is_empty)
    emitted = micro_step.emits & (rejected_by > i)  # an outer guard drops the window
    state = micro_step.finish(inner_state, accumulator, emitted)
    applied, progressed = (flag & jnp.logical_not(is_empty) for flag in flags)
    return _Result(output, target, state, call.accepted, applied, progressed, is_empty, rejected_by)


def _count_empty(guards: Sequence[Any], state: Tree, is_empty: Flag) -> Tree:
    """Count a window without weight in the states of the guards inside the accumulation."""
    if not guards:
        return state
    inner_state = _count_empty(guards[1:], state.inner_state, is_empty)
    return _count(guards[0], state, is_empty)._replace(inner_state=inner_state)


def _optimize(call: Call) -> _Result:
    """Run the innermost transformation if all guards accepted the gradient."""
    grads, before, accepted = call.grads, call.state, call.accepted
    if (kept := call.is_weighted) is not True:  # a trace before an accumulation would keep a NaN
        grads = jax.tree.map(lambda x: x if is_float0(x) else jnp.where(kept, x, 0), grads)
    checking = [(i, x.check_step) for i, x, _ in reversed(call.outer) if x.check_step]

    def compute(carry: tuple[Tree, Tree]) -> tuple[Tree, tuple[Tree, Tree]]:
        target, state = carry
        updates, after = _update(call, grads, state, target)
        new = None if target is None else _apply_updates(target, updates)
        return updates if checking or target is None else None, (new, after)

    carry, rejected_by = (call.target, before), jnp.int32(_NOBODY)
    if checking:
        program, computed = compute_step(compute, carry)
        updates, (_, after) = computed
        checks = [(i, check(updates, before, after, call.params)) for i, check in checking]
        is_good, rejected_by = _first_rejection(accepted, checks)
        output, (target, after) = select_step(is_good, program, computed, carry)
        # An accumulator that overflows would make all later steps fail the check.
        after = discard_windows(after, accepted & jnp.logical_not(is_good))
        accepted = is_good
    else:
        output, (target, after) = run_step(accepted, compute, carry, usually=True)
    # An accumulation in a chain, for example, may close a window without weight.
    windows = [find_role(x, "accumulation") for x in (before, after)]
    num_empty, num_empty_after = (sum(x.empty_windows for _, x in found) for found in windows)
    is_empty = jnp.asarray(num_empty < num_empty_after)
    progressed = accepted & ~is_empty
    applied = progressed & has_stepped(after)
    if call.is_weighted is not True:
        progressed &= call.is_weighted | applied
    return _Result(output, target, after, accepted, applied, progressed, is_empty, rejected_by)


def _update(call: Call, grads: Tree, state: Tree, target: Tree) -> tuple[Tree, Tree]:
    """Return the updates and the next state of the innermost transformation.

    An accumulator or a loss scale computes gradients in float32. For transformations that raise for
    float32 gradients of 16-bit parameters, such as `optax.novograd` and `optax.apply_if_finite`,
    they are cast to the dtypes of the incoming gradients. Without a target, updates have the dtypes
    that the transformation returns for the incoming gradients.
    """
    params = call.params if target is None else target

    def run(grads: Tree, state: Tree) -> tuple[Tree, Tree]:
        return call.innermost.update(grads, state, params, **call.extra_args)

    given, expected = ([dtype_of(x) for x in jax.tree.leaves(y)] for y in (grads, call.incoming))
    is_widened = given != expected
    try:
        updates, after = run(grads, state)
    except (TypeError, ValueError) as error:
        if not is_widened:
            raise
        message = "The transformation inside this guard or accumulation receives 16-bit gradients"
        warnings.warn(f"{message}, because it raised for float32: {error}", stacklevel=2)
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


def _first_rejection(accepted: Flag, checks: Iterable[tuple[int, Array]]) -> tuple[Flag, Array]:
    """Return whether all checks accept, and the index of the guard of the first that does not.

    `checks` are indices of guards and results of their checks.
    """
    rejected_by = jnp.int32(_NOBODY)
    for i, accepts in checks:
        rejected_by = jnp.where(accepted & ~accepts, i, rejected_by)
        accepted &= accepts
    return accepted, rejected_by


def _apply_updates(params: Tree, updates: Tree) -> Tree:
    """Call `optax.apply_updates` with support for float0 updates and strict dtype promotion."""

    def addend(update: Array, param: Array) -> Array:
        return jnp.zeros_like(param) if is_float0(update) else update

    with jax.numpy_dtype_promotion("standard"):
        return optax.apply_updates(params, jax.tree.map(addend, updates, params))
