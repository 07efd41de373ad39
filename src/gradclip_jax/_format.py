"""Format values, paths and names for error messages and logs."""

from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

import jax
import numpy as np
from jax.core import Tracer

from ._types import Path

_MAX_LISTED: Final = 5  # maximum number of invalid leaves listed in an error message
_MAX_CHARACTERS: Final = 200


def describe(leaf: Any) -> str:
    """Format an array as `dtype[shape]`, and any other leaf as the name of its type."""
    if not hasattr(leaf, "dtype"):
        return type(leaf).__name__
    return f"{leaf.dtype}[{', '.join(map(str, np.shape(leaf)))}]"


def shortened(value: object) -> str:
    """Format a value for an error message, with arrays as `dtype[shape]`."""

    def abstract(leaf: Any) -> object:
        if isinstance(leaf, int) and leaf.bit_length() > _MAX_CHARACTERS:
            # Python cannot print an integer with too many digits.
            return _Unquoted(f"an integer of {leaf.bit_length()} bits")
        is_number = np.ndim(leaf) == 0 and not isinstance(leaf, (Tracer, jax.ShapeDtypeStruct))
        return leaf if is_number else _Unquoted(describe(leaf))

    text = repr(jax.tree.map(abstract, value))
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}..."


class _Unquoted(str):
    """A string whose `repr` has no quotation marks."""

    __repr__ = str.__str__


def listed(items: Iterable[str]) -> str:
    """Join the first items with commas, and count the others."""
    items = list(items)
    rest = len(items) - _MAX_LISTED
    return ", ".join(items[:_MAX_LISTED]) + (f" and {rest} more" if rest > 0 else "")


def leaf_path(argument: str, path: Path) -> str:
    """Format the path of a leaf as a Python expression, such as `params['w']`."""
    return argument + jax.tree_util.keystr(path)


def leaf_name(path: Path, index: Iterable[int] = ()) -> str:
    """Format the path of a leaf, layer or row as its name in logs, such as `decoder/wi[3]`."""
    keys = tuple(key for key in path if str(key) != ".value")  # of a variable of Flax NNX
    name = jax.tree_util.keystr(keys, simple=True, separator="/")
    return name + "".join(f"[{i}]" for i in index)


def distinct(names: Iterable[str]) -> list[str]:
    """Append numbers to repeated names; `{"a/b": x}` and `{"a": {"b": x}}` have the same name."""
    count, out = Counter[str](), list[str]()
    for name in names:
        count[name] += 1
        out.append(name if count[name] == 1 else f"{name} ({count[name]})")
    return out
