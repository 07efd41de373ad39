"""Norms of gradients, updates and parameters for each unit, and a comparison of replicas."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._devices import fusion_barrier
from .._leaves import wide_dtype
from .._mesh import reshard_like
from .._types import Array, AxisName, Scalar
from ..clipping._norm import Axes, Units, norm_dtype, norm_of_squares, reduce_axes, squares, totals

_IS_COUNT = np.arange(4) == 0


def measure(
    gradient: Sequence[Array], *step: Sequence[Array], units: Units, axis_name: AxisName
) -> Array:
    """Measure the whole tree and each unit, float32[1 + units, 4].

    The columns are the number of non-finite elements of the gradient, and the norms of gradient,
    update and parameters. Without `step`, the updates and the parameters, their norms are 0.

    The update is measured as `(p + u) - p` with the sum rounded to the dtype of the parameters,
    which is the change that `optax.apply_updates` makes. XLA reuses `p + u` from the optimizer
    step, so the sum is not computed twice.
    """
    dtype = norm_dtype(gradient)

    def of_gradient(g: Array, axes: Axes) -> Array:
        return _sums(axes, (~jnp.isfinite(g)).astype(dtype), squares(g, dtype))

    def of_step(u: Array, axes: Axes, p: Array) -> Array:
        old, wide = (x.astype(wide_dtype(x.dtype, dtype)) for x in (p, u))
        new, info = old + wide, jnp.finfo(p.dtype)
        if info.bits < 32:  # XLA would remove a conversion to the narrow dtype and back
            new = lax.reduce_precision(new, 8, info.nmant)  # like bfloat16, without underflow
        return _sums(axes, squares(new - old, dtype), squares(old, dtype))

    def of_units(terms: Callable[..., Array], *columns: Sequence[Array]) -> Array:
        # With `jit`, the terms are traced once for all leaves of the same shape.
        terms = jax.jit(terms, static_argnums=1)
        entries = totals(terms, *columns, units=units, axis_name=axis_name)
        # Arrays that are sharded over explicit mesh axes are replicated, like their sum.
        entries = [reshard_like(x, jnp.sum(x)) for x in entries]
        # A unit without leaves has a scalar.
        rows = [jnp.broadcast_to(x, (*x.shape[:-1], 2)).reshape(-1, 2) for x in entries]
        # Without the barrier, XLA:CPU duplicates kernels of all leaves for each consumer.
        return fusion_barrier(jnp.concatenate([jnp.zeros((0, 2), dtype), *rows]))

    # The sums of the gradient are separate, so that XLA can release it before the step.
    sums = of_units(of_gradient, gradient)
    table = jnp.concatenate([sums, of_units(of_step, *step) if step else jnp.zeros_like(sums)], 1)
    if units.axes is not None or units.names:
        table = jnp.concatenate([jnp.sum(table, 0, keepdims=True), table])
    # A selection, unlike slices, is fused with the operations that read the table.
    return jnp.where(_IS_COUNT, table, norm_of_squares(table)).astype(jnp.float32)


def _sums(axes: Axes, *terms: Array) -> Array:
    return jnp.stack([reduce_axes(jnp.sum, x, axes) for x in terms], -1)


def other_replica(
    norms: Array, axis_name: AxisName, is_due: Scalar
) -> tuple[Scalar | bool, Scalar | int]:
    """Return whether the norms of a replica differ, and the index of the one that differs most.

    Replicas execute the same program on the same inputs, so their norms are identical bit for bit.
    """
    if not axis_name:
        return False, 0
    count = lax.axis_size(axis_name)
    is_own = jnp.arange(count)[:, None] == lax.axis_index(axis_name)

    def compare(norms: Array) -> tuple[Scalar, Scalar]:
        # `psum`, unlike `all_gather`, returns an array whose type is replicated.
        rows = lax.psum(jnp.where(is_own, norms, 0), axis_name)
        typical = jnp.sort(rows, axis=0)[count // 2]
        distance = jnp.max(jnp.abs(rows - typical), axis=1)
        device = jnp.argmax(distance).astype(jnp.int32)  # of the first NaN, if there is one
        return (distance[device] != 0) & jnp.isfinite(typical).all(), device

    return lax.cond(is_due, compare, lambda _: (jnp.bool_(False), jnp.int32(0)), norms)
