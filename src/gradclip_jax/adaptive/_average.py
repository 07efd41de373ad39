"""Rules fed by running averages of the norms: elementwise, float32, finite-only.

As in `_history.py` norms of zero do not count, and nothing locks up.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._checks import check_count, check_number
from .._states import increment_where
from .._types import Array, Number
from ..clipping._rule import Rule


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

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> clip = gcx.clip_by_global_norm(gcx.thresholds.zscore(2.0, warmup_steps=2))
        >>> state = clip.init(jnp.zeros(1))
        >>> for norm in (1.0, 3.0, 9.0):
        ...     updates, state = clip.update(jnp.array([norm]), state)
        >>> round(float(updates[0]), 2)  # 2 + 2^2 / 7 * 1
        2.57

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
            seen=increment_where(state.seen),
            mean=mean,
            std=hypotenuse(jnp.sqrt(1 - weight) * state.std, jnp.sqrt(weight) * from_mean),
            streak=jnp.where(is_spike, increment_where(state.streak), 0),
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

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> clip = gcx.clip_by_global_norm(
        ...     gcx.thresholds.ema(2.0, warmup_steps=1, warmup_max=jnp.inf)
        ... )
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
        return threshold, EmaState(increment_where(state.seen), kept)

    return Rule(init, update)


def quantile(target: Number = 0.5, rate: Number = 0.2, initial: Number = 1.0) -> Rule:
    """Moves geometrically towards the `target` quantile of the norms.

    Clip to C, then `C * exp(-rate * ([norm <= C] - target))`. Added: C stays within 1e-30 and
    1e30, so that it can always come back.

    Args:
        target: the fraction of steps that should not be clipped, 0 to 1.
        rate: learning rate of log C, > 0.
        initial: the first C, in the unit of the norm, > 0; the paper starts at 0.1.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> clip = gcx.clip_by_global_norm(gcx.thresholds.quantile(initial=1.0))
        >>> state = clip.init(jnp.zeros(1))
        >>> for norm in (3.0, 3.0):
        ...     updates, state = clip.update(jnp.array([norm]), state)
        >>> round(float(updates[0]), 2)  # exp(0.2 * 0.5)
        1.11

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
