"""Incidents: the record of one, which is a sentence when printed, and the log in a state."""

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from .._checks import check_length
from .._mesh import is_explicit
from .._states import increment_where, register_metrics
from .._types import UNBOUNDED, Array, AxisName, Scalar, Tree
from ._formula import SCALE, magnitude, norm_dtype, norm_of_squares, reduce_axes
from ._granularity import Units, leaf_units, measured_shapes
from ._names import unit_names
from ._norm import norm_of_leaves, totals

KINDS = ("nan", "infinity", "norm", "loss", "update", "skipped", "held", "clipped", "leaf")
"""What an incident was, and what became of the step; in a state flag i is 2^i."""

THRESHOLDS = {
    "norm_threshold": "skip_threshold",
    "loss_threshold": "loss_threshold",
    "update_threshold": "update_threshold",
}
"""The thresholds of an incident, and what a guard calls them in its state and `metrics`."""


class Incident(NamedTuple):
    """What happened at one step; printed it is a sentence.

    Attributes:
        step: calls of what kept the incident before this one: `watch`, a guard or a clip.
        kinds: of "nan", "infinity", "norm", "leaf", "loss", "update" what was wrong, and of
            "skipped", "held", "clipped" what became of the step; none of these: it was taken.
        norm: of the gradient.
        norm_threshold: above which a norm counts as a spike, or was skipped by a guard; inf
            before there is one.
        leaf: the unit with the most bad elements, or else that which rose beside the others, or
            else with the largest share of the squared norm; "" where norms are of the whole tree.
        share: its share of the bad elements, or of the squared norm, 0 to 1.
        second_leaf: the unit with the largest share besides.
        second_share: its share.
        bad_elements: how many elements of the gradient are NaN or infinite.
        loss: None if none was passed.
        loss_threshold: as `norm_threshold`.
        update_norm: the norm of the update; None if it was not measured.
        update_threshold: as `norm_threshold`.
        clip_factor: by what a clip multiplied the gradient; the smallest of several units.
        leaf_rise: of the kind "leaf", its norm over its usual norm, in proportion to the others.

    Examples:
        >>> import gradclip_jax as gcx
        >>> kinds = ("norm", "skipped")
        >>> print(
        ...     gcx.diagnostics.Incident(
        ...         1203, kinds, 3.1e5, 4.2, "h_7/wi", 0.97, "h_7/wo", 0.02, 0, 3.2, 4.0
        ...     )
        ... )
        step 1203: skipped, gradient norm 3.1e5 above 4.2; 97 % of it in h_7/wi; loss 3.2, usual
    """

    step: int
    kinds: tuple[str, ...]
    norm: float
    norm_threshold: float = math.inf
    leaf: str = ""
    share: float = 1.0
    second_leaf: str = ""
    second_share: float = 0.0
    bad_elements: int = 0
    loss: float | None = None
    loss_threshold: float = math.inf
    update_norm: float | None = None
    update_threshold: float = math.inf
    clip_factor: float = 1.0
    leaf_rise: float = 1.0

    def __str__(self) -> str:
        """What happened, as a person would say it."""
        fates = [word for word in ("skipped", "held", "clipped") if word in self.kinds]
        norm = _compared(self.norm, self.norm_threshold)
        parts = [f"step {self.step}: {' and '.join(fates) or 'taken'}, gradient norm {norm}"]
        places = self._places("them" if self.bad_elements else "it")
        if self.bad_elements:
            where = f" in {self.leaf}" if self.share == 1 else f", {places}"
            plural = "s" if self.bad_elements > 1 else ""
            places = f"{self.bad_elements} bad element{plural}" + (where if self.leaf else "")
        parts += [places] if self.leaf or self.bad_elements else []
        if "update" in self.kinds:
            norm = self.update_norm or math.nan  # that of a skipped step is zero
            text = f"norm {_compared(norm, self.update_threshold)}"
            parts.append("update " + (text if math.isfinite(norm) else "not finite"))
        if self.loss is not None:
            parts.append(f"loss {_compared(self.loss, self.loss_threshold)}")
        return "; ".join(parts)

    def _places(self, whole: str) -> str:
        text = f"{100 * self.share:.0f} % of {whole} in {self.leaf}"
        if "leaf" in self.kinds:
            text += f", {_short(self.leaf_rise)} times its usual part"
        if self.second_share >= 0.1:
            text += f", {100 * self.second_share:.0f} % in {self.second_leaf}"
        return text


def _compared(value: float, threshold: float) -> str:
    """A value, and how it stands to its threshold if there is one."""
    is_above = f" above {_short(threshold)}" if value > threshold else ", usual"
    is_known = math.isfinite(value) and threshold < UNBOUNDED
    return _short(value) + (is_above if is_known else "")


def _short(x: float) -> str:
    """Two digits: 3.1e5."""
    return "NaN" if math.isnan(x) else re.sub(r"e\+?(-?)0*", r"e\1", f"{x:.2g}")


@register_metrics("incident_count", "incident_step", "incident_kind")
class IncidentLog(NamedTuple):
    """The last incidents; int32, counters saturating.

    Attributes:
        step_count: int32[], calls so far.
        incident_count: int32[].
        rows: int32[incidents, fields], the fields of each incident, the last at the end; of what is
            no integer the bits of a float32, so that a NaN can be kept.
        names: a dict with one key, the names of all units, and no leaf: a checkpoint has no place
            for strings.
    """

    step_count: Scalar
    incident_count: Scalar
    rows: Array
    names: Any

    incident_step = property(lambda log: log.rows[..., -1, 0], doc="-1 before the first.")
    incident_kind = property(lambda log: log.rows[..., -1, 1], doc="A sum of flags.")


def log_maker(function: str, size: Any) -> Callable[..., Any]:
    """Makes a log with room for some incidents, of leaves unless told; None for none."""
    if size is not None:
        check_length(function, "incidents", size)

    def make(params: Tree, units: Units | None = None) -> IncidentLog | None:
        if size is None:
            return None
        names = unit_names(units or leaf_units(measured_shapes(params)), params)
        rows = jnp.zeros((int(size), len(Incident._fields)), jnp.int32).at[:, 0].set(-1)
        step_count, incident_count = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
        return IncidentLog(step_count, incident_count, rows, {"\n".join(names): None})

    return make


def names_in(log: IncidentLog) -> list[str]:
    """The names of the units."""
    (joined,) = log.names
    return joined.split("\n") if joined else []


def measure_units(
    leaves: Sequence[Array], units: Units, axis_name: AxisName, *, by_rows: bool = False
) -> tuple[Array, Array]:
    """The norms of all leaves and of each unit, and the number of bad elements of each unit.

    As float32 vectors; one zero if there is no unit. By rows they are summed in the kernel of the
    optimizer, in place: XLA (JAX 0.10.2, H100) copied matrices that it summed whole there. Else
    the squares are summed as a clip sums them, which XLA then does once.
    """
    dtype = norm_dtype(leaves)

    def total(terms: Callable[[Array], Array]) -> Array:
        def share_of(x: Array, axes: tuple[int, ...], index: int) -> Array:
            x = terms(x)
            if by_rows and len(axes) > 1 and x.ndim - 1 in axes and x.shape[-1] >= 64:
                x = lax.optimization_barrier(jnp.sum(x, -1, keepdims=True))
            return reduce_axes(jnp.sum, x, axes)

        sums = totals(lax.stop_gradient(list(leaves)), units, axis_name, share_of)
        arrays = [_whole(x).reshape(-1) for x in jax.tree.leaves(sums)]
        vector = jnp.concatenate(arrays or [jnp.zeros(1)])
        # Without the barrier XLA also computes the sum of the vector leaf by leaf: one read more.
        return lax.optimization_barrier(vector if vector.size else jnp.zeros(1))

    def squares(x: Array) -> Array:
        sizes = magnitude(x, dtype)
        return sizes * (sizes * SCALE**2)

    bad = total(lambda x: (~jnp.isfinite(x)).astype(jnp.float32))  # as sums over devices are
    norms = norm_of_squares(total(squares))
    norms = jnp.concatenate([norm_of_leaves([norms], 2.0, None)[None], norms])
    return norms.astype(jnp.float32), bad


def evidence(norms: Array, bad: Array, rises: Any = 0.0) -> dict[str, Any]:
    """What a gradient says, as fields of an incident.

    `rises` are those of the units that rose beside the others, above 1, and else 0.
    """
    total, of_units = norms[0], norms[1:]
    bad_count, is_finite = jnp.sum(bad), jnp.isfinite(total)
    shares = jnp.square(of_units / jnp.where(is_finite & (total > 0), total, 1))
    # Squares may overflow where no element is infinite.
    shares = jnp.where(is_finite, shares, jnp.isinf(of_units).astype(jnp.float32))
    shares = jnp.where(bad_count > 0, bad / jnp.maximum(bad_count, 1), shares)
    rises = jnp.where(is_finite, rises, 0.0)
    first = jnp.argmax(shares + rises)
    is_first = jnp.arange(shares.size) == first
    others = jnp.where(is_first, -1, shares)
    return {
        "norm": total,
        "leaf": first,
        "share": jnp.sum(jnp.where(is_first, shares, 0)),
        "second_leaf": jnp.argmax(others),
        "second_share": jnp.maximum(jnp.max(others), 0),
        "bad_elements": bad_count.astype(jnp.int32),
        "leaf_rise": jnp.maximum(jnp.max(rises), 1),
    }


def _whole(x: Array) -> Array:
    """The same array, whole on each device under explicit axes, where only such can be joined."""
    sharding = jax.typeof(x).sharding
    whole = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.sharding.reshard(x, whole) if is_explicit(sharding) else x


def note(
    log: IncidentLog,
    fields: dict[str, Any],
    refused: Any,
    fates: dict[str, Scalar],
    is_incident: Scalar | None = None,
) -> IncidentLog:
    """The log after a step; unless told, a step with anything wrong is an incident.

    Wrong is what is above its threshold or not finite. It is the update where nothing else is
    wrong, and that is not finite, too large, or `refused`. `fates` are flags besides.
    """
    fields = Incident._field_defaults | {k: x for k, x in fields.items() if x is not None}

    def is_above(key: str, bound: str) -> Any:
        return jnp.array(False) if fields[key] is None else ~(fields[key] <= fields[bound])

    norm = fields["norm"]
    flags = {
        "nan": jnp.isnan(norm),
        "infinity": jnp.isinf(norm),
        "norm": jnp.isfinite(norm) & is_above("norm", "norm_threshold"),
        "loss": is_above("loss", "loss_threshold"),
        "leaf": fields["leaf_rise"] > 1,
    }
    other = is_above("update_norm", "update_threshold") | refused
    flags["update"] = other & ~functools.reduce(jnp.logical_or, flags.values())
    if is_incident is None:
        is_incident = functools.reduce(jnp.logical_or, flags.values())
    flags |= fates
    kinds = sum(jnp.where(flags[kind], 1 << i, 0) for i, kind in enumerate(KINDS) if kind in flags)
    fields |= {"step": log.step_count, "kinds": kinds}
    row = jnp.stack([_bits(fields[name]) for name in Incident._fields])
    rows = jnp.concatenate([log.rows[1:], row[None]])
    return log._replace(
        step_count=increment_where(log.step_count),
        incident_count=increment_where(log.incident_count, is_incident),
        rows=jnp.where(is_incident, rows, log.rows),
    )


def _bits(x: Any) -> Any:
    """The bits of a float32, of the lowest for None; an integer as it is."""
    if x is None or isinstance(x, float):
        return np.float32(-UNBOUNDED if x is None else x).view(np.int32)
    is_integer = jnp.issubdtype(jnp.result_type(x), jnp.integer)
    x = jnp.asarray(x, jnp.int32 if is_integer else jnp.float32)
    return x if is_integer else lax.bitcast_convert_type(x, jnp.int32)


def read_log(log: IncidentLog) -> list[Incident]:
    """The incidents in a log, the oldest first."""
    rows, names = np.asarray(log.rows), names_in(log)
    return [_read(row, names) for row in rows[max(len(rows) - int(log.incident_count), 0) :]]


def _read(row: Any, names: list[str]) -> Incident:
    integers: dict[str, Any] = dict(zip(Incident._fields, row.tolist(), strict=True))
    floats = zip(Incident._fields, row.view(np.float32).tolist(), strict=True)
    fields: dict[str, Any] = {key: math.inf if x >= UNBOUNDED else x for key, x in floats}
    fields |= {key: None for key, x in fields.items() if x == -UNBOUNDED}
    fields |= {key: integers[key] for key in ("step", "bad_elements")}
    fields |= {key: names[integers[key]] if names else "" for key in ("leaf", "second_leaf")}
    flags = enumerate(KINDS)
    fields["kinds"] = tuple(kind for i, kind in flags if integers["kinds"] >> i & 1)
    return Incident(**fields)
