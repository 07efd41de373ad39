"""The mean of clipped per-example gradients, as `jax.value_and_grad` gives the ordinary mean."""

from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import check_choice, check_count, check_number, describe, error_message
from .._mesh import sum_over, vary, varying_axes
from .._types import Array, Labels, Tree
from ..accumulation._split import Split, in_order, micro_arguments
from ._examples import as_batch, as_loss, batch_axes, localised, on_measured
from ._weigh import Clip, ClipOptions, ExampleStats, Sums, clipped_sums, thresholds_of


def clipped_value_and_grad(
    loss_fn: Callable[..., Any],
    max_norm: Any,
    *,
    param_labels: Labels | None = None,
    reaction: Any = "scale",
    reduction: str = "mean",
    nonfinite: str = "propagate",
    has_aux: bool = False,
    batched: bool = False,
    batch_axis: int = 0,
    num_microbatches: int = 1,
) -> Callable[..., Any]:
    """Clips the gradient of each example by itself, then averages; no gradient is written down.

    `grads = mean over i of g_i min(1, max_norm / |g_i|)`, `g_i = grad loss_fn(params, batch[i])`.
    The norms come as in `per_example_norms`; a second backward pass weighs each loss by its factor.

    | case | what comes back |
    | --- | --- |
    | `max_norm=inf` | the ordinary mean |
    | an example of norm 0 | adds 0 |
    | an example whose norm is NaN or infinite | NaN everywhere; with `nonfinite="zero"` it adds 0 |
    | an example of weight 0 | adds nothing, and is not read: it may hold NaN |
    | no examples, or only weights of 0 | zeros |
    | an example of norm 1e20 or 1e-30 | clipped exactly |
    | float16 or bfloat16 parameters | factors are lower by one rounding, so that the bound holds |

    Use `microbatched_value_and_grad` where examples need no clipping of their own.

    Args:
        loss_fn: as for `per_example_norms`.
        max_norm: the threshold, in the unit of the gradient: a number > 0, traced or not, or a
            schedule `step -> value`; with `param_labels` a mapping from label to one of those,
            where a label left out is not clipped.
        param_labels: as for `per_example_norms`; each group is then clipped by its own norm, at
            one more backward pass for each group.
        reaction: "scale", "zero" (an example above the threshold adds 0), or a function
            `(norm, threshold) -> factor`, elementwise; `lambda norm, c: c / (norm + 0.01)` is
            automatic clipping.
        reduction: "mean", divided by the sum of the weights, or "sum".
        nonfinite: "propagate", or "zero" to leave out an example whose value or norm is not
            finite. The second takes one more forward pass.
        has_aux: whether `loss_fn` returns `(value, aux)`.
        batched: as for `per_example_norms`.
        batch_axis: as for `per_example_norms`.
        num_microbatches: into how many parts the batch is split, one in memory at a time.

    Returns:
        A function `(params, batch, *, weights=None, step=None)` that returns as
        `jax.value_and_grad(..., has_aux=has_aux)` does: the mean (or sum) of the losses that are
        not left out, and the gradients; `aux` has a leading axis of examples. `weights`, [B], >= 0,
        multiplies each clipped gradient and its loss; False or 0 masks an example. `step` is what
        a schedule is called with.

    Raises:
        TypeError: `loss_fn` cannot be called, its value is no real scalar, or a number is none.
        ValueError: `max_norm` is not > 0; a word is unknown; `num_microbatches` does not divide
            the batch; `batch` or `weights` differ in their number of examples; a schedule lacks
            `step`.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> def loss(w, x):
        ...     return jnp.dot(w, x)
        >>> clipped = gcx.clipped_value_and_grad(loss, max_norm=1.0)
        >>> value, grads = clipped(jnp.ones(2), jnp.array([[3.0, 4.0], [0.0, 0.5]]))
        >>> float(value), [round(g, 3) for g in grads.tolist()]
        (3.75, [0.3, 0.65])

    References:
        Abadi et al. 2016, arXiv 1607.00133; automatic clipping: arXiv 2206.07136.
    """
    clip = _checked(
        "clipped_value_and_grad",
        loss_fn,
        max_norm,
        param_labels=param_labels,
        reaction=reaction,
        reduction=reduction,
        nonfinite=nonfinite,
        has_aux=has_aux,
        batched=batched,
        batch_axis=batch_axis,
        num_microbatches=num_microbatches,
    )

    def run(params: Tree, batch: Tree, *, weights: Any = None, step: Any = None) -> Any:
        value, grads, stats = _run(clip, params, batch, weights, step)
        return ((value, stats.aux) if has_aux else value), grads

    return run


def clipped_grad_and_stats(
    loss_fn: Callable[..., Any], max_norm: Any, **options: Unpack[ClipOptions]
) -> Callable[..., tuple[Tree, ExampleStats]]:
    """Clips as `clipped_value_and_grad`, and returns value, norm and factor of each example.

    Args:
        loss_fn: as for `per_example_norms`.
        max_norm: as for `clipped_value_and_grad`.
        options: those of `clipped_value_and_grad`.

    Returns:
        A function `(params, batch, *, weights=None, step=None)` to `(grads, ExampleStats)`.

    Raises:
        TypeError: as for `clipped_value_and_grad`.
        ValueError: as for `clipped_value_and_grad`.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> def loss(w, x):
        ...     return jnp.dot(w, x)
        >>> clipped = gcx.clipped_grad_and_stats(loss, max_norm=1.0)
        >>> grads, stats = clipped(jnp.ones(2), jnp.array([[3.0, 4.0], [0.0, 0.5]]))
        >>> stats.norm.tolist(), [round(f, 3) for f in stats.factor.tolist()]
        ([5.0, 0.5], [0.2, 1.0])
    """
    clip = _checked("clipped_grad_and_stats", loss_fn, max_norm, **options)

    def run(
        params: Tree, batch: Tree, *, weights: Any = None, step: Any = None
    ) -> tuple[Tree, ExampleStats]:
        _, grads, stats = _run(clip, params, batch, weights, step)
        return grads, stats

    return run


def _checked(
    name: str,
    loss_fn: Any,
    max_norm: Any,
    has_aux: bool = False,
    batched: bool = False,
    batch_axis: int = 0,
    **options: Any,
) -> Clip:
    clip = Clip(as_loss(name, loss_fn, has_aux, batched, batch_axis), max_norm, **options)
    hint = "Pass a positive number or a schedule; inf turns clipping off."
    for threshold in thresholds_of(clip).values():
        if not callable(threshold):
            check_number(name, "max_norm", threshold, hint)
    if not callable(clip.reaction):
        check_choice(name, "reaction", clip.reaction, ("scale", "zero"))
    check_choice(name, "reduction", clip.reduction, ("mean", "sum"))
    check_choice(name, "nonfinite", clip.nonfinite, ("propagate", "zero"))
    check_count(name, "num_microbatches", clip.num_microbatches, "Pass 1 not to split.")
    return clip


def _run(
    clip: Clip, params: Tree, batch: Tree, weights: Any, step: Any
) -> tuple[Array, Tree, ExampleStats]:
    """Adds up value and gradients over the parts of a batch and over devices."""
    batch, size = as_batch(clip.loss, batch)
    weights = _as_weights(clip, weights, size)
    axes = batch_axes((batch, weights))
    in_parts = clip.num_microbatches > 1 and size > 0
    sums, stats = (_sums_of_parts if in_parts else clipped_sums)(
        clip, localised(params, axes), batch, weights, step
    )
    value, count, total = (sum_over(x, axes) for x in sums[:3])
    chosen, rebuild = on_measured(params)
    pairs = zip(sums.grads, chosen, strict=True)
    grads = [sum_over(g, axes - varying_axes(x)) for g, x in pairs]
    if clip.reduction == "mean":
        value = value / jnp.where(count > 0, count, 1).astype(value.dtype)
        divisor = jnp.where(total > 0, total, 1)
        grads = [g / divisor.astype(g.dtype) for g in grads]
    # The gradient of an integer is that of `jax.grad(allow_int=True)`.
    return value, rebuild(grads, lambda x: np.zeros(np.shape(x), jax.dtypes.float0)), stats


def _as_weights(clip: Clip, weights: Any, size: int) -> Array | None:
    if weights is None:
        return None
    weights = jnp.asarray(weights)
    if weights.shape != (size,):
        rule, hint = f"one number for each of {size} examples", "Pass 0 to leave an example out."
        got = describe(weights)
        raise ValueError(error_message(clip.loss.function, "weights", rule, got, hint))
    return weights.astype(jnp.float32)


def _sums_of_parts(
    clip: Clip, params: Tree, batch: Tree, weights: Array | None, step: Any
) -> tuple[Sums, ExampleStats]:
    """Holds one part of the batch at a time; part i has every n-th example from i on."""
    parts, size = clip.num_microbatches, jax.tree.leaves(batch)[0].shape[0]
    if size % parts:
        rule = f"a number of examples that num_microbatches={parts} divides"
        hint = "Change one of the two, or pad with examples of weight 0."
        raise ValueError(error_message(clip.loss.function, "batch", rule, str(size), hint))
    split = Split(parts, batches=(0, 1), keys=(), differentiated=(), takes_one=False)

    def add(sums: Sums | None, i: Array) -> tuple[Sums, ExampleStats]:
        own_batch, own_weights = micro_arguments((batch, weights), split, i)
        new, stats = clipped_sums(clip, params, own_batch, own_weights, step)
        return new if sums is None else jax.tree.map(jnp.add, sums, new), stats

    shapes, _ = jax.eval_shape(lambda: add(None, jnp.int32(0)))
    axes = batch_axes((batch, weights))
    zeros = jax.tree.map(lambda x: vary(jnp.zeros(x.shape, x.dtype), axes), shapes)
    sums, stats = lax.scan(add, zeros, jnp.arange(parts, dtype=jnp.int32))
    return sums, jax.tree.map(in_order, stats)
