"""Names of units: each leaf has its path, and each stacked layer a path with an index."""

import os
from collections.abc import Sequence

import jax
import numpy as np

from .._leaves import is_measured
from .._types import Array, Tree
from ..clipping._norm import Units


def name_units(units: Units, tree: Tree) -> list[str]:
    """Return one name for each norm, or an empty list for the global norm.

    The index of a stacked layer follows the common path prefix of all stacked leaves, as in
    `decoder/layers_3/mlp/wi`. Without a common prefix, the index is at the end of the name. It is
    also at the end if the prefix is followed by the index of a list, and for rows or columns.
    """
    if units.axes is None:
        return list(map(str, units.names))
    paths = _measured_paths(tree)
    shapes = [
        tuple(n for axis, n in enumerate(np.shape(x)) if axis not in (axes or ()))
        for (_, x), axes in zip(paths, units.axes, strict=True)
    ]
    stacked = [path for (path, _), shape in zip(paths, shapes, strict=True) if shape]
    shared = 0 if units.is_local else len(os.path.commonprefix(stacked))
    if any(path[shared : shared + 1] and path[shared].isdigit() for path in stacked):
        shared = 0
    entries: list[tuple[tuple[str | None, ...], tuple[int, ...]]] = []
    for (path, _), shape in zip(paths, shapes, strict=True):
        at = shared or len(path)
        for index in np.ndindex(*shape):
            entries.append(((*path[:at], None, *path[at:]) if shape else path, index))
    return _distinct(entries)


def _distinct(entries: Sequence[tuple[tuple[str | None, ...], tuple[int, ...]]]) -> list[str]:
    """Return names for paths, with an index inserted where the path contains None.

    Keys of Haiku contain slashes and remain readable. If two names collide, keys are escaped as in
    a JSON Pointer, where `a~1b` represents the key `a/b`. The only key "" becomes `~3`.
    """

    def name_of(path: Sequence[str | None], index: Sequence[int], *escapes: tuple[str, str]) -> str:
        parts: list[str] = []
        for key in path:
            if key is None:
                suffix = "".join(f"_{i}" for i in index)
                parts[-1:] = [(parts[-1] if parts else "array") + suffix]
                continue
            for old, new in escapes:
                key = key.replace(old, new)
            parts.append(key)
        return "/".join(parts) if path else "array"

    names = [name_of(*entry) for entry in entries]
    if len({*names}) == len(names) and all(names):
        return names
    escapes = ("~", "~0"), ("/", "~1"), ("_", "~2")
    return [name_of(*entry, *escapes) or "~3" for entry in entries]


def _measured_paths(tree: Tree) -> Sequence[tuple[tuple[str, ...], Array]]:
    entries = [(path, x) for path, x in jax.tree_util.tree_leaves_with_path(tree) if is_measured(x)]
    # Variables of Flax NNX store their array in an attribute.
    if all(len(path) > 1 and str(path[-1]) == ".value" for path, _ in entries):
        entries = [(path[:-1], x) for path, x in entries]
    return [
        (tuple(jax.tree_util.keystr((key,), simple=True) for key in path), x) for path, x in entries
    ]
