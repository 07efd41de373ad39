"""What the type of a value says about the mesh it lives on, and the collectives that follow."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.sharding import AxisType

from ._types import Array, AxisName


def varying_axes(x: Any) -> frozenset[str]:
    """The mesh axes of `shard_map` over which a value differs from device to device."""
    type_of = _type_of(x)
    manual = getattr(type_of, "manual_axis_type", None)  # JAX 0.10 and later
    return frozenset(getattr(type_of, "vma", ()) if manual is None else manual.varying)


def shard_axes(x: Any, axis_name: AxisName) -> frozenset[str]:
    """The axes over which a leaf is a shard of the whole.

    Its type says so inside `shard_map`. Where types are silent (`pmap`, `check_vma=False`) the
    axes named by the user count for every leaf; the index of an axis varies over that axis, so
    a type that does not even say this of it is silent.
    """
    named = axis_name or ()
    silent = {name for name in named if name not in varying_axes(lax.axis_index(name))}
    return varying_axes(x) | silent


def replica_count(axes: frozenset[str], everywhere: frozenset[str]) -> int:
    """How many devices along `everywhere` hold the same value, if it varies over `axes`."""
    copies = 1
    for name in everywhere - axes:
        copies *= lax.axis_size(name)
    return copies


def device_count(x: Any) -> int:
    """Over how many devices an array may be sharded: all there are, where its type is silent."""
    mesh = jax.typeof(x).sharding.mesh
    if mesh.empty:
        return len(jax.devices())
    return 1 if all(kind == AxisType.Manual for kind in mesh.axis_types) else mesh.size


def memory_of(x: Any) -> str:
    """The memory that a value lies in, "host" or "device", as far as its type says."""
    space = getattr(jax.typeof(x), "memory_space", None)
    return "host" if getattr(space, "name", "") == "Host" else "device"


def reshard_like(x: Any, like: Any) -> Any:
    """The same value, sharded as the type of another array says, under explicit axes."""
    ours, theirs = jax.typeof(x).sharding, jax.typeof(like).sharding
    if ours == theirs or not is_explicit(theirs):
        return x
    return jax.sharding.reshard(x, theirs)


def is_explicit(sharding: Any) -> bool:
    """Whether a type says over which mesh axes an array is sharded."""
    return any(kind == AxisType.Explicit for kind in sharding.mesh.axis_types)


def _type_of(x: Any) -> Any:
    """The type of an array or of its shape, or that type itself."""
    return x if isinstance(x, ShapedArray) else jax.typeof(x)


def zeros_of_type(like: Any, dtype: Any = None) -> Array:
    """Zeros that are sharded, and vary, as an array of this type or shape."""
    sharding = _type_of(like).sharding
    zeros = lax.full(
        like.shape, 0, dtype or like.dtype, sharding=sharding if is_explicit(sharding) else None
    )
    return vary(zeros, varying_axes(like))


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
    if hasattr(lax, "pcast"):  # JAX 0.8 and later
        return lax.pcast(x, missing, to="varying")
    return lax.pvary(x, missing)  # pyright: ignore[reportAttributeAccessIssue]
