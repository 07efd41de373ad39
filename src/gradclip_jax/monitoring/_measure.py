"""Norms of gradients, updates and parameters for each unit, and a comparison of replicas."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, reshard

from .._leaves import wide_dtype
from .._mesh import is_explicit
from .._types import Array, AxisName, Scalar
from ..clipping._norm import (
    Axes,
    Norms,
    Units,
    norm_dtype,
    norm_of_squares,
    reduce_axes,
    squares,
    totals,
)


def measure(
    gradient: Sequence[Array],
    update: Sequence[Array] | None,
    params: Sequence[Array] | None,
    units: Units,
    axis_name: AxisName,
    *,
    measures_params: bool,
) -> Array:
    """Measure the whole tree and each unit, float32[1 + units, 4].

    The columns are the norms of gradient, update and parameters, 0 if not measured, and the number
    of non-finite elements of the gradient.

    The update is measured as `(p + u) - p` with the sum rounded to the dtype of the parameters,
    which is the change that `optax.apply_updates` makes. XLA reuses `p + u` from the optimizer
    step, so the sum is not computed twice.
    """
    dtype = norm_dtype(gradient)

    def square(x: Array) -> Array:
        return squares(x, dtype)

    def is_bad(x: Array) -> Array:
        return (~jnp.isfinite(x)).astype(dtype)

    def square_of_change(u: Array, p: Array) -> Array:
        old, wide = (x.astype(wide_dtype(x.dtype, dtype)) for x in (p, u))
        return squares(_rounded(old + wide, p.dtype) - old, dtype)

    def sums(terms: Callable[..., Array], *columns: Sequence[Array]) -> Array:
        # With `jit`, the sum is traced once for all leaves of the same shape.
        @functools.partial(jax.jit, static_argnums=1)
        def of_leaf(x: Array, axes: Axes, *others: Array) -> Array:
            return reduce_axes(jnp.sum, terms(*lax.stop_gradient((x, *others))), axes)

        return _as_vector(totals(of_leaf, *columns, units=units, axis_name=axis_name))

    of_gradient = sums(square, gradient), sums(is_bad, gradient)
    of_update = of_params = jnp.zeros_like(of_gradient[0])
    if update is not None:
        of_update = (
            sums(square, update) if params is None else sums(square_of_change, update, params)
        )
    if params is not None and measures_params:
        of_params = sums(square, params)
    table = jnp.stack([of_gradient[0], of_update, of_params, of_gradient[1]], 1)
    whole = jnp.sum(table, 0, keepdims=True)
    is_global = units.axes is None and not units.names
    table = whole if is_global else jnp.concatenate([whole, table])
    # A selection, unlike slices, is fused with the operations that read the table.
    return jnp.where(_IS_NORM, norm_of_squares(table), table).astype(jnp.float32)


_IS_NORM = np.array([[True, True, True, False]])


def _as_vector(norms: Norms) -> Array:
    """Join the norms of all units."""
    entries: list[Array] = []
    for x in norms:
        sharding = jax.typeof(x).sharding
        if is_explicit(sharding):  # with explicit mesh axes, only replicated arrays can be joined
            x = reshard(x, NamedSharding(sharding.mesh, PartitionSpec()))
        entries.append(x.reshape(-1))
    # Without the barrier, XLA:CPU compiles a kernel with one operand for each leaf and norm.
    return jnp.concatenate(entries or [jnp.zeros(0)])


def _rounded(x: Array, dtype: np.dtype) -> Array:
    """Round to a narrower dtype. XLA would remove a conversion to this dtype and back."""
    if not jnp.issubdtype(dtype, jnp.floating) or jnp.finfo(dtype).bits >= 32:
        return x
    info = jnp.finfo(dtype)
    rounded = lax.reduce_precision(x, info.nexp, info.nmant)
    if info.nexp == 8:  # bfloat16, whose subnormal numbers are subnormal in float32
        return rounded
    step = np.float32(info.smallest_subnormal)  # `reduce_precision` replaces subnormals by 0
    return jnp.where(abs(x) < np.float32(info.tiny), jnp.round(x / step) * step, rounded)


def differing_device(norms: Array, axis_name: AxisName, is_due: Scalar) -> tuple[Scalar, Scalar]:
    """Check whether the norms on all replicas are equal, and find the device that differs.

    Replicas execute the same program on the same inputs, so their norms are identical bit for bit.
    """
    axes = tuple(axis_name or ())
    count, index = lax.axis_size(axes), lax.axis_index(axes)

    def compare(norms: Array) -> tuple[Scalar, Scalar]:
        # `psum`, unlike `all_gather`, returns an array whose type is replicated.
        rows = lax.psum(jnp.where(jnp.arange(count)[:, None] == index, norms, 0), axes)
        typical = jnp.sort(rows, axis=0)[count // 2]
        distance = jnp.max(jnp.abs(rows - typical), axis=1)
        distance = jnp.where(jnp.isnan(distance), jnp.inf, distance)
        differs = jnp.any(rows != rows[:1]) & jnp.isfinite(typical).all()
        return differs, jnp.argmax(distance).astype(jnp.int32)

    return lax.cond(is_due, compare, lambda _: (jnp.array(False), jnp.int32(0)), norms)
