"""What all guards share: a verdict on what comes in, the check of the step, the counts.

A micro-batch that is not finite is left out; a window whose step is not finite is dropped.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._checks import check_axis_name, check_count, check_state, check_transformation, error_message
from .._gate import ComputedStep, Gate, gate_of, gated
from .._run_if import like_dtypes
from .._states import find_states, increment_where
from .._tree_checks import check_inexact
from .._types import Array, AxisName, Scalar, Tree
from ..accumulation._state import clear_emitted, discard_windows
from ._scale_loss import LossScaleState

Judge = Callable[[Tree, Any, Tree, dict[str, Any]], tuple[Scalar, Callable[[Scalar], Any]]]
"""`(updates, state, params, extra_args)` to whether they may be stepped on, and to a function of
`skipped`, bool[], that returns the state with the guard's own fields brought up to date."""

StepCheck = Callable[[ComputedStep], Scalar]
"""Whether a step may be taken, bool[]."""


def guard(
    name: str,
    inner: optax.GradientTransformation,
    first: Callable[[Any], Any],
    judge: Judge,
    *,
    check_step: StepCheck | None = None,
    check_window: StepCheck | None = None,
    max_consecutive_skips: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Builds a guard from its verdict.

    `first` makes the first state from that of `inner`. A state has the fields `inner_state`,
    `consecutive_skips` and `guard_failed`, which are kept here, and those of the guard. What is
    not admitted, or refused by the check of a guard around this one, leaves no trace in it.
    The computed step is put before `check_step`, or before `check_window` where an accumulation
    makes the gradient of it.
    """
    limit = _limit(name, max_consecutive_skips)
    innermost, inner_gate = gate_of(inner)
    kind = type(jax.eval_shape(lambda: first(())))

    def init(params: Tree) -> Any:
        inner_state = inner.init(params)
        # A loss scale that never sees the steps that overflow is never lowered.
        hint = "Put that one around this guard, which then sees unscaled gradients."
        _refuse_inner(name, inner_state, LossScaleState, "dynamic_loss_scale", hint)
        if check_step is not None:
            # A window of it whose sum overflows stays so, and every step is refused.
            hint = (
                "Use `accumulate_gradients`: a guard can empty its window. Or guard its optimizer."
            )
            _refuse_inner(name, inner_state, optax.MultiStepsState, "optax.MultiSteps", hint)
        # Not weakly typed, as what comes out of a step is not: one trace for all steps.
        return first(like_dtypes(inner_state, inner_state))

    def gate(
        updates: Tree, state: Any, params: Tree, extra_args: dict[str, Any], admitted: Any
    ) -> Gate:
        check_inexact(name, "updates", updates)
        check_state(name, state, kind)
        is_good, own_fields = judge(updates, state, params, extra_args)
        taken = is_good & admitted
        now = inner_gate(updates, state.inner_state, params, extra_args, taken)

        own_check = check_step if now.usually_open else check_window

        def check(step: ComputedStep) -> Scalar:
            assert own_check is not None
            passed = own_check(step)
            return passed if now.check is None else passed & now.check(step)

        def next_state(inner_state: Any, accumulator: Tree, stepped: Array) -> Any:
            refused = jnp.asarray(now.is_open) & ~jnp.asarray(stepped)
            skipped = ~is_good if own_check is None else ~is_good | refused
            seen = admitted if own_check or admitted is True else admitted & ~refused
            inner_state = now.next_state(inner_state, accumulator, stepped)
            inner_state = discard_windows(clear_emitted(inner_state, ~taken), refused)
            streak = jnp.where(skipped, increment_where(state.consecutive_skips), 0)
            after = own_fields(skipped)._replace(
                consecutive_skips=streak,
                guard_failed=state.guard_failed | (streak >= limit),
            )
            return _where(seen, after, state)._replace(inner_state=inner_state)

        return now._replace(check=check if own_check else now.check, next_state=next_state)

    return gated(innermost, init, gate)


def check_guard(name: str, inner: Any, axis_name: Any) -> AxisName:
    """Refuses what is no transformation; returns the axes."""
    check_transformation(name, "inner", inner)
    return check_axis_name(name, axis_name)


def zero(dtype: Any = jnp.int32) -> Scalar:
    """A call for each field: a buffer that two fields share cannot be donated."""
    return jnp.zeros((), dtype)


def _limit(name: str, max_consecutive_skips: Any) -> Any:
    """The limit of skips in a row, the largest integer for none."""
    if max_consecutive_skips is None:
        return jnp.iinfo(jnp.int32).max
    check_count(name, "max_consecutive_skips", max_consecutive_skips, "Pass None for no limit.")
    return max_consecutive_skips


def _refuse_inner(name: str, inner_state: Any, kind: type, function: str, hint: str) -> None:
    if find_states(inner_state, kind):
        rule = f"free of `{function}`"
        raise TypeError(error_message(name, "inner", rule, "a state of one", hint))


def _where(seen: Array | bool, after: Any, before: Any) -> Any:
    """The state after a step that was seen; `inner_state` apart."""
    after, before = after._replace(inner_state=()), before._replace(inner_state=())
    if seen is True:
        return after  # nothing is around the guard that could have left it out
    return jax.tree.map(functools.partial(jnp.where, seen), after, before)
