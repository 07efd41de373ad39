"""Gates: guards and accumulations, which decide whether the transformation inside them runs."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from .._types import Array, Scalar, Tree

Flag: TypeAlias = Array | np.bool_
"""bool[]; a NumPy bool is known when the step is traced: no branch is compiled for it."""


class ComputedStep(NamedTuple):
    """A step of the innermost transformation that has been computed, but not applied.

    Attributes:
        grads: the gradients.
        inner_state: the state before the step.
        updates: the updates.
        next_inner_state: the state after the step.
    """

    grads: Tree
    inner_state: Tree
    updates: Tree
    next_inner_state: Tree


class Verdict(NamedTuple):
    """The result of a guard's check of a gradient.

    Attributes:
        is_good: bool[], equal on all devices.
        grads: the gradient that the guard passes on.
        next_state: `(refused, failed, measured)` to the guard's state with its own fields updated:
            whether the guard refused this gradient, bool[], whether a later check of the guard
            failed, bool[], and what that check measured.
        check_step: a computed step to whether it may be applied, bool[], and what was measured;
            required if the guard `checks_step`.
    """

    is_good: Scalar
    grads: Tree
    next_state: Callable[[Scalar, Scalar, Tree], Any]
    check_step: Callable[[ComputedStep], tuple[Scalar, Tree]] | None = None


class Guard(NamedTuple):
    """A gate that skips bad steps.

    The executor maintains the fields `consecutive_skips`, `guard_failed` and `inner_state` of its
    state; all others are updated by `Verdict.next_state`.

    Attributes:
        kind: the type of its state.
        judge: `(grads, state, params, extra_args)` to the verdict.
        max_consecutive_skips: number of skips in a row that sets `guard_failed`; None for no limit.
        check_window: whether the optimizer may step on the gradient of a window, bool[]. Used by a
            guard around an accumulation, whose `judge` only gets micro-batches. None accepts all.
        checks_step: whether the guard also checks the computed step.
        unmeasured: what `check_step` measures, for a step that is not computed.
        discard: `(state, where)` to the innermost state without open windows. A window whose sum
            overflows would otherwise make every later step fail the check of steps.
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
        emits: whether the window closes and contains a micro-batch with a weight.
        accumulator: the buffers that `read` needs; the step may overwrite them.
        read: accumulator to the gradient of the window and the accumulator after the step.
        inner_state: the state of the transformation inside the accumulation.
        extra_args: the extra arguments for the transformation inside the accumulation.
        next_state: `(inner_state, accumulator, emitted)` to the state of the accumulation.
    """

    emits: Flag
    accumulator: Tree
    read: Callable[[Tree], tuple[Tree, Tree]]
    inner_state: Any
    extra_args: dict[str, Any]
    next_state: Callable[[Any, Tree, Flag], Any]


class Accumulation(NamedTuple):
    """A gate that runs the transformation inside it once for several micro-batches.

    Attributes:
        kind: the type of its state.
        open_window: `(grads, state, accepted, params, extra_args)` to the window. A micro-batch
            that is not accepted by the guards around the accumulation is not accumulated.
    """

    kind: type
    open_window: Callable[[Tree, Any, Flag, Tree, dict[str, Any]], Window]
