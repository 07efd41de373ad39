"""Rules fed by the last norms: elementwise on norms of any shape, float32, finite-only.

Norms of zero are no part of a history: with them a leaf that is seldom used, such as an expert,
would be clipped to zero when it is. Nor can a rule lock up: where a published one can, on a zero
variance or a lasting rise of the level, what is added says so, and changes nothing elsewhere.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

from .._checks import check_count, check_number
from .._states import increment_where
from .._types import Array, Count, Number
from ..clipping._rule import Rule


class WindowState(NamedTuple):
    """The last norms of each unit.

    Attributes:
        norms: float32[window, ...], infinite where nothing was recorded.
        seen: int32[...], norms recorded so far, saturating.
        place: int32[...], where the next one goes.
    """

    norms: Array
    seen: Array
    place: Array


def percentile(percentile: Number = 10.0, window: Count = 1000) -> Rule:
    """A percentile of the last norms, the present one included.

    AutoClip keeps the whole history; here it is a window, and the same up to its length. The
    first step is never clipped. Each step sorts the window, for each unit.

    Args:
        percentile: 0 to 100, linearly interpolated as by `numpy.percentile`.
        window: how many norms are kept, >= 1; 4 * window bytes a unit.

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
    check_count(name, "window", window, "Pass the number of norms to keep.")

    def update(norm: Array, state: WindowState, param_norm: Any) -> tuple[Array, WindowState]:
        state = _recorded(state, norm)
        ordered = jnp.sort(state.norms, axis=0)
        last = jnp.clip(state.seen - 1, 0, window - 1)
        position = jnp.asarray(percentile, jnp.float32) / 100 * last.astype(jnp.float32)
        below = jnp.floor(position).astype(jnp.int32)
        low, high = (
            jnp.take_along_axis(ordered, jnp.minimum(i, last)[None], axis=0)[0]
            for i in (below, below + 1)
        )
        part = position - below.astype(jnp.float32)
        # Before the first norm both are infinite, and their difference would be NaN.
        return jnp.where(part > 0, low + (high - low) * part, low), state

    return Rule(lambda norm: _empty_window(norm, int(window)), update)


def mean_std(z_threshold: Number = 6.0, window: int = 128, warmup_steps: int = 64) -> Rule:
    """The mean of the last norms plus `z_threshold` standard deviations, the present one apart.

    The rule by which OLMo-core and levanter skip steps, in levanter's arithmetic: population
    variance, clipping after `warmup_steps` norms. Norms above the threshold stay in the history:
    a lasting rise is learned at once. Added: the deviation counts as at least a hundredth of the
    mean, or a constant norm would make a threshold of itself.

    Args:
        z_threshold: in standard deviations, > 0.
        window: how many norms are kept, >= 1.
        warmup_steps: how many norms are seen before the first is clipped, >= 1.

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
    check_count(name, "window", window, "Pass the number of norms to keep.")
    check_count(name, "warmup_steps", warmup_steps, "levanter uses half the window.")

    def update(norm: Array, state: WindowState, param_norm: Any) -> tuple[Array, WindowState]:
        known = jnp.isfinite(state.norms)
        n = jnp.maximum(jnp.sum(known, axis=0), 1).astype(jnp.float32)
        norms = jnp.where(known, state.norms, 0)
        mean = jnp.sum(norms / n, axis=0)
        # In units of the mean, so that squares cannot overflow.
        deviation = jnp.where(known, norms / jnp.where(mean > 0, mean, 1) - 1, 0)
        std = jnp.sqrt(jnp.maximum(jnp.sum(deviation**2 / n, axis=0), 0.01**2))
        warm = state.seen >= warmup_steps
        return jnp.where(warm, mean + z_threshold * std * mean, jnp.inf), _recorded(state, norm)

    return Rule(lambda norm: _empty_window(norm, int(window)), update)


def _empty_window(norm: Array, window: int) -> WindowState:
    nothing = jnp.zeros(norm.shape, jnp.int32)
    return WindowState(jnp.full((window, *norm.shape), jnp.inf, jnp.float32), nothing, nothing)


def _recorded(state: WindowState, norm: Array) -> WindowState:
    """With one more norm, unless it is zero."""
    window = state.norms.shape[0]
    places = jnp.arange(window).reshape(-1, *(1,) * norm.ndim)
    is_new = norm > 0
    return WindowState(
        norms=jnp.where(is_new & (places == state.place), norm, state.norms),
        seen=jnp.where(is_new, increment_where(state.seen), state.seen),
        place=jnp.where(is_new, (state.place + 1) % window, state.place),
    )
