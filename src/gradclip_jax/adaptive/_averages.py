"""Arithmetic that running averages share: without overflow, and differentiable at zero."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._types import Array


def bias_correction(decay: Any, steps: Array) -> Array:
    """`1 - decay^steps`, to float32 rounding: the weight of the data in a decaying average."""
    if isinstance(decay, jax.Array):
        return -jnp.expm1(steps * jnp.log(jnp.maximum(decay, 1e-30)))
    return -jnp.expm1(steps * math.log(max(float(decay), 1e-30)))


def hypotenuse(x: Array, y: Array) -> Array:
    """`sqrt(x^2 + y^2)` without overflow, and differentiable at zero."""
    unit = jax.lax.stop_gradient(jnp.maximum(jnp.maximum(jnp.abs(x), jnp.abs(y)), 1e-30))
    return unit * jnp.sqrt(jnp.maximum((x / unit) ** 2 + (y / unit) ** 2, 1e-30))


def power_of(x: Array, exponent: Any) -> Array:
    """`x^exponent` of x >= 0, differentiable at zero."""
    return jnp.where(x > 0, jnp.where(x > 0, x, 1) ** exponent, x)


def where_finite(finite: Array, proposed: Any, before: Any) -> Any:
    """The proposed averages where `finite` holds and all are finite, the old ones elsewhere."""
    finite = functools.reduce(jnp.logical_and, map(jnp.isfinite, jax.tree.leaves(proposed)), finite)
    return optax.tree.where(finite, optax.tree.cast_like(proposed, before), before)


def where_nonzero(norm: Array, next_state: Any, state: Any) -> Any:
    """The next state of the units whose norm is not zero.

    With zeros in its history, a leaf that is seldom used, such as an expert, would be clipped
    to zero when it is used.
    """
    return optax.tree.where(norm > 0, next_state, state)
