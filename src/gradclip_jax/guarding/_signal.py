"""A signal that a guard watches, the norm or the loss: whether it is a spike, by its rule."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import check_number, describe
from .._devices import shared
from .._errors import type_error, value_error
from .._mesh import replica_count, shard_axes, sum_over
from .._run_if import run_if
from .._types import Array, AxisName, Scalar
from ..clipping._formula import wide_dtype
from ..clipping._threshold import Rule, apply_rule, as_rule, constant, init_state


class Signal(NamedTuple):
    """A norm or a loss, held against the threshold of its rule.

    Attributes:
        is_spike: whether it is above, or not a number.
        threshold: of this step.
        rule_state: what the rule learned from it.
        restart: makes the rule's state if it starts anew with this value; None for a number or a
            schedule, which have no level to learn and keep their count.
    """

    is_spike: Scalar
    threshold: Scalar
    rule_state: Any
    restart: Any


def compare(rule: Rule, value: Scalar, rule_state: Any, param_norm: Any) -> Signal:
    """Holds a value against its rule."""

    def apply(rule_state: Any) -> tuple[Array, Any]:
        return apply_rule(rule, value, rule_state, param_norm if rule.uses_params else None)

    def restart() -> Any:
        # Not below what the rule has climbed to: a start of 1 never gets to a level of 1e4.
        _, new = apply(init_state(rule))
        stacked = jax.tree.map(lambda *states: jnp.stack(states), new, after)
        bounds = jax.vmap(lambda state: apply(state)[0])(stacked)
        starts = (bounds[0] > bounds[1]) | (value <= threshold)
        return jax.tree.map(functools.partial(jnp.where, starts), new, after)

    threshold, after = apply(rule_state)
    learns = bool(jax.tree.leaves(rule_state)) and not rule.counts_steps
    return Signal(~(value <= threshold), threshold, after, restart if learns else None)


def relearn(
    finite: Scalar, signals: dict[str, Signal], is_due: Scalar
) -> tuple[Scalar, Scalar, dict[str, Signal]]:
    """Lets every rule start anew where that is due and makes the step good: it is no spike then.

    What is not finite is no spike. Returns whether the step is good, and whether it is finite, to
    be read beside the signals.
    """
    spikes = {key: finite & x.is_spike for key, x in signals.items()}
    relearns = jnp.array(False)
    if any(x.restart is not None for x in signals.values()):
        relearns = is_due & functools.reduce(jnp.logical_or, spikes.values())
        for key, signal in signals.items():
            if signal.restart is None:
                relearns &= ~spikes[key]
        spikes = {key: spike & ~relearns for key, spike in spikes.items()}
    is_good = functools.reduce(jnp.logical_and, (~spike for spike in spikes.values()), finite)
    is_good, finite, relearns, spikes = shared((is_good, finite, relearns, spikes))

    def restarted(key: str, signal: Signal) -> Signal:
        after = signal.rule_state
        if signal.restart is not None:
            # Selected: a loop would wait for the host at every step.
            after = run_if(relearns, lambda _: signal.restart(), after, usually=True)
        return signal._replace(is_spike=spikes[key], rule_state=after)

    return is_good, finite, {key: restarted(key, x) for key, x in signals.items()}


def loss_rule(loss: Any) -> Rule:
    """A threshold for losses as a rule; a number may be negative."""
    if isinstance(loss, Rule) and loss.uses_params:
        hint = "Pass a number, a schedule, or a rule of spread such as `gcx.thresholds.mean_std()`."
        rule = "a threshold that does not follow the parameters"
        raise value_error("loss", rule, "one that does", hint)
    if isinstance(loss, Rule) or callable(loss):
        given = as_rule("loss", loss)
        if not (given.allow_negative or given.counts_steps) and jax.tree.leaves(init_state(given)):
            hint = "Pass `allow_negative=True` to the rule."
            rule = "a rule that takes negative values"
            raise value_error("loss", rule, "one for norms", hint)
        return given
    hint = "Pass a number, a schedule, or a rule from `gcx.thresholds`."
    check_number("loss", loss, hint, low=-np.inf)
    return constant(loss)


def given_loss(extra_args: dict[str, Any]) -> Any:
    """The loss that `update` was given as `value`, or as `loss`; None without."""
    value, loss = extra_args.get("value"), extra_args.get("loss")
    numbers = (bool, int, float, np.generic, np.ndarray, jax.Array)
    if not isinstance(loss, numbers):  # of another meaning, for what is inside
        loss = None
    if value is not None and loss is not None:
        hint = "Both are the loss: pass it once, as `value`."
        raise type_error("loss", "left out beside `value`", "both", hint)
    for leaf in jax.tree.leaves(value):
        if not isinstance(leaf, numbers):
            rule, hint = "a number or an array", "Pass the loss: `value=loss`."
            raise type_error("value", rule, describe(leaf), hint)
    return loss if value is None else value


def loss_of(extra_args: dict[str, Any], axis_name: AxisName) -> Scalar | None:
    """The loss of a call, alike on all devices: the mean of theirs where they differ."""
    value = given_loss(extra_args)
    if value is None:
        return None
    if np.ndim(value) != 0:
        hint = "Pass the mean over the batch."
        raise type_error("value", "a scalar", describe(value), hint)
    loss = jnp.asarray(value)
    if jnp.iscomplexobj(loss):
        raise type_error("value", "real", describe(value), "Pass the real part of the loss.")
    is_float = jnp.issubdtype(loss.dtype, jnp.floating)
    loss = loss.astype(wide_dtype(loss.dtype) if is_float else jnp.float32)
    axes = shard_axes(loss, axis_name)
    return sum_over(loss / replica_count(frozenset(), axes), axes)
