"""Per-example gradient norms, and the value and gradient of a loss with per-example clipping."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from .._checks import check_choice, check_number
from .._errors import public, type_error, value_error
from .._format import shortened
from .._types import Array, AxisName, Labels, Number, Tree
from .._weighted_sum import Reduction
from ..accumulation._split import check_parts
from ..clipping._formula import Reaction, check_reaction, factor_of
from ..norms._leaves import wide_dtype
from ..norms._mesh import check_axis_name, shard_axes, sum_over, varying_axes
from ._clipped_sum import sums_and_norms
from ._loss import Examples, Loss, Outputs, by_label, groups_of, sum_parts


class Stats(NamedTuple):
    """Per-example statistics, in the order of the batch.

    Attributes:
        value: Loss of each example, shape [B].
        norm: Gradient norm of each example before clipping, shape [B]. With `param_labels`, a
            mapping from label to an array of norms.
        factor: Clip factor of each example, not multiplied by its weight, shape [B]. With
            `param_labels`, a mapping from label to an array of factors.
        weight: Weight of each example as returned by the loss, float32[B]; None without
            `has_weight`.
        aux: Auxiliary output of the loss, whose leaves have shape [B, ...]; None without `has_aux`.
    """

    value: Array
    norm: Array | Mapping[Hashable, Array]
    factor: Array | Mapping[Hashable, Array]
    weight: Array | None
    aux: Tree


@public
def value_and_grad(
    fun: Callable[..., Any],
    max_norm: Number | Mapping[Any, Number],
    *,
    argnums: int | Sequence[int] = 0,
    batch_argnums: int | Sequence[int] = 1,
    has_aux: bool = False,
    has_weight: bool = False,
    param_labels: Labels | None = None,
    reaction: Reaction = "scale",
    reduction: Reduction = "mean",
    nonfinite: Literal["propagate", "zero"] = "propagate",
    num_microbatches: int = 1,
    num_real_microbatches: Number | None = None,
    axis_name: AxisName = None,
) -> Callable[..., tuple[tuple[Array, Stats], Tree]]:
    """Compute the mean of clipped per-example gradients in one backward pass.

    `grads = sum of w_i g_i min(1, max_norm / |g_i|) / sum of w_i`, where `g_i` is the gradient of
    `fun` for example i and `w_i` is its weight, which is 1 without `has_weight`. The per-example
    gradients of a leaf are materialized only where this reduces the cost. Gradients are summed and
    returned in float32 even for bfloat16 parameters, and in float64 for 64-bit leaves.

    | case | result |
    | --- | --- |
    | any example of weight 1 | contributes at most `max_norm (1 + 1e-5)` to the sum |
    | `max_norm=inf` | the ordinary mean |
    | an example with norm 0 | contributes 0 |
    | an example with a non-finite norm | every leaf of the gradient is NaN |
    | the same with `nonfinite="zero"` | contributes 0; its weight is in the divisor of `grads` |
    | the value with `nonfinite="zero"` | the mean of the examples that are not dropped |
    | an example of weight 0 or NaN | contributes 0, even if its gradient is NaN |
    | no examples, or only weights of 0 | zeros |
    | tokens that cancel | exact; the gradient of this example is materialized |
    | norms and elements outside the range of `global_norm` | non-finite above, 0 below |

    Use `microbatched_value_and_grad` if per-example clipping is not needed.

    **Rounding.** The float32 sum of B clipped gradients has a rounding error of at most `d u S` to
    first order, with `u = 6e-8`, `S = B max_norm (1 + 1e-5)` and `d` the largest number of
    additions that a term takes part in. XLA does not specify the order of additions, so `d` is
    between `log2(B)` and `B`, plus one for each addition over micro-batches or devices. If a
    privacy proof must hold for the computed sum, add `2 (d + 2) u S` to its sensitivity `max_norm`.
    The factor `1 + 1e-5` relies on a measured error of matrix products, not on a proven bound.

    Args:
        fun: Loss function that is called with a single example, so that the arguments at
            `batch_argnums` have no batch axis. It returns a real scalar, `(value, aux)` with
            `has_aux`, `(value, weight)` with `has_weight`, or `(value, (weight, aux))` with both.
            Examples must be independent, without batch statistics or in-batch negatives. To use a
            mean over a batch, pass `lambda params, x: mean_loss(params, x[None])`.
        max_norm: Clipping threshold for the gradient norm of each example. A positive number, which
            may be traced, such as `schedule(step)`. With `param_labels`, a mapping from each label
            to a threshold. A threshold of inf disables clipping.
        argnums: Positions of the arguments to differentiate with respect to.
        batch_argnums: Positions of the arguments whose leaves have a leading batch axis.
        has_aux: Whether `fun` returns auxiliary data.
        has_weight: Whether `fun` returns the weight of the example, a real scalar >= 0 that
            multiplies the value and the clipped gradient. A weight of 0 masks the example.
        param_labels: Group labels as a prefix tree of the differentiated arguments, or a function
            that maps these arguments to labels. Each group is clipped by its own norm.
        reaction: "scale", "zero" (an example above the threshold contributes 0), or an elementwise
            function `(norm, threshold) -> factor`; `lambda norm, c: c / (norm + 0.01)` is
            automatic clipping.
        reduction: "mean", which divides by the sum of the weights, or "sum".
        nonfinite: "propagate", or "zero" to drop examples whose value or norm is not finite.
        num_microbatches: Number of micro-batches that are processed sequentially.
        num_real_microbatches: Number of micro-batches to process, which may be traced. The
            statistics of the remaining examples are zeros.
        axis_name: Mapped axes over which examples are sharded. Required under `pmap` and
            `shard_map(check_vma=False)`, where array types do not carry the sharding. Value and
            gradient are summed over these axes.

    Returns:
        A function that takes the arguments of `fun`, with a batch in place of an example, and
        returns `((value, stats), grads)`, as `jax.value_and_grad(..., has_aux=True)` does: the mean
        (or sum) of the values, the `Stats` of all examples, and the gradient.

    Raises:
        TypeError: If `fun` is not callable, if its value or weight is not a real scalar, or if a
            numeric argument is not a number.
        ValueError: If `max_norm` is not positive or has no entry for a label, if an option is
            unknown, if the batch leaves have different numbers of examples, if `num_microbatches`
            does not divide this number, or if `num_real_microbatches` is larger than
            `num_microbatches`.

    Examples:
        >>> import jax, jax.numpy as jnp, gradclip_jax as gcx
        >>> def loss(w, x):
        ...     return jnp.dot(w, x)
        >>> clipped = jax.jit(gcx.per_example.value_and_grad(loss, max_norm=1.0))
        >>> (value, stats), grads = clipped(jnp.ones(2), jnp.array([[3.0, 4.0], [0.0, 0.5]]))
        >>> float(value), [round(g, 3) for g in grads.tolist()]
        (3.75, [0.3, 0.65])
        >>> [round(norm, 3) for norm in stats.norm.tolist()]
        [5.0, 0.5]

    References:
        Abadi et al. 2016, arXiv 1607.00133; Bu et al. 2022, arXiv 2210.00038 and 2206.07136.
    """
    loss = Loss(fun, argnums, batch_argnums, has_aux, has_weight)
    thresholds: Any = {None: max_norm} if param_labels is None else max_norm
    if not isinstance(thresholds, Mapping):
        hint = "Pass one for each label of `param_labels`."
        raise type_error("max_norm", "a mapping from label to threshold", shortened(max_norm), hint)
    hint = "Pass a positive number or `schedule(step)`; inf disables clipping."
    for threshold in thresholds.values():
        check_number("max_norm", threshold, hint)
    check_reaction(reaction)
    check_choice("reduction", reduction, ("mean", "sum"))
    check_choice("nonfinite", nonfinite, ("propagate", "zero"))
    check_parts(num_microbatches, num_real_microbatches)
    check_axis_name(axis_name)

    def run(*args: Any, **kwargs: Any) -> tuple[tuple[Array, Stats], Tree]:
        examples = loss.bind(args, kwargs, num_microbatches)
        groups = groups_of(examples, param_labels)
        for label in groups.keys() - thresholds.keys():
            got, hint = f"no threshold for {label!r}", "Pass inf to disable clipping for a group."
            raise value_error("max_norm", "a mapping with every label", got, hint)
        clip = _Clip(groups, thresholds, reaction, drops=nonfinite == "zero")
        of_part = functools.partial(_sums, clip, examples)
        sums, stats = sum_parts(of_part, examples.batch, num_microbatches, num_real_microbatches)
        value, grads = _reduced(sums, examples, axis_name, is_mean=reduction == "mean")
        value = value.astype(stats.value.dtype)
        return (value, stats if has_weight else stats._replace(weight=None)), grads

    return run


@public
def norms(
    fun: Callable[..., Any],
    *,
    argnums: int | Sequence[int] = 0,
    batch_argnums: int | Sequence[int] = 1,
    has_aux: bool = False,
    has_weight: bool = False,
    param_labels: Labels | None = None,
) -> Callable[..., Array | dict[Hashable, Array]]:
    """Compute the gradient norm of each example without materializing per-example gradients.

    `norms[i] = |grad fun(params, batch[i])|`, equal to the norms of `jax.vmap(jax.grad(fun))` to
    1e-5. The gradient of a weight is the product of the layer's inputs and output gradients. The
    norm is computed directly from these two factors if they are smaller than their product.

    | example | norm |
    | --- | --- |
    | tokens that cancel | exact; the gradient of this example is materialized |
    | norms and elements outside the range of `global_norm` | infinite above, 0 below |
    | a gradient with a NaN | NaN; the norms of other examples do not change |
    | an empty batch | an empty vector |
    | integer leaves of the parameters | an error, as in `jax.grad` |

    Call the returned function inside `jax.jit`.

    Args:
        fun: Loss function of a single example, as in `value_and_grad`; weight and auxiliary data
            are ignored.
        argnums: See `value_and_grad`.
        batch_argnums: See `value_and_grad`.
        has_aux: See `value_and_grad`.
        has_weight: See `value_and_grad`.
        param_labels: See `value_and_grad`.

    Returns:
        A function that takes the arguments of `fun` for a batch and returns a vector of norms,
        float32[B] (float64 if a leaf has 64 bits), or with `param_labels` a mapping from label to
        such a vector.

    Raises:
        TypeError: If `fun` is not callable or its value is not a real scalar.
        ValueError: If the batch leaves have different numbers of examples.

    Examples:
        >>> import jax, jax.numpy as jnp, gradclip_jax as gcx
        >>> def loss(w, x):
        ...     return jnp.dot(w, x)
        >>> norms = jax.jit(gcx.per_example.norms(loss))
        >>> norms(jnp.ones(2), jnp.array([[3.0, 4.0], [0.0, 2.0]])).round(3).tolist()
        [5.0, 2.0]

    References:
        Goodfellow 2015, arXiv 1510.01799; Li et al. 2022, arXiv 2110.05679.
    """
    loss = Loss(fun, argnums, batch_argnums, has_aux, has_weight)

    def run(*args: Any, **kwargs: Any) -> Array | dict[Hashable, Array]:
        examples = loss.bind(args, kwargs)
        groups = groups_of(examples, param_labels)
        outputs = examples.outputs(examples.batch)
        _, rows = sums_and_norms(outputs, examples.leaves, list(groups.values()), None)
        return by_label(groups, rows)

    return run


_Sums: TypeAlias = tuple[list[Array], Array, Array, Array]
"""Sums over examples: clipped gradients, losses, weights of kept examples, all weights."""


class _Clip(NamedTuple):
    """Clip factors for groups of leaves.

    Attributes:
        groups: Indices of the leaves with each label.
        thresholds: Clipping threshold of each label.
        reaction: "scale", "zero" or a function `(norm, threshold) -> factor`.
        drops: Whether to drop non-finite examples.
    """

    groups: dict[Hashable, list[int]]
    thresholds: Mapping[Hashable, Number]
    reaction: Reaction
    drops: bool

    def is_finite(self, outputs: Outputs, norms: list[Array]) -> Array:
        """Return a mask of the examples with finite norms and, if `drops`, finite loss values."""
        checked = [*norms, outputs.value] if self.drops else norms
        everywhere = jnp.ones_like(outputs.value, bool)
        return functools.reduce(jnp.logical_and, map(jnp.isfinite, checked), everywhere)

    def factors(self, outputs: Outputs, norms: list[Array]) -> list[Array]:
        """Compute the clip factor of each example for each group of leaves."""
        is_finite = self.is_finite(outputs, norms)
        factors: list[Array] = []
        for label, norm in zip(self.groups, norms, strict=True):
            threshold = jnp.asarray(self.thresholds[label], norm.dtype)
            factor = factor_of(self.reaction, norm, threshold)
            factors.append(jnp.where(is_finite, factor, 0 if self.drops else jnp.nan))
        return factors


def _sums(clip: _Clip, examples: Examples, batch: Tree) -> tuple[_Sums, Stats]:
    """Compute the sums over a batch and the statistics of each example."""
    outputs, groups = examples.outputs(batch), list(clip.groups.values())
    grads, norms = sums_and_norms(outputs, examples.leaves, groups, clip.factors)
    weight = kept = jnp.where(outputs.weight > 0, outputs.weight, 0)
    if clip.drops:
        kept = jnp.where(clip.is_finite(outputs, norms), weight, 0)
    # The sum of float16 losses or of their products with weights may overflow float16.
    wide = wide_dtype(outputs.value.dtype)
    values = outputs.value.astype(wide) * kept.astype(wide)
    value = jnp.sum(jnp.where(kept > 0, values, 0))
    norm = by_label(clip.groups, norms)
    factor = by_label(clip.groups, clip.factors(outputs, norms))
    stats = Stats(outputs.value, norm, factor, outputs.weight, outputs.aux)
    return (grads, value, jnp.sum(kept), jnp.sum(weight)), stats


def _reduced(
    sums: _Sums, examples: Examples, axis_name: AxisName, *, is_mean: bool
) -> tuple[Array, Tree]:
    """Sum value and gradients over devices, and divide by the sum of weights if `is_mean`."""
    spread = functools.partial(shard_axes, axis_name=axis_name)
    axes = frozenset[str]().union(*map(spread, jax.tree.leaves(examples.batch)))
    value, kept, weight = [sum_over(x, axes) for x in sums[1:]]
    pairs = zip(sums[0], examples.leaves, strict=True)
    grads = [sum_over(g, axes - varying_axes(x)) for g, x in pairs]
    if is_mean:
        # Dropping an example must not change the contributions of other examples to the gradient,
        # so its divisor includes all weights. The value is only reported, so it is the mean of the
        # known losses.
        value = value / jnp.where(kept > 0, kept, 1).astype(value.dtype)
        grads = [g / jnp.where(weight > 0, weight, 1).astype(g.dtype) for g in grads]
    return value, jax.tree.unflatten(jax.tree.structure(examples.params), grads)
