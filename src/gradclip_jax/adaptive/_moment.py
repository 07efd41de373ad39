"""Clips whose thresholds come from moments of the gradient, element by element."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._checks import (
    check_count,
    check_inexact,
    check_number,
    check_state,
    error_message,
    is_float0,
    is_traced,
)
from .._states import increment_where
from .._types import Array, Number, Scalar, Tree
from ..accumulation._running import accumulator_like, check_matches_accumulator
from ..clipping._scale import clip_factor, scale_leaf


class MomentState(NamedTuple):
    """Moments of the gradient, float32 or wider, in the structure of the parameters.

    Attributes:
        steps: int32[], steps so far, saturating.
        first: a decaying average of the gradient, or () where there is none.
        second: a decaying average of a power of its magnitude.
    """

    steps: Scalar
    first: Any
    second: Tree


def two_moments(params: Tree) -> MomentState:
    """The state before the first step; the second moment of a complex leaf is real."""
    zeros = accumulator_like(params, jnp.float32)
    return MomentState(jnp.zeros((), jnp.int32), zeros, jax.tree.map(jnp.abs, zeros))


def acclip(
    b1: Number = 0.9, b2: Number = 0.99, alpha: Number = 1.0, eps: Number = 1e-5
) -> optax.GradientTransformation:
    """Clips the momentum elementwise by a running average of gradient magnitudes (ACClip).

    `m = b1 m + (1 - b1) g`, `tau^alpha = b2 tau^alpha + (1 - b2) |g|^alpha`,
    `update = min(tau / (|m| + eps), 1) m`: the momentum is clipped, not the gradient, and there
    is no bias correction, so that the first steps are up to ten times shorter. Follow it with
    `optax.scale_by_learning_rate` or SGD without momentum. Published for heavy-tailed noise.

    Args:
        b1: decay of the momentum, 0 to 1.
        b2: decay of the threshold, 0 to 1.
        alpha: the moment that is averaged, > 0; the paper uses 1.
        eps: > 0, in the unit of the gradients.

    Returns:
        An Optax transformation; an element that is not finite leaves its moments as they were.

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
        check_inexact(name, "updates", updates)
        check_state(name, state, MomentState)
        check_matches_accumulator(name, updates, state.second)

        def clip(grad: Any, first: Array, second: Array) -> Any:
            if is_float0(grad):
                return grad, first, second
            g = grad.astype(first.dtype)
            new_first = b1 * first + (1 - b1) * g
            new_second = b2 * second + (1 - b2) * power_of(jnp.abs(g), alpha)
            # Not zero: neither its root nor its quotient would have a slope there.
            tau = jnp.maximum(new_second, jnp.finfo(new_second.dtype).tiny) ** (1 / alpha)
            clipped = scale_leaf(new_first, clip_factor(jnp.abs(new_first) + eps, tau))
            moments = where_finite(g, (new_first, new_second), (first, second))
            return clipped.astype(grad.dtype), *moments

        out, first, second = by_leaf(clip, updates, state.first, state.second)
        return out, MomentState(increment_where(state.steps), first, second)

    return optax.GradientTransformation(two_moments, update)


def spam_clip(
    spike_threshold: Number = 5000.0,
    decay: Number = 0.999,
    warmup_steps: int = 20,
    reset_every: int | None = 500,
) -> optax.GradientTransformation:
    """Clamps elements whose square is far above their running second moment (SPAM).

    Where `g^2 > spike_threshold * v`, g becomes `sign(g) sqrt(spike_threshold * v)`, v being the
    second moment before the step, not bias-corrected; what is left of g feeds v. As in the
    authors' code nothing is clipped in the first `warmup_steps` and after each reset of v.
    Added: an element whose v is 0 is not clipped, or it would stay 0. Put it before Adam, and
    give it the `b2` of Adam as `decay`. SPAM's reset of momentum is not part of a clip.

    Args:
        spike_threshold: dimensionless, > 0.
        decay: of the second moment, 0 to 1.
        warmup_steps: steps without clipping after the start and after each reset, >= 1.
        reset_every: the second moment starts afresh every so many steps, >= 1; None for never.

    Returns:
        An Optax transformation; an element that is not finite leaves its moment as it was.

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

    def init(params: Tree) -> MomentState:
        zeros = jax.tree.map(jnp.abs, accumulator_like(params, jnp.float32))
        return MomentState(jnp.zeros((), jnp.int32), (), zeros)

    def update(updates: Tree, state: Any, params: Tree | None = None) -> tuple[Tree, MomentState]:
        check_inexact(name, "updates", updates)
        check_state(name, state, MomentState)
        check_matches_accumulator(name, updates, state.second)
        count = increment_where(state.steps)
        since_reset = count if reset_every is None else count % reset_every
        resets = jnp.array(False) if reset_every is None else since_reset == 0
        clips = (count >= warmup_steps) & (since_reset >= warmup_steps)

        def clip(grad: Any, moment: Array) -> Any:
            if is_float0(grad):
                return grad, moment
            moment = jnp.where(resets, 0, moment)
            is_bounded = clips & (moment > 0)
            bound = jnp.sqrt(spike_threshold * jnp.where(is_bounded, moment, 1))
            threshold = jnp.where(is_bounded, bound, jnp.inf)
            magnitude = jnp.abs(grad).astype(moment.dtype)
            clipped = scale_leaf(grad, clip_factor(magnitude, threshold))
            left = jnp.minimum(magnitude, threshold)
            fed = decay * moment + (1 - decay) * left**2
            return clipped, *where_finite(magnitude, (fed,), (moment,))

        out, second = by_leaf(clip, updates, state.second)
        return out, MomentState(count, (), second)

    return optax.GradientTransformation(init, update)


def power_of(x: Array, exponent: Any) -> Array:
    """`x^exponent` of x >= 0, differentiable at zero."""
    return jnp.where(x > 0, jnp.where(x > 0, x, 1) ** exponent, x)


def bias_correction(decay: Any, steps: Array) -> Array:
    """`1 - decay^steps`, to float32 rounding: how much of an average comes from data."""
    if isinstance(decay, jax.Array):
        return -jnp.expm1(steps * jnp.log(jnp.maximum(decay, 1e-30)))
    return -jnp.expm1(steps * math.log(max(float(decay), 1e-30)))


def check_decays(function: str, **decays: Any) -> None:
    """Refuses what is not a number in [0, 1)."""
    for argument, value in decays.items():
        hint = "A decay is a number below 1, such as 0.99."
        check_number(function, argument, value, hint, high=1.0, closed=True)
        if not is_traced(value) and float(value) == 1.0:
            raise ValueError(error_message(function, argument, "a number < 1", repr(value), hint))


def where_finite(seen: Array, proposed: Any, before: Any) -> list[Array]:
    """What is proposed where all of it and the gradient are finite, what was before elsewhere."""
    finite = functools.reduce(jnp.logical_and, map(jnp.isfinite, proposed), jnp.isfinite(seen))
    pairs = zip(proposed, before, strict=True)
    return [jnp.where(finite, new.astype(old.dtype), old) for new, old in pairs]


def by_leaf(fun: Any, tree: Tree, *others: Tree) -> list[Tree]:
    """Maps a function with several results over leaves that share a place."""
    leaves, structure = jax.tree.flatten(tree)
    rows = [fun(*xs) for xs in zip(leaves, *map(jax.tree.leaves, others), strict=True)]
    if not rows:
        return [tree, *others[-2:]]
    return [jax.tree.unflatten(structure, column) for column in zip(*rows, strict=True)]
