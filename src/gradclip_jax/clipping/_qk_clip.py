"""Clipping attention logits through the weights that make them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import check_number, check_static, describe, dtype_of, leaf_path
from .._errors import public, type_error, value_error
from .._tree_checks import check_inexact
from .._types import Array, Number, Tree
from ._formula import scale_factor, scale_leaf


@public
def qk_clip(
    query: Tree,
    key: Tree,
    max_logits: Array,
    threshold: Number = 100.0,
    *,
    head_axis: int = -2,
) -> tuple[Tree, Tree]:
    """Scales the query and key weights of each head so that its largest logit is at most tau.

    `gamma_h = min(1, tau / S_h)`, `S_h` the largest logit of query head h. A key head takes the
    root of what all its query heads have in common, each query head the rest:

        key_g *= sqrt(gamma_g),  query_h *= gamma_h / sqrt(gamma_g),  gamma_g = max_{h in g} gamma_h

    so the logits of each head, which are products of the two, are multiplied by `gamma_h`.

    | attention | query head | key head |
    | --- | --- | --- |
    | as many key heads as query heads | `sqrt(gamma_h)`, as published | `sqrt(gamma_h)` |
    | shared key head, one query head within tau | `gamma_h` | untouched |
    | shared key head, all beyond tau | `gamma_h / sqrt(gamma_g)` | `sqrt(gamma_g)` |
    | MLA | see `qk_clip_mla` | |

    | largest logit | weights of the head |
    | --- | --- |
    | <= tau, negative or -inf | untouched, bit for bit |
    | > tau | scaled |
    | NaN or inf | untouched: nothing is known, and a guard will have skipped the step |
    | traced tau <= 0 or NaN | untouched: weights at zero would stay there |

    Measure the logits as the softmax sees them, scale and bias included and masked ones left out,
    over the whole batch, and clip after the step of the optimizer, as published: the weights then
    have made one more step than the logits know of. Clip once for each measurement.

    With several query heads to a key head Megatron-LM scales all of a group by its largest logit;
    that is this function on `max_logits` that are the same in a group.

    Args:
        query: weights of the query heads: an array or a tree of kernel and bias, with the heads
            on `head_axis` of every leaf, `[..., heads, head_dim]` as Flax has them.
        key: the same of the key heads; their number divides that of the query heads, and query
            head h belongs to key head `h // (heads / key_heads)`.
        max_logits: the largest logit of each query head, [heads], floating. For layers stacked
            on a first axis, `jax.vmap` this function.
        threshold: tau, > 0, in the unit of the logits; may be traced.
        head_axis: the axis of heads, the same in every leaf; negative counts from the end.

    Returns:
        Query and key weights, each in its own dtype.

    Raises:
        ValueError: `threshold` is not > 0, or numbers of heads do not fit.
        TypeError: a leaf, or `max_logits`, is not floating.

    Examples:
        Two query heads share a key head; the second has a logit of 400:

        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> query, key = jnp.ones((2, 1)), jnp.ones((1, 1))  # [heads, head_dim]
        >>> query, key = gcx.qk_clip(query, key, jnp.array([30.0, 400.0]))
        >>> query.ravel().tolist(), key.ravel().tolist()
        ([1.0, 0.25], [1.0])

    References:
        Kimi Team, 2025, arXiv 2507.20534, algorithm 1. The rule for shared keys is ours.
    """
    check_number("threshold", threshold, "Kimi K2 was trained with 100.")
    gamma = _head_factors(max_logits, threshold)
    groups = _head_count("key", key, head_axis)
    if groups == 0 or gamma.size % groups:
        rule = f"heads that divide the {gamma.size} of `max_logits`"
        hint = "Query head h belongs to key head h // (heads / key_heads)."
        raise value_error("key", rule, groups, hint)
    by_group = gamma.reshape(groups, -1)
    of_key = jnp.sqrt(jnp.max(by_group, axis=1, keepdims=True))
    query = _scale_heads("query", query, (by_group / of_key).reshape(-1), head_axis)
    return query, _scale_heads("key", key, of_key.reshape(-1), head_axis)


@public
def qk_clip_mla(
    query: Tree,
    key: Tree,
    query_rotary: Tree,
    max_logits: Array,
    threshold: Number = 100.0,
    *,
    head_axis: int = -2,
) -> tuple[Tree, Tree, Tree]:
    """`qk_clip` for multi-head latent attention, whose rotary keys are shared by all heads.

    A logit is `q_C . k_C + q_R . k_R`, where k_R has no heads. So `q_C` and `k_C` of a head are
    scaled by `sqrt(gamma_h)`, `q_R` by `gamma_h`, and `k_R` is left alone: both products, and with
    them the logit, are multiplied by `gamma_h`. The table of `qk_clip` holds.

    Args:
        query: weights of q_C, the heads on `head_axis` of every leaf. Where one kernel makes q_C
            and q_R, split it on its last axis and join the results.
        key: weights of k_C, of as many heads; without the part of the kernel that makes values.
        query_rotary: weights of q_R, of as many heads.
        max_logits: the largest logit of each head, [heads], floating.
        threshold: tau, > 0, in the unit of the logits; may be traced.
        head_axis: the axis of heads, the same in every leaf; negative counts from the end.

    Returns:
        The three, in the order of the arguments.

    Raises:
        ValueError: `threshold` is not > 0, or numbers of heads do not fit.
        TypeError: a leaf, or `max_logits`, is not floating.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> part = jnp.ones((2, 1))  # [heads, head_dim]
        >>> clipped = gcx.qk_clip_mla(part, part, part, jnp.array([30.0, 400.0]))
        >>> [part.ravel().tolist() for part in clipped]
        [[1.0, 0.5], [1.0, 0.5], [1.0, 0.25]]

    References:
        Kimi Team, 2025, arXiv 2507.20534, algorithm 1.
    """
    check_number("threshold", threshold, "Kimi K2 was trained with 100.")
    gamma = _head_factors(max_logits, threshold)
    return (
        _scale_heads("query", query, jnp.sqrt(gamma), head_axis),
        _scale_heads("key", key, jnp.sqrt(gamma), head_axis),
        _scale_heads("query_rotary", query_rotary, gamma, head_axis),
    )


def _head_factors(max_logits: Any, threshold: Any) -> Array:
    """Gamma of each head; one where nothing is known."""
    rule = "the largest logit of each query head, floating[heads]"
    hint = "Pass an array, the maximum over all other axes."
    is_floating = jnp.issubdtype(dtype_of(max_logits), jnp.floating)
    if not is_floating or np.ndim(max_logits) != 1:
        error = value_error if is_floating else type_error
        raise error("max_logits", rule, describe(max_logits), hint)
    logits, tau = jnp.asarray(max_logits).astype(jnp.float32), jnp.asarray(threshold, jnp.float32)
    is_known = jnp.isfinite(logits) & (tau > 0)
    return jnp.where(is_known, scale_factor(jnp.where(is_known, logits, 0), tau), 1)


def _head_count(argument: str, tree: Tree, head_axis: Any, count: int | None = None) -> int:
    """The number of heads: `count`, or that of the first leaf; 0 without a leaf."""
    check_inexact(argument, tree, real=True)
    check_static("head_axis", head_axis)
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        got = f"{describe(x)} at {leaf_path(argument, path)}"
        if not (hasattr(head_axis, "__index__") and -np.ndim(x) <= head_axis < np.ndim(x)):
            hint = "Weights of heads are [..., heads, head_dim]: reshape them so."
            got = f"{head_axis!r} for {got}"
            raise value_error("head_axis", "an axis of it", got, hint)
        count = np.shape(x)[head_axis] if count is None else count
        if np.shape(x)[head_axis] != count:
            rule, hint = (
                f"of {count} heads in every leaf",
                "Name the axis of heads with `head_axis`.",
            )
            raise value_error(argument, rule, got, hint)
    return count or 0


def _scale_heads(argument: str, tree: Tree, factors: Array, head_axis: int) -> Tree:
    """Each leaf times the factors of its heads."""
    _head_count(argument, tree, head_axis, factors.size)

    def scaled(x: Any) -> Any:
        shape = [1] * np.ndim(x)
        shape[head_axis] = factors.size
        return scale_leaf(x, factors.reshape(shape))

    return jax.tree.map(scaled, tree)
