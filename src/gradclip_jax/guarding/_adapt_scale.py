"""When a loss scale grows and when it shrinks."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from .._checks import check_count, check_number, error_message, is_traced
from .._states import increment_where
from .._types import Scalar

# Beyond these 1 / scale is no normal number, and a compiled program may take it for zero.
_SMALLEST, _LARGEST = 2.0**-126, 2.0**126


class ScaleRule(NamedTuple):
    """The numbers of `dynamic_loss_scale`, traced or not; not in its state."""

    init_scale: Any
    growth_factor: Any
    backoff_factor: Any
    growth_interval: Any
    min_scale: Any
    max_scale: Any


def check_scale_rule(function: str, rule: ScaleRule) -> None:
    """Refuses numbers out of range."""
    bounds = ("init_scale", "min_scale", "max_scale")
    for argument in bounds:
        value, hint = getattr(rule, argument), "Pass a power of two."
        check_number(function, argument, value, hint, low=_SMALLEST, high=_LARGEST, closed=True)
    check_number(function, "growth_factor", rule.growth_factor, "Pass for example 2.0.", low=1.0)
    factor, hint = rule.backoff_factor, "Pass for example 0.5."
    check_number(function, "backoff_factor", factor, hint, high=1.0, below_high=True)
    hint = "Pass the number of good steps."
    check_count(function, "growth_interval", rule.growth_interval, hint)
    known = [getattr(rule, argument) for argument in bounds]
    if any(map(is_traced, known)):
        return
    first, smallest, largest = map(float, known)
    if not smallest <= first <= largest:
        words = f"between `min_scale` and `max_scale`, {smallest:g} and {largest:g}"
        hint = "Move the bounds, or start within them."
        raise ValueError(error_message(function, "init_scale", words, f"{first:g}", hint))


def adapted_scale(
    scale: Scalar, good_steps: Scalar, skipped: Scalar, rule: ScaleRule
) -> tuple[Scalar, Scalar, Scalar]:
    """The next scale and count of good steps, and whether a step failed at the smallest scale."""
    growth, backoff, smallest, largest = (
        jnp.asarray(x, jnp.float32)
        for x in (rule.growth_factor, rule.backoff_factor, rule.min_scale, rule.max_scale)
    )
    good_steps = jnp.where(skipped, 0, increment_where(good_steps))
    grows = good_steps >= rule.growth_interval
    factor = jnp.where(skipped, backoff, jnp.where(grows, growth, 1))
    failed = skipped & (scale <= smallest)
    return jnp.clip(scale * factor, smallest, largest), jnp.where(grows, 0, good_steps), failed
