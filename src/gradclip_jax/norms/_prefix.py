"""Prefix trees, which have one entry for each leaf or subtree of another tree."""

from collections.abc import Hashable
from typing import Any

import jax

from .._checks import call_user, is_traced
from .._errors import type_error
from .._format import shortened
from .._types import Labels, Tree


def broadcast_prefix(
    argument: str, prefix: Tree, like: str, tree: Tree, is_leaf: Any = None
) -> list[Any]:
    """Broadcast a prefix tree to a list with one entry for each leaf of `tree`.

    A tree without leaves, like the placeholder of `optax.tree.map_params`, may have any prefix.
    """
    if not jax.tree.leaves(tree):
        return []
    entries, structure = jax.tree.flatten(prefix, is_leaf)
    indices = structure.unflatten(range(len(entries)))  # an entry may be None or a tree
    try:
        return [entries[i] for i in jax.tree.leaves(jax.tree.broadcast(indices, tree))]
    except ValueError as error:  # it describes the first difference
        rule, kind = f"a prefix tree of `{like}`", type(tree).__name__
        hint = f"Give one entry per leaf or subtree of `{like}`, which is a `{kind}`."
        raise type_error(argument, rule, shortened(prefix), hint) from error


def labels_of(param_labels: Labels, like: str, tree: Tree) -> list[Hashable]:
    """Return the label of each leaf of `tree`."""
    labels: Any = param_labels
    if callable(labels):
        labels = call_user("param_labels", "param_labels", labels, tree)
    found = broadcast_prefix("param_labels", labels, like, tree)
    for label in found:
        if not isinstance(label, Hashable) or is_traced(label):
            hint = "Pass for example strings."
            raise type_error("param_labels", "a tree of hashable labels", shortened(label), hint)
    return found
