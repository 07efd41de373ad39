"""Gradient clipping with adaptive thresholds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, TypeAlias

import jax.numpy as jnp
import optax

from .._checks import check_number
from .._errors import public
from .._types import UNBOUNDED, Array, AxisName, Count, Number, Tree
from ..clipping._clip import norm_clip
from ..clipping._formula import scale_factor
from ..clipping._granularity import axis as unit_axis
from ..clipping._granularity import layer
from ..clipping._norm import norm_of_leaves
from ..clipping._threshold import capped, relative_to_params
from ._rules import EmaState, ema, zscore
from ._rules import percentile as percentile_rule

Nonfinite: TypeAlias = Literal["propagate", "zero"]


@public
def adaptive_grad_clip(
    clipping: Number = 0.01,
    eps: Number = 1e-3,
    axis: int | Sequence[int] | None = None,
    *,
    axis_name: AxisName = None,
    nonfinite: Nonfinite = "propagate",
) -> optax.GradientTransformation:
    """Clip the gradient of each row or filter relative to the norm of its parameters (AGC).

    `g_i * min(1, clipping * max(norm(w_i), eps) / norm(g_i))` for each row or filter i. The
    paper does not clip the last linear layer; use `optax.masked` to exclude it. Where parameters
    are zero, as in one factor of a new LoRA adapter, the threshold is `clipping * eps`, which is
    1e-5 with the defaults: exclude them as well, or increase `eps`.

    Args:
        clipping: Maximum ratio of gradient norm to parameter norm; a positive number.
        eps: Lower bound of the parameter norm, > 0; with it, parameters that are zero can be
            updated.
        axis: Axes over which each norm is computed, static. None chooses them by rank, as Optax
            does: all axes of a scalar or vector, axis 0 for rank 2 and 3, and all axes but the last
            for rank 4 and 5. Inside `shard_map` these axes must not be sharded.
        axis_name: See `clip_by_global_norm`.
        nonfinite: "propagate" returns NaN for a step with a non-finite norm, "zero" returns zeros.

    Returns:
        A gradient transformation with a `ClipState`; `update` requires `params`.

    Raises:
        ValueError: If a number is not positive, if `axis` is invalid for a leaf, or if `params` is
            missing.
        TypeError: If an argument is not a number, if `axis` is traced, or if a leaf is not
            floating-point or complex.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> clip = gcx.adaptive_grad_clip(0.5)
        >>> params, grads = jnp.array([3.0, 4.0]), jnp.array([0.0, 10.0])
        >>> updates, _ = clip.update(grads, clip.init(params), params)
        >>> updates.tolist()
        [0.0, 2.5]

    References:
        Brock, De, Smith and Simonyan, 2021, arXiv 2102.06171.
    """
    check_number("clipping", clipping, "The paper uses 0.01 for large batches.")
    rule, units = relative_to_params(clipping, eps), unit_axis(axis)
    return norm_clip("clipping", rule, units, axis_name=axis_name, nonfinite=nonfinite)


@public
def autoclip(
    percentile: Number = 10.0,
    window: Count | None = None,
    *,
    axis_name: AxisName = None,
    nonfinite: Nonfinite = "propagate",
) -> optax.GradientTransformation:
    """Clip to a percentile of the recent global norms (AutoClip).

    Try this adaptive clip first. It works at every gradient scale, and in docs/study.md its default
    was closer to the best fixed threshold than the default of any other rule. The paper's
    percentile of 10 clips nine of ten steps, so tune the learning rate together with it. A
    percentile of 90 clips one of ten steps.

    Args:
        percentile: Percentile from 1 to 100, with linear interpolation as in
            `numpy.percentile`.
        window: Number of norms in the window, 1 to 2^20, static; None means 1000. The paper uses
            all norms.
        axis_name: See `clip_by_global_norm`.
        nonfinite: "propagate" returns NaN for a step with a non-finite norm, "zero" returns zeros.

    Returns:
        A gradient transformation with a `ClipState`.

    Raises:
        ValueError: If a number is out of range.
        TypeError: If `window` is traced.

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
    rule = percentile_rule(percentile, 1000 if window is None else window)
    return norm_clip("percentile", rule, axis_name=axis_name, nonfinite=nonfinite)


@public
def zclip(
    z_threshold: Number = 2.5,
    decay: Number = 0.97,
    warmup_steps: int = 25,
    max_norm: Number | None = 1.0,
    *,
    axis_name: AxisName = None,
    nonfinite: Nonfinite = "propagate",
) -> optax.GradientTransformation:
    """Clip the global norm if it is an outlier among recent norms (ZClip).

    `zclip(max_norm=None)` works at every scale of the norm and only changes outliers. The paper's
    `max_norm` of 1 is an additional fixed bound for language models with norms below 1. A model
    with norms of about 30 would be clipped at every step.

    Args:
        z_threshold: Maximum z-score of a norm that is not clipped; a positive number.
        decay: Decay rate of the moving averages of mean and variance, at least 0 and below 1.
        warmup_steps: Number of norms in the initial mean and variance, >= 1.
        max_norm: Fixed upper bound of the threshold, also during the warm-up, in the unit of
            the gradients, > 0; None for no bound. The moving averages do not depend on it.
        axis_name: See `clip_by_global_norm`.
        nonfinite: "propagate" returns NaN for a step with a non-finite norm, "zero" returns zeros.

    Returns:
        A gradient transformation with a `ClipState`.

    Raises:
        ValueError: If a number is out of range.

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
    rule = zscore(z_threshold, decay, warmup_steps)
    if max_norm is not None:
        check_number("max_norm", max_norm, "The paper uses 1; pass None for no bound.")
        rule = capped(rule, max_norm)
    return norm_clip("max_norm", rule, axis_name=axis_name, nonfinite=nonfinite)


@public
def adagc(
    relative: Number = 1.05,
    absolute: Number = 1.0,
    decay: Number = 0.98,
    warmup_steps: int = 100,
    *,
    axis_name: AxisName = None,
    num_layer_axes: Tree = None,
    nonfinite: Nonfinite = "propagate",
) -> optax.GradientTransformation:
    """Clip each leaf to a multiple of the moving average of its clipped norms (AdaGC).

    During the warm-up the global norm is clipped to `absolute`, and the average of each leaf is its
    smallest norm so far. The default of 1 from the paper is suitable for language models with
    gradient norms below 1. If norms are about 30, the averages need thousands of steps to adapt.
    `jnp.inf` works at every scale, but does not clip during the warm-up.

    Args:
        relative: Maximum ratio of a norm to its average; a positive number.
        absolute: Maximum global norm during the warm-up, in the unit of the gradients; a positive
            number, or inf for no bound.
        decay: Decay rate of the average, at least 0 and below 1.
        warmup_steps: Number of warm-up steps, >= 1.
        axis_name: See `clip_by_global_norm`.
        num_layer_axes: See `clip_by_leaf_norm`.
        nonfinite: "propagate" returns NaN for a step with a non-finite norm, "zero" returns zeros.

    Returns:
        A gradient transformation with a `ClipState`.

    Raises:
        ValueError: If a number is out of range.
        TypeError: If `num_layer_axes` is traced.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> clip = gcx.adagc(2.0, warmup_steps=1)
        >>> grads = {"w": jnp.array(0.5), "b": jnp.array(0.25)}
        >>> _, state = clip.update(grads, clip.init(grads))
        >>> updates, _ = clip.update({"w": jnp.array(0.75), "b": jnp.array(9.0)}, state)
        >>> float(updates["w"]), float(updates["b"])
        (0.75, 0.5)

    References:
        Wang et al., 2025, arXiv 2502.11034, version 2; the algorithm is that of version 1.
    """
    check_number("relative", relative, "The paper uses 1.05.")
    check_number("absolute", absolute, "The paper uses 1; pass inf for no bound.")
    rule = ema(relative, decay, warmup_steps, warmup_max=UNBOUNDED)

    def update(norms: Array, state: EmaState, param_norms: Array | None) -> tuple[Array, EmaState]:
        # `norms` is a vector of all leaf norms, because this rule has a state.
        factor = scale_factor(norm_of_leaves([norms], 2.0, None), jnp.minimum(absolute, UNBOUNDED))
        scaled = jnp.where(state.step_count < warmup_steps, factor, 1) * norms
        thresholds, state = rule.update(scaled, state, None)
        return jnp.where(scaled < norms, jnp.minimum(scaled, thresholds), thresholds), state

    both, units = dataclasses.replace(rule, update=update), layer(num_layer_axes)
    return norm_clip("relative", both, units, axis_name=axis_name, nonfinite=nonfinite)
