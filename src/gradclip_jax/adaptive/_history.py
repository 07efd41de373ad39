"""Rules fed by the history of norms: elementwise on norms of any shape, float32, finite-only.

None of them can lock up. Where a published rule can (a zero variance, a lasting rise of the
level), what is added says so, and changes nothing elsewhere. Norms of zero are part of no history:
with them a leaf that is seldom used, such as an expert, would be clipped to zero when it is.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._checks import check_count, check_number
from .._states import counted
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


class ZscoreState(NamedTuple):
    """Mean and spread of each unit, float32[...], and counts, int32[...], saturating.

    Attributes:
        seen: norms seen so far.
        mean: of the norms; a decaying average after the warm-up.
        std: standard deviation of the norms, the root of a decaying average after the warm-up.
        streak: norms above the threshold in a row.
    """

    seen: Array
    mean: Array
    std: Array
    streak: Array


class EmaState(NamedTuple):
    """The level of each unit.

    Attributes:
        seen: int32[...], norms seen so far, saturating.
        level: float32[...], a decaying average; infinite if there is none yet.
    """

    seen: Array
    level: Array


def percentile(percentile: Number = 10.0, window: Count = 1000) -> Rule:
    """A percentile of the last norms, the present one included.

    AutoClip keeps the whole history; here it is a window, and the same up to its length. The
    first step is never clipped. Each step sorts the window, for each unit.

    Args:
        percentile: 0 to 100, linearly interpolated as by `numpy.percentile`.
        window: how many norms are kept, >= 1; 4 * window bytes a unit.

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


def zscore(
    z_threshold: Number = 2.5,
    decay: Number = 0.97,
    warmup_steps: int = 25,
    *,
    relearn_after: int = 25,
) -> Rule:
    """Clips a norm z > `z_threshold` deviations above its average, the further the harder.

    To `mean + z_threshold^2 / z * std`; no threshold for other norms, and none in the warm-up,
    which gives mean and (population) variance. From then on both are decaying averages, fed
    with what was left after clipping, the variance about the new mean: as in the authors' code.
    Added: after `relearn_after` clipped norms in a row they are fed unclipped until one is not
    clipped. As published, a constant warm-up clips every later rise to its mean for ever.

    Args:
        z_threshold: in standard deviations, > 0.
        decay: of the averages, 0 to 1.
        warmup_steps: norms that the first mean and variance are taken of, >= 1.
        relearn_after: >= 1.

    References:
        Kumar, Owen, Chowdhury and Guera, 2025, arXiv 2504.02507.
    """
    name = "zscore"
    check_number(name, "z_threshold", z_threshold, "The paper uses 2.5.")
    check_number(name, "decay", decay, "The paper uses 0.97.", high=1.0, closed=True)
    check_count(name, "warmup_steps", warmup_steps, "The paper uses 25.")
    check_count(name, "relearn_after", relearn_after, "So long a new level is taken for spikes.")

    def init(norm: Array) -> ZscoreState:
        nothing, zeros = jnp.zeros(norm.shape, jnp.int32), jnp.zeros_like(norm)
        return ZscoreState(nothing, zeros, zeros, nothing)

    def update(norm: Array, state: ZscoreState, param_norm: Any) -> tuple[Array, ZscoreState]:
        warm = state.seen >= warmup_steps
        z = (norm - state.mean) / (state.std + 1e-6)
        is_spike = warm & (z > z_threshold)
        safe_z = jnp.where(is_spike, z, 1)
        threshold = jnp.where(is_spike, state.mean + z_threshold**2 / safe_z * state.std, jnp.inf)
        fed = jnp.where(is_spike & (state.streak < relearn_after), threshold, norm)

        # In the warm-up all norms weigh the same: the mean and population variance so far.
        n = state.seen.astype(jnp.float32)
        weight = jnp.where(warm, 1 - decay, 1 / (n + 1))
        mean = state.mean + weight * (fed - state.mean)
        from_mean = jnp.where(warm, fed - mean, jnp.sqrt(n / (n + 1)) * (norm - state.mean))
        return threshold, ZscoreState(
            seen=counted(state.seen),
            mean=mean,
            std=hypotenuse(jnp.sqrt(1 - weight) * state.std, jnp.sqrt(weight) * from_mean),
            streak=jnp.where(is_spike, counted(state.streak), 0),
        )

    return _of_nonzero(init, update)


def ema(
    factor: Number = 1.05,
    decay: Number = 0.98,
    warmup_steps: int = 100,
    warmup_max: Number = 1.0,
) -> Rule:
    """`factor` times a decaying average of the clipped norms.

    In the warm-up the threshold is `warmup_max`, and the level is the smallest clipped norm, as
    in AdaGC; zeros count there only. A lasting rise is followed by 0.1 % a step, as published.

    Args:
        factor: how far above the average a norm may be, > 0.
        decay: of the average, 0 to 1.
        warmup_steps: >= 1.
        warmup_max: threshold during the warm-up, in the unit of the norm, > 0; inf for none.

    References:
        Wang et al., 2025, arXiv 2502.11034.
    """
    name = "ema"
    check_number(name, "factor", factor, "The paper uses 1.05.")
    check_number(name, "decay", decay, "The paper uses 0.98.", high=1.0, closed=True)
    check_count(name, "warmup_steps", warmup_steps, "The paper uses 100.")
    check_number(name, "warmup_max", warmup_max, "Pass inf not to clip during the warm-up.")

    def init(norm: Array) -> EmaState:
        return EmaState(jnp.zeros(norm.shape, jnp.int32), jnp.full_like(norm, jnp.inf))

    def update(norm: Array, state: EmaState, param_norm: Any) -> tuple[Array, EmaState]:
        warm = state.seen >= warmup_steps
        threshold = jnp.where(warm, factor * state.level, warmup_max)
        clipped = jnp.minimum(norm, threshold)
        average = decay * state.level + (1 - decay) * clipped
        smallest = jnp.minimum(state.level, clipped)
        level = jnp.where(warm & jnp.isfinite(state.level), average, smallest)
        kept = jnp.where(norm > 0, level, state.level)
        return threshold, EmaState(counted(state.seen), kept)

    return Rule(init, update)


def quantile(target: Number = 0.5, rate: Number = 0.2, initial: Number = 1.0) -> Rule:
    """Moves geometrically towards the `target` quantile of the norms.

    Clip to C, then `C * exp(-rate * ([norm <= C] - target))`. Added: C stays within 1e-30 and
    1e30, so that it can always come back.

    Args:
        target: the fraction of steps that should not be clipped, 0 to 1.
        rate: learning rate of log C, > 0.
        initial: the first C, in the unit of the norm, > 0; the paper starts at 0.1.

    References:
        Andrew, Thakkar, McMahan and Ramaswamy, 2021 (first 2019), arXiv 1905.03871.
    """
    name = "quantile"
    check_number(name, "target", target, "0.5 aims at the median.", high=1.0, closed=True)
    check_number(name, "rate", rate, "The paper uses 0.2.")
    check_number(name, "initial", initial, "The paper uses 0.1.")

    def init(norm: Array) -> Array:
        return jnp.full_like(norm, initial)

    def update(norm: Array, threshold: Array, param_norm: Any) -> tuple[Array, Array]:
        below = (norm <= threshold).astype(jnp.float32)
        return threshold, jnp.clip(threshold * jnp.exp(-rate * (below - target)), 1e-30, 1e30)

    return _of_nonzero(init, update)


def hypotenuse(x: Array, y: Array) -> Array:
    """`sqrt(x^2 + y^2)` without overflow, and differentiable at zero."""
    unit = jax.lax.stop_gradient(jnp.maximum(jnp.maximum(jnp.abs(x), jnp.abs(y)), 1e-30))
    return unit * jnp.sqrt(jnp.maximum((x / unit) ** 2 + (y / unit) ** 2, 1e-30))


def _of_nonzero(init: Callable[..., Any], update: Callable[..., tuple[Array, Any]]) -> Rule:
    """A rule whose state is that of the norms above zero."""

    def update_nonzero(norm: Array, state: Any, param_norm: Any) -> tuple[Array, Any]:
        threshold, proposed = update(norm, state, param_norm)
        return threshold, jax.tree.map(functools.partial(jnp.where, norm > 0), proposed, state)

    return Rule(init, update_nonzero)


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
        seen=jnp.where(is_new, counted(state.seen), state.seen),
        place=jnp.where(is_new, (state.place + 1) % window, state.place),
    )
