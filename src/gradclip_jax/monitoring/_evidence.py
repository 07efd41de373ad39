"""Compute the norms of each leaf or layer, and locate the cause of a training fault."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, reshard

from .._devices import concatenated, sums_of_pairs
from .._mesh import is_explicit
from .._types import Array, AxisName, Scalar
from ..clipping._formula import wide_dtype
from ..clipping._norm import Norms, Units, norm_dtype, norm_of_squares, squares, totals
from ._levels import Comparison


def norms_of_step(
    gradient: list[Array],
    step: tuple[list[Array], list[Array]] | None,
    units: Units,
    axis_name: AxisName,
) -> tuple[Array, Array]:
    """Compute norms of the gradient, update and parameters, and count non-finite elements.

    `step` contains the leaves of the update and of the parameters; with None, only the gradient is
    measured. Each row of the result contains the norm of the whole tree, followed by the norm of
    each leaf or layer. Non-finite elements are counted in the gradient of each leaf or layer.

    The applied update is `(p + u) - p` with the sum rounded to the dtype of the parameters, which
    is the change that `optax.apply_updates` makes. XLA reuses `p + u` from the optimizer step, so
    the sum is not computed twice.
    """
    dtype = norm_dtype(gradient)

    def sums(term: Callable[..., Array], leaves: list[Array], *others: list[Array]) -> Norms:
        return totals(leaves, units, axis_name, term, *others)

    def of_gradient(x: Array) -> tuple[Array, Array]:
        x = lax.stop_gradient(x)
        return squares(x, dtype), (~jnp.isfinite(x)).astype(dtype)

    def of_step(u: Array, p: Array) -> tuple[Array, Array]:
        narrow = p.dtype
        u, p = (x.astype(wide_dtype(x.dtype, dtype)) for x in lax.stop_gradient((u, p)))
        after = p + u
        if jnp.issubdtype(narrow, jnp.floating) and jnp.finfo(narrow).bits < 32:
            info = jnp.finfo(narrow)
            after = lax.reduce_precision(after, info.nexp, info.nmant)
        return squares(after - p, dtype), squares(p, dtype)

    square, count = sums_of_pairs(sums, of_gradient, gradient)
    squared = [square] if step is None else [square, *sums_of_pairs(sums, of_step, *step)]
    rows = jnp.stack(list(map(_as_vector, squared)))
    norms = norm_of_squares(jnp.concatenate([jnp.sum(rows, 1, keepdims=True), rows], 1))
    bad = _as_vector(count)
    return norms.astype(jnp.float32), bad.astype(jnp.float32)


def _as_vector(entries: Norms) -> Array:
    """Concatenate arrays into one replicated vector; an empty list gives a single zero."""

    def whole(x: Array) -> Array:
        sharding = jax.typeof(x).sharding
        # With explicit mesh axes, only replicated arrays can be concatenated.
        is_split = is_explicit(sharding)
        return reshard(x, NamedSharding(sharding.mesh, PartitionSpec())) if is_split else x

    vector = concatenated([whole(x).reshape(-1) for x in entries] or [jnp.zeros(1)])
    return vector if vector.size else jnp.zeros(1)


def differing_device(norms: Array, axis_name: AxisName, is_due: Scalar) -> tuple[Scalar, Scalar]:
    """Check whether the parameters of all replicas are equal, and find the device that differs.

    Replicas execute the same program on the same inputs, so their norms are identical bit for bit.
    """
    axes = tuple(axis_name or ())
    count, index = lax.axis_size(axes), lax.axis_index(axes)

    def compare(norms: Array) -> tuple[Scalar, Scalar]:
        # `psum`, unlike `all_gather`, returns an array whose type is replicated.
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
    """Find out from the norms which faults occurred in a step, and in which leaf or layer.

    The incident names the leaf or layer with the strongest evidence. The evidence is, from
    strongest to weakest:

    - parameters that are non-finite or have jumped,
    - the largest number of non-finite elements in the gradient,
    - the largest rise of the gradient norm,
    - an update that is non-finite or has risen,
    - a gradient that has become zero,
    - a gradient that has drifted,
    - the largest share of the squared gradient norm.
    """
    gradient, bad_count = norms["gradient"], jnp.sum(bad)
    whole, of_units = gradient[0], gradient[1:]
    is_finite = jnp.isfinite(whole)
    shares = jnp.square(of_units / jnp.where(is_finite & (whole > 0), whole, 1))
    # The squared norm may overflow although all elements are finite.
    shares = jnp.where(is_finite, shares, jnp.isinf(of_units).astype(jnp.float32))
    shares = jnp.where(bad_count > 0, bad / jnp.maximum(bad_count, 1), shares)

    def jumps(kind: str) -> Array:
        """Return the increase of each norm as a factor; inf for a non-finite norm."""
        if kind not in norms:
            return jnp.zeros_like(shares)
        rises = found.rises[list(norms).index(kind)]
        return jnp.where(jnp.isfinite(norms[kind][1:]), rises, jnp.inf)

    rises = jnp.where(is_finite, jumps("gradient"), 0)
    dead = found.dead[1:].astype(jnp.float32)
    ranks = jnp.stack([jumps("parameter"), bad, rises, jumps("update"), dead, found.drifts, shares])
    is_found = jnp.any(ranks != 0, axis=1)
    first = jnp.argmax(ranks[jnp.argmax(is_found)])
    others = jnp.where(jnp.arange(shares.size) == first, 0, shares)
    # Increase of the parameter, gradient and update norms, and the drift, as factors.
    factors = ranks[np.array([0, 2, 3, 5]), first]
    fields: dict[str, Any] = {
        "norm": whole,
        "norm_threshold": found.thresholds[0],
        "loss_threshold": found.loss_threshold,
        "leaf": first,
        "share": shares[first],
        "second_leaf": jnp.argmax(others),
        "second_share": jnp.max(others),
        "bad_elements": bad_count,
        "leaf_rise": factors[jnp.argmax(factors > 0)],
    }
    for i, kind in enumerate(norms):
        if i:
            fields[f"{kind}_norm"] = norms[kind][0]
            fields[f"{kind}_threshold"] = found.thresholds[i]
    flags = {
        "nan": jnp.isnan(whole),
        "infinity": jnp.isinf(whole),
        "leaf": is_found[2],
        "update": is_found[3],
        "parameter": is_found[0],
        "zero": found.dead[0] | is_found[4],
        "drift": is_found[5],
    }
    return fields, flags
