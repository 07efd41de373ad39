"""Construction of guards. `gates/` executes them."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from .._checks import check_axis_name, check_count, check_transformation
from .._errors import named, type_error, value_error
from .._mask import Mask, check_mask, zero_excluded
from .._mesh import check_bound
from .._run_if import like_dtypes
from .._states import find_role, find_states
from .._types import AxisName, Scalar, Tree
from ..gates._execute import gated
from ..gates._gate import ExtraArgs, Guard, Observed, params_of

Check: TypeAlias = Literal["gradient", "step"]
"""Whether a guard checks only the gradient, or the computed step as well."""


def guard(
    function: str,
    inner: optax.GradientTransformation,
    gate: Guard,
    fields: Callable[[Tree], Mapping[str, Any]],
    *,
    mask: Mask,
    axis_name: AxisName,
) -> optax.GradientTransformationExtraArgs:
    """Wrap a transformation in a guard.

    Args:
        function: Name of the public function in errors.
        inner: Gradient transformation.
        gate: The guard, whose checks receive gradients with zeros for leaves outside the mask.
        fields: Function from the parameters to the fields of the initial state that only this guard
            has.
        mask: Leaves to check.
        axis_name: Mapped axes that the checks use.
    """
    if gate.max_consecutive_skips is not None:
        check_count("max_consecutive_skips", gate.max_consecutive_skips, "Pass None for no limit.")
    check_mask(mask)
    check_grads = gate.check

    def init(inner_state: Tree, params: Tree) -> Tree:
        _check_inner(inner_state, checks_step=gate.check_step is not None)
        common = {"grad_norm": zero(jnp.float32), "consecutive_skips": zero()}
        common |= {"guard_failed": zero(), **fields(params_of(params))}
        # Remove weak types, which `update` does not return, to avoid retracing the second step.
        return gate.kind(**common, inner_state=like_dtypes(inner_state, inner_state))

    def check(
        grads: Tree, state: Tree, params: Tree, extra_args: ExtraArgs
    ) -> tuple[Scalar, Tree, Observed]:
        check_bound(axis_name)
        grads = grads if mask is None else zero_excluded(mask, grads, params_of(params))
        return check_grads(grads, state, params, extra_args)

    check_window = gate.check_window and named(gate.check_window, function)
    gate = gate._replace(check=named(check, function), check_window=check_window)
    return gated(gate, inner, init)


def check_guard(inner: object, axis_name: AxisName) -> AxisName:
    """Raise if `inner` is not a gradient transformation; return the axes."""
    check_transformation("inner", inner)
    axes = check_axis_name(axis_name)
    if axes == ():
        rule = "None or the names of mapped axes, because all devices must decide alike"
        raise value_error("axis_name", rule, "()", "Pass the axes over which leaves are sharded.")
    return axes


def zero(dtype: DTypeLike = jnp.int32) -> Scalar:
    """Return a scalar in a new buffer, because a buffer shared by two fields cannot be donated."""
    return jnp.zeros((), dtype)


def _check_inner(inner_state: Tree, *, checks_step: bool) -> None:
    """Raise if a guard must not be outside of a transformation with this state."""
    if find_role(inner_state, "loss scale"):
        # If an outer guard skipped steps that overflow, the loss scale would never decrease.
        hint = "Use `dynamic_loss_scale` outside this guard, so that it checks unscaled gradients."
        raise _contains("`dynamic_loss_scale`", hint)
    if checks_step and find_states(inner_state, optax.MultiStepsState):
        # Once the gradient sum in `MultiSteps` overflows, all later steps fail the check.
        raise _contains("`optax.MultiSteps`", "Use `accumulate_gradients` instead.")
    if any(find_role(x, "accumulation") for _, x in find_role(inner_state, "watch")):
        # The guard would not see the windows of the accumulation.
        hint = "Place `watch` around all guards, or inside the accumulation."
        raise _contains("`watch` around an accumulation", hint)


def _contains(part: str, hint: str) -> Exception:
    rule = f"a transformation that does not contain {part}"
    return type_error("inner", rule, "one that contains it", hint)
