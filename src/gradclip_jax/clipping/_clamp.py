"""Clamping: every element within two bounds."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import check_number, error_message, is_float0, is_traced
from .._tree_checks import check_inexact
from .._types import Number, Tree
from ._formula import clamp_leaf


def clip_grad_value(grads: Tree, max_value: Number) -> Tree:
    """Clamps every element of a gradient tree to `[-max_value, max_value]`.

    Args:
        grads: floating leaves of any shape.
        max_value: the bound in the unit of the gradients, > 0; may be traced.

    Returns:
        The clamped gradients.

    Raises:
        ValueError: `max_value` is not > 0.
        TypeError: a leaf is an integer, a boolean or complex; the message names its path.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> gcx.clip_grad_value(jnp.array([-3.0, 0.5]), 1.0).tolist()
        [-1.0, 0.5]
    """
    low, high = value_bounds("clip_grad_value", max_value, None)
    return clamp_tree("clip_grad_value", "grads", grads, low, high)


def value_bounds(function: str, max_value: Any, min_value: Any) -> tuple[Any, Any]:
    """Lower and upper bound of a clamp, checked."""
    check_number(function, "max_value", max_value, "Pass inf to turn clipping off.")
    if min_value is None:
        # Nothing is computed of a plain number: built inside a jit, it would be a tracer.
        high = jnp.maximum(max_value, 0) if is_traced(max_value) else max_value
        return -high, high
    hint = "Leave it out for `-max_value`."
    check_number(function, "min_value", min_value, hint, low=-np.inf, closed=True)
    if not (is_traced(min_value) or is_traced(max_value) or min_value < max_value):
        raise ValueError(error_message(function, "min_value", "< max_value", repr(min_value), hint))
    return min_value, max_value


def clamp_tree(function: str, argument: str, tree: Tree, low: Any, high: Any) -> Tree:
    """Every element within the bounds."""
    check_inexact(function, argument, tree, real=True)
    return jax.tree.map(lambda x: x if is_float0(x) else clamp_leaf(x, low, high), tree)
