"""Weighted sums of micro-batch gradients, and the gradient of a window."""

import itertools
from collections.abc import Iterator
from typing import Any, Final, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from .._checks import check_same_structure, describe, is_float0, is_scalar, is_traced
from .._errors import type_error, value_error
from .._leaves import wide_dtype
from .._mesh import check_placement, reshard_like
from .._rounding import rounded
from .._run_if import Flag
from .._types import Array, Number, Scalar, Tree

Weight: TypeAlias = Array | np.float32
"""The weight of a micro-batch; NumPy scalars are known at trace time."""

REDUCTIONS: Final = ("mean", "sum")


def accumulator_dtype(kind: DTypeLike, dtype: DTypeLike) -> DTypeLike:
    """Return the accumulator dtype for gradients of dtype `kind`; 64-bit dtypes are kept."""
    if jnp.finfo(kind).bits == 64:
        return kind
    return wide_dtype(kind, dtype) if jnp.issubdtype(kind, jnp.complexfloating) else dtype


def as_weight(weight: Any) -> Weight | None:
    """Convert a weight to float32[], as a NumPy scalar unless it is a JAX array."""
    if weight is None:
        return None
    rule, hint = "a real scalar >= 0", "Pass the number of examples or tokens in the micro-batch."
    if not is_scalar(weight, jnp.floating, jnp.integer, jnp.bool_):
        raise type_error("weight", rule, describe(weight), hint)
    is_array = isinstance(weight, jax.Array)
    value = weight.astype(jnp.float32) if is_array else np.float32(weight)
    if not is_traced(value) and float(value) < 0:
        raise value_error("weight", rule, repr(weight), hint)
    return value


def has_micro_batch(flush: Flag | bool | None, weight: Number | None) -> Flag:
    """Return whether a call of `update` passes a gradient; `flush` passes zeros of weight 0."""
    if flush is None or weight is None:
        return np.True_
    return ~((np.bool_(flush) if isinstance(flush, bool) else flush) & (weight == 0))


def add_weighted(total: Array, x: Array, weight: Weight | None = None) -> Array:
    """Add a value times its weight to a total, in the dtype of the total or wider.

    A value of weight 0 is masked instead of multiplied by 0, because it may be NaN.
    """
    # float16 cannot represent a weight of 70,000, and bfloat16 cannot represent 1,001.
    wide = wide_dtype(total.dtype)
    old, new = total.astype(wide), x.astype(wide)
    if weight is None:
        return old + new
    return jnp.where(weight == 0, old, old + new * weight.astype(wide))


def divide(total: Array, weight: Scalar) -> Array:
    """Return the weighted mean, in the dtype of the total or wider."""
    wide = wide_dtype(total.dtype)
    return total.astype(wide) / weight.astype(wide)


def params_of(params: Tree) -> Tree:
    """Return the parameters that receive gradients; for `optax.lookahead` the fast ones."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params


def accumulator_like(params: Tree, dtype: DTypeLike) -> Tree:
    """Return an empty accumulator; that of an integer parameter is an unused scalar."""

    def zeros(param: Array) -> Array:
        kind = jnp.result_type(param)
        if not jnp.issubdtype(kind, jnp.inexact):
            return jnp.zeros((), dtype)
        return jnp.zeros_like(param, accumulator_dtype(kind, dtype))

    return jax.tree.map(zeros, params)


def check_matches_accumulator(updates: Tree, acc: Tree) -> None:
    """Raise if gradients cannot be added to the accumulator; float0 leaves may have any shape."""
    if jax.tree.leaves(updates) and not jax.tree.leaves(acc):
        hint = "Convert the state of `every=1` with `convert_state`."
        raise value_error("state", "a state with an accumulator", "one without", hint)
    check_same_structure(updates, acc)
    check_placement("state.acc_grads", acc)


class MicroBatch(NamedTuple):
    """The gradients that one call of `update` adds to the accumulator.

    Attributes:
        grads: Gradients of the micro-batch.
        reduction: "mean" or "sum".
        weight: Weight, float32[]; None means 1.
        key: Random key for stochastic rounding of sums and means; None to round to nearest.
    """

    grads: Tree
    reduction: str
    weight: Weight | None = None
    key: Array | None = None


def add_micro_batch(acc: Tree, micro_batch: MicroBatch, is_first: Array | bool) -> Tree:
    """Add a micro-batch to the accumulator; the first micro-batch of a window overwrites it.

    Old values are overwritten instead of multiplied by 0, because they may be NaN.
    """
    keys = _keys_of_leaves(micro_batch.key, acc)

    def add(total: Array, grad: Array) -> Array:
        key = next(keys)
        if is_float0(grad):
            return total
        start = jnp.where(is_first, jnp.zeros_like(total), total)
        new = add_weighted(start, jnp.asarray(grad), micro_batch.weight)
        return reshard_like(rounded(total.dtype, new, key), total)

    return jax.tree.map(add, acc, micro_batch.grads)


def _keys_of_leaves(key: Array | None, tree: Tree) -> Iterator[Array | None]:
    """Return a random key for each leaf; None if there is no key."""
    if key is None:
        return itertools.repeat(None)
    return iter(jax.random.split(key, len(jax.tree.leaves(tree))))  # one split for all leaves


def window_gradient(acc: Tree, micro_batch: MicroBatch, total_weight: Scalar) -> Tree:
    """Return the accumulated gradient, with float0 leaves restored."""
    key = micro_batch.key
    if key is not None:  # differs from the keys of the sums
        key = jax.random.fold_in(key, len(jax.tree.leaves(acc)))
    keys = _keys_of_leaves(key, acc)

    def read(total: Array, grad: Array) -> Array:
        key = next(keys)
        if is_float0(grad):
            return grad
        is_sum = micro_batch.reduction == "sum"
        return total if is_sum else rounded(total.dtype, divide(total, total_weight), key)

    return jax.tree.map(read, acc, micro_batch.grads)


def only_gradient(micro_batch: MicroBatch) -> Tree:
    """Return the gradient of a single micro-batch, without a cast to another dtype."""
    grads, reduction, weight, _ = micro_batch
    if reduction == "mean" or weight is None:
        return grads

    def weighted(grad: Array) -> Array:
        if is_float0(grad):
            return grad
        return add_weighted(jnp.zeros_like(grad), grad, weight).astype(grad.dtype)

    return jax.tree.map(weighted, grads)
