"""Checks of trees at trace time."""

from collections.abc import Hashable
from itertools import zip_longest
from typing import Any

import jax
import numpy as np

from ._checks import describe, is_float0, leaf_path
from ._errors import type_error
from ._types import Array, Labels, Path, Tree


def check_same_structure(argument: str, tree: Tree, like: str, other: Tree) -> None:
    """Raise an error that describes the first difference in path or shape between two trees.

    A float0 leaf, which is the gradient of an integer, may have any shape.
    """
    leaves = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=False)
    is_alike = jax.tree.structure(tree) == jax.tree.structure(other)
    if not is_alike or any(_has_other_shape(x, y) for x, y in leaves):
        got = _first_difference(argument, tree, like, other)
        hint = f"Pass `{argument}` with the structure of `{like}`."
        raise type_error(argument, f"a tree like `{like}`", got, hint)


def _has_other_shape(leaf: Array, other: Array) -> bool:
    return np.shape(leaf) != np.shape(other) and not is_float0(leaf)


def _first_difference(place: str, tree: Tree, other_place: str, other: Tree) -> str | None:
    """Describe the first difference between two trees, or return None if they are alike."""
    (ours, structure), (theirs, other_structure) = children_of(tree), children_of(other)
    if structure == other_structure == jax.tree.structure(0):
        expected = f"{describe(tree)} at {place}, expected shape {list(np.shape(other))}"
        return expected if _has_other_shape(tree, other) else None
    for (path, x), (other_path, y) in zip_longest(ours, theirs, fillvalue=(None, None)):
        if path is None or other_path is None or path != other_path:
            missing = _first_leaf(other_place, other_path, y)
            return f"{_first_leaf(place, path, x)} where {missing} was expected"
        difference = _first_difference(leaf_path(place, path), x, leaf_path(other_place, path), y)
        if difference:
            return difference
    kinds = f"a {type(tree).__name__} at {place}, expected a {type(other).__name__}"
    return None if structure == other_structure else kinds


def _first_leaf(place: str, path: Path | None, child: Tree) -> str:
    leaves = jax.tree.leaves_with_path(child) or [((), None)]
    return "nothing" if path is None else leaf_path(place, (*path, *leaves[0][0]))


def children_of(node: Tree) -> tuple[list[tuple[Path, Tree]], Any]:
    """Return the children of a pytree node with their paths, and its structure."""
    return jax.tree.flatten_with_path(node, is_leaf=lambda x: x is not node)


def broadcast_prefix(
    argument: str, prefix: Tree, like: str, tree: Tree, is_leaf: Any = None
) -> list[Any]:
    """Broadcast a prefix tree to a list with one entry for each leaf of `tree`."""
    entries, structure = jax.tree.flatten(prefix, is_leaf)
    try:
        subtrees = structure.flatten_up_to(tree)
    except (ValueError, TypeError) as mismatch:
        given = jax.tree.leaves_with_path(prefix, is_leaf=is_leaf)
        leaves = jax.tree.leaves_with_path(tree)
        rule = f"a prefix tree of `{like}`"
        hint = f"Give one entry per leaf or per subtree of `{like}`."
        got = str(mismatch).splitlines()[0]
        for path, _ in reversed(given):
            if not any(place[: len(path)] == path for place, _ in leaves):
                got = f"an entry at {leaf_path(argument, path)}, where `{like}` has no leaf"
        for place, _ in reversed(leaves):
            if not any(place[: len(path)] == path for path, _ in given):
                got = f"no entry for {leaf_path(like, place)}"
        raise type_error(argument, rule, got, hint) from None
    pairs = zip(entries, subtrees, strict=True)
    return [entry for entry, subtree in pairs for _ in jax.tree.leaves(subtree)]


def labels_of(param_labels: Labels, like: str, tree: Tree) -> list[Hashable]:
    """Return the label of each leaf of `tree`."""
    prefix = param_labels(tree) if callable(param_labels) else param_labels
    labels = broadcast_prefix("param_labels", prefix, like, tree)
    for label in labels:
        if not isinstance(label, Hashable):
            hint = "Use strings or integers as labels."
            raise type_error("param_labels", "a tree of hashable labels", describe(label), hint)
    return labels
