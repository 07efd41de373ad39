"""The running sum of a window of micro-batches: added to in place, never poisoned."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import check_same_structure, describe, error_message, is_float0
from .._types import Array, Scalar, Tree


def accumulator_like(params: Tree, dtype: Any) -> Tree:
    """Zeros to add gradients up in, of the dtype of `accumulator_dtype`.

    An integer parameter, whose gradient is float0, gets an idle scalar.
    """

    def zeros(param: Any) -> Array:
        kind = jnp.result_type(param)
        if not jnp.issubdtype(kind, jnp.inexact):
            return jnp.zeros((), dtype)
        return jnp.zeros_like(param, accumulator_dtype(kind, dtype))

    return jax.tree.map(zeros, params)


def accumulator_dtype(kind: Any, dtype: Any) -> Any:
    """What gradients of dtype `kind` are added up in: `dtype`, or their own 64 bit."""
    if jnp.finfo(kind).bits == 64:
        return kind
    return jnp.promote_types(dtype, kind) if jnp.issubdtype(kind, jnp.complexfloating) else dtype


def check_matches_accumulator(function: str, updates: Tree, acc: Tree) -> None:
    """Refuses gradients unlike what they are added to; a float0 leaf may have its own shape."""
    leaves, structure = jax.tree.flatten(acc)
    given = jax.tree.leaves(updates)
    if len(leaves) == len(given):
        leaves = [g if is_float0(g) else x for x, g in zip(leaves, given, strict=True)]
    expected = jax.tree.unflatten(structure, leaves)
    check_same_structure(function, "updates", updates, "params", expected)


def as_weight(function: str, weight: Any) -> Scalar | None:
    """The weight of a micro-batch as float32[]; None counts as one."""
    if weight is None:
        return None
    if np.ndim(weight):
        hint = "Pass the number of examples or tokens in the micro-batch."
        raise TypeError(error_message(function, "weight", "a scalar", describe(weight), hint))
    return jnp.asarray(weight).astype(jnp.float32)


def add_weighted(acc: Tree, grads: Tree, weight: Scalar | None, is_first: Array) -> Tree:
    """`acc + weight * grads`, from zero on the first micro-batch of a window.

    Selects, never multiplies by zero: what the last window left behind and what a micro-batch
    of no weight brings along may be NaN.
    """

    def add(total: Array, grad: Any) -> Array:
        if is_float0(grad):
            return total
        term = jnp.asarray(grad).astype(total.dtype)
        if weight is not None:
            # A weight of 40,000 fits no float16, and 1,001 no bfloat16.
            wide = jnp.promote_types(total.dtype, jnp.float32)
            scaled = (term.astype(wide) * weight.astype(wide)).astype(total.dtype)
            term = jnp.where(weight == 0, jnp.zeros_like(term), scaled)
        return jnp.where(is_first, jnp.zeros_like(total), total) + term

    return jax.tree.map(add, acc, grads)


def window_gradient(acc: Tree, grads: Tree, total_weight: Scalar, *, mean: bool) -> Tree:
    """The gradient of the window; a float0 leaf is that of the last micro-batch."""

    def read(total: Array, grad: Any) -> Any:
        if is_float0(grad):
            return grad
        wide = jnp.promote_types(total.dtype, jnp.float32)
        quotient = total.astype(wide) / total_weight.astype(wide)
        return quotient.astype(total.dtype) if mean else total

    return jax.tree.map(read, acc, grads)
