"""Heads of attention: the factor of each, from its largest logit, and weights times factors."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import check_static, describe, error_message, leaf_path
from .._tree_checks import check_inexact
from .._types import Array, Tree
from ._scale import scale_leaf, scale_root


def head_roots(function: str, max_logits: Any, threshold: Any) -> Array:
    """The square root of gamma of each head; one where nothing is known."""
    rule = "the largest logit of each query head, floating[heads]"
    hint = "Take the maximum over all other axes."
    is_floating = jnp.issubdtype(jnp.result_type(max_logits), jnp.floating)
    if not is_floating or np.ndim(max_logits) != 1:
        kind = ValueError if is_floating else TypeError
        raise kind(error_message(function, "max_logits", rule, describe(max_logits), hint))
    logits, tau = jnp.asarray(max_logits).astype(jnp.float32), jnp.asarray(threshold, jnp.float32)
    is_known = jnp.isfinite(logits) & (tau > 0)
    return jnp.where(is_known, scale_root(jnp.where(is_known, logits, 0), tau), 1)


def head_count(function: str, argument: str, tree: Tree, head_axis: Any) -> int:
    """The number of heads, the same in every leaf; 0 without a leaf."""
    check_inexact(function, argument, tree, real=True)
    check_static(function, "head_axis", head_axis)
    counts: set[int] = set()
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        is_axis = hasattr(head_axis, "__index__") and -np.ndim(x) <= head_axis < np.ndim(x)
        if not is_axis:
            got = f"{head_axis!r} for {describe(x)} at {leaf_path(argument, path)}"
            hint = "Weights of heads are [..., heads, head_dim]: reshape them so."
            raise ValueError(error_message(function, "head_axis", "an axis of it", got, hint))
        counts.add(np.shape(x)[head_axis])
        if len(counts) > 1:
            got = f"{describe(x)} at {leaf_path(argument, path)}"
            rule = "of one number of heads in every leaf"
            hint = "Name the axis of heads with `head_axis`."
            raise ValueError(error_message(function, argument, rule, got, hint))
    return counts.pop() if counts else 0


def scale_heads(function: str, argument: str, tree: Tree, roots: Array, head_axis: int) -> Tree:
    """Each leaf times the factors of its heads, given as their roots."""
    heads = head_count(function, argument, tree, head_axis)
    if heads not in (0, roots.size):
        rule = f"weights of the {roots.size} heads of `max_logits`"
        hint = "Name the axis of heads with `head_axis`."
        raise ValueError(error_message(function, argument, rule, f"{heads} heads", hint))

    def scaled(x: Any) -> Any:
        shape = [1] * np.ndim(x)
        shape[head_axis] = roots.size
        return scale_leaf(x, roots.reshape(shape), drops=False)

    return jax.tree.map(scaled, tree)
