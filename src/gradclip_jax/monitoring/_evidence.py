"""What a gradient and a step say, unit by unit: norms, bad elements, and who has the most."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, reshard

from .._devices import fusion_barrier, sums_of_two
from .._mesh import is_explicit
from .._types import Array, AxisName
from ..clipping._formula import norm_dtype, norm_of_squares, reduce_axes, squares, wide_dtype
from ..clipping._granularity import Norms, Units
from ..clipping._norm import norm_of_leaves, totals


def measure_units(leaves: list[Array], units: Units, axis_name: AxisName) -> tuple[Array, Array]:
    """The norms of all leaves and of each unit, and the number of bad elements of each unit."""
    dtype = norm_dtype(leaves)

    def total(terms: Callable[[Array], Array]) -> Array:
        def share_of(x: Array, axes: Sequence[int], index: int) -> Array:
            return reduce_axes(jnp.sum, terms(x), axes)

        return _as_vector(totals(lax.stop_gradient(leaves), units, axis_name, share_of))

    bad = total(lambda x: (~jnp.isfinite(x)).astype(jnp.float32))  # as sums over devices are
    return _norms(total(lambda x: squares(x, dtype))), bad


def measure_step(
    updates: list[Array], params: list[Array], units: Units, axis_name: AxisName
) -> tuple[Array, Array]:
    """The norms of the update, as it is added to the parameters, and of the parameters.

    What is added is `(p + u) - p`: it is read off what the step writes, so that no update is
    computed a second time.
    """
    dtype = norm_dtype(updates)

    def share_of(u: Array, axes: tuple[int, ...], index: int, p: Array) -> Array:
        u, p = (x.astype(wide_dtype(x.dtype, dtype)) for x in lax.stop_gradient((u, p)))
        return sums_of_two(squares((p + u) - p, dtype), squares(p, dtype), axes)

    sums = _as_vector(totals(updates, units, axis_name, share_of, params))
    return _norms(sums.real), _norms(sums.imag)


def _norms(sums: Array) -> Array:
    """The norm of all units together, then that of each; float32."""
    norms = norm_of_squares(sums)
    whole = norm_of_leaves([norms], 2.0, None)
    return jnp.concatenate([whole[None], norms]).astype(jnp.float32)


def _as_vector(entries: Norms) -> Array:
    """The entries of all units, whole on each device; one zero if there is no unit."""

    def whole(x: Array) -> Array:
        sharding = jax.typeof(x).sharding
        # Under explicit axes only such arrays can be joined.
        is_split = is_explicit(sharding)
        return reshard(x, NamedSharding(sharding.mesh, PartitionSpec())) if is_split else x

    arrays = [whole(x).reshape(-1) for x in jax.tree.leaves(entries)]
    vector = jnp.concatenate(arrays or [jnp.zeros(1)])
    return fusion_barrier(vector if vector.size else jnp.zeros(1))


def evidence(norms: Array, bad: Array, rises: Any = 0.0) -> dict[str, Any]:
    """What a gradient says, as fields of an incident.

    `rises` are those of the units that rose beside the others, above 1, and else 0.
    """
    whole, of_units, bad_count = norms[0], norms[1:], jnp.sum(bad)
    is_finite = jnp.isfinite(whole)
    shares = jnp.square(of_units / jnp.where(is_finite & (whole > 0), whole, 1))
    # Squares may overflow where no element is infinite.
    shares = jnp.where(is_finite, shares, jnp.isinf(of_units).astype(jnp.float32))
    shares = jnp.where(bad_count > 0, bad / jnp.maximum(bad_count, 1), shares)
    rises = jnp.where(is_finite, rises, 0.0)
    first = jnp.argmax(shares + rises)
    others = jnp.where(jnp.arange(shares.size) == first, 0, shares)
    return {
        "norm": whole,
        "leaf": first,
        "share": shares[first],
        "second_leaf": jnp.argmax(others),
        "second_share": jnp.max(others),
        "bad_elements": bad_count,
        "leaf_rise": jnp.maximum(jnp.max(rises), 1),
    }
