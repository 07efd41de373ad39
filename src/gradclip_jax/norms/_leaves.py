"""Floating-point and complex leaves of a tree, which are called inexact leaves."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .._checks import dtype_of, is_float0
from .._errors import type_error
from .._format import describe, leaf_path, listed
from .._types import Array, Tree
from ._mesh import check_placement, is_placed


class Leaves(NamedTuple):
    """A flattened tree and its inexact leaves.

    Attributes:
        arrays: Inexact leaves.
        places: Indices of these leaves among all leaves of the tree.
        given: All leaves of the tree.
        structure: Structure of the tree.
    """

    arrays: list[Array]
    places: list[int]
    given: list[object]
    structure: Any

    def leaves_like(self, tree: Tree) -> list[Array]:
        """Return the leaves of another tree at the positions of the inexact leaves."""
        return leaves_at(tree, self.places)

    def replace(self, arrays: Sequence[Array]) -> Tree:
        """Return the tree after replacing its inexact leaves."""
        leaves = list(self.given)
        for place, new in zip(self.places, arrays, strict=True):
            leaves[place] = new
        return jax.tree.unflatten(self.structure, leaves)


def leaves_at(tree: Tree, places: Sequence[int]) -> list[Array]:
    """Return the leaves of a tree at the given positions as arrays."""
    leaves = jax.tree.leaves(tree)
    return [jnp.asarray(leaves[place]) for place in places]


def checked_leaves(argument: str, tree: Tree, *, real: bool = False) -> Leaves:
    """Flatten a tree, and raise unless its leaves are floating-point, complex or float0.

    Complex leaves raise with `real`. Leaves that are unreduced over a mesh axis, or in host memory,
    cause an error as well.
    """
    kind = jnp.floating if real else jnp.inexact
    given, structure = jax.tree.flatten(tree)
    leaves = Leaves([], [], given, structure)
    for i, x in enumerate(given):
        dtype = dtype_of(x)
        if dtype == jax.dtypes.float0:  # the gradient of an integer
            continue
        if isinstance(x, jax.ShapeDtypeStruct):
            hint = "Pass arrays, or call the function inside `jax.eval_shape`."
            raise type_error(argument, "a tree of arrays", "a `ShapeDtypeStruct`", hint)
        if not (jnp.issubdtype(dtype, kind) and is_placed(x)):
            _raise_invalid(argument, tree, kind)
        leaves.arrays.append(jnp.asarray(x))
        leaves.places.append(i)
    return leaves


def _raise_invalid(argument: str, tree: Tree, kind: Any) -> None:
    """Raise an error for leaves that are not of the dtype `kind`, or not in device memory."""
    leaves = [(path, x) for path, x in jax.tree.leaves_with_path(tree) if not is_float0(x)]
    bad = [(path, x) for path, x in leaves if not jnp.issubdtype(dtype_of(x), kind)]
    if bad:
        got = listed(f"{describe(x)} at {leaf_path(argument, path)}" for path, x in bad)
        rule = f"a tree of {'floating' if kind is jnp.floating else 'floating or complex'} leaves"
        hint = "Exclude other leaves with `optax.masked`, or convert them to floating point."
        raise type_error(argument, rule, got, hint)
    check_placement(argument, tree)


def is_inexact(leaf: object) -> bool:
    """Return whether a leaf is floating-point, complex, or a placeholder that is not an array.

    `optax.tree.map_params` passes placeholders to `init`; `checked_leaves` rejects them.
    """
    dtype = dtype_of(leaf)
    return dtype == np.dtype(object) or jnp.issubdtype(dtype, jnp.inexact)


def inexact_leaves(tree: Tree) -> list[Array]:
    """Return the inexact leaves of a tree as arrays."""
    return [jnp.asarray(x) for x in jax.tree.leaves(tree) if is_inexact(x)]


def inexact_leaves_or_placeholders(tree: Tree) -> list[Any]:
    """Return the inexact leaves of a tree, which are not converted to arrays.

    `optax.tree.map_params` passes placeholders to `init`, which are not arrays.
    """
    return [x for x in jax.tree.leaves(tree) if is_inexact(x)]


def norm_dtype(leaves: Iterable[Array]) -> DTypeLike:
    """Return float32, or float64 if a leaf is float64 or complex128."""
    for x in leaves:
        if x.dtype in (np.dtype("float64"), np.dtype("complex128")):
            return jnp.float64
    return jnp.float32


def wide_dtype(*dtypes: DTypeLike) -> DTypeLike:
    """Return the common dtype of at least 32 bits for computations with `dtypes`.

    `jnp.promote_types` does not support float8, and raises under strict promotion.
    """
    bits, is_complex = 32, False
    for dtype in dtypes:
        bits = max(bits, jnp.finfo(dtype).bits)
        is_complex |= jnp.issubdtype(dtype, jnp.complexfloating)
    if is_complex:
        return jnp.complex128 if bits == 64 else jnp.complex64
    return jnp.float64 if bits == 64 else jnp.float32
