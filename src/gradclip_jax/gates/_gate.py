"""Guards and accumulations, which decide whether the transformation inside them runs."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from .._types import Array, Scalar, Tree

Flag: TypeAlias = Array | np.bool_
"""A bool[] array, or a NumPy bool, which is known at trace time and needs no branch."""


class ComputedStep(NamedTuple):
    """A step of the innermost transformation that has been computed, but not applied.

    Attributes:
        grads: Gradients of the step.
        inner_state: State before the step.
        updates: Updates of the step.
        next_inner_state: State after the step.
    """

    grads: Tree
    inner_state: Tree
    updates: Tree
    next_inner_state: Tree


class Verdict(NamedTuple):
    """The result of a guard's check of a gradient.

    Attributes:
        is_good: Whether the check passed, bool[], equal on all devices.
        grads: Gradient that the guard passes to the inner transformation.
        next_state: Function `(refused, failed, measured) -> state` that updates the guard's own
            fields. `refused` is whether this check failed, `failed` whether a later check of the
            guard failed, and `measured` the measurement of the later check.
        check_step: Function that checks a computed step and returns whether the check passed,
            bool[], and a measurement; required if the guard `checks_step`.
    """

    is_good: Scalar
    grads: Tree
    next_state: Callable[[Scalar, Scalar, Tree], Any]
    check_step: Callable[[ComputedStep], tuple[Scalar, Tree]] | None = None


class Guard(NamedTuple):
    """A guard, which skips bad steps.

    `_execute` updates the fields `consecutive_skips`, `guard_failed` and `inner_state` of the
    guard's state; `Verdict.next_state` updates all other fields.

    Attributes:
        kind: Type of the guard's state.
        judge: Function `(grads, state, params, extra_args) -> Verdict`.
        max_consecutive_skips: Number of consecutive skips that sets `guard_failed`; None for no
            limit.
        check_window: Function that checks the gradient of a window and returns a bool[]. It is used
            if the guard is outside an accumulation, where `judge` only checks micro-batches. None
            accepts all windows.
        checks_step: Whether the guard also checks the computed step.
        unmeasured: Value that replaces the measurement of `check_step` in calls that compute no
            step.
        discard: Function `(state, where) -> state` that discards unfinished accumulation windows in
            the innermost state. Otherwise a window whose sum overflows would make all later steps
            fail the check.
    """

    kind: type
    judge: Callable[[Tree, Any, Tree, dict[str, Any]], Verdict]
    max_consecutive_skips: int | None = None
    check_window: Callable[[Tree], Scalar] | None = None
    checks_step: bool = False
    unmeasured: Tree = ()
    discard: Callable[[Tree, Scalar], Tree] = lambda state, where: state


class Window(NamedTuple):
    """The effect of one micro-batch on an accumulation.

    Attributes:
        emits: Whether the window closes and contains a micro-batch with nonzero weight.
        accumulator: Buffers that `read` needs; the step may overwrite them.
        read: Function from the accumulator to the gradient of the window and the accumulator after
            the step.
        inner_state: State of the transformation inside the accumulation.
        extra_args: Extra arguments for the transformation inside the accumulation.
        next_state: Function `(inner_state, accumulator, emitted) -> state` of the accumulation.
    """

    emits: Flag
    accumulator: Tree
    read: Callable[[Tree], tuple[Tree, Tree]]
    inner_state: Any
    extra_args: dict[str, Any]
    next_state: Callable[[Any, Tree, Flag], Any]


class Accumulation(NamedTuple):
    """An accumulation, which runs the transformation inside it once for several micro-batches.

    Attributes:
        kind: Type of the accumulation's state.
        open_window: Function `(grads, state, accepted, params, extra_args) -> Window`. If an outer
            guard skips the micro-batch, `accepted` is false and nothing is accumulated.
    """

    kind: type
    open_window: Callable[[Tree, Any, Flag, Tree, dict[str, Any]], Window]
