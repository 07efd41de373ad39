"""Measurements of a gradient and a step, unit by unit, and the unit that an incident names."""

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
    """The norms of all leaves and of each unit, and the number of bad elements of each unit."""
    dtype = norm_dtype(leaves)

    def share_of(x: Array, axes: tuple[int, ...]) -> Array:
        x = lax.stop_gradient(x)
        return sums_of_two(squares(x, dtype), (~jnp.isfinite(x)).astype(dtype), axes)

    sums = _as_vector(totals(leaves, units, axis_name, share_of))
    return _norms(sums.real), sums.imag.astype(jnp.float32)


def measure_step(
    updates: list[Array], params: list[Array], units: Units, axis_name: AxisName
) -> tuple[Array, Array]:
    """The norms of the update, as it is added to the parameters, and of the parameters.

    That is `(p + u) - p`, with the sum rounded to the dtype of the parameters: what
    `optax.apply_updates` adds. XLA reads it off the step, so that no update is computed twice.
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
    """The norm of all units together, then that of each; float32."""
    return norm_of_squares(jnp.append(jnp.sum(sums), sums)).astype(jnp.float32)


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


def differing_device(norms: Array, axis_name: AxisName, is_due: Scalar) -> tuple[Scalar, Scalar]:
    """Whether a device holds other parameters than most, and its index along the axes.

    Replicas run the same program on the same numbers: their norms agree bit for bit.
    """
    axes = tuple(axis_name or ())
    count, index = lax.axis_size(axes), lax.axis_index(axes)

    def compare(norms: Array) -> tuple[Scalar, Scalar]:
        # A sum of one row from each device: its type says that it is the same on all of them.
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
    """The fields and flags of an incident that follow from the norms of all units.

    The unit that is named is the first that applies: the one whose parameters are not finite or
    have jumped, with the most non-finite elements of the gradient, whose gradient has risen, whose
    update is not finite or has risen, whose gradient has become zero or has drifted, and else the
    one with the largest share of the squared norm.
    """
    gradient, bad_count = norms["gradient"], jnp.sum(bad)
    whole, of_units = gradient[0], gradient[1:]
    is_finite = jnp.isfinite(whole)
    shares = jnp.square(of_units / jnp.where(is_finite & (whole > 0), whole, 1))
    # Squares may overflow where no element is infinite.
    shares = jnp.where(is_finite, shares, jnp.isinf(of_units).astype(jnp.float32))
    shares = jnp.where(bad_count > 0, bad / jnp.maximum(bad_count, 1), shares)

    def jumps(kind: str) -> Array:
        """How far each unit rose; a non-finite norm counts as farthest."""
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
    """The first vector with an element other than 0; the last if there is none."""
    conditions = [jnp.any(x != 0) for x in ranks[:-1]]
    return jnp.select(conditions, ranks[:-1], ranks[-1])
