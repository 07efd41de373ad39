"""The class `Rule`, and functions that convert thresholds to rules and apply them.

The rules of `gcx.thresholds` are in `_rules.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import (
    call_schedule,
    check_arrays,
    check_callable,
    check_flag,
    check_number,
    check_rule_name,
    check_values,
    dtype_of,
    shapes_of,
)
from .._errors import public, type_error
from .._format import describe, shortened
from .._states import check_dtype_kept, increment_where, state_of_rule
from .._types import UNBOUNDED, Array, Number, Scalar, Schedule, Tree, as_pytree
from ..norms._groups import PerGroup, split


@as_pytree
@dataclasses.dataclass(frozen=True, eq=False)
class Rule:
    """A threshold that may depend on earlier norms and on the norms of the parameters.

    A rule with a state receives all its norms at once, as a float32 vector, or as a scalar for one
    norm. Each array of the state has shape () or a shape that ends with the shape of the norms. The
    state does not change in a step with a non-finite norm, because such a step is discarded.

    Attributes:
        init: Function `zeros -> state` that returns the initial state; `zeros` has the shape of the
            norms. None if the rule has no state. `update` then receives `()` as state and must be
            elementwise, because it may be called once for each norm.
        update: Function `(norm, state, param_norm) -> (threshold, state)`. `norm` is the norm
            before clipping, and is finite if there is a state; `param_norm` is None unless
            `uses_params`. The threshold has the unit of the norm. A threshold <= 0 results in a
            zero update.
        uses_params: Whether `update` needs the norms of the parameters.
        allow_negative: Whether `update` supports negative values, such as losses.
        counts_nonfinite: Whether the state also changes in a step with a non-finite norm, as the
            step count of a schedule does.
        name: Name of the rule. The default is the qualified name of `update`, such as
            `my_rule.update`. `convert_state` does not copy the state of a rule with another name,
            or of an unnamed lambda function.

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
        if self.init is not None:
            check_callable("init", self.init, "Pass a function `zeros -> state`, or None.")
        hint = "Pass a function `(norm, state, param_norm) -> (threshold, state)`."
        check_callable("update", self.update, hint)
        object.__setattr__(self, "name", check_rule_name(self.name, self.update))


Threshold: TypeAlias = Number | Schedule | Rule
"""A number > 0, a traced scalar, a schedule, or a rule from `gcx.thresholds`."""


def scheduled(argument: str, schedule: Schedule) -> Rule:
    """Return a rule for a schedule; its state is the step count."""

    def init(norm: Array) -> Array:
        return jnp.zeros((), jnp.int32)

    def update(norm: Array, count: Array, param_norm: Array | None) -> tuple[Array, Array]:
        return jnp.asarray(call_schedule(argument, schedule, count)), increment_where(count)

    return Rule(init, update, allow_negative=True, counts_nonfinite=True, name="schedule")


def as_rule(argument: str, threshold: Threshold, *, low: float = 0.0) -> Rule:
    """Convert a threshold to a rule; a number must be above `low`."""
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
    """Raise if `init` or `update` of a rule cannot be called with its arguments."""
    for name, fun, arguments in (
        ("init", rule.init, ("zeros",)),
        ("update", rule.update, ("norm", "state", "param_norm")),
    ):
        if fun is None:
            continue
        try:
            inspect.signature(fun).bind(*arguments)
        except ValueError:  # a builtin without a signature
            continue
        except TypeError as error:
            expected = f"a rule whose `{name}` takes ({', '.join(arguments)})"
            hint = "Define the function with these arguments; see `gcx.thresholds.Rule`."
            raise type_error(argument, expected, shortened(fun), hint) from error


def init_state(rule: Rule, shape: Sequence[int] = ()) -> Tree:
    """Return the initial state of a rule in a dictionary keyed by its name.

    Its arrays can be donated.
    """
    if rule.init is None:
        return ()
    # Each array has its own buffer.
    state = rule.init(jnp.zeros(shape, jnp.float32))
    check_arrays("init", state)
    return {rule.name: jax.tree.map(jnp.array, state)}


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

    Unless `rule.counts_nonfinite`, the state changes only if all norms of the step are finite.
    `is_finite` is False if another norm of the same step is not finite; the state then does not
    change either.
    """
    if rule.init is None:
        return _call_rule(argument, rule, norm, norm, (), param_norm)[0], state
    # Rules compute in float32. A norm above the float32 range is replaced by the largest float32,
    # and the state does not change.
    value = jnp.where(jnp.isfinite(norm), jnp.clip(norm, -UNBOUNDED, UNBOUNDED), 0)
    old_state = state_of_rule(argument, rule.name, state)
    threshold, new_state = _call_rule(argument, rule, norm, value, old_state, param_norm)
    is_updated = rule.counts_nonfinite | (is_finite & jnp.all(jnp.abs(norm) <= UNBOUNDED))

    def select(new: Array, old: Array) -> Array:
        check_dtype_kept(argument, new, old)
        if np.shape(new) not in ((), old.shape):
            hint = "Return a state like that of `init`."
            raise type_error(argument, "a rule whose state keeps its shapes", describe(new), hint)
        return jnp.where(is_updated, jnp.asarray(new).astype(old.dtype), old)

    return threshold, {rule.name: jax.tree.map(select, new_state, old_state)}


def _call_rule(
    argument: str, rule: Rule, norm: Array, value: Array, state: Tree, param_norm: Array | None
) -> tuple[Array, Tree]:
    """Call the `update` of a rule with `value` in float32, and check its result.

    The returned threshold has the dtype and shape of `norm`. The largest number of the dtype means
    that there is no threshold.
    """
    given = param_norm.astype(jnp.float32) if rule.uses_params and param_norm is not None else None
    result = rule.update(value.astype(jnp.float32), state, given)
    if not (isinstance(result, tuple) and len(result) == 2):
        must = "a rule that returns a threshold and the next state"
        raise type_error(argument, must, describe(result), "Return a tuple from `Rule.update`.")
    threshold, new_state = result
    hint = "Return a threshold and the next state from `Rule.update`."
    dtype = dtype_of(threshold)
    is_real = jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
    if not is_real or np.shape(threshold) not in ((), norm.shape):
        must = f"a rule that returns a threshold like {describe(norm)}"
        raise type_error(argument, must, describe(threshold), hint)
    if jax.tree.structure(new_state) != jax.tree.structure(state):
        must = f"a rule that returns a state like {shortened(state)}"
        raise type_error(argument, must, shortened(new_state), hint)
    if isinstance(threshold, int):
        threshold = check_number(argument, threshold, hint, "[-inf, inf]")
    threshold = jnp.asarray(threshold, norm.dtype)
    if norm.ndim and not threshold.ndim:
        threshold = threshold + jnp.zeros_like(norm)  # with the sharding of the norms
    if norm.dtype == jnp.float64:
        threshold = jnp.where(threshold >= UNBOUNDED, jnp.finfo(norm.dtype).max, threshold)
    return threshold, new_state


def init_rules(rules: Sequence[Rule], num_norms: int) -> Tree:
    """Return the initial states of the rules; see `apply_rules`."""
    shape = (num_norms,) if len(rules) == 1 and num_norms != 1 else ()
    return _with_leaves(tuple([init_state(rule, shape) for rule in rules]))


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
    if len(rules) != 1:
        states = _checked_states(rules, norms.arrays, states)
        results = list(map(apply, rules, norms.arrays, states, param_norms.arrays))
        states = _with_leaves(tuple([state for _, state in results]))
        return PerGroup([threshold for threshold, _ in results], norms.groups), states
    (rule,) = rules
    if rule.init is None:
        return norms.map(lambda norm, of_param: apply(rule, norm, (), of_param)[0], param_norms), ()
    vector = norms.vector()
    (state,) = _checked_states(rules, [vector], states)
    threshold, state = apply(rule, vector, state, param_norms.vector())
    return PerGroup(split(threshold, norms.arrays), norms.groups), _with_leaves((state,))


def _with_leaves(states: tuple[Tree, ...]) -> tuple[Tree, ...]:
    """Return the states of rules, or () if no rule has a state."""
    return states if jax.tree.leaves(states) else ()


def _checked_states(rules: Sequence[Rule], values: Sequence[Array], states: Tree) -> Sequence[Tree]:
    """Return the state of each rule, or raise if the states do not fit the shapes of the norms."""
    like = jax.eval_shape(lambda: tuple(map(init_state, rules, [x.shape for x in values])))
    if not jax.tree.leaves(like):
        return like
    if shapes_of(states) != shapes_of(like):
        hint = "Pass the state of `init` for the structure of the updates."
        raise type_error("state", f"like {shortened(like)}", shortened(states), hint)
    return states
