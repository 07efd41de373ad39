"""U-Clip, which adds the clipped-off part of a gradient to the next gradient."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._checks import check_transformation, is_float0
from .._errors import public
from .._mesh import in_memory_of, on_device
from .._types import Array, Tree
from ..clipping._norm import global_norm
from ._moments import check_update, wide_zeros


class CarryState(NamedTuple):
    """State of `u_clip`.

    Attributes:
        carry: Clipped-off part of the gradient that the next step adds, in float32 or wider.
        clip_state: State of the clip.
    """

    carry: Tree
    clip_state: Tree


@public
def u_clip(clip: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Add the clipped-off part of each gradient to the next one, for unbiased mean updates.

    Each step computes `u = clip(g + carry)` and then `carry = g + carry - u`, so that the updates
    and the carry add up to the sum of all gradients. The carry needs a buffer of the size of the
    parameters and an additional pass over the gradients. The clipped-off part of a spike also
    enters later updates; use `skip_large_norm` to discard bad batches.

    | step | effect |
    | --- | --- |
    | non-finite gradient or update | the output of the clip; the carry does not change |
    | update rounded to bfloat16 | the carry includes the rounding error |

    Args:
        clip: Gradient transformation that clips; the paper uses `clip` and `clip_by_global_norm`.

    Returns:
        A gradient transformation with a `CarryState`.

    Raises:
        TypeError: If `clip` is not a gradient transformation, or a leaf is not floating-point or
            complex.

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
        updates: Tree, state: Tree, params: Tree | None = None, **extra_args: Any
    ) -> tuple[Tree, CarryState]:
        check_update(updates, state, CarryState, "carry")
        total = jax.tree.map(_add, updates, state.carry)
        clipped, clip_state = clip.update(total, state.clip_state, params, **extra_args)
        out = jax.tree.map(_cast_like, clipped, updates)
        remainder = jax.tree.map(_subtract, total, out, state.carry)
        # The remainder is non-finite if the gradient or the update is non-finite. The result is the
        # same on all devices if the output of the clip is non-finite on all of them.
        finite = jnp.isfinite(global_norm(remainder, ord=jnp.inf))
        return out, CarryState(optax.tree.where(finite, remainder, state.carry), clip_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _add(grad: Array, carry: Array) -> Array:
    return grad if is_float0(grad) else on_device(jnp.asarray(grad)).astype(carry.dtype) + carry


def _subtract(total: Array, update: Array, carry: Array) -> Array:
    return carry if is_float0(update) else total - on_device(update).astype(total.dtype)


def _cast_like(update: Array, grad: Array) -> Array:
    return update if is_float0(grad) else in_memory_of(update.astype(jnp.result_type(grad)), grad)
