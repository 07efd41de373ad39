"""Types of arguments and results, with shapes and units."""

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import jax
import numpy as np

Array: TypeAlias = jax.Array
"""An array or a tracer."""

Scalar: TypeAlias = jax.Array
"""An array of shape ()."""

Tree: TypeAlias = Any
"""A pytree of arrays; `None` and `optax.MaskedNode` are nodes without leaves."""

Number: TypeAlias = float | np.number[Any] | np.ndarray[Any, Any] | jax.Array
"""A Python number, NumPy scalar, or array of shape (), traced or not."""

Order: TypeAlias = float | np.floating[Any]
"""The order p of a p-norm, static."""

Count: TypeAlias = int | np.integer[Any]
"""A static whole number."""

Schedule: TypeAlias = Callable[[Any], Any]
"""Step count, int32[], to a value of shape ()."""

AxisName: TypeAlias = str | tuple[str, ...] | None
"""Mapped axes (`pmap`, `vmap`, `shard_map`) over which a tree is sharded."""

Threshold: TypeAlias = Any
"""A number > 0, a traced scalar, a schedule, a rule from `gcx.thresholds`, or a tree of those."""

Labels: TypeAlias = Any
"""A prefix tree of group labels, or a function `params -> labels`."""

UNBOUNDED: Final = float(np.finfo(np.float32).max)
"""No threshold yet. Not infinity, which `jax_debug_infs` would take for a fault."""


FLOAT32: Final = np.dtype("float32")  # `jnp.float32` is callable, like a schedule
