"""ACClip: momentum clipped elementwise."""

from typing import Any

import jax.numpy as jnp
import optax

from .._checks import check_decays, check_number
from .._types import Array, Number
from ..clipping._formula import scale_factor, scale_leaf
from ._averages import power_of
from ._moments import moment_transformation, where_finite_grad


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

    def clip(grad: Array, first: Any, second: Any) -> tuple[Array, Array, Array]:
        first = b1 * first + (1 - b1) * grad
        second = b2 * second + (1 - b2) * power_of(jnp.abs(grad), alpha)
        # Not zero: neither its root nor its quotient has a derivative there.
        tau = jnp.maximum(second, jnp.finfo(second.dtype).tiny) ** (1 / alpha)
        return scale_leaf(first, scale_factor(jnp.abs(first) + eps, tau)), first, second

    def step(grad: Array, first: Any, second: Array, param: Any) -> tuple[Array, Any, Array]:
        return where_finite_grad(clip, grad, first, second)

    return moment_transformation(name, lambda step_count: step)
