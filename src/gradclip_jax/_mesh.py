"""The mesh axes in the type of a value, and the sums over devices that follow from them.

Inside `shard_map` a gradient stays on its device if the parameter is typed as varying. Under
explicit axes it does if the parameter is typed as reduced: the gradient is then *unreduced*, a
summand. It is summed once, at the end of a window or a batch.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.sharding import AxisType, NamedSharding, PartitionSpec, reshard

from ._checks import is_float0
from ._devices import HAS_TYPES
from ._types import Array, AxisName, Tree


def varying_axes(x: Any) -> frozenset[str]:
    """The mesh axes of `shard_map` over which a value differs from device to device."""
    aval: Any = x if isinstance(x, ShapedArray) else jax.typeof(x)
    return frozenset(aval.manual_axis_type.varying if HAS_TYPES else aval.vma)


def shard_axes(x: Any, axis_name: AxisName) -> frozenset[str]:
    """The axes over which a leaf is a shard of the whole.

    Its type says so inside `shard_map`. Where types are silent (`pmap`, `check_vma=False`) the
    axes named by the user count for every leaf; the index of an axis varies over that axis, so
    a type that does not even say this of it is silent.
    """
    varying = varying_axes(x)
    for name in axis_name or ():
        if name not in varying_axes(lax.axis_index(name)):
            varying |= {name}
    return varying


def replica_count(axes: frozenset[str], everywhere: frozenset[str]) -> int:
    """How many devices along `everywhere` hold the same value, if it varies over `axes`."""
    return math.prod(map(lax.axis_size, everywhere - axes))


def device_count(x: Any) -> int:
    """Over how many devices an array may be sharded: all there are, where its type is silent."""
    mesh = jax.typeof(x).sharding.mesh
    if mesh.empty:
        return len(jax.devices())
    return 1 if all(kind == AxisType.Manual for kind in mesh.axis_types) else mesh.size


def memory_of(x: Any) -> str:
    """The memory that a value lies in, "host" or "device", as far as its type says."""
    aval = x if isinstance(x, ShapedArray) else jax.typeof(x)
    space = getattr(aval, "memory_space", None)
    return "host" if getattr(space, "name", "") == "Host" else "device"


def in_memory_of(x: Any, like: Any) -> Any:
    """The same value in the memory that another lies in."""
    return x if memory_of(x) == memory_of(like) else jax.device_put(x, _type_of(like).memory_space)


def on_device(x: Any) -> Any:
    """The same value in the memory of the device."""
    return jax.device_put(x, jax.memory.Space.Device) if memory_of(x) == "host" else x


def reshard_like(x: Any, like: Any) -> Any:
    """The same value, sharded as the type of another array says, under explicit axes."""
    ours, theirs = jax.typeof(x).sharding, jax.typeof(like).sharding
    if ours == theirs or not is_explicit(theirs):
        return x
    return reshard(x, theirs)


def is_explicit(sharding: Any) -> bool:
    """Whether a type says over which mesh axes an array is sharded."""
    return any(kind == AxisType.Explicit for kind in sharding.mesh.axis_types)


def _type_of(x: Any) -> Any:
    """The type of an array or of its shape, or that type itself."""
    return x if isinstance(x, ShapedArray) else jax.typeof(x)


def zeros_of_type(like: Any, dtype: Any = None) -> Array:
    """Zeros that lie, are sharded, and vary, as an array of this type or shape."""
    sharding = _type_of(like).sharding
    given = sharding if is_explicit(sharding) else None
    zeros = lax.full(like.shape, 0, dtype or like.dtype, sharding=given)
    return in_memory_of(vary(zeros, varying_axes(like)), like)


def sum_over(x: Array, axes: frozenset[str]) -> Array:
    """The sum over devices: one all-reduce, or none."""
    return lax.psum(x, tuple(sorted(axes))) if axes else x


def max_over(x: Array, axes: frozenset[str]) -> Array:
    """The maximum over devices; a NaN counts as infinite, because an all-reduce may drop it."""
    if not axes:
        return x
    if jnp.issubdtype(x.dtype, jnp.floating):
        x = jnp.where(jnp.isnan(x), jnp.inf, x)
    return lax.pmax(x, tuple(sorted(axes)))


def vary(x: Any, axes: frozenset[str]) -> Any:
    """The same value, typed as one that may differ along the axes.

    A gradient with respect to it stays on its device instead of being summed at once.
    """
    missing = tuple(sorted(axes - varying_axes(x)))
    if not missing:
        return x
    if hasattr(lax, "pcast"):
        return lax.pcast(x, missing, to="varying")
    return lax.pvary(x, missing)  # pyright: ignore[reportAttributeAccessIssue]


def sharding_with(x: Any, **axes: frozenset[str]) -> NamedSharding:
    """How an array is sharded, with other `reduced` and `unreduced` axes, or none of them."""
    sharding = jax.typeof(x).sharding
    # With such axes a spec is no longer a sequence of its entries.
    entries = sharding.spec.partitions if HAS_TYPES else sharding.spec
    return NamedSharding(sharding.mesh, PartitionSpec(*entries, **axes))


def reduced_axes(x: Any) -> frozenset[str]:
    """The mesh axes over which a gradient with respect to a value stays unreduced."""
    return frozenset(jax.typeof(x).sharding.spec.reduced) if HAS_TYPES else frozenset()


def unreduced_axes(x: Any) -> frozenset[str]:
    """The mesh axes over which each device holds a summand of the value, under explicit axes."""
    return frozenset(jax.typeof(x).sharding.spec.unreduced) if HAS_TYPES else frozenset()


def is_unreduced(tree: Any) -> bool:
    """Whether each device holds a summand of a leaf."""
    leaves = [x for x in jax.tree.leaves(tree) if hasattr(x, "shape")]
    return any(unreduced_axes(x) for x in leaves if x.dtype != jax.dtypes.float0)


def factor_for(value: Array, factor: Any) -> Any:
    """The factor, typed as what a value that is unreduced may be multiplied by."""
    axes = unreduced_axes(value)
    if not axes:
        return factor
    mesh = jax.typeof(value).sharding.mesh
    return reshard(factor, NamedSharding(mesh, PartitionSpec(reduced=axes)))


def without_reduced_axes(params: Tree) -> Tree:
    """The parameters as an optimizer sees them, whatever their gradients stay unreduced over."""

    def plain(param: Any) -> Any:
        is_plain = is_float0(param) or not reduced_axes(param)
        return param if is_plain else reshard(param, sharding_with(param))

    return jax.tree.map(plain, params)


def reduce_over_devices(grads: Tree, inner_state: Any) -> Tree:
    """Unreduced leaves summed over devices, to the sharding of the inner optimizer's state."""
    if not is_unreduced(grads):
        return grads
    structure = jax.tree.structure(grads)

    def is_moment(node: Any) -> bool:
        return jax.tree.structure(node) == structure

    def reduce(grad: Any, *moments: Any) -> Any:
        if is_float0(grad) or not unreduced_axes(grad):
            return grad
        alike = [x for x in moments if np.shape(x) == grad.shape]
        return reshard(grad, sharding_with(alike[0] if alike else grad))

    nodes = jax.tree.leaves(inner_state, is_leaf=is_moment)
    return jax.tree.map(reduce, grads, *filter(is_moment, nodes))
