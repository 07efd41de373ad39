"""Runs a step zero or one times, in place: what accumulation and guards share.

Where the step is rarely taken, as that of an accumulation, it is the body of a `while_loop` that
makes zero or one trip. `lax.cond` copies the branch it does not change (9.0 N moved and 3.0 N of
scratch for a held step of AdamW on an H100, against 3.0 N and none), `jnp.where` computes both.

Where it is usually taken, as behind a guard, the loop stays on a CPU, where a skipped step then
costs nothing. A GPU would have to wait for the host at every step, so there, and on a TPU, the
step is always computed and its result selected.

What a step computes may be checked before it counts. It is computed to be checked and once more
to be written, so that there is no copy to restore.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ._checks import is_float0, is_traced
from ._mesh import is_unreduced, reshard_like
from ._types import Array, Scalar, Tree

Step = Callable[..., Any]
"""From a carry, and arrays that it reads besides, to the next carry."""

Way = Callable[[Step, Any, Tree, tuple[Any, ...]], Tree]
"""How to run a step: `(step, predicate, carry, closed_over)` to the carry."""


def run_if(predicate: Array | bool, step: Step, carry: Tree, *, usually: bool = False) -> Tree:
    """`step(carry)` where the predicate holds, else the carry itself, with no copy of it.

    A Python bool decides when the program is traced. The carry keeps its dtypes and its
    sharding. Differentiable in both modes: a loop is not in reverse, so its derivative is that of
    the equivalent `lax.cond`. With `usually` a GPU and a TPU select instead of looping.
    """

    def typed_step(carry: Tree) -> Tree:
        return _typed_like(step(carry), carry)

    if not is_traced(predicate):
        return typed_step(carry) if bool(predicate) else carry
    pure_step, closed_over = _pure(typed_step, carry)
    return _run_if(pure_step, _usual if usually else _loop, predicate, carry, closed_over)


def run_if_good(
    predicate: Array | bool,
    step: Callable[[Tree], tuple[Tree, Tree]],
    check: Callable[[Tree, Tree, Tree], Scalar],
    carry: Tree,
) -> tuple[Tree, Array]:
    """As `run_if`, usually, where also the check holds; returns besides whether the step was taken.

    The step returns the next carry, and what else there is to see, such as the update; the check
    takes the carry and these two, and returns bool[].
    """

    def typed_step(carry: Tree) -> tuple[Tree, Tree]:
        next_carry, seen = step(carry)
        return _typed_like(next_carry, carry), seen

    if not is_traced(predicate) and not bool(predicate):
        return carry, jnp.array(False)
    if not any(map(is_traced, jax.tree.leaves((predicate, carry)))):
        next_carry, seen = typed_step(carry)
        passed = check(carry, next_carry, seen)
        if not is_traced(passed):
            return (next_carry if bool(passed) else carry), passed
    pure_step, closed_over = _pure(typed_step, carry)

    def checked() -> Scalar:
        return check(carry, *pure_step(carry, *closed_over))

    def only_step(carry: Tree, *closed_over: Array) -> Tree:
        return pure_step(carry, *closed_over)[0]

    checked = jax.jit(checked)  # traced once for both
    passed = predicate & lax.platform_dependent(
        predicate,
        cpu=lambda predicate: lax.cond(predicate, checked, lambda: jnp.array(True)),
        default=lambda predicate: checked(),
    )
    return _run_if(only_step, _usual, passed, carry, closed_over), passed


def _pure(step: Step, carry: Tree) -> tuple[Step, tuple[Any, ...]]:
    """The step, traced once for all ways to run it, and what it closes over.

    That becomes an argument, for a custom derivative needs to see it.
    """
    pure_step, closed_over = jax.closure_convert(jax.jit(step), carry)
    return pure_step, tuple(closed_over)


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


def _typed_like(tree: Tree, carry: Tree) -> Tree:
    """The tree in the dtypes of the carry, and sharded as its type says."""

    def on_mesh(x: Any, like: Any) -> Any:
        return x if is_float0(x) else reshard_like(x, like)

    return jax.tree.map(on_mesh, like_dtypes(tree, carry), carry)


def _run_if(
    step: Step, way: Way, predicate: Any, carry: Tree, closed_over: tuple[Any, ...]
) -> Tree:
    if is_unreduced((carry, closed_over)):
        # XLA (JAX 0.10.2) sums what is unreduced over devices before it enters a loop, and what
        # is added to it there once more.
        return _cond(step, predicate, carry, closed_over)
    return _differentiable(step, way, predicate, carry, closed_over)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _differentiable(
    step: Step, way: Way, predicate: Any, carry: Tree, closed_over: tuple[Any, ...]
) -> Tree:
    return way(step, predicate, carry, closed_over)


@_differentiable.defjvp
def _jvp(step: Step, way: Way, primals: Any, tangents: Any) -> tuple[Tree, Tree]:
    return jax.jvp(functools.partial(_cond, step), primals, tangents)


def _cond(step: Step, predicate: Any, carry: Tree, closed_over: tuple[Any, ...]) -> Tree:
    return lax.cond(predicate, step, lambda carry, *_: carry, carry, *closed_over)


def _loop(step: Step, predicate: Any, carry: Tree, closed_over: tuple[Any, ...]) -> Tree:
    def trip(state: tuple[Array, Tree]) -> tuple[Array, Tree]:
        return jnp.zeros_like(state[0]), step(state[1], *closed_over)

    return lax.while_loop(lambda state: state[0], trip, (predicate, carry))[1]


def _select(step: Step, predicate: Any, carry: Tree, closed_over: tuple[Any, ...]) -> Tree:
    def choose(new: Any, old: Any) -> Any:
        return old if new is old else lax.select(predicate, new, old)

    # XLA (JAX 0.10.2, H100 and TPU v5e) fuses the step both into a check before it and into this
    # selection: 11 N moved for AdamW and no scratch, with an optimization barrier in between the
    # same, and for Adafactor 12 N instead of 9 N.
    return jax.tree.map(choose, step(carry, *closed_over), carry)


def _usual(step: Step, predicate: Any, carry: Tree, closed_over: tuple[Any, ...]) -> Tree:
    loop, select = (functools.partial(way, step) for way in (_loop, _select))
    return lax.platform_dependent(predicate, carry, closed_over, cpu=loop, default=select)
