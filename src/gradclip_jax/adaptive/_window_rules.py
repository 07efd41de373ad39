"""Threshold rules over a window of the last norms: AutoClip; OLMo-core and levanter."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._checks import check_count, check_length, check_number
from .._states import increment_where
from .._types import UNBOUNDED, Array, Count, Number
from ..clipping._threshold import Rule
from ._averages import where_nonzero


class WindowState(NamedTuple):
    """A ring buffer of the last values of each unit.

    Attributes:
        values: float32[window, ...]; UNBOUNDED where nothing is recorded yet.
        value_count: int32[...], values recorded so far, saturating.
        position: int32[...], where the next value goes.
    """

    values: Array
    value_count: Array
    position: Array


def empty_window(norm: Array, window: int) -> WindowState:
    """The state before the first value."""
    zero = jnp.zeros(norm.shape, jnp.int32)
    return WindowState(jnp.full((window, *norm.shape), UNBOUNDED, jnp.float32), zero, zero)


def record(state: WindowState, value: Array, *, signed: bool) -> WindowState:
    """Replaces the oldest value of each unit by the new one."""
    window = state.values.shape[0]
    next_state = WindowState(
        values=jnp.where(_positions(state) == state.position[None], value[None], state.values),
        value_count=increment_where(state.value_count),
        position=jnp.where(state.position < window - 1, state.position + 1, 0),
    )
    return next_state if signed else where_nonzero(value, next_state, state)


def _positions(state: WindowState) -> Array:
    return jnp.arange(state.values.shape[0], dtype=jnp.int32).reshape(
        -1, *(1,) * state.value_count.ndim
    )


def percentile(percentile: Number = 10.0, window: Count = 1000, *, signed: bool = False) -> Rule:
    """A threshold at a percentile of the last norms, the current one included.

    | step | threshold |
    | --- | --- |
    | the first | the norm itself: not clipped |
    | fewer steps than `window` | of all norms so far, as published |
    | a norm of zero | not recorded, unless `signed` |

    Each step sorts the window of each unit.

    Args:
        percentile: 0 to 100, linearly interpolated as in `numpy.percentile`.
        window: how many values are kept, 1 to 2^20, static; 4 * window bytes for each unit.
        signed: the values may be zero or negative, such as losses.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> clip = gcx.clip_by_global_norm(gcx.thresholds.percentile(50.0, window=3))
        >>> state = clip.init(jnp.zeros(1))
        >>> for norm in (1.0, 2.0, 9.0):
        ...     updates, state = clip.update(jnp.array([norm]), state)
        >>> updates.tolist()
        [2.0]

    References:
        Seetharaman, Wichern, Pardo and Le Roux, 2020, arXiv 2007.14469.
    """
    name = "percentile"
    check_number(name, "percentile", percentile, "The paper uses 10.", high=100.0, closed=True)
    check_length(name, "window", window)

    def init(norm: Array) -> WindowState:
        return empty_window(norm, int(window))

    def update(norm: Array, state: WindowState, param_norm: Any) -> tuple[Array, WindowState]:
        state = record(state, norm, signed=signed)
        ordered = jnp.sort(state.values, axis=0)
        last = jnp.clip(state.value_count - 1, 0, window - 1)
        position = jnp.asarray(percentile, jnp.float32) / 100 * last.astype(jnp.float32)
        below = jnp.floor(position)
        place = jnp.minimum(below.astype(jnp.int32), last)
        low, high = (
            jnp.take_along_axis(ordered, i[None], axis=0, mode="promise_in_bounds")[0]
            for i in (place, jnp.minimum(place + 1, last))
        )
        return low + (high - low) * (position - below), state

    return Rule(init, update, signed=signed)


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
        recorded = _positions(state) < state.value_count[None]
        n = jnp.clip(state.value_count, 1, window).astype(jnp.float32)
        values = jnp.where(recorded, state.values, 0)
        # In units of the mean size, so that squares cannot overflow.
        size = jax.lax.stop_gradient(jnp.sum(jnp.abs(values) / n[None], axis=0))
        unit = jnp.where(size > 0, size, 1)
        mean = jnp.sum(values / n[None], axis=0) / unit
        deviations = jnp.where(recorded, values / unit[None] - mean[None], 0)
        variance = jnp.sum(deviations**2 / jnp.maximum(n - ddof, 1)[None], axis=0)
        # Without a floor a constant norm would be its own threshold.
        floor = 1e-6 if signed else jnp.maximum(0.01 * mean, 1e-6)
        std = jnp.sqrt(jnp.maximum(variance, floor**2))
        threshold = unit * (mean + z_threshold * std)
        is_warm = state.value_count >= warmup_steps
        return jnp.where(is_warm, threshold, UNBOUNDED), record(state, norm, signed=signed)

    return Rule(init, update, signed=signed)
