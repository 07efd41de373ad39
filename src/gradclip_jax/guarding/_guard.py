"""What all guards share: building one from its verdict. The executor is in `_execute.py`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._checks import check_axis_name, check_bound, check_count, check_transformation
from .._errors import type_error
from .._execute import gated
from .._gate import Guard, Verdict
from .._run_if import like_dtypes
from .._states import METRICS, find_states
from .._types import AxisName, Scalar, Tree
from ..accumulation._state import discard_windows

Judge = Callable[[Tree, Any, Tree, dict[str, Any]], Verdict]
"""`(updates, state, params, extra_args)` to the verdict."""


def guard(
    inner: optax.GradientTransformation,
    first: Callable[[Any], Any],
    judge: Judge,
    axes: AxisName,
    *,
    check_window: Callable[[Tree], Scalar] | None = None,
    checks_step: bool = False,
    max_consecutive_skips: int | None = None,
    incidents: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Builds a guard from its verdict and its checks, see `Guard`.

    `first` makes the first state from that of `inner`; `incidents` are kept in it.
    """
    kind = type(jax.eval_shape(lambda: first(())))

    def init(params: Tree) -> Any:
        inner_state = inner.init(params)
        # A loss scale that never sees the steps that overflow is never lowered.
        kinds = tuple(kind for kind, names in METRICS.items() if "loss_scale" in names)
        hint = "Put that one around this guard, which then sees unscaled gradients."
        _refuse_inner(inner_state, kinds, "dynamic_loss_scale", hint)
        if checks_step:
            # A window of it whose sum overflows stays so, and every step is refused.
            hint = (
                "Use `accumulate_gradients`: a guard can empty its window. Or guard its optimizer."
            )
            _refuse_inner(inner_state, optax.MultiStepsState, "optax.MultiSteps", hint)
        # Not weakly typed, as what comes out of a step is not: one trace for all steps.
        return first(like_dtypes(inner_state, inner_state))

    def checked(updates: Tree, state: Any, params: Tree, extra_args: dict[str, Any]) -> Verdict:
        check_bound(axes)
        return judge(updates, state, params, extra_args)

    limit = max_consecutive_skips
    if limit is not None:
        check_count("max_consecutive_skips", limit, "Pass None for no limit.")
    gate = Guard(kind, checked, limit, check_window, checks_step, discard_windows)
    return gated(gate, inner, init)


def check_guard(inner: Any, axis_name: Any) -> AxisName:
    """Refuses what is no transformation; returns the axes."""
    check_transformation("inner", inner)
    return check_axis_name(axis_name)


def zero(dtype: Any = jnp.int32) -> Scalar:
    """A call for each field: a buffer that two fields share cannot be donated."""
    return jnp.zeros((), dtype)


def _refuse_inner(inner_state: Any, kinds: Any, function: str, hint: str) -> None:
    if find_states(inner_state, kinds):
        rule = f"free of `{function}`"
        raise type_error("inner", rule, "a state of one", hint)
