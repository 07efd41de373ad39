"""Clipping of cotangents inside a model, during the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import axes_within, check_axis, check_choice, check_number, describe, dtype_of
from .._errors import public, type_error, value_error
from .._types import Array, Number, Tree
from ._formula import scale_factor, scale_leaf
from ._norm import norm_dtype, slice_units, unit_norms


@public
@jax.named_scope("clip_cotangent")
def clip_cotangent(
    x: Array,
    max_norm: Number,
    *,
    axis: int | Sequence[int] | None = -1,
    nonfinite: Literal["propagate", "zero"] = "propagate",
    norm_probe: Array | None = None,
) -> Array:
    """Return `x` unchanged, and clip its cotangent by norm in the backward pass.

    Each slice i of the cotangent `g = d loss / d x` becomes `g_i * min(1, max_norm / |g_i|)`. With
    the default `axis=-1`, an array `[batch, time, features]` is clipped per token.

    | slice of the cotangent | result |
    | --- | --- |
    | norm <= max_norm, or all zero | unchanged bit for bit |
    | norm > max_norm | scaled to max_norm |
    | a norm above 4e21, or elements below 3e-17 | counts as infinite; count as zero |
    | a NaN or infinity, `nonfinite="propagate"` | NaN in the whole slice, which a guard detects |
    | a NaN or infinity, `nonfinite="zero"` | zero in the whole slice |
    | traced max_norm <= 0; NaN | zero; NaN |

    `max_norm` has the unit of the loss divided by the unit of `x`. If the loss is a *mean* over n
    tokens, each cotangent is divided by n; pass `c / n` to use a threshold c that does not depend
    on the batch size. Loss scaling also multiplies the cotangents.

    To obtain the norms before clipping, pass zeros of their shape as `norm_probe`, and compute the
    gradient with respect to this argument. If two calls share one `norm_probe`, its gradient is the
    sum of both norms. Under `vmap` or a `lax.scan` over layers, pass a separate `norm_probe` to
    each iteration.

    Higher-order derivatives, in forward or reverse mode, differentiate the clipped gradient.
    Forward-mode differentiation of this function itself is not supported.

    Args:
        x: Floating-point or complex array; use `jax.tree.map` for a pytree.
        max_norm: Maximum norm of a unit; a positive number, which may be traced. Infinity disables
            clipping.
        axis: Axes over which one norm is computed, as in NumPy: -1 for each token, `(1, 2)` for
            each example of a rank-3 array, None for the whole array. Inside `shard_map` these axes
            must not be sharded.
        nonfinite: "propagate" or "zero".
        norm_probe: Zeros with the shape of `x` without `axis`, in float32 (float64 for float64 and
            complex128); the values are ignored.

    Returns:
        The array `x`.

    Raises:
        ValueError: If a number is out of range, if `axis` is invalid for `x`, or if `norm_probe`
            does not have the shape and dtype of the norms.
        TypeError: If `x` is not a floating-point or complex array.

    Examples:
        >>> import jax, jax.numpy as jnp, gradclip_jax as gcx
        >>> def loss(w, probe, x):
        ...     hidden = gcx.clip_cotangent(w * x, 1.0, norm_probe=probe)
        ...     return jnp.sum(hidden * jnp.array([[3.0, 4.0], [0.3, 0.4]]))  # two tokens
        >>> x, probe = jnp.ones((2, 2)), jnp.zeros(2)
        >>> grad, norms = jax.grad(loss, argnums=(0, 1))(1.0, probe, x)
        >>> print(norms, round(float(grad), 4))  # 0.6 + 0.8 of the first, 0.3 + 0.4 of the second
        [5.  0.5] 2.1
    """
    check_number("max_norm", max_norm, "Pass inf to measure norms without clipping.")
    check_choice("nonfinite", nonfinite, ("propagate", "zero"))
    axes, drop = check_axis(axis), nonfinite == "zero"
    if not jnp.issubdtype(dtype_of(x), jnp.inexact):
        hint = "Integers are not differentiable; for a tree, use `jax.tree.map`."
        raise type_error("x", "a floating or complex array", describe(x), hint)
    x = jnp.asarray(x)
    over = tuple(range(x.ndim)) if axes is None else axes_within(axes, x)
    dtype = norm_dtype([x])
    if norm_probe is not None:
        probe = jax.ShapeDtypeStruct([n for i, n in enumerate(x.shape) if i not in over], dtype)
        if (np.shape(norm_probe), dtype_of(norm_probe)) != (probe.shape, probe.dtype):
            hint = "Pass zeros with one element for each norm."
            raise value_error("norm_probe", describe(probe), describe(norm_probe), hint)

    @jax.custom_vjp
    def identity(x: Array, max_norm: Array, probe: Array | None) -> Array:
        return x

    def forward(x: Array, max_norm: Array, probe: Array | None) -> tuple[Array, Tree]:
        # Calling `identity` here would also clip the backward pass of higher-order derivatives.
        return x, (max_norm, probe)

    def backward(residuals: Tree, cotangent: Array) -> tuple[Array, None, Array | None]:
        max_norm, probe = residuals
        units = slice_units([over], is_local=True)
        (norms,) = unit_norms([cotangent], units, 2.0, None)
        factors = scale_factor(norms, max_norm)
        factors = jnp.where(jnp.isfinite(norms), factors, 0 if drop else jnp.nan)
        clipped = scale_leaf(cotangent, factors, drop=drop)
        return clipped, None, None if probe is None else norms.reshape(probe.shape)

    identity.defvjp(forward, backward)
    return identity(x, jnp.asarray(max_norm, dtype), norm_probe)
