"""Gates, which decide whether the transformation inside them takes its step."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from ._types import Array, Scalar, Tree

Flag: TypeAlias = Array | bool
"""bool[], or a Python bool: then the program is compiled for that case alone."""


class ComputedStep(NamedTuple):
    """A step of the innermost transformation that is not yet taken.

    Attributes:
        grads: the gradients.
        inner_state: its state before.
        updates: its update.
        next_inner_state: its state after.
    """

    grads: Tree
    inner_state: Any
    updates: Tree
    next_inner_state: Any


class Verdict(NamedTuple):
    """The judgement of a guard on a gradient.

    Attributes:
        is_good: bool[], alike on all devices.
        grads: the gradient as it is passed on.
        own_fields: from whether the guard refuses this call, bool[], and what its check measured,
            float32[], to its state, its own fields brought up to date.
        check_step: from a computed step to whether it may be taken, bool[], and what was measured
            of it, float32[]. Asked if the guard `checks_step`.
    """

    is_good: Scalar
    grads: Tree
    own_fields: Callable[[Scalar, Scalar], Any]
    check_step: Callable[[ComputedStep], tuple[Scalar, Scalar]]


class Guard(NamedTuple):
    """A gate that refuses bad steps.

    Its state has the fields `consecutive_skips`, `guard_failed` and `inner_state`, which the
    executor keeps, `incidents`, and its own.

    Attributes:
        kind: of its state.
        judge: `(grads, state, params, extra_args)` to the verdict.
        max_consecutive_skips: after so many the guard has failed; None for no limit.
        check_window: whether the gradient of a window may be stepped on, bool[]; it is asked by a
            guard around an accumulation, which has judged micro-batches only. None does not ask.
        checks_step: whether its verdict looks at the computed step as well.
        drop: from the innermost state and whether its step was refused by a check to that state
            with no window of which such a step could come again.
    """

    kind: type
    judge: Callable[[Tree, Any, Tree, dict[str, Any]], Verdict]
    max_consecutive_skips: Any
    check_window: Callable[[Tree], Scalar] | None = None
    checks_step: bool = False
    drop: Callable[[Any, Scalar], Any] = lambda state, refused: state
    name: str = ""


class Judged(NamedTuple):
    """The verdicts of guards on a gradient.

    Attributes:
        entries: `(guard, state, verdict, refuses)` of each.
        grads: the gradient that they pass on.
        state: the state inside the last.
        accepted: whether none refuses.
    """

    entries: list[tuple[Guard, Any, Verdict, Scalar]]
    grads: Tree
    state: Any
    accepted: Flag


class Window(NamedTuple):
    """What an accumulation does with a micro-batch.

    Attributes:
        emits: whether the window closes with something in it.
        accumulator: what its gradient is read from, in buffers that may be overwritten.
        read: makes from it the gradient, and the next accumulator: the gradient itself, if that
            can take its buffers.
        inner_state: the state of what is inside.
        extra_args: its extra arguments.
        next_state: `(inner_state, accumulator, emitted)` to the state of the accumulation.
    """

    emits: Flag
    accumulator: Tree
    read: Callable[[Tree], tuple[Tree, Tree]]
    inner_state: Any
    extra_args: dict[str, Any]
    next_state: Callable[[Any, Tree, Flag], Any]


class Accumulation(NamedTuple):
    """A gate that opens once for several micro-batches.

    Attributes:
        kind: of its state.
        open_window: `(judged, params, extra_args, is_measured)` to the window. A micro-batch that
            is not accepted is left out; `is_measured` says that the gradient of the window is
            read before the step.
    """

    kind: type
    open_window: Callable[[Judged, Tree, dict[str, Any], bool], Window]
    name: str = ""


def flag_and(a: Flag, b: Flag) -> Any:
    """Whether both hold: a bool if one of them is known and decides."""
    if isinstance(a, bool):
        return b if a else False
    return flag_and(b, a) if isinstance(b, bool) else a & b


def flag_or(a: Flag, b: Flag) -> Any:
    """Whether one of them holds: a bool if one of them is known and decides."""
    if isinstance(a, bool):
        return True if a else b
    return flag_or(b, a) if isinstance(b, bool) else a | b


def flag_not(a: Flag) -> Any:
    """Whether it does not hold."""
    return not a if isinstance(a, bool) else ~a
