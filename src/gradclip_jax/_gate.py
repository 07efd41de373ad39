"""Gates: transformations whose inner one takes a step only now and then.

Accumulations and guards are built from a `Gate`; `apply_gradients` looks behind it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ._checks import check_transformation, is_float0
from ._mesh import zeros_of_type
from ._run_if import like_dtypes, run_if, run_if_good
from ._states import plain_arrays, with_structure_of
from ._types import Array, Scalar, Tree


class ComputedStep(NamedTuple):
    """A step of the inner transformation that is not yet taken.

    Attributes:
        grads: the gradients.
        inner_state: its state before.
        updates: its update.
        next_inner_state: its state after.
    """

    grads: Tree
    inner_state: Any
    updates: Tree
    next_inner_state: Any


class Gate(NamedTuple):
    """Whether the inner transformation takes its step, and on what.

    Attributes:
        is_open: bool[], the same on all devices; or a bool that is known when traced.
        accumulator: what the gradients are read from, in buffers that may be overwritten.
        read_gradient: makes from it the gradients of the inner transformation, and the next
            accumulator: the gradients themselves, if they can take its buffers.
        inner_state: its state.
        extra_args: its extra arguments.
        next_state: `(inner_state, accumulator, stepped)` after the step to the next state of the
            whole; `stepped`, bool[], is whether the inner transformation took its step.
        check: from the computed step to whether it may be taken, bool[]; None where there is
            nothing to check.
        usually_open: whether the gate is open but for accidents.
    """

    is_open: Array | bool
    accumulator: Tree
    read_gradient: Callable[[Tree], tuple[Tree, Tree]]
    inner_state: Any
    extra_args: dict[str, Any]
    next_state: Callable[[Any, Tree, Array | bool], Any]
    check: Callable[[ComputedStep], Scalar] | None = None
    usually_open: bool = False


GateFunction = Callable[[Tree, Any, Tree, dict[str, Any], Array | bool], Gate]
"""`(updates, state, params, extra_args, admitted) -> Gate`; what is not admitted, bool[], is left
out: the gate stays closed and the state what it was. The outermost admits all: `True`."""


@dataclasses.dataclass(frozen=True)
class GatedUpdate:
    """The `update` of a transformation whose inner one takes a step only when a gate is open.

    An object, so that `apply_gradients` and guards can look behind it wherever the
    transformation has been: some trainers take one apart and put it together again.

    Attributes:
        inner: the inner transformation.
        gate: decides about its step.
    """

    inner: optax.GradientTransformationExtraArgs
    gate: GateFunction

    def __call__(
        self, updates: Tree, state: Any, params: Tree | None = None, **extra_args: Any
    ) -> tuple[Tree, Any]:
        """The update of the inner transformation, or zeros while the gate is closed."""
        now = self.gate(updates, state, params, extra_args, True)

        def inner_update(grads: Tree, inner_state: Any) -> tuple[Tree, Any]:
            return self.inner.update(grads, inner_state, params, **now.extra_args)

        def plain_step() -> Tree:
            grads, _ = now.read_gradient(now.accumulator)
            return inner_update(like_dtypes(grads, updates), now.inner_state)

        # Their type is that of the update, which may be sharded otherwise, or vary less.
        zeros = jax.tree.map(zeros_of_type, jax.eval_shape(plain_step)[0])

        def take(grads: Tree, inner_state: Any, output: Tree) -> tuple[Tree, Any, Tree]:
            updates, next_state = inner_update(grads, inner_state)
            return updates, next_state, updates

        return _pass_gate(now, take, zeros)


def _pass_gate(
    now: Gate, take: Callable[[Tree, Any, Tree], tuple[Tree, Any, Tree]], output: Tree
) -> tuple[Tree, Any]:
    """The output and the next state: after the step, if the gate is open and the check passes.

    `take` makes of gradients, inner state and output the next output, state, and the updates. A
    gate that is seldom open is checked behind it: a step that is held computes nothing.
    """

    def step(carry: Tree) -> Tree:
        output, inner_state, accumulator = carry
        grads, accumulator = now.read_gradient(accumulator)
        output, inner_state, _ = take(grads, inner_state, output)
        return output, inner_state, accumulator

    def checked_step(is_open: Array | bool, carry: Tree) -> tuple[Tree, Array]:
        # Read once for the check and the step: a second time would need a second array of it.
        grads, accumulator = now.read_gradient(carry[2])

        def compute(carry: Tree) -> tuple[Tree, Tree]:
            output, inner_state = carry
            output, inner_state, updates = take(grads, inner_state, output)
            return (output, inner_state), updates

        def check(carry: Tree, next_carry: Tree, updates: Tree) -> Scalar:
            assert now.check is not None
            return now.check(ComputedStep(grads, carry[1], updates, next_carry[1]))

        next_carry, stepped = run_if_good(is_open, compute, check, carry[:2])
        return (*next_carry, accumulator), stepped

    carry, stepped = (output, now.inner_state, now.accumulator), now.is_open
    if now.check is None:
        carry = run_if(stepped, step, carry, usually=now.usually_open)
    elif now.usually_open:
        carry, stepped = checked_step(stepped, carry)
    else:
        closed = (carry, jnp.array(False))
        carry, stepped = run_if(
            stepped, lambda pair: checked_step(jnp.array(True), pair[0]), closed
        )
    output, inner_state, accumulator = carry
    return output, now.next_state(inner_state, accumulator, stepped)


def gated(
    inner: optax.GradientTransformation, init: optax.TransformInitFn, gate: GateFunction
) -> optax.GradientTransformationExtraArgs:
    """Builds a transformation from its gate."""
    update = GatedUpdate(optax.with_extra_args_support(inner), gate)
    return optax.GradientTransformationExtraArgs(init, update)


def gate_of(
    tx: optax.GradientTransformation,
) -> tuple[optax.GradientTransformationExtraArgs, GateFunction]:
    """What is behind the gate of a transformation, and the gate: of a plain one always open."""
    if isinstance(tx.update, GatedUpdate):
        return tx.update.inner, tx.update.gate

    def gate(
        updates: Tree, state: Any, params: Tree, extra_args: dict[str, Any], admitted: Any
    ) -> Gate:
        return Gate(
            is_open=jnp.asarray(admitted),
            accumulator=(),
            read_gradient=lambda accumulator: (updates, accumulator),
            inner_state=state,
            extra_args=extra_args,
            next_state=lambda inner_state, accumulator, stepped: inner_state,
            usually_open=True,
        )

    return optax.with_extra_args_support(tx), gate


def apply_gradients(
    tx: optax.GradientTransformation, grads: Tree, state: Any, params: Tree, **extra_args: Any
) -> tuple[Tree, Any]:
    """Takes one optimizer step: `update` and `optax.apply_updates` in one call.

    The same numbers, for any transformation; what `accumulate_gradients` gathers from bfloat16
    gradients is rounded once, when it is added to the parameters. For it and the guards this is
    the fast path: a step that is held or skipped touches neither parameters nor optimizer
    state, where `update` must at least write a tree of zeros. Donate `params` and `state` to
    the jitted step, or they are copied.

    Args:
        tx: any Optax transformation.
        grads: the gradients, in the structure of `params`.
        state: the state of `tx`.
        params: the parameters. Variables of Flax's NNX are taken, and come back as such.
        **extra_args: passed on to `tx.update`.

    Returns:
        The new parameters, in their own dtypes, and the new state.

    Raises:
        TypeError: `tx` is no transformation.

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
    check_transformation("apply_gradients", "tx", tx)
    arrays = plain_arrays((grads, state, params))
    if jax.tree.structure(arrays) != jax.tree.structure((grads, state, params)):
        params_and_state = apply_gradients(tx, *arrays, **extra_args)
        return with_structure_of((params, state), params_and_state)
    if not isinstance(tx.update, GatedUpdate):
        return _step(tx, grads, state, params, extra_args)[:2]
    inner, now = tx.update.inner, tx.update.gate(grads, state, params, extra_args, True)

    def take(grads: Tree, inner_state: Any, params: Tree) -> tuple[Tree, Any, Tree]:
        if not isinstance(inner.update, GatedUpdate):
            return _step(inner, grads, inner_state, params, now.extra_args)
        is_seen = now.check is not None
        args = (grads, inner_state, params)
        updates = inner.update(*args, **now.extra_args)[0] if is_seen else None
        return *apply_gradients(inner, *args, **now.extra_args), updates

    return _pass_gate(now, take, params)


def _step(
    tx: optax.GradientTransformation, grads: Tree, state: Any, params: Tree, extra_args: Any
) -> tuple[Tree, Any, Tree]:
    """The step of a transformation without a gate: parameters, state and updates."""
    updates, state = optax.with_extra_args_support(tx).update(grads, state, params, **extra_args)
    return _apply_updates(params, updates), state, updates


def _apply_updates(params: Tree, updates: Tree) -> Tree:
    """`optax.apply_updates`, also of float0, and where JAX is set not to promote dtypes.

    A float0 update leaves its integer parameter as it is.
    """

    def addend(update: Any, param: Any) -> Any:
        return jnp.zeros_like(param) if is_float0(update) else update

    with jax.numpy_dtype_promotion("standard"):
        return optax.apply_updates(params, jax.tree.map(addend, updates, params))
