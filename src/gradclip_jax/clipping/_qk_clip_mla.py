"""Clipping the logits of attention whose rotary keys have no heads."""

import jax.numpy as jnp

from .._checks import check_number
from .._types import Array, Number, Tree
from ._heads import head_roots, scale_heads

_NAME = "qk_clip_mla"


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
    check_number(_NAME, "threshold", threshold, "Kimi K2 was trained with 100.")
    roots = head_roots(_NAME, max_logits, threshold)
    shared = jnp.sqrt(roots)
    return (
        scale_heads(_NAME, "query", query, shared, head_axis),
        scale_heads(_NAME, "key", key, shared, head_axis),
        scale_heads(_NAME, "query_rotary", query_rotary, roots, head_axis),
    )
