"""The carry reaction: what was clipped away comes again at the next step."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._checks import (
    check_inexact,
    check_state,
    check_transformation,
    is_float0,
)
from .._types import Tree
from ..accumulation._running import accumulator_like, check_matches_accumulator
from ..clipping._norm import global_norm


class CarryState(NamedTuple):
    """What was clipped away so far.

    Attributes:
        carry: float32 (or wider) leaves, in the unit of the gradients.
        clip_state: the state of the clip.
    """

    carry: Tree
    clip_state: Any


def u_clip(clip: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Carries what a clip cuts off over to the next step: unbiased on average.

    `u = clip(g + carry)`, then `carry = g + carry - u`; the updates and the carry add up to all
    gradients so far. A step that is not finite leaves the carry as it was. Costs one buffer of
    the size of the parameters and one more pass over the gradients.

    Args:
        clip: any clip; in the paper elementwise, `clip`, or `clip_by_global_norm`.

    Returns:
        An Optax transformation with a `CarryState`.

    Raises:
        TypeError: `clip` is no transformation; when traced, a leaf is not inexact.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> clip = gcx.u_clip(gcx.clip(1.0))
        >>> state = clip.init(jnp.zeros(1))
        >>> first, state = clip.update(jnp.array([2.5]), state)
        >>> second, state = clip.update(jnp.array([-1.0]), state)
        >>> first.tolist(), second.tolist()
        ([1.0], [0.5])

    References:
        Elesedy and Hutter, 2023, arXiv 2302.02971.
    """
    check_transformation("u_clip", "clip", clip)
    clip = optax.with_extra_args_support(clip)

    def init(params: Tree) -> CarryState:
        return CarryState(accumulator_like(params, jnp.float32), clip.init(params))

    def update(
        updates: Tree, state: Any, params: Tree | None = None, **extra_args: Any
    ) -> tuple[Tree, CarryState]:
        check_inexact("u_clip", "updates", updates)
        check_state("u_clip", state, CarryState)
        check_matches_accumulator("u_clip", updates, state.carry)
        owed = jax.tree.map(_plus, updates, state.carry)
        clipped, clip_state = clip.update(owed, state.clip_state, params, **extra_args)
        emitted = jax.tree.map(_like, clipped, updates)
        left = jax.tree.map(_minus, owed, emitted, state.carry)
        # Not finite if the gradient or the update is not; alike on all devices where the clip is.
        finite = jnp.isfinite(global_norm(left, ord=jnp.inf))
        carry = jax.tree.map(lambda new, old: jnp.where(finite, new, old), left, state.carry)
        return emitted, CarryState(carry, clip_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _plus(grad: Any, carry: Any) -> Any:
    return grad if is_float0(grad) else jnp.asarray(grad).astype(carry.dtype) + carry


def _minus(owed: Any, update: Any, carry: Any) -> Any:
    return carry if is_float0(update) else owed - update.astype(owed.dtype)


def _like(update: Any, grad: Any) -> Any:
    return update if is_float0(grad) else update.astype(jnp.result_type(grad))
