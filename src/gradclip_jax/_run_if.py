"""Runs a step zero or one times, in place: what accumulation and guards share.

Where the step is rarely taken, as that of an accumulation, it is the body of a `while_loop` that
makes zero or one trip. `lax.cond` copies the branch it does not change (9.0 N moved and 3.0 N of
scratch for a held step of AdamW on an H100, against 3.0 N and none), `jnp.where` computes both.

Where it is usually taken, as behind a guard, the loop stays on a CPU, where a skipped step then
costs nothing. A GPU would have to wait for the host at every step, so there, and on a TPU, the
step is always computed and its result selected.
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
    pure_step = jax.jit(pure_step)  # traced once for both ways to run it
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
        def choose(new: Any, old: Any) -> Any:
            return old if new is old else jnp.where(predicate, new, old)

        # XLA (JAX 0.10.2, H100 and TPU v5e) fuses the step both into a check before it and into
        # this selection: 11 N moved for AdamW and no scratch, with an optimization barrier in
        # between the same, and for Adafactor 12 N instead of 9 N.
        return jax.tree.map(choose, step(carry, *closed_over), carry)

    if not usually:
        return loop(predicate, carry, closed_over)
    return lax.platform_dependent(predicate, carry, closed_over, cpu=loop, default=select)


@_run_if.defjvp
def _run_if_jvp(step: Any, usually: bool, primals: Any, tangents: Any) -> tuple[Tree, Tree]:
    def by_cond(predicate: Array, carry: Tree, closed_over: tuple[Array, ...]) -> Tree:
        return lax.cond(predicate, step, lambda carry, *_: carry, carry, *closed_over)

    return jax.jvp(by_cond, primals, tangents)


def check_if(predicate: Array | bool, check: Callable[[], Scalar]) -> Scalar:
    """What a check finds; where the predicate does not hold, a CPU is spared it and gets True."""
    if not is_traced(predicate):
        return check() if bool(predicate) else jnp.array(True)
    check = jax.jit(check)  # traced once for both
    return lax.platform_dependent(
        predicate,
        cpu=lambda predicate: lax.cond(predicate, check, lambda: jnp.array(True)),
        default=lambda predicate: check(),
    )
