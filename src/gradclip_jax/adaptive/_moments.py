"""State as large as the parameters: moments of the gradient, element by element."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._checks import check_state
from .._tree_checks import check_inexact, check_same_structure
from .._types import Array, Scalar, Tree


class MomentState(NamedTuple):
    """Moments of the gradient, float32 or wider, in the structure of the parameters.

    Attributes:
        step_count: int32[], steps so far, saturating.
        first: exponential moving average of the gradient, or () where it is not needed.
        second: exponential moving average of a power of its magnitude.
    """

    step_count: Scalar
    first: Any
    second: Tree


def wide_zeros(params: Tree) -> Tree:
    """Zeros like the parameters, in float32 or wider; one scalar for an integer parameter."""

    def zeros(param: Any) -> Array:
        dtype = jnp.result_type(param)
        if not jnp.issubdtype(dtype, jnp.inexact):
            return jnp.zeros((), jnp.float32)
        if jnp.finfo(dtype).bits < 64:  # of a real or imaginary part
            is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
            dtype = jnp.complex64 if is_complex else jnp.float32
        return jnp.zeros_like(param, dtype)

    return jax.tree.map(zeros, params)


def zero_moments(params: Tree) -> MomentState:
    """Both moments before the first step; the second moment of a complex leaf is real."""
    zeros = wide_zeros(params)
    return MomentState(jnp.zeros((), jnp.int32), zeros, jax.tree.map(jnp.abs, zeros))


def check_update(function: str, updates: Tree, state: Any, kind: type, field: str) -> None:
    """Refuses a step without its state, or whose updates do not match that field of it."""
    check_inexact(function, "updates", updates)
    check_state(function, state, kind)
    check_same_structure(function, "updates", updates, "params", getattr(state, field))


def map_leaves(
    fun: Callable[..., tuple[Any, ...]], num_outputs: int, tree: Tree, *others: Tree
) -> list[Tree]:
    """`num_outputs` trees, of what `fun` returns for each leaf and its counterparts."""
    leaves, structure = jax.tree.flatten(tree)
    rows = [fun(*xs) for xs in zip(leaves, *map(jax.tree.leaves, others), strict=True)]
    columns = zip(*rows, strict=True) if rows else [()] * num_outputs
    return [jax.tree.unflatten(structure, column) for column in columns]
