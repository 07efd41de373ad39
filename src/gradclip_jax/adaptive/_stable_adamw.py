"""StableAdamW: an optimizer that shortens its step where its second moment lags the gradient."""

import math
from typing import Any

import jax.numpy as jnp
import optax

from .._checks import check_axis_name, check_decays, check_number
from .._mesh import replica_count, shard_axes
from .._states import increment_where
from .._types import Array, AxisName, Number, Scalar
from ..clipping._norm import norm_of_leaves
from ._averages import bias_correction, power_of
from ._moments import LeafStep, moment_transformation


def stable_adamw(
    learning_rate: Number | optax.Schedule,
    b1: Number = 0.9,
    b2: Number = 0.99,
    eps: Number = 1e-6,
    weight_decay: Number = 0.0,
    clipping: Number = 1.0,
    *,
    axis_name: AxisName = None,
) -> optax.GradientTransformation:
    """AdamW whose step is shortened, leaf by leaf, when its second moment lags the gradient.

    The learning rate of a leaf is divided by `max(1, RMS / clipping)`, with the root mean square
    of `g / sqrt(max(u, eps^2))`, where the second moment u includes g. Weight decay is shortened
    alike, as in version 2 of the authors' code. The decays include the bias correction. Gradient
    and moment are needed at once, so it is an optimizer, not a clip around one.

    Args:
        learning_rate: a number > 0 or a schedule.
        b1: decay of the first moment, at least 0 and below 1.
        b2: decay of the second moment, at least 0 and below 1.
        eps: added to the root of the second moment, in the unit of the gradients, > 0.
        weight_decay: decoupled, times the learning rate, >= 0.
        clipping: the RMS above which a step is shortened, dimensionless, > 0.
        axis_name: mapped axes over which the leaves are sharded, where types do not name them.

    Returns:
        An Optax optimizer; `update` needs `params`. Like Adam it keeps a NaN in its moments: wrap
        it in `skip_nonfinite`.

    Raises:
        ValueError: a number is out of range, or `params` is missing.
        TypeError: an argument is no number; when traced, a leaf is not inexact.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> tx, params = gcx.stable_adamw(0.1, b1=0.0), jnp.zeros(1)
        >>> _, state = tx.update(jnp.array([1.0]), tx.init(params), params)
        >>> round(tx.update(jnp.array([1000.0]), state, params)[0].item(), 3)  # AdamW: -0.141
        -0.1

    References:
        Wortsman et al., 2023, arXiv 2304.13013, algorithm 2.
    """
    name = "stable_adamw"
    check_decays(name, b1=b1, b2=b2)
    check_number(name, "eps", eps, "The paper uses 1e-6.")
    check_number(name, "weight_decay", weight_decay, "Pass 0 for none.", closed=True)
    check_number(name, "clipping", clipping, "The paper uses 1.")
    axes = check_axis_name(name, axis_name)
    if not callable(learning_rate):
        check_number(name, "learning_rate", learning_rate, "The paper uses 0.002.")

    def step_of(step_count: Scalar) -> LeafStep:
        rate = learning_rate(step_count) if callable(learning_rate) else learning_rate
        steps = increment_where(step_count).astype(jnp.float32)
        decays = [b * bias_correction(b, steps - 1) / bias_correction(b, steps) for b in (b1, b2)]

        def step(
            grad: Array, first: Array, second: Array, param: Any
        ) -> tuple[Array, Array, Array]:
            d1, d2 = (decay.astype(second.dtype) for decay in decays)
            first = first * d1 + grad * (1 - d1)
            second = second * d2 + jnp.abs(grad) ** 2 * (1 - d2)
            ratio = grad / jnp.sqrt(jnp.maximum(second, eps**2))
            norm = norm_of_leaves([ratio], 2.0, axes)
            size = ratio.size * replica_count(frozenset(), shard_axes(ratio, axes))
            shortened = rate / jnp.maximum(1, norm / math.sqrt(max(size, 1)) / clipping)
            decayed = weight_decay * param.astype(first.dtype)
            direction = first / (power_of(second, 0.5) + eps) + decayed
            return -shortened * direction, first, second

        return step

    return moment_transformation(name, step_of, needs_params=True)
