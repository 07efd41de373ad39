"""Guards and accumulations, which decide whether their inner transformation runs."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

import optax

from .._leaves import measured_leaves
from .._mask import Mask, zero_excluded
from .._run_if import Flag
from .._types import AxisName, Count, Scalar, Tree
from ..clipping._norm import norm_of_leaves

ExtraArgs: TypeAlias = dict[str, Any]
"""The extra arguments of `update` by name."""


class Gradient(NamedTuple):
    """A gradient that a guard checks.

    Attributes:
        tree: The gradient, with zeros for leaves outside the mask of the guard.
        norm: Norm of the gradient, float32[] or float64[].
        params: The parameters, or None.
        extra_args: Extra arguments of `update`.
    """

    tree: Tree
    norm: Scalar
    params: Tree
    extra_args: ExtraArgs


class Guard(NamedTuple):
    """A guard, which skips steps that fail its checks.

    The checks return a bool[] that is equal on all devices. The executor updates the fields
    `grad_norm`, `consecutive_skips`, `guard_failed` and `inner_state` of the guard's state, and
    `advance` updates all others.

    Attributes:
        function: Name of the public function in errors and profiles.
        kind: Type of the guard's state.
        check: Function `(gradient, state) -> (passed, observed)` that checks a `Gradient`;
            `observed` is a pytree for `advance`.
        advance: Function `(state, observed, skipped) -> state`, where `skipped` is whether the
            guard counts a skip. It is used if the guard counts a skip, or if all checks passed.
        fields: Function from the parameters to the fields of the initial state that are not 0.
        unscale: Function `(grads, state) -> grads` that is applied to gradients before the check.
        checks_window: Whether `check` is called again with the accumulated gradient of a window of
            an accumulation inside the guard.
        check_step: Function `(updates, before, after, params) -> passed` that checks the updates of
            a computed step and the states before and after it. None accepts all.
        ord: Order of the norm in `Gradient`.
        axis_name: Mapped axes over which the norm is computed.
        mask: Leaves to check. The other leaves reach the inner transformation as zeros.
        max_consecutive_skips: Number of consecutive skips that sets `guard_failed`; None for no
            limit.
    """

    function: str
    kind: type
    check: Callable[[Gradient, Tree], tuple[Scalar, Tree]]
    advance: Callable[[Tree, Tree, Scalar], Tree]
    fields: Callable[[Tree], dict[str, Tree]] = lambda params: {}
    unscale: Callable[[Tree, Tree], Tree] = lambda grads, state: grads
    checks_window: bool = False
    check_step: Callable[..., Scalar] | None = None
    ord: float = 2.0
    axis_name: AxisName = None
    mask: Mask = None
    max_consecutive_skips: Count | None = None

    def inspect(
        self, grads: Tree, state: Tree, params: Tree, extra_args: ExtraArgs, is_mean: bool = False
    ) -> tuple[Scalar, Gradient, Tree]:
        """Return whether a gradient passes the check, the gradient to pass on, and `observed`.

        With `is_mean`, `grads` is the gradient of a window, which is already unscaled.
        """
        grads = grads if is_mean else self.unscale(grads, state)
        grads = zero_excluded(self.mask, grads, params_of(params))
        norm = norm_of_leaves(measured_leaves(grads), self.ord, self.axis_name)
        gradient = Gradient(grads, norm, params, extra_args)
        passed, observed = self.check(gradient, state)
        return passed, gradient, observed


class Accumulation(Protocol):
    """An accumulation, which runs its inner transformation once for each window."""

    @property
    def function(self) -> str:
        """Name of the public function in errors and profiles."""
        ...

    def micro_step(
        self, grads: Tree, state: Tree, accepted: Flag | None, extra_args: ExtraArgs
    ) -> Any:
        """Return how a micro-batch changes its window, as a `MicroStep`.

        `accepted` is whether all outer guards accepted the micro-batch, None without outer guards.
        """
        ...


def params_of(params: Tree) -> Tree:
    """Return the parameters that receive gradients; for `optax.lookahead` the fast ones."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params
