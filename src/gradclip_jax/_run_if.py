"""Runs a step zero or one times, in place: what accumulation and guards share.

`lax.cond` copies the branch it does not change, `jnp.where` computes both. A `while_loop` that
makes zero or one trip does neither: its carry stays in the buffers it came in.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from ._checks import check_transformation, is_float0, is_traced
from ._mesh import reshard_like, zeros_of_type
from ._types import Array, Tree

Step = Callable[[Tree], Tree]


def run_if(predicate: Array | bool, step: Step, carry: Tree) -> Tree:
    """`step(carry)` where the predicate holds, else the carry itself, with no copy of it.

    A Python bool decides when the program is traced. The carry keeps its dtypes and its
    sharding. Differentiable in both modes: a loop is not in reverse, so its derivative is that of
    the equivalent `lax.cond`.
    """

    def typed_step(carry: Tree) -> Tree:
        out = like_dtypes(step(carry), carry)
        return jax.tree.map(
            lambda x, like: x if is_float0(x) else reshard_like(x, like), out, carry
        )

    if not is_traced(predicate):
        return typed_step(carry) if bool(predicate) else carry
    # What the step closes over becomes an argument: a custom derivative needs to see it.
    pure_step, closed_over = jax.closure_convert(typed_step, carry)
    return _run_if(pure_step, predicate, carry, tuple(closed_over))


def _reshard(x: Any, like: Any) -> Any:
    return x if is_float0(x) else reshard_like(x, like)


def like_dtypes(tree: Tree, reference: Tree) -> Tree:
    """The tree in the dtypes of the reference; a float0 leaf leaves the reference as it is."""

    def convert(x: Any, like: Any) -> Any:
        if is_float0(x):
            return like
        dtype = jnp.result_type(like)
        # A typed random key has no `astype`, and is never of another dtype.
        is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
        return x if is_key else jnp.asarray(x).astype(dtype)

    return jax.tree.map(convert, tree, reference)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _run_if(step: Any, predicate: Array, carry: Tree, closed_over: tuple[Array, ...]) -> Tree:
    def trip(loop: tuple[Array, Tree]) -> tuple[Array, Tree]:
        return jnp.zeros_like(loop[0]), step(loop[1], *closed_over)

    return lax.while_loop(lambda loop: loop[0], trip, (predicate, carry))[1]


@_run_if.defjvp
def _run_if_jvp(step: Any, primals: Any, tangents: Any) -> tuple[Tree, Tree]:
    def by_cond(predicate: Array, carry: Tree, closed_over: tuple[Array, ...]) -> Tree:
        return lax.cond(predicate, step, lambda carry, *_: carry, carry, *closed_over)

    return jax.jvp(by_cond, primals, tangents)


class Gate(NamedTuple):
    """Whether the inner transformation takes its step, and on what.

    Attributes:
        is_open: bool[], the same on all devices; or a bool that is known when traced.
        accumulator: what the gradients are read from, in buffers that may be overwritten.
        read_gradient: makes from it the gradients of the inner transformation, and the next
            accumulator: the gradients themselves, if they can take its buffers.
        inner_state: its state.
        extra_args: its extra arguments.
        next_state: `(inner_state, accumulator)` after the step to the next state of the whole.
    """

    is_open: Array | bool
    accumulator: Tree
    read_gradient: Callable[[Tree], tuple[Tree, Tree]]
    inner_state: Any
    extra_args: dict[str, Any]
    next_state: Callable[[Any, Tree], Any]


@dataclasses.dataclass(frozen=True)
class GatedUpdate:
    """The `update` of a transformation whose inner one takes a step only when a gate is open.

    An object, so that `apply_gradients` can look behind it wherever the transformation has
    been: some trainers take a transformation apart and put it together again.

    Attributes:
        inner: the inner transformation.
        gate: `(updates, state, params, extra_args) -> Gate`.
    """

    inner: optax.GradientTransformationExtraArgs
    gate: Callable[[Tree, Any, Tree, dict[str, Any]], Gate]

    def __call__(
        self, updates: Tree, state: Any, params: Tree | None = None, **extra_args: Any
    ) -> tuple[Tree, Any]:
        """The update of the inner transformation, or zeros while the gate is shut."""
        now = self.gate(updates, state, params, extra_args)

        def inner_update(grads: Tree, inner_state: Any) -> tuple[Tree, Any]:
            return self.inner.update(grads, inner_state, params, **now.extra_args)

        def step(carry: Tree) -> Tree:
            grads, accumulator = now.read_gradient(carry[2])
            return *inner_update(grads, carry[1]), accumulator

        def plain_step() -> Tree:
            grads, _ = now.read_gradient(now.accumulator)
            return inner_update(like_dtypes(grads, updates), now.inner_state)

        # Their type is that of the update, which may be sharded otherwise, or vary less.
        zeros = jax.tree.map(zeros_of_type, jax.eval_shape(plain_step)[0])
        carry = (zeros, now.inner_state, now.accumulator)
        emitted, inner_state, accumulator = run_if(now.is_open, step, carry)
        return emitted, now.next_state(inner_state, accumulator)


def gated(
    inner: optax.GradientTransformation,
    init: optax.TransformInitFn,
    gate: Callable[[Tree, Any, Tree, dict[str, Any]], Gate],
) -> optax.GradientTransformationExtraArgs:
    """Builds a transformation from its gate."""
    update = GatedUpdate(optax.with_extra_args_support(inner), gate)
    return optax.GradientTransformationExtraArgs(init, update)


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
        params: the parameters.
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
    gated_update = tx.update
    if not isinstance(gated_update, GatedUpdate):
        update = optax.with_extra_args_support(tx).update
        updates, state = update(grads, state, params, **extra_args)
        return _apply_updates(params, updates), state
    inner = gated_update.inner
    now = gated_update.gate(grads, state, params, extra_args)

    def step(carry: Tree) -> Tree:
        params, inner_state, accumulator = carry
        grads, accumulator = now.read_gradient(accumulator)
        return *apply_gradients(inner, grads, inner_state, params, **now.extra_args), accumulator

    carry = (params, now.inner_state, now.accumulator)
    params, inner_state, accumulator = run_if(now.is_open, step, carry)
    return params, now.next_state(inner_state, accumulator)


def _apply_updates(params: Tree, updates: Tree) -> Tree:
    """`optax.apply_updates`, which cannot add a float0: a parameter without gradient stays."""

    def addend(update: Any, param: Any) -> Any:
        return jnp.zeros_like(param) if is_float0(update) else update

    return optax.apply_updates(params, jax.tree.map(addend, updates, params))
