"""From norm to threshold: what a `max_norm` may be, and how it remembers.

A number, a schedule and a rule fed by history or parameters are all one thing here, a `Rule`.
The published rules fed by history live in `adaptive/`; users write theirs with this class. The
assignment of rules to norms is at the end.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import check_number, describe, dtype_of, leaf_path, shortened
from .._errors import public, type_error, value_error
from .._states import increment_where
from .._tree_checks import broadcast_prefix, check_same_structure
from .._types import UNBOUNDED, Array, Number, Tree
from ._granularity import Norms, Units, is_measured, map_norms, split

_HINT = "Pass a positive number, a schedule, or a rule from `gcx.thresholds`; inf never clips."


@dataclasses.dataclass(frozen=True)
class Rule:
    """A threshold that may depend on earlier norms and on the parameters.

    A rule works elementwise: its norms are float32 of any shape, one entry for each unit that is
    clipped by itself, shape () for the global norm. Each array of its state has shape () or
    ends in the shape of the norms. A non-finite norm never reaches the state: the entries of
    its unit stay as they were, whatever `update` returns for them.

    Attributes:
        init: zeros of the shape of the norms, to the first state.
        update: `(norm, state, param_norm) -> (threshold, state)`; `norm` is before clipping and
            finite, `param_norm` is None unless `uses_params`. The threshold is in the unit of
            the norm; one that is not positive gives a zero update.
        uses_params: whether `update` needs the norms of the parameters, unit by unit.
        counts_steps: whether the state is a count of all steps and no memory of norms; it then
            goes on at a step whose norm is not finite.
        allow_negative: whether `update` takes values that may be zero or negative, such as losses.

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
    allow_negative: bool = False


def constant(value: Number) -> Rule:
    """The same threshold at every step."""
    return Rule(lambda norm: (), lambda norm, state, param_norm: (jnp.asarray(value), state))


def scheduled(argument: str, schedule: Callable[[Array], Any]) -> Rule:
    """A threshold that depends on the step count, which the state keeps."""

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
    check_number("ratio", ratio, "The paper uses 0.01 for large batches.")
    check_number("eps", eps, "The paper uses 1e-3.")

    def update(norm: Array, state: Any, param_norm: Array | None) -> tuple[Array, Any]:
        assert param_norm is not None  # the clip measures it: `uses_params`
        floor, slope = (jnp.asarray(x).astype(param_norm.dtype) for x in (eps, ratio))
        return jnp.maximum(param_norm, floor) * slope, state

    return Rule(lambda norm: (), update, uses_params=True)


def as_rule(argument: str, threshold: Any) -> Rule:
    """Whatever a threshold may be, as a rule; refuses what it may not be."""
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
    rule = as_rule("rule", rule)
    check_number("max_threshold", max_threshold, "Leave the cap out for none.")

    def update(norm: Array, state: Any, param_norm: Any) -> tuple[Array, Any]:
        threshold, state = rule.update(norm, state, param_norm)
        return jnp.minimum(threshold, max_threshold), state

    return dataclasses.replace(rule, update=update)


def init_state(rule: Rule, shape: Sequence[int] = ()) -> Any:
    """The state before the first norm, each array in a buffer of its own: it may be donated."""
    return jax.tree.map(jnp.array, rule.init(jnp.zeros(shape, jnp.float32)))


def check_params(updates: Tree, params: Tree | None) -> None:
    """Refuses a step without the parameters that a rule looks at, or with others."""
    if params is None:
        rule, hint = "given for this threshold", "Pass it: `update(grads, state, params)`."
        raise value_error("params", rule, "None", hint)
    check_same_structure("updates", updates, "params", params)


def apply_rule(
    rule: Rule, norm: Array, state: Any, param_norm: Array | None = None
) -> tuple[Array, Any]:
    """Thresholds of the dtype and shape of the norms, and the next state."""
    finite = keeps = jnp.isfinite(norm)
    value, largest, is_wide = norm, jnp.asarray(UNBOUNDED, norm.dtype), norm.dtype == jnp.float64
    if is_wide:
        # Histories are float32: a larger norm counts as the largest there.
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
    """A rule and the indices of its norms."""

    rule: Rule
    norms: tuple[int, ...]


def as_rules(argument: str, threshold: Any, *, by_label: bool) -> Any:
    """A threshold, a tree of thresholds or a mapping from labels, as rules; refuses all else."""
    if by_label:  # its keys may be of several types, and have no order
        _check_labels(argument, threshold)
        return {key: as_rule(f"{argument}[{key!r}]", x) for key, x in threshold.items()}
    if not jax.tree.leaves(threshold, is_leaf=_is_rule):
        return as_rule(argument, threshold)
    return jax.tree_util.tree_map_with_path(
        lambda path, entry: as_rule(leaf_path(argument, path), entry),
        threshold,
        is_leaf=_is_rule,
    )


def _check_labels(argument: str, thresholds: Mapping[Any, Any]) -> None:
    """Refuses a mapping in which a label, or the name of a group in the metrics, occurs twice."""
    labels = [x for key in thresholds for x in (key if isinstance(key, tuple) else (key,))]
    for names in (list(map(str, labels)), list(map(group_name, thresholds))):
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            hint = "A label has one threshold, and a group a name of its own in the metrics."
            rule = "a mapping in which each label occurs once"
            raise value_error(argument, rule, f"{twice!r} twice", hint)


def group_name(key: Any) -> str:
    """The name of a group in the metrics."""
    return "+".join(map(str, key)) if isinstance(key, tuple) else str(key)


def assign_rules(argument: str, rules: Any, units: Units, tree: Tree) -> tuple[Assignment, ...]:
    """The rules of a tree, each with the indices of its norms.

    | rules | norms of each |
    | --- | --- |
    | one | all |
    | a mapping, for groups | that of its group |
    | a prefix tree, for units within leaves | those of the leaves below it |
    """
    if isinstance(rules, Rule):
        return (Assignment(rules, tuple(range(units.size))),)
    if units.names or not units.size:
        return tuple(Assignment(rules[name], (i,)) for i, name in enumerate(units.names))
    if not units.by_leaf:
        rule = "one threshold, or a mapping from labels to thresholds"
        hint = "A tree of thresholds goes with `clip_by_leaf_norm`."
        raise type_error(argument, rule, "a tree of thresholds", hint)
    entries = broadcast_prefix(argument, rules, "updates", tree, _is_rule)
    pairs = zip(entries, jax.tree.leaves(tree), strict=True)
    norms_of: dict[Rule, list[int]] = {}
    for i, rule in enumerate(rule for rule, x in pairs if is_measured(x)):
        norms_of.setdefault(rule, []).append(i)
    return tuple(Assignment(rule, tuple(norms)) for rule, norms in norms_of.items())


def init_states(assigned: Sequence[Assignment], shapes: Sequence[tuple[int, ...]]) -> Any:
    """The states of all rules before the first norm; () if none has one."""
    states = tuple(
        init_state(rule, _joined_shape([shapes[i] for i in own])) for rule, own in assigned
    )
    return states if jax.tree.leaves(states) else ()


def apply_rules(
    assigned: Sequence[Assignment], units: Units, norms: Norms, states: Any, param_norms: Norms
) -> tuple[Norms, Any]:
    """A threshold for each norm, and the next states.

    Where units lie within leaves only a rule with a state sees its norms as one vector.
    """
    if not units.size:
        return norms, states
    thresholds: dict[int, Array] = {}
    next_states: list[Any] = []
    for (rule, own), state in zip(assigned, states or [()] * len(assigned), strict=True):
        of_params = param_norms if rule.uses_params else None
        if units.is_vector or jax.tree.leaves(state):
            of_params = None if of_params is None else _joined(of_params, own)
            threshold, state = apply_rule(rule, _joined(norms, own), state, of_params)
            if len(own) == units.size and units.is_vector:
                return threshold.reshape(units.size), (state,) if states else ()
            thresholds |= zip(own, split(threshold, [norms[i] for i in own]), strict=True)
        else:
            columns = [[x[i] for i in own] for x in (norms, of_params) if x is not None]

            def stateless(norm: Array, *param_norm: Array, rule: Rule = rule) -> Array:
                return apply_rule(rule, norm, (), *param_norm)[0]

            thresholds |= zip(own, map_norms(stateless, *columns), strict=True)
        next_states.append(state)
    in_order = [thresholds[i] for i in range(units.size)]
    kept = tuple(next_states) if states else ()
    return jnp.stack(in_order) if units.is_vector else in_order, kept


def _joined_shape(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return () if list(shapes) == [()] else (sum(map(math.prod, shapes)),)


def _joined(norms: Norms, own: Sequence[int]) -> Array:
    """Some norms as a vector; as a scalar, if there is one."""
    if len(own) == len(norms) and not isinstance(norms, list):
        return norms.reshape(() if len(own) == 1 else -1)
    arrays = [norms[i] for i in own]
    flat = jnp.concatenate([x.reshape(-1) for x in arrays] or [jnp.zeros(0)])
    return flat.reshape(_joined_shape([x.shape for x in arrays]))


def _is_rule(entry: Any) -> bool:
    return isinstance(entry, Rule)
