"""What `watch` measures at a step, and whether it is an incident: small arrays, no branch."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from .._types import UNBOUNDED, Array, AxisName, Number, Scalar
from ..adaptive._window_rules import mean_std
from ..clipping._incident import THRESHOLDS, Evidence, Kind, any_of, causes, note
from ..clipping._threshold import Rule, apply_rule
from ..guarding._signal import mean_loss
from ._metrics import metrics


def loss_of(extra_args: dict[str, Any], axis_name: AxisName) -> Scalar | None:
    """The loss of a call, alike on all devices; None if it was not passed."""
    loss = extra_args.get("value", extra_args.get("loss"))
    return None if loss is None else mean_loss("watch", loss, axis_name).astype(jnp.float32)


def was_skipped(before: Any, after: Any) -> Scalar:
    """Whether a guard in a state skipped the last call."""
    past, present = metrics(before), metrics(after)
    streaks = [key for key in present if key.startswith("consecutive_skips")]
    skips = [present[key] > past[key] for key in streaks]
    return functools.reduce(jnp.logical_or, skips, jnp.array(False))


def observe(
    state: Any,
    norms: dict[str, Array],
    evidence: Evidence,
    loss: Any,
    skipped: Scalar,
    spike: Any,
) -> Any:
    """The `WatchState` after a step with these norms; an incident takes the place of the oldest."""
    total, of_inner = evidence.norm, metrics(state.inner_state)
    values = {"norm": total, "log_norm": total, "loss": loss, "log_loss": loss}
    bounds, levels = _spike_bounds(values, state.levels, spike)
    for key in ("norm", "loss"):
        # Those of small batches have a long tail, and look normally distributed in logarithms. A
        # loss may also be negative: then there is no level of its logarithm.
        of_log = bounds[f"log_{key}"]
        higher = jnp.maximum(bounds[key], jnp.exp(jnp.minimum(of_log, 88)))
        bounds[key] = jnp.where(of_log < UNBOUNDED, higher, bounds[key])
    bounds["update"] = jnp.asarray(UNBOUNDED, jnp.float32)
    # A guard inside may have thresholds of its own.
    limits = [
        jnp.where(skipped, of_inner.get(name, bounds[key]), bounds[key])
        for key, name in zip(("norm", "loss", "update"), THRESHOLDS, strict=True)
    ]
    update_norm = None
    if "update" in norms:  # that of a skipped step is zero; a guard may have measured it before
        update_norm = norms["update"][0]
        update_norm = jnp.where(skipped, of_inner.get("update_norm", update_norm), update_norm)
    clip_factor = jnp.asarray(of_inner.get("clip_factor", 1), jnp.float32)
    flags = causes((total, loss, update_norm), limits, skipped)
    is_incident, stepped = any_of(flags), state.step_taken > 0
    flags |= {Kind.SKIPPED: skipped, Kind.HELD: ~skipped & ~stepped}
    flags[Kind.CLIPPED] = stepped & (clip_factor < 1)
    measured = (loss, update_norm, clip_factor)
    log = note(state.incidents, is_incident, flags, evidence, limits, *measured)
    return state._replace(
        norms=norms,
        largest_share=evidence.share,
        largest_share_index=evidence.worst,
        levels=levels,
        incidents=log,
    )


def level_rules(spike: Number) -> dict[str, Rule]:
    """What a norm and a loss are compared with: their last 128 values."""
    signed = mean_std(spike, signed=True)
    return {"norm": mean_std(spike), "log_norm": signed, "loss": signed, "log_loss": signed}


def _spike_bounds(
    values: dict[str, Any], levels: dict[str, Any], spike: Any
) -> tuple[dict[str, Scalar], dict[str, Any]]:
    """The thresholds of spikes, and the levels brought up to date.

    A spike enters its level as the threshold: so it hides no other, and a rise for good is learned.
    """
    bounds = {key: jnp.asarray(UNBOUNDED, jnp.float32) for key in values}
    after = dict(levels)
    for key, rule in level_rules(spike).items():
        value, is_recorded = values[key], jnp.array(True)
        if value is None:
            continue
        if key.startswith("log_"):  # of a number that has one
            is_recorded = value > 0
            value = jnp.log(jnp.where(is_recorded, value, 1))
        bounds[key], _ = apply_rule(rule, value, levels[key])
        _, level = apply_rule(rule, jnp.minimum(value, bounds[key]), levels[key])
        choose = functools.partial(jnp.where, is_recorded)
        after[key] = jax.tree.map(choose, level, levels[key])
    return bounds, after
