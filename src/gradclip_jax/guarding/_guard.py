"""Construction of guards from a function that checks gradients. `gates/` executes them."""

from collections.abc import Callable
from typing import Final, Literal, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from .._checks import check_axis_name, check_count, check_transformation
from .._errors import type_error
from .._run_if import like_dtypes
from .._states import find_states
from .._types import AxisName, Count, Scalar, Tree
from ..accumulation._state import discard_windows
from ..gates._execute import gated
from ..gates._gate import ExtraArgs, Guard, Verdict

Check: TypeAlias = Literal["gradient", "step"]
"""Whether a guard checks only the gradient, or the computed step as well."""

OUTERMOST: Final[list[type]] = []
"""State types of guards that must be the outermost guard."""


def guard(
    inner: optax.GradientTransformation,
    make_state: Callable[[Tree], Tree],
    judge: Callable[[Tree, Tree, Tree, ExtraArgs], Verdict],
    *,
    max_consecutive_skips: Count | None = None,
    checks_step: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Build a guard from a function `judge` that checks each gradient.

    `make_state` maps the state of `inner` to the state of the guard. `checks_step` is whether the
    guard also checks the computed step. The other arguments are fields of `Guard`.
    """
    if max_consecutive_skips is not None:
        check_count("max_consecutive_skips", max_consecutive_skips, "Pass None for no limit.")
    kind = type(jax.eval_shape(lambda: make_state(())))

    def init(params: Tree) -> Tree:
        inner_state = inner.init(params)
        # If an outer guard skipped steps that overflow, the loss scale would never decrease.
        hint = "Use `dynamic_loss_scale` outside this guard, so that it checks unscaled gradients."
        _check_inner(inner_state, tuple(OUTERMOST), "dynamic_loss_scale", hint)
        if checks_step:
            # Once the gradient sum in `MultiSteps` overflows, all later steps fail the check.
            hint = "Use `accumulate_gradients` instead."
            _check_inner(inner_state, (optax.MultiStepsState,), "optax.MultiSteps", hint)
        # Remove weak types, which `update` does not return, to avoid retracing the second step.
        return make_state(like_dtypes(inner_state, inner_state))

    gate = Guard(kind, judge, discard_windows, max_consecutive_skips)
    return gated(gate, inner, init)


def check_guard(inner: object, axis_name: AxisName) -> AxisName:
    """Raise if `inner` is not a gradient transformation; return the axes."""
    check_transformation("inner", inner)
    return check_axis_name(axis_name)


def zero(dtype: DTypeLike = jnp.int32) -> Scalar:
    """Return a scalar in a new buffer, because a buffer shared by two fields cannot be donated."""
    return jnp.zeros((), dtype)


def _check_inner(inner_state: Tree, kinds: tuple[type, ...], function: str, hint: str) -> None:
    if find_states(inner_state, kinds):
        rule = f"a transformation that does not contain `{function}`"
        raise type_error("inner", rule, "one that contains it", hint)
