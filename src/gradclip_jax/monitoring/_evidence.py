"""Norms of gradients and updates by leaf or layer, and the location of a fault."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, reshard

from .._devices import fusion_barrier, sums_of_two
from .._mesh import is_explicit
from .._types import Array, AxisName, Scalar
from ..clipping._formula import wide_dtype
from ..clipping._norm import Norms, Units, norm_dtype, norm_of_squares, squares, totals
from ._levels import Comparison


def measure_units(leaves: list[Array], units: Units, axis_name: AxisName) -> tuple[Array, Array]:
    """Return the norm of the tree, the norm of each leaf or layer, and their non-finite counts."""
    dtype = norm_dtype(leaves)

    def share_of(x: Array, axes: tuple[int, ...]) -> Array:
        x = lax.stop_gradient(x)
        return sums_of_two(squares(x, dtype), (~jnp.isfinite(x)).astype(dtype), axes)

    sums = _as_vector(totals(leaves, units, axis_name, share_of))
    return _norms(sums.real), sums.imag.astype(jnp.float32)


def measure_step(
    updates: list[Array], params: list[Array], units: Units, axis_name: AxisName
) -> tuple[Array, Array]:
    """Return the norms of the applied update and of the parameters.

    The applied update is `(p + u) - p` with the sum rounded to the dtype of the parameters, which
    is the change that `optax.apply_updates` makes. XLA computes it from the result of the optimizer
    step, so the update is not computed twice.
    """
    dtype = norm_dtype(updates)

    def share_of(u: Array, axes: tuple[int, ...], p: Array) -> Array:
        narrow = p.dtype
        u, p = (x.astype(wide_dtype(x.dtype, dtype)) for x in lax.stop_gradient((u, p)))
        after = p + u
        if jnp.issubdtype(narrow, jnp.floating) and jnp.finfo(narrow).bits < 32:
            info = jnp.finfo(narrow)
            after = lax.reduce_precision(after, info.nexp, info.nmant)
        return sums_of_two(squares(after - p, dtype), squares(p, dtype), axes)

    sums = _as_vector(totals(updates, units, axis_name, share_of, params))
    return _norms(sums.real), _norms(sums.imag)


def _norms(sums: Array) -> Array:
    """Return the norm of the whole tree, followed by the norm of each leaf or layer, as float32."""
    return norm_of_squares(jnp.append(jnp.sum(sums), sums)).astype(jnp.float32)


def _as_vector(entries: Norms) -> Array:
    """Concatenate arrays to one replicated vector; return one zero if there are no arrays."""

    def whole(x: Array) -> Array:
        sharding = jax.typeof(x).sharding
        # Under explicit axes, only replicated arrays can be concatenated.
        is_split = is_explicit(sharding)
        return reshard(x, NamedSharding(sharding.mesh, PartitionSpec())) if is_split else x

    arrays = [whole(x).reshape(-1) for x in jax.tree.leaves(entries)]
    vector = jnp.concatenate(arrays or [jnp.zeros(1)])
    return fusion_barrier(vector if vector.size else jnp.zeros(1))


def differing_device(norms: Array, axis_name: AxisName, is_due: Scalar) -> tuple[Scalar, Scalar]:
    """Return whether the parameters of any device differ, and the index of that device.

    Replicas execute the same program on the same inputs, so their norms are identical bit for bit.
    """
    axes = tuple(axis_name or ())
    count, index = lax.axis_size(axes), lax.axis_index(axes)

    def compare(norms: Array) -> tuple[Scalar, Scalar]:
        # Use a sum instead of an all-gather, so that the type of the result is replicated.
        row = jnp.where(jnp.arange(count)[:, None] == index, norms, 0)
        rows = lax.psum(row, axes)
        typical = jnp.sort(rows, axis=0)[count // 2]
        distance = jnp.max(jnp.abs(rows - typical), axis=1)
        distance = jnp.where(jnp.isnan(distance), jnp.inf, distance)
        differs = jnp.any(rows != rows[:1]) & jnp.isfinite(typical).all()
        return differs, jnp.argmax(distance).astype(jnp.float32)

    return lax.cond(is_due, compare, lambda _: (jnp.array(False), jnp.float32(-1)), norms)


def evidence(
    norms: dict[str, Array], bad: Array, found: Comparison
) -> tuple[dict[str, Any], dict[str, Array]]:
    """Compute the fields and flags of an incident from the norms of all leaves or layers.

    The incident names the leaf or layer with the strongest evidence. In order of precedence:

    1. parameters that are non-finite or have jumped,
    2. the largest number of non-finite elements in the gradient,
    3. the largest rise of the gradient norm,
    4. an update that is non-finite or has risen,
    5. a gradient that has become zero,
    6. a gradient that has drifted,
    7. the largest share of the squared gradient norm.
    """
    gradient, bad_count = norms["gradient"], jnp.sum(bad)
    whole, of_units = gradient[0], gradient[1:]
    is_finite = jnp.isfinite(whole)
    shares = jnp.square(of_units / jnp.where(is_finite & (whole > 0), whole, 1))
    # Squares may overflow although all elements are finite.
    shares = jnp.where(is_finite, shares, jnp.isinf(of_units).astype(jnp.float32))
    shares = jnp.where(bad_count > 0, bad / jnp.maximum(bad_count, 1), shares)

    def jumps(kind: str) -> Array:
        """Return the factor by which each norm rose; inf for a non-finite norm."""
        if kind not in norms:
            return jnp.zeros_like(shares)
        rises = found.rises[list(norms).index(kind)]
        return jnp.where(jnp.isfinite(norms[kind][1:]), rises, jnp.inf)

    dead = found.dead[1:].astype(jnp.float32)
    rises = jnp.where(is_finite, jumps("gradient"), 0)
    ranks = [jumps("parameter"), bad, rises, jumps("update"), dead, found.drifts]
    first = jnp.argmax(_first_nonzero(*ranks, shares))
    others = jnp.where(jnp.arange(shares.size) == first, 0, shares)
    fields: dict[str, Any] = {
        "norm": whole,
        "norm_threshold": found.thresholds[0],
        "loss_threshold": found.loss_threshold,
        "leaf": first,
        "share": shares[first],
        "second_leaf": jnp.argmax(others),
        "second_share": jnp.max(others),
        "bad_elements": bad_count,
        "leaf_rise": _first_nonzero(*(ranks[i] for i in (0, 2, 3, 5)))[first],
    }
    for i, kind in enumerate(norms):
        if i:
            fields[f"{kind}_norm"] = norms[kind][0]
            fields[f"{kind}_threshold"] = found.thresholds[i]
    flags = {
        "nan": jnp.isnan(whole),
        "infinity": jnp.isinf(whole),
        "leaf": jnp.any(rises > 0),
        "update": jnp.any(ranks[3] > 0),
        "parameter": jnp.any(ranks[0] > 0),
        "zero": jnp.any(found.dead),
        "drift": jnp.any(found.drifts > 0),
    }
    return fields, flags


def _first_nonzero(*ranks: Array) -> Array:
    """Return the first vector with a nonzero element, or the last vector if there is none."""
    conditions = [jnp.any(x != 0) for x in ranks[:-1]]
    return jnp.select(conditions, ranks[:-1], ranks[-1])
