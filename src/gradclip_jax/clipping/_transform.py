"""Public transformations that clip by norm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import optax

from .._checks import check_number
from .._errors import public
from .._types import AxisName, Count, Labels, Number, Order, Tree
from ..norms._granularity import Granularity, group, layer
from ..norms._granularity import axis as axis_granularity
from ._clip import norm_clip
from ._formula import Reaction
from ._rules import adagc_rule, capped, relative_to_params, zscore
from ._rules import percentile as percentile_rule
from ._threshold import Threshold


@public
def clip_by_norm(
    threshold: Threshold | Mapping[Any, Threshold],
    *,
    granularity: Literal["global", "leaf"] | Granularity = "global",
    reaction: Reaction = "scale",
    ord: Order | None = None,
    axis_name: AxisName = None,
) -> optax.GradientTransformation:
    """Clip by norm with a configurable granularity, threshold and reaction.

    All elements that share norm i are multiplied by `reaction(norm_i, threshold_i)`. The other
    functions that clip by norm are special cases of this function.

    | granularity | elements that share a norm |
    | --- | --- |
    | `"global"` | the whole tree |
    | `"leaf"` | each leaf |
    | `gcx.granularities.group(param_labels)` | the leaves that share a label |
    | `gcx.granularities.layer(num_layer_axes)` | each layer of leaves stacked for `lax.scan` |
    | `gcx.granularities.axis(axis)` | each row, column or filter |

    | reaction | factor |
    | --- | --- |
    | `"scale"` | `min(1, threshold / norm)` |
    | `"zero"` | 1 up to the threshold, 0 above it |
    | a function | `reaction(norm, threshold)`, elementwise, also up to the threshold, in [0, 1] |

    | step | update |
    | --- | --- |
    | norm <= threshold, or all zero | unchanged bit for bit, unless `reaction` is a function |
    | a NaN or infinity | every leaf with a norm is NaN, which a guard detects |
    | traced threshold <= 0 | zero |

    Args:
        threshold: Threshold in the units of the gradients; a positive number (inf disables
            clipping), a traced scalar, a schedule of the step count, or a rule from
            `gcx.thresholds`. For groups, also a mapping from label to threshold.
        granularity: Which elements share one norm.
        reaction: How the factor of each norm is computed; see the table above. A function receives
            finite norms >= 0 and finite thresholds > 0, as scalars or arrays, and returns factors
            in [0, 1]. A concrete factor outside this range raises an error, and a traced one is
            clamped to it.
        ord: Order of the norm: 1, 2 or inf. None means 2.
        axis_name: Mapped axes over which every leaf is sharded, required where the array's type
            does not carry the sharding (`pmap`, or `shard_map` with `check_vma=False`). Omit axes
            over which leaves are equal, as after `psum` or `pmean`; see `global_norm`. `()`
            clips on each device by its own norm, and the state then varies over devices; if it is
            returned from `shard_map`, use `clip_grad_norm`, which has no state.

    Returns:
        A gradient transformation with a `ClipState`. `update(grads, None)` works unless the
        threshold has a state (a schedule, or a rule that depends on earlier norms).

    Raises:
        ValueError: If a number is out of range, or if a name is unknown.
        TypeError: If `threshold` is not a valid threshold, or if a leaf is not floating-point or
            complex.

    Examples:
        Set the update of each layer to zero if its norm is above its median so far:

        >>> import jax, jax.numpy as jnp, gradclip_jax as gcx
        >>> clip = gcx.clip_by_norm(
        ...     gcx.thresholds.percentile(50.0),
        ...     granularity=gcx.granularities.layer(1),
        ...     reaction="zero",
        ... )
        >>> grads = jnp.array([[3.0, 4.0], [0.0, 1.0]])
        >>> state = clip.init(grads)
        >>> for scale in (1.0, jnp.array([[2.0], [1.0]])):
        ...     updates, state = jax.jit(clip.update)(scale * grads, state)
        >>> updates.tolist()
        [[0.0, 0.0], [0.0, 1.0]]

    References:
        Pascanu, Mikolov and Bengio, 2013, arXiv 1211.5063.
    """
    return norm_clip(
        "threshold",
        threshold,
        granularity,
        reaction=reaction,
        ord=ord,
        axis_name=axis_name,
    )


@public
def clip_by_global_norm(
    max_norm: Threshold,
    ord: Order | None = None,
    *,
    axis_name: AxisName = None,
) -> optax.GradientTransformation:
    """Scale the update so that its global norm is at most `max_norm`.

    The update is `g * min(1, max_norm / norm(g))`, where the norm includes all leaves.

    | gradient | update |
    | --- | --- |
    | norm <= `max_norm`, or all zero | unchanged bit for bit |
    | norm > `max_norm` | scaled in at least float32, and rounded once to the leaf's dtype |
    | float32 elements from 1e-18, norm up to 1.8e19 | correct to 1e-6; see `global_norm` |
    | a NaN or infinity | every leaf is NaN, which `skip_nonfinite` detects |
    | traced `max_norm` <= 0 | zero |
    | no leaves | unchanged |

    Use `clip_by_leaf_norm` to limit the norm of each leaf, `skip_spikes` to skip the step
    instead, and `autoclip` or `zclip` for an adaptive threshold.

    Args:
        max_norm: Maximum global norm in the units of the gradients; a positive number (inf disables
            clipping), a traced scalar, a schedule of the step count, or a rule from
            `gcx.thresholds`.
        ord: Order of the norm: 1, 2 or inf. None means 2.
        axis_name: Mapped axes over which every leaf is sharded, required where the array's type
            does not carry the sharding (`pmap`, or `shard_map` with `check_vma=False`). Omit axes
            over which leaves are equal, as after `psum` or `pmean`; see `global_norm`. `()`
            clips on each device by its own norm, and the state then varies over devices; if it is
            returned from `shard_map`, use `clip_grad_norm`, which has no state.

    Returns:
        A gradient transformation with a `ClipState`. `update(grads, None)` works unless `max_norm`
        has a state (a schedule, or a rule that depends on earlier norms).

    Raises:
        ValueError: If `max_norm` is not positive, or if `ord` is not 1, 2 or inf.
        TypeError: If `max_norm` is not a valid threshold, or if a leaf is not floating-point or
            complex.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> clip = gcx.clip_by_global_norm(1.0)
        >>> grads = {"w": jnp.float16([300.0, 400.0])}
        >>> updates, state = clip.update(grads, clip.init(grads))
        >>> updates["w"].tolist(), float(state.grad_norm)
        ([0.60009765625, 0.7998046875], 500.0)

    References:
        Pascanu, Mikolov and Bengio, 2013, arXiv 1211.5063.
    """
    return norm_clip("max_norm", max_norm, ord=ord, axis_name=axis_name)


@public
def clip_by_leaf_norm(
    max_norm: Threshold,
    *,
    ord: Order | None = None,
    axis_name: AxisName = None,
    num_layer_axes: Tree = None,
) -> optax.GradientTransformation:
    """Scale each leaf so that its norm is at most `max_norm`.

    A NaN or infinity in any leaf makes all leaves NaN.

    Args:
        max_norm: Maximum norm of a leaf in the units of the gradients; a positive number, a traced
            scalar, a schedule, or a rule from `gcx.thresholds`. Use `clip_by_group_norm`, or
            `optax.partition`, for different thresholds.
        ord: Order of the norm: 1, 2 or inf. None means 2.
        axis_name: See `clip_by_global_norm`.
        num_layer_axes: Number of leading axes of a leaf that index layers, an integer or a prefix
            tree of integers; each layer is clipped separately. Use 1 for layers that are stacked
            for `lax.scan`. These axes must not be sharded inside `shard_map`.

    Returns:
        A gradient transformation with a `ClipState`, whose scalars summarize all leaves.

    Raises:
        ValueError: If `max_norm` is not positive, or if `num_layer_axes` exceeds the rank of a
            leaf.
        TypeError: If `max_norm` is not a valid threshold, or if a leaf is not floating-point or
            complex.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> clip = gcx.clip_by_leaf_norm(1.0)
        >>> grads = {"w": jnp.array([0.0, 4.0]), "b": jnp.array([0.25])}
        >>> updates, _ = clip.update(grads, clip.init(grads))
        >>> updates["w"].tolist(), updates["b"].tolist()
        ([0.0, 1.0], [0.25])
    """
    return norm_clip("max_norm", max_norm, layer(num_layer_axes), ord=ord, axis_name=axis_name)


@public
def clip_by_group_norm(
    max_norms: Threshold | Mapping[Any, Threshold],
    param_labels: Labels,
    *,
    ord: Order | None = None,
    axis_name: AxisName = None,
) -> optax.GradientTransformation:
    """Scale each group of leaves so that its norm is at most its threshold.

    Leaves whose label is not in `max_norms` remain unchanged and are not part of any norm. A NaN or
    infinity in a clipped leaf makes all clipped leaves NaN.

    Args:
        max_norms: Mapping from label to threshold; a positive number, a traced scalar, a schedule,
            or a rule from `gcx.thresholds`. Or one threshold for each group.
        param_labels: Prefix tree of labels, or a function `params -> labels`. To label by path, use
            `lambda params: jax.tree_util.tree_map_with_path(label_of_path, params)`.
        ord: Order of the norm: 1, 2 or inf. None means 2.
        axis_name: See `clip_by_global_norm`.

    Returns:
        A gradient transformation with a `ClipState`, which contains norm, threshold and factor of
        each group.

    Raises:
        ValueError: If a threshold is not positive, or if `max_norms` contains a label that no leaf
            has.
        TypeError: If a threshold is not valid, or if `param_labels` is not a prefix tree of the
            updates.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> clip = gcx.clip_by_group_norm(
        ...     {"body": 1.0}, {"enc": "body", "dec": "body", "fp8": "raw"}
        ... )
        >>> grads = {"enc": jnp.array([3.0]), "dec": jnp.array([4.0]), "fp8": jnp.array([9.0])}
        >>> updates, state = clip.update(grads, clip.init(grads))
        >>> float(updates["fp8"][0]), float(state.grad_norm["body"])
        (9.0, 5.0)
    """
    return norm_clip("max_norms", max_norms, group(param_labels), ord=ord, axis_name=axis_name)


@public
def clip_by_block_rms(
    threshold: Threshold,
    *,
    axis_name: AxisName = None,
    num_layer_axes: Tree = None,
) -> optax.GradientTransformation:
    """Scale each leaf so that its root mean square is at most `threshold`.

    The result equals that of `optax.clip_by_block_rms`. Applied after the preconditioner, this
    transformation is the update clipping of Adafactor, `u / max(1, RMS(u) / threshold)`.

    Args:
        threshold: Maximum root mean square of a leaf; see `max_norm` of `clip_by_leaf_norm` for the
            accepted types.
        axis_name: See `clip_by_global_norm`.
        num_layer_axes: See `clip_by_leaf_norm`.

    Returns:
        A gradient transformation with a `ClipState`.

    Raises:
        ValueError: If the threshold is not positive.
        TypeError: If `threshold` is not a valid threshold, or if a leaf is not floating-point or
            complex.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> clip = gcx.clip_by_block_rms(1.0)
        >>> grads = {"w": jnp.array([1.0, 7.0]), "b": jnp.array([0.5])}
        >>> updates, _ = clip.update(grads, clip.init(grads))
        >>> [round(x, 4) for x in updates["w"].tolist()], updates["b"].tolist()
        ([0.2, 1.4], [0.5])

    References:
        Shazeer and Stern, 2018, arXiv 1804.04235, section 6.
    """
    granularity = layer(num_layer_axes, rms=True)
    return norm_clip("threshold", threshold, granularity, axis_name=axis_name)


@public
def adaptive_grad_clip(
    clipping: Number = 0.01,
    eps: Number = 1e-3,
    axis: int | Sequence[int] | None = None,
    *,
    axis_name: AxisName = None,
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
            for higher ranks. Inside `shard_map` these axes must not be sharded.
        axis_name: See `clip_by_global_norm`.

    Returns:
        A gradient transformation with a `ClipState`; `update` requires `params`.

    Raises:
        ValueError: If a number is not positive, if `axis` is invalid for a leaf, or if `params` is
            missing.
        TypeError: If an argument is not a number, if `axis` is traced, or if a leaf is not
            floating-point or complex.

    Examples:
        >>> import jax, jax.numpy as jnp, gradclip_jax as gcx
        >>> clip = gcx.adaptive_grad_clip(0.5)
        >>> params, grads = jnp.array([3.0, 4.0]), jnp.array([0.0, 10.0])
        >>> updates, _ = jax.jit(clip.update)(grads, clip.init(params), params)
        >>> updates.tolist()
        [0.0, 2.5]

    References:
        Brock, De, Smith and Simonyan, 2021, arXiv 2102.06171.
    """
    clipping = check_number("clipping", clipping, "The paper uses 0.01 for large batches.")
    rule = relative_to_params(clipping, eps)
    return norm_clip("clipping", rule, axis_granularity(axis), axis_name=axis_name)


@public
def autoclip(
    percentile: Number = 10.0,
    window: Count | None = None,
    *,
    axis_name: AxisName = None,
) -> optax.GradientTransformation:
    """Clip to a percentile of the recent global norms (AutoClip).

    Try this adaptive clip first. It works at every gradient scale, and in docs/study.md its default
    was closer to the best fixed threshold than the default of any other rule. The paper's
    percentile of 10 clips nine of ten steps, so tune the learning rate together with it. With a
    percentile of 90, one of ten steps is clipped.

    Args:
        percentile: Percentile from 1 to 100, with linear interpolation as in
            `numpy.percentile`.
        window: Number of norms in the window, 1 to 2^20, static; None means 1000. The paper uses
            all norms.
        axis_name: See `clip_by_global_norm`.

    Returns:
        A gradient transformation with a `ClipState`.

    Raises:
        ValueError: If a number is out of range.
        TypeError: If `window` is traced.

    Examples:
        >>> import jax, jax.numpy as jnp, gradclip_jax as gcx
        >>> clip = gcx.autoclip(percentile=50.0)
        >>> state = clip.init(jnp.zeros(1))
        >>> for grad in (2.0, 4.0, 60.0):
        ...     updates, state = jax.jit(clip.update)(jnp.array([grad]), state)
        >>> updates.tolist()
        [4.0]

    References:
        Seetharaman, Wichern, Pardo and Le Roux, 2020, arXiv 2007.14469.
    """
    # `window` is static. `optax.inject_hyperparams` traces defaults that are numbers.
    rule = percentile_rule(percentile, 1000 if window is None else window)
    return norm_clip("percentile", rule, axis_name=axis_name)


@public
def zclip(
    z_threshold: Number = 2.5,
    decay: Number = 0.97,
    warmup_steps: int = 25,
    max_norm: Number | None = 1.0,
    *,
    axis_name: AxisName = None,
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

    Returns:
        A gradient transformation with a `ClipState`.

    Raises:
        ValueError: If a number is out of range.

    Examples:
        >>> import jax, jax.numpy as jnp, gradclip_jax as gcx
        >>> clip = gcx.zclip(2.0, warmup_steps=2, max_norm=None)
        >>> state = clip.init(jnp.zeros(1))
        >>> for grad in (2.0, 4.0, 11.0):  # 11 is 8 deviations above the mean
        ...     updates, state = jax.jit(clip.update)(jnp.array([grad]), state)
        >>> round(updates.item(), 4)
        3.5

    References:
        Kumar, Owen, Chowdhury and Guera, 2025, arXiv 2504.02507.
    """
    rule = zscore(z_threshold, decay, warmup_steps)
    if max_norm is not None:
        hint = "The paper uses 1; pass None for no bound."
        rule = capped(rule, check_number("max_norm", max_norm, hint))
    return norm_clip("max_norm", rule, axis_name=axis_name)


@public
def adagc(
    relative: Number = 1.05,
    absolute: Number = 1.0,
    decay: Number = 0.98,
    warmup_steps: int = 100,
    *,
    axis_name: AxisName = None,
    num_layer_axes: Tree = None,
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

    Returns:
        A gradient transformation with a `ClipState`.

    Raises:
        ValueError: If a number is out of range.
        TypeError: If `num_layer_axes` is traced.

    Examples:
        >>> import jax, jax.numpy as jnp, gradclip_jax as gcx
        >>> clip = gcx.adagc(2.0, warmup_steps=1)
        >>> grads = {"w": jnp.array(0.5), "b": jnp.array(0.25)}
        >>> update = jax.jit(clip.update)
        >>> _, state = update(grads, clip.init(grads))
        >>> updates, _ = update({"w": jnp.array(0.75), "b": jnp.array(9.0)}, state)
        >>> float(updates["w"]), float(updates["b"])
        (0.75, 0.5)

    References:
        Wang et al., 2025, arXiv 2502.11034, version 2; the algorithm is that of version 1.
    """
    rule = adagc_rule(relative, absolute, decay, warmup_steps)
    return norm_clip("relative", rule, layer(num_layer_axes), axis_name=axis_name)
