"""Types of arguments and results."""

from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias, Union

import jax
import numpy as np

if TYPE_CHECKING:
    from .clipping._threshold import Rule

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
"""A static integer."""

Schedule: TypeAlias = Callable[[Any], Any]
"""A function from the step count, int32[], to a value of shape ()."""

AxisName: TypeAlias = str | tuple[str, ...] | None
"""Mapped axes (`pmap`, `vmap`, `shard_map`) over which a tree is sharded."""

Threshold: TypeAlias = Union[  # `|` does not support a forward reference
    Number, Schedule, "Rule", Mapping[Any, Any], list[Any], tuple[Any, ...]
]
"""A number > 0, a traced scalar, a schedule, a rule from `gcx.thresholds`, or a tree of those."""

Labels: TypeAlias = Hashable | Mapping[Any, Any] | list[Any]
"""A prefix tree of group labels, or a function `params -> labels`."""

UNBOUNDED: Final = float(np.finfo(np.float32).max)
"""The value of a missing threshold; finite, because `jax_debug_infs` raises for infinities."""


FLOAT32: Final = np.dtype("float32")  # `jnp.float32` is callable and looks like a function
