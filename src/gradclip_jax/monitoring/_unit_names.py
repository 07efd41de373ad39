"""Names of units: each leaf has its path, and each stacked layer a path with an index."""

import os
from collections.abc import Sequence

import jax
import numpy as np

from .._leaves import is_measured
from .._types import Tree
from ..clipping._norm import Units


def name_units(units: Units, tree: Tree) -> list[str]:
    """Return one name for each norm, or an empty list for the global norm.

    The index of a stacked layer follows the common path prefix of all stacked leaves, as in
    `decoder/layers_3/mlp/wi`. Without a common prefix, the index is at the end of the name. It is
    also at the end if the prefix is followed by the index of a list, and for rows or columns.
    """
    if units.axes is None:
        return list(map(str, units.names))
    entries = [x for x in jax.tree_util.tree_leaves_with_path(tree) if is_measured(x[1])]
    # Variables of Flax NNX store their array in an attribute.
    end = -1 if all(len(path) > 1 and str(path[-1]) == ".value" for path, _ in entries) else None
    shapes = [
        tuple(n for axis, n in enumerate(np.shape(x)) if axis not in axes)
        for (_, x), axes in zip(entries, units.axes, strict=True)
    ]
    names: list[str] = []
    for is_simple in (True, False):  # keys that contain a slash may collide, and are then quoted
        paths = [
            tuple(jax.tree_util.keystr((key,), simple=is_simple) for key in path[:end])
            for path, _ in entries
        ]
        names = _names_of(paths, shapes, has_prefix=not units.is_local)
        if len({*names}) == len(names):
            break
    return names


def _names_of(
    paths: Sequence[tuple[str, ...]], shapes: Sequence[tuple[int, ...]], *, has_prefix: bool
) -> list[str]:
    """Return one name for each index of each leaf."""
    stacked = [path for path, shape in zip(paths, shapes, strict=True) if shape]
    shared = len(os.path.commonprefix(stacked)) if has_prefix else 0
    if any(path[shared : shared + 1] and path[shared].isdigit() for path in stacked):
        shared = 0
    names: list[str] = []
    for path, shape in zip(paths, shapes, strict=True):
        at = shared if shape and shared else len(path)
        for index in np.ndindex(*shape):
            stack = "_".join(["/".join(path[:at]) or "array", *map(str, index)])
            names.append("/".join([stack, *path[at:]]))
    return names
