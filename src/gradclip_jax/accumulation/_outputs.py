"""Run micro-batches one after another, and combine their outputs."""

import functools
from collections.abc import Callable
from typing import Final

import jax
import jax.numpy as jnp
from jax import lax

from .._checks import broadcast_prefix, describe, is_traced, leaf_path
from .._devices import summand
from .._errors import type_error
from .._run_if import run_step
from .._types import Array, Scalar, Tree
from ..norms._leaves import wide_dtype
from ..norms._mesh import vary, varying_axes, zeros_of_type
from ._reduction import REDUCTIONS, add_weighted, divide
from ._split import Split, in_order

AUX_REDUCTIONS: Final = (*REDUCTIONS, "last", "concatenate")
_HINT: Final = (
    "'mean' requires floating-point leaves, 'sum' numbers, 'concatenate' leaves with the same "
    "number of rows for each example, and 'last' accepts every leaf. The default is 'concatenate' "
    "for leaves that grow with the batch, and 'mean' for floating-point scalars."
)


def run_micro_batches(
    micro_batch: Callable[[Array, Scalar], tuple[Tree, Tree]],
    shapes: Tree,
    empty: Tree,
    scales: Array,
    split: Split,
) -> tuple[Tree, Tree]:
    """Return the stacked outputs of all micro-batches, and the sum of their gradients.

    `micro_batch(index, scale)` returns its outputs, of the given shapes, and its gradients
    multiplied by the scale. The outputs of micro-batches that did not run are zeros.
    """
    real, num_run = split.real, split.num_run

    def add(x: tuple[Array, Scalar], carry: Tree) -> tuple[Tree, Tree]:
        (index, scale), (totals, count) = x, carry
        outputs, grads = micro_batch(index, scale)
        is_added = (count >= 0) & (scale != 0)  # not a constant (see `summand`)

        def added(total: Array, grad: Array) -> Array:
            return add_weighted(total, summand(grad, is_added)).astype(total.dtype)

        return outputs, (jax.tree.map(added, totals, grads), count + 1)

    def step(carry: Tree, x: tuple[Array, Scalar]) -> tuple[Tree, Tree]:
        run = functools.partial(add, x)
        stacked, carry = run_step(x[0] < real if is_traced(real) else True, run, carry)
        return carry, stacked

    def padded(like: jax.ShapeDtypeStruct, stack: Array) -> Array:
        zeros = lax.broadcast(zeros_of_type(like), (split.parts - num_run,))
        return jnp.concatenate([stack, vary(zeros, varying_axes(stack))])

    first = jax.tree.map(lambda x: vary(x, varying_axes(scales)), (empty, jnp.int32(0)))
    (totals, _), outputs = lax.scan(step, first, (jnp.arange(num_run), scales[:num_run]))
    if num_run < split.parts:
        outputs = jax.tree.map(padded, shapes, outputs)
    return outputs, totals


def reduced(
    name: str, like: jax.ShapeDtypeStruct, stack: Array, split: Split, scales: Array, count: Scalar
) -> Array:
    """Reduce an output that is stacked over micro-batches to that of the batch."""
    if name == "concatenate":
        return in_order(stack, split.rows_per_example(like.shape))
    if name == "last":
        return lax.dynamic_index_in_dim(stack, jnp.maximum(split.real - 1, 0), keepdims=False)
    if name == "sum":
        return jnp.sum(stack, axis=0, dtype=like.dtype)
    # The output of a micro-batch of weight 0 may be NaN.
    scale = jnp.reshape(scales, (-1, *[1] * len(like.shape)))
    wide = jnp.where(scale == 0, jnp.zeros_like(stack), stack).astype(wide_dtype(like.dtype))
    mean = divide(jnp.sum(wide * scale.astype(wide.dtype), axis=0), count)
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
