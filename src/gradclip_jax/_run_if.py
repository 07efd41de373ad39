"""Runs a step zero or one times, in place: what accumulation and guards share.

Where the step is rarely taken, as that of an accumulation, it is the body of a `while_loop` that
makes zero or one trip. `lax.cond` copies the branch it does not change (9.0 N moved and 3.0 N of
scratch for a held step of AdamW on an H100, against 3.0 N and none), `jnp.where` computes both.

Where it is usually taken, as behind a guard, the loop stays on a CPU, where a skipped step then
costs nothing. A GPU would have to wait for the host at every step, so there, and on a TPU, the
step is always computed and its result selected.
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
from ._mesh import is_unreduced, reshard_like, varying_axes, zeros_of_type
from ._states import plain_arrays, with_structure_of
from ._types import Array, Scalar, Tree

Step = Callable[[Tree], Tree]


def run_if(predicate: Array | bool, step: Step, carry: Tree, *, usually: bool = False) -> Tree:
    """`step(carry)` where the predicate holds, else the carry itself, with no copy of it.

    A Python bool decides when the program is traced. The carry keeps its dtypes and its
    sharding. Differentiable in both modes: a loop is not in reverse, so its derivative is that of
    the equivalent `lax.cond`. With `usually` a GPU and a TPU select instead of looping.
    """

    def typed_step(carry: Tree) -> Tree:
        return jax.tree.map(_on_mesh_like, like_dtypes(step(carry), carry), carry)

    if not is_traced(predicate):
        return typed_step(carry) if bool(predicate) else carry
    # What the step closes over becomes an argument: a custom derivative needs to see it.
    pure_step, closed_over = jax.closure_convert(typed_step, carry)
    if is_unreduced((carry, closed_over)):
        # XLA (JAX 0.10.2) sums what is unreduced over devices before it enters a loop, and what
        # is added to it there once more.
        return lax.cond(predicate, pure_step, lambda carry, *_: carry, carry, *closed_over)
    return _run_if(pure_step, usually, predicate, carry, tuple(closed_over))


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


def _on_mesh_like(x: Any, like: Any) -> Any:
    return x if is_float0(x) else reshard_like(x, like)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _run_if(
    step: Any, usually: bool, predicate: Array, carry: Tree, closed_over: tuple[Array, ...]
) -> Tree:
    def loop(predicate: Array, carry: Tree, closed_over: tuple[Array, ...]) -> Tree:
        def trip(state: tuple[Array, Tree]) -> tuple[Array, Tree]:
            return jnp.zeros_like(state[0]), step(state[1], *closed_over)

        return lax.while_loop(lambda state: state[0], trip, (predicate, carry))[1]

    def select(predicate: Array, carry: Tree, closed_over: tuple[Array, ...]) -> Tree:
        # XLA (JAX 0.10.2, H100) merges the step with an earlier look at it, and writes its result
        # down for both: 14 N moved where a second computation behind the barrier makes it 11 N.
        # What the step closes over is not behind it: the norm of a gradient is taken once.
        known = _after(predicate, carry)
        result = step(known, *closed_over)

        def choose(new: Any, same: Any, old: Any) -> Any:
            # What the step hands through must stay what it was, or a TPU copies it.
            return old if new is same else jnp.where(predicate, new, same)

        return jax.tree.map(choose, result, known, carry)

    if not usually:
        return loop(predicate, carry, closed_over)
    return lax.platform_dependent(predicate, carry, closed_over, cpu=loop, default=select)


def _after(predicate: Array, tree: Tree) -> Tree:
    """The same arrays, which XLA may not read before it knows the predicate."""
    leaves, structure = jax.tree.flatten(tree)
    leaves = [jnp.asarray(x) for x in leaves]
    # All that one barrier takes comes out varying over the same axes of a mesh.
    for axes in {varying_axes(x) for x in leaves}:
        places = [i for i, x in enumerate(leaves) if varying_axes(x) == axes]
        out = lax.optimization_barrier((predicate, [leaves[i] for i in places]))[1]
        for i, x in zip(places, out, strict=True):
            leaves[i] = x
    return jax.tree.unflatten(structure, leaves)


@_run_if.defjvp
def _run_if_jvp(step: Any, usually: bool, primals: Any, tangents: Any) -> tuple[Tree, Tree]:
    def by_cond(predicate: Array, carry: Tree, closed_over: tuple[Array, ...]) -> Tree:
        return lax.cond(predicate, step, lambda carry, *_: carry, carry, *closed_over)

    return jax.jvp(by_cond, primals, tangents)


def check_if(predicate: Array, check: Callable[[], Scalar]) -> Scalar:
    """What a check finds; where the predicate does not hold, a CPU is spared it and gets True."""
    if not is_traced(predicate):
        return check() if bool(predicate) else jnp.array(True)
    return lax.platform_dependent(
        predicate,
        cpu=lambda predicate: lax.cond(predicate, check, lambda: jnp.array(True)),
        default=lambda predicate: check(),
    )


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
        check: `(accumulator, inner_state, params)` before the step to whether it may be taken;
            None is always.
        usually_open: whether the gate is open but for accidents.
    """

    is_open: Array | bool
    accumulator: Tree
    read_gradient: Callable[[Tree], tuple[Tree, Tree]]
    inner_state: Any
    extra_args: dict[str, Any]
    next_state: Callable[[Any, Tree, Array], Any]
    check: Callable[[Tree, Any, Tree], Scalar] | None = None
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

        def take(grads: Tree, inner_state: Any, output: Tree) -> tuple[Tree, Any]:
            return inner_update(grads, inner_state)

        return _pass_gate(now, take, zeros, lambda output: params)


def _pass_gate(
    now: Gate,
    take: Callable[[Tree, Any, Tree], tuple[Tree, Any]],
    output: Tree,
    params_of: Callable[[Tree], Tree],
) -> tuple[Tree, Any]:
    """The output and the next state: after the step, if the gate is open and the check passes.

    The check of a gate that is seldom open runs inside the loop, so that there is one loop.
    """
    check = now.check

    def step(carry: Tree) -> Tree:
        output, inner_state, accumulator = carry
        grads, accumulator = now.read_gradient(accumulator)
        return *take(grads, inner_state, output), accumulator

    def checked(is_open: Array, carry: Tree) -> tuple[Tree, Array]:
        output, inner_state, accumulator = carry
        assert check is not None
        passed = check_if(is_open, lambda: check(accumulator, inner_state, params_of(output)))
        passed = is_open & passed
        return run_if(passed, step, carry, usually=now.usually_open), passed

    carry, stepped = (output, now.inner_state, now.accumulator), now.is_open
    if check is None:
        carry = run_if(stepped, step, carry, usually=now.usually_open)
    elif now.usually_open:
        carry, stepped = checked(stepped, carry)
    else:
        start = (carry, jnp.array(False))
        carry, stepped = run_if(stepped, lambda pair: checked(jnp.array(True), pair[0]), start)
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
    gated_update = tx.update
    if not isinstance(gated_update, GatedUpdate):
        update = optax.with_extra_args_support(tx).update
        updates, state = update(grads, state, params, **extra_args)
        return _apply_updates(params, updates), state
    now = gated_update.gate(grads, state, params, extra_args, True)

    def take(grads: Tree, inner_state: Any, params: Tree) -> tuple[Tree, Any]:
        return apply_gradients(gated_update.inner, grads, inner_state, params, **now.extra_args)

    return _pass_gate(now, take, params, lambda params: params)


def _apply_updates(params: Tree, updates: Tree) -> Tree:
    """`optax.apply_updates`, also of float0, and where JAX is told not to promote dtypes.

    A float0 update leaves its integer parameter as it is.
    """

    def addend(update: Any, param: Any) -> Any:
        return jnp.zeros_like(param) if is_float0(update) else update

    with jax.numpy_dtype_promotion("standard"):
        return optax.apply_updates(params, jax.tree.map(addend, updates, params))
