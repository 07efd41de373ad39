"""Run micro-batches one after another, and combine their outputs."""

import functools
from collections.abc import Callable
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from .._checks import broadcast_prefix, describe, is_traced, leaf_path
from .._devices import summand
from .._errors import type_error, value_error
from .._leaves import wide_dtype
from .._mesh import max_over, vary, varying_axes, zeros_of_type
from .._run_if import run_step
from .._types import Array, Scalar, Tree
from ._reduction import REDUCTIONS, add_weighted, divide
from ._split import Split, in_order, rows_per_example

AUX_REDUCTIONS: Final = (*REDUCTIONS, "last", "concatenate")
_DTYPES: Final[dict[str | None, tuple[DTypeLike, ...]]] = {
    "mean": (jnp.inexact,),
    "sum": (jnp.number,),
}
_HINT: Final = (
    "'mean' requires floating-point leaves, 'sum' numbers, 'concatenate' leaves with the same "
    "number of rows for each example, and 'last' accepts every leaf."
)


class MicroOutputs(NamedTuple):
    """The outputs of a micro-batch, or those of all micro-batches, stacked.

    Attributes:
        value: Value of the loss.
        rows: Gradients with respect to arguments that are split, by position.
        aux: Auxiliary data, or None.
    """

    value: Tree
    rows: dict[int, Tree]
    aux: Tree


class Scales(NamedTuple):
    """The weights of micro-batches.

    Attributes:
        weights: Weight of each micro-batch; None if all are equal.
        mean: Mean of the positive weights.
        relative: Ratio of weight and mean for each micro-batch; 0 if it did not run or was dropped.
        divisor: Sum of these ratios; 1 if it is 0, and NaN if it is 0 because of non-finite
            micro-batches, which were dropped.
    """

    weights: Array | None
    mean: Scalar
    relative: Array
    divisor: Scalar

    def sum_divisor(self) -> Scalar:
        """Return the divisor that makes a sum of scaled values one of weighted values."""
        return jnp.where(jnp.sum(self.relative) > 0, 1 / self.mean, self.divisor)

    def without_dropped(self, stack: Array) -> Array:
        """Replace the outputs of micro-batches of weight 0, which may be NaN, by zeros."""
        scale = jnp.reshape(self.relative, (-1, *[1] * (stack.ndim - 1)))
        return jnp.where(scale == 0, jnp.zeros_like(stack), stack)


def scaled(x: Array, scale: Scalar | None) -> Array:
    """Multiply a value by the weight of its micro-batch relative to the mean; None means 1."""
    return x if scale is None else x * scale.astype(x.dtype)


def run_micro_batches(
    micro_batch: Callable[[Array, Scalar | None], tuple[MicroOutputs, Tree]],
    shapes: MicroOutputs,
    empty: Tree,
    weights: Array | None,
    parts: int,
    real: int | Array,
    drops_nonfinite: bool,
) -> tuple[MicroOutputs, Tree, Scales]:
    """Return the stacked outputs of all micro-batches, and the sum of their gradients.

    `micro_batch(index, scale)` returns its outputs, of the given shapes, and its gradients
    multiplied by the scale. The outputs of micro-batches that did not run are zeros.
    """
    mean = jnp.float32(1) if weights is None else _mean_weight(weights)
    scales = None if weights is None else weights.astype(jnp.float32) / mean
    axes = frozenset[str]().union(*map(varying_axes, jax.tree.leaves((weights, real))))

    def add(x: tuple[Array, Scalar | None], carry: Tree) -> tuple[Tree, Tree]:
        (index, scale), (totals, count) = x, carry
        outputs, grads = micro_batch(index, scale)
        # The predicate must not be a constant (see `summand`).
        is_added = count >= 0 if scale is None else scale != 0
        is_bad = jnp.array(False)
        if drops_nonfinite:
            is_bad = _is_nonfinite((scale, outputs.value, outputs.rows, grads))
            is_added &= ~is_bad

        def added(total: Array, grad: Array) -> Array:
            return add_weighted(total, summand(grad, is_added)).astype(total.dtype)

        return (outputs, is_bad), (jax.tree.map(added, totals, grads), count + 1)

    def step(carry: Tree, x: tuple[Array, Scalar | None]) -> tuple[Tree, Tree]:
        run = functools.partial(add, x)
        stacked, carry = run_step(x[0] < real, run, carry) if is_traced(real) else run(carry)
        return carry, stacked

    num_run = parts if is_traced(real) else int(real)
    first = jax.tree.map(lambda x: vary(x, axes), (empty, jnp.int32(0)))
    (totals, _), (outputs, is_bad) = lax.scan(step, first, (jnp.arange(num_run), scales))

    def padded(like: jax.ShapeDtypeStruct, stack: Array) -> Array:
        zeros = lax.broadcast(zeros_of_type(like), (parts - num_run,))
        return jnp.concatenate([stack, vary(zeros, varying_axes(stack))])

    if num_run < parts:
        outputs = jax.tree.map(padded, shapes, outputs)
    relative = jnp.ones(num_run, jnp.float32) if scales is None else scales
    if is_traced(real):
        relative = jnp.where(jnp.arange(parts) < real, relative, 0)
    kept = jnp.where(is_bad, 0, relative)
    total, dropped = jnp.sum(kept), jnp.any(kept != relative)
    divisor = jnp.where(total > 0, total, jnp.where(dropped, jnp.nan, 1.0))
    if weights is not None:
        weights = jnp.where(is_bad, jnp.zeros_like(weights), weights)
    kept = jnp.pad(kept, (0, parts - num_run))
    return outputs, totals, Scales(weights, mean, kept, divisor)


def _mean_weight(weights: Array) -> Scalar:
    """Return the mean of positive, finite weights, or 1 if there are none."""
    weights = weights.astype(jnp.float32)
    is_counted = jnp.isfinite(weights) & (weights > 0)
    count = jnp.sum(is_counted)
    return jnp.where(count > 0, jnp.sum(weights, where=is_counted) / jnp.maximum(count, 1), 1)


def _is_nonfinite(tree: Tree) -> Array:
    """Return whether any element is non-finite on any device."""
    flags = [~jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]
    is_bad = functools.reduce(jnp.logical_or, flags)
    return max_over(is_bad.astype(jnp.int32), varying_axes(is_bad)) > 0


def gradient_rows(like: jax.ShapeDtypeStruct, stack: Array, split: Split, by: Scales) -> Array:
    """Return the gradient with respect to an argument that was split."""
    rows = in_order(by.without_dropped(stack), rows_per_example(like.shape[0], split.sizes))
    return divide(rows, by.divisor).astype(like.dtype)


def reduced(
    name: str, like: jax.ShapeDtypeStruct, stack: Array, split: Split, real: int | Array, by: Scales
) -> Array:
    """Reduce an output that is stacked over micro-batches to that of the batch."""
    if name == "concatenate":
        return in_order(stack, rows_per_example(like.shape[0], split.sizes))
    if name == "last":
        return lax.dynamic_index_in_dim(stack, jnp.maximum(real - 1, 0), keepdims=False)
    if name == "sum":
        return jnp.sum(stack, axis=0, dtype=like.dtype)
    wide = by.without_dropped(stack).astype(wide_dtype(like.dtype))
    scale = jnp.reshape(by.relative, (-1, *[1] * len(like.shape))).astype(wide.dtype)
    return divide(jnp.sum(wide * scale, axis=0), by.divisor).astype(like.dtype)


def aux_reductions(reduction: Tree, split: Split, aux: Tree, whole_aux: Callable[[], Tree]) -> Tree:
    """Return a tree with the reduction of each leaf of the auxiliary output."""
    leaves, structure = jax.tree.flatten_with_path(aux)
    if not leaves and reduction is None:
        return aux
    given = broadcast_prefix("aux_reduction", reduction, "aux", aux, is_leaf=lambda x: x is None)
    if split.parts == 1:  # every reduction returns the only value, but a mean ignores a weight of 0
        defaults = ["mean" if _is_float_scalar(x) else "last" for _, x in leaves]
        names = [name or default for name, default in zip(given, defaults, strict=True)]
        return jax.tree.unflatten(structure, names)
    whole = jax.tree.leaves(whole_aux() if None in given else aux)

    names = []
    for name, (path, leaf), full in zip(given, leaves, whole, strict=True):
        place = leaf_path("aux", path)
        has_dtype = any(jnp.issubdtype(leaf.dtype, x) for x in _DTYPES.get(name, (leaf.dtype,)))
        has_rows = bool(leaf.shape) and rows_per_example(leaf.shape[0], split.sizes) > 0
        if not has_dtype or (name == "concatenate" and not has_rows):
            rule, got = f"a reduction that supports {describe(leaf)}", f"{name!r} for {place}"
            raise type_error("aux_reduction", rule, got, _HINT)
        if name is None:
            grows = has_rows and full.shape == (split.parts * leaf.shape[0], *leaf.shape[1:])
            name = "concatenate" if grows else _default_for(leaf, full, place)
        names.append(name)
    return jax.tree.unflatten(structure, names)


def _is_float_scalar(leaf: jax.ShapeDtypeStruct) -> bool:
    return not leaf.shape and jnp.issubdtype(leaf.dtype, jnp.floating)


def _default_for(micro: jax.ShapeDtypeStruct, whole: jax.ShapeDtypeStruct, place: str) -> str:
    """Return the reduction of a leaf without rows."""
    if _is_float_scalar(micro) and _is_float_scalar(whole):
        return "mean"
    rule = "specified for leaves that are not per-example rows or floating-point scalars"
    got = f"{describe(micro)} at {place}"
    raise value_error("aux_reduction", rule, got, _HINT)
