"""The mean of clipped per-example gradients: norms, factors, one weighted backward pass."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import check_choice, check_count, check_number, describe, error_message
from .._mesh import sum_over, varying_axes
from .._types import Array, Labels, Tree
from ..clipping._norm import is_measured
from ._examples import Loss, as_batch, as_loss, batch_axes, groups_of, localised, measure

_REACTIONS = ("scale", "zero")


class ExampleStats(NamedTuple):
    """What is known of each example, in the order of the batch.

    Attributes:
        value: the loss, [B].
        norm: the norm of the gradient before clipping, [B]; a mapping from label with groups.
        factor: what the gradient was multiplied by, [B]; a mapping from label with groups.
        aux: the auxiliary output of the loss, each leaf [B, ...]; None without `has_aux`.
    """

    value: Array
    norm: Any
    factor: Any
    aux: Any


class _Clip(NamedTuple):
    """The choices of a clip, checked."""

    loss: Loss
    max_norm: Any
    param_labels: Labels | None
    reaction: Any
    reduction: str
    nonfinite: str
    num_microbatches: int
    batch_axis: int


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

    `grads = mean over i of g_i min(1, max_norm / |g_i|)` with `g_i = grad loss_fn(params, batch[i])`.
    The norms come from `per_example_norms`; a second backward pass weighs the losses by the factors.

    | case | what comes back |
    | --- | --- |
    | `max_norm=inf` | the ordinary mean |
    | an example of norm 0 | adds 0 |
    | an example whose norm is NaN or infinite | NaN everywhere; with `nonfinite="zero"` it adds 0 |
    | an example of weight 0 | adds nothing, and is not read: it may hold NaN |
    | no examples, or only weights of 0 | zeros |
    | an example of norm 1e20 or 1e-30 | clipped exactly |
    | float16 or bfloat16 parameters | factors are lower by the rounding of that dtype, so that the bound holds |

    Use `microbatched_value_and_grad` where examples need no clipping of their own.

    Args:
        loss_fn: as for `per_example_norms`.
        max_norm: the threshold, in the unit of the gradient: a number > 0, traced or not, or a
            schedule `step -> value`; with `param_labels` a mapping from label to one of those, where
            a label left out is not clipped.
        param_labels: as for `per_example_norms`; each group is then clipped by its own norm, at one
            more backward pass for each group.
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
        `jax.value_and_grad(..., has_aux=has_aux)` does: the mean (or sum) of the unclipped losses, and
        the gradients; `aux` has a leading axis of examples. `weights`, [B], multiplies each clipped
        gradient and its loss; False or 0 masks an example. `step` is what a schedule is called with.

    Raises:
        TypeError: `loss_fn` cannot be called, its value is no real scalar, or a number is none.
        ValueError: `max_norm` is not > 0; a word is unknown; `num_microbatches` does not divide the
            batch; `batch` or `weights` differ in their number of examples; a schedule lacks `step`.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> def loss(w, x):
        ...     return jnp.dot(w, x)
        >>> clipped = gcx.clipped_value_and_grad(loss, max_norm=1.0)
        >>> value, grads = clipped(jnp.ones(2), jnp.array([[3.0, 4.0], [0.0, 0.5]]))
        >>> float(value), [round(g, 3) for g in grads.tolist()]
        (3.75, [0.3, 0.65])

    References:
        Abadi et al. 2016, arXiv 1607.00133; Bu et al. 2023 (automatic clipping), arXiv 2206.07136.
    """
    name = "clipped_value_and_grad"
    loss = as_loss(name, loss_fn, has_aux, batched)
    clip = _checked(
        loss, max_norm, param_labels, reaction, reduction, nonfinite, num_microbatches, batch_axis
    )

    def run(params: Tree, batch: Tree, *, weights: Any = None, step: Any = None) -> Any:
        value, grads, stats = _run(clip, params, batch, weights, step)
        return ((value, stats.aux) if has_aux else value), grads

    return run


def clipped_grad_and_stats(
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
) -> Callable[..., tuple[Tree, ExampleStats]]:
    """Clips as `clipped_value_and_grad`, and tells value, norm and factor of each example.

    Args:
        loss_fn: as for `per_example_norms`.
        max_norm: as for `clipped_value_and_grad`.
        param_labels: as for `clipped_value_and_grad`.
        reaction: as for `clipped_value_and_grad`.
        reduction: as for `clipped_value_and_grad`.
        nonfinite: as for `clipped_value_and_grad`.
        has_aux: as for `clipped_value_and_grad`.
        batched: as for `per_example_norms`.
        batch_axis: as for `per_example_norms`.
        num_microbatches: as for `clipped_value_and_grad`.

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
    name = "clipped_grad_and_stats"
    loss = as_loss(name, loss_fn, has_aux, batched)
    clip = _checked(
        loss, max_norm, param_labels, reaction, reduction, nonfinite, num_microbatches, batch_axis
    )

    def run(
        params: Tree, batch: Tree, *, weights: Any = None, step: Any = None
    ) -> tuple[Tree, ExampleStats]:
        _, grads, stats = _run(clip, params, batch, weights, step)
        return grads, stats

    return run


def _checked(loss: Loss, max_norm: Any, labels: Any, reaction: Any, *rest: Any) -> _Clip:
    name = loss.function
    clip = _Clip(loss, max_norm, labels, reaction, *rest)
    hint = "Pass a positive number or a schedule; inf turns clipping off."
    for threshold in _thresholds(clip).values():
        if not callable(threshold):
            check_number(name, "max_norm", threshold, hint)
    if not callable(reaction):
        check_choice(name, "reaction", reaction, _REACTIONS)
    check_choice(name, "reduction", clip.reduction, ("mean", "sum"))
    check_choice(name, "nonfinite", clip.nonfinite, ("propagate", "zero"))
    check_count(name, "num_microbatches", clip.num_microbatches, "Pass 1 not to split.")
    return clip


def _thresholds(clip: _Clip) -> Mapping[Any, Any]:
    """The threshold of each group; one group, None, of all without labels."""
    if clip.param_labels is None:
        return {None: clip.max_norm}
    if not isinstance(clip.max_norm, Mapping):
        rule, hint = "a mapping from label to threshold", "Give one for each label to be clipped."
        raise TypeError(
            error_message(clip.loss.function, "max_norm", rule, repr(clip.max_norm), hint)
        )
    return clip.max_norm


def _run(
    clip: _Clip, params: Tree, batch: Tree, weights: Any, step: Any
) -> tuple[Array, Tree, ExampleStats]:
    """Value, gradients and statistics of a batch, in one part or several."""
    batch, size = as_batch(clip.loss.function, batch, clip.batch_axis)
    weights = _as_weights(clip, weights, size)
    axes = batch_axes((batch, weights))
    local = localised(params, axes)
    parts = clip.num_microbatches
    if parts == 1 or not size:
        sums, stats = _one_part(clip, local, batch, weights, step)
    else:
        sums, stats = _in_parts(clip, local, batch, weights, step)
    value, count, total, grads = sums
    value, count, total = (sum_over(x, axes) for x in (value, count, total))
    grads = jax.tree.map(
        lambda g, x: sum_over(g, axes - varying_axes(x)) if is_measured(x) else g, grads, params
    )
    if clip.reduction == "mean":
        value = value / jnp.where(count > 0, count, 1).astype(value.dtype)
        divisor = jnp.where(total > 0, total, 1)
        grads = jax.tree.map(
            lambda g: (g / divisor.astype(g.dtype)) if is_measured(g) else g, grads
        )
    return value, grads, stats


def _as_weights(clip: _Clip, weights: Any, size: int) -> Array | None:
    if weights is None:
        return None
    weights = jnp.asarray(weights)
    if weights.shape != (size,):
        rule, hint = f"one number for each of {size} examples", "Pass 0 to leave an example out."
        raise ValueError(
            error_message(clip.loss.function, "weights", rule, describe(weights), hint)
        )
    return weights.astype(jnp.float32)


def _in_parts(clip: _Clip, params: Tree, batch: Tree, weights: Any, step: Any) -> Any:
    """One part of the batch in memory at a time; part i holds every n-th example from i on."""
    parts = clip.num_microbatches
    for x in jax.tree.leaves(batch):
        if x.shape[0] % parts:
            rule = f"a number of examples that num_microbatches={parts} divides"
            hint = "Change one of the two, or pad with examples of weight 0."
            raise ValueError(
                error_message(clip.loss.function, "batch", rule, str(x.shape[0]), hint)
            )

    def split(x: Array) -> Array:
        return x.reshape(x.shape[0] // parts, parts, *x.shape[1:])

    rows = jax.tree.map(split, (batch, weights))

    def part(i: Array) -> Any:
        chosen = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, 1, keepdims=False), rows)
        return _one_part(clip, params, *chosen, step)

    first, _ = jax.eval_shape(part, jnp.int32(0))

    def body(sums: Any, i: Array) -> Any:
        new, stats = part(i)
        return jax.tree.map(lambda x, y: x + y if is_measured(y) else x, sums, new), stats

    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), first)
    sums, stats = lax.scan(body, zeros, jnp.arange(parts, dtype=jnp.int32))
    return sums, jax.tree.map(
        lambda x: jnp.swapaxes(x, 0, 1).reshape(x.shape[0] * x.shape[1], *x.shape[2:]), stats
    )


def _one_part(clip: _Clip, params: Tree, batch: Tree, weights: Any, step: Any) -> Any:
    """Sums over examples of value, weight and clipped gradient, and statistics."""
    size = jax.tree.leaves(batch)[0].shape[0]
    present = jnp.ones(size, bool) if weights is None else weights > 0
    if weights is not None and size:
        batch = replace_examples(batch, present)
    groups = groups_of(clip.loss.function, params, clip.param_labels)
    values, aux, norms = measure(clip.loss, params, batch, groups)
    factors = {label: _factor(clip, label, norms[label], step, params) for label in groups}
    keep = present
    if clip.nonfinite == "zero":
        keep = keep & jnp.isfinite(values)
        for label in groups:
            keep = keep & jnp.isfinite(norms[label])
        factors = {label: jnp.where(keep, factor, 0) for label, factor in factors.items()}
        if size:
            batch = replace_examples(batch, keep)
    ones = jnp.ones(size, jnp.float32) if weights is None else weights
    seeds = {k: jnp.where(present, f * ones.astype(f.dtype), 0) for k, f in factors.items()}
    grads = _weighted_gradient(clip.loss, params, batch, seeds, groups)
    if clip.nonfinite == "zero" or weights is not None:
        found = jnp.any(keep)
        grads = jax.tree.map(
            lambda g: jnp.where(found, g, jnp.zeros_like(g)) if is_measured(g) else g, grads
        )
    counted = jnp.where(keep, ones, 0)
    value = jnp.sum(jnp.where(keep, values * counted.astype(values.dtype), 0))
    sums = (value, jnp.sum(counted), jnp.sum(jnp.where(present, ones, 0)), grads)
    alone = clip.param_labels is None
    stats = ExampleStats(
        values, norms[None] if alone else norms, factors[None] if alone else factors, aux
    )
    return sums, stats


def replace_examples(batch: Tree, keep: Array) -> Tree:
    """The batch with the first kept example in place of those that are not kept.

    Their cotangents are zero, but zero times a NaN that they cause is NaN. A kept example causes
    none: its backward pass is linear, and was finite with a cotangent that was not zero.
    """
    first = jnp.argmax(keep)

    def replaced(x: Array) -> Array:
        other = lax.dynamic_index_in_dim(x, first, 0)
        where = keep.reshape(-1, *(1 for _ in x.shape[1:]))
        return jnp.where(where, x, other)

    return jax.tree.map(replaced, batch)


def _factor(clip: _Clip, label: Any, norm: Array, step: Any, params: Tree) -> Array:
    threshold = _thresholds(clip).get(label)
    if threshold is None:
        return jnp.ones_like(norm)
    if callable(threshold):
        if step is None:
            hint = "Pass the count of steps as `step=`; the schedule is called with it."
            raise ValueError(
                error_message(clip.loss.function, "step", "given with a schedule", "None", hint)
            )
        threshold = threshold(step)
    threshold = jnp.asarray(threshold).astype(norm.dtype)
    if callable(clip.reaction):
        return jnp.asarray(clip.reaction(norm, threshold)).astype(norm.dtype)
    within = norm <= threshold
    if clip.reaction == "zero":
        return jnp.where(within, 1, jnp.where(jnp.isnan(norm), norm, 0))
    # The second pass rounds again: in 8 bit of precision a norm of 1 can come out as 1.004.
    margin = 1 - _rounding(params)
    return jnp.where(within, 1, margin * (threshold / jnp.where(within, 1, norm)))


def _rounding(params: Tree) -> float:
    """The coarsest rounding of a parameter, if it is coarser than float32."""
    dtypes = [jnp.result_type(x) for x in jax.tree.leaves(params) if is_measured(x)]
    coarsest = max((float(jnp.finfo(dtype).eps) for dtype in dtypes), default=0.0)
    return coarsest if coarsest > float(jnp.finfo(jnp.float32).eps) else 0.0


def _weighted_gradient(
    loss: Loss, params: Tree, batch: Tree, seeds: dict[Any, Array], groups: dict[Any, list[int]]
) -> Tree:
    """The gradient of the sum of weighted losses, each group of leaves by its own weights."""

    def losses(params: Tree) -> Array:
        values = jax.vmap(lambda example: loss(params, example)[0])(batch)
        return values.astype(jnp.promote_types(values.dtype, jnp.float32))

    leaves, structure = jax.tree.flatten(params)
    measured = [i for i, x in enumerate(leaves) if is_measured(x)]

    def of_chosen(chosen: list[Array]) -> Array:
        full = list(leaves)
        for i, x in zip(measured, chosen, strict=True):
            full[i] = x
        return losses(jax.tree.unflatten(structure, full))

    values, backward = jax.vjp(of_chosen, [leaves[i] for i in measured])
    grads: list[Any] = [np.zeros(np.shape(x), jax.dtypes.float0) for x in leaves]
    for label, members in groups.items():
        (found,) = backward(seeds[label].astype(values.dtype))
        for i in members:
            grads[measured[i]] = found[i]
    return jax.tree.unflatten(structure, grads)
