"""What `watch` measures at a step, and whether it is an incident: small arrays, no branch."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from .._mesh import is_explicit
from .._states import increment_where
from .._types import UNBOUNDED, Array, AxisName, Number, Scalar
from ..adaptive._mean_std import mean_std
from ..clipping._formula import reduce_axes
from ..clipping._granularity import Norms, Units
from ..clipping._norm import norm_of_leaves, totals, unit_norms
from ..clipping._threshold import Rule, apply_rule
from ..guarding._signal import mean_loss
from ._incident import Kind, as_row
from ._metrics import metrics


def joined_norms(leaves: list[Array], units: Units, size: int, axis_name: AxisName) -> Array:
    """The norm of all leaves, then, if there is room, of each unit, in one array of a size."""
    flat = _joined(unit_norms(leaves, units, 2.0, axis_name))
    total = norm_of_leaves([flat], 2.0, None)[None]
    return jnp.concatenate([total, flat])[:size].astype(jnp.float32)


def bad_elements(leaves: list[Array], units: Units, axis_name: AxisName) -> Array:
    """How many elements of each unit are not finite: float32, as sums over devices are."""

    def count(x: Array, axes: tuple[int, ...], index: int) -> Array:
        return reduce_axes(jnp.sum, (~jnp.isfinite(x)).astype(jnp.float32), axes)

    return _joined(totals(leaves, units, axis_name, count)).astype(jnp.float32)


def _joined(norms: Norms) -> Array:
    """The entries of all units as a vector; one zero if there is none."""
    arrays = [_whole(x).reshape(-1) for x in jax.tree.leaves(norms)]
    vector = jnp.concatenate(arrays or [jnp.zeros(1)])
    return vector if vector.size else jnp.zeros(1)


def _whole(x: Array) -> Array:
    """The same array, whole on each device under explicit axes, where only such can be joined."""
    sharding = jax.typeof(x).sharding
    whole = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.sharding.reshard(x, whole) if is_explicit(sharding) else x


def loss_of(extra_args: dict[str, Any], axis_name: AxisName) -> Scalar | None:
    """The loss of a call, alike on all devices; None if it was not passed."""
    loss = extra_args.get("value", extra_args.get("loss"))
    return None if loss is None else mean_loss("watch", loss, axis_name).astype(jnp.float32)


def was_skipped(before: Any, after: Any) -> Scalar:
    """Whether a guard in a state skipped the last call."""
    past, now = metrics(before), metrics(after)
    streaks = [key for key in now if key.startswith("consecutive_skips")]
    skips = [now[key] > past[key] for key in streaks]
    return functools.reduce(jnp.logical_or, skips, jnp.array(False))


def observe(
    state: Any, norms: dict[str, Array], bad: Array, loss: Any, skipped: Scalar, spike: Any
) -> Any:
    """The `WatchState` after a step with these norms; an incident takes the place of the oldest."""
    total = norms["gradient"][0]
    found = metrics(state.inner_state)
    values = {"norm": total, "log_norm": jnp.log(total), "loss": loss}
    bounds, levels = _spike_bounds(values, state.levels, spike)
    # Norms of small batches have a long tail, and look like a normal distribution in logarithms.
    bounds["norm"] = jnp.maximum(bounds["norm"], jnp.exp(jnp.minimum(bounds["log_norm"], 88)))
    # A guard inside may have thresholds of its own.
    bounds = {
        key: jnp.where(skipped, found.get(name, bounds[key]), bounds[key])
        for key, name in (("norm", "skip_threshold"), ("loss", "loss_threshold"))
    }
    clip_factor = jnp.asarray(found.get("clip_factor", 1), jnp.float32)
    is_finite, stepped = jnp.isfinite(total), state.step_taken > 0
    flags = {
        Kind.NAN: jnp.isnan(total),
        Kind.INFINITY: jnp.isinf(total),
        Kind.NORM: is_finite & (total > bounds["norm"]),
        Kind.LOSS: jnp.array(False) if loss is None else ~(loss <= bounds["loss"]),
        Kind.UPDATE: is_finite & ~jnp.isfinite(norms["update"][0] if "update" in norms else total),
        Kind.SKIPPED: skipped,
    }
    is_incident = functools.reduce(jnp.logical_or, flags.values())
    flags |= {Kind.HELD: ~skipped & ~stepped, Kind.CLIPPED: stepped & (clip_factor < 1)}
    kind = sum(flag.astype(jnp.int32) * int(name) for name, flag in flags.items())
    columns: dict[str, Any] = {
        "step": state.watch_step - 1,
        "kind": kind,
        "bad_elements": jnp.sum(bad).astype(jnp.int32),
        "norm": total,
        "norm_threshold": bounds["norm"],
        "loss": jnp.float32(jnp.nan) if loss is None else loss,
        "loss_threshold": bounds["loss"],
        "clip_factor": clip_factor,
        **_largest_two(norms["gradient"], bad),
    }
    place = state.incident_count % len(state.incident_rows)
    row = jnp.where(is_incident, as_row(columns), state.incident_rows[place])
    return state._replace(
        norms=norms,
        largest_share=columns["share"],
        largest_share_index=columns["worst"],
        incident_count=increment_where(state.incident_count, is_incident),
        incident_step=jnp.where(is_incident, columns["step"], state.incident_step),
        incident_kind=jnp.where(is_incident, columns["kind"], state.incident_kind),
        incident_rows=state.incident_rows.at[place].set(row),
        levels=levels,
    )


def level_rules(spike: Number) -> dict[str, Rule]:
    """What a norm and a loss are compared with: their last 128 values."""
    signed = mean_std(spike, signed=True)
    return {"norm": mean_std(spike), "log_norm": signed, "loss": signed}


def _spike_bounds(
    values: dict[str, Any], levels: dict[str, Any], spike: Any
) -> tuple[dict[str, Scalar], dict[str, Any]]:
    """The thresholds of spikes, and the levels brought up to date.

    A spike enters its level as the threshold: so it hides no other, and a rise for good is learned.
    """
    bounds = {key: jnp.asarray(UNBOUNDED, jnp.float32) for key in values}
    after = dict(levels)
    for key, rule in level_rules(spike).items():
        value = values[key]
        if value is not None:
            bounds[key], _ = apply_rule(rule, value, levels[key])
            _, after[key] = apply_rule(rule, jnp.minimum(value, bounds[key]), levels[key])
    return bounds, after


def _largest_two(norms: Array, bad: Array) -> dict[str, Scalar]:
    """The units that a gradient comes from, each with its share.

    Of the bad elements if there are any, of the infinite norms if squares have overflowed, else of
    the squared norm.
    """
    total, units = norms[0], norms[1:] if norms.size > 1 else norms
    is_finite = jnp.isfinite(total)
    squares = jnp.square(units / jnp.where(is_finite & (total > 0), total, 1))
    squares = jnp.where(is_finite, squares, jnp.isinf(units).astype(jnp.float32))
    bad_count = jnp.sum(bad)
    shares = jnp.where(bad_count > 0, bad / jnp.maximum(bad_count, 1), squares)
    worst = jnp.argmax(shares).astype(jnp.int32)
    others = jnp.where(jnp.arange(shares.size) == worst, -1, shares)
    return {
        "worst": worst,
        "share": jnp.max(shares),
        "second": jnp.argmax(others).astype(jnp.int32),
        "second_share": jnp.maximum(jnp.max(others), 0),
    }
