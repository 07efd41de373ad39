"""The one executor of guards and accumulations.

However they are nested, they make one list, and `_execute` takes one step of the innermost
transformation, or none.
"""

import dataclasses
import difflib
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._checks import check_state, check_transformation, is_float0, is_traced
from ._devices import shared
from ._errors import named, public, type_error
from ._gate import Accumulation, ComputedStep, Flag, Guard, Judged, Verdict, Window, flag_and
from ._mesh import memory_of, varying_axes, zeros_of_type
from ._run_if import Report, like_dtypes, run_if, run_if_checked, trace
from ._states import GATES, increment_where, plain_arrays, with_structure_of
from ._tree_checks import check_inexact
from ._types import Scalar, Tree

EXTRA_ARGS: Final = ("value", "loss", "weight", "flush", "emit")
"""The extra arguments of `update` that guards and accumulations read."""


@dataclasses.dataclass(frozen=True)
class GatedUpdate:
    """The `update` of guards and accumulations.

    An object, so that its gates can be read wherever the transformation has been: some trainers
    unpack one and build it again. `jax.named_call` asks for its name.

    Attributes:
        gates: the guards, and at most one accumulation, from the outermost to the innermost.
        innermost: the transformation inside of all of them.
    """

    __name__: ClassVar[str] = "update"
    gates: tuple[Guard | Accumulation, ...]
    innermost: optax.GradientTransformationExtraArgs

    def __call__(
        self, updates: Tree, state: Any, params: Tree | None = None, **extra_args: Any
    ) -> tuple[Tree, Any]:
        """The update of the innermost transformation, or zeros where it takes no step."""
        run = functools.partial(_execute, self, applies=False)
        return named(run, self.gates[0].name)(updates, state, params, extra_args)

    def named(self, function: str) -> "GatedUpdate":
        """The same update, whose errors begin with the name of a function."""
        gate = self.gates[0]._replace(name=function)
        return dataclasses.replace(self, gates=(gate, *self.gates[1:]))


def gated(
    gate: Guard | Accumulation, inner: optax.GradientTransformation, init: optax.TransformInitFn
) -> optax.GradientTransformationExtraArgs:
    """Puts a gate around a transformation."""
    if isinstance(inner.update, GatedUpdate):
        update = GatedUpdate((gate, *inner.update.gates), inner.update.innermost)
    else:
        update = GatedUpdate((gate,), optax.with_extra_args_support(inner))
    return optax.GradientTransformationExtraArgs(init, update)


@public
def apply_gradients(
    tx: optax.GradientTransformation, grads: Tree, state: Any, params: Tree, **extra_args: Any
) -> tuple[Tree, Any]:
    """Takes one optimizer step: `update` and `optax.apply_updates` in one call.

    The same numbers, for any transformation; what `accumulate_gradients` gathers from bfloat16
    gradients is rounded once, when it is added to the parameters. For it and the guards this is
    the fast path: a step that is held or skipped touches neither parameters nor optimizer
    state, where `update` must at least write a tree of zeros. Donate `params` and `state` to
    the jitted step, or they are copied.

    Args:
        tx: any Optax transformation.
        grads: the gradients, in the structure of `params`.
        state: the state of `tx`.
        params: the parameters. Variables of Flax's NNX are accepted, and returned as such.
        **extra_args: passed on to `tx.update`.

    Returns:
        The new parameters, in their own dtypes, and the new state.

    Raises:
        TypeError: `tx` is no transformation.

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
        run = functools.partial(_execute, tx.update, applies=True)
        return named(run, tx.update.gates[0].name)(grads, state, params, extra_args)
    update = optax.with_extra_args_support(tx).update
    updates, state = update(grads, state, params, **extra_args)
    return _apply_updates(params, updates), state


def _execute(
    update: GatedUpdate,
    grads: Tree,
    state: Any,
    params: Tree,
    extra_args: dict[str, Any],
    *,
    applies: bool,
) -> tuple[Tree, Any]:
    """One call through all gates: the update, or the new parameters, and the next state.

    A gradient travels inwards. Guards around an accumulation judge the micro-batch, those inside
    it, or all if there is none, the gradient of the step. What they accept travels outwards again:
    guards around an accumulation check the gradient of the window, guards that check steps the
    computed step. The first to refuse counts, and nobody else.

    | refused | counted by | the window | innermost state |
    | --- | --- | --- | --- |
    | a micro-batch, around an accumulation | the outermost that refuses | goes on | untouched |
    | the same, with `flush` or `emit` | the same | emitted without it | takes the step |
    | the gradient of a step | the outermost inside that refuses | emitted | untouched |
    | that of a window, from around it | the innermost that checks it | dropped | untouched |
    | the computed step | the innermost whose check fails | dropped, by one around | untouched |
    | nothing, and the window is held | nobody | goes on | untouched |
    | nothing | nobody | emitted | takes the step |

    | guard | its counters | what its rules have learned |
    | --- | --- | --- |
    | the one that counts | one more skip, and one more in a row | brought up to date |
    | the others, if a guard refuses | as they were | as it was |
    | all that judged a call that went through | no skip in a row | brought up to date |
    | inside an accumulation whose window is held | as they were | as it was |
    """
    innermost_state = _check_call(update.gates, grads, state, extra_args)
    outside, accumulation, inside = _split(update.gates)
    guards = (*outside, *inside)
    around = _judge(outside, grads, state, params, extra_args)
    window = Window(True, (), lambda acc: (grads, acc), state, extra_args, lambda s, *_: s)
    if accumulation:
        is_measured = any(x.check_window for x in outside) or any(x.checks_step for x in guards)
        window = accumulation.open_window(around, params, extra_args, is_measured)
    step, output = _plan_step(
        update.innermost, window, grads, innermost_state, params, applies=applies
    )

    def close_window(carry: Tree) -> Tree:
        output, inner_state, accumulator, _ = carry
        window_grads, accumulator = window.read(accumulator)
        judged = _judge(inside, window_grads, inner_state, params, window.extra_args)
        accepted, of_window = _check_window(outside, window_grads, judged.accepted)
        entries = [*around.entries, *judged.entries]
        output, innermost, stepped, of_step = _take_step(step, entries, judged, accepted, output)
        refusals = [(of_window | of_step).get(i, _UNREFUSED) for i in range(len(guards))]
        own, others = refusals[len(outside) :], refusals[: len(outside)]
        inner_state = _next_states(judged, innermost, own, stepped, alone=len(guards) == 1)
        return output, inner_state, accumulator, [jnp.asarray(stepped), others] if guards else []

    flags: list[Any] = [jnp.array(False), [_UNREFUSED] * len(outside)] if guards else []
    carry = (output, window.inner_state, window.accumulator, flags)
    output, inner_state, accumulator, flags = run_if(window.emits, close_window, carry)
    stepped, refusals = flags or [window.emits, []]
    emitted = functools.reduce(flag_and, [~refused for refused, _ in refusals], window.emits)
    next_state = window.next_state(inner_state, accumulator, emitted)
    through = flag_and(around.accepted, ~(jnp.asarray(window.emits) & ~jnp.asarray(stepped)))
    return output, _next_states(around, next_state, refusals, through, alone=len(guards) == 1)


def _check_call(gates: Sequence[Any], grads: Tree, state: Any, extra_args: dict[str, Any]) -> Any:
    """Refuses what does not belong to these gates; returns the innermost state."""
    for name in extra_args.keys() - EXTRA_ARGS:  # all others are passed on
        near = difflib.get_close_matches(name, EXTRA_ARGS, n=1, cutoff=0.8)
        if near:
            rule = "an extra argument with a name of its own"
            hint = f"It is called `{near[0]}`; or name it less like that."
            raise type_error(name, rule, "one", hint)
    is_sum = isinstance(gates[0], Accumulation)
    check_inexact("updates", grads, unreduced=is_sum)
    for gate in gates:
        check_state(state, gate.kind)
        state = getattr(state, GATES[gate.kind])
    return state


def _split(gates: Sequence[Any]) -> tuple[Any, Accumulation | None, Any]:
    """The guards around the accumulation, it, and the guards inside; without one all are inside."""
    for i, gate in enumerate(gates):
        if isinstance(gate, Accumulation):
            return gates[:i], gate, gates[i + 1 :]
    return (), None, gates


def _judge(
    guards: Sequence[Guard], grads: Tree, state: Any, params: Tree, extra_args: dict[str, Any]
) -> Judged:
    """Asks guards one after the other, from the outermost on; the first that refuses does."""
    entries: list[tuple[Guard, Any, Verdict, Scalar]] = []
    accepted: Flag = True
    for guard in guards:
        verdict = guard.judge(grads, state, params, extra_args)
        refuses = jnp.asarray(flag_and(accepted, ~verdict.is_good))
        entries.append((guard, state, verdict, refuses))
        accepted = flag_and(accepted, verdict.is_good)
        grads, state = verdict.grads, state.inner_state
    accepted = shared(accepted) if len(guards) > 1 else accepted  # one verdict is shared already
    return Judged(entries, grads, state, accepted)


Step = Callable[[Tree, Any, Tree], tuple[Tree, Any, Tree]]
"""From gradients, the innermost state and the output to the next output, state, and the updates."""

_UNREFUSED: Final = (np.bool_(False), np.float32(np.nan))
"""No check of a guard refuses, and none measured anything; of NumPy, for `jax_debug_nans`."""


def _check_window(
    outside: Sequence[Guard], grads: Tree, accepted: Flag
) -> tuple[Flag, dict[int, Any]]:
    """Whether the gradient of a window may be stepped on, and what refuses it, as `_take_step`."""
    checks = {i: x.check_window for i, x in enumerate(outside) if x.check_window}
    if not checks:
        return accepted, {}
    passed = functools.reduce(jnp.logical_and, [check(grads) for check in checks.values()])
    refused = jnp.asarray(flag_and(accepted, ~passed))
    return shared(flag_and(accepted, passed)), {max(checks): (refused, _UNREFUSED[1])}


def _take_step(
    step: Step, entries: Sequence[Any], judged: Judged, accepted: Flag, output: Tree
) -> tuple[Tree, Any, Flag, dict[int, Any]]:
    """Takes the step where it is accepted, and where all guards pass it that check steps.

    Returns the output, the innermost state, whether the step was taken, and, by the index of the
    guard in `entries`, whether its check is the one that refuses, with what it measured.
    """

    def take(carry: Tree) -> tuple[Tree, ComputedStep]:
        output, before = carry
        output, after, updates = step(judged.grads, before, output)
        after = like_dtypes(after, before)  # a moment may overflow where it is kept
        return (output, after), ComputedStep(judged.grads, before, updates, after)

    checking = {i: entry for i, entry in enumerate(entries) if entry[0].checks_step}
    carry = (output, judged.state)
    if not checking:
        output, after = run_if(accepted, lambda x: take(x)[0], carry, usually=True)
        return output, after, accepted, {}

    def checked(carry: Tree) -> tuple[Tree, Report]:
        carry, computed = take(carry)
        results = [verdict.check_step(computed) for _, _, verdict, _ in checking.values()]
        passes, numbers = map(list, zip(*results, strict=True))
        return carry, [functools.reduce(jnp.logical_and, passes), passes, numbers]

    (output, after), (stepped, passes, numbers) = run_if_checked(accepted, checked, carry)
    refused = jnp.asarray(accepted) & ~jnp.asarray(stepped)
    innermost_guard = entries[max(checking)][0]
    after = innermost_guard.drop(after, refused)
    refusals: dict[int, Any] = {}
    # The innermost check that fails counts.
    for i, passed, number in reversed(list(zip(checking, passes, numbers, strict=True))):
        refusals[i] = (refused & ~passed, number)
        refused = refused & passed
    return output, after, stepped, refusals


def _next_states(
    judged: Judged, inner_state: Any, refusals: Sequence[Any], through: Flag, *, alone: bool
) -> Any:
    """The states of guards around the next state inside them.

    A guard alone refuses every call that does not go through, so there is nothing to select. Its
    incidents count every call, and are written by what it refuses itself.
    """
    pairs = zip(judged.entries, refusals, strict=True)
    for (guard, state, verdict, refuses), (refuses_later, measured) in reversed(list(pairs)):
        refused = refuses | refuses_later
        streak = jnp.where(refused, increment_where(state.consecutive_skips), 0)
        after = verdict.own_fields(refused, measured)
        failed, limit = after.guard_failed, guard.max_consecutive_skips
        if limit is not None:
            failed |= (streak >= limit).astype(jnp.int32)
        log, bare = after.incidents, {"inner_state": (), "incidents": None}
        after = after._replace(consecutive_skips=streak, guard_failed=failed, **bare)
        if not alone:
            choose = functools.partial(jnp.where, refused | through)
            after = jax.tree.map(choose, after, state._replace(**bare))
        inner_state = after._replace(inner_state=inner_state, incidents=log)
    return inner_state


def _plan_step(
    innermost: optax.GradientTransformationExtraArgs,
    window: Window,
    incoming: Tree,
    inner_state: Any,
    params: Tree,
    *,
    applies: bool,
) -> tuple[Step, Tree]:
    """The step of the innermost transformation, and the output if none is taken.

    It sees the gradient in the dtype of the accumulator, or in float32 behind a loss scale, if it
    takes that. Some, `optax.novograd` and `optax.apply_if_finite` among them, cannot be traced on
    gradients whose dtype is not that of the parameters: they get the dtypes that came in. What
    cannot be traced on either has another fault, which is then the user's to see. So it is
    traced once, or twice where the dtypes differ.
    """

    def bound(params: Tree) -> Callable[[Tree, Any], tuple[Tree, Any]]:
        return lambda grads, state: innermost.update(grads, state, params, **window.extra_args)

    output, known = params, None
    if not applies:
        # The zeros have the type of the update, which may be sharded otherwise, or vary less.
        # A shape does not record that an array varies over devices or lies on the host; a traced
        # array does. It is not computed, for nothing reads it.
        def first() -> Tree:
            return like_dtypes(window.read(window.accumulator)[0], incoming)

        leaves = jax.tree.leaves((window.accumulator, incoming))
        has_more = any(varying_axes(x) or memory_of(x) == "host" for x in leaves)
        known = trace(bound(params), first() if has_more else jax.eval_shape(first), inner_state)
        output = jax.tree.map(zeros_of_type, known.output[0])

    def run(grads: Tree, inner_state: Any, params: Tree) -> tuple[Tree, Any]:
        args, update = (grads, inner_state), bound(params)
        plain = like_dtypes(grads, incoming)
        is_eager = not any(map(is_traced, jax.tree.leaves((args, params))))
        pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(plain), strict=True)
        if all(x.dtype == y.dtype for x, y in pairs):
            return update(*args) if is_eager or known is None else known(*args)
        try:
            return update(*args) if is_eager else trace(update, *args)(*args)
        except (TypeError, ValueError) as error:
            try:
                return (known or trace(update, plain, inner_state))(plain, inner_state)
            except (TypeError, ValueError):
                raise error from None

    def step(grads: Tree, inner_state: Any, output: Tree) -> tuple[Tree, Any, Tree]:
        updates, inner_state = run(grads, inner_state, output if applies else params)
        return (_apply_updates(output, updates) if applies else updates), inner_state, updates

    return step, output


def _apply_updates(params: Tree, updates: Tree) -> Tree:
    """`optax.apply_updates`, also of float0, and where JAX is set not to promote dtypes.

    A float0 update leaves its integer parameter as it is.
    """

    def addend(update: Any, param: Any) -> Any:
        return jnp.zeros_like(param) if is_float0(update) else update

    with jax.numpy_dtype_promotion("standard"):
        return optax.apply_updates(params, jax.tree.map(addend, updates, params))
