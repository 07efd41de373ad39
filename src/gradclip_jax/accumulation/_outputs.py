"""Run micro-batches one after another, and combine their outputs."""

import functools
from collections.abc import Callable
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._checks import broadcast_prefix, describe, is_traced, leaf_path
from .._devices import summand
from .._errors import type_error
from .._leaves import wide_dtype
from .._mesh import vary, varying_axes, zeros_of_type
from .._run_if import run_step
from .._types import Array, Scalar, Tree
from ..guarding._skip_nonfinite import all_finite
from ._reduction import REDUCTIONS, add_weighted, divide
from ._split import Split, in_order

AUX_REDUCTIONS: Final = (*REDUCTIONS, "last", "concatenate")
_HINT: Final = (
    "'mean' requires floating-point leaves, 'sum' numbers, 'concatenate' leaves with the same "
    "number of rows for each example, and 'last' accepts every leaf. The default is 'concatenate' "
    "for leaves that grow with the batch, and 'mean' for floating-point scalars."
)


class Scales(NamedTuple):
    """The weights of micro-batches, 1 by default.

    Attributes:
        relative: Ratio of each weight and their mean; 0 if it did not run or was dropped.
        divisor: Sum of these ratios; 1 if it is 0, and NaN if it is 0 because of non-finite
            micro-batches, which were dropped.
        total_weight: Sum of the weights of micro-batches that were not dropped.
    """

    relative: Array
    divisor: Scalar
    total_weight: Scalar


def run_micro_batches(
    micro_batch: Callable[[Array, Scalar], tuple[Tree, Tree]],
    shapes: Tree,
    empty: Tree,
    weights: Array,
    split: Split,
    drops_nonfinite: bool,
) -> tuple[Tree, Tree, Scales]:
    """Return the stacked outputs of all micro-batches, and the sum of their gradients.

    `micro_batch(index, scale)` returns its outputs, of the given shapes, and its gradients
    multiplied by the scale. The outputs of micro-batches that did not run are zeros.
    """
    real, num_run = split.real, len(weights)
    mean = _mean_weight(weights)
    scales = weights / mean
    axes = varying_axes(weights)

    def add(x: tuple[Array, Scalar], carry: Tree) -> tuple[Tree, Tree]:
        (index, scale), (totals, count) = x, carry
        outputs, grads = micro_batch(index, scale)
        # The predicate must not be a constant (see `summand`).
        is_added, is_bad = (count >= 0) & (scale != 0), jnp.array(False)
        if drops_nonfinite:
            is_bad = ~all_finite((scale, outputs[0], grads), None)
            is_added &= ~is_bad

        def added(total: Array, grad: Array) -> Array:
            return add_weighted(total, summand(grad, is_added)).astype(total.dtype)

        return (outputs, is_bad), (jax.tree.map(added, totals, grads), count + 1)

    def step(carry: Tree, x: tuple[Array, Scalar]) -> tuple[Tree, Tree]:
        run = functools.partial(add, x)
        stacked, carry = run_step(x[0] < real, run, carry) if is_traced(real) else run(carry)
        return carry, stacked

    def padded(like: jax.ShapeDtypeStruct, stack: Array) -> Array:
        zeros = lax.broadcast(zeros_of_type(like), (split.parts - num_run,))
        return jnp.concatenate([stack, vary(zeros, varying_axes(stack))])

    first = jax.tree.map(lambda x: vary(x, axes), (empty, jnp.int32(0)))
    (totals, _), (outputs, is_bad) = lax.scan(step, first, (jnp.arange(num_run), scales))
    if num_run < split.parts:
        outputs = jax.tree.map(padded, shapes, outputs)
    kept = jnp.where(is_bad, 0, scales)
    total, has_dropped = jnp.sum(kept), jnp.any(kept != scales)
    divisor = jnp.where(total > 0, total, jnp.where(has_dropped, jnp.nan, 1.0))
    kept = jnp.pad(kept, (0, split.parts - num_run))
    return outputs, totals, Scales(kept, divisor, jnp.sum(jnp.where(is_bad, 0, weights)))


def _mean_weight(weights: Array) -> Scalar:
    """Return the mean of positive, finite weights, or 1 if there are none."""
    is_counted = jnp.isfinite(weights) & (weights > 0)
    count = jnp.sum(is_counted)
    return jnp.where(count > 0, jnp.sum(weights, where=is_counted) / jnp.maximum(count, 1), 1)


def reduced(
    name: str, like: jax.ShapeDtypeStruct, stack: Array, split: Split, scales: Scales
) -> Array:
    """Reduce an output that is stacked over micro-batches to that of the batch."""
    if name == "concatenate":
        return in_order(stack, split.rows_per_example(like.shape))
    if name == "last":
        return lax.dynamic_index_in_dim(stack, jnp.maximum(split.real - 1, 0), keepdims=False)
    if name == "sum":
        return jnp.sum(stack, axis=0, dtype=like.dtype)
    # The output of a micro-batch of weight 0 may be NaN.
    scale = jnp.reshape(scales.relative, (-1, *[1] * len(like.shape)))
    wide = jnp.where(scale == 0, jnp.zeros_like(stack), stack).astype(wide_dtype(like.dtype))
    mean = divide(jnp.sum(wide * scale.astype(wide.dtype), axis=0), scales.divisor)
    return mean.astype(like.dtype)


def aux_reductions(reduction: Tree, split: Split, aux: Tree, whole_aux: Callable[[], Tree]) -> Tree:
    """Return a tree with the reduction of each leaf of the auxiliary output."""
    leaves, structure = jax.tree.flatten_with_path(aux)
    if not leaves and reduction is None:
        return aux
    given = broadcast_prefix("aux_reduction", reduction, "aux", aux, is_leaf=lambda x: x is None)
    whole = jax.tree.leaves(whole_aux() if None in given else aux)
    names: list[str] = []
    for name, (path, leaf), full in zip(given, leaves, whole, strict=True):
        has_rows = split.rows_per_example(leaf.shape) > 0
        is_supported = {
            "mean": jnp.issubdtype(leaf.dtype, jnp.inexact),
            "sum": jnp.issubdtype(leaf.dtype, jnp.number),
            "concatenate": has_rows,
            "last": True,
        }
        if name is None and has_rows and full.shape[:1] == (split.parts * leaf.shape[0],):
            name = "concatenate"
        is_number = leaf.shape == full.shape == () and jnp.issubdtype(leaf.dtype, jnp.floating)
        if name is None and is_number:
            name = "mean"
        if name is None or not is_supported[name]:
            rule = "a reduction that supports every leaf of aux"
            got = f"{name!r} for {describe(leaf)} at {leaf_path('aux', path)}"
            raise type_error("aux_reduction", rule, got, _HINT)
        names.append(name)
    return jax.tree.unflatten(structure, names)
