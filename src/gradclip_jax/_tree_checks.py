"""Checks of trees, made when they are traced; worded as in `_checks.py`."""

from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._checks import check_no_state, describe, dtype_of, error_message, is_float0, leaf_path, listed
from ._mesh import sharding_with, unreduced_axes
from ._types import Tree


def check_inexact(
    function: str, argument: str, tree: Tree, *, real: bool = False, unreduced: bool = False
) -> None:
    """Refuses leaves not floating, complex (unless `real`) or float0, or unreduced ones."""
    if argument == "updates":
        check_no_state(function, tree)
    kind, rule = (jnp.floating, "floating") if real else (jnp.inexact, "floating or complex")
    bad = [
        f"{describe(leaf)} at {leaf_path(argument, path)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if not is_float0(leaf) and not jnp.issubdtype(dtype_of(leaf), kind)
    ]
    if bad:
        raise TypeError(
            f"{function}: every leaf of `{argument}` must be {rule}, got {listed(bad)}. "
            "Leave such leaves out with `optax.masked`."
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        axes = () if unreduced or is_float0(leaf) else sorted(unreduced_axes(leaf))
        if axes:
            got = f"a leaf that is unreduced over {', '.join(map(repr, axes))}"
            got += f" at {leaf_path(argument, path)}"
            spec = sharding_with(leaf).spec
            hint = (
                f"Sum it over devices first, `jax.sharding.reshard(leaf, {spec})`, or do this "
                "inside `accumulate_gradients`, which sums once a window."
            )
            raise TypeError(error_message(function, argument, "reduced", got, hint))


def check_same_structure(function: str, argument: str, tree: Tree, like: str, other: Tree) -> None:
    """Refuses two trees whose paths or shapes differ, and names the first that does.

    The gradient of an integer, float0, carries nothing and may have any shape.
    """
    ours = jax.tree_util.tree_leaves_with_path(tree)
    theirs = jax.tree_util.tree_leaves_with_path(other)
    hint = f"Pass `{argument}` with the structure of `{like}`."
    rule = f"a tree like `{like}`"
    missing: Any = (None, None)
    for (path, leaf), (other_path, other_leaf) in zip_longest(ours, theirs, fillvalue=missing):
        if path != other_path:
            place = "nothing" if path is None else leaf_path(argument, path)
            other_place = "nothing" if other_path is None else leaf_path(like, other_path)
            got = f"{place} where {other_place} was expected"
            raise TypeError(error_message(function, argument, rule, got, hint))
        if np.shape(leaf) != np.shape(other_leaf) and not is_float0(leaf):
            got = f"{describe(leaf)} at {leaf_path(argument, path)}"
            got += f", expected shape {list(np.shape(other_leaf))}"
            raise TypeError(error_message(function, argument, rule, got, hint))
    if jax.tree.structure(tree) != jax.tree.structure(other):
        path, node, other_node = _first_other_container(tree, other)
        got = f"a {type(node).__name__} at {leaf_path(argument, path)}"
        got += f", expected a {type(other_node).__name__}"
        raise TypeError(error_message(function, argument, rule, got, hint))


def _first_other_container(tree: Tree, other: Tree) -> tuple[Any, Any, Any]:
    """The path to the first nodes of two trees that hold their children otherwise, and both."""

    def children(node: Tree) -> list[tuple[Any, Any]]:
        return jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda x: x is not node)

    path: tuple[Any, ...] = ()
    while True:
        pairs = list(zip(children(tree), children(other), strict=False))
        deeper = [p for p in pairs if jax.tree.structure(p[0][1]) != jax.tree.structure(p[1][1])]
        if type(tree) is not type(other) or not deeper:
            return path, tree, other
        (key, tree), (_, other) = deeper[0]
        path = (*path, *key)


def broadcast_prefix(
    function: str, argument: str, prefix: Tree, like: str, tree: Tree, is_leaf: Any = None
) -> list[Any]:
    """One entry of `prefix` for each leaf of `tree`, in the order of its leaves."""
    entries: list[Any] = []

    def spread(entry: Any, subtree: Any) -> None:
        entries.extend([entry] * len(jax.tree.leaves(subtree)))

    try:
        jax.tree.map(spread, prefix, tree, is_leaf=is_leaf)
    except (ValueError, TypeError) as mismatch:
        given = jax.tree_util.tree_leaves_with_path(prefix, is_leaf=is_leaf)
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        rule = f"a prefix tree of `{like}`"
        hint = f"Give one entry per leaf or per subtree of `{like}`."
        got = str(mismatch).splitlines()[0]
        for path, _ in reversed(given):
            if not any(place[: len(path)] == path for place, _ in leaves):
                got = f"an entry at {leaf_path(argument, path)}, where `{like}` has no leaf"
        for place, _ in reversed(leaves):
            if not any(place[: len(path)] == path for path, _ in given):
                got = f"no entry for {leaf_path(like, place)}"
        raise TypeError(error_message(function, argument, rule, got, hint)) from None
    return entries
