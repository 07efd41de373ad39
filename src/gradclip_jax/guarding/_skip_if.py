"""Guards with user-defined conditions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._checks import call_user, check_arrays, check_callable, check_rule_name, is_scalar, shapes_of
from .._errors import public, type_error
from .._format import describe, shortened
from .._run_if import like_dtypes
from .._states import check_dtype_kept, state_of_rule
from .._types import AxisName, Count, Scalar, Tree, as_pytree
from ..norms._mask import Mask
from ..norms._mesh import varying_axes
from ..wrappers._extra_args import ExtraArgs
from ..wrappers._guard import Guard, Rejections
from ..wrappers._update import wrap


@as_pytree
@dataclasses.dataclass(frozen=True)
class SkipRule:
    """A condition for skipping a step that depends on earlier steps, for `skip_if`.

    Attributes:
        init: Function `params -> state` that returns the initial state, a pytree of arrays.
        should_skip: Function `(grads, state, params, **extra_args) -> (skip, observed)`. `skip` is
            a bool[] that is the same on all devices, and `observed` is a pytree for `advance`.
        advance: Function `(state, observed, skipped) -> state`, called after `should_skip`. Its
            result is kept if this guard skips the step, or if the gradient is applied or
            accumulated. The shapes and dtypes of the state must not change.
        name: Name of the rule. The default is the qualified name of `should_skip`.
            `convert_state` does not copy the state of a rule with another name, or of an unnamed
            lambda function.

    Examples:
        Skip steps whose loss is more than twice the loss of the last applied step:

        >>> import jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> def should_skip(grads, last, params, *, value, **extra_args):
        ...     return value > 2 * last, value
        >>> def advance(last, value, skipped):
        ...     return jnp.where(skipped, last, value)
        >>> rule = gcx.SkipRule(lambda params: jnp.float32(jnp.inf), should_skip, advance)
        >>> tx = gcx.skip_if(optax.sgd(1.0), rule)
        >>> params = jnp.array([1.0])
        >>> state = tx.init(params)
        >>> for loss in (3.0, 7.0, 5.0):
        ...     params, state = gcx.apply_gradients(tx, params, state, params, value=loss)
        ...     print(bool(gcx.has_updated(state)))
        True
        False
        True
    """

    init: Callable[[Tree], Tree]
    should_skip: Callable[..., tuple[Scalar, Tree]]
    advance: Callable[[Tree, Tree, Scalar], Tree]
    name: str = ""

    @public
    def __post_init__(self) -> None:
        for name in ("init", "should_skip", "advance"):
            check_callable(name, getattr(self, name), "Pass a function; see `gcx.SkipRule`.")
        object.__setattr__(self, "name", check_rule_name(self.name, self.should_skip))


@public
def skip_if(
    inner: optax.GradientTransformation,
    predicate: Callable[..., Scalar] | SkipRule,
    *,
    max_consecutive_skips: Count | None = 50,
    axis_name: AxisName = None,
    trainable: Mask = None,
) -> optax.GradientTransformationExtraArgs:
    """Skip steps for which a user-defined function returns True.

    | step | result |
    | --- | --- |
    | `predicate` returns False | applied |
    | `predicate` returns True | zero update, inner state unchanged |
    | a micro-batch that closes the window of an accumulation directly inside this guard | the |
    | | function is called again with the mean gradient of the window, and True drops the window |
    | a micro-batch of weight 0 of an accumulation inside this guard | not skipped |
    | NaN, for which all comparisons are False | applied; use `skip_nonfinite` as well |

    Args:
        inner: Gradient transformation.
        predicate: Function `(grads, params, **extra_args) -> bool[]`, or a `SkipRule` if the
            condition depends on earlier steps. `extra_args` are the extra arguments of `update`.
            Around an accumulation, `weight` is passed for a micro-batch but not for a window, so
            give it a default. The result must be the same on all devices; inside `shard_map`, a
            result that varies over devices raises.
        max_consecutive_skips: See `skip_nonfinite`.
        axis_name: See `skip_nonfinite`; used for the metric `grad_norm`.
        trainable: See `skip_nonfinite`.

    Returns:
        A gradient transformation with a `WrapperState`.

    Raises:
        TypeError: If `inner` is not a gradient transformation, if `predicate` is not a function or
            a `SkipRule`, or if it returns anything but a bool[] that is equal on all devices.

    Examples:
        >>> import jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> def is_padding(grads, params, *, num_tokens, **extra_args):
        ...     return num_tokens < 10
        >>> tx = gcx.skip_if(optax.sgd(1.0), is_padding)
        >>> params = jnp.array([1.0])
        >>> updates, state = tx.update(params, tx.init(params), params, num_tokens=3)
        >>> updates.tolist(), int(gcx.metrics(state)["skipped_other"])
        ([0.0], 1)
    """
    rule = predicate if isinstance(predicate, SkipRule) else _without_state(predicate)

    def check(
        grads: Tree, norm: Scalar, state: Tree, params: Tree, extra_args: ExtraArgs
    ) -> tuple[Rejections, Tree]:
        arguments = grads, state_of_rule("predicate", rule.name, state), params
        signature = "should_skip(grads, state, params, **extra_args) -> (skip, observed)"
        result = call_user("predicate", signature, rule.should_skip, *arguments, **extra_args)
        if not (isinstance(result, tuple) and len(result) == 2):
            must = "a rule whose `should_skip` returns `(skip, observed)`"
            hint = "Return for example `value > limit, ()`."
            raise type_error("predicate", must, shortened(result), hint)
        skip, observed = result
        is_bool = is_scalar(skip, jnp.bool_)
        if not is_bool or varying_axes(jnp.asarray(skip)):
            must = "a function that returns a bool[] that is the same on all devices"
            got = f"{jax.typeof(skip)}" if is_bool else describe(skip)
            hint = "Reduce its result with `jnp.any` and, inside `shard_map`, with `jax.lax.pmax`."
            raise type_error("predicate", must, got, hint)
        return {"other": jnp.asarray(skip)}, observed

    def advance(state: Tree, observed: Tree, skipped: Scalar) -> Tree:
        state = state[rule.name]
        signature = "advance(state, observed, skipped) -> state"
        after = call_user("predicate", signature, rule.advance, state, observed, skipped)
        if shapes_of(after) != shapes_of(state):
            must, got = "a rule whose state keeps its shapes", shortened(after)
            raise type_error("predicate", must, got, "Return a state like that of `init`.")
        jax.tree.map(functools.partial(check_dtype_kept, "predicate"), after, state)
        return {rule.name: like_dtypes(after, state)}

    def init(params: Tree) -> Tree:
        state = call_user("predicate", "init", rule.init, params)
        check_arrays("init", state)
        return {rule.name: state}

    guard = Guard(
        "skip_if",
        causes=("other",),
        check=check,
        checks_window=True,
        init=init,
        advance=advance,
        trainable=trainable,
        axis_name=axis_name,
        max_consecutive_skips=max_consecutive_skips,
    )
    return wrap(guard, inner)


def _without_state(predicate: Any) -> SkipRule:
    """Return a rule for a function `(grads, params, **extra_args) -> bool[]`."""
    hint = "Pass a function `(grads, params, **extra_args) -> bool[]`, or a `SkipRule`."
    check_callable("predicate", predicate, hint)

    def should_skip(grads: Tree, state: Tree, params: Tree, **extra_args: Any) -> tuple[Any, Tree]:
        signature = "predicate(grads, params, **extra_args) -> bool[]"
        return call_user("predicate", signature, predicate, grads, params, **extra_args), ()

    return SkipRule(
        init=lambda params: (),
        should_skip=should_skip,
        advance=lambda state, observed, skipped: state,
        name="predicate",
    )
