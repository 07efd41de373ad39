"""The gradient noise scale, an estimate of the largest useful batch size."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .._errors import public, type_error, value_error
from .._format import shortened
from .._types import HostArray


@public
def noise_scale(
    small: ArrayLike, big: ArrayLike, small_batch: ArrayLike, big_batch: ArrayLike
) -> float:
    """Estimate the gradient noise scale from squared gradient norms at two batch sizes.

    The noise scale is the batch size at which noise and signal are equal. It is the ratio of

        tr(Sigma) ~ mean((small - big) / (1/small_batch - 1/big_batch))
        |G|^2 ~ mean((big_batch * big - small_batch * small) / (big_batch - small_batch))

    Both estimates are unbiased but noisy, so average them over many steps: pass arrays with the
    values of all logged steps. Gradient accumulation provides both: the gradient norms of the
    micro-batches, and the norm of the mean gradient. `per_example.norms` provides the norms for a
    `small_batch` of 1.

    | case | scale |
    | --- | --- |
    | a step whose norms are not finite | the step is ignored |
    | no noise: `small` equals `big` | 0 |
    | the estimated squared signal is not positive | infinity; average over more steps |
    | no step with finite norms | NaN |

    Args:
        small: For each step, the squared gradient norm of a small batch, or the mean of several
            such squared norms.
        big: For each step, the squared gradient norm of a big batch at the same parameters.
        small_batch: Number of examples or tokens in a small batch; a number, or one for each step.
        big_batch: Number of examples or tokens in a big batch; larger than `small_batch`.

    Returns:
        The noise scale in the unit of the batch sizes.

    Raises:
        ValueError: If a big batch is not larger than its small batch.

    Examples:
        >>> import gradclip_jax as gcx
        >>> small, big = [3.0, 5.0], [1.5, 2.5]  # squared norms in two steps
        >>> gcx.diagnostics.noise_scale(small, big, small_batch=8, big_batch=32)
        16.0

    References:
        McCandlish et al. 2018, arXiv 1812.06162, appendix A.1.
    """
    columns = {"small": small, "big": big, "small_batch": small_batch, "big_batch": big_batch}
    arrays = [_as_numbers(name, x) for name, x in columns.items()]
    if len({x.size for x in arrays if x.ndim}) > 1:
        rule, got = "arrays of equal length, one number for each step", shortened(columns)
        names = ", ".join(f"`{name}`" for name in columns)
        raise value_error(names.strip("`"), rule, got, "Pass one norm for each step.")
    s, b, n, m = np.broadcast_arrays(*arrays)
    if not np.all((n > 0) & (n < m) & np.isfinite(m)):
        hint = "Pass the number of examples or tokens in each batch."
        raise value_error(
            "small_batch", "> 0 and < `big_batch`, both finite", shortened(small_batch), hint
        )
    is_finite = np.isfinite(s) & np.isfinite(b)
    if not is_finite.any():
        return float("nan")
    s, b, n, m = s[is_finite], b[is_finite], n[is_finite], m[is_finite]
    trace = np.mean((s - b) / (1 / n - 1 / m))
    signal = np.mean((m * b - n * s) / (m - n))
    return max(float(trace / signal), 0.0) if signal > 0 else float("inf")


def _as_numbers(argument: str, value: ArrayLike) -> HostArray:
    """Return a number, or one number for each step, as float64."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        array = np.asarray(jax.device_get(value))
        is_real = jnp.issubdtype(array.dtype, jnp.floating) or np.issubdtype(
            array.dtype, np.integer
        )
        if array.size and array.ndim <= 1 and is_real and not np.any(array < 0):
            return array.astype(np.float64)
    rule = "a number >= 0, or one for each step"
    raise type_error(argument, rule, shortened(value), "Pass numbers from the log of a run.")
