"""U-Clip: what a clip cuts off is added to the next gradient."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._checks import check_transformation, is_float0
from .._errors import public
from .._mesh import in_memory_of, on_device
from .._types import Tree
from ..clipping._norm import global_norm
from ._moments import check_update, wide_zeros


class CarryState(NamedTuple):
    """The part of the gradients that was clipped away so far.

    Attributes:
        carry: float32 or wider leaves, in the unit of the gradients.
        clip_state: the state of the clip.
    """

    carry: Tree
    clip_state: Any


@public
def u_clip(clip: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Adds what a clip cuts off to the next gradient, so that the mean update is unbiased.

    `u = clip(g + carry)`, then `carry = g + carry - u`: updates and carry sum to all gradients so
    far. It needs a buffer of the size of the parameters and another pass over the gradients. A
    spike is also carried over in full; for bad batches use `skip_large_norm`.

    | step | effect |
    | --- | --- |
    | gradient or update not finite | the update is that of the clip, the carry stays as it was |
    | update rounded to bfloat16 | the rounding error is carried over |

    Args:
        clip: any Optax transformation that clips; the paper uses `clip` and `clip_by_global_norm`.

    Returns:
        An Optax transformation with a `CarryState`.

    Raises:
        TypeError: `clip` is no transformation; when traced, a leaf is not inexact.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> clip = gcx.contrib.u_clip(gcx.clip(1.0))
        >>> state = clip.init(jnp.zeros(1))
        >>> first, state = clip.update(jnp.array([2.5]), state)
        >>> second, state = clip.update(jnp.array([-1.0]), state)
        >>> first.tolist(), second.tolist()
        ([1.0], [0.5])

    References:
        Elesedy and Hutter, 2023, arXiv 2302.02971.
    """
    check_transformation("clip", clip)
    clip = optax.with_extra_args_support(clip)

    def init(params: Tree) -> CarryState:
        return CarryState(wide_zeros(params), clip.init(params))

    def update(
        updates: Tree, state: Any, params: Tree | None = None, **extra_args: Any
    ) -> tuple[Tree, CarryState]:
        check_update(updates, state, CarryState, "carry")
        total = jax.tree.map(_add, updates, state.carry)
        clipped, clip_state = clip.update(total, state.clip_state, params, **extra_args)
        out = jax.tree.map(_cast_like, clipped, updates)
        remainder = jax.tree.map(_subtract, total, out, state.carry)
        # Not finite if the gradient or the update is not; alike on all devices where the clip is.
        finite = jnp.isfinite(global_norm(remainder, ord=jnp.inf))
        return out, CarryState(optax.tree.where(finite, remainder, state.carry), clip_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _add(grad: Any, carry: Any) -> Any:
    return grad if is_float0(grad) else on_device(jnp.asarray(grad)).astype(carry.dtype) + carry


def _subtract(total: Any, update: Any, carry: Any) -> Any:
    return carry if is_float0(update) else total - on_device(update).astype(total.dtype)


def _cast_like(update: Any, grad: Any) -> Any:
    return update if is_float0(grad) else in_memory_of(update.astype(jnp.result_type(grad)), grad)
