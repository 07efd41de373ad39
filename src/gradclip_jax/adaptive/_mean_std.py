"""Threshold rule: mean plus standard deviations of the last norms (OLMo-core, levanter)."""

from typing import Any

import jax
import jax.numpy as jnp

from .._checks import check_count, check_length, check_number
from .._types import UNBOUNDED, Array, Count, Number
from ..clipping._threshold import Rule
from ._history import WindowState, empty_window, is_recorded, record


def mean_std(
    z_threshold: Number = 6.0,
    window: Count = 128,
    warmup_steps: int = 64,
    *,
    ddof: int = 0,
    signed: bool = False,
) -> Rule:
    """A threshold `z_threshold` standard deviations above the mean of the last norms.

    The current norm is not part of the mean. Norms above the threshold enter the history as they
    are, so a lasting rise is learned at once; but the first spike of a series hides smaller ones.
    OLMo-core and levanter skip steps by this rule.

    | step | threshold |
    | --- | --- |
    | the first `warmup_steps` | none |
    | constant norms | above the norm: the deviation counts as at least 1 % of the mean |
    | constant values, `signed` | the value: no floor beyond rounding |
    | a norm of zero | not recorded, unless `signed` |

    Args:
        z_threshold: in standard deviations, > 0.
        window: how many values are kept, 1 to 2^20, static.
        warmup_steps: how many values are recorded before the first threshold, >= 1.
        ddof: 0 for the population variance (levanter), 1 for the sample variance (OLMo-core).
        signed: the values may be zero or negative, such as losses.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> clip = gcx.clip_by_global_norm(gcx.thresholds.mean_std(2.0, warmup_steps=2))
        >>> state = clip.init(jnp.zeros(1))
        >>> for norm in (1.0, 3.0, 9.0):
        ...     updates, state = clip.update(jnp.array([norm]), state)
        >>> updates.tolist()  # 2 + 2 * 1
        [4.0]
    """
    name = "mean_std"
    check_number(name, "z_threshold", z_threshold, "Both projects use 6.")
    check_length(name, "window", window)
    check_count(name, "warmup_steps", warmup_steps, "levanter uses half the window.")
    check_count(name, "ddof", ddof, "Pass 0 or 1.", low=0)

    def init(norm: Array) -> WindowState:
        return empty_window(norm, int(window))

    def update(norm: Array, state: WindowState, param_norm: Any) -> tuple[Array, WindowState]:
        recorded = is_recorded(state)
        n = jnp.clip(state.value_count, 1, window).astype(jnp.float32)
        values = jnp.where(recorded, state.values, 0)
        # In units of the largest value, so that squares cannot overflow.
        largest = jax.lax.stop_gradient(jnp.max(jnp.abs(values), axis=0))
        unit = jnp.where(largest > 0, largest, 1)
        values = values / unit[None]
        mean = jnp.sum(values / n[None], axis=0)
        deviations = jnp.where(recorded, values - mean[None], 0)
        variance = jnp.sum(deviations**2 / jnp.maximum(n - ddof, 1)[None], axis=0)
        # Without a floor a constant norm would be its own threshold.
        floor = 1e-6 if signed else jnp.maximum(0.01 * mean, 1e-6)
        std = jnp.sqrt(jnp.maximum(variance, floor**2))
        threshold = unit * (mean + z_threshold * std)
        is_warm = state.value_count >= warmup_steps
        return jnp.where(is_warm, threshold, UNBOUNDED), record(state, norm, signed=signed)

    return Rule(init, update, signed=signed)
