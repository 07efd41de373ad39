"""Computation of clipping factors from norms, and scaling of leaves.

factor  = min(1, threshold / norm)
clipped = factor * x
"""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import call_user, check_choice, dtype_of, is_traced
from .._devices import fusion_barrier
from .._errors import type_error, value_error
from .._format import describe, shortened
from .._types import Array, Tree
from ..norms._leaves import wide_dtype

Reaction: TypeAlias = Literal["scale", "zero"] | Callable[[Array, Array], Array]
"""Reaction to a norm above its threshold, a name or a function `(norm, threshold) -> factor`."""


def check_reaction(reaction: object) -> None:
    """Raise if a reaction is neither a name nor a function."""
    if not callable(reaction):
        check_choice("reaction", reaction, ("scale", "zero"))


def scale_factor(norm: Array, threshold: Array) -> Array:
    """Return `min(1, threshold / norm)`; 0 for a threshold <= 0, and NaN for a NaN threshold."""
    threshold = jnp.maximum(threshold, 0)
    is_above = norm > threshold
    # End with the division, because XLA:CPU recomputes cheaper operations in each kernel that reads
    # the factor. `sign` is 1 for a positive threshold, otherwise 0 or NaN.
    numerator = jnp.where(is_above, threshold, jnp.sign(threshold))
    # Without this selection, the derivative at a norm of zero would be NaN.
    return numerator / jnp.where(is_above, norm, 1)


def factor_of(reaction: Reaction, norm: Array, threshold: Array) -> Array:
    """Return the factor of a reaction: 1 without a threshold, and 0 for a threshold <= 0.

    A user-defined reaction is only called with finite norms and with positive, finite thresholds.
    Its factor is clamped to [0, 1], because a traced factor cannot be checked.
    """
    if reaction == "scale":
        return scale_factor(norm, threshold)
    is_limit = (threshold > 0) & (threshold < jnp.finfo(norm.dtype).max)
    norm, limit = jnp.where(jnp.isfinite(norm), norm, 1), jnp.where(is_limit, threshold, 1)
    if isinstance(reaction, str):
        factor = (norm <= limit).astype(norm.dtype)
    else:
        signature = "reaction(norm, threshold) -> factor"
        factor = _checked_factor(call_user("reaction", signature, reaction, norm, limit), norm)
    return jnp.where(is_limit, factor, jnp.sign(jnp.maximum(threshold, 0)))


def _checked_factor(factor: Any, norm: Array) -> Array:
    """Check the result of a user-defined reaction, and clamp it to [0, 1]."""
    hint = "Return a factor in [0, 1] for each norm."
    is_real = any(jnp.issubdtype(dtype_of(factor), kind) for kind in (jnp.floating, jnp.integer))
    if not is_real or np.shape(factor) not in ((), norm.shape):
        rule, got = f"a function that returns a number or {describe(norm)}", describe(factor)
        raise type_error("reaction", rule, got, hint)
    if not is_traced(factor) and not np.all((np.asarray(factor) >= 0) & (np.asarray(factor) <= 1)):
        raise value_error("reaction", "a function into [0, 1]", shortened(factor), hint)
    return jnp.clip(jnp.asarray(factor).astype(norm.dtype), 0, 1)


@jax.jit
def scale_leaf(x: Array, factor: Array | None) -> Array:
    """Return `factor * x`, computed in at least float32 and rounded once to the dtype of `x`.

    A leaf without a norm has no factor and remains unchanged.
    """
    if factor is None:
        return x
    if wide_dtype(x.dtype, factor.dtype) != x.dtype:
        # Without the barrier, XLA keeps the float32 copy that was made to compute the norm.
        x = fusion_barrier(x)
    return _product(x, factor)


@jax.custom_jvp
def _product(x: Array, factor: Array) -> Array:
    """Return `factor * x` rounded once to the dtype of `x`."""
    wide = wide_dtype(x.dtype, factor.dtype)
    return (x.astype(wide) * factor.astype(wide)).astype(x.dtype)


@_product.defjvp
def _product_jvp(primals: Tree, tangents: Tree) -> tuple[Array, Array]:
    """Set the derivative to zero where the factor is NaN, so that later steps remain finite."""
    (x, factor), (dx, dfactor) = primals, tangents
    wide = wide_dtype(x.dtype, factor.dtype)
    is_nan = jnp.isnan(factor)
    safe_factor, safe_x = jnp.where(is_nan, 0, factor), jnp.where(is_nan, jnp.zeros_like(x), x)
    slope = dx.astype(wide) * safe_factor.astype(wide)
    slope += safe_x.astype(wide) * dfactor.astype(wide)
    return _product(x, factor), slope.astype(x.dtype)
