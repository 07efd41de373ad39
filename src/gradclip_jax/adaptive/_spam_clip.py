"""SPAM: elements clamped by their second moment."""

from typing import Any

import jax.numpy as jnp
import optax

from .._checks import check_count, check_decays, check_number, error_message, is_traced
from .._states import increment_where
from .._types import Array, Number, Scalar
from ..clipping._formula import scale_factor, scale_leaf
from ._moments import LeafStep, moment_transformation, where_finite_grad


def spam_clip(
    spike_threshold: Number = 5000.0,
    decay: Number = 0.999,
    warmup_steps: int = 20,
    reset_every: int | None = 500,
) -> optax.GradientTransformation:
    """Clamps elements whose square is far above their second moment (SPAM).

    Where `g^2 > spike_threshold * v`, g becomes `sign(g) sqrt(spike_threshold * v)`. The second
    moment v is that before the step, without bias correction; the clamped g then enters it. Put
    it before Adam, and pass the `b2` of Adam as `decay`. SPAM's reset of the momentum is not
    part of a clip.

    | element | effect |
    | --- | --- |
    | in the first `warmup_steps`, and after each reset | not clamped, as in the authors' code |
    | v is 0 | not clamped; in the paper it stays 0 for ever |
    | NaN or infinite | its update is NaN, its moment stays as it was |

    Args:
        spike_threshold: largest ratio of g^2 to v, dimensionless, > 0.
        decay: of the second moment, at least 0 and below 1.
        warmup_steps: steps without clamping after the start and after each reset, >= 1.
        reset_every: v restarts from 0 every so many steps, >= 1; None for never.

    Returns:
        An Optax transformation with a `MomentState` of the size of the parameters.

    Raises:
        ValueError: a number is out of range.
        TypeError: an argument is no number; when traced, a leaf is not inexact.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> clip = gcx.spam_clip(4.0, decay=0.75, warmup_steps=1)
        >>> _, state = clip.update(jnp.array([4.0, 4.0]), clip.init(jnp.zeros(2)))
        >>> [round(x, 3) for x in clip.update(jnp.array([1.0, 100.0]), state)[0].tolist()]
        [1.0, 4.0]

    References:
        Huang et al., 2025, arXiv 2501.06842, algorithm 1.
    """
    name = "spam_clip"
    check_number(name, "spike_threshold", spike_threshold, "The paper uses 5000.")
    check_decays(name, decay=decay)
    check_count(name, "warmup_steps", warmup_steps, "The authors' code uses 20.")
    if reset_every is not None:
        check_count(name, "reset_every", reset_every, "Pass None for no reset.")
        if not (is_traced(reset_every) or is_traced(warmup_steps) or reset_every > warmup_steps):
            hint = "Nothing would ever be clipped."
            rule = f"> warmup_steps={warmup_steps}"
            raise ValueError(error_message(name, "reset_every", rule, reset_every, hint))

    def step_of(step_count: Scalar) -> LeafStep:
        count = increment_where(step_count)
        since_reset = count if reset_every is None else count % reset_every
        resets = False if reset_every is None else since_reset == 0
        is_warm = since_reset >= warmup_steps

        def clip(grad: Array, first: None, second: Any) -> tuple[Array, None, Array]:
            is_clamped = is_warm & (second > 0)
            bound = jnp.sqrt(spike_threshold * jnp.where(is_clamped, second, 1))
            threshold = jnp.where(is_clamped, bound, jnp.finfo(second.dtype).max)
            magnitude = jnp.abs(grad)
            second = decay * second + (1 - decay) * jnp.minimum(magnitude, threshold) ** 2
            return scale_leaf(grad, scale_factor(magnitude, threshold)), first, second

        def step(grad: Array, first: None, second: Array, param: Any) -> tuple[Array, None, Array]:
            return where_finite_grad(clip, grad, first, jnp.where(resets, 0, second))

        return step

    return moment_transformation(name, step_of, keeps_first=False)
