"""Looks at trees and norms on the host: which leaves are bad, and what max_norm to set."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import check_number, error_message, is_float0, is_traced
from .._types import Tree


def nonfinite_leaves(tree: Tree) -> dict[str, int]:
    """Tells which leaves hold NaN or infinities, and how many.

    For the moment after `guard_failed`: call it on gradients, parameters or a whole optimizer
    state. On the host only; it waits for the values.

    Args:
        tree: any pytree of arrays; integer leaves are finite.

    Returns:
        Path to count of bad elements, for bad leaves only, the worst first.

    Raises:
        TypeError: called inside jit.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> gcx.nonfinite_leaves({"w": jnp.array([1.0, jnp.nan, jnp.inf]), "b": jnp.zeros(3)})
        {"['w']": 2}
    """
    counts: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        refuse_traced("nonfinite_leaves", "tree", leaf)
        if not is_float0(leaf) and jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            bad = int(jnp.sum(~jnp.isfinite(leaf)))
            if bad:
                counts[jax.tree_util.keystr(path)] = bad
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def suggest_max_norm(norms: Any, percentile: float = 90.0) -> float:
    """Answers "what should I set max_norm to?" from recorded norms.

    Args:
        norms: norms of any shape, for example `norm_history(state)`, in the unit of the
            gradients; those that are not finite are left out.
        percentile: the share of steps, 0 to 100, that should not be clipped.

    Returns:
        That percentile of the norms.

    Raises:
        ValueError: no norm is finite, or `percentile` is outside [0, 100].
        TypeError: called inside jit.

    Examples:
        >>> import gradclip_jax as gcx
        >>> gcx.suggest_max_norm([1.0, 2.0, 3.0, float("nan")], percentile=50.0)
        2.0
    """
    name = "suggest_max_norm"
    refuse_traced(name, "norms", norms)
    hint = "90 leaves nine steps of ten alone."
    check_number(name, "percentile", percentile, hint, high=100.0, closed=True)
    values = np.asarray(norms, np.float64)
    finite = values[np.isfinite(values)]
    if not finite.size:
        hint = "Record some steps with `record_norms` first."
        got = f"{values.size} of which none is finite"
        raise ValueError(error_message(name, "norms", "finite norms", got, hint))
    return float(np.percentile(finite, percentile))


def refuse_traced(function: str, argument: str, value: Any) -> None:
    """Refuses a tracer where a value on the host is needed."""
    if is_traced(value):
        hint = "Call it outside jit, on what the step returned."
        raise TypeError(error_message(function, argument, "known on the host", "a tracer", hint))
