"""Weighted sums of trees over micro-batches.

mean = sum(weight_i * x_i) / sum(weight_i)

This class is used both for gradients and losses that are accumulated over several calls, and for
gradients and outputs of micro-batches within one call.
"""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ._checks import check_number, is_float0, is_scalar, is_traced
from ._devices import summand
from ._errors import type_error
from ._format import shortened
from ._types import Array, Scalar, Tree
from .norms._leaves import wide_dtype
from .norms._mesh import reshard_like

Reduction: TypeAlias = Literal["mean", "sum"]
REDUCTIONS: Final = ("mean", "sum")


class WeightedSum(NamedTuple):
    """A weighted sum of trees.

    Attributes:
        total: Sum of the weighted trees, in the dtype of the accumulator. The values are ignored
            while `weight` is 0, so that a sum can be emptied without writing zeros.
        weight: Sum of the weights, float32[].
    """

    total: Tree
    weight: Scalar

    def add(
        self, tree: Tree, weight: Scalar | None, is_added: Array, *, is_zeroed: bool = False
    ) -> WeightedSum:
        """Add a tree times its weight if `is_added`, which must not be a compile-time constant.

        The addition is computed unconditionally, because otherwise the host would have to wait for
        a predicate on GPU. NaN values in a tree that is not added are ignored. If the weight is
        None, the tree is added without multiplication. Pass `is_zeroed=True` only if `total` is
        zero whenever the sum is empty. XLA can then move the all-reduce of a gradient out of a loop
        over micro-batches.
        """
        is_empty = self.weight == 0
        added_weight = jnp.where(is_added, jnp.float32(1) if weight is None else weight, 0)

        def add_leaf(total: Array, x: Array) -> Array:
            if is_float0(x):
                return total
            # float16 cannot represent a weight of 70,000, and bfloat16 cannot represent 1,001.
            wide = wide_dtype(total.dtype)
            term = summand(jnp.asarray(x), is_added).astype(wide)
            # Old values are overwritten instead of multiplied by 0, because they may be NaN.
            # -0.0 instead of 0 avoids a copy on GPU; see `summand`.
            old = total if is_zeroed else jnp.where(is_empty, jnp.full_like(total, -0.0), total)
            old = old.astype(wide)
            term = term if weight is None else term * added_weight.astype(wide)
            return reshard_like((old + term).astype(total.dtype), total)

        return WeightedSum(jax.tree.map(add_leaf, self.total, tree), self.weight + added_weight)

    def result(self, reduction: Reduction) -> Tree:
        """Return the mean or the sum, in the dtypes of the accumulator."""
        if reduction == "sum":
            return self.total
        divisor = jnp.where(self.weight > 0, self.weight, 1)

        def divide(total: Array) -> Array:
            wide = wide_dtype(total.dtype)
            return (total.astype(wide) / divisor.astype(wide)).astype(total.dtype)

        return jax.tree.map(divide, self.total)

    def empty_if(self, is_emptied: Scalar | bool) -> WeightedSum:
        """Return an empty sum if `is_emptied` is true; otherwise return this sum unchanged."""
        return self._replace(weight=jnp.where(is_emptied, 0, self.weight))


def scaled(tree: Tree, factor: Scalar) -> Tree:
    """Multiply all leaves except float0 by a factor, in at least float32."""

    def multiply(x: Array) -> Array:
        if is_float0(x):
            return x
        wide = wide_dtype(jnp.result_type(x))
        return jnp.asarray(x).astype(wide) * factor.astype(wide)

    return jax.tree.map(multiply, tree)


def check_dtype(argument: str, value: Any) -> None:
    """Raise if a value is neither None nor a real floating dtype."""
    try:
        is_array = isinstance(value, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))
        is_dtype = not is_array and jnp.issubdtype(jnp.dtype(value), jnp.floating)
        is_valid = value is None or is_dtype
    except (TypeError, ValueError):
        is_valid = False
    if not is_valid:
        rule = "a real floating dtype, or None for the dtype of the gradient"
        hint = "Use jnp.float32, or jnp.bfloat16 to save memory."
        raise type_error(argument, rule, shortened(value), hint)


def sum_dtype(kind: DTypeLike, dtype: DTypeLike | None) -> DTypeLike:
    """Return the dtype of a sum of gradients of dtype `kind`; 64-bit dtypes are kept."""
    if dtype is None or jnp.finfo(kind).bits == 64:
        return kind
    return wide_dtype(kind, dtype) if jnp.issubdtype(kind, jnp.complexfloating) else dtype


def as_weight(weight: Any) -> Scalar:
    """Convert a weight to float32[]; NaN is allowed, because guards skip it."""
    hint = "Pass the number of examples or tokens in the micro-batch."
    is_known = is_scalar(weight, jnp.floating) and not is_traced(weight)
    if not (is_known and weight != weight):
        check_number("weight", weight, hint, "[0, inf]")
    return jnp.asarray(weight, jnp.float32)
