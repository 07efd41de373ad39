"""Mesh axes of array types, and the collectives that depend on them.

Inside `shard_map`, the gradient with respect to a parameter that varies over devices remains local
to each device. With explicit axes, the gradient with respect to a parameter with reduced axes is
*unreduced*, which means that each device stores a partial sum. Local and unreduced gradients are
all-reduced once, at the end of an accumulation window or a batch.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.sharding import AxisType, NamedSharding, PartitionSpec, reshard
from jax.typing import DTypeLike

from ._checks import is_float0
from ._devices import HAS_TYPES
from ._errors import value_error
from ._types import Array, AxisName, Tree


def varying_axes(x: object) -> frozenset[str]:
    """Return the mesh axes of `shard_map` over which a value varies."""
    aval: Any = _type_of(x)
    return frozenset(aval.manual_axis_type.varying if HAS_TYPES else aval.vma)


def shard_axes(x: Array, axis_name: AxisName) -> frozenset[str]:
    """Return the mesh axes over which a leaf is sharded.

    Inside `shard_map`, the type of a leaf carries these axes. If types do not carry axes (`pmap`,
    `check_vma=False`), every leaf counts as sharded over `axis_name`. The type of
    `lax.axis_index(name)`, which always varies over the axis, shows whether types carry axes.
    """
    varying = varying_axes(x)
    for name in axis_name or ():
        if name not in varying_axes(lax.axis_index(name)):
            varying |= {name}
    return varying


def check_bound(axis_name: AxisName, argument: str = "axis_name") -> None:
    """Raise if a named axis is not bound by an enclosing `pmap`, `shard_map` or `vmap`."""
    for name in (axis_name,) if isinstance(axis_name, str) else axis_name or ():
        try:
            jax.lax.axis_size(name)
        except NameError:
            rule = "the name of a mapped axis around this call"
            hint = "Map the call over this axis with `pmap`, `shard_map` or `vmap`, or omit it."
            raise value_error(argument, rule, repr(name), hint) from None


def replica_count(axes: frozenset[str], everywhere: frozenset[str]) -> int:
    """Return how many devices along `everywhere` share a value that varies over `axes`."""
    return math.prod(map(lax.axis_size, everywhere - axes))


def num_shards(x: Array, axis: int) -> int:
    """Return the number of devices over which an axis of an array is explicitly sharded."""
    sharding = jax.typeof(x).sharding
    if not is_explicit(sharding):
        return 1
    names = sharding_with(x).spec[axis]
    return math.prod(sharding.mesh.shape[name] for name in np.atleast_1d(names or ()))


def memory_of(x: object) -> str:
    """Return the memory space of a value, either "host" or "device"."""
    space = getattr(_type_of(x), "memory_space", None)
    return "host" if getattr(space, "name", "") == "Host" else "device"


def in_memory_of(x: Array, like: object) -> Array:
    """Move a value to the memory space of another value."""
    return x if memory_of(x) == memory_of(like) else jax.device_put(x, _type_of(like).memory_space)


def on_device(x: Array) -> Array:
    return jax.device_put(x, jax.memory.Space.Device) if memory_of(x) == "host" else x


def reshard_like(x: Array, like: Array) -> Array:
    """Reshard a value to the sharding of another value, if its mesh has explicit axes."""
    ours, theirs = jax.typeof(x).sharding, jax.typeof(like).sharding
    if ours == theirs or not is_explicit(theirs):
        return x
    return reshard(x, theirs)


def is_explicit(sharding: NamedSharding) -> bool:
    """Return whether a sharding has explicit mesh axes."""
    return AxisType.Explicit in sharding.mesh.axis_types


def _type_of(x: object) -> ShapedArray:
    """Return the abstract value of an array, or a given abstract value unchanged."""
    return x if isinstance(x, ShapedArray) else jax.typeof(x)


def zeros_of_type(like: Any, dtype: DTypeLike | None = None) -> Array:
    """Return zeros with the shape, memory space, sharding and varying axes of another array."""
    sharding = _type_of(like).sharding
    given = sharding if is_explicit(sharding) else None
    zeros = lax.full(like.shape, 0, dtype or like.dtype, sharding=given)
    return in_memory_of(vary(zeros, varying_axes(like)), like)


def sum_over(x: Array, axes: frozenset[str]) -> Array:
    """Sum an array over mesh axes with one all-reduce, or return it unchanged without axes."""
    return lax.psum(x, tuple(sorted(axes))) if axes else x


def max_over(x: Array, axes: frozenset[str]) -> Array:
    """Return the maximum over mesh axes, with NaN as infinity, because all-reduces may drop NaN."""
    if not axes:
        return x
    if jnp.issubdtype(x.dtype, jnp.floating):
        x = jnp.where(jnp.isnan(x), jnp.inf, x)
    return lax.pmax(x, tuple(sorted(axes)))


def vary(x: Array, axes: frozenset[str]) -> Array:
    """Cast a value to a type that varies over the given mesh axes.

    The gradient with respect to the result remains local to each device instead of being
    all-reduced.
    """
    missing = tuple(sorted(axes - varying_axes(x)))
    if not missing:
        return x
    if hasattr(lax, "pcast"):
        return lax.pcast(x, missing, to="varying")
    return lax.pvary(x, missing)  # pyright: ignore[reportAttributeAccessIssue]


def sharding_with(x: Array, **axes: frozenset[str]) -> NamedSharding:
    """Return the sharding of an array with its reduced and unreduced axes replaced by `axes`."""
    sharding = jax.typeof(x).sharding
    # A `PartitionSpec` with reduced or unreduced axes cannot be unpacked as a sequence.
    entries = sharding.spec.partitions if HAS_TYPES else sharding.spec
    return NamedSharding(sharding.mesh, PartitionSpec(*entries, **axes))


def reduced_axes(x: object) -> frozenset[str]:
    """Return the mesh axes over which the gradient with respect to a value is unreduced."""
    return frozenset(jax.typeof(x).sharding.spec.reduced) if HAS_TYPES else frozenset()


def unreduced_axes(x: object) -> frozenset[str]:
    """Return the mesh axes over which a value is unreduced."""
    return frozenset(jax.typeof(x).sharding.spec.unreduced) if HAS_TYPES else frozenset()


def is_unreduced(tree: Tree) -> bool:
    """Return whether any leaf of the tree is unreduced over a mesh axis."""
    return any(map(unreduced_axes, jax.tree.leaves(tree)))


def factor_for(value: Array, factor: Array) -> Array:
    """Reshard a factor so that an unreduced value can be multiplied by it."""
    axes = unreduced_axes(value)
    if not axes:
        return factor
    mesh = jax.typeof(value).sharding.mesh
    return reshard(factor, NamedSharding(mesh, PartitionSpec(reduced=axes)))


def without_reduced_axes(params: Tree) -> Tree:
    """Reshard parameters without reduced axes, as the optimizer expects."""

    def plain(param: Array) -> Array:
        is_plain = is_float0(param) or not reduced_axes(param)
        return param if is_plain else reshard(param, sharding_with(param))

    return jax.tree.map(plain, params)


def reduce_over_devices(grads: Tree, inner_state: Tree) -> Tree:
    """Sum unreduced gradients over devices, and shard them like the inner optimizer state."""
    if not is_unreduced(grads):
        return grads
    structure = jax.tree.structure(grads)

    def is_moment(node: Tree) -> bool:
        return jax.tree.structure(node) == structure

    def reduce(grad: Array, *moments: Tree) -> Array:
        if is_float0(grad) or not unreduced_axes(grad):
            return grad
        alike = [x for x in moments if np.shape(x) == grad.shape]
        return reshard(grad, sharding_with(alike[0] if alike else grad))

    nodes = jax.tree.leaves(inner_state, is_leaf=is_moment)
    return jax.tree.map(reduce, grads, *filter(is_moment, nodes))
