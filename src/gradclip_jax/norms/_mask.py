"""Masks that exclude frozen leaves from guards and `watch`."""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._checks import call_user, is_float0
from .._errors import type_error
from .._format import describe, leaf_path
from .._types import Array, Tree
from ._prefix import broadcast_prefix

Mask: TypeAlias = Tree | Callable[[Tree], Tree] | None
"""A prefix tree of bools, a function `params -> bools`, or None to include all leaves."""


def check_mask(mask: Mask) -> None:
    """Raise if a mask contains anything but bools; the result of a function is checked later."""
    for path, value in [] if callable(mask) else jax.tree.leaves_with_path(mask):
        if not isinstance(value, (bool, np.bool_)):
            hint = "Pass True for each leaf or subtree to include, else False."
            got = f"{describe(value)} at {leaf_path('trainable', path)}"
            raise type_error("trainable", "a prefix tree of bools or a function", got, hint)


def broadcast_mask(mask: Mask, grads: Tree, params: Tree) -> Tree:
    """Return a tree of bools with the structure of a gradient: whether each leaf is included."""
    if callable(mask):
        mask = call_user("trainable", "trainable", mask, grads if params is None else params)
        check_mask(mask)
    is_included = broadcast_prefix("trainable", True if mask is None else mask, "updates", grads)
    return jax.tree.unflatten(jax.tree.structure(grads), is_included)


def zero_excluded(mask: Mask, grads: Tree, params: Tree) -> Tree:
    """Set all leaves that the mask excludes to zero."""
    if mask is None:
        return grads

    def value(leaf: Array, is_included: bool) -> Array:
        return leaf if is_included or is_float0(leaf) else jnp.zeros_like(leaf)

    return jax.tree.map(value, grads, broadcast_mask(mask, grads, params))


def mask_leaves(mask: Mask, tree: Tree, params: Tree) -> Tree:
    """Replace empty leaves and leaves outside the mask by `optax.MaskedNode()`."""
    if not jax.tree.leaves(tree):  # a placeholder of `optax.tree.map_params`
        return tree

    def kept(leaf: Array, is_included: bool) -> Tree:
        return leaf if is_included and np.size(leaf) else optax.MaskedNode()

    return jax.tree.map(kept, tree, broadcast_mask(mask, tree, params))


def included_places(tree: Tree, masked: Tree) -> list[int]:
    """Return the indices of the leaves of a tree that `mask_leaves` did not replace."""

    def is_included(_: object, leaf: Tree) -> bool:
        return not isinstance(leaf, optax.MaskedNode)

    flags = jax.tree.leaves(jax.tree.map(is_included, tree, masked))
    return [i for i, is_kept in enumerate(flags) if is_kept]
