"""Comparison of updates with parameters, and prefix trees of parameters."""

from collections.abc import Hashable
from itertools import zip_longest
from typing import Any, NoReturn

import jax
import numpy as np

from .._errors import type_error, value_error
from .._types import Labels, Path, Tree
from ._format import describe, leaf_path, shortened
from ._functions import call_user
from ._values import is_float0, is_traced


def check_params(updates: Tree, params: Tree | None) -> None:
    """Raise if the parameters are missing or do not match the updates."""
    if params is None:
        hint = "Call `update(grads, state, params)`."
        raise value_error("params", "passed to `update`", "None", hint)
    check_same_structure(updates, params)


def check_same_structure(updates: Tree, params: Tree) -> None:
    """Raise an error that describes the first difference in path or shape between two trees.

    A float0 leaf, which is the gradient of an integer, may have any shape.
    """
    missing: Any = (None, None)
    leaves = map(jax.tree.leaves_with_path, (updates, params))
    for (path, x), (other, y) in zip_longest(*leaves, fillvalue=missing):
        if path != other or (np.shape(x) != np.shape(y) and not is_float0(x)):
            _raise_different(_place("updates", path, x), _place("params", other, y))
    if jax.tree.structure(updates) != jax.tree.structure(params):
        _raise_different(shortened(updates), shortened(params))


def _place(argument: str, path: Path | None, leaf: object) -> str:
    """Describe a leaf and its path in an argument; "nothing" if the path is None."""
    return "nothing" if path is None else f"{describe(leaf)} at {leaf_path(argument, path)}"


def _raise_different(got: str, expected: str) -> NoReturn:
    """Raise an error for updates whose structure or shapes differ from those of `params`."""
    rule = "a tree with the structure and shapes of `params`"
    hint = "For a model of Equinox, pass `eqx.filter(model, eqx.is_array)` as `params`."
    raise type_error("updates", rule, f"{got}, expected {expected}", hint)


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
