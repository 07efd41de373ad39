"""The mean of clipped per-example gradients, as `jax.value_and_grad` gives the ordinary mean."""

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
    """What is known of each example, in the order of the batch.

    Attributes:
        value: the loss, [B].
        norm: the norm of the gradient before clipping, [B]; a mapping from label with groups.
        factor: what the gradient was multiplied by, its weight left out, [B]; a mapping from label
            with groups.
        weight: what the loss returned, float32[B]; None without `has_weight`.
        aux: the auxiliary output of the loss, each leaf [B, ...]; None without `has_aux`.
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
    """Clips the gradient of each example by itself, then averages: one backward pass.

    `grads = sum of w_i g_i min(1, max_norm / |g_i|) / sum of w_i`, where `g_i` is the gradient of
    `fun` for example i, and `w_i` its weight, 1 without `has_weight`. No `g_i` is written down
    where its factors are smaller. The sum is computed and returned in float32, or float64 with a
    64 bit leaf, whatever the parameters are.

    | case | what comes back |
    | --- | --- |
    | any example of weight 1 | contributes at most `max_norm (1 + 1e-5)` to the sum |
    | `max_norm=inf` | the ordinary mean |
    | an example of norm 0 | adds 0 |
    | an example whose norm is NaN or infinite | NaN everywhere; with `nonfinite="zero"` it adds 0 |
    | an example of weight 0 | adds 0, whatever it holds |
    | no examples, or only weights of 0 | zeros |
    | tokens that cancel, or norms out of [1e-19, 1e19] | exact, and slower: one example at a time |

    Use `microbatched_value_and_grad` where examples need no clipping of their own.

    Args:
        fun: the loss of one example: as for `microbatched_value_and_grad`, but what is at
            `batch_argnums` has no axis of examples. It returns a real scalar, `(value, aux)` with
            `has_aux`, `(value, weight)` with `has_weight`, `(value, (weight, aux))` with both.
            Examples must not mix: no batch statistics, no negatives from the batch. A mean over
            a batch becomes one of an example as `lambda params, x: mean_loss(params, x[None])`.
        max_norm: the threshold, in the unit of the gradient: a number > 0, traced or not, such as
            `schedule(step)`; with `param_labels` a mapping with one for each label, where inf
            does not clip.
        argnums: positions of the arguments to differentiate by.
        batch_argnums: positions of what has examples along the first axis of each leaf.
        has_aux: whether `fun` returns auxiliary data.
        has_weight: whether `fun` returns a weight, a real scalar >= 0, that multiplies the clipped
            gradient and the value; 0 masks an example.
        param_labels: a prefix tree of group labels for what is differentiated by, or a function
            from that to labels; each group is clipped by its own norm.
        reaction: "scale", "zero" (an example above the threshold adds 0), or a function
            `(norm, threshold) -> factor`, elementwise; `lambda norm, c: c / (norm + 0.01)` is
            automatic clipping.
        reduction: "mean", divided by the sum of the weights, or "sum".
        nonfinite: "propagate", or "zero" to leave out an example whose value or norm is not
            finite.
        num_microbatches: into how many parts the batch is split, one in memory at a time.
        num_real_microbatches: how many of them are run, as for `microbatched_value_and_grad`; what
            is known of the other examples is zeros.
        axis_name: mapped axes over which examples are spread where types do not say so: `pmap`,
            `shard_map(check_vma=False)`. Value and gradient are summed over them.

    Returns:
        A function, called as `fun` is with a batch in place of an example, to
        `((value, stats), grads)`, as `jax.value_and_grad(..., has_aux=True)` returns: the mean (or
        sum) of the values that are not left out, the `Stats` of all examples, and the gradient.

    Raises:
        TypeError: `fun` cannot be called, its value or weight is no real scalar, or a number is
            none.
        ValueError: `max_norm` is not > 0, or lacks a label; a word is unknown; leaves differ in
            their number of examples, or `num_microbatches` does not divide it, or is below a known
            `num_real_microbatches`.

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
    """The choices of a clip."""

    loss: Loss
    max_norm: Any
    param_labels: Labels | None
    reaction: Any
    reduction: str
    nonfinite: str

    def check(self, num_microbatches: Any) -> None:
        if self.param_labels is not None and not isinstance(self.max_norm, Mapping):
            rule, hint = "a mapping from label to threshold", "Give one for each label."
            raise type_error("max_norm", rule, repr(self.max_norm), hint)
        hint = "Pass a positive number, or `schedule(step)`; inf turns clipping off."
        for threshold in self.thresholds().values():
            check_number("max_norm", threshold, hint)
        if not callable(self.reaction):
            check_choice("reaction", self.reaction, tuple(REACTIONS))
        check_choice("reduction", self.reduction, ("mean", "sum"))
        check_choice("nonfinite", self.nonfinite, ("propagate", "zero"))
        check_count("num_microbatches", num_microbatches, "Pass 1 not to split.")

    def thresholds(self) -> Mapping[Any, Number]:
        """Returns the threshold of each group; without labels of one, None."""
        return {None: self.max_norm} if self.param_labels is None else self.max_norm

    def groups(self, params: Tree) -> LeafGroups:
        """Sorts the leaves; refuses a group without a threshold, which nothing would bound."""
        groups = groups_of(params, self.param_labels)
        for label in groups.keys() - self.thresholds().keys():
            rule, hint = "a mapping with every label", "Pass inf for a group not to be clipped."
            got = f"none for {label!r}"
            raise value_error("max_norm", rule, got, hint)
        return groups

    def is_finite(self, outputs: Outputs, norms: GroupNorms) -> Array:
        """Says which examples neither spoil the sum nor are left out of it."""
        checked = [*norms.values(), *([outputs.value] if self.nonfinite == "zero" else [])]
        return functools.reduce(jnp.logical_and, map(jnp.isfinite, checked))

    def factors(self, outputs: Outputs, norms: GroupNorms) -> GroupNorms:
        """Computes what each example's gradient is multiplied by, its weight left out."""
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
    """Adds up value and gradients over the real parts of a batch and over devices."""
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
    # The gradient of an integer is that of `jax.grad(allow_int=True)`.
    tree = examples.rebuild(grads, lambda x: np.zeros(np.shape(x), jax.dtypes.float0))
    return (value, stats), tree


def _sums(
    clip: _Clip, examples: Examples, groups: LeafGroups, batch: Tree
) -> tuple[list[Any], Stats]:
    """Sums gradients, values, weights of values and all weights; what is known of each example."""
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
