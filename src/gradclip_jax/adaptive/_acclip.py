"""ACClip: momentum clipped elementwise."""

from typing import Any

import jax.numpy as jnp
import optax

from .._checks import check_decays, check_number, is_float0
from .._states import increment_where
from .._types import Array, Number, Tree
from ..clipping._scale import scale_leaf, scale_root
from ._averages import power_of, where_finite
from ._moments import MomentState, check_update, map_leaves, zero_moments


def acclip(
    b1: Number = 0.9, b2: Number = 0.99, alpha: Number = 1.0, eps: Number = 1e-5
) -> optax.GradientTransformation:
    """Clips the momentum elementwise by a moving average of gradient magnitudes (ACClip).

    `m = b1 m + (1 - b1) g`, `tau^alpha = b2 tau^alpha + (1 - b2) |g|^alpha`,
    `update = min(tau / (|m| + eps), 1) m`. Made for heavy-tailed noise. Follow it with
    `optax.scale_by_learning_rate`, or with SGD without momentum.

    | gradient | effect |
    | --- | --- |
    | the first steps | short, up to ten times: there is no bias correction |
    | a NaN or infinite element | its update is NaN, its averages stay as they were |

    Args:
        b1: decay of the momentum, at least 0 and below 1.
        b2: decay of the threshold, at least 0 and below 1.
        alpha: the power of the magnitude that is averaged, > 0; the paper uses 1.
        eps: added to the magnitude of the momentum, in the unit of the gradients, > 0.

    Returns:
        An Optax transformation with a `MomentState`, twice the size of the parameters.

    Raises:
        ValueError: a number is out of range.
        TypeError: an argument is no number; when traced, a leaf is not inexact.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> clip = gcx.acclip(b1=0.0, b2=0.5)
        >>> _, state = clip.update(jnp.array([4.0, 4.0]), clip.init(jnp.zeros(2)))
        >>> [round(x, 3) for x in clip.update(jnp.array([2.0, 100.0]), state)[0].tolist()]
        [2.0, 51.0]

    References:
        Zhang et al., 2020, arXiv 1912.03194, algorithm 2.
    """
    name = "acclip"
    check_decays(name, b1=b1, b2=b2)
    check_number(name, "alpha", alpha, "The paper uses 1.")
    check_number(name, "eps", eps, "The paper uses 1e-5.")

    def update(updates: Tree, state: Any, params: Tree | None = None) -> tuple[Tree, MomentState]:
        check_update(name, updates, state, MomentState, "second")

        def clip(grad: Any, first: Array, second: Array) -> tuple[Any, ...]:
            if is_float0(grad):
                return grad, first, second
            g = grad.astype(first.dtype)
            # Double `where`: 0 * nan in the unused branch would give NaN derivatives.
            finite = jnp.isfinite(g)
            safe = jnp.where(finite, g, 0)
            new_first = b1 * first + (1 - b1) * safe
            new_second = b2 * second + (1 - b2) * power_of(jnp.abs(safe), alpha)
            # Not zero: neither its root nor its quotient has a derivative there.
            tau = jnp.maximum(new_second, jnp.finfo(new_second.dtype).tiny) ** (1 / alpha)
            clipped = scale_leaf(new_first, scale_root(jnp.abs(new_first) + eps, tau))
            moments = where_finite(finite, (new_first, new_second), (first, second))
            return jnp.where(finite, clipped, jnp.nan).astype(grad.dtype), *moments

        out, first, second = map_leaves(clip, 3, updates, state.first, state.second)
        return out, MomentState(increment_where(state.step_count), first, second)

    return optax.GradientTransformation(zero_moments, update)
