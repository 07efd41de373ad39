"""Norms of gradients, updates and parameters for each unit, and a comparison of replicas."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, reshard

from .._devices import fusion_barrier
from .._leaves import wide_dtype
from .._mesh import is_explicit
from .._types import Array, AxisName, Scalar
from ..clipping._norm import Axes, Units, norm_dtype, norm_of_squares, reduce_axes, squares, totals
from ._outcome import flag_if
from ._rows import Outcome

_IS_NORM = np.array([True, True, True, False])


def measure(
    gradient: Sequence[Array], *step: Sequence[Array], units: Units, axis_name: AxisName
) -> Array:
    """Measure the whole tree and each unit, float32[1 + units, 4].

    The columns are the norms of gradient, update and parameters, and the number of non-finite
    elements of the gradient. Without `step`, the updates and the parameters, their norms are 0.

    The update is measured as `(p + u) - p` with the sum rounded to the dtype of the parameters,
    which is the change that `optax.apply_updates` makes. XLA reuses `p + u` from the optimizer
    step, so the sum is not computed twice.
    """
    dtype = norm_dtype(gradient)

    # With `jit`, the sums are traced once for all leaves of the same shape. Those of the gradient
    # are separate, so that XLA can release it before the step.
    @functools.partial(jax.jit, static_argnums=1)
    def of_gradient(g: Array, axes: Axes) -> Array:
        return sums(axes, squares(g, dtype), (~jnp.isfinite(g)).astype(dtype))

    @functools.partial(jax.jit, static_argnums=1)
    def of_step(u: Array, axes: Axes, p: Array) -> Array:
        old, wide = (x.astype(wide_dtype(x.dtype, dtype)) for x in (p, u))
        return sums(axes, squares(_rounded(old + wide, p.dtype) - old, dtype), squares(old, dtype))

    def sums(axes: Axes, *terms: Array) -> Array:
        return jnp.stack([reduce_axes(jnp.sum, x, axes) for x in terms], -1)

    def join(terms: Callable[..., Array], *columns: Sequence[Array]) -> Array:
        columns = lax.stop_gradient(columns)
        units_of = totals(terms, *columns, units=units, axis_name=axis_name)
        # A unit without leaves has a scalar.
        rows = [jnp.broadcast_to(_replicated(x), (*x.shape[:-1], 2)) for x in units_of]
        # Without the barrier, XLA:CPU duplicates kernels of all leaves for each consumer.
        return fusion_barrier(
            jnp.concatenate([jnp.zeros((0, 2), dtype), *(x.reshape(-1, 2) for x in rows)])
        )

    norms, num_bad = jnp.split(join(of_gradient, gradient), 2, axis=1)
    step_norms = join(of_step, *step) if step else jnp.zeros((len(norms), 2), dtype)
    table = jnp.concatenate([norms, step_norms, num_bad], 1)
    whole = jnp.sum(table, 0, keepdims=True)
    is_global = units.axes is None and not units.names
    table = whole if is_global else jnp.concatenate([whole, table])
    # A selection, unlike slices, is fused with the operations that read the table.
    return jnp.where(_IS_NORM, norm_of_squares(table), table).astype(jnp.float32)


def _replicated(x: Array) -> Array:
    """Replicate an array over explicit mesh axes, as required to join it with others."""
    sharding = jax.typeof(x).sharding
    if not is_explicit(sharding):
        return x
    return reshard(x, NamedSharding(sharding.mesh, PartitionSpec()))


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


def compare_replicas(norms: Array, axis_name: AxisName, is_due: Scalar) -> tuple[Scalar, Scalar]:
    """Check whether the norms on all replicas are equal; return flags, and the other device.

    Replicas execute the same program on the same inputs, so their norms are identical bit for bit.
    """
    none = jnp.int32(0), jnp.int32(0)
    if not axis_name:
        return none
    count, index = lax.axis_size(axis_name), lax.axis_index(axis_name)

    def compare(norms: Array) -> tuple[Scalar, Scalar]:
        # `psum`, unlike `all_gather`, returns an array whose type is replicated.
        rows = lax.psum(jnp.where(jnp.arange(count)[:, None] == index, norms, 0), axis_name)
        typical = jnp.sort(rows, axis=0)[count // 2]
        distance = jnp.max(jnp.abs(rows - typical), axis=1)
        distance = jnp.where(jnp.isnan(distance), jnp.inf, distance)
        differs = jnp.any(rows != rows[:1]) & jnp.isfinite(typical).all()
        flags = flag_if(Outcome.REPLICA_DIFFERS, differs) | int(Outcome.REPLICAS_CHECKED)
        return flags, jnp.argmax(distance).astype(jnp.int32)

    return lax.cond(is_due, compare, lambda _: none, norms)
