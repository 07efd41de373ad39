"""From norm to threshold: what a `max_norm` may be, and how it remembers.

A number, a schedule and a rule fed by history or parameters are all one thing here, a `Rule`.
The published rules fed by history live in `adaptive/`; users write theirs with this class.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._checks import check_number, error_message
from .._states import increment_where
from .._tree_checks import check_same_structure
from .._types import UNBOUNDED, Array, Number, Tree

_HINT = "Pass a positive number, a schedule, or a rule from `gcx.thresholds`; inf never clips."


@dataclasses.dataclass(frozen=True)
class Rule:
    """A threshold that may depend on the norms seen so far and on the parameters.

    A rule works elementwise: its norms are float32 of any shape, one entry for each unit that is
    clipped by itself, shape () for the global norm. Each array of its state has shape () or
    ends in the shape of the norms. A non-finite norm never reaches the state: the entries of
    its unit stay as they were, whatever `update` returns for them.

    Attributes:
        init: zeros of the shape of the norms, to the first state.
        update: `(norm, state, param_norm) -> (threshold, state)`; `norm` is before clipping and
            finite, `param_norm` is None unless `uses_params`. The threshold is in the unit of
            the norm; one that is not positive gives a zero update.
        uses_params: whether `update` needs the norms of the parameters, taken as the gradient's.
        counts_steps: whether the state is a count of all steps and no memory of norms; it then
            goes on at a step whose norm is not finite.
        signed: whether `update` takes values that may be zero or negative, such as losses.

    Examples:
        Twice the largest norm of the last step, and no clipping at first:

        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> def init(norm):
        ...     return jnp.full_like(norm, jnp.inf)
        >>> def update(norm, last, param_norm):
        ...     threshold = 2.0 * last
        ...     return threshold, jnp.minimum(norm, threshold)
        >>> clip = gcx.clip_by_global_norm(gcx.thresholds.Rule(init, update))
    """

    init: Callable[[Array], Any]
    update: Callable[[Array, Any, Array | None], tuple[Array, Any]]
    uses_params: bool = False
    counts_steps: bool = False
    signed: bool = False


def constant(value: Number) -> Rule:
    """The same threshold at every step."""
    return Rule(lambda norm: (), lambda norm, state, param_norm: (jnp.asarray(value), state))


def scheduled(schedule: Callable[[Array], Any]) -> Rule:
    """A threshold that depends on the step count, which the state keeps."""

    def init(norm: Array) -> Array:
        return jnp.zeros((), jnp.int32)

    def update(norm: Array, count: Array, param_norm: Array | None) -> tuple[Array, Array]:
        return jnp.asarray(schedule(count)), increment_where(count)

    return Rule(init, update, counts_steps=True)


def relative_to_params(ratio: Number = 0.01, eps: Number = 1e-3) -> Rule:
    """A threshold of `ratio * max(norm of the parameters, eps)`, unit by unit.

    Args:
        ratio: largest ratio of gradient norm to parameter norm, dimensionless, > 0.
        eps: what a parameter norm counts as at least, > 0: zero parameters must be able to move.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> clip = gcx.clip_by_global_norm(gcx.thresholds.relative_to_params(0.5))
        >>> params, grads = jnp.array([3.0, 4.0]), jnp.array([0.0, 10.0])
        >>> clip.update(grads, clip.init(params), params)[0].tolist()
        [0.0, 2.5]

    References:
        Brock, De, Smith and Simonyan, 2021, arXiv 2102.06171.
    """
    name = "relative_to_params"
    check_number(name, "ratio", ratio, "The paper uses 0.01 for large batches.")
    check_number(name, "eps", eps, "The paper uses 1e-3.")

    def update(norm: Array, state: Any, param_norm: Array | None) -> tuple[Array, Any]:
        assert param_norm is not None  # the clip measures it: `uses_params`
        floor, slope = (jnp.asarray(x).astype(param_norm.dtype) for x in (eps, ratio))
        return jnp.maximum(param_norm, floor) * slope, state

    return Rule(lambda norm: (), update, uses_params=True)


def as_rule(function: str, argument: str, threshold: Any) -> Rule:
    """Whatever a threshold may be, as a rule; refuses what it may not be."""
    if isinstance(threshold, Rule):
        return threshold
    if callable(threshold):
        return scheduled(threshold)
    check_number(function, argument, threshold, _HINT)
    return constant(threshold)


def capped(rule: Rule, max_threshold: Number) -> Rule:
    """The threshold of another rule, but never above a number.

    Args:
        rule: any rule.
        max_threshold: in the unit of the norm, > 0.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> rule = gcx.thresholds.capped(gcx.thresholds.quantile(initial=4.0), 1.0)
        >>> clip = gcx.clip_by_global_norm(rule)
        >>> clip.update(jnp.array([3.0]), clip.init(jnp.zeros(1)))[0].tolist()
        [1.0]
    """
    rule = as_rule("capped", "rule", rule)
    check_number("capped", "max_threshold", max_threshold, "Leave the cap out for none.")

    def update(norm: Array, state: Any, param_norm: Any) -> tuple[Array, Any]:
        threshold, state = rule.update(norm, state, param_norm)
        return jnp.minimum(threshold, max_threshold), state

    return dataclasses.replace(rule, update=update)


def first_state(rule: Rule, shape: Sequence[int] = ()) -> Any:
    """The state before the first norm, each array in a buffer of its own: it may be donated."""
    return jax.tree.map(jnp.array, rule.init(jnp.zeros(shape, jnp.float32)))


def check_params(function: str, updates: Tree, params: Tree | None) -> None:
    """Refuses a step without the parameters that a rule looks at, or with others."""
    if params is None:
        hint = "Pass it: `update(grads, state, params)`."
        raise ValueError(
            error_message(function, "params", "given for this threshold", "None", hint)
        )
    check_same_structure(function, "updates", updates, "params", params)


def apply_rules(
    rules: Sequence[Rule],
    norms: Sequence[Array],
    states: Sequence[Any],
    param_norms: Sequence[Array] | None,
) -> tuple[list[Array], tuple[Any, ...]]:
    """Thresholds of the dtype and shape of the norms, and the next states."""
    thresholds: list[Array] = []
    next_states: list[Any] = []
    for i, (rule, norm, state) in enumerate(zip(rules, norms, states, strict=True)):
        finite = jnp.isfinite(norm)
        # Histories are float32: a larger norm, of float64 leaves, counts as the largest there.
        largest = jnp.asarray(UNBOUNDED, norm.dtype)
        clamped = jnp.where(finite, jnp.clip(norm, -largest, largest), 0).astype(jnp.float32)
        param_norm = (
            param_norms[i].astype(jnp.float32) if rule.uses_params and param_norms else None
        )
        threshold, proposed = rule.update(clamped, state, param_norm)
        threshold = jnp.asarray(threshold).astype(norm.dtype)
        if norm.dtype == jnp.float64:
            threshold = jnp.where(threshold >= largest, jnp.finfo(norm.dtype).max, threshold)
        thresholds.append(jnp.broadcast_to(threshold, norm.shape))
        keeps = jnp.ones_like(finite) if rule.counts_steps else finite & (norm <= largest)
        next_states.append(_where_finite(keeps, proposed, state))
    return thresholds, tuple(next_states)


def _where_finite(finite: Array, proposed: Any, state: Any) -> Any:
    def select(new: Array, old: Array) -> Array:
        per_unit = old.ndim >= finite.ndim and old.shape[old.ndim - finite.ndim :] == finite.shape
        chosen = finite if per_unit else finite.any()
        return jnp.where(chosen, jnp.asarray(new).astype(old.dtype), old)

    return jax.tree.map(select, proposed, state)
