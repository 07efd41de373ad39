"""Types of single values: scalars, arrays and tracers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer


def dtype_of(leaf: Any) -> np.dtype:
    """Return the dtype of an array or a Python number, or `object` for other values."""
    if hasattr(leaf, "dtype"):
        return leaf.dtype
    # `jnp.result_type` would raise for other objects.
    return np.dtype(type(leaf) if isinstance(leaf, (bool, int, float, complex)) else object)


def is_array_like(value: object) -> bool:
    """Return whether a value is an array or a number, which jit can trace."""
    return isinstance(value, (bool, int, float, complex, np.generic, np.ndarray, jax.Array))


def is_scalar(value: Any, *kinds: type) -> bool:
    """Return whether a value is a Python, NumPy or JAX scalar with a dtype in `kinds`."""
    if not is_array_like(value) or np.ndim(value):
        return False
    dtype = dtype_of(value)  # bfloat16 scalars are not instances of `np.number`
    return any([jnp.issubdtype(dtype, kind) for kind in kinds])


def is_float0(leaf: object) -> bool:
    """Return whether a leaf has dtype float0, the dtype of gradients of integers."""
    return getattr(leaf, "dtype", None) == jax.dtypes.float0


def is_traced(value: object) -> bool:
    """Return whether a value is a tracer of JAX."""
    return isinstance(value, Tracer)
