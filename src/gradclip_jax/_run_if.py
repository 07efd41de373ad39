"""Runs a step zero or one times, in place: what accumulations and guards share.

A step that is seldom taken, as that of an accumulation, is the body of a `while_loop` of zero or
one trip. `lax.cond` copies the branch it does not change (9.0 N moved and 3.0 N of scratch for a
held step of AdamW on an H100, against 3.0 N and none), `jnp.where` computes both.

A step that is usually taken, as behind a guard, stays in the loop on a CPU, where a skipped step
then costs nothing. A GPU would wait for the host at every step, so there, and on a TPU, the step
is always computed and its result selected.

A step that is checked before it counts is computed once and selected on a GPU and a TPU, where XLA
fuses both. A CPU computes it to check it and once more to write it: to select it there would need
a copy of all it changes.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from ._checks import is_float0, is_traced
from ._devices import shared
from ._mesh import is_unreduced, reshard_like
from ._types import Array, Tree

Report: TypeAlias = list[Any]
"""Of a checked step: whether it passed, bool[], then flags and measurements of the checks."""


class Program(NamedTuple):
    """A function that was traced once, to be run wherever it is needed.

    Attributes:
        function: what runs it, `(*constants, *leaves of the arguments) -> leaves`. It holds no
            tracer, so that a derivative or a checkpoint may run it later.
        constants: the arrays it closes over.
        output: its results, as types.
    """

    function: Callable[..., list[Any]]
    constants: list[Any]
    output: Tree

    def __call__(self, *args: Tree, constants: Any = None) -> Tree:
        """The results; with other values for the constants where they are arguments themselves."""
        constants = self.constants if constants is None else constants
        leaves = self.function(*constants, *jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(self.output), leaves)


def trace(function: Callable[..., Tree], *args: Tree) -> Program:
    """Traces a function on arguments, or on their shapes."""
    closed, output = jax.make_jaxpr(function, return_shape=True)(*args)
    # Of the shapes, JAX 0.7 does not say over which devices they vary.
    output = jax.tree.unflatten(jax.tree.structure(output), closed.out_avals)
    jaxpr = closed.jaxpr
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    pure = core.ClosedJaxpr(jaxpr.replace(constvars=[], invars=inputs), [])
    return Program(core.jaxpr_as_fun(pure), list(closed.consts), output)


def run_if(
    predicate: Array | bool, step: Callable[[Tree], Tree], carry: Tree, *, usually: bool = False
) -> Tree:
    """`step(carry)` where the predicate holds, else the carry itself, with no copy of it.

    A Python bool decides when the program is traced. The carry keeps its dtypes and its
    sharding. Differentiable in both modes: a loop is not in reverse, so its derivative is that of
    the equivalent `lax.cond`. With `usually` a GPU and a TPU select instead of looping.
    """

    def typed_step(carry: Tree) -> Tree:
        return _typed_like(step(carry), carry)

    if not is_traced(predicate):
        return typed_step(carry) if bool(predicate) else carry
    program = trace(typed_step, carry)
    return _run(_usual if usually else _loop, _cond, program, predicate, carry)


def run_if_checked(
    predicate: Array | bool, step: Callable[[Tree], tuple[Tree, Report]], carry: Tree
) -> tuple[Tree, Report]:
    """As `run_if`, usually, where also the check of the step passes; and the report of the check.

    The step returns the next carry and its report, which begins with whether it may be taken,
    bool[]. The report of a step that is not computed is False, and NaN.
    """

    def typed_step(carry: Tree) -> tuple[Tree, Report]:
        next_carry, report = step(carry)
        return _typed_like(next_carry, carry), report

    if not is_traced(predicate):
        if not bool(predicate):
            return carry, _no_report(jax.eval_shape(typed_step, carry)[1])
        if not any(map(is_traced, jax.tree.leaves(carry))):
            next_carry, report = typed_step(carry)
            if not is_traced(report[0]):
                return (next_carry if bool(report[0]) else carry), report
    program = trace(typed_step, carry)
    return _run(_checked, _checked_cond, program, jnp.asarray(predicate), carry)


def _no_report(report: Report) -> Report:
    def unknown(x: Any) -> Array:
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        return jnp.full(x.shape, jnp.nan if is_float else 0, x.dtype)

    return jax.tree.map(unknown, report)


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


Form = Callable[[Callable[[Tree], Any], Any, Tree], Any]
"""How a step is run: from the step, the predicate and the carry to the results."""


def _run(form: Form, branch: Form, program: Program, predicate: Any, carry: Tree) -> Any:
    """Runs the step in one form, with the derivative of another."""
    # XLA (JAX 0.10.2) sums what is unreduced over devices before it enters a loop, and what is
    # added to it there once more.
    form = branch if is_unreduced((carry, program.constants)) else form
    bare = program._replace(constants=[])

    def run_as(form: Form, predicate: Any, carry: Tree, constants: list[Any]) -> Any:
        return form(functools.partial(bare, constants=constants), predicate, carry)

    @jax.custom_jvp
    def run(predicate: Any, carry: Tree, constants: list[Any]) -> Any:
        return run_as(form, predicate, carry, constants)

    @run.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return jax.jvp(functools.partial(run_as, branch), primals, tangents)

    return run(predicate, carry, program.constants)


def _cond(step: Callable[[Tree], Tree], predicate: Any, carry: Tree) -> Tree:
    return lax.cond(predicate, step, lambda carry: carry, carry)


def _loop(step: Callable[[Tree], Tree], predicate: Any, carry: Tree) -> Tree:
    def trip(state: tuple[Array, Tree]) -> tuple[Array, Tree]:
        return jnp.zeros_like(state[0]), step(state[1])

    return lax.while_loop(lambda state: state[0], trip, (predicate, carry))[1]


def _select(predicate: Any, new: Tree, old: Tree) -> Tree:
    # XLA (JAX 0.10.2, H100 and TPU v5e) fuses the step both into a check before it and into this
    # selection: 11 N moved for AdamW and no scratch, with an optimization barrier in between the
    # same, and for Adafactor 12 N instead of 9 N.
    return jax.tree.map(lambda x, y: y if x is y else lax.select(predicate, x, y), new, old)


def _usual(step: Callable[[Tree], Tree], predicate: Any, carry: Tree) -> Tree:
    return lax.platform_dependent(
        predicate,
        carry,
        cpu=functools.partial(_loop, step),
        default=lambda predicate, carry: _select(predicate, step(carry), carry),
    )


def _twice(
    write: Form, step: Callable[[Tree], Any], predicate: Any, carry: Tree
) -> tuple[Tree, Report]:
    """Computes a step to check it, and once more to write it."""

    def check(carry: Tree) -> Report:
        return step(carry)[1]

    unknown = _no_report(jax.eval_shape(check, carry))
    report = lax.cond(predicate, check, lambda _: unknown, carry)
    return write(lambda carry: step(carry)[0], report[0], carry), report


def _checked(step: Callable[[Tree], Any], predicate: Any, carry: Tree) -> tuple[Tree, Report]:
    def once(predicate: Any, carry: Tree) -> tuple[Tree, Report]:
        next_carry, report = step(carry)
        choose = functools.partial(jnp.where, predicate)
        report = jax.tree.map(choose, report, _no_report(report))
        report[0] = shared(report[0])
        return _select(report[0], next_carry, carry), report

    twice = functools.partial(_twice, _loop, step)
    return lax.platform_dependent(predicate, carry, cpu=twice, default=once)


_checked_cond: Form = functools.partial(_twice, _cond)
