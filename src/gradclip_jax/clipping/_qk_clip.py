"""Clipping attention logits through the weights that make them."""

import jax.numpy as jnp

from .._checks import check_number, error_message
from .._types import Array, Number, Tree
from ._heads import head_count, head_roots, scale_heads

_NAME = "qk_clip"


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
    check_number(_NAME, "threshold", threshold, "Kimi K2 was trained with 100.")
    roots = head_roots(_NAME, max_logits, threshold)
    groups = head_count(_NAME, "key", key, head_axis)
    if groups == 0 or roots.size % groups:
        rule = f"heads that divide the {roots.size} of `max_logits`"
        hint = "Query head h belongs to key head h // (heads / key_heads)."
        raise ValueError(error_message(_NAME, "key", rule, groups, hint))
    common = jnp.max(roots.reshape(groups, -1), axis=1, keepdims=True)
    # A factor of sqrt(gamma) is held by its own root, as all factors are.
    shared = jnp.sqrt(common)
    own = roots.reshape(groups, -1) / shared
    query = scale_heads(_NAME, "query", query, own.reshape(-1), head_axis)
    return query, scale_heads(_NAME, "key", key, shared.reshape(-1), head_axis)
