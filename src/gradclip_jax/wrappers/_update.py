"""The public interface of guards and accumulations: `update` and `apply_gradients`."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from .._checks import check_same_structure, check_transformation, check_values, is_scalar
from .._clip_order import check_clip_order
from .._errors import public, type_error, warn
from .._format import shortened
from .._metrics import metric_names
from .._states import plain_arrays, with_structure_of
from .._types import Tree, as_pytree
from ._accumulation import Accumulation
from ._execute import apply_updates, execute
from ._extra_args import ExtraArgs
from ._guard import Guard, Measure, check_guard_arguments
from ._wrappers import Wrappers


class InPlaceUpdate:
    """An `update` function that can also add the updates to the parameters.

    This is a class and not an attribute, because `functools.wraps` copies attributes to wrappers
    that cannot update in place.
    """

    def apply(
        self, grads: Tree, state: Tree, params: Tree, extra_args: ExtraArgs, measure: Measure | None
    ) -> tuple[Tree, Tree, Tree]:
        """Return the new parameters, the next state, and the measurements.

        The measurements are zeros if the inner transformation did not run, and None without
        `measure`.
        """
        raise NotImplementedError


@as_pytree
@dataclasses.dataclass(frozen=True, eq=False)
class WrapperUpdate(InPlaceUpdate):
    """The `update` function of guards and an accumulation.

    The function is a callable object instead of a closure, so that another guard can read and
    extend its `wrappers`, even if a trainer has rebuilt the transformation from `init` and
    `update`. `jax.named_call` requires `__name__`.
    """

    __name__: ClassVar[str] = "update"
    wrappers: Wrappers

    def __call__(
        self, updates: Tree, state: Tree, params: Tree | None = None, **extra_args: Any
    ) -> tuple[Tree, Tree]:
        """Return the update of the inner transformation, or zeros if it does not run."""
        step, _, state = execute(self.wrappers, updates, state, params, extra_args)
        return step.updates, state

    def apply(
        self, grads: Tree, state: Tree, params: Tree, extra_args: ExtraArgs, measure: Measure | None
    ) -> tuple[Tree, Tree, Tree]:
        """Implement `apply_gradients`."""
        arguments = grads, state, params, extra_args
        step, params, state = execute(self.wrappers, *arguments, in_place=True, measure=measure)
        return params, state, step.measured


def wrap(
    wrapper: Guard | Accumulation, inner: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """Wrap a transformation, or add another wrapper if it is already wrapped."""
    if isinstance(wrapper, Guard):
        arguments = wrapper.axis_name, wrapper.trainable, wrapper.max_consecutive_skips
        check_guard_arguments(inner, *arguments)
    if isinstance(inner.update, WrapperUpdate):
        wrappers = inner.update.wrappers
    else:
        wrappers = Wrappers(wrapper.name, optax.with_extra_args_support(inner))
    wrappers = wrappers.with_outer(wrapper)
    init: Any = jax.tree_util.Partial(Wrappers.init, wrappers)  # a pytree, unlike a bound method
    return optax.GradientTransformationExtraArgs(init, WrapperUpdate(wrappers))


@public
@jax.named_scope("apply_gradients")
def apply_gradients(
    tx: optax.GradientTransformation, grads: Tree, state: Tree, params: Tree, **extra_args: Any
) -> tuple[Tree, Tree]:
    """Run `update` and `optax.apply_updates` in one call.

    The result equals that of the two separate calls, with one exception: if `accumulate_gradients`
    or `dynamic_loss_scale` computes bfloat16 gradients in float32, the updates are rounded only
    once, when they are added to the parameters. `apply_gradients` is faster for accumulations and
    guards. If the optimizer does not run, parameters and optimizer state are not read or written,
    whereas `update` must return a tree of zeros. Donate `params` and `state` to the jitted step;
    otherwise they are copied.

    Args:
        tx: Gradient transformation.
        grads: Gradients with the structure of `params`.
        state: State of `tx`.
        params: Parameters; may be Flax NNX variables.
        **extra_args: Extra arguments for `tx.update`.

    Returns:
        The new parameters, with unchanged dtypes and types, and the new state.

    Raises:
        TypeError: If `tx` is not a gradient transformation, or if it clips scaled gradients.

    Examples:
        >>> import jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = gcx.accumulate_gradients(optax.sgd(1.0), every=2)
        >>> params = jnp.array([0.0])
        >>> state = tx.init(params)
        >>> for grads in (jnp.array([1.0]), jnp.array([3.0])):
        ...     params, state = gcx.apply_gradients(tx, grads, state, params)
        >>> params.tolist()
        [-2.0]
    """
    check_transformation("tx", tx)
    arrays = plain_arrays((grads, state, params))
    if jax.tree.structure(arrays) != jax.tree.structure((grads, state, params)):
        return with_structure_of((params, state), apply_gradients(tx, *arrays, **extra_args))
    for name, tree in (("grads", grads), ("state", state), ("params", params)):
        check_values(name, tree)
    _warn_of_unread_weight(extra_args, state)
    check_clip_order(state)
    _check_order(grads, state, params)
    if params is None:
        check_same_structure(grads, params)  # raises unless the gradient is None as well
    if isinstance(tx.update, InPlaceUpdate):
        params, state, _ = tx.update.apply(grads, state, params, extra_args, None)
        return params, state
    update = optax.with_extra_args_support(tx).update
    updates, state = update(grads, state, params, **extra_args)
    return apply_updates(params, updates), state


def _check_order(grads: Tree, state: Tree, params: Tree) -> None:
    """Raise if the parameters were passed before the state."""
    kinds = [jax.tree.structure(x) for x in (grads, state, params)]
    if kinds[0] == kinds[1] != kinds[2]:
        hint = "Call `apply_gradients(tx, grads, state, params)`."
        raise type_error("state", "the state of `tx`", f"{shortened(state)}, like `grads`", hint)


def _warn_of_unread_weight(extra_args: ExtraArgs, state: Tree) -> None:
    """Warn if the weight of a micro-batch is passed, but no accumulation reads it."""
    is_weight = is_scalar(extra_args.get("weight"), jnp.floating, jnp.integer)
    if is_weight and "mini_step" not in metric_names(state):
        hint = "Wrap the optimizer in `accumulate_gradients`."
        warn(f"No accumulation reads the extra argument `weight`. {hint}")
