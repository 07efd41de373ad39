"""From norms to factors, and to the gradient of the losses weighted by them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._checks import error_message
from .._types import Array, Labels, Scalar, Tree
from ..clipping._norm import measured_leaves
from ._examples import Loss, LossOptions, groups_of, measure, on_measured
from ._recompute import vjp_recomputing


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


class ClipOptions(LossOptions, total=False):
    """How examples are clipped; see `clipped_value_and_grad`."""

    param_labels: Labels | None
    reaction: Any
    reduction: str
    nonfinite: str
    num_microbatches: int


class Clip(NamedTuple):
    """The choices of a clip, checked by its public face."""

    loss: Loss
    max_norm: Any
    param_labels: Labels | None = None
    reaction: Any = "scale"
    reduction: str = "mean"
    nonfinite: str = "propagate"
    num_microbatches: int = 1


class Sums(NamedTuple):
    """Sums over examples.

    Attributes:
        value: of the weighted values.
        kept_weight: of the weights of the examples that `value` counts.
        weight: of all weights.
        grads: of the weighted clipped gradients, for each leaf that is measured.
    """

    value: Scalar
    kept_weight: Scalar
    weight: Scalar
    grads: list[Array]


def clipped_sums(
    clip: Clip, params: Tree, batch: Tree, weights: Array | None, step: Any
) -> tuple[Sums, ExampleStats]:
    """Sums over the examples of a batch, and returns what is known of each."""
    size = jax.tree.leaves(batch)[0].shape[0]
    ones = jnp.ones(size, jnp.float32) if weights is None else weights
    keep = present = ones > 0
    if weights is not None:
        batch = _replace_examples(batch, present)
    groups = groups_of(clip.loss.function, params, clip.param_labels)
    values, aux, norms = measure(clip.loss, params, batch, groups)
    factors = {label: _factor(clip, label, norms[label], step, params) for label in groups}
    drops = clip.nonfinite == "zero"
    if drops:
        for x in (values, *norms.values()):
            keep = keep & jnp.isfinite(x)
        factors = {label: jnp.where(keep, factor, 0) for label, factor in factors.items()}
        batch = _replace_examples(batch, keep)
    seeds = {k: jnp.where(present, f * ones.astype(f.dtype), 0) for k, f in factors.items()}
    grads = _weighted_gradient(clip, params, batch, seeds, groups)
    if drops or weights is not None:
        # Where there was no example to put in place of the others.
        grads = [jnp.where(jnp.any(keep), g, jnp.zeros_like(g)) for g in grads]
    kept = jnp.where(keep, ones, 0)
    value = jnp.sum(jnp.where(keep, values * kept.astype(values.dtype), 0))
    sums = Sums(value, jnp.sum(kept), jnp.sum(jnp.where(present, ones, 0)), grads)
    if clip.param_labels is None:
        return sums, ExampleStats(values, norms[None], factors[None], aux)
    return sums, ExampleStats(values, norms, factors, aux)


def _replace_examples(batch: Tree, keep: Array) -> Tree:
    """Puts the first kept example in place of those that are not kept.

    Their cotangents are zero, but zero times a NaN that they cause is NaN. A kept example causes
    none: its backward pass is linear, and was finite with a cotangent that was not zero.
    """
    if not keep.size:
        return batch
    first = jnp.argmax(keep)

    def replaced(x: Array) -> Array:
        other = lax.dynamic_index_in_dim(x, first, 0)
        where = keep.reshape(-1, *(1 for _ in x.shape[1:]))
        return jnp.where(where, x, other)

    return jax.tree.map(replaced, batch)


def thresholds_of(clip: Clip) -> Mapping[Any, Any]:
    """Returns the threshold of each group; without labels of one, None."""
    if clip.param_labels is None:
        return {None: clip.max_norm}
    if not isinstance(clip.max_norm, Mapping):
        rule, hint = "a mapping from label to threshold", "Give one for each label to be clipped."
        got = repr(clip.max_norm)
        raise TypeError(error_message(clip.loss.function, "max_norm", rule, got, hint))
    return clip.max_norm


def _factor(clip: Clip, label: Any, norm: Array, step: Any, params: Tree) -> Array:
    """Computes what each example's gradient is multiplied by, [B]."""
    threshold = thresholds_of(clip).get(label)
    if threshold is None:
        return jnp.ones_like(norm)
    if callable(threshold):
        if step is None:
            hint = "Pass the count of steps as `step=`; the schedule is called with it."
            rule = "given with a schedule"
            raise ValueError(error_message(clip.loss.function, "step", rule, "None", hint))
        threshold = threshold(step)
    threshold = jnp.asarray(threshold).astype(norm.dtype)
    if callable(clip.reaction):
        return jnp.asarray(clip.reaction(norm, threshold)).astype(norm.dtype)
    within = norm <= threshold
    if clip.reaction == "zero":
        return jnp.where(within, 1, jnp.where(jnp.isnan(norm), norm, 0))
    return jnp.where(within, 1, _margin(params) * (threshold / jnp.where(within, 1, norm)))


def _margin(params: Tree) -> float:
    """Lowers factors a little where the second pass rounds coarsely.

    It multiplies other numbers than the first, so with bfloat16 parameters a norm of 1 could come
    out as 1.004.
    """
    coarsest = max((float(jnp.finfo(x.dtype).eps) for x in measured_leaves(params)), default=0.0)
    return 1 - coarsest if coarsest > float(jnp.finfo(jnp.float32).eps) else 1.0


def _weighted_gradient(
    clip: Clip, params: Tree, batch: Tree, seeds: dict[Any, Array], groups: dict[Any, list[int]]
) -> list[Array]:
    """Differentiates the sum of weighted losses, each group of leaves by its own weights."""
    chosen, rebuild = on_measured(params)

    def losses(chosen: list[Array]) -> Array:
        whole = rebuild(chosen)
        values = jax.vmap(lambda example: clip.loss(whole, example)[0])(batch)
        # In float16 a small weight would vanish before it meets a large gradient.
        return values.astype(jnp.promote_types(values.dtype, jnp.float32))

    # With `nonfinite="zero"` the batch is another one, and nothing is shared with the first pass.
    largest = None if clip.nonfinite == "zero" else sum(x.size for x in chosen)
    values, backward = vjp_recomputing(losses, chosen, largest)
    grads = list(chosen)
    for label, members in groups.items():
        (found,) = backward(seeds[label].astype(values.dtype))
        for i in members:
            grads[i] = found[i]
    return grads
