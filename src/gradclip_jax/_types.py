"""Types of arguments and results."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any, Final, TypeAlias

import jax
import numpy as np

Array: TypeAlias = jax.Array
"""An array or a tracer."""

HostArray: TypeAlias = np.ndarray
"""A NumPy array. Importing `numpy.typing` would load more modules."""

Scalar: TypeAlias = jax.Array
"""An array of shape ()."""

Tree: TypeAlias = Any
"""A pytree of arrays; `None` and `optax.MaskedNode` are nodes without leaves."""

Number: TypeAlias = float | np.number | np.ndarray | jax.Array
"""A Python number, NumPy scalar, or array of shape (), traced or not."""

Order: TypeAlias = float | np.floating
"""The static order of a norm: 1, 2 or infinity."""

Count: TypeAlias = int | np.integer
"""A static integer."""

Schedule: TypeAlias = Callable[[Array], jax.typing.ArrayLike]
"""A function from the step count, int32[], to a value of shape ()."""

Path: TypeAlias = tuple[Hashable, ...]
"""The keys of a node in a pytree."""

AxisName: TypeAlias = str | tuple[str, ...] | None
"""Mapped axes (`pmap`, `vmap`, `shard_map`) over which a tree is sharded."""

Labels: TypeAlias = Hashable | Mapping[Any, Tree] | list[Tree]
"""A prefix tree of group labels, or a function `params -> labels`."""

UNBOUNDED: Final = float(np.finfo(np.float32).max)
"""A finite value for missing thresholds, because `jax_debug_infs` raises for infinities."""


FLOAT32: Final = np.dtype("float32")  # `jnp.float32` is callable and looks like a function
