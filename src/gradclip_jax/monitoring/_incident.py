"""Incidents: the record of one, which is a sentence when printed, and the log in a state."""

import functools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import check_length
from .._states import increment_where, register_metrics
from .._types import UNBOUNDED, Array, Scalar, Tree
from ..clipping._granularity import Units, leaf_units, measured_shapes
from ._unit_names import name_units

KINDS = ("nan", "infinity", "norm", "loss", "update", "skipped", "held", "clipped", "leaf")
"""What an incident was, and what became of the step; in a state flag i is 2^i."""

OF_GUARDS = {"norm_threshold": "skip_threshold"} | {
    key: key for key in ("loss_threshold", "update_norm", "update_threshold")
}
"""Fields of an incident that a guard may know, and its names of them, also in `metrics`."""

_CODES = {math.inf: UNBOUNDED, None: -UNBOUNDED}
"""What stands for a field that is None or infinite by default."""


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
    leaf_rise: float = 1.0

    def __str__(self) -> str:
        """What happened, as a person would say it."""
        fates = [word for word in ("skipped", "held", "clipped") if word in self.kinds]
        norm = _compared(self.norm, self.norm_threshold)
        parts = [f"step {self.step}: {' and '.join(fates) or 'taken'}, gradient norm {norm}"]
        count, places = self.bad_elements, []
        if count:
            places.append(f"{count} bad element{'s' if count > 1 else ''}")
        if self.leaf and count and self.share == 1:
            places[0] += f" in {self.leaf}"
        elif self.leaf:
            whole = "them" if count else "it"
            places.append(f"{100 * self.share:.0f} % of {whole} in {self.leaf}")
        if "leaf" in self.kinds:
            places.append(f"{_short(self.leaf_rise)} times its usual part")
        if self.second_share >= 0.1:
            places.append(f"{100 * self.second_share:.0f} % in {self.second_leaf}")
        parts += [", ".join(places)] if places else []
        if "update" in self.kinds:
            norm = self.update_norm or math.nan  # that of a skipped step is zero
            text = f"norm {_compared(norm, self.update_threshold)}"
            parts.append("update " + (text if math.isfinite(norm) else "not finite"))
        if self.loss is not None:
            parts.append(f"loss {_compared(self.loss, self.loss_threshold)}")
        return "; ".join(parts)


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
        rows: int32[incidents, fields], the fields of each incident, the last at the end: step and
            kinds, then the bits of a float32 for each of the others, so that a NaN can be kept.
        names: a dict with one key, the names of all units, and no leaf: a checkpoint has no place
            for strings.
    """

    step_count: Scalar
    incident_count: Scalar
    rows: Array
    names: Any

    incident_step = property(lambda log: log.rows[..., -1, 0], doc="-1 before the first.")
    incident_kind = property(lambda log: log.rows[..., -1, 1], doc="A sum of flags.")


def log_maker(size: Any) -> Callable[..., Any]:
    """Makes a log with room for some incidents, of leaves unless told; None for none."""
    if size is None:
        return lambda *_: None
    check_length("incidents", size)

    def make(params: Tree, units: Units | None = None) -> IncidentLog:
        names = name_units(units or leaf_units(measured_shapes(params)), params)
        rows = jnp.zeros((int(size), len(Incident._fields)), jnp.int32).at[:, 0].set(-1)
        step_count, incident_count = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
        return IncidentLog(step_count, incident_count, rows, {"\n".join(names): None})

    return make


def names_in(log: IncidentLog) -> list[str]:
    """The names of the units."""
    (joined,) = log.names
    return joined.split("\n") if joined else []


def note(
    log: IncidentLog, fields: dict[str, Any], is_incident: Scalar | None = None, **fates: Scalar
) -> IncidentLog:
    """The log after a step; unless told, a step with anything wrong is an incident.

    Wrong is what is above its threshold or not finite. It is the update where nothing else is
    wrong, and that is not finite, too large, or the step was skipped. `fates` are flags besides.
    """
    fields = Incident._field_defaults | {k: x for k, x in fields.items() if x is not None}
    fields = {k: x if isinstance(x, jax.Array) else _CODES.get(x, x) for k, x in fields.items()}

    def is_above(key: str, bound: str) -> Array:
        return ~jnp.less_equal(fields[key], fields[bound])

    norm = fields["norm"]
    flags = {
        "nan": jnp.isnan(norm),
        "infinity": jnp.isinf(norm),
        "norm": jnp.isfinite(norm) & is_above("norm", "norm_threshold"),
        "loss": is_above("loss", "loss_threshold"),
        "leaf": fields["leaf_rise"] > 1,
    }
    cause = functools.reduce(jnp.logical_or, flags.values())
    other = is_above("update_norm", "update_threshold") | fates.get("skipped", False)
    flags["update"] = other & ~cause
    is_incident = cause | flags["update"] if is_incident is None else is_incident
    flags |= fates
    kinds = sum(jnp.where(flags.get(kind, False), 1 << i, 0) for i, kind in enumerate(KINDS))
    numbers = jnp.stack([jnp.asarray(fields[name], jnp.float32) for name in Incident._fields[2:]])
    bits = lax.bitcast_convert_type(numbers, jnp.int32)
    row = jnp.concatenate([jnp.stack([log.step_count, kinds]), bits])
    rows = jnp.concatenate([log.rows[1:], row[None]])
    return log._replace(
        step_count=increment_where(log.step_count),
        incident_count=increment_where(log.incident_count, is_incident),
        rows=jnp.where(is_incident, rows, log.rows),
    )


def read_log(log: IncidentLog) -> list[Incident]:
    """The incidents in a log, the oldest first."""
    names, rows = names_in(log), np.asarray(log.rows)
    return [_read(row, names) for row in rows if row[0] >= 0]


def _read(row: Any, names: list[str]) -> Incident:
    values: dict[float, Any] = {code: default for default, code in _CODES.items()}
    numbers = zip(Incident._fields[2:], row.view(np.float32)[2:].tolist(), strict=True)
    fields = {key: values.get(x, x) for key, x in numbers}
    fields |= {key: names[int(fields[key])] if names else "" for key in ("leaf", "second_leaf")}
    fields["bad_elements"] = int(fields["bad_elements"])
    kinds = tuple(kind for i, kind in enumerate(KINDS) if row[1] >> i & 1)
    return Incident(int(row[0]), kinds, **fields)
