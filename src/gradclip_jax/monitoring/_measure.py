"""Host-side questions: which leaves are not finite, and which max_norm to choose."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import check_number, dtype_of, error_message, is_float0, refuse_traced, shortened
from .._types import Tree


def nonfinite_leaves(tree: Tree) -> dict[str, int]:
    """Counts the NaN and infinite elements of each leaf that has any.

    Call it outside jit when `guard_failed` becomes True, on gradients, parameters or a whole
    optimizer state. It waits for the values.

    Args:
        tree: any pytree of arrays; integer leaves are finite.

    Returns:
        Path to number of bad elements, the largest number first; empty if all are finite.

    Raises:
        TypeError: called inside jit.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> gcx.diagnostics.nonfinite_leaves(
        ...     {"w": jnp.array([1.0, jnp.nan, jnp.inf]), "b": jnp.zeros(3)}
        ... )
        {"['w']": 2}
    """
    counts: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        refuse_traced("nonfinite_leaves", "tree", leaf)
        if not is_float0(leaf) and jnp.issubdtype(dtype_of(leaf), jnp.inexact):
            bad = int(jnp.sum(~jnp.isfinite(leaf)))
            if bad:
                counts[jax.tree_util.keystr(path)] = bad
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def suggest_max_norm(norms: Any, percentile: float = 50.0) -> float:
    """Suggests a `max_norm`: a percentile of recorded norms.

    The median is the best compromise of five percentiles over the problems of docs/study.md. It
    shortens every second step, so try a larger learning rate with it. 90 touches outliers only.

    Args:
        norms: norms of any shape, such as `norm_history(state)`, in the unit of the gradients,
            also those of several seeds; NaN and infinite ones are ignored.
        percentile: the percentage of steps, 0 to 100, that should not be clipped.

    Returns:
        That percentile of the finite norms.

    Raises:
        ValueError: no norm is finite, or `percentile` is outside [0, 100].
        TypeError: `norms` are no real numbers, or traced: call it outside jit.

    Examples:
        >>> import gradclip_jax as gcx
        >>> gcx.diagnostics.suggest_max_norm([1.0, 2.0, 3.0, float("nan")], percentile=100.0)
        3.0
    """
    name = "suggest_max_norm"
    refuse_traced(name, "norms", norms)
    hint = "50 is the median."
    check_number(name, "percentile", percentile, hint, high=100.0, closed=True)
    try:
        values = np.asarray(norms, np.float64)
    except (TypeError, ValueError):
        rule, hint = "an array of real numbers", "Pass for example `norm_history(state)`."
        raise TypeError(error_message(name, "norms", rule, shortened(norms), hint)) from None
    finite = values[np.isfinite(values)]
    if not finite.size:
        hint = "Record some steps with `record_norms` first."
        got = f"{values.size} of which none is finite"
        raise ValueError(error_message(name, "norms", "finite norms", got, hint))
    return float(np.percentile(finite, percentile))
