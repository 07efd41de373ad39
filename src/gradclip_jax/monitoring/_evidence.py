"""Compute the norms of each leaf or layer, and locate the cause of a training fault."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, reshard

from .._devices import concatenated, fusion_barrier, sums_of_terms
from .._leaves import wide_dtype
from .._mesh import is_explicit
from .._types import Array, AxisName, Scalar
from ..clipping._norm import Norms, Units, norm_dtype, norm_of_squares, squares, totals
from ._levels import KINDS, Comparison


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

    def terms(x: Array, *step: Array) -> Sequence[Array]:
        x, step = lax.stop_gradient((x, step))
        of_gradient = squares(x, dtype), (~jnp.isfinite(x)).astype(dtype)
        if not step:
            return of_gradient
        narrow = step[1].dtype
        u, p = (x.astype(wide_dtype(x.dtype, dtype)) for x in step)
        after = p + u
        if jnp.issubdtype(narrow, jnp.floating) and jnp.finfo(narrow).bits < 32:
            after = _rounded(after, jnp.finfo(narrow))
        return *of_gradient, squares(after - p, dtype), squares(p, dtype)

    columns = (gradient,) if step is None else (gradient, *step)
    sums = functools.partial(totals, units=units, axis_name=axis_name)
    rows = _as_rows(sums_of_terms(sums, terms, 2 if step is None else 4, *columns))
    rows, bad = jnp.concatenate([rows[:1], rows[2:]]), rows[1]
    norms = norm_of_squares(jnp.concatenate([jnp.sum(rows, 1, keepdims=True), rows], 1))
    return norms.astype(jnp.float32), bad.astype(jnp.float32)


def _rounded(x: Array, info: Any) -> Array:
    """Round to a narrower dtype. XLA would remove a conversion to this dtype and back."""
    rounded = lax.reduce_precision(x, info.nexp, info.nmant)
    if info.nexp == 8:  # bfloat16, whose subnormal numbers are subnormal in float32
        return rounded
    step = np.float32(info.smallest_subnormal)  # `reduce_precision` replaces subnormals by 0
    return jnp.where(abs(x) < np.float32(info.tiny), jnp.round(x / step) * step, rounded)


def _as_rows(groups: Sequence[Norms]) -> Array:
    """Concatenate the arrays of each group into a row; empty groups give a single zero."""
    entries: list[Array] = []
    for x in itertools.chain(*groups):
        sharding = jax.typeof(x).sharding
        if is_explicit(sharding):  # with explicit mesh axes, only replicated arrays can be joined
            x = reshard(x, NamedSharding(sharding.mesh, PartitionSpec()))
        entries.append(x.reshape(-1))
    rows = concatenated(entries or [jnp.zeros(0)]).reshape(len(groups), -1)
    return rows if rows.size else jnp.zeros((len(groups), 1))


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
    norms: Array, bad: Array, found: Comparison
) -> tuple[dict[str, Any], dict[str, Array]]:
    """Find out from the norms which faults occurred in a step, and in which leaf or layer.

    The incident names the leaf or layer with the strongest evidence. The evidence is, from
    strongest to weakest:

    - parameters that are non-finite or have jumped,
    - the largest number of non-finite elements in the gradient,
    - the largest rise of the gradient norm,
    - a gradient that has become zero,
    - a gradient that has drifted,
    - an update that is non-finite or has risen,
    - the largest share of the squared gradient norm.
    """
    bad_count, whole, of_units = jnp.sum(bad), norms[0, 0], norms[0, 1:]
    is_finite = jnp.isfinite(whole)
    shares = jnp.square(of_units / jnp.where(is_finite & (whole > 0), whole, 1))
    # The squared norm may overflow although all elements are finite.
    shares = jnp.where(is_finite, shares, jnp.isinf(of_units).astype(jnp.float32))
    shares = jnp.where(bad_count > 0, bad / jnp.maximum(bad_count, 1), shares)

    # Increases of the gradient, update and parameter norms as factors; inf for a non-finite norm.
    jumps = jnp.where(jnp.isfinite(norms[:, 1:]), found.rises, jnp.inf)
    jumps = jnp.pad(jumps, ((0, len(KINDS) - len(norms)), (0, 0)))
    rises = jnp.where(is_finite, jumps[0], 0)
    dead = found.dead[1:].astype(jnp.float32)
    # Without the barrier, XLA on GPU computes the rows in three more kernels.
    ranks = fusion_barrier(jnp.stack([jumps[2], bad, rises, dead, found.drifts, jumps[1], shares]))
    is_found = jnp.any(ranks != 0, axis=1)
    first = jnp.argmax(_first_true(is_found, ranks))
    others = jnp.where(jnp.arange(shares.size) == first, 0, shares)
    # Increase of the parameter and gradient norms, the drift, and increase of the update norm.
    factors = ranks[np.array([0, 2, 4, 5]), first]
    fields: dict[str, Any] = {
        "norm": whole,
        "norm_threshold": found.thresholds[0],
        "loss_threshold": found.loss_threshold,
        "leaf": first,
        "share": shares[first],
        "second_leaf": jnp.argmax(others),
        "second_share": jnp.max(others),
        "bad_elements": bad_count,
        "leaf_rise": _first_true(factors > 0, factors),
    }
    for i, kind in enumerate(KINDS[1 : len(norms)], 1):
        fields[f"{kind}_norm"], fields[f"{kind}_threshold"] = norms[i, 0], found.thresholds[i]
    flags = {
        "nan": jnp.isnan(whole),
        "infinity": jnp.isinf(whole),
        "leaf": is_found[2],
        "update": is_found[5],
        "parameter": is_found[0],
        "jump": found.jumped & ~is_found[0],
        "zero": found.dead[0] | is_found[3],
        "drift": is_found[4],
    }
    return fields, flags


def _first_true(conditions: Array, values: Array) -> Array:
    """Return the value of the first true condition, or the last value.

    `jnp.select` would reduce the conditions with one more kernel.
    """
    found = values[-1]
    for i in reversed(range(len(values) - 1)):
        found = jnp.where(conditions[i], values[i], found)
    return found
