"""Thresholds: numbers, schedules, and rules that depend on earlier norms or on the parameters.

The published rules are in `_rules.py`. Users can define their own rules with the class `Rule`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from .._checks import check_dtype_kept, check_number, describe, is_scalar, shapes_of, shortened
from .._devices import map_arrays
from .._errors import public, type_error
from .._states import increment_where
from .._types import UNBOUNDED, Array, Number, Scalar, Schedule, Tree
from ..norms._norm import Norms, split


@dataclasses.dataclass(frozen=True, eq=False)
class Rule:
    """A threshold that may depend on earlier norms and on the norms of the parameters.

    A rule receives all its norms at once, as a float32 vector, or as a scalar for one norm. Each
    array of the state has shape () or a shape that ends with the shape of the norms. The state does
    not change in a step with a non-finite norm, because such a step is discarded.

    Attributes:
        init: Function `zeros -> state` that returns the initial state; `zeros` has the shape of the
            norms.
        update: Function `(norm, state, param_norm) -> (threshold, state)`. `norm` is the finite
            norm before clipping; `param_norm` is None unless `uses_params`. The threshold has the
            unit of the norm. A threshold <= 0 results in a zero update.
        uses_params: Whether `update` needs the norms of the parameters.
        allow_negative: Whether `update` supports negative values, such as losses.

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
    allow_negative: bool = False


class _Constant(Rule):
    """A rule for a number, which is the same for all norms."""


class Elementwise(Rule):
    """A rule without a state that is applied to each array of norms, or to stacks of them.

    XLA on CPU compiles this faster than a vector of all norms.
    """


class _Scheduled(Rule):
    """A rule for a schedule, whose state also counts steps with a non-finite norm."""


Threshold: TypeAlias = Number | Schedule | Rule
"""A number > 0, a traced scalar, a schedule, or a rule from `gcx.thresholds`."""


def scheduled(argument: str, schedule: Schedule) -> Rule:
    """Return a rule for a schedule; its state is the step count."""

    def init(norm: Array) -> Array:
        return jnp.zeros((), jnp.int32)

    def update(norm: Array, count: Array, param_norm: Array | None) -> tuple[Array, Array]:
        value = schedule(count)
        if not is_scalar(value, jnp.floating, jnp.integer):
            rule, hint = "a schedule that returns a real scalar", "Return one number per step."
            raise type_error(argument, rule, describe(value), hint)
        return jnp.asarray(value), increment_where(count)

    return _Scheduled(init, update, allow_negative=True)


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
        limit, floor = jnp.float32(ratio), jnp.float32(eps)
        return limit * jnp.maximum(param_norm, floor), state

    return Elementwise(lambda norm: (), update, uses_params=True)


def as_rule(argument: str, threshold: Threshold, *, low: float = 0.0) -> Rule:
    """Convert a number above `low` or a schedule to a rule; return a rule unchanged."""
    if isinstance(threshold, Rule):
        return threshold
    if callable(threshold) and not isinstance(threshold, type):
        return scheduled(argument, threshold)
    hint = (
        "Or pass a schedule or a rule. Use `clip_by_group_norm` for several thresholds, and"
        " `clip_grad_norm(grads, max_norm)` to clip a tree without a transformation."
    )
    check_number(argument, threshold, hint, f"({low}, inf]")
    # An int above 2^31 is not an int32.
    value: Any = float(threshold) if isinstance(threshold, int) else threshold
    return _Constant(lambda norm: (), lambda norm, state, _: (value, state))


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
    check_number("max_threshold", max_threshold, "Use the rule without `capped` for no bound.")

    def update(norm: Array, state: Tree, param_norm: Array | None) -> tuple[Array, Tree]:
        threshold, state = rule.update(norm, state, param_norm)
        return jnp.minimum(threshold, jnp.float32(max_threshold)), state

    return dataclasses.replace(rule, update=update)


def init_state(rule: Rule, shape: Sequence[int] = ()) -> Tree:
    """Return the initial state, in which each array has its own buffer and can be donated."""
    return jax.tree.map(jnp.array, rule.init(jnp.zeros(shape, jnp.float32)))


def apply_rule(
    rule: Rule,
    norm: Array,
    state: Tree,
    param_norm: Array | None = None,
    is_finite: Scalar | bool = True,
) -> tuple[Array, Tree]:
    """Compute thresholds with the dtype and shape of the norms, and the next state.

    The state changes only if all norms and `is_finite`, the other norms of the step, are finite.
    """
    # States are float32, so a larger norm counts as the largest float32 and changes no state.
    value = jnp.where(jnp.isfinite(norm), jnp.clip(norm, -UNBOUNDED, UNBOUNDED), 0)
    keeps = is_finite & jnp.all(jnp.abs(norm) <= UNBOUNDED) | isinstance(rule, _Scheduled)
    given = param_norm.astype(jnp.float32) if rule.uses_params and param_norm is not None else None
    result = rule.update(value.astype(jnp.float32), state, given)
    if not (isinstance(result, tuple) and len(result) == 2):
        hint = "Return a tuple from `Rule.update`."
        raise type_error("threshold", "a threshold and the next state", describe(result), hint)
    threshold, proposed = result
    threshold = jnp.broadcast_to(jnp.asarray(threshold).astype(norm.dtype), norm.shape)
    if norm.dtype == jnp.float64:
        threshold = jnp.where(threshold >= UNBOUNDED, jnp.finfo(norm.dtype).max, threshold)

    def select(new: Array, old: Array) -> Array:
        check_dtype_kept("threshold", new, old)
        new = jnp.broadcast_to(jnp.asarray(new).astype(old.dtype), old.shape)  # never larger
        return jnp.where(keeps, new, old)

    return threshold, jax.tree.map(select, proposed, state)


def as_rules(
    argument: str, threshold: Any, *, is_group: bool
) -> tuple[tuple[Rule, ...], tuple[Hashable, ...] | None]:
    """Convert a threshold to a rule, or a mapping of thresholds for groups to rules and labels."""
    if not (is_group and isinstance(threshold, Mapping)):
        return (as_rule(argument, threshold),), None
    rules = [as_rule(f"{argument}[{label!r}]", x) for label, x in threshold.items()]
    return tuple(rules), tuple(threshold)


def init_rules(rules: Sequence[Rule], num_norms: int) -> Tree:
    """Return the initial state of one rule for all norms, or of a rule for each norm.

    The states are () if no rule has a state.
    """
    shape = _vector_shape(num_norms if len(rules) == 1 else 1)
    states = tuple(init_state(rule, shape) for rule in rules)
    return states if jax.tree.leaves(states) else ()


def apply_rules(
    rules: Sequence[Rule], norms: Norms, param_norms: Norms, states: Tree, is_finite: Scalar
) -> tuple[list[Any], Tree]:
    """Return a threshold for each array of norms or one for all, and the next states."""
    thresholds: list[Any] = []
    after: list[Tree] = []
    columns = ([x] if len(rules) == 1 else [[norm] for norm in x] for x in (norms, param_norms))
    for rule, own, params, state in zip(rules, *columns, states or [()] * len(rules), strict=True):
        if isinstance(rule, _Constant):
            thresholds.append(rule.update(jnp.zeros(()), (), None)[0])
        elif isinstance(rule, Elementwise):
            thresholds += map_arrays(functools.partial(_threshold_of, rule), own, params)
        else:
            expected = _state_shapes(rule, own)
            if jax.tree.leaves(expected) and shapes_of(state) != shapes_of(expected):
                hint = "Pass the state of `init` for the structure of the updates."
                raise type_error("state", f"like {shortened(expected)}", shortened(state), hint)
            vector, state = apply_rule(rule, _as_vector(own), state, _as_vector(params), is_finite)
            thresholds += split(vector, own)
        after.append(state)
    return thresholds, tuple(after) if states else ()


def _threshold_of(rule: Rule, norm: Array, param_norm: Array) -> Array:
    """Apply a rule without a state."""
    return apply_rule(rule, norm, (), param_norm)[0]


def _vector_shape(num_norms: int) -> tuple[int, ...]:
    """Return the shape of the norms that a rule receives: a vector, or a scalar for one norm."""
    return () if num_norms == 1 else (num_norms,)


def _as_vector(norms: Sequence[Array]) -> Array:
    """Concatenate norms to an array with the shape `_vector_shape`."""
    vector = jnp.concatenate([x.reshape(-1) for x in norms] or [jnp.zeros(0)])
    return vector.reshape(_vector_shape(vector.size))


def _state_shapes(rule: Rule, norms: Sequence[Array]) -> Tree:
    """Return the shapes of the state of a rule for these norms, without concatenating them."""
    shape = _vector_shape(sum(x.size for x in norms))
    return jax.eval_shape(rule.init, jax.ShapeDtypeStruct(shape, jnp.float32))
