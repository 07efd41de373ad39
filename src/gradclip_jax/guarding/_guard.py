"""Construction of guards. `gates/` executes them."""

from typing import Literal, TypeAlias

import jax.numpy as jnp
import optax

from .._checks import check_count, check_transformation
from .._errors import type_error, value_error
from .._mask import check_mask
from .._run_if import like_dtypes
from .._states import find_role, find_states
from .._types import AxisName, Tree
from ..gates._execute import gated
from ..gates._gate import Guard, params_of

Check: TypeAlias = Literal["gradient", "step"]
"""Whether a guard checks only the gradient, or the computed step as well."""


def guarded(
    inner: optax.GradientTransformation, guard: Guard
) -> optax.GradientTransformationExtraArgs:
    """Wrap a transformation in a guard."""
    if guard.max_consecutive_skips is not None:
        check_count("max_consecutive_skips", guard.max_consecutive_skips, "Pass None for no limit.")
    check_mask(guard.mask)

    def init(inner_state: Tree, params: Tree) -> Tree:
        _check_inner(inner_state, checks_step=guard.check_step is not None)
        # Each field has its own buffer, because a shared one cannot be donated.
        zeros = {name: jnp.zeros((), jnp.int32) for name in guard.kind._fields}
        zeros |= {"grad_norm": jnp.zeros((), jnp.float32)} | guard.fields(params_of(params))
        # Remove weak types, which `update` does not return, to avoid retracing the second step.
        return guard.kind(**zeros | {"inner_state": like_dtypes(inner_state, inner_state)})

    return gated(guard, inner, init)


def check_guard(inner: object, axis_name: AxisName) -> AxisName:
    """Raise if `inner` is not a gradient transformation; return the axes."""
    check_transformation("inner", inner)
    if axis_name == ():
        rule = "None or the names of mapped axes, because all devices must decide alike"
        raise value_error("axis_name", rule, "()", "Pass the axes over which leaves are sharded.")
    return axis_name


def _check_inner(inner_state: Tree, *, checks_step: bool) -> None:
    """Raise if a guard must not be outside of a transformation with this state."""
    part, hint = "", ""
    if find_role(inner_state, "loss scale"):
        # If an outer guard skipped steps that overflow, the loss scale would never decrease.
        part = "`dynamic_loss_scale`"
        hint = "Use `dynamic_loss_scale` outside this guard, so that it checks unscaled gradients."
    elif checks_step and find_states(inner_state, optax.MultiStepsState):
        # Once the gradient sum in `MultiSteps` overflows, all later steps fail the check.
        part, hint = "`optax.MultiSteps`", "Use `accumulate_gradients` instead."
    elif any(find_role(x, "accumulation") for _, x in find_role(inner_state, "watch")):
        # The guard would not see the windows of the accumulation.
        part = "`watch` around an accumulation"
        hint = "Place `watch` around all guards, or inside the accumulation."
    if part:
        rule = f"a transformation that does not contain {part}"
        raise type_error("inner", rule, "one that contains it", hint)
