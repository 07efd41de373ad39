"""Weighted sums of gradients, losses and auxiliary outputs."""

from typing import Any, Final, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .._checks import check_number, shortened
from .._errors import type_error
from .._types import Array, Scalar
from ..norms._leaves import wide_dtype

Weight: TypeAlias = Array | np.float32
"""The weight of a micro-batch; NumPy scalars are known at trace time."""

REDUCTIONS: Final = ("mean", "sum")


def check_dtype(argument: str, value: Any) -> None:
    """Raise if a value is not a real floating dtype."""
    try:
        # `jnp.dtype(None)` is float64.
        is_floating = value is not None and jnp.issubdtype(jnp.dtype(value), jnp.floating)
    except (TypeError, ValueError):
        is_floating = False
    if not is_floating:
        rule, hint = "a real floating dtype", "Use jnp.float32, or jnp.bfloat16 to save memory."
        raise type_error(argument, rule, shortened(value), hint)


def accumulator_dtype(kind: DTypeLike, dtype: DTypeLike) -> DTypeLike:
    """Return the accumulator dtype for gradients of dtype `kind`; 64-bit dtypes are kept."""
    if jnp.finfo(kind).bits == 64:
        return kind
    return wide_dtype(kind, dtype) if jnp.issubdtype(kind, jnp.complexfloating) else dtype


def as_weight(weight: Any) -> Weight | None:
    """Convert a weight to float32[], as a NumPy scalar unless it is a JAX array."""
    if weight is None:
        return None
    hint = "Pass the number of examples or tokens in the micro-batch."
    check_number("weight", weight, hint, "[0, inf]")
    is_array = isinstance(weight, jax.Array)
    return weight.astype(jnp.float32) if is_array else np.float32(weight)


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
