"""Guards and accumulations, which decide whether the transformation inside them runs."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from .._run_if import Flag
from .._types import Count, Scalar, Tree

ExtraArgs: TypeAlias = dict[str, Any]
"""The extra arguments of `update` by name."""


class Verdict(NamedTuple):
    """The result of a guard's check of a gradient, and its later checks.

    Attributes:
        is_good: Whether the check passed, bool[], equal on all devices.
        grads: Gradient that the guard passes to the inner transformation.
        next_state: Function `(refused, failed, measured) -> state` that updates the guard's own
            fields. `refused` is whether the guard counts a skip because this check failed, `failed`
            the same for a later check, and `measured` the measurement of `check_step`.
        check_window: Function that checks the gradient of a window and returns a bool[]. It is used
            if the guard is outside an accumulation, where `is_good` only covers the micro-batch.
            None accepts all windows.
        check_step: Function `(grads, updates, state before, state after) -> (passed, measured)`
            that checks a computed step of the innermost transformation; None accepts all steps.
    """

    is_good: Scalar
    grads: Tree
    next_state: Callable[[Scalar, Scalar, Tree], Tree]
    check_window: Callable[[Tree], Scalar] | None = None
    check_step: Callable[[Tree, Tree, Tree, Tree], tuple[Scalar, Tree]] | None = None


class Guard(NamedTuple):
    """A guard, which skips bad steps.

    The executor updates the fields `consecutive_skips`, `guard_failed` and `inner_state` of the
    guard's state; `Verdict.next_state` updates all other fields.

    Attributes:
        kind: Type of the guard's state.
        judge: Function `(grads, state, params, extra_args) -> Verdict`.
        discard: Function `(state, where) -> state` that discards unfinished windows in the
            innermost state after a failed `check_step`. Otherwise a window whose sum overflows
            would make all later steps fail the check.
        max_consecutive_skips: Number of consecutive skips that sets `guard_failed`; None for no
            limit.
        unmeasured: Value that replaces the measurement of `check_step` in calls that compute no
            step.
    """

    kind: type
    judge: Callable[[Tree, Tree, Tree, ExtraArgs], Verdict]
    discard: Callable[[Tree, Scalar], Tree]
    max_consecutive_skips: Count | None = None
    unmeasured: Tree = ()


class Window(NamedTuple):
    """The way in which one micro-batch changes an accumulation.

    Attributes:
        emits: Whether the window closes and contains a micro-batch with nonzero weight.
        read: Function from the accumulator to the gradient of the window and the accumulator after
            the step, which may reuse its buffers.
        extra_args: Extra arguments for the transformation inside the accumulation.
        next_state: Function `(inner_state, accumulator, emitted) -> state` that returns the next
            state of the accumulation.
    """

    emits: Flag
    read: Callable[[Tree], tuple[Tree, Tree]]
    extra_args: ExtraArgs
    next_state: Callable[[Tree, Tree, Flag], Tree]


class Accumulation(NamedTuple):
    """An accumulation, which runs the transformation inside it once for several micro-batches.

    Attributes:
        kind: Type of the accumulation's state.
        open_window: Function `(grads, state, accepted, params, extra_args) -> Window`. If an outer
            guard skips the micro-batch, `accepted` is false and nothing is accumulated.
    """

    kind: type
    open_window: Callable[[Tree, Tree, Flag, Tree, ExtraArgs], Window]
