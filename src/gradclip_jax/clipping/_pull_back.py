"""The identity with a backward pass of its own, and what of it is mapped over units."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._checks import error_message
from .._mesh import is_explicit
from .._types import Array
from ._norm import unit_norms
from ._scale import root_of_norms, scale_leaf
from ._units import tree_units


class How(NamedTuple):
    """What is known when the program is traced.

    Attributes:
        kept: the axes that index the units.
        ord: order of the norm.
        drops: whether a unit that is not finite becomes zero.
    """

    kept: tuple[int, ...]
    ord: float
    drops: bool


def kept_axes(function: str, x: Array, over: tuple[int, ...]) -> tuple[int, ...]:
    """The axes that index units, where a norm runs over the others."""
    kept = tuple(a for a in range(x.ndim) if a not in over)
    sharding = jax.typeof(x).sharding
    # JAX cannot batch the branch of a norm over an axis that is sharded by its type (0.10.2).
    if kept and is_explicit(sharding) and any(sharding.spec[a] is not None for a in over):
        rule = "axes that are not sharded, under explicit axes"
        got = f"{over} for an array that is sharded as {sharding.spec}"
        hint = "Reshard x first, with `jax.sharding.reshard`."
        raise ValueError(error_message(function, "axis", rule, got, hint))
    return kept


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def identity(x: Array, max_norm: Array, probe: Array | None, how: How, has_probe: bool) -> Array:
    """The first argument; its cotangent is clipped, and that of the probe is the norms."""
    del max_norm, probe, how, has_probe
    return x


def _forward(
    x: Array, max_norm: Array, probe: Array | None, how: How, has_probe: bool
) -> tuple[Array, Array]:
    del probe, how, has_probe
    # Not `identity` again: a derivative of the gradient would be clipped on its own way back.
    return x, max_norm


def _backward(
    how: How, has_probe: bool, max_norm: Array, cotangent: Array
) -> tuple[Array, None, Array | None]:
    clip = functools.partial(_clip_unit, how.ord, how.drops)
    # Mapped over the units, and not one vector of them: each axis stays as it is sharded, so that
    # no device asks another for the norms of its tokens.
    for depth, axis in reversed(list(enumerate(how.kept))):
        clip = jax.vmap(clip, in_axes=(None, axis - depth), out_axes=(axis - depth, 0))
    clipped, norms = clip(max_norm, cotangent)
    return clipped, None, norms if has_probe else None


def _clip_unit(ord: float, drops: bool, max_norm: Array, unit: Array) -> tuple[Array, Array]:
    norm = unit_norms([unit], tree_units([unit])._replace(is_local=True), ord, None)[0]
    root = root_of_norms(norm, max_norm, 0.0 if drops else jnp.nan)
    return scale_leaf(unit, root, drops=drops), norm


identity.defvjp(_forward, _backward)
