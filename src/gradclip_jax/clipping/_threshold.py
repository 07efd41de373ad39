"""Thresholds: numbers, schedules, and rules that depend on earlier norms or on the parameters.

The published rules are in `_rules.py`. Users can define their own rules with the class `Rule`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import (
    call_schedule,
    check_callable,
    check_dtype_kept,
    check_flag,
    check_number,
    check_values,
    describe,
    dtype_of,
    is_factory,
    shapes_of,
    shortened,
)
from .._errors import public, type_error
from .._states import increment_where
from .._types import UNBOUNDED, Array, Number, Scalar, Schedule, Tree, as_pytree
from ..norms._groups import PerGroup


@as_pytree
@dataclasses.dataclass(frozen=True, eq=False)
class Rule:
    """A threshold that may depend on earlier norms and on the norms of the parameters.

    A rule with a state receives all its norms at once, as a float32 vector, or as a scalar for one
    norm. Each array of the state has shape () or a shape that ends with the shape of the norms. The
    state does not change in a step with a non-finite norm, because such a step is discarded.

    Attributes:
        init: Function `zeros -> state` that returns the initial state; `zeros` has the shape of the
            norms. None for a rule without a state, whose `update` is elementwise and receives the
            state `()`; it may receive the norms one by one.
        update: Function `(norm, state, param_norm) -> (threshold, state)`. `norm` is the finite
            norm before clipping; `param_norm` is None unless `uses_params`. The threshold has the
            unit of the norm. A threshold <= 0 results in a zero update.
        uses_params: Whether `update` needs the norms of the parameters.
        allow_negative: Whether `update` supports negative values, such as losses.
        counts_nonfinite: Whether the state also changes in a step with a non-finite norm, as the
            step count of a schedule does.
        name: Name of the rule. States of rules with different names are not converted to each
            other.

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

    init: Callable[[Array], Tree] | None
    update: Callable[[Array, Tree, Array | None], tuple[Array, Tree]]
    uses_params: bool = False
    allow_negative: bool = False
    counts_nonfinite: bool = False
    name: str = ""

    @public
    def __post_init__(self) -> None:
        for name in ("uses_params", "allow_negative", "counts_nonfinite"):
            check_flag(name, getattr(self, name))
        if not isinstance(self.name, str):
            raise type_error("name", "a string", shortened(self.name), "Pass the name of the rule.")
        if self.init is not None:
            check_callable("init", self.init, "Pass a function `zeros -> state`, or None.")
        hint = "Pass a function `(norm, state, param_norm) -> (threshold, state)`."
        check_callable("update", self.update, hint)


Threshold: TypeAlias = Number | Schedule | Rule
"""A number > 0, a traced scalar, a schedule, or a rule from `gcx.thresholds`."""


def scheduled(argument: str, schedule: Schedule) -> Rule:
    """Return a rule for a schedule; its state is the step count."""

    def init(norm: Array) -> Array:
        return jnp.zeros((), jnp.int32)

    def update(norm: Array, count: Array, param_norm: Array | None) -> tuple[Array, Array]:
        value = call_schedule(argument, schedule, count)
        is_array = isinstance(value, jax.Array)
        hint = "Return a positive number, or inf for no threshold."
        value = value if is_array else check_number(argument, value, hint, "[-inf, inf]")
        return jnp.asarray(value), increment_where(count)

    return Rule(init, update, allow_negative=True, counts_nonfinite=True, name="schedule")


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
    ratio = check_number("ratio", ratio, "The paper uses 0.01 for large batches.")
    eps = check_number("eps", eps, "The paper uses 1e-3.")

    def update(norm: Array, state: Tree, param_norm: Array | None) -> tuple[Array, Tree]:
        assert param_norm is not None  # because of `uses_params`
        limit, floor = jnp.float32(ratio), jnp.float32(eps)
        return limit * jnp.maximum(param_norm, floor), state

    return Rule(None, update, uses_params=True, name="relative_to_params")


def as_rule(argument: str, threshold: Threshold, *, low: float = 0.0) -> Rule:
    """Convert a number above `low` or a schedule to a rule; return a rule unchanged."""
    if isinstance(threshold, Rule):
        check_arity(argument, threshold)
        return threshold
    if callable(threshold) and not isinstance(threshold, type):
        check_callable(argument, threshold, "Pass a schedule.")
        return scheduled(argument, threshold)
    hint = (
        "Or pass a schedule or a rule. Use `clip_by_group_norm` for several thresholds, and"
        " `clip_grad_norm(grads, max_norm)` to clip a tree without a transformation."
    )
    value = check_number(argument, threshold, hint, f"({low}, inf]")
    return Rule(None, lambda norm, state, param_norm: (value, state), name="number")


def check_arity(argument: str, rule: Rule) -> None:
    """Raise if the functions of a rule have other numbers of arguments."""
    for name, fun, arguments in (
        ("init", rule.init, ("zeros",)),
        ("update", rule.update, ("norm", "state", "param_norm")),
    ):
        try:
            inspect.signature(fun).bind(*arguments) if fun else None
        except ValueError:  # a builtin without a signature
            continue
        except TypeError as error:
            expected = f"a rule whose `{name}` takes ({', '.join(arguments)})"
            hint = "Define the function with these arguments; see `gcx.thresholds.Rule`."
            raise type_error(argument, expected, shortened(fun), hint) from error


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
    hint = "Use the rule without `capped` for no bound."
    bound = check_number("max_threshold", max_threshold, hint)
    if not isinstance(rule, Rule):
        hint = "Pass for example `gcx.thresholds.quantile()`."
        if is_factory(rule):
            check_callable("rule", rule, hint)
        raise type_error("rule", "a rule", shortened(rule), hint)

    def update(norm: Array, state: Tree, param_norm: Array | None) -> tuple[Array, Tree]:
        threshold, state = rule.update(norm, state, param_norm)
        return jnp.minimum(threshold, jnp.float32(bound)), state

    return dataclasses.replace(rule, update=update)


def init_state(rule: Rule, shape: Sequence[int] = ()) -> Tree:
    """Return the initial state by the name of the rule, with arrays that can be donated."""
    if rule.init is None:
        return ()
    # Each array has its own buffer.
    return {rule.name: jax.tree.map(jnp.array, rule.init(jnp.zeros(shape, jnp.float32)))}


def apply_rule(
    rule: Rule,
    norm: Array,
    state: Tree,
    param_norm: Array | None = None,
    is_finite: Scalar | bool = True,
    *,
    argument: str,
) -> tuple[Array, Tree]:
    """Compute thresholds with the dtype and shape of the norms, and the next state.

    The state changes only if all norms and `is_finite`, the other norms of the step, are finite.
    """
    value, old_state = norm, ()
    if rule.init is not None:
        old_state = state[rule.name]
        # States are float32, so a larger norm counts as the largest float32 and changes no state.
        value = jnp.where(jnp.isfinite(norm), jnp.clip(norm, -UNBOUNDED, UNBOUNDED), 0)
    given = param_norm.astype(jnp.float32) if rule.uses_params and param_norm is not None else None
    result = rule.update(value.astype(jnp.float32), old_state, given)
    threshold, proposed = _checked_result(argument, result, norm, old_state)
    if norm.dtype == jnp.float64:
        threshold = jnp.where(threshold >= UNBOUNDED, jnp.finfo(norm.dtype).max, threshold)
    if rule.init is None:
        return threshold, state
    is_updated = rule.counts_nonfinite | (is_finite & jnp.all(jnp.abs(norm) <= UNBOUNDED))

    def select(new: Array, old: Array) -> Array:
        check_dtype_kept(argument, new, old)
        if np.shape(new) not in ((), old.shape):
            hint = "Return a state like that of `init`."
            raise type_error(argument, "a rule whose state keeps its shapes", describe(new), hint)
        return jnp.where(is_updated, jnp.asarray(new).astype(old.dtype), old)

    return threshold, {rule.name: jax.tree.map(select, proposed, old_state)}


def _checked_result(argument: str, result: Any, norm: Array, state: Tree) -> tuple[Array, Tree]:
    """Return the threshold, with the dtype and shape of the norms, and the next state, or raise."""
    hint = "Return a threshold and the next state from `Rule.update`."
    if not (isinstance(result, tuple) and len(result) == 2):
        rule = "a rule that returns a threshold and the next state"
        raise type_error(argument, rule, describe(result), "Return a tuple from `Rule.update`.")
    threshold, proposed = result
    dtype = dtype_of(threshold)
    is_real = jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
    if not is_real or np.shape(threshold) not in ((), norm.shape):
        rule = f"a rule that returns a threshold like {describe(norm)}"
        raise type_error(argument, rule, describe(threshold), hint)
    if jax.tree.structure(proposed) != jax.tree.structure(state):
        rule = f"a rule that returns a state like {shortened(state)}"
        raise type_error(argument, rule, shortened(proposed), hint)
    threshold = jnp.asarray(threshold, norm.dtype)
    if norm.ndim and not threshold.ndim:
        threshold = threshold + jnp.zeros_like(norm)  # with the sharding of the norms
    return threshold, proposed


def init_rules(rules: Sequence[Rule], num_norms: int) -> Tree:
    """Return the initial states of the rules, or () if no rule has a state.

    There is one rule for all norms, or one rule for each norm.
    """
    shape = (num_norms,) if len(rules) == 1 and num_norms != 1 else ()
    states = tuple(init_state(rule, shape) for rule in rules)
    return states if jax.tree.leaves(states) else ()


def apply_rules(
    argument: str,
    rules: Sequence[Rule],
    norms: PerGroup,
    param_norms: PerGroup,
    states: Tree,
    is_finite: Scalar,
) -> tuple[PerGroup, Tree]:
    """Return the threshold of each norm group, and the next states of the rules.

    There is one rule for all norm groups, or one rule for each group.
    """
    check_values("state", states)
    apply = functools.partial(apply_rule, is_finite=is_finite, argument=argument)
    if len(rules) != 1:  # one for each group
        old_states = states or ((),) * len(rules)
        rows = zip(rules, norms.arrays, old_states, param_norms.arrays, strict=True)
        results = [apply(*row) for row in rows]
        new_states = tuple([state for _, state in results])
        thresholds = PerGroup([threshold for threshold, _ in results], norms.groups)
        return thresholds, new_states if jax.tree.leaves(new_states) else ()
    (rule,) = rules
    if rule.init is None:

        def threshold_of(norm: Array, param_norm: Array) -> Array:
            return apply(rule, norm, (), param_norm)[0]

        return norms.map(threshold_of, param_norms), ()
    vector = norms.vector()
    like = jax.eval_shape(lambda: init_state(rule, vector.shape))
    state = states[0] if states else like
    if jax.tree.leaves(like) and (not states or shapes_of(state) != shapes_of(like)):
        hint = "Pass the state of `init` for the structure of the updates."
        raise type_error("state", f"like {shortened(like)}", shortened(states), hint)
    new_vector, state = apply(rule, vector, state, param_norms.vector())
    return norms.with_vector(new_vector), (state,) if states else ()
