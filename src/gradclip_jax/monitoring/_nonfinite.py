"""Count non-finite elements on the host."""

import jax
import jax.numpy as jnp

from .._checks import dtype_of, is_float0
from .._errors import public
from .._types import Tree


@public
def nonfinite_leaves(tree: Tree, *, include_finite: bool = False) -> dict[str, int]:
    """Count the non-finite elements of each leaf.

    When `guard_failed` becomes 1, call this function outside jit on gradients, parameters,
    activations or a whole optimizer state. The call blocks until the values are computed.

    Args:
        tree: Any pytree of arrays. Integer leaves are finite.
        include_finite: Whether to list all leaves in the order of the tree, with a count of 0 for
            finite leaves, to show the layer where NaN first appears.

    Returns:
        Dictionary from paths to the number of non-finite elements, in descending order; empty if
        all elements are finite.

    Raises:
        TypeError: If called inside jit.


    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> tree = {"a": jnp.zeros(3), "b": jnp.array([1.0, jnp.nan, jnp.inf])}
        >>> gcx.diagnostics.nonfinite_leaves(tree)
        {"['b']": 2}
        >>> gcx.diagnostics.nonfinite_leaves(tree, include_finite=True)
        {"['a']": 0, "['b']": 2}
    """
    counts: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not is_float0(leaf) and jnp.issubdtype(dtype_of(leaf), jnp.inexact):
            counts[jax.tree_util.keystr(path)] = int(jnp.sum(~jnp.isfinite(leaf)))
    if include_finite:
        return counts
    bad = {path: count for path, count in counts.items() if count}
    return dict(sorted(bad.items(), key=lambda item: -item[1]))
