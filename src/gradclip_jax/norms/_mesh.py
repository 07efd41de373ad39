"""Mesh axes of array types, and the collectives that depend on them."""

import math
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.sharding import AxisType, NamedSharding, PartitionSpec, reshard
from jax.typing import DTypeLike

from .._checks import is_float0
from .._devices import HAS_TYPES
from .._errors import type_error, value_error
from .._format import leaf_path
from .._types import Array, AxisName, Tree

MeshAxes: TypeAlias = frozenset[str]
"""Names of mesh axes."""


def varying_axes(x: object) -> MeshAxes:
    """Return the mesh axes of `shard_map` over which a value varies."""
    aval: Any = x if isinstance(x, ShapedArray) else jax.typeof(x)
    return frozenset(aval.manual_axis_type.varying if HAS_TYPES else aval.vma)


def shard_axes(x: Array, axis_name: AxisName) -> MeshAxes:
    """Return the mesh axes over which a leaf is sharded, or none if `axis_name` is `()`.

    Inside `shard_map`, the type of a leaf carries these axes. If types do not carry axes (`pmap`,
    `check_vma=False`), every leaf counts as sharded over `axis_name`. To test whether types carry
    axes, look at `lax.axis_index(name)`, whose type would have to contain `name`.
    """
    if axis_name == ():
        return frozenset()
    axes = varying_axes(x)
    for name in axis_names(axis_name):
        if name not in varying_axes(axis_index(name)):
            axes |= {name}
    return axes


def axis_names(axis_name: AxisName) -> tuple[str, ...]:
    """Return the argument `axis_name` as a tuple of names."""
    return (axis_name,) if isinstance(axis_name, str) else axis_name or ()


def axis_index(name: str, argument: str = "axis_name") -> Array:
    """Return the index of this device along a mapped axis, or raise if the axis is not mapped."""
    try:
        return lax.axis_index(name)
    except NameError as error:
        rule = "an axis of an enclosing `shard_map`, `pmap` or `vmap`"
        hint = "Omit it outside of these functions."
        raise value_error(argument, rule, repr(name), hint) from error


def check_axis_name(axis_name: object, argument: str = "axis_name") -> None:
    """Raise if an argument is not the name of a mapped axis, a tuple of names, or None."""
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if axis_name is not None and not all(isinstance(name, str) for name in names):
        hint = 'Pass for example "data" or ("data", "model").'
        raise type_error(argument, "a string, a tuple of strings or None", repr(axis_name), hint)


def num_devices(axes: MeshAxes) -> int:
    """Return the number of devices along mesh axes."""
    return math.prod(map(lax.axis_size, axes))


def check_equal_on_devices(argument: str, x: Any, axes: MeshAxes, averaged: str) -> None:
    """Raise if a value varies over mesh axes that are not in `axes`.

    `averaged` is the expression that the error tells the user to average over these axes.
    """
    others = varying_axes(x) - axes
    if others:
        names = ", ".join(map(repr, sorted(others)))
        rule = f"the same on all devices along {names}"
        hint = f"Average it first: `jax.lax.pmean({averaged}, {names})`."
        raise type_error(argument, rule, "values that differ", hint)


def reshard_like(x: Array, like: Array) -> Array:
    """Reshard a value to the sharding of another value, if its mesh has explicit axes."""
    ours, theirs = jax.typeof(x).sharding, jax.typeof(like).sharding
    return reshard(x, theirs) if ours != theirs and is_explicit(theirs) else x


def replicated(x: Array) -> Array:
    """Replicate an array that is sharded over explicit mesh axes, so that it can be reshaped."""
    sharding = jax.typeof(x).sharding
    return reshard(x, NamedSharding(sharding.mesh, PartitionSpec())) if is_explicit(sharding) else x


def is_explicit(sharding: NamedSharding) -> bool:
    """Return whether a sharding has explicit mesh axes."""
    return AxisType.Explicit in sharding.mesh.axis_types


def zeros_of_type(like: Any, dtype: DTypeLike | None = None) -> Array:
    """Return zeros with the shape, sharding and varying axes of another array."""
    sharding = (like if isinstance(like, ShapedArray) else jax.typeof(like)).sharding
    given = sharding if is_explicit(sharding) else None
    zeros = lax.full(like.shape, 0, dtype or like.dtype, sharding=given)
    return vary(zeros, varying_axes(like))


def sum_over(x: Array, axes: MeshAxes) -> Array:
    """Sum an array over mesh axes with one all-reduce.

    If there are no axes, return it unchanged.
    """
    return lax.psum(x, tuple(sorted(axes))) if axes else x


def max_over(x: Array, axes: MeshAxes) -> Array:
    """Return the maximum over mesh axes. NaN becomes infinity, because all-reduces may drop NaN."""
    if not axes:
        return x
    if jnp.issubdtype(x.dtype, jnp.floating):
        x = jnp.where(jnp.isnan(x), jnp.inf, x)
    return lax.pmax(x, tuple(sorted(axes)))


def vary(x: Array, axes: MeshAxes) -> Array:
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


def is_placed(x: object) -> bool:
    """Return whether a leaf is in device memory, without reduced or unreduced mesh axes."""
    if not isinstance(x, jax.Array):
        return True
    kind = jax.typeof(x)
    is_on_host = getattr(getattr(kind, "memory_space", None), "name", "") == "Host"
    spec = kind.sharding.spec
    return not (is_on_host or (HAS_TYPES and (spec.reduced or spec.unreduced)))


def check_placement(argument: str, tree: Tree) -> None:
    """Raise an error if a leaf is in host memory, or if it or its gradient is unreduced."""
    for path, x in jax.tree.leaves_with_path(tree):
        if not (is_float0(x) or is_placed(x)):
            hint = (
                "Move it inside the step with `jax.device_put(leaf, jax.memory.Space.Device)`, and "
                "sum gradients over devices first, for example with `microbatched_value_and_grad`."
            )
            got = f"{jax.typeof(x)} at {leaf_path(argument, path)}"
            rule = "in device memory and neither `reduced` nor unreduced over a mesh axis"
            raise type_error(argument, rule, got, hint)
