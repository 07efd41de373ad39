"""Guards and accumulations, which decide whether their inner transformation runs."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from .._run_if import Flag
from .._types import Count, Scalar, Tree

ExtraArgs: TypeAlias = dict[str, Any]
"""The extra arguments of `update` by name."""


class Verdict(NamedTuple):
    """Result of a guard's check of a gradient, and functions for its later checks.

    Attributes:
        is_good: Whether the gradient passed the check, bool[], equal on all devices.
        grads: Gradient to pass to the inner transformation.
        next_state: Function `(refused, failed) -> state` that returns the next state of the guard.
            `refused` is whether the guard counts a skip because this check failed, and `failed` the
            same for a later check.
        check_window: Function that checks the accumulated gradient of a window and returns a
            bool[]. It is used if the guard is outside an accumulation, where `is_good` only covers
            the micro-batch. None accepts all windows.
        check_step: Function `(grads, updates, state before, state after) -> bool[]` that checks a
            computed step of the innermost transformation; None accepts all steps.
    """

    is_good: Flag
    grads: Tree
    next_state: Callable[[Scalar, Scalar], Tree]
    check_window: Callable[[Tree], Scalar] | None = None
    check_step: Callable[[Tree, Tree, Tree, Tree], Scalar] | None = None


class Guard(NamedTuple):
    """A guard, which skips steps that fail its checks.

    `_next_states` updates `consecutive_skips`, `guard_failed` and `inner_state` in the guard's
    state, and `Verdict.next_state` updates all other fields.

    Attributes:
        kind: Type of the guard's state.
        judge: Function `(grads, state, params, extra_args) -> Verdict`.
        discard: Function `(state, where) -> state` that resets unfinished accumulators in the
            innermost state after a failed `check_step`. Otherwise an accumulator that overflows
            would make all later steps fail the check.
        max_consecutive_skips: Number of consecutive skips that sets `guard_failed`; None for no
            limit.
    """

    kind: type
    judge: Callable[[Tree, Tree, Tree, ExtraArgs], Verdict]
    discard: Callable[[Tree, Scalar], Tree]
    max_consecutive_skips: Count | None = None


class Window(NamedTuple):
    """An accumulation window after the current micro-batch.

    Attributes:
        emits: Whether the accumulation window closes and has nonzero total weight.
        read: Function that returns the accumulated gradient and the next accumulator, given the
            current accumulator. The result may reuse its buffers.
        extra_args: Extra arguments for the transformation inside the accumulation.
        next_state: Function `(inner_state, accumulator, emitted) -> state` that computes the next
            accumulation state.
    """

    emits: Flag
    read: Callable[[Tree], tuple[Tree, Tree]]
    extra_args: ExtraArgs
    next_state: Callable[[Tree, Tree, Flag], Tree]


Accumulation: TypeAlias = Callable[[Tree, Tree, Flag, Tree, ExtraArgs], Window]
"""A function `(grads, state, accepted, params, extra_args) -> window` that accumulates gradients.

If an outer guard skips the micro-batch, `accepted` is false and nothing is accumulated.
"""
