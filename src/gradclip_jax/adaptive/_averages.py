"""Helpers for moving averages that do not overflow and are differentiable at zero."""

import functools
import math

import jax
import jax.numpy as jnp
import optax

from .._types import Array, Number, Tree


def bias_correction(decay: Number, steps: Array) -> Array:
    """Compute the bias correction `1 - decay^steps` without cancellation."""
    if isinstance(decay, jax.Array):
        return -jnp.expm1(steps * jnp.log(jnp.maximum(decay, 1e-30)))
    return -jnp.expm1(steps * math.log(max(float(decay), 1e-30)))


def hypotenuse(x: Array, y: Array) -> Array:
    """Compute `sqrt(x^2 + y^2)` without overflow; the result is differentiable at zero."""
    unit = jax.lax.stop_gradient(jnp.maximum(jnp.maximum(jnp.abs(x), jnp.abs(y)), 1e-30))
    return unit * jnp.sqrt(jnp.maximum((x / unit) ** 2 + (y / unit) ** 2, 1e-30))


def power_of(x: Array, exponent: Number) -> Array:
    """Compute `x^exponent` for x >= 0; the result is differentiable at zero."""
    return jnp.where(x > 0, jnp.where(x > 0, x, 1) ** exponent, x)


def where_finite(finite: Array, proposed: Tree, before: Tree) -> Tree:
    """Update the averages where `finite` is true and all new averages are finite."""
    finite = functools.reduce(jnp.logical_and, map(jnp.isfinite, jax.tree.leaves(proposed)), finite)
    return optax.tree.where(finite, optax.tree.cast_like(proposed, before), before)


def where_nonzero(norm: Array, next_state: Tree, state: Tree) -> Tree:
    """Update the state for nonzero norms; keep the old state for norms of zero.

    If zero norms were averaged, the first nonzero gradient of a rarely used leaf, such as an
    expert, would be clipped to zero.
    """
    return optax.tree.where(norm > 0, next_state, state)
