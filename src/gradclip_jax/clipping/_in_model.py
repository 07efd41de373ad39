"""Clip cotangents in the backward pass of a model, and limit its attention logits."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import ARRAY_LIKE, check_axis, check_count, check_number, check_static, dtype_of
from .._errors import public, type_error, value_error
from .._format import describe, leaf_path
from .._types import Array, Number, Path, Tree
from ..norms._granularity import axes_within
from ..norms._groups import slice_groups
from ..norms._leaves import checked_leaves, norm_dtype
from ..norms._reduce import group_norms
from ._formula import scale_factor, scale_leaf


@public
@jax.named_scope("clip_cotangent")
def clip_cotangent(x: Array, max_norm: Number, *, axis: int | Sequence[int] | None = -1) -> Array:
    """Return `x` unchanged, and clip its cotangent by norm in the backward pass.

    Each slice i of the cotangent `g = d loss / d x` becomes `g_i * min(1, max_norm / |g_i|)`. With
    the default `axis=-1`, an array `[batch, time, features]` is clipped per token.

    | slice of the cotangent | result |
    | --- | --- |
    | norm <= max_norm, or all zero | unchanged bit for bit |
    | norm > max_norm | scaled to max_norm |
    | a norm or elements outside the range of `global_norm` | infinite above, zero below |
    | a NaN or infinity | NaN in the whole slice, which a guard detects |
    | traced max_norm <= 0; NaN | zero; NaN |

    `max_norm` has the unit of the loss divided by the unit of `x`. If the loss is a *mean* over n
    tokens, each cotangent is divided by n; pass `c / n` to use a threshold c that does not depend
    on the batch size. Loss scaling also multiplies the cotangents.

    Higher-order derivatives, in forward or reverse mode, differentiate the clipped gradient.
    Forward-mode differentiation of this function itself is not supported.

    Args:
        x: Floating-point or complex array; use `jax.tree.map` for a pytree.
        max_norm: Maximum norm of a slice; a positive number, which may be traced. Infinity disables
            clipping.
        axis: Axes over which one norm is computed, as in NumPy: -1 for each token, `(1, 2)` for
            each example of a rank-3 array, None for the whole array. Inside `shard_map` these axes
            must not be sharded.

    Returns:
        The array `x`.

    Raises:
        ValueError: If `max_norm` is not positive, or if `axis` is invalid for `x`.
        TypeError: If `x` is not a floating-point or complex array.

    Examples:
        >>> import jax, jax.numpy as jnp, gradclip_jax as gcx
        >>> def loss(w):
        ...     hidden = gcx.clip_cotangent(w * jnp.ones((2, 2)), 1.0)
        ...     return jnp.sum(hidden * jnp.array([[3.0, 4.0], [0.3, 0.4]]))  # two tokens
        >>> round(float(jax.grad(loss)(1.0)), 4)  # 0.6 + 0.8 of the first, 0.3 + 0.4 of the second
        2.1
    """
    limit = check_number("max_norm", max_norm, "Pass inf to disable clipping.")
    axes = check_axis(axis)
    if not (isinstance(x, ARRAY_LIKE) and jnp.issubdtype(dtype_of(x), jnp.inexact)):
        hint = "Integers are not differentiable; for a tree, use `jax.tree.map`."
        raise type_error("x", "a floating or complex array", describe(x), hint)
    x = jnp.asarray(x)
    over = tuple(range(x.ndim)) if axes is None else axes_within(axes, x)
    groups = slice_groups([over], is_local=True)

    @jax.custom_vjp
    def identity(x: Array, max_norm: Array) -> Array:
        return x

    def forward(x: Array, max_norm: Array) -> tuple[Array, Array]:
        # Calling `identity` here would also clip the backward pass of higher-order derivatives.
        return x, max_norm

    def backward(max_norm: Array, cotangent: Array) -> tuple[Array, None]:
        (norms,) = group_norms([cotangent], groups, 2.0, None).arrays
        factors = jnp.where(jnp.isfinite(norms), scale_factor(norms, max_norm), jnp.nan)
        return scale_leaf(cotangent, factors), None

    identity.defvjp(forward, backward)
    return identity(x, jnp.asarray(limit, norm_dtype([x])))


@public
@jax.named_scope("qk_clip")
def qk_clip(
    query: Tree,
    key: Tree | None,
    max_logits: Array,
    threshold: Number = 100.0,
    *,
    head_axis: int = -2,
) -> tuple[Tree, Tree]:
    """Scale the query and key weights of each head to limit its attention logits (QK-Clip).

    If `S_h` is the largest logit of query head h and tau the threshold, the logits of this head are
    multiplied by `gamma_h = min(1, tau / S_h)`. For the group g of query heads that share a key
    head,

        key_g *= sqrt(gamma_g),  query_h *= gamma_h / sqrt(gamma_g),  gamma_g = max_{h in g} gamma_h

    | attention | factor of a query head | factor of a key head |
    | --- | --- | --- |
    | one key head per query head | `sqrt(gamma_h)`, as published | `sqrt(gamma_h)` |
    | shared key head, some `S_h <= tau` | `gamma_h` | 1 |
    | shared key head, all `S_h > tau` | `gamma_h / sqrt(gamma_g)` | `sqrt(gamma_g)` |
    | `key=None`: a key that all heads share and that does not change | `gamma_h` | |

    | largest logit | weights of the head |
    | --- | --- |
    | <= tau, negative or -inf | unchanged bit for bit |
    | > tau | scaled |
    | NaN or inf | unchanged; use a guard to skip such a step |
    | traced tau <= 0 or NaN | unchanged, because zero weights could not recover |

    Compute the maximum over the whole batch, after scale and bias and without masked logits. As in
    the paper, clip after the optimizer step, although the logits were computed before this step.
    Call this function once each time the logits are computed.

    In multi-head latent attention (MLA), a logit is `q_C . k_C + q_R . k_R`, and all heads share
    the rotary key `k_R`. Scale `q_C` and `k_C` together, and scale `q_R` alone:

        query, key = qk_clip(query, key, max_logits)
        query_rotary, _ = qk_clip(query_rotary, None, max_logits)

    For grouped query heads, Megatron-LM scales all heads of a group by the largest logit of the
    group. To reproduce this, pass the maximum over the group as the value of each of its heads.

    Args:
        query: Weights of the query heads, an array or a pytree of kernel and bias; `head_axis` of
            every leaf is the axis of heads, as in `[..., heads, head_dim]` of Flax.
        key: Weights of the key heads, in the same layout. The number of key heads divides the
            number of query heads, and query head h uses key head `h // (heads / key_heads)`. None
            for a key that does not change.
        max_logits: Largest logit of each query head, an array of shape [heads]. If
            layers are stacked along a leading axis, apply `jax.vmap` to this function.
        threshold: Threshold tau for the logits; a positive number, which may be traced.
        head_axis: Axis that indexes the heads, the same for every leaf; may be negative.

    Returns:
        The scaled query and key weights, with unchanged dtypes.

    Raises:
        ValueError: If `threshold` is not positive, or if the numbers of heads do not match.
        TypeError: If a leaf does not have a floating-point dtype.

    Examples:
        Two query heads share a key head, and the second one has a logit of 400:

        >>> import jax, jax.numpy as jnp, gradclip_jax as gcx
        >>> query, key = jnp.ones((2, 1)), jnp.ones((1, 1))  # [heads, head_dim]
        >>> query, key = jax.jit(gcx.qk_clip)(query, key, jnp.array([30.0, 400.0]))
        >>> query.ravel().tolist(), key.ravel().tolist()
        ([1.0, 0.25], [1.0])

    References:
        Kimi Team, 2025, arXiv 2507.20534, algorithm 1. The rule for shared key heads is not in
        the paper.
    """
    limit = check_number("threshold", threshold, "Kimi K2 was trained with 100.")
    hint = "Pass the axis that indexes heads, such as -2."
    check_static("head_axis", head_axis)
    head_axis = check_count("head_axis", head_axis, hint, low=-64, high=63)
    hint = "Pass one number for each query head, the maximum over all other axes."
    is_real = isinstance(max_logits, ARRAY_LIKE) and jnp.issubdtype(
        dtype_of(max_logits), jnp.floating
    )
    if not is_real or np.ndim(max_logits) != 1:
        error = value_error if is_real else type_error
        raise error("max_logits", "a floating-point vector", describe(max_logits), hint)
    logits, tau = (jnp.asarray(x).astype(jnp.float32) for x in (max_logits, limit))
    is_known = jnp.isfinite(logits) & (tau > 0)
    gamma = jnp.where(is_known, scale_factor(jnp.where(is_known, logits, 0), tau), 1)
    if key is None:
        return _scale_heads("query", query, gamma, head_axis), None
    key_leaves = checked_leaves("key", key, real=True).arrays
    num_groups = _num_heads(key_leaves[0], head_axis) if key_leaves else 0
    if num_groups == 0 or gamma.size % num_groups:
        rule = f"weights whose number of heads divides {gamma.size}"
        hint = "Pass key weights with one head for each group of query heads."
        raise value_error("key", rule, f"{num_groups} heads", hint)
    by_group = gamma.reshape(num_groups, -1)
    of_key = jnp.sqrt(jnp.max(by_group, axis=1, keepdims=True))
    query = _scale_heads("query", query, (by_group / of_key).reshape(-1), head_axis)
    return query, _scale_heads("key", key, of_key.reshape(-1), head_axis)


def _num_heads(x: Array, head_axis: int) -> int:
    """Return the size of an axis, or 0 if the array does not have this axis."""
    has_axis = -np.ndim(x) <= head_axis < np.ndim(x)
    return np.shape(x)[head_axis] if has_axis else 0


def _scale_heads(argument: str, tree: Tree, factors: Array, head_axis: int) -> Tree:
    """Multiply each leaf by the factors of its heads."""
    checked_leaves(argument, tree, real=True)

    def scaled(path: Path, x: Array) -> Array:
        if _num_heads(x, head_axis) != factors.size:
            rule = f"a tree with {factors.size} heads on axis {head_axis} of every leaf"
            hint = "Pass the axis that indexes heads as `head_axis`."
            got = f"{describe(x)} at {leaf_path(argument, path)}"
            raise value_error(argument, rule, got, hint)
        shape = [1] * np.ndim(x)
        shape[head_axis] = factors.size
        return scale_leaf(x, factors.reshape(shape))

    return jax.tree.map_with_path(scaled, tree)
