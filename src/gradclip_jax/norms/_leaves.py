"""Floating-point and complex leaves, which are called measured leaves, and their arithmetic."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .._checks import describe, dtype_of, is_float0, leaf_path, listed
from .._errors import type_error
from .._types import Array, Tree
from ._mesh import check_placement


class Leaves(NamedTuple):
    """A flattened tree and its floating-point and complex leaves.

    Attributes:
        arrays: Floating-point and complex leaves.
        places: Indices of these leaves among all leaves of the tree.
        given: All leaves of the tree.
        structure: Structure of the tree.
    """

    arrays: list[Array]
    places: list[int]
    given: list[object]
    structure: Any

    def beside(self, tree: Tree) -> list[Array]:
        """Return the leaves of another tree at the same positions as `arrays`."""
        leaves = jax.tree.leaves(tree)
        return [jnp.asarray(leaves[place]) for place in self.places]

    def replace(self, arrays: Sequence[Array]) -> Tree:
        """Return the tree with new arrays."""
        leaves = list(self.given)
        for place, new in zip(self.places, arrays, strict=True):
            leaves[place] = new
        return jax.tree.unflatten(self.structure, leaves)


def flatten(tree: Tree) -> Leaves:
    """Flatten a tree, and select its floating-point and complex leaves."""
    given, structure = jax.tree.flatten(tree)
    places = [i for i, x in enumerate(given) if is_measured(x)]
    return Leaves([jnp.asarray(given[i]) for i in places], places, given, structure)


def checked_leaves(argument: str, tree: Tree, *, real: bool = False) -> Leaves:
    """Flatten a tree whose leaves are floating-point, complex (unless `real`) or float0, or raise.

    Leaves that are unreduced over a mesh axis or in host memory raise as well.
    """
    kind = jnp.floating if real else jnp.inexact
    leaves = [(path, x) for path, x in jax.tree.leaves_with_path(tree) if not is_float0(x)]
    bad = [(path, x) for path, x in leaves if not jnp.issubdtype(dtype_of(x), kind)]
    if bad:
        got = listed(f"{describe(x)} at {leaf_path(argument, path)}" for path, x in bad)
        rule = f"a tree of {'floating' if real else 'floating or complex'} leaves"
        hint = "Exclude other leaves with `optax.masked`, or convert them to floating point."
        raise type_error(argument, rule, got, hint)
    check_placement(argument, tree)
    return flatten(tree)


def is_measured(leaf: object) -> bool:
    """Return whether a leaf is floating-point or complex, or a placeholder."""
    dtype = dtype_of(leaf)
    return dtype == np.dtype(object) or jnp.issubdtype(dtype, jnp.inexact)


def measured_leaves(tree: Tree) -> list[Array]:
    """Return all floating-point and complex leaves."""
    return list(map(jnp.asarray, measured_shapes(tree)))


def measured_shapes(tree: Tree) -> list[Any]:
    """Return floating-point and complex leaves unconverted, because `init` may get placeholders."""
    return [x for x in jax.tree.leaves(tree) if is_measured(x)]


def wide_dtype(*dtypes: DTypeLike) -> DTypeLike:
    """The floating-point or complex dtype of at least 32 bits to which `dtypes` can be cast.

    `jnp.promote_types` does not support float8, and raises under strict promotion.
    """
    bits, is_complex = 32, False
    for dtype in dtypes:
        bits = max(bits, jnp.finfo(dtype).bits)
        is_complex |= jnp.issubdtype(dtype, jnp.complexfloating)
    if is_complex:
        return jnp.complex128 if bits == 64 else jnp.complex64
    return jnp.float64 if bits == 64 else jnp.float32
