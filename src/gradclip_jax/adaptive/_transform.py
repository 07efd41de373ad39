"""The published methods, each one line over granularity, threshold and reaction."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from .._checks import check_axis, check_count, check_number
from .._types import NO_AXES, Array, AxisName, Count, Number
from ..clipping._granularity import inner_units
from ..clipping._rule import capped, relative_to_params
from ..clipping._step import clip_by_units
from ..clipping._transform import clip_by_global_norm, clip_by_leaf_norm
from . import _average, _history

_WINDOW = np.int32(1000)  # NumPy, so that `optax.inject_hyperparams` leaves it alone


def adaptive_grad_clip(
    clipping: Number = 0.01,
    eps: Number = 1e-3,
    axis: int | Sequence[int] | None = None,
    *,
    nonfinite: str = "propagate",
) -> optax.GradientTransformation:
    """Clips each row or filter to a fraction of the norm of its parameters (AGC).

    `g_i * min(1, clipping * max(norm(w_i), eps) / norm(g_i))` for each row or filter i.

    Args:
        clipping: largest ratio of gradient norm to parameter norm, dimensionless, > 0.
        eps: what a parameter norm counts as at least, in the unit of the parameters, > 0.
        axis: the axes the norm of a unit runs over; None takes Optax's choice by rank: all of
            a scalar or vector, 0 of rank 2 and 3, all but the last of rank 4 and 5. Inside
            `shard_map` they must not be sharded.
        nonfinite: as for `clip_by_leaf_norm`.

    Returns:
        An Optax transformation with a `ClipState`; `update` needs `params`.

    Raises:
        ValueError: a number is not > 0, `axis` does not fit a leaf, or `params` is missing.
        TypeError: an argument is no number; a leaf is not inexact.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> clip = gcx.adaptive_grad_clip(0.5)
        >>> params, grads = jnp.array([3.0, 4.0]), jnp.array([0.0, 10.0])
        >>> updates, _ = clip.update(grads, clip.init(params), params)
        >>> updates.tolist()
        [0.0, 2.5]

    References:
        Brock, De, Smith and Simonyan, 2021, arXiv 2102.06171; the last linear layer is left
        out there: `optax.masked`.
    """
    name = "adaptive_grad_clip"
    check_number(name, "clipping", clipping, "The paper uses 0.01 for large batches.")
    check_number(name, "eps", eps, "The paper uses 1e-3.")
    check_axis(name, axis)
    units = inner_units(name, relative_to_params(clipping, eps), 2.0, axis)
    return clip_by_units(name, units, nonfinite=nonfinite)


def autoclip(
    percentile: Number = 10.0,
    window: Count = _WINDOW,
    *,
    axis_name: AxisName = None,
    nonfinite: str = "propagate",
) -> optax.GradientTransformation:
    """Clips to a percentile of the global norms seen so far (AutoClip).

    Args:
        percentile: as for `thresholds.percentile`.
        window: likewise; the paper keeps the whole history.
        axis_name: as for `clip_by_global_norm`.
        nonfinite: as for `clip_by_global_norm`.

    Returns:
        An Optax transformation with a `ClipState`.

    Raises:
        ValueError: a number is out of range.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> clip = gcx.autoclip(percentile=50.0)
        >>> state = clip.init(jnp.zeros(1))
        >>> for grad in (2.0, 4.0, 60.0):
        ...     updates, state = clip.update(jnp.array([grad]), state)
        >>> updates.tolist()
        [4.0]

    References:
        Seetharaman, Wichern, Pardo and Le Roux, 2020, arXiv 2007.14469.
    """
    rule = _history.percentile(percentile, window)
    return clip_by_global_norm(rule, axis_name=axis_name, nonfinite=nonfinite)


def zclip(
    z_threshold: Number = 2.5,
    decay: Number = 0.97,
    warmup_steps: int = 25,
    max_norm: Number | None = 1.0,
    *,
    axis_name: AxisName = None,
    nonfinite: str = "propagate",
) -> optax.GradientTransformation:
    """Clips global norms that are outliers among the recent ones (ZClip).

    Args:
        z_threshold: as for `thresholds.zscore`.
        decay: likewise.
        warmup_steps: likewise.
        max_norm: a hard cap as well, from the first step on, in the unit of the gradients,
            > 0; None for none. The statistics do not see it.
        axis_name: as for `clip_by_global_norm`.
        nonfinite: as for `clip_by_global_norm`.

    Returns:
        An Optax transformation with a `ClipState`.

    Raises:
        ValueError: a number is out of range.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> clip = gcx.zclip(2.0, warmup_steps=2, max_norm=None)
        >>> state = clip.init(jnp.zeros(1))
        >>> for grad in (2.0, 4.0, 11.0):  # 11 is 8 deviations above the mean
        ...     updates, state = clip.update(jnp.array([grad]), state)
        >>> round(updates.item(), 4)
        3.5

    References:
        Kumar, Owen, Chowdhury and Guera, 2025, arXiv 2504.02507.
    """
    rule = _average.zscore(z_threshold, decay, warmup_steps)
    rule = rule if max_norm is None else capped(rule, max_norm)
    return clip_by_global_norm(rule, axis_name=axis_name, nonfinite=nonfinite)


def adagc(
    relative: Number = 1.05,
    absolute: Number = 1.0,
    decay: Number = 0.98,
    warmup_steps: int = 100,
    *,
    axis_name: AxisName = None,
    stack_axes: Any = NO_AXES,
    nonfinite: str = "propagate",
) -> optax.GradientTransformation:
    """Clips each leaf to a little above the average of its clipped norms (AdaGC).

    In the warm-up the global norm is clipped to `absolute`, and each leaf notes its smallest.

    Args:
        relative: `factor` of `thresholds.ema`.
        absolute: of the global norm during the warm-up, in the unit of the gradients, > 0.
        decay: as for `thresholds.ema`.
        warmup_steps: likewise.
        axis_name: as for `clip_by_global_norm`.
        stack_axes: as for `clip_by_leaf_norm`.
        nonfinite: as for `clip_by_leaf_norm`.

    Returns:
        An Optax transformation; the states of both clips, the global one first.

    Raises:
        ValueError: a number is out of range.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> clip = gcx.adagc(2.0, warmup_steps=1)
        >>> grads = {"w": jnp.array(0.5), "b": jnp.array(0.25)}
        >>> _, state = clip.update(grads, clip.init(grads))
        >>> updates, _ = clip.update({"w": jnp.array(0.75), "b": jnp.array(9.0)}, state)
        >>> float(updates["w"]), float(updates["b"])
        (0.75, 0.5)

    References:
        Wang et al., 2025, arXiv 2502.11034.
    """
    check_number("adagc", "absolute", absolute, "The paper uses 1.")
    check_count("adagc", "warmup_steps", warmup_steps, "The paper uses 100.")

    def warmup(step: Array) -> Array:
        return jnp.where(step < warmup_steps, absolute, jnp.inf)

    rule = _average.ema(relative, decay, warmup_steps, warmup_max=jnp.inf)
    return optax.chain(
        clip_by_global_norm(warmup, axis_name=axis_name, nonfinite=nonfinite),
        clip_by_leaf_norm(rule, axis_name=axis_name, stack_axes=stack_axes, nonfinite=nonfinite),
    )


def quantile_clip(
    target: Number = 0.5,
    rate: Number = 0.2,
    initial: Number = 1.0,
    *,
    axis_name: AxisName = None,
    nonfinite: str = "propagate",
) -> optax.GradientTransformation:
    """Clips to a threshold that follows a quantile of the global norms.

    Args:
        target: as for `thresholds.quantile`.
        rate: likewise.
        initial: likewise.
        axis_name: as for `clip_by_global_norm`.
        nonfinite: as for `clip_by_global_norm`.

    Returns:
        An Optax transformation with a `ClipState`.

    Raises:
        ValueError: a number is out of range.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> clip = gcx.quantile_clip(target=0.5, rate=0.2, initial=1.0)
        >>> state = clip.init(jnp.zeros(1))
        >>> for _ in range(3):
        ...     updates, state = clip.update(jnp.array([3.0]), state)
        >>> round(updates.item(), 4)  # exp(2 * 0.2 * 0.5)
        1.2214

    References:
        Andrew, Thakkar, McMahan and Ramaswamy, 2021 (first 2019), arXiv 1905.03871.
    """
    rule = _average.quantile(target, rate, initial)
    return clip_by_global_norm(rule, axis_name=axis_name, nonfinite=nonfinite)
