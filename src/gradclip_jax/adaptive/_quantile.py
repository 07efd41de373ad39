"""Threshold rule: a quantile of the norms, found by geometric updates (Andrew et al.)."""

from typing import Any

import jax.numpy as jnp

from .._checks import check_number
from .._types import Array, Number
from ..clipping._threshold import Rule
from ._history import where_nonzero


def quantile(target: Number = 0.5, rate: Number = 0.2, initial: Number = 1.0) -> Rule:
    """A threshold C that moves geometrically towards the `target` quantile of the norms.

    After each step `C *= exp(-rate * ([norm <= C] - target))`. C stays within 1e-30 and 1e30, so
    that it can always recover. A norm of zero leaves C as it was. For norms only: it has no meaning
    for values that may be negative.

    Args:
        target: the fraction of steps that should not be clipped, 0 to 1.
        rate: learning rate of log C, > 0.
        initial: the first C, in the unit of the norm, > 0; the paper starts at 0.1.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> clip = gcx.clip_by_global_norm(gcx.thresholds.quantile(initial=1.0))
        >>> state = clip.init(jnp.zeros(1))
        >>> for norm in (3.0, 3.0):
        ...     updates, state = clip.update(jnp.array([norm]), state)
        >>> round(float(updates[0]), 2)  # exp(0.2 * 0.5)
        1.11

    References:
        Andrew, Thakkar, McMahan and Ramaswamy, 2021 (first 2019), arXiv 1905.03871.
    """
    name = "quantile"
    check_number(name, "target", target, "0.5 aims at the median.", high=1.0, closed=True)
    check_number(name, "rate", rate, "The paper uses 0.2.")
    check_number(name, "initial", initial, "The paper uses 0.1.")

    def init(norm: Array) -> Array:
        return jnp.full_like(norm, initial)

    def update(norm: Array, threshold: Array, param_norm: Any) -> tuple[Array, Array]:
        below = (norm <= threshold).astype(jnp.float32)
        moved = jnp.clip(threshold * jnp.exp(-rate * (below - target)), 1e-30, 1e30)
        return threshold, where_nonzero(norm, moved, threshold)

    return Rule(init, update)
