"""Value and gradient of a loss, with the gradient of each example clipped."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import check_axis_name, check_choice, check_count, check_number
from .._errors import public, type_error, value_error
from .._leaves import measured_leaves
from .._mesh import shard_axes, sum_over, varying_axes
from .._types import Array, AxisName, Labels, Number, Tree
from ..accumulation._split import check_real
from ..clipping._formula import scale_factor, zero_factor
from ._losses import Examples, Loss, Outputs, groups_of, part_of, sum_parts
from ._sum import GroupNorms, LeafGroups, sums_and_norms

REACTIONS: Final = {"scale": scale_factor, "zero": zero_factor}


class Stats(NamedTuple):
    """Per-example statistics, in the order of the batch.

    Attributes:
        value: Loss of each example, shape [B].
        norm: Norm of each gradient before clipping, shape [B]; with `param_labels` a mapping from
            label to such an array.
        factor: Clip factor of each example, without its weight, shape [B]; with `param_labels` a
            mapping from label to such an array.
        weight: Weight that the loss returned for each example, float32[B]; None without
            `has_weight`.
        aux: Auxiliary output of the loss, each leaf of shape [B, ...]; None without `has_aux`.
    """

    value: Array
    norm: Any
    factor: Any
    weight: Array | None
    aux: Any


@public
def value_and_grad(
    fun: Callable[..., Any],
    max_norm: Any,
    *,
    argnums: int | Sequence[int] = 0,
    batch_argnums: int | Sequence[int] = 1,
    has_aux: bool = False,
    has_weight: bool = False,
    param_labels: Labels | None = None,
    reaction: Any = "scale",
    reduction: str = "mean",
    nonfinite: str = "propagate",
    num_microbatches: int = 1,
    num_real_microbatches: Any = None,
    axis_name: AxisName = None,
) -> Callable[..., tuple[tuple[Array, Stats], Tree]]:
    """Clip the gradient of each example, then average, in one backward pass.

    `grads = sum of w_i g_i min(1, max_norm / |g_i|) / sum of w_i`, where `g_i` is the gradient of
    `fun` for example i and `w_i` is its weight, which is 1 without `has_weight`. Per-example
    gradients are materialized only for leaves where this is cheaper. The sum is computed and
    returned in float32, or in float64 if a leaf has 64 bits, for parameters of any dtype.

    | case | result |
    | --- | --- |
    | any example of weight 1 | contributes at most `max_norm (1 + 1e-5)` to the sum |
    | `max_norm=inf` | the ordinary mean |
    | an example with norm 0 | contributes 0 |
    | an example with a non-finite norm | every leaf is NaN; contributes 0 with `nonfinite="zero"` |
    | an example of weight 0 | contributes 0, even if its gradient is NaN |
    | no examples, or only weights of 0 | zeros |
    | tokens that cancel, or a norm outside [1.8e-12, 1e19] | exact; this example is materialized |

    Use `microbatched_value_and_grad` if examples need not be clipped one by one.

    Args:
        fun: Loss of one example, as for `microbatched_value_and_grad`, except that the arguments
            at `batch_argnums` have no batch axis. It returns a real scalar, `(value, aux)` with
            `has_aux`, `(value, weight)` with `has_weight`, or `(value, (weight, aux))` with both.
            Examples must be independent, without batch statistics or in-batch negatives. To use a
            mean over a batch, pass `lambda params, x: mean_loss(params, x[None])`.
        max_norm: Threshold in the unit of the gradient; a positive number, which may be traced,
            such as `schedule(step)`. With `param_labels`, a mapping from each label to a
            threshold. A threshold of inf disables clipping.
        argnums: Positions of the arguments to differentiate with respect to.
        batch_argnums: Positions of the arguments whose leaves have a leading batch axis.
        has_aux: Whether `fun` returns auxiliary data.
        has_weight: Whether `fun` returns a weight, a real scalar >= 0 that multiplies the clipped
            gradient and the value; 0 masks an example.
        param_labels: Prefix tree of group labels for the differentiated arguments, or a function
            from these arguments to labels; each group is clipped by its own norm.
        reaction: "scale", "zero" (an example above the threshold contributes 0), or an elementwise
            function `(norm, threshold) -> factor`; `lambda norm, c: c / (norm + 0.01)` is
            automatic clipping.
        reduction: "mean", which divides by the sum of the weights, or "sum".
        nonfinite: "propagate", or "zero" to drop examples whose value or norm is not finite.
        num_microbatches: Number of micro-batches that are processed one after the other.
        num_real_microbatches: Number of micro-batches to process, as for
            `microbatched_value_and_grad`; the statistics of the remaining examples are zeros.
        axis_name: Mapped axes over which examples are sharded, required where the array's type
            does not carry the sharding: under `pmap` and `shard_map(check_vma=False)`. Value and
            gradient are summed over these axes.

    Returns:
        A function that takes the arguments of `fun`, with a batch in place of an example, and
        returns `((value, stats), grads)`, as `jax.value_and_grad(..., has_aux=True)` does: the mean
        (or sum) of the values, the `Stats` of all examples, and the gradient. With
        `nonfinite="zero"` the value does not include dropped examples.

    Raises:
        TypeError: If `fun` is not callable, its value or weight is not a real scalar, or a numeric
            argument is not a number.
        ValueError: If `max_norm` is not positive or has no entry for a label, if an option is
            unknown, if leaves differ in their number of examples, if `num_microbatches` does not
            divide this number, or if `num_real_microbatches` is larger than `num_microbatches`.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> def loss(w, x):
        ...     return jnp.dot(w, x)
        >>> clipped = gcx.per_example.value_and_grad(loss, max_norm=1.0)
        >>> (value, stats), grads = clipped(jnp.ones(2), jnp.array([[3.0, 4.0], [0.0, 0.5]]))
        >>> float(value), [round(g, 3) for g in grads.tolist()]
        (3.75, [0.3, 0.65])
        >>> [round(norm, 3) for norm in stats.norm.tolist()]
        [5.0, 0.5]

    References:
        Abadi et al. 2016, arXiv 1607.00133; Bu et al. 2022, arXiv 2210.00038 and 2206.07136.
    """
    loss = Loss(fun, argnums, batch_argnums, has_aux, has_weight)
    clip = _Clip(loss, max_norm, param_labels, reaction, reduction, nonfinite)
    clip.check(num_microbatches)
    check_real(num_real_microbatches, num_microbatches)
    axes = check_axis_name(axis_name)

    def run(*args: Any, **kwargs: Any) -> tuple[tuple[Array, Stats], Tree]:
        examples = loss.bind(args, kwargs, num_microbatches)
        return _run(clip, examples, num_real_microbatches, axes)

    return run


class _Clip(NamedTuple):
    """Checked options of `value_and_grad`."""

    loss: Loss
    max_norm: Any
    param_labels: Labels | None
    reaction: Any
    reduction: str
    nonfinite: str

    def check(self, num_microbatches: Any) -> None:
        if self.param_labels is not None and not isinstance(self.max_norm, Mapping):
            rule, hint = "a mapping from label to threshold", "Pass one threshold for each label."
            raise type_error("max_norm", rule, repr(self.max_norm), hint)
        hint = "Pass a positive number or `schedule(step)`; inf disables clipping."
        for threshold in self.thresholds().values():
            check_number("max_norm", threshold, hint)
        if not callable(self.reaction):
            check_choice("reaction", self.reaction, tuple(REACTIONS))
        check_choice("reduction", self.reduction, ("mean", "sum"))
        check_choice("nonfinite", self.nonfinite, ("propagate", "zero"))
        check_count("num_microbatches", num_microbatches, "Pass 1 to use the whole batch at once.")

    def thresholds(self) -> Mapping[Any, Number]:
        """Map each label to its threshold; without labels, the only label is None."""
        return {None: self.max_norm} if self.param_labels is None else self.max_norm

    def groups(self, params: Tree) -> LeafGroups:
        """Group the leaves by label; raise if a group has no threshold."""
        groups = groups_of(params, self.param_labels)
        for label in groups.keys() - self.thresholds().keys():
            rule, hint = "a mapping with every label", "Pass inf to disable clipping for a group."
            got = f"no threshold for {label!r}"
            raise value_error("max_norm", rule, got, hint)
        return groups

    def is_finite(self, outputs: Outputs, norms: GroupNorms) -> Array:
        """Return which examples have a finite norm, and a finite value if `nonfinite="zero"`."""
        checked = [*norms.values(), *([outputs.value] if self.nonfinite == "zero" else [])]
        return functools.reduce(jnp.logical_and, map(jnp.isfinite, checked))

    def factors(self, outputs: Outputs, norms: GroupNorms) -> GroupNorms:
        """Compute the clip factor of each example, without its weight."""
        is_finite = self.is_finite(outputs, norms)
        otherwise = 0 if self.nonfinite == "zero" else jnp.nan
        react = self.reaction if callable(self.reaction) else REACTIONS[self.reaction]

        def factor(norm: Array, threshold: Any) -> Array:
            chosen = react(norm, jnp.asarray(threshold).astype(norm.dtype))
            return jnp.where(is_finite, jnp.asarray(chosen).astype(norm.dtype), otherwise)

        return {k: factor(norm, self.thresholds()[k]) for k, norm in norms.items()}


def _run(
    clip: _Clip, examples: Examples, real: Any, axis_name: AxisName
) -> tuple[tuple[Array, Stats], Tree]:
    """Sum values and gradients over the micro-batches of a batch and over devices."""
    params = measured_leaves(examples.params)
    spread = functools.partial(shard_axes, axis_name=axis_name)
    axes = frozenset[str]().union(*map(spread, jax.tree.leaves(examples.batch)))
    groups = clip.groups(examples.params)

    of_part = functools.partial(_sums, clip, examples, groups)
    parts, batch = examples.split.parts, examples.batch
    if parts == 1 and real is None:
        sums, stats = of_part(batch)
    else:
        sums, stats = sum_parts(lambda i: of_part(part_of(batch, parts, i)), parts, real)
    grads, *of_values = sums
    value, kept, weight = (sum_over(x, axes) for x in of_values)
    grads = [sum_over(g, axes - varying_axes(x)) for g, x in zip(grads, params, strict=True)]
    if clip.reduction == "mean":
        value = value / jnp.where(kept > 0, kept, 1).astype(value.dtype)
        grads = [g / jnp.where(weight > 0, weight, 1).astype(g.dtype) for g in grads]
    # Integer leaves get a float0 gradient, as `jax.grad(allow_int=True)` returns.
    tree = examples.rebuild(grads, lambda x: np.zeros(np.shape(x), jax.dtypes.float0))
    return (value, stats), tree


def _sums(
    clip: _Clip, examples: Examples, groups: LeafGroups, batch: Tree
) -> tuple[list[Any], Stats]:
    """Return the sums of gradients, values and weights, and the statistics of each example."""
    outputs = examples.outputs(batch)
    params = measured_leaves(examples.params)
    grads, norms = sums_and_norms(outputs, params, groups, clip.factors)
    factors = clip.factors(outputs, norms)
    weight = kept = jnp.where(outputs.weight > 0, outputs.weight, 0)
    if clip.nonfinite == "zero":
        kept = jnp.where(clip.is_finite(outputs, norms), weight, 0)
    values = outputs.value * kept.astype(outputs.value.dtype)
    sums = [grads, jnp.sum(jnp.where(kept > 0, values, 0)), jnp.sum(kept), jnp.sum(weight)]
    if clip.param_labels is None:
        norms, factors = norms[None], factors[None]
    given = outputs.weight if clip.loss.has_weight else None
    return sums, Stats(outputs.value, norms, factors, given, outputs.aux)
