"""Thresholds: a number, a schedule, or a rule that depends on earlier norms or on the parameters.

The published rules are in `adaptive/`; users write their own with the class `Rule`.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import check_number, describe, dtype_of, leaf_path, shortened
from .._devices import map_arrays
from .._errors import public, type_error, value_error
from .._leaves import is_measured
from .._states import increment_where
from .._tree_checks import broadcast_prefix, check_same_structure
from .._types import UNBOUNDED, Array, Number, Schedule, Threshold, Tree
from ._norm import Groups, Norms, Units, split

_HINT = "Pass a positive number, a schedule, or a rule from `gcx.thresholds`; inf never clips."


@dataclasses.dataclass(frozen=True)
class Rule:
    """A threshold that may depend on earlier norms and on the norms of the parameters.

    A rule works elementwise: norms are float32 arrays of any shape with one element for each unit,
    shape () for the global norm. Each array of the state has shape () or ends in the shape of the
    norms. A non-finite norm does not reach the state: the entries of its unit keep their values,
    whatever `update` returns for them.

    Attributes:
        init: from zeros of the shape of the norms to the initial state.
        update: `(norm, state, param_norm) -> (threshold, state)`. `norm` is the finite norm before
            clipping; `param_norm` is None unless `uses_params`. The threshold is in the unit of the
            norm. A threshold that is not positive gives a zero update.
        uses_params: whether `update` needs the norms of the parameters, unit by unit.
        counts_steps: whether the state is a count of all steps, which also increases at a step
            with a non-finite norm.
        allow_negative: whether `update` accepts values that may be zero or negative, such as
            losses.

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

    init: Callable[[Array], Any]
    update: Callable[[Array, Any, Array | None], tuple[Array, Any]]
    uses_params: bool = False
    counts_steps: bool = False
    allow_negative: bool = False


def constant(value: Number) -> Rule:
    """The same threshold at every step."""
    return Rule(lambda norm: (), lambda norm, state, param_norm: (jnp.asarray(value), state))


def scheduled(argument: str, schedule: Schedule) -> Rule:
    """A threshold that depends on the step count, which is the state."""

    def init(norm: Array) -> Array:
        return jnp.zeros((), jnp.int32)

    def update(norm: Array, count: Array, param_norm: Array | None) -> tuple[Array, Array]:
        value = schedule(count)
        dtype = dtype_of(value)
        is_real = jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
        if np.ndim(value) or not is_real:
            rule, hint = "a schedule that returns a real scalar", "Return one number for each step."
            raise type_error(argument, rule, describe(value), hint)
        return jnp.asarray(value), increment_where(count)

    return Rule(init, update, counts_steps=True)


@public
def relative_to_params(ratio: Number = 0.01, eps: Number = 1e-3) -> Rule:
    """A threshold of `ratio * max(norm of the parameters, eps)`, unit by unit.

    Args:
        ratio: largest ratio of gradient norm to parameter norm, dimensionless, > 0.
        eps: lower bound of the parameter norm, > 0, so that zero parameters can move.

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

    def update(norm: Array, state: Any, param_norm: Array | None) -> tuple[Array, Any]:
        assert param_norm is not None  # since `uses_params`
        floor, slope = (jnp.asarray(x).astype(param_norm.dtype) for x in (eps, ratio))
        return jnp.maximum(param_norm, floor) * slope, state

    return Rule(lambda norm: (), update, uses_params=True)


def as_rule(argument: str, threshold: Number | Schedule | Rule) -> Rule:
    """A threshold as a rule."""
    if isinstance(threshold, Rule):
        return threshold
    if inspect.isfunction(threshold) and threshold.__annotations__.get("return") is Rule:
        rule, hint = "a number, a schedule or a rule", f"Call it: `{threshold.__name__}()`."
        raise type_error(argument, rule, shortened(threshold), hint)
    if callable(threshold):
        return scheduled(argument, threshold)
    check_number(argument, threshold, _HINT)
    return constant(threshold)


@public
def capped(rule: Rule, max_threshold: Number) -> Rule:
    """The threshold of another rule, bounded from above.

    Args:
        rule: any rule.
        max_threshold: the upper bound in the unit of the norm, > 0.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> rule = gcx.thresholds.capped(gcx.thresholds.quantile(initial=4.0), 1.0)
        >>> clip = gcx.clip_by_global_norm(rule)
        >>> clip.update(jnp.array([3.0]), clip.init(jnp.zeros(1)))[0].tolist()
        [1.0]
    """
    rule = as_rule("rule", rule)
    check_number("max_threshold", max_threshold, "Leave the cap out for none.")

    def update(norm: Array, state: Any, param_norm: Any) -> tuple[Array, Any]:
        threshold, state = rule.update(norm, state, param_norm)
        return jnp.minimum(threshold, max_threshold), state

    return dataclasses.replace(rule, update=update)


def init_state(rule: Rule, shape: Sequence[int] = ()) -> Any:
    """The state before the first norm. Each array has its own buffer, so that it can be donated."""
    return jax.tree.map(jnp.array, rule.init(jnp.zeros(shape, jnp.float32)))


def check_params(updates: Tree, params: Tree | None) -> None:
    """Raise if the parameters are missing or do not match the updates."""
    if params is None:
        rule, hint = "given for this threshold", "Pass it: `update(grads, state, params)`."
        raise value_error("params", rule, "None", hint)
    check_same_structure("updates", updates, "params", params)


def apply_rule(
    rule: Rule, norm: Array, state: Any, param_norm: Array | None = None
) -> tuple[Array, Any]:
    """The thresholds, of the dtype and shape of the norms, and the next state."""
    finite = keeps = jnp.isfinite(norm)
    value, largest, is_wide = norm, jnp.asarray(UNBOUNDED, norm.dtype), norm.dtype == jnp.float64
    if is_wide:
        # States are float32: a larger norm counts as the largest float32.
        value, keeps = jnp.clip(norm, -largest, largest), finite & (norm <= largest)
    value = jnp.where(finite, value, 0).astype(jnp.float32)
    param_norm = None if param_norm is None else param_norm.astype(jnp.float32)
    threshold, proposed = rule.update(value, state, param_norm)
    threshold = jnp.asarray(threshold).astype(norm.dtype)
    if is_wide:
        threshold = jnp.where(threshold >= largest, jnp.finfo(norm.dtype).max, threshold)
    keeps = jnp.ones_like(finite) if rule.counts_steps else keeps
    return jnp.broadcast_to(threshold, norm.shape), _where_finite(keeps, proposed, state)


def _where_finite(finite: Array, proposed: Any, state: Any) -> Any:
    def select(new: Array, old: Array) -> Array:
        per_unit = old.ndim >= finite.ndim and old.shape[old.ndim - finite.ndim :] == finite.shape
        chosen = finite if per_unit else finite.any()
        return jnp.where(chosen, jnp.asarray(new).astype(old.dtype), old)

    return jax.tree.map(select, proposed, state)


class Assignment(NamedTuple):
    """A rule and the indices of the entries of `Norms` that it applies to."""

    rule: Rule
    entries: tuple[int, ...]


def as_rules(argument: str, threshold: Threshold, *, by_label: bool) -> Any:
    """A threshold, a tree of thresholds, or a mapping from label to threshold, as rules."""
    if by_label:  # the labels may be of several types, which jax.tree could not sort
        _check_labels(argument, threshold)
        return {key: as_rule(f"{argument}[{key!r}]", x) for key, x in threshold.items()}
    if not jax.tree.leaves(threshold, is_leaf=_is_rule):
        return as_rule(argument, threshold)
    return jax.tree_util.tree_map_with_path(
        lambda path, entry: as_rule(leaf_path(argument, path), entry), threshold, is_leaf=_is_rule
    )


def _check_labels(argument: str, thresholds: Mapping[Any, Any]) -> None:
    """Raise if a label, or the name of a group in the metrics, occurs twice."""
    labels = [x for key in thresholds for x in (key if isinstance(key, tuple) else (key,))]
    for names in (list(map(str, labels)), list(map(group_name, thresholds))):
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            hint = "Give each label one threshold, and each group its own name in the metrics."
            rule = "a mapping in which each label occurs once"
            raise value_error(argument, rule, f"{twice!r} twice", hint)


def group_name(key: Any) -> str:
    """The name of a group in the metrics."""
    return "+".join(map(str, key)) if isinstance(key, tuple) else str(key)


def assign_rules(argument: str, rules: Any, units: Units, tree: Tree) -> tuple[Assignment, ...]:
    """The rules of a tree, each with the entries of `Norms` that it applies to.

    | rules | entries of each |
    | --- | --- |
    | one rule | all |
    | a mapping, for groups | the entry of its group |
    | a prefix tree, for units within leaves | the entries of the leaves below it |
    """
    if isinstance(rules, Rule):
        return (Assignment(rules, tuple(range(units.size))),)
    if units.names or not units.size:
        return tuple(Assignment(rules[name], (i,)) for i, name in enumerate(units.names))
    if isinstance(units, Groups):
        rule = "one threshold, or a mapping from labels to thresholds"
        hint = "Use `clip_by_leaf_norm` for a tree of thresholds."
        raise type_error(argument, rule, "a tree of thresholds", hint)
    rule_of_leaf = broadcast_prefix(argument, rules, "updates", tree, _is_rule)
    leaves = zip(rule_of_leaf, jax.tree.leaves(tree), strict=True)
    entries: dict[Rule, list[int]] = {}
    for i, rule in enumerate(rule for rule, x in leaves if is_measured(x)):
        entries.setdefault(rule, []).append(i)
    return tuple(Assignment(rule, tuple(own)) for rule, own in entries.items())


def init_states(assigned: Sequence[Assignment], shapes: Sequence[tuple[int, ...]]) -> Any:
    """The states of all rules before the first norm; () if no rule has a state."""
    states: list[Any] = []
    for rule, entries in assigned:
        own = [shapes[i] for i in entries]
        states.append(init_state(rule, () if own == [()] else (sum(map(math.prod, own)),)))
    return tuple(states) if jax.tree.leaves(states) else ()


def apply_rules(
    assigned: Sequence[Assignment], norms: Norms, states: Any, param_norms: Norms | None
) -> tuple[Norms, Any]:
    """The thresholds and the next states. A rule with a state receives its norms as one vector."""
    thresholds = list(norms)
    next_states: list[Any] = []
    for (rule, entries), state in zip(assigned, states or [()] * len(assigned), strict=True):
        own = [norms[i] for i in entries]
        of_params = None
        if rule.uses_params and param_norms is not None:
            of_params = [param_norms[i] for i in entries]
        if jax.tree.leaves(state):
            param_norm = None if of_params is None else _as_vector(of_params)
            vector, state = apply_rule(rule, _as_vector(own), state, param_norm)
            values = split(vector, own)
        else:
            apply = functools.partial(_apply_stateless, rule)
            columns = [own] if of_params is None else [own, of_params]
            values = map_arrays(apply, *columns)
        for i, value in zip(entries, values, strict=True):
            thresholds[i] = value
        next_states.append(state)
    return thresholds, tuple(next_states) if states else ()


@functools.partial(jax.jit, static_argnums=0)
def _apply_stateless(rule: Rule, norm: Array, param_norm: Array | None = None) -> Array:
    return apply_rule(rule, norm, (), param_norm)[0]


def _as_vector(norms: Norms) -> Array:
    """Several norms as one vector; a single scalar stays a scalar."""
    if len(norms) == 1 and not norms[0].ndim:
        return norms[0]
    return jnp.concatenate([x.reshape(-1) for x in norms] or [jnp.zeros(0)])


def _is_rule(entry: Any) -> bool:
    return isinstance(entry, Rule)
