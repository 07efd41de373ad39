"""Threshold rule: a percentile of the last norms (AutoClip)."""

from typing import Any

import jax.numpy as jnp

from .._checks import check_length, check_number
from .._types import Array, Count, Number
from ..clipping._threshold import Rule
from ._history import WindowState, empty_window, record


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
        below = jnp.floor(position).astype(jnp.int32)
        low, high = (
            jnp.take_along_axis(ordered, jnp.minimum(i, last)[None], axis=0)[0]
            for i in (below, below + 1)
        )
        return low + (high - low) * (position - below.astype(jnp.float32)), state

    return Rule(init, update, signed=signed)
