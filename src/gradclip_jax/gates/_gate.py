"""Guards and accumulations, which decide whether their inner transformation runs."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

import optax

from .._run_if import Flag
from .._types import Count, Scalar, Tree

ExtraArgs: TypeAlias = dict[str, Any]
"""The extra arguments of `update` by name."""


class Step(NamedTuple):
    """A computed step of the innermost transformation.

    Attributes:
        grads: The gradient that the transformation received.
        updates: The computed updates.
        before: State of the transformation before the step.
        after: State of the transformation after the step.
        params: The parameters, or None.
    """

    grads: Tree
    updates: Tree
    before: Tree
    after: Tree
    params: Tree


class Guard(NamedTuple):
    """A guard, which skips steps that fail its checks.

    The checks return a bool[] that is equal on all devices. The executor updates the fields
    `grad_norm`, `consecutive_skips`, `guard_failed` and `inner_state` of the guard's state, and
    `advance` updates all others.

    Attributes:
        kind: Type of the guard's state.
        check: Function `(grads, state, params, extra_args) -> (passed, grads, observed)` that
            checks a gradient. It returns the gradient to pass on, and an `Observed`.
        advance: Function `(state, observed, skipped) -> state`, where `skipped` is whether the
            guard counts a skip. It is used if the guard counts a skip, or if all checks passed.
        check_window: Function `(grads, state, params, extra_args) -> passed` that checks the
            accumulated gradient of a window, for a guard outside an accumulation. None accepts all.
        check_step: Function `(step) -> passed` that checks a computed `Step`; None accepts all.
        max_consecutive_skips: Number of consecutive skips that sets `guard_failed`; None for no
            limit.
    """

    kind: type
    check: Callable[[Tree, Tree, Tree, ExtraArgs], tuple[Scalar, Tree, "Observed"]]
    advance: Callable[[Tree, Tree, Scalar], Tree]
    check_window: Callable[[Tree, Tree, Tree, ExtraArgs], Scalar] | None = None
    check_step: Callable[[Step], Scalar] | None = None
    max_consecutive_skips: Count | None = None


class Observed(NamedTuple):
    """What a guard observed in a gradient.

    Attributes:
        grad_norm: Norm of the gradient, float32[].
        details: Other arrays for `advance`.
    """

    grad_norm: Scalar
    details: Tree = ()


class Window(Protocol):
    """The accumulation window after the current micro-batch."""

    @property
    def emits(self) -> Flag:
        """Whether the window closes with a positive total weight."""
        ...

    @property
    def is_empty(self) -> Flag:
        """Whether the window closes without weight."""
        ...

    @property
    def extra_args(self) -> ExtraArgs:
        """Extra arguments for the transformation inside the accumulation."""
        ...

    def read(self, accumulator: Tree) -> tuple[Tree, Tree]:
        """Return the accumulated gradient and the next accumulator, which may share buffers."""
        ...

    def next_state(self, inner_state: Tree, accumulator: Tree, emitted: Flag) -> Tree:
        """Return the next state of the accumulation."""
        ...


class Accumulation(Protocol):
    """An accumulation, which runs its inner transformation once for each window."""

    def open(
        self, grads: Tree, state: Tree, accepted: Scalar | None, extra_args: ExtraArgs
    ) -> Window:
        """Add a micro-batch, unless an outer guard did not accept it; None without outer guards."""
        ...


def params_of(params: Tree) -> Tree:
    """Return the parameters that receive gradients; for `optax.lookahead` the fast ones."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params
