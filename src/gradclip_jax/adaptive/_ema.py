"""Threshold rule: a multiple of the exponential moving average of the clipped norms (AdaGC)."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from .._checks import check_count, check_decays, check_number
from .._states import increment_where
from .._types import UNBOUNDED, Array, Number
from ..clipping._threshold import Rule


class EmaState(NamedTuple):
    """The average norm of each unit.

    Attributes:
        step_count: int32[...], steps so far, saturating.
        average: float32[...], of the clipped norms; 0 before the first norm above 0.
    """

    step_count: Array
    average: Array


def ema(
    factor: Number = 1.05,
    decay: Number = 0.98,
    warmup_steps: int = 100,
    warmup_max: Number = 1.0,
) -> Rule:
    """A threshold of `factor` times the exponential moving average of the clipped norms.

    `average = decay * average + (1 - decay) * min(norm, threshold)`. For norms only: it has no
    meaning for values that may be negative.

    | step | threshold and average |
    | --- | --- |
    | the first `warmup_steps` | `warmup_max`; the average is the smallest clipped norm |
    | no norm above zero so far | none; the first such norm is the average |
    | a norm of zero | leaves the average as it was; the step counts as warm-up |
    | a lasting rise | rises by 0.1 % a step with the defaults, as published |

    Args:
        factor: how far above the average a norm may be, dimensionless, > 0.
        decay: of the average, at least 0 and below 1.
        warmup_steps: >= 1.
        warmup_max: threshold during the warm-up, in the unit of the norm, > 0; inf for none.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> rule = gcx.thresholds.ema(2.0, warmup_steps=1, warmup_max=jnp.inf)
        >>> clip = gcx.clip_by_global_norm(rule)
        >>> state = clip.init(jnp.zeros(1))
        >>> for norm in (1.0, 9.0):
        ...     updates, state = clip.update(jnp.array([norm]), state)
        >>> updates.tolist()
        [2.0]

    References:
        Wang et al., 2025, arXiv 2502.11034.
    """
    name = "ema"
    check_number(name, "factor", factor, "The paper uses 1.05.")
    check_decays(name, decay=decay)
    check_count(name, "warmup_steps", warmup_steps, "The paper uses 100.")
    check_number(name, "warmup_max", warmup_max, "Pass inf not to clip during the warm-up.")

    def init(norm: Array) -> EmaState:
        return EmaState(jnp.zeros(norm.shape, jnp.int32), jnp.zeros_like(norm))

    def update(norm: Array, state: EmaState, param_norm: Any) -> tuple[Array, EmaState]:
        is_warm = state.step_count >= warmup_steps
        has_average = state.average > 0
        bound = jnp.where(has_average, factor * state.average, UNBOUNDED)
        threshold = jnp.where(is_warm, bound, jnp.minimum(warmup_max, UNBOUNDED))
        clipped = jnp.minimum(norm, threshold)
        moving = decay * state.average + (1 - decay) * clipped
        average = jnp.where(is_warm, moving, jnp.minimum(state.average, clipped))
        average = jnp.where(has_average, average, clipped)
        average = jnp.where(norm > 0, average, state.average)
        return threshold, EmaState(increment_where(state.step_count), average)

    return Rule(init, update)
