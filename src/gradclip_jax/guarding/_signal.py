"""A signal that a guard watches, the norm or the loss: whether it is a spike, by its rule."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import check_number, describe, error_message
from .._mesh import replica_count, shard_axes, sum_over
from .._run_if import run_if
from .._types import Array, AxisName, Scalar
from ..clipping._rule import Rule, apply_rules, as_rule, constant, first_state
from ..clipping._scale import wide_dtype


class Signal(NamedTuple):
    """Whether a norm or a loss is a spike, beyond which threshold, and what its rule learnt."""

    is_spike: Scalar
    threshold: Scalar
    rule_state: Any


def judge_signal(
    rule: Rule, value: Scalar, state: tuple[Scalar, Any], param_norm: Any, relearn_after: Any
) -> Signal:
    """Holds a value against its rule, which learns anew after `relearn_after` spikes in a row."""
    streak, rule_state = state
    param_norms = [param_norm] if rule.uses_params else None
    # A number or a schedule has no level to learn anew, and keeps its count.
    learns = bool(jax.tree.leaves(rule_state)) and not rule.counts_steps

    def apply(rule_state: Any) -> tuple[Array, Any]:
        (threshold,), (after,) = apply_rules([rule], [value], (rule_state,), param_norms)
        return threshold, after

    threshold, after = apply(rule_state)
    is_spike = ~(value <= threshold)
    if not learns:
        return Signal(is_spike, threshold, after)
    relearns = is_spike & (streak >= relearn_after)

    def relearn(after: Any) -> Any:
        # Not below what the rule has climbed to: a start of 1 never gets to a level of 1e4.
        _, afresh = apply(first_state(rule))
        is_higher = apply(afresh)[0] > apply(after)[0]
        return jax.tree.map(functools.partial(jnp.where, is_higher), afresh, after)

    # A loop would make a GPU wait for the host at every step: there the few numbers are selected.
    after = run_if(relearns, relearn, after, usually=True)
    return Signal(is_spike & ~relearns, threshold, after)


def loss_rule(name: str, loss: Any) -> Rule:
    """A threshold for losses as a rule; a number may be negative."""
    if isinstance(loss, Rule) and loss.uses_params:
        hint = "Pass a number, a schedule, or a rule of spread such as `gcx.thresholds.mean_std()`."
        rule = "a threshold that does not follow the parameters"
        raise ValueError(error_message(name, "loss", rule, "one that does", hint))
    if isinstance(loss, Rule) or callable(loss):
        found = as_rule(name, "loss", loss)
        if not (found.signed or found.counts_steps) and jax.tree.leaves(first_state(found)):
            hint = "Pass `signed=True` to the rule: it would leave out losses that are not > 0."
            rule = "a rule that takes negative values"
            raise ValueError(error_message(name, "loss", rule, "one for norms", hint))
        return found
    hint = "Pass a number, a schedule, or a rule from `gcx.thresholds`."
    check_number(name, "loss", loss, hint, low=-np.inf)
    return constant(loss)


def mean_loss(name: str, value: Any, axis_name: AxisName) -> Scalar:
    """The loss, alike on all devices: the mean of theirs where they differ."""
    if value is None:
        hint = "Pass the loss: `update(grads, state, params, value=loss)`."
        raise ValueError(error_message(name, "value", "given to watch the loss", "None", hint))
    if np.ndim(value) != 0:
        hint = "Pass the mean over the batch."
        raise TypeError(error_message(name, "value", "a scalar", describe(value), hint))
    loss = jnp.asarray(value)
    loss = loss.astype(wide_dtype(loss.dtype))
    axes = shard_axes(loss, axis_name)
    return sum_over(loss / replica_count(frozenset(), axes), axes)
