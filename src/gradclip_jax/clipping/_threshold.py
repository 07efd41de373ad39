"""Thresholds: numbers, schedules, and rules that depend on earlier norms or on the parameters.

The published rules are in `adaptive/`. Users can define their own rules with the class `Rule`.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import (
    check_number,
    describe,
    dtype_of,
    is_scalar,
    shortened,
)
from .._devices import map_arrays
from .._errors import public, type_error, value_error
from .._states import increment_where
from .._types import UNBOUNDED, Array, Number, Schedule, Tree
from ._norm import Norms, Units, split

_HINT = "Pass a number, a schedule, or a rule from `gcx.thresholds`."


@dataclasses.dataclass(frozen=True)
class Rule:
    """A threshold that may depend on earlier norms and on the norms of the parameters.

    A rule is elementwise. Norms are float32 arrays of any shape; the global norm has shape (). Each
    array of the state has shape () or a shape that ends with the shape of the norms. The state is
    not updated where a norm is non-finite.

    Attributes:
        init: Function `zeros -> state` that returns the initial state; `zeros` has the shape of the
            norms.
        update: Function `(norm, state, param_norm) -> (threshold, state)`. `norm` is the finite
            norm before clipping; `param_norm` is None unless `uses_params`. The threshold has the
            unit of the norm. A threshold <= 0 results in a zero update.
        uses_params: Whether `update` needs the norms of the parameters.
        counts_steps: Whether the state counts steps, including steps with a non-finite norm.
        allow_negative: Whether `update` supports values that may be zero or negative, such as
            losses.
        max_threshold: Upper bound of the threshold, or None. A guard that restarts the rule does
            not apply a step above this bound.

    Examples:
        Clip to twice the norm of the last step:

        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> def init(norm):
        ...     return jnp.full_like(norm, jnp.inf)
        >>> def update(norm, last, param_norm):
        ...     threshold = 2.0 * last
        ...     return threshold, jnp.minimum(norm, threshold)
        >>> clip = gcx.clip_by_global_norm(gcx.thresholds.Rule(init, update))
    """

    init: Callable[[Array], Tree]
    update: Callable[[Array, Tree, Array | None], tuple[Array, Tree]]
    uses_params: bool = False
    counts_steps: bool = False
    allow_negative: bool = False
    # A rule is a static argument, and a traced number has no hash.
    max_threshold: Number | None = dataclasses.field(default=None, compare=False)


Threshold: TypeAlias = Number | Schedule | Rule
"""A number > 0, a traced scalar, a schedule, or a rule from `gcx.thresholds`."""


def scheduled(argument: str, schedule: Schedule) -> Rule:
    """Return a rule for a schedule; its state is the step count."""

    def init(norm: Array) -> Array:
        return jnp.zeros((), jnp.int32)

    def update(norm: Array, count: Array, param_norm: Array | None) -> tuple[Array, Array]:
        value = schedule(count)
        dtype = dtype_of(value)
        is_real = jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
        if np.ndim(value) or not is_real:
            rule, hint = "a schedule that returns a real scalar", "Return one number per step."
            raise type_error(argument, rule, describe(value), hint)
        return jnp.asarray(value), increment_where(count)

    return Rule(init, update, counts_steps=True)


@public
def relative_to_params(ratio: Number = 0.01, eps: Number = 1e-3) -> Rule:
    """Set each threshold to `ratio * max(norm of the parameters, eps)`.

    Args:
        ratio: Maximum ratio of gradient norm to parameter norm; a positive number.
        eps: Lower bound of the parameter norm, > 0, which allows updates of zero parameters.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> clip = gcx.clip_by_global_norm(gcx.thresholds.relative_to_params(0.5))
        >>> params, grads = jnp.array([3.0, 4.0]), jnp.array([0.0, 10.0])
        >>> clip.update(grads, clip.init(params), params)[0].tolist()
        [0.0, 2.5]

    References:
        Brock, De, Smith and Simonyan, 2021, arXiv 2102.06171.
    """
    check_number("ratio", ratio, "The paper uses 0.01 for large batches.")
    check_number("eps", eps, "The paper uses 1e-3.")

    def update(norm: Array, state: Tree, param_norm: Array | None) -> tuple[Array, Tree]:
        assert param_norm is not None  # because of `uses_params`
        dtype = param_norm.dtype
        floor = jnp.asarray(eps, dtype)
        return jnp.maximum(param_norm, floor) * jnp.asarray(ratio, dtype), state

    return Rule(lambda norm: (), update, uses_params=True)


def as_rule(argument: str, threshold: Threshold, *, low: float = 0.0) -> Rule:
    """Convert a number above `low` or a schedule to a rule; return a rule unchanged."""
    if isinstance(threshold, Rule):
        return threshold
    if inspect.isfunction(threshold) and threshold.__annotations__.get("return") is Rule:
        rule, hint = "a number, a schedule or a rule", f"Pass `{threshold.__name__}()`."
        raise type_error(argument, rule, shortened(threshold), hint)
    if callable(threshold) and not isinstance(threshold, type):
        return scheduled(argument, threshold)
    if not is_scalar(threshold, jnp.floating, jnp.integer):
        rule, hint = "a number, a schedule or a rule", _HINT
        if isinstance(threshold, (Mapping, list, tuple)):
            hint = "Use `clip_by_group_norm` for several thresholds."
        raise type_error(argument, rule, shortened(threshold), hint)
    check_number(argument, threshold, _HINT, low=low)
    # An int above 2^31 is not an int32.
    value = float(threshold) if isinstance(threshold, int) else threshold
    return Rule(lambda norm: (), lambda norm, state, param_norm: (jnp.asarray(value), state))


@public
def capped(rule: Rule, max_threshold: Number) -> Rule:
    """Limit the threshold of another rule to an upper bound.

    Args:
        rule: Threshold rule.
        max_threshold: Upper bound in the units of the norm; a positive number.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> rule = gcx.thresholds.capped(gcx.thresholds.quantile(initial=4.0), 1.0)
        >>> clip = gcx.clip_by_global_norm(rule)
        >>> clip.update(jnp.array([3.0]), clip.init(jnp.zeros(1)))[0].tolist()
        [1.0]
    """
    rule = as_rule("rule", rule)
    check_number("max_threshold", max_threshold, "Use the rule without `capped` for no bound.")

    def update(norm: Array, state: Tree, param_norm: Array | None) -> tuple[Array, Tree]:
        threshold, state = rule.update(norm, state, param_norm)
        return jnp.minimum(threshold, jnp.asarray(max_threshold, threshold.dtype)), state

    return dataclasses.replace(rule, update=update, max_threshold=max_threshold)


def init_state(rule: Rule, shape: Sequence[int] = ()) -> Tree:
    """Return the initial state, in which each array has its own buffer and can be donated."""
    return jax.tree.map(jnp.array, rule.init(jnp.zeros(shape, jnp.float32)))


def apply_rule(
    rule: Rule, norm: Array, state: Tree, param_norm: Array | None = None
) -> tuple[Array, Tree]:
    """Compute thresholds with the dtype and shape of the norms, and the next state."""
    finite = keeps = jnp.isfinite(norm)
    value, largest, is_wide = norm, jnp.asarray(UNBOUNDED, norm.dtype), norm.dtype == jnp.float64
    if is_wide:
        # States are float32, so larger norms are limited to the largest float32.
        value, keeps = jnp.clip(norm, -largest, largest), finite & (norm <= largest)
    value = jnp.where(finite, value, 0).astype(jnp.float32)
    param_norm = None if param_norm is None else param_norm.astype(jnp.float32)
    threshold, proposed = rule.update(value, state, param_norm)
    threshold = jnp.asarray(threshold).astype(norm.dtype)
    if is_wide:
        threshold = jnp.where(threshold >= largest, jnp.finfo(norm.dtype).max, threshold)
    keeps = jnp.ones_like(finite) if rule.counts_steps else keeps

    def select(new: Array, old: Array) -> Array:
        per_unit = old.ndim >= norm.ndim and old.shape[old.ndim - norm.ndim :] == norm.shape
        chosen = keeps if per_unit else keeps.any()
        return jnp.where(chosen, jnp.asarray(new).astype(old.dtype), old)

    return jnp.broadcast_to(threshold, norm.shape), jax.tree.map(select, proposed, state)


class Assignment(NamedTuple):
    """A threshold rule, and the indices of the norms that it applies to."""

    rule: Rule
    entries: tuple[int, ...]


def as_rules(
    argument: str, threshold: Threshold | Mapping[Any, Threshold], *, by_label: bool
) -> Rule | dict[Any, Rule]:
    """Convert a threshold, or each threshold in a mapping from label to threshold, to a rule."""
    if by_label and isinstance(threshold, Mapping):
        _check_labels(argument, threshold)
        return {key: as_rule(f"{argument}[{key!r}]", x) for key, x in threshold.items()}
    return as_rule(argument, threshold)


def _check_labels(argument: str, thresholds: Mapping[Hashable, Threshold]) -> None:
    """Raise if a label or the name of a group in the metrics is not unique."""
    labels = [x for key in thresholds for x in (key if isinstance(key, tuple) else (key,))]
    for names in (list(map(str, labels)), list(map(group_name, thresholds))):
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            hint = "Labels that print alike, such as 1 and '1', count as equal. Rename one of them."
            rule = "a mapping in which each label occurs once"
            raise value_error(argument, rule, f"the label {twice!r} twice", hint)


def group_name(key: Hashable) -> str:
    """The name of a group in the metrics."""
    return "+".join(map(str, key)) if isinstance(key, tuple) else str(key)


def assign_rules(rules: Rule | dict[Any, Rule], units: Units) -> tuple[Assignment, ...]:
    """Assign one rule to all norms, or the rule of each label to the norm of its group."""
    if isinstance(rules, Rule):
        return (Assignment(rules, tuple(range(units.size))),)
    return tuple(Assignment(rules[name], (i,)) for i, name in enumerate(units.names))


def init_states(assigned: Sequence[Assignment], shapes: Sequence[tuple[int, ...]]) -> Tree:
    """Return the initial states of all rules; () if no rule has a state."""
    states: list[Tree] = []
    for rule, entries in assigned:
        own = [shapes[i] for i in entries]
        states.append(init_state(rule, () if own == [()] else (sum(map(math.prod, own)),)))
    return tuple(states) if jax.tree.leaves(states) else ()


def apply_rules(
    assigned: Sequence[Assignment], norms: Norms, states: Tree, param_norms: Norms | None
) -> tuple[Norms, Tree]:
    """Return thresholds and next states; a rule with a state receives its norms as one vector."""
    thresholds = list(norms)
    next_states: list[Tree] = []
    for (rule, entries), state in zip(assigned, states or [()] * len(assigned), strict=True):
        used = (norms, param_norms) if rule.uses_params and param_norms else (norms,)
        columns = [[x[i] for i in entries] for x in used]
        if jax.tree.leaves(state):
            own, *of_params = map(_as_vector, columns)
            vector, state = apply_rule(rule, own, state, *of_params)
            values = split(vector, columns[0])
        else:
            values = map_arrays(functools.partial(apply_stateless, rule), *columns)
        for i, value in zip(entries, values, strict=True):
            thresholds[i] = value
        next_states.append(state)
    return thresholds, tuple(next_states) if states else ()


@functools.partial(jax.jit, static_argnums=0)
def apply_stateless(rule: Rule, norm: Array, param_norm: Array | None = None) -> Array:
    """Compute thresholds with a rule that has no state."""
    return apply_rule(rule, norm, (), param_norm)[0]


def _as_vector(norms: Norms) -> Array:
    """Concatenate norms to one vector; return a single scalar unchanged."""
    if len(norms) == 1 and not norms[0].ndim:
        return norms[0]
    return jnp.concatenate([x.reshape(-1) for x in norms] or [jnp.zeros(0)])
