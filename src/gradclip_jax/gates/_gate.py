"""Guards and accumulations, which decide whether their inner transformation runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax.numpy as jnp
import optax

from .._checks import check_count, check_transformation
from .._errors import type_error, value_error
from .._run_if import Flag, like_dtypes
from .._states import find_role
from .._types import AxisName, Count, Scalar, Tree
from ..norms._leaves import measured_leaves
from ..norms._mask import Mask, check_mask, zero_excluded
from ..norms._norm import norm_of_leaves

ExtraArgs: TypeAlias = dict[str, Any]
"""The extra arguments of `update` by name."""


class Guard(NamedTuple):
    """A guard, which skips steps that fail its checks.

    The checks return a bool[] that is equal on all devices. The executor updates the fields
    `grad_norm`, `consecutive_skips`, `guard_failed` and `inner_state` of the guard's state, and
    `advance` updates all others.

    Attributes:
        function: Name of the public function in errors and profiles.
        kind: Type of the guard's state.
        check: Function `(call, norm) -> (accepted, observed)`. The gradient in the `Call` has zeros
            outside the mask, `norm` is its norm, and `observed` is a pytree for `advance`.
        advance: Function `(state, observed, skipped) -> state`, where `skipped` is whether the
            guard counts a skip. It is used if the guard counts a skip, or if all guards accept.
        fields: Function from the parameters to the fields of the initial state that are not 0.
        unscale: Function `(grads, state) -> grads` that is applied to gradients before the check.
        checks_window: Whether `check` is called again with the accumulated gradient of a window of
            an accumulation inside the guard.
        check_step: Function `(updates, before, after, params) -> accepted` that checks the updates
            of a computed step and the states before and after it. None accepts all.
        axis_name: Mapped axes over which the norm is computed.
        mask: Leaves to check. The other leaves reach the inner transformation as zeros.
        max_consecutive_skips: Number of consecutive skips that sets `guard_failed`; None for no
            limit.
    """

    function: str
    kind: type
    check: Callable[..., tuple[Scalar, Tree]]
    advance: Callable[[Tree, Tree, Scalar], Tree]
    fields: Callable[[Tree], dict[str, Tree]] = lambda params: {}
    unscale: Callable[[Tree, Tree], Tree] = lambda grads, state: grads
    checks_window: bool = False
    check_step: Callable[..., Scalar] | None = None
    axis_name: AxisName = None
    mask: Mask = None
    max_consecutive_skips: Count | None = None

    def init(self, inner_state: Tree, params: Tree) -> Tree:
        """Return the initial state of the guard."""
        _check_inner(inner_state)
        # Each field has its own buffer, because a shared one cannot be donated.
        zeros = {name: jnp.zeros((), jnp.int32) for name in self.kind._fields}
        zeros |= {"grad_norm": jnp.zeros((), jnp.float32)} | self.fields(params_of(params))
        # Remove weak types, which `update` does not return, to avoid retracing the second step.
        return self.kind(**zeros | {"inner_state": like_dtypes(inner_state, inner_state)})

    def inspect(self, call: Call) -> tuple[Scalar, Tree, Scalar, Tree]:
        """Mask and check an unscaled gradient; return `(accepted, grads, norm, observed)`."""
        grads = zero_excluded(self.mask, call.grads, params_of(call.params))
        norm = norm_of_leaves(measured_leaves(grads), 2.0, self.axis_name)
        accepted, observed = self.check(call._replace(grads=grads), norm)
        return accepted, grads, norm, observed


def check_guard(
    inner: object, axis_name: AxisName, mask: Mask, max_consecutive_skips: Count | None = None
) -> None:
    """Check the arguments of a guard or of `watch`."""
    check_transformation("inner", inner)
    if axis_name == ():
        rule = "None or the names of mapped axes, because all devices must decide alike"
        raise value_error("axis_name", rule, "()", "Pass the axes over which leaves are sharded.")
    if max_consecutive_skips is not None:
        check_count("max_consecutive_skips", max_consecutive_skips, "Pass None for no limit.")
    check_mask(mask)


def _check_inner(inner_state: Tree) -> None:
    """Raise if a guard must not be outside of a transformation with this state."""
    if find_role(inner_state, "loss scale"):
        # If an outer guard skipped steps that overflow, the loss scale would never decrease.
        rule = "a transformation without `dynamic_loss_scale`"
        hint = "Use `dynamic_loss_scale` outside this guard, so that it checks unscaled gradients."
        raise type_error("inner", rule, "one that contains it", hint)
    if any(find_role(x, "accumulation") for _, x in find_role(inner_state, "watch")):
        # The guard would not see the windows of the accumulation.
        rule = "a transformation without `watch` around an accumulation"
        hint = "Place `watch` around all guards, or inside the accumulation."
        raise type_error("inner", rule, "one that contains it", hint)


class AccumulationGate(Protocol):
    """An accumulation, which runs its inner transformation once for each window."""

    @property
    def function(self) -> str:
        """Name of the public function in errors and profiles."""
        ...

    def init(self, inner_state: Tree, params: Tree) -> Tree:
        """Return the initial state of the accumulation."""

    def micro_step(
        self, grads: Tree, state: Tree, accepted: Flag | None, extra_args: ExtraArgs
    ) -> Any:
        """Return how a micro-batch changes its window, as a `MicroStep`.

        `accepted` is whether all outer guards accepted the micro-batch, None without outer guards.
        """


class Call(NamedTuple):
    """One call of `update` or `apply_gradients`, as a guard or accumulation receives it.

    Attributes:
        innermost: Transformation inside all guards and the accumulation.
        gates: All guards and the accumulation, from the outermost to the innermost.
        incoming: The gradient that the outermost gate received.
        params: The parameters, or None.
        target: Parameters to which the updates are added, or None if the caller needs the updates.
        grads: The gradient that the gate around this one passes on.
        state: State of the gate.
        extra_args: Extra arguments of `update`.
        is_weighted: Whether the weight of the micro-batch is not 0.
        accepted: Whether all guards around the gate accepted the gradient.
        outer: `(index, guard, state)` of each guard around the gate.
    """

    innermost: optax.GradientTransformationExtraArgs
    gates: tuple[Guard | AccumulationGate, ...]
    incoming: Tree
    params: Tree
    target: Tree
    grads: Tree
    state: Tree
    extra_args: ExtraArgs
    is_weighted: Flag
    accepted: Flag = True
    outer: tuple[tuple[int, Guard, Tree], ...] = ()


def params_of(params: Tree) -> Tree:
    """Return the parameters that receive gradients; for `optax.lookahead` the fast ones."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params
