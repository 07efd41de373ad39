"""Incidents: what a step is measured for, and the log of the last ones in a state."""

import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from .._mesh import is_explicit
from .._states import increment_where, register_metrics
from .._types import Array, AxisName, Scalar, Tree
from ._formula import SCALE, magnitude, norm_dtype, norm_of_squares, reduce_axes
from ._granularity import Units
from ._names import unit_names
from ._norm import norm_of_leaves, totals


class Kind(enum.IntFlag):
    """What an incident was, and what became of the step; a sum of these."""

    NAN = 1
    INFINITY = 2
    NORM = 4
    LOSS = 8
    UPDATE = 16
    SKIPPED = 32
    HELD = 64
    CLIPPED = 128


@register_metrics("incident_count", "incident_step", "incident_kind")
class IncidentLog(NamedTuple):
    """The last incidents; int32, counters saturating.

    Attributes:
        step_count: int32[], calls so far.
        incident_count: int32[].
        incident_step: int32[], the step of the last incident, counted from 0; -1 before the first.
        incident_kind: int32[], its kind, a sum of the flags of `incidents`.
        rows: int32[incidents, columns], a ring buffer; `incidents` reads it.
        names: a dict with one key, the names of all units, and no leaf: a checkpoint has no place
            for strings.
    """

    step_count: Scalar
    incident_count: Scalar
    incident_step: Scalar
    incident_kind: Scalar
    rows: Array
    names: Any


class Evidence(NamedTuple):
    """What the gradient of a step says: its norm, and the two units that it comes from."""

    norm: Scalar
    worst: Scalar
    share: Scalar
    second: Scalar
    second_share: Scalar
    bad_elements: Scalar


COLUMNS = (
    *("step", "kind", "worst", "second", "bad_elements"),
    *("norm", "norm_threshold", "share", "second_share", "loss", "loss_threshold"),
    *("update_norm", "update_threshold", "clip_factor"),
)
"""The columns of a row, int32; from `norm` on the bits of a float32, so that a NaN can be kept."""


THRESHOLDS = ("skip_threshold", "loss_threshold", "update_threshold")
"""What a guard calls its bounds of norm, loss and update, in its state and `metrics`."""


def empty_log(size: Any, units: Units, params: Tree) -> IncidentLog:
    """A log with room for some incidents."""
    rows = jnp.zeros((int(size), len(COLUMNS)), jnp.int32)
    return IncidentLog(
        step_count=jnp.zeros((), jnp.int32),
        incident_count=jnp.zeros((), jnp.int32),
        incident_step=jnp.full((), -1, jnp.int32),
        incident_kind=jnp.zeros((), jnp.int32),
        rows=rows,
        names={"\n".join(unit_names(units, params)): None},
    )


def names_in(log: IncidentLog) -> list[str]:
    """The names of the units."""
    (joined,) = log.names
    return joined.split("\n") if joined else []


def norms_by_unit(leaves: Sequence[Array], units: Units, axis_name: AxisName) -> Array:
    """The norm of all leaves, then of each unit, as a float32 vector."""
    dtype = norm_dtype(leaves)

    def squares(x: Array) -> Array:
        sizes = magnitude(x, dtype)
        return sizes * (sizes * SCALE**2)

    norms = norm_of_squares(_sums_by_unit(squares, leaves, units, axis_name))
    return jnp.concatenate([norm_of_leaves([norms], 2.0, None)[None], norms]).astype(jnp.float32)


def gather(leaves: Sequence[Array], units: Units, axis_name: AxisName) -> tuple[Array, Evidence]:
    """The norms of a gradient, as `norms_by_unit`, and what they say."""

    def is_bad(x: Array) -> Array:
        return (~jnp.isfinite(x)).astype(jnp.float32)  # float32, as sums over devices are

    norms = norms_by_unit(leaves, units, axis_name)
    bad = _sums_by_unit(is_bad, leaves, units, axis_name)
    total, bad_count = norms[0], jnp.sum(bad)
    is_finite = jnp.isfinite(total)
    shares = jnp.square(norms[1:] / jnp.where(is_finite & (total > 0), total, 1))
    # Squares may overflow where no element is infinite.
    shares = jnp.where(is_finite, shares, jnp.isinf(norms[1:]).astype(jnp.float32))
    shares = jnp.where(bad_count > 0, bad / jnp.maximum(bad_count, 1), shares)
    worst = jnp.argmax(shares).astype(jnp.int32)
    others = jnp.where(jnp.arange(shares.size) == worst, -1, shares)
    second, second_share = jnp.argmax(others).astype(jnp.int32), jnp.maximum(jnp.max(others), 0)
    count = bad_count.astype(jnp.int32)
    return norms, Evidence(total, worst, jnp.max(shares), second, second_share, count)


def _sums_by_unit(
    terms: Callable[[Array], Array], leaves: Sequence[Array], units: Units, axis_name: AxisName
) -> Array:
    """The sum of some terms over each unit, as a vector; one zero if there is no unit."""

    def share_of(x: Array, axes: tuple[int, ...], index: int) -> Array:
        x = terms(x)
        # Rows first: a GPU sums them in the kernel of the optimizer, in place. XLA (JAX 0.10.2,
        # H100) copied matrices that it summed whole there: 1.2 N more for a GPT in scan.
        if len(axes) > 1 and x.ndim - 1 in axes and x.shape[-1] >= _LONG_ROW:
            x = lax.optimization_barrier(jnp.sum(x, -1, keepdims=True))
        return reduce_axes(jnp.sum, x, axes)

    sums = totals(lax.stop_gradient(list(leaves)), units, axis_name, share_of)
    arrays = [_whole(x).reshape(-1) for x in jax.tree.leaves(sums)]
    vector = jnp.concatenate(arrays or [jnp.zeros(1)])
    # Without the barrier XLA also computes the sum of the vector leaf by leaf: one read more.
    return lax.optimization_barrier(vector if vector.size else jnp.zeros(1))


_LONG_ROW = 64


def _whole(x: Array) -> Array:
    """The same array, whole on each device under explicit axes, where only such can be joined."""
    sharding = jax.typeof(x).sharding
    whole = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.sharding.reshard(x, whole) if is_explicit(sharding) else x


def causes(values: Sequence[Any], bounds: Sequence[Any], refused: Scalar) -> dict[Kind, Scalar]:
    """What was wrong: of gradient norm, loss and update norm, by the threshold of each.

    It is the update where nothing else is wrong, and that is not finite, too large, or refused.
    """
    norm = values[0]
    above = [
        jnp.array(False) if x is None else ~(x <= y) for x, y in zip(values, bounds, strict=True)
    ]
    flags = {
        Kind.NAN: jnp.isnan(norm),
        Kind.INFINITY: jnp.isinf(norm),
        Kind.NORM: jnp.isfinite(norm) & above[0],
        Kind.LOSS: above[1],
    }
    return flags | {Kind.UPDATE: (above[2] | refused) & ~any_of(flags)}


def any_of(flags: dict[Kind, Scalar]) -> Scalar:
    """Whether one of them is True."""
    return functools.reduce(jnp.logical_or, flags.values())


def _bits(x: Any) -> Array:
    """The bits of a float32; those of a NaN, which `jax_debug_nans` would report, for None."""
    if x is None:
        return jnp.int32(np.float32(np.nan).view(np.int32))
    return lax.bitcast_convert_type(jnp.asarray(x, jnp.float32), jnp.int32)


def note(
    log: IncidentLog,
    is_incident: Scalar,
    flags: dict[Kind, Scalar],
    evidence: Evidence,
    bounds: Sequence[Any],
    loss: Any = None,
    update_norm: Any = None,
    clip_factor: Any = 1,
) -> IncidentLog:
    """The log after a step; an incident takes the place of the oldest."""
    kind = sum(flag.astype(jnp.int32) * int(name) for name, flag in flags.items())
    values: dict[str, Any] = {"step": log.step_count, "kind": kind, **evidence._asdict()}
    names = ("norm_threshold", "loss_threshold", "update_threshold", "loss", "update_norm")
    numbers = (*bounds, loss, update_norm)
    values |= dict(zip(names, numbers, strict=True)) | {"clip_factor": clip_factor}
    first_float = COLUMNS.index("norm")
    integers = [values[name] for name in COLUMNS[:first_float]]
    row = jnp.stack([*integers, *(_bits(values[name]) for name in COLUMNS[first_float:])])
    place = log.incident_count % len(log.rows)
    return log._replace(
        step_count=increment_where(log.step_count),
        incident_count=increment_where(log.incident_count, is_incident),
        incident_step=jnp.where(is_incident, log.step_count, log.incident_step),
        incident_kind=jnp.where(is_incident, kind, log.incident_kind),
        rows=log.rows.at[place].set(jnp.where(is_incident, row, log.rows[place])),
    )
