"""Public functions that clip by value."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._checks import check_number, is_traced
from .._errors import public, value_error
from .._format import shortened
from .._types import Array, Number, Tree
from ..norms._leaves import checked_leaves, wide_dtype


class ClampState(NamedTuple):
    """State of `clip_by_value`.

    The state has no arrays. It shows `scale_loss` that gradients are clipped.
    """

    is_clip = True

    def step_metrics(self) -> dict[str, Array]:
        """Return no entries of `metrics`."""
        return {}


@public
def clip_by_value(
    max_value: Number, min_value: Number | None = None
) -> optax.GradientTransformation:
    """Clamp every element to `[-max_value, max_value]`, or to `[min_value, max_value]`.

    Clamping changes the direction of the gradient, in contrast to `clip_by_global_norm`. NaN
    remains NaN, an infinity becomes the nearest bound, and a traced `max_value` <= 0 returns zeros.

    Args:
        max_value: Upper bound in the units of the gradients; a positive number or a traced scalar.
        min_value: Lower bound, less than `max_value`; None means `-max_value`. A traced bound above
            a traced `max_value` counts as `max_value`.

    Returns:
        A gradient transformation with a `ClampState`, which contains no arrays.

    Raises:
        ValueError: If `max_value` is not positive, or if `min_value` is not less than `max_value`.
        TypeError: If a bound is not a number, or if a leaf is not real floating-point.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> clip = gcx.clip_by_value(1.0)
        >>> clip.update(jnp.array([-3.0, 0.5, 2.0]), clip.init(None))[0].tolist()
        [-1.0, 0.5, 1.0]
    """
    high, low = _checked_bounds(max_value, min_value)

    def update(updates: Tree, state: Tree, params: Tree | None = None) -> tuple[Tree, Tree]:
        return _clamp_tree("updates", updates, high, low), state

    return optax.GradientTransformation(lambda params: ClampState(), update)


@public
@jax.named_scope("clip_grad_value")
def clip_grad_value(grads: Tree, max_value: Number) -> Tree:
    """Clamp every element of a gradient tree to `[-max_value, max_value]`.

    Args:
        grads: Pytree of real floating-point leaves.
        max_value: Bound in the units of the gradients; a positive number, which may be traced.

    Returns:
        The clamped gradients.

    Raises:
        ValueError: If `max_value` is not positive.
        TypeError: If a leaf is integer, boolean or complex; the message contains its path.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> gcx.clip_grad_value(jnp.array([-3.0, 0.5]), 1.0).tolist()
        [-1.0, 0.5]
    """
    high, _ = _checked_bounds(max_value, None)
    return _clamp_tree("grads", grads, high, None)


def _checked_bounds(max_value: Number, min_value: Number | None) -> tuple[Number, Number | None]:
    """Check the bounds, and convert them to floats unless they are traced."""
    hint = "To clip a tree without a transformation, use `clip_grad_value(grads, max_value)`."
    high, low = check_number("max_value", max_value, hint), None
    if min_value is not None:
        hint = "Omit it to use `-max_value`."
        low = check_number("min_value", min_value, hint, "[-inf, inf]")
        if not (is_traced(low) or is_traced(high) or low < high):
            raise value_error("min_value", "less than `max_value`", shortened(min_value), hint)
    return high, low


def _clamp_tree(argument: str, tree: Tree, high: Number, low: Number | None) -> Tree:
    """Clamp every element of a tree to the bounds."""
    leaves = checked_leaves(argument, tree, real=True)
    return leaves.replace([_clamp_leaf(x, high, low) for x in leaves.arrays])


def _clamp_leaf(x: Array, high: Number, low: Number | None) -> Array:
    """Clamp to [low, high] or [-high, high] in at least float32; NaN remains NaN.

    If `high` <= 0, the result is zero.
    """
    wide = x.astype(wide_dtype(x.dtype))
    bound = jnp.asarray(high, wide.dtype)
    high = jnp.maximum(bound, 0)
    if low is None:
        low = -high
    else:
        low = jnp.where(bound > 0, jnp.minimum(jnp.asarray(low, wide.dtype), high), 0)
    is_within = (wide >= low) & (wide <= high)
    return jnp.where(is_within, x, jnp.clip(wide, low, high).astype(x.dtype))
