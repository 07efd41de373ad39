"""What all guards share: how a guard is built from its verdict. `gates/` executes them."""

from collections.abc import Callable
from typing import Any, Final, Literal, TypeAlias

import jax
import jax.numpy as jnp
import optax

from .._checks import check_axis_name, check_count, check_transformation
from .._errors import type_error
from .._run_if import like_dtypes
from .._states import find_states
from .._types import AxisName, Scalar, Tree
from ..accumulation._state import discard_windows
from ..gates._execute import gated
from ..gates._gate import Guard, Verdict

Check: TypeAlias = Literal["gradient", "step"]
"""What has to be finite."""

OUTERMOST: Final[list[type]] = []
"""The states of guards that have to be outside all other guards."""


def guard(
    inner: optax.GradientTransformation,
    make_state: Callable[[Any], Any],
    judge: Callable[[Tree, Any, Tree, dict[str, Any]], Verdict],
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """Build a guard from its verdict; `make_state` maps the state of `inner` to that of the guard.

    `options` are fields of `Guard`.
    """
    limit = options.get("max_consecutive_skips")
    if limit is not None:
        check_count("max_consecutive_skips", limit, "Pass None for no limit.")
    kind = type(jax.eval_shape(lambda: make_state(())))

    def init(params: Tree) -> Any:
        inner_state = inner.init(params)
        # A loss scale that does not see the steps that overflow is never lowered.
        hint = "Put that one around this guard, which then sees unscaled gradients."
        _check_inner(inner_state, tuple(OUTERMOST), "dynamic_loss_scale", hint)
        if options.get("checks_step"):
            # If the sum of its window overflows, every later step fails the check.
            hint = "Use `accumulate_gradients`, whose window can be discarded."
            _check_inner(inner_state, (optax.MultiStepsState,), "optax.MultiSteps", hint)
        # Without weak types, like the states that updates return: one trace for all steps.
        return make_state(like_dtypes(inner_state, inner_state))

    return gated(Guard(kind, judge, discard=discard_windows, **options), inner, init)


def check_guard(inner: Any, axis_name: Any) -> AxisName:
    """Raise if `inner` is not a gradient transformation; return the axes."""
    check_transformation("inner", inner)
    return check_axis_name(axis_name)


def zero(dtype: Any = jnp.int32) -> Scalar:
    """A scalar in a new buffer: a buffer that two fields share cannot be donated."""
    return jnp.zeros((), dtype)


def _check_inner(inner_state: Any, kinds: tuple[type, ...], function: str, hint: str) -> None:
    if find_states(inner_state, kinds):
        raise type_error("inner", f"free of `{function}`", "one that contains it", hint)
