"""Execution of guards and an accumulation around an inner transformation.

Guards and an accumulation that are directly around each other are one transformation with one
state. `WrapperUpdate` runs the inner transformation at most once per call.
"""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
import optax

from .._checks import (
    check_same_structure,
    check_state,
    check_transformation,
    dtype_of,
    is_float0,
    is_scalar,
)
from .._errors import named, public, type_error
from .._run_if import compute_step, like_dtypes, run_step, select_step
from .._states import (
    find_states,
    increment_where,
    is_only_clips,
    metric_names,
    plain_arrays,
)
from .._types import Array, Scalar, Tree
from ..norms._leaves import checked_leaves
from ._accumulation import Accumulation, AccumulationState, micro_batch_of
from ._guard import ExtraArgs, Guard, Rejections, any_of, check_guard_arguments, none_of, params_of
from ._state import GuardState, Outcome, WrapperState, outcome_of

Observe: TypeAlias = Callable[[Tree, Tree], Tree]
"""A function `(updates, params) -> measurements` that is called where the updates are computed."""


class InPlaceUpdate:
    """Base class of `update` functions that can also add the updates to the parameters.

    `apply_gradients` looks for this class instead of an attribute, which decorators would copy.
    """

    def apply(
        self, grads: Tree, state: Tree, params: Tree, extra_args: ExtraArgs, observe: Observe | None
    ) -> tuple[Tree, Tree, Tree]:
        """Return the new parameters, the next state, and the measurements.

        The measurements are zeros if the inner transformation did not run, and None without
        `observe`.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, eq=False)
class WrapperUpdate(InPlaceUpdate):
    """The `update` function of guards and an accumulation.

    The function is a callable object instead of a closure, so that another guard around it can
    extend it, even if a trainer has rebuilt the transformation from `init` and `update`.
    `jax.named_call` requires `__name__`.

    Attributes:
        inner: Transformation inside all guards and the accumulation.
        outer: Guards around the accumulation, from the outermost to the innermost.
        accumulation: The accumulation, or None.
        guards: Guards inside the accumulation; all guards if there is no accumulation.
    """

    __name__: ClassVar[str] = "update"
    inner: optax.GradientTransformationExtraArgs
    outer: tuple[Guard, ...] = ()
    accumulation: Accumulation | None = None
    guards: tuple[Guard, ...] = ()

    def init(self, params: Tree) -> WrapperState:
        """Return the initial state."""
        with named(self.name):
            inner_state = self.inner.init(params)
            outer, guards = (
                tuple(_init_guard(guard, params) for guard in x) for x in (self.outer, self.guards)
            )
            _check_nesting(self, outer + guards, inner_state)
            return WrapperState(
                outcome=jnp.zeros((), jnp.int32),
                grad_norm=jnp.zeros((), jnp.float32) if outer + guards else None,
                consecutive_skips=jnp.zeros((), jnp.int32),
                guard_failed=jnp.zeros((), jnp.int32),
                outer=outer,
                accumulation=self.accumulation and self.accumulation.init(params),
                guards=guards,
                # Weak types, which `update` does not return, would cause a second trace.
                inner_state=like_dtypes(inner_state, inner_state),
            )

    def __call__(
        self, updates: Tree, state: Tree, params: Tree | None = None, **extra_args: Any
    ) -> tuple[Tree, Tree]:
        """Return the update of the inner transformation, or zeros if it does not run."""
        (updates, _), _, state = _execute(self, updates, state, params, None, extra_args)
        return updates, state

    def apply(
        self, grads: Tree, state: Tree, params: Tree, extra_args: ExtraArgs, observe: Observe | None
    ) -> tuple[Tree, Tree, Tree]:
        """Implement `apply_gradients`."""
        given = self, grads, state, params, params, extra_args, observe
        (_, measured), params, state = _execute(*given)
        return params, state, measured

    @property
    def name(self) -> str:
        """The public function of the outermost guard or accumulation, for errors."""
        return next(x.name for x in (*self.outer, self.accumulation, *self.guards) if x)


def wrap(
    wrapper: Guard | Accumulation, inner: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """Wrap a transformation, or extend the guards and accumulation that are directly around it."""
    if isinstance(wrapper, Guard):
        arguments = wrapper.axis_name, wrapper.trainable, wrapper.max_consecutive_skips
        check_guard_arguments(inner, *arguments)
    update = inner.update
    if not isinstance(update, WrapperUpdate):
        update = WrapperUpdate(optax.with_extra_args_support(inner))
    if isinstance(wrapper, Accumulation):
        if update.accumulation:
            _raise_of_two_accumulations()
        update = dataclasses.replace(update, accumulation=wrapper)
    else:
        field = "outer" if update.accumulation else "guards"
        update = dataclasses.replace(update, **{field: (wrapper, *getattr(update, field))})
    init: Any = update.init  # the type of Optax names arrays as states
    return optax.GradientTransformationExtraArgs(init, update)


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
    _warn_of_unread_weight(extra_args, state)
    if isinstance(tx.update, InPlaceUpdate):
        params, state, _ = tx.update.apply(grads, state, params, extra_args, None)
        return params, state
    update = optax.with_extra_args_support(tx).update
    updates, state = update(grads, state, params, **extra_args)
    return apply_updates(params, updates), state


class _Call(NamedTuple):
    """The arguments of one call of `update` or `apply_gradients`, except for the extra arguments.

    Attributes:
        update: The guards, the accumulation and the inner transformation.
        grads: The gradient as the caller passed it.
        state: State before the call.
        params: Parameters, or None.
        observe: Function that measures updates, or None.
    """

    update: WrapperUpdate
    grads: Tree
    state: WrapperState
    params: Tree
    observe: Observe | None


class _Report(NamedTuple):
    """What guards found when they checked a gradient or a step.

    Attributes:
        rejections: For each guard, the flags of its causes; only those of the first guard that
            rejects are true.
        observed: For each guard, what its check returned for `Guard.advance`.
        norm: Norm of the gradient that the first guard received; None without guards.
    """

    rejections: tuple[Rejections, ...]
    observed: tuple[Tree, ...]
    norm: Scalar | None


class _Result(NamedTuple):
    """The result of a call before its counts.

    Attributes:
        output: The updates and measurements, or zeros if the inner transformation did not run.
        carry: Parameters to which the updates are added, or None, and the inner state.
        report: Report on all guards.
        has_run: Whether the inner transformation ran and no guard rejected its step.
        is_observed: For each guard, whether its state advances although it did not skip.
        is_accumulated: Whether the micro-batch was only added to the window.
        is_empty: Whether the window closed without weight.
        accumulation: State of the accumulation, or None.
    """

    output: Tree
    carry: tuple[Tree, Tree]
    report: _Report
    has_run: Scalar
    is_observed: tuple[Scalar, ...]
    is_accumulated: Scalar | bool = False
    is_empty: Scalar | bool = False
    accumulation: AccumulationState | None = None


def _execute(
    update: WrapperUpdate,
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
    with named(update.name):
        check_state(state, WrapperState)
        _check_guards(update, state)
        checked_leaves("updates", grads)
        if params is not None:
            check_same_structure(grads, params_of(params))
    call, carry = _Call(update, grads, state, params, observe), (target, state.inner_state)
    if update.accumulation is None:
        output, report, carry = _step(call, grads, carry, extra_args)
        has_run = jnp.asarray(none_of(report.rejections))
        result = _Result(output, carry, report, has_run, (has_run,) * len(update.guards))
    else:
        result = _accumulate(call, carry, extra_args)
    return result.output, result.carry[0], _next_state(call, result)


def _accumulate(call: _Call, carry: tuple[Tree, Tree], extra_args: ExtraArgs) -> _Result:
    """Add a micro-batch to the window, and take a step with its gradient if the window closes."""
    update, state, accumulation = call.update, call.state, call.update.accumulation
    assert accumulation is not None
    num_outer, num_inner = len(update.outer), len(update.guards)
    with named(accumulation.name):
        batch = micro_batch_of(extra_args)
    # Guards around the accumulation check the micro-batch. NaN, as a weight, is not 0.
    is_weighted = batch.weight != 0
    given = batch.extra_args | {"weight": batch.weight}
    outer = update.outer, state.outer
    grads, received = _receive(*outer, call.grads, call.params, given, is_weighted, True)
    is_accepted = jnp.asarray(none_of(received.rejections))

    with named(accumulation.name):
        window, closes = accumulation.add(state.accumulation, grads, batch, is_accepted)
    has_weight, has_sum = window.gradient.weight > 0, accumulation.has_sum(window)

    def step(
        carry: Tree, window: AccumulationState, grads: Tree, params: Tree
    ) -> tuple[Tree, Tree]:
        total, carry = carry
        own = window._replace(gradient=window.gradient._replace(total=total))
        gradient, others = accumulation.close(own, grads, batch)
        output, report, carry = _step(call._replace(params=params), gradient, carry, others)
        if has_sum:
            # The gradient shares the buffers of the sum, which the next window overwrites.
            total = jax.tree.map(lambda x, y: y if is_float0(x) else x, gradient, total)
        return (output, report), (total, carry)

    start = window.gradient.total, carry
    # Without a weight or a guard, each micro-batch is known to close a window of one.
    is_known = not (has_sum or update.outer or batch.has_weight)
    # If the window stays open, the updates are zeros, and no guard rejects.
    operands = window, grads, call.params
    is_run = is_known or closes & has_weight
    (output, report), (total, carry) = run_step(is_run, step, start, *operands)
    window = window._replace(gradient=window.gradient._replace(total=total))

    has_run, is_empty = closes & has_weight & none_of(report.rejections), closes & ~has_weight
    is_accumulated = is_accepted & batch.is_given & ~closes
    is_observed = is_accepted & is_weighted & (is_accumulated | has_run)
    norm = report.norm if received.norm is None else received.norm
    if norm is not None and state.grad_norm is not None:
        is_measured = is_weighted if num_outer else closes & has_weight
        norm = jnp.where(is_measured, norm, state.grad_norm)
    rejections = _either(received.rejections, report.rejections)
    return _Result(
        output,
        carry,
        _Report(rejections, received.observed + report.observed, norm),
        has_run,
        (is_observed,) * num_outer + (has_run,) * num_inner,
        is_accumulated,
        is_empty,
        accumulation.finish(window, closes, has_run),
    )


def _receive(
    guards: tuple[Guard, ...],
    states: tuple[GuardState, ...],
    grads: Tree,
    params: Tree,
    extra_args: ExtraArgs,
    is_checked: Scalar | bool = True,
    is_micro_batch: bool = False,
) -> tuple[Tree, _Report]:
    """Pass a gradient through guards, which unscale, mask and check it.

    No guard rejects the gradient if `is_checked` is False.
    """
    found: list[Rejections] = []
    observed: list[Tree] = []
    norms: list[Scalar] = []
    for guard, state in zip(guards, states, strict=True):
        with named(guard.name):
            grads = guard.receive(grads, state.rule_state, params)
            norms.append(guard.norm(grads))
            check = (is_micro_batch and guard.check_micro_batch) or guard.check
            rejections, seen = check(grads, norms[-1], state.rule_state, params, extra_args)
        found.append({cause: flag & is_checked for cause, flag in rejections.items()})
        observed.append(seen)
    norm = norms[0].astype(jnp.float32) if norms else None
    return grads, _Report(_of_first_guard(found), tuple(observed), norm)


def _step(
    call: _Call, grads: Tree, carry: tuple[Tree, Tree], extra_args: ExtraArgs
) -> tuple[Tree, _Report, tuple[Tree, Tree]]:
    """Check the gradient of a step, run the inner transformation, and check the computed step.

    `carry` contains the parameters to update, or None, and the inner state. Guards around an
    accumulation check the gradient of the window again. Returns the updates, a report whose
    rejections are those of all guards, and the next carry.
    """
    update, params, before = call.update, call.params, carry[1]
    of_window = _window_rejections(call, grads, extra_args)
    guards = update.guards, call.state.guards
    received, report = _receive(*guards, grads, params, extra_args)
    rejections = _of_first_guard([*of_window, *report.rejections])
    is_accepted = none_of(rejections)
    checking = [guard.check_step for guard in (*update.outer, *update.guards)]

    def run(carry: tuple[Tree, Tree]) -> tuple[Tree, tuple[Tree, Tree]]:
        target, inner_state = carry
        updates, inner_state = _run_inner(call, received, inner_state, target, extra_args)
        measured = None if call.observe is None else call.observe(updates, target)
        new = None if target is None else apply_updates(target, updates)
        needed = updates if any(checking) or target is None else None
        return (needed, measured), (new, inner_state)

    if not any(checking):
        output, carry = run_step(is_accepted, run, carry, likely=True)
        return output, report._replace(rejections=rejections), carry
    program, computed = compute_step(run, carry)
    (updates, _), (_, after) = computed
    of_step = [check(updates, before, after, params) if check else {} for check in checking]
    of_step = _of_first_guard(of_step, is_accepted)
    output, carry = select_step(is_accepted & none_of(of_step), program, computed, carry)
    return output, report._replace(rejections=_either(rejections, of_step)), carry


def _window_rejections(call: _Call, grads: Tree, extra_args: ExtraArgs) -> list[Rejections]:
    """Return the rejections of the guards around an accumulation for the gradient of a window."""
    found: list[Rejections] = []
    for guard, own in zip(call.update.outer, call.state.outer, strict=True):
        rejections: Rejections = {}
        if guard.checks_window:
            given = grads, guard.norm(grads), own.rule_state, call.params
            rejections, _ = guard.check(*given, extra_args)
        found.append(rejections)
    return found


def _run_inner(
    call: _Call, grads: Tree, state: Tree, target: Tree, extra_args: ExtraArgs
) -> tuple[Tree, Tree]:
    """Run the inner transformation; warn if it contains no optimizer.

    An accumulation or a loss scale computes gradients in float32. Updates that are returned to the
    caller have the dtypes that the transformation returns for the gradient of the caller.
    """
    params = call.params if target is None else target

    def run(grads: Tree, state: Tree) -> tuple[Tree, Tree]:
        return call.update.inner.update(grads, state, params, **extra_args)

    updates, after = run(grads, state)
    if jax.tree.structure(after) != jax.tree.structure(state):
        got = f"{jax.tree.structure(state)} instead of {jax.tree.structure(after)}"
        hint = (
            "If a checkpoint contains lists instead of tuples, restore its leaves into the "
            "structure of `tx.init(params)` with `jax.tree.unflatten`."
        )
        rule = "a state whose structure the inner transformation keeps, with tuples and no lists"
        raise type_error("state", rule, got, hint)
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


def _of_first_guard(
    found: Sequence[Rejections], is_accepted: Scalar | bool = True
) -> tuple[Rejections, ...]:
    """Return the rejections of the first guard that rejects, and False for all later guards.

    No guard rejects if `is_accepted` is False.
    """
    kept: list[Rejections] = []
    for rejections in found:
        kept.append({cause: flag & is_accepted for cause, flag in rejections.items()})
        is_accepted = none_of(rejections) & is_accepted
    return tuple(kept)


def _either(
    first: tuple[Rejections, ...], second: tuple[Rejections, ...]
) -> tuple[Rejections, ...]:
    """Combine the rejections of guards at two checks; a missing guard or cause does not reject."""
    pairs = itertools.zip_longest(first, second, fillvalue={})
    return tuple(
        {cause: x.get(cause, False) | y.get(cause, False) for cause in (x | y)} for x, y in pairs
    )


def _next_state(call: _Call, result: _Result) -> WrapperState:
    """Return the next state, with the outcome, the skips and the state of each guard."""
    update, state, report, inner_state = call.update, call.state, result.report, result.carry[1]
    outcome = jnp.where(result.has_run, outcome_of(inner_state), 0)
    outcome |= _flag(Outcome.ACCUMULATED, result.is_accumulated)
    outcome |= _flag(Outcome.EMPTY_WINDOW, result.is_empty)
    for rejections in report.rejections:
        for cause, flag in rejections.items():
            outcome |= _flag(Outcome.SKIPPED | Outcome[f"SKIPPED_{cause.upper()}"], flag)

    is_failure = outcome & int(Outcome.SKIPPED | Outcome.EMPTY_WINDOW) != 0
    is_failure &= outcome & int(Outcome.ACCUMULATED) == 0
    streak = increment_where(state.consecutive_skips, is_failure)
    streak = jnp.where(outcome & int(Outcome.APPLIED) != 0, 0, streak)
    failed = state.guard_failed > 0
    guards: list[GuardState] = []
    every_guard = update.outer + update.guards
    rows = every_guard, state.outer + state.guards, *report[:2], result.is_observed
    for guard, own, rejections, observed, is_observed in zip(*rows, strict=True):
        skipped = jnp.asarray(any_of(rejections))
        counts = {
            cause: increment_where(count, rejections.get(cause, False))
            for cause, count in own.skipped.items()
        }
        with named(guard.name):
            advanced = guard.advance(own.rule_state, observed, skipped)
        advanced = optax.tree.where(skipped | is_observed, advanced, own.rule_state)
        guards.append(GuardState(counts, advanced))
        failed |= guard.has_failed(own.rule_state, skipped)
        if guard.max_consecutive_skips is not None:
            failed |= streak >= guard.max_consecutive_skips
    return WrapperState(
        outcome,
        report.norm,
        streak,
        failed.astype(jnp.int32),
        tuple(guards[: len(update.outer)]),
        result.accumulation,
        tuple(guards[len(update.outer) :]),
        inner_state,
    )


def _flag(flag: Outcome, is_set: Scalar | bool) -> Array:
    """Return the bits of a flag if it is set, otherwise 0."""
    return jnp.where(is_set, jnp.int32(int(flag)), 0)


def _init_guard(guard: Guard, params: Tree) -> GuardState:
    """Return the initial state of a guard, in which each array has its own buffer."""
    counts = {cause: jnp.zeros((), jnp.int32) for cause in guard.causes}
    return GuardState(counts, jax.tree.map(jnp.array, guard.init(params_of(params))))


def _check_guards(update: WrapperUpdate, state: WrapperState) -> None:
    """Raise if a state belongs to other guards."""
    expected = [[set(guard.causes) for guard in guards] for guards in (update.outer, update.guards)]
    found = [[set(guard.skipped) for guard in guards] for guards in (state.outer, state.guards)]
    if found != expected:
        hint = "Convert it with `gcx.convert_state(tx, state, params)`."
        raise type_error("state", "the state of these guards", f"that of guards {found}", hint)


def _check_nesting(
    update: WrapperUpdate, guards: tuple[GuardState, ...], inner_state: Tree
) -> None:
    """Raise if a guard cannot see the accumulation inside it, or prevents a loss scale."""
    names = metric_names(inner_state)
    inner_guards = [guard.rule_state for guard in guards[1:]]
    if any(hasattr(rule, "loss_scale") for rule in inner_guards) or (
        guards and "loss_scale" in names
    ):
        # If an outer guard skipped steps that overflow, the loss scale would never decrease.
        rule = "a transformation without `dynamic_loss_scale`"
        hint = "Use `dynamic_loss_scale` outside this guard, so that it checks unscaled gradients."
        raise type_error("inner", rule, "one that contains it", hint)
    if "mini_step" not in names and not find_states(inner_state, optax.MultiStepsState):
        return
    if update.accumulation:
        _raise_of_two_accumulations()
    if "mini_step" in names:
        # The guard would check micro-batches only, and could not close a window.
        rule = "a transformation without an accumulation inside a chain or another wrapper"
        hint = (
            "Place the guard directly around the accumulation, as in `optax.chain(clip, "
            "skip_nonfinite(accumulate_gradients(optimizer, 4)))`, and `watch` outside."
        )
        raise type_error("inner", rule, "one that contains an accumulation", hint)


def _raise_of_two_accumulations() -> NoReturn:
    """Raise an error for an accumulation inside an accumulation."""
    rule = "a transformation that contains no accumulation"
    hint = "Use one accumulation with `every=a * b` instead of two."
    raise type_error("inner", rule, "one that contains an accumulation", hint)


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """Call `optax.apply_updates` with support for float0 updates and strict dtype promotion."""

    def addend(update: Array, param: Array) -> Array:
        return jnp.zeros_like(param) if is_float0(update) else update

    with jax.numpy_dtype_promotion("standard"):
        return optax.apply_updates(params, jax.tree.map(addend, updates, params))


def _warn_of_unread_weight(extra_args: ExtraArgs, state: Tree) -> None:
    """Warn if the weight of a micro-batch is passed, but no accumulation reads it."""
    is_weight = is_scalar(extra_args.get("weight"), jnp.floating, jnp.integer)
    if is_weight and "mini_step" not in metric_names(state):
        hint = "Wrap the optimizer in `accumulate_gradients`."
        warnings.warn(f"No accumulation reads the extra argument `weight`. {hint}", stacklevel=2)
