"""What per-example norms say: the gradient noise scale, and the sensitivity of a clipped sum."""

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from .._checks import check_choice, check_number, describe, error_message
from .._types import Array, Number, Scalar, Tree
from ..accumulation._noise import empty_noise
from ..clipping._norm import global_norm


def noise_scale_from_norms(norms: Array, mean_grads: Tree) -> Scalar:
    """Estimates the gradient noise scale from one batch, instead of over windows.

    With B examples, S the mean of their squared norms and M the squared norm of their mean,

        tr(Sigma) ~ (S - M) B / (B - 1),    |G|^2 ~ M - tr(Sigma) / B,    scale = tr(Sigma) / |G|^2

    The same estimators as `accumulate_gradients(..., noise_scale_decay=)` uses for micro-batches,
    at the finest grain: average over steps with less noise, or use both and compare.

    | case | scale |
    | --- | --- |
    | all examples alike | 0 |
    | no signal stands out of the noise | inf |
    | one example | NaN: it shows no noise |

    Args:
        norms: of each example's gradient, unclipped, [B], B >= 2.
        mean_grads: the mean of the same gradients, unclipped.

    Returns:
        The batch size at which noise and signal are equal, in examples, float32[].

    Raises:
        ValueError: `norms` is no vector.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> grads = jnp.array([[1.0, 1.0], [1.0, -1.0], [1.0, 1.0], [1.0, -1.0]])
        >>> norms = jnp.linalg.norm(grads, axis=1)
        >>> float(gcx.noise_scale_from_norms(norms, grads.mean(0)))
        2.0

    References:
        McCandlish et al. 2018, arXiv 1812.06162, appendix A.
    """
    norms = jnp.asarray(norms)
    if norms.ndim != 1:
        rule, hint = "a vector with one norm per example", "Pass those of `per_example_norms`."
        raise ValueError(
            error_message("noise_scale_from_norms", "norms", rule, describe(norms), hint)
        )
    size = norms.shape[0]
    if size < 2:
        return jnp.float32(jnp.nan)
    big = jnp.square(global_norm(mean_grads).astype(jnp.float32))
    small = jnp.mean(jnp.square(norms.astype(jnp.float32)))
    trace = (small - big) * (size / (size - 1))
    state = empty_noise()._replace(squared_gradient=big - trace / size, covariance_trace=trace)
    return state.gradient_noise_scale


def clipped_sum_sensitivity(max_norm: Any, adjacency: str = "add_or_remove_one") -> float:
    """How far one example can move the sum of clipped gradients, in 2-norm.

    | adjacency | two data sets differ in | sensitivity |
    | --- | --- | --- |
    | "add_or_remove_one" | one example more or less | `max_norm` |
    | "replace_one" | one example exchanged for another | `2 max_norm` |

    Groups clipped to thresholds of their own count as `sqrt(sum of max_norm^2)`. Weights, if any,
    must be 0 or 1; a `reaction` of your own must not let a norm exceed the threshold.

    Args:
        max_norm: the threshold, or a mapping from label to threshold.
        adjacency: "add_or_remove_one" or "replace_one".

    Returns:
        The sensitivity, in the unit of the gradient of one example.

    Raises:
        ValueError: a threshold is not > 0, or the adjacency is unknown.

    Examples:
        >>> import gradclip_jax as gcx
        >>> gcx.clipped_sum_sensitivity({"head": 3.0, "body": 4.0}, "replace_one")
        10.0
    """
    name = "clipped_sum_sensitivity"
    check_choice(name, "adjacency", adjacency, ("add_or_remove_one", "replace_one"))
    thresholds: list[Number] = (
        list(max_norm.values()) if isinstance(max_norm, Mapping) else [max_norm]
    )
    for threshold in thresholds:
        check_number(
            name, "max_norm", threshold, "Pass the threshold that examples are clipped to."
        )
    alone = math.hypot(*map(float, thresholds))
    return alone if adjacency == "add_or_remove_one" else 2 * alone
