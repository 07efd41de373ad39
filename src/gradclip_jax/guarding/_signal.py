"""Comparison of norms and losses with the thresholds of a guard."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._errors import value_error
from .._types import Scalar, Tree
from ..clipping._threshold import Rule, Threshold, apply_rule, as_rule, init_state


class Signal(NamedTuple):
    """Result of comparing a norm or a loss with its threshold.

    Attributes:
        is_spike: Whether the value is above the threshold, or NaN.
        is_fixed: Whether the value is above a threshold that a restart does not change, if it is a
            spike.
        threshold: Threshold at this step.
        rule_state: State of the rule after this step.
        restarted: State of the threshold rule after a restart from this value; None for numbers and
            schedules, which do not depend on earlier values.
    """

    is_spike: Scalar
    is_fixed: Scalar
    threshold: Scalar
    rule_state: Tree
    restarted: Tree | None


def compare(rule: Rule, value: Scalar, rule_state: Tree, param_norm: Scalar | None) -> Signal:
    """Compare a value with the threshold that `rule` computes."""
    norm = param_norm if rule.uses_params else None
    threshold, after = apply_rule(rule, value, rule_state, norm)
    restarted, is_fixed = None, jnp.array(True)
    if jax.tree.leaves(rule_state) and not rule.counts_steps:
        _, new = apply_rule(rule, value, init_state(rule), norm)
        # Keep the higher threshold, because a restarted rule may begin far below the current
        # values.
        bound, bound_after = (apply_rule(rule, value, state, norm)[0] for state in (new, after))
        is_higher = (bound > bound_after) | (value <= threshold)
        restarted = optax.tree.where(is_higher, new, after)
        is_fixed = value > (jnp.inf if rule.max_threshold is None else rule.max_threshold)
    return Signal(~(value <= threshold), is_fixed, threshold, after, restarted)


def relearn(
    finite: Scalar, signals: dict[str, Signal], is_due: Scalar
) -> tuple[Scalar, dict[str, Signal]]:
    """Restart all threshold rules if `is_due` is true and no fixed threshold is exceeded.

    Non-finite values do not count as spikes. Return whether the step is good, and the updated
    signals.
    """
    spikes = {key: finite & x.is_spike for key, x in signals.items()}
    restarts = jnp.array(False)
    if any(x.restarted is not None for x in signals.values()):
        is_spike = functools.reduce(jnp.logical_or, spikes.values())
        others = [~(spikes[key] & x.is_fixed) for key, x in signals.items()]
        restarts = functools.reduce(jnp.logical_and, others, is_due & is_spike)
    after: dict[str, Signal] = {}
    for key, signal in signals.items():
        new, old = signal.restarted, signal.rule_state
        if new is not None:
            old = optax.tree.where(restarts, new, old)
        after[key] = signal._replace(is_spike=spikes[key] & ~restarts, rule_state=old)
    is_good = functools.reduce(jnp.logical_and, [~x.is_spike for x in after.values()], finite)
    return is_good, after


def loss_rule(loss: Threshold) -> Rule:
    """Convert a threshold for losses, which may be negative, to a rule."""
    if isinstance(loss, Rule) and loss.uses_params:
        hint = "Pass a number, a schedule, or a rule such as `gcx.thresholds.mean_std()`."
        rule = "a threshold that does not depend on the parameters"
        raise value_error("loss", rule, "a rule that does", hint)
    given = as_rule("loss", loss, low=-math.inf)
    if not (given.allow_negative or given.counts_steps) and jax.tree.leaves(init_state(given)):
        hint = "Pass `allow_negative=True` to the rule."
        raise value_error("loss", "a rule for values of any sign", "a rule for norms", hint)
    return given
