"""Readable names of units: of a leaf its path, of a stacked layer the path with its index."""

import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from .._types import Tree
from ..clipping._granularity import Units, is_measured


def leaf_names(tree: Tree) -> list[str]:
    """The paths of the measured leaves, as `decoder/mlp/wi`."""
    return ["/".join(path) or "array" for path, _ in _measured_paths(tree)]


def name_units(units: Units, tree: Tree) -> list[str]:
    """A name for each norm; none for the norm of the whole tree.

    Layers that are stacked get their index after the part of the path that all stacked leaves
    have in common: `decoder/layers_3/mlp/wi`. Where they have none, and for rows and columns, it is
    at the end.
    """
    if not units.by_leaf:
        return list(map(str, units.names))
    paths = _measured_paths(tree)
    shapes = [
        tuple(n for axis, n in enumerate(np.shape(x)) if axis not in (axes or ()))
        for (_, x), axes in zip(paths, units.axes, strict=True)
    ]
    stacked = [path for (path, _), shape in zip(paths, shapes, strict=True) if shape]
    shared = 0 if units.is_local else len(os.path.commonprefix(stacked))
    names: list[str] = []
    for (path, _), shape in zip(paths, shapes, strict=True):
        at = shared or len(path)
        for index in np.ndindex(*shape):
            suffix = "".join(f"_{i}" for i in index)
            head, tail = "/".join(path[:at]) or "array", path[at:]
            names.append("/".join((head + suffix, *tail)))
    return names


def _measured_paths(tree: Tree) -> Sequence[tuple[tuple[str, ...], Any]]:
    entries = jax.tree_util.tree_leaves_with_path(tree)
    return [
        (tuple(jax.tree_util.keystr((key,), simple=True) for key in path), x)
        for path, x in entries
        if is_measured(x)
    ]
