"""How a gradient is rid of the loss scale."""

from typing import Any

import jax.numpy as jnp

from .._checks import is_float0
from .._types import Scalar
from ..clipping._scale import wide_dtype
from ._detect import is_bad


def unscaled(x: Any, scale: Scalar) -> Any:
    """`x / scale` in at least float32; NaN for what is not finite in a narrower dtype.

    XLA leaves out a rounding to float16 whose result is widened again, in one kernel and not in
    another: the verdict would then be about another number than the step is taken on.
    """
    if is_float0(x):
        return x
    x = jnp.asarray(x)
    dtype = wide_dtype(x.dtype)
    quotient = x.astype(dtype) / scale.astype(jnp.finfo(dtype).dtype)
    return quotient if dtype == x.dtype else jnp.where(is_bad(x), jnp.nan, quotient)
