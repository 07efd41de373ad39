"""The identity with a backward pass of its own."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._types import Array
from .._xla import barrier_on_gpu
from ._norm import axis_norms
from ._scale import root_of_norms, scale_leaf


class How(NamedTuple):
    """What is known when the program is traced.

    Attributes:
        axes: the axes that a norm runs over.
        drops: whether a unit that is not finite becomes zero.
        has_probe: whether the norms are asked for.
    """

    axes: tuple[int, ...]
    drops: bool
    has_probe: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def identity(x: Array, max_norm: Array, probe: Array | None, how: How) -> Array:
    """The first argument; its cotangent is clipped, and that of the probe is the norms."""
    del max_norm, probe, how
    return x


def _forward(x: Array, max_norm: Array, probe: Array | None, how: How) -> tuple[Array, Array]:
    del probe, how
    # Not `identity` again: a derivative of the gradient would be clipped on its own way back.
    return x, max_norm


def _backward(how: How, max_norm: Array, cotangent: Array) -> tuple[Array, None, Array | None]:
    cotangent = barrier_on_gpu(cotangent)
    norms = axis_norms(cotangent, how.axes)
    roots = root_of_norms(norms, max_norm, 0.0 if how.drops else jnp.nan)
    clipped = scale_leaf(cotangent, roots, drops=how.drops)
    return clipped, None, jnp.squeeze(norms, how.axes) if how.has_probe else None


identity.defvjp(_forward, _backward)
