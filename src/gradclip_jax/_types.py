"""Types of arguments and results."""

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final, TypeAlias, TypeVar

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


_Class = TypeVar("_Class", bound=type)


def as_pytree(cls: _Class) -> _Class:
    """Register a dataclass of functions and options as a pytree whose leaves are its fields.

    Optimistix treats a transformation as a pytree. Because functions are leaves, an array that a
    function contains, such as a learning rate, can be replaced without retracing. JAX also creates
    instances with placeholders as leaves, so `unflatten` does not call `__post_init__`.
    """
    names = [field.name for field in dataclasses.fields(cls)]

    def unflatten(_: object, values: Sequence[Any]) -> Any:
        node = object.__new__(cls)
        vars(node).update(zip(names, values, strict=True))
        return node

    def flatten(node: Any) -> tuple[list[Any], None]:
        return [getattr(node, name) for name in names], None

    jax.tree_util.register_pytree_node(cls, flatten, unflatten)
    return cls


FLOAT32: Final = np.dtype("float32")  # `jnp.float32` is callable and looks like a function
