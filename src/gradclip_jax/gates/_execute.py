"""Execution of nested guards and accumulations.

Directly nested guards and accumulations share one `GatedUpdate`, and `_execute` runs the innermost
transformation at most once per call.
"""

import dataclasses
import difflib
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._checks import check_state, check_transformation, is_float0
from .._errors import named, public, type_error
from .._leaves import check_leaves
from .._run_if import Flag, compute_step, like_dtypes, run_step, select_step
from .._states import increment_where, plain_arrays, with_structure_of
from .._types import Array, Tree
from ._gate import Accumulation, ExtraArgs, Guard, Verdict

EXTRA_ARGS: Final = ("value", "loss", "weight", "flush", "emit")
"""The extra arguments of `update` that guards and accumulations read."""


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
    gate: Guard | Accumulation, inner: optax.GradientTransformation, init: optax.TransformInitFn
) -> optax.GradientTransformationExtraArgs:
    """Wrap a transformation in a guard or an accumulation."""
    update = inner.update
    if not isinstance(update, GatedUpdate):
        update = GatedUpdate(optax.with_extra_args_support(inner), _execute)
    if not isinstance(gate, Guard):  # its `init` raises if `inner` contains an accumulation
        update = dataclasses.replace(update, accumulation=gate)
    elif update.accumulation:
        update = dataclasses.replace(update, outside=(gate, *update.outside))
    else:
        update = dataclasses.replace(update, inside=(gate, *update.inside))
    return optax.GradientTransformationExtraArgs(init, update)


@public
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
    if isinstance(tx.update, GatedUpdate):
        return tx.update.execute(tx.update, grads, state, params, (), extra_args, applies=True)
    update = optax.with_extra_args_support(tx).update
    updates, state = update(grads, state, params, **extra_args)
    return _apply_updates(params, updates), state


class Judgment(NamedTuple):
    """Results of all checks of one guard in one call of `update`.

    Attributes:
        guard: The guard.
        state: State of the guard before the call.
        verdict: Result of the guard's check of the gradient.
        refused: Whether this guard was the first to reject the gradient, bool[].
        failed: Whether this guard was the first to reject an accumulated gradient or a computed
            step, bool[].
    """

    guard: Guard
    state: Tree
    verdict: Verdict
    refused: Flag
    failed: Flag


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
    | none | no guard | emitted | updated |

    | guard | counters | state of its rules |
    | --- | --- | --- |
    | the guard that counts the skip | total and consecutive skips increase by 1 | updated |
    | other guards, if a check fails | unchanged | unchanged |
    | guards that ran, if no check fails | consecutive skips are reset | updated |
    | guards inside an accumulation whose window stays open | unchanged | unchanged |
    """
    _check_extra_args(args, extra_args)
    accumulation = update.accumulation
    check_leaves("updates", incoming)
    outer, grads, state, accepted = _judge(update.outside, incoming, state, params, extra_args)
    target = params if applies else None
    step = functools.partial(_step, update.innermost, update.inside, incoming, params)
    if accumulation is None:
        output, (target, state), *_ = step([], grads, (target, state), extra_args)
        return (target if applies else output), state
    window = accumulation(grads, state, accepted, params, extra_args)

    def close_window(carry: Tree) -> tuple[Tree, Tree]:
        target_and_state, accumulator, _ = carry
        mean, accumulator = window.read(accumulator)
        output, target_and_state, stepped, judged = step(
            outer, mean, target_and_state, window.extra_args
        )
        return output, (target_and_state, accumulator, _checks(stepped, judged))

    carry = (target, state.inner_opt_state), state.acc_grads, _checks(np.False_, outer)
    output, (carry, accumulator, checks) = run_step(window.emits, close_window, carry)
    target, inner_state = carry
    emitted = window.emits
    if outer:
        stepped, results = checks
        outer = [x._replace(failed=y) for x, y in zip(outer, results, strict=True)]
        accepted = accepted & (stepped | ~window.emits)
        emitted = functools.reduce(jnp.logical_and, [~x.failed for x in outer], emitted)
    state = window.next_state(inner_state, accumulator, emitted)
    return (target if applies else output), _next_states(outer, state, accepted)


def _checks(stepped: Flag, outer: Sequence[Judgment]) -> Tree:
    """Return whether the step was applied, and the results of the outer guards; () without them."""
    return (stepped, [x.failed for x in outer]) if outer else ()


def _check_extra_args(args: tuple[object, ...], extra_args: ExtraArgs) -> None:
    """Raise for additional positional arguments, and warn of misspelled names."""
    if args:
        got, hint = f"{3 + len(args)} positional arguments", "Pass the loss as `value=loss`."
        raise type_error("update", "called as `update(grads, state, params)`", got, hint)
    for name in extra_args.keys() - EXTRA_ARGS:  # all others are passed on
        near = difflib.get_close_matches(name, EXTRA_ARGS, n=1, cutoff=0.8)
        if near:
            warnings.warn(
                f"The extra argument `{name}` is passed to the inner transformation. Did you mean "
                f"`{near[0]}`?",
                stacklevel=2,
            )


def _judge(
    guards: Sequence[Guard], grads: Tree, state: Tree, params: Tree, extra_args: ExtraArgs
) -> tuple[list[Judgment], Tree, Tree, Flag]:
    """Check a gradient with all guards.

    Return the result of each guard, whether all checks passed, and the gradient and state that are
    passed to the inner transformation.
    """
    judged: list[Judgment] = []
    accepted: Flag = np.True_
    for guard in guards:
        check_state(state, guard.kind)
        verdict = guard.judge(grads, state, params, extra_args)
        refused = accepted & ~verdict.is_good
        judged.append(Judgment(guard, state, verdict, refused, np.False_))
        accepted = accepted & verdict.is_good
        grads, state = verdict.grads, state.inner_state
    return judged, grads, state, accepted


def _step(
    innermost: optax.GradientTransformationExtraArgs,
    inside: Sequence[Guard],
    incoming: Tree,
    params: Tree,
    outer: Sequence[Judgment],
    grads: Tree,
    target_and_state: tuple[Tree, Tree],
    extra_args: ExtraArgs,
) -> tuple[Tree, tuple[Tree, Tree], Flag, Sequence[Judgment]]:
    """Run the innermost transformation if the checks of all guards pass.

    Return the updates or zeros, the new target and inner state, whether the step was applied, and
    the results of the outer guards. The target is the tree of parameters to which the updates are
    added, or None if the caller needs the updates.
    """
    target, state = target_and_state
    inner, judged_grads, before, accepted = _judge(inside, grads, state, params, extra_args)
    judged = [*outer, *inner]
    for i in reversed(range(len(outer))):
        check_window = outer[i].verdict.check_window
        if check_window:
            passed = check_window(grads)
            judged[i] = judged[i]._replace(failed=accepted & ~passed)
            accepted = accepted & passed
    checking = [i for i, x in enumerate(judged) if x.verdict.check_step]

    def compute(carry: tuple[Tree, Tree]) -> tuple[Tree, tuple[Tree, Tree]]:
        target, before = carry
        current = params if target is None else target

        def run(grads: Tree, state: Tree) -> tuple[Tree, Tree]:
            return innermost.update(grads, state, current, **extra_args)

        updates, after = _run_in_dtypes(run, judged_grads, before, incoming, target is None)
        if target is None:
            return updates, (None, after)
        return updates if checking else None, (_apply_updates(target, updates), after)

    carry = target, before
    if checking:
        program, computed = compute_step(compute, carry)
        updates, (_, after) = computed
        is_due = jnp.asarray(accepted)
        for i in reversed(checking):
            check_step = judged[i].verdict.check_step
            assert check_step is not None
            passed = check_step(judged_grads, updates, before, after)
            judged[i] = judged[i]._replace(failed=accepted & ~passed)
            accepted = accepted & passed
        output, (target, after) = select_step(accepted, program, computed, carry)
        carry = target, judged[checking[-1]].guard.discard(after, is_due & ~accepted)
    elif judged:
        output, carry = run_step(accepted, compute, carry, usually=True)
    else:
        output, carry = compute(carry)
    outer, inner = judged[: len(outer)], judged[len(outer) :]
    return output, (carry[0], _next_states(inner, carry[1], accepted)), accepted, outer


def _next_states(judged: Sequence[Judgment], inner_state: Tree, accepted: Flag) -> Tree:
    """Compute the next states of nested guards, starting with the innermost guard."""
    for guard, state, verdict, refused, failed in reversed(judged):
        skipped = refused | failed
        after = verdict.next_state(jnp.asarray(refused), jnp.asarray(failed))
        streak = jnp.where(skipped, increment_where(state.consecutive_skips), 0)
        has_failed, limit = after.guard_failed, guard.max_consecutive_skips
        if limit is not None:
            has_failed = jnp.where(streak >= limit, 1, has_failed)
        fields = {"consecutive_skips": streak, "guard_failed": has_failed, "inner_state": ()}
        after = after._replace(**fields)
        after = optax.tree.where(skipped | accepted, after, state._replace(inner_state=()))
        inner_state = after._replace(inner_state=inner_state)
    return inner_state


def _run_in_dtypes(
    run: Callable[[Tree, Tree], tuple[Tree, Tree]],
    grads: Tree,
    state: Tree,
    incoming: Tree,
    keeps_dtypes: bool,
) -> tuple[Tree, Tree]:
    """Run the innermost transformation, `run(grads, state) -> (updates, next state)`.

    The input has the dtype of the accumulator, or float32 inside a loss scale. Some
    transformations, such as `optax.novograd` and `optax.apply_if_finite`, raise if the dtype
    differs from that of the parameters. In this case, cast the input to the dtypes of the incoming
    gradients. With `keeps_dtypes`, updates have the dtypes that the transformation returns for the
    incoming gradients.
    """
    pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(incoming), strict=True)
    if all([x.dtype == jax.typeof(y).dtype for x, y in pairs]):
        return run(grads, state)
    plain = like_dtypes(grads, incoming)
    expected = jax.eval_shape(run, plain, state)[0] if keeps_dtypes else None
    try:
        updates, after = run(grads, state)
    except (TypeError, ValueError) as error:
        try:
            return run(plain, state)
        except (TypeError, ValueError):
            raise error from None
    return (like_dtypes(updates, expected) if keeps_dtypes else updates), after


def _apply_updates(params: Tree, updates: Tree) -> Tree:
    """Call `optax.apply_updates` with support for float0 updates and strict dtype promotion."""

    def addend(update: Array, param: Array) -> Array:
        return jnp.zeros_like(param) if is_float0(update) else update

    with jax.numpy_dtype_promotion("standard"):
        return optax.apply_updates(params, jax.tree.map(addend, updates, params))
