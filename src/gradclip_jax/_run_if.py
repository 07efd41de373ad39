"""Conditional execution of an optimizer step, with in-place updates.

A step that rarely runs, such as the optimizer step of an accumulation, is the body of a
`while_loop` with zero or one iterations, because XLA updates the carry of a loop in place.
`lax.cond` copies the operands that the branch does not change. On an H100, a skipped AdamW step
then moves 9.0 N bytes and uses 3.0 N bytes of scratch memory, instead of 3.0 N and none.
`jnp.where` always computes the step.

A step that usually runs, such as the optimizer step of a guard, is also a loop on CPU, where a
skipped step costs nothing. On GPU and TPU the step is always computed and its result is selected,
because the host of a GPU waits for the predicate of a loop.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from ._checks import is_float0, is_traced
from ._devices import shared
from ._errors import type_error
from ._mesh import reshard_like, varying_axes, zeros_of_type
from ._types import Array, Tree

Flag: TypeAlias = Array | bool
"""A bool[] array, or a Python bool, which is known at trace time and needs no branch."""


class Program(NamedTuple):
    """A traced function that can be evaluated several times.

    Attributes:
        function: Function `(constants, *args) -> output`. It contains no tracers, so that
            derivatives and `jax.checkpoint` can evaluate it later.
        constants: Arrays that the traced function closes over.
        output: Pytree of the abstract output values.
    """

    function: Callable[..., Tree]
    constants: list[Array]
    output: Tree

    def __call__(self, *args: Tree) -> Tree:
        return self.function(self.constants, *args)


def trace(function: Callable[..., Tree], *args: Tree) -> Program:
    """Trace a function on arrays or on `jax.ShapeDtypeStruct` arguments."""
    closed, output = jax.make_jaxpr(function, return_shape=True)(*args)
    structure, jaxpr = jax.tree.structure(output), closed.jaxpr
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    pure = core.ClosedJaxpr(jaxpr.replace(constvars=[], invars=inputs), [])
    # With `jit`, the function is traced once for all backends and branches.
    flat = jax.jit(core.jaxpr_as_fun(pure))

    def evaluate(constants: list[Array], *args: Tree) -> Tree:
        return jax.tree.unflatten(structure, flat(*constants, *jax.tree.leaves(args)))

    # In JAX 0.7, only avals carry the mesh axes over which a value varies.
    return Program(evaluate, closed.consts, jax.tree.unflatten(structure, closed.out_avals))


def run_if(predicate: Flag, step: Callable[[Tree], Tree], carry: Tree) -> Tree:
    """Return `step(carry)` if the predicate is true, otherwise the carry without a copy.

    If the predicate is known at trace time, no branch is compiled. The carry keeps its dtypes and
    sharding. Forward- and reverse-mode differentiation use the equivalent `lax.cond`, because JAX
    cannot differentiate a `while_loop` in reverse mode.
    """
    return run_step(predicate, lambda carry: (None, step(carry)), carry)[1]


def run_step(
    predicate: Flag,
    step: Callable[[Tree], tuple[Tree, Tree]],
    carry: Tree,
    *,
    usually: bool = False,
) -> tuple[Tree, Tree]:
    """Run a step that returns `(output, carry)` as in `run_if`, with zeros as default output.

    If `usually` is True, the step is always computed on GPU and TPU, and its result is selected.
    """
    is_known, typed_step = not is_traced(predicate), functools.partial(_typed_step, step)
    if is_known and bool(predicate):
        return typed_step(carry)
    program = trace(typed_step, carry)
    start = jax.tree.map(zeros_of_type, program.output[0]), carry
    if is_known:
        return start
    _check_varying(carry, program.output[1])
    form = _loop_or_select if usually else _loop
    return _run(form, program.function, predicate, start, program.constants, None)


def compute_step(
    step: Callable[[Tree], tuple[Tree, Tree]], carry: Tree
) -> tuple[Program, tuple[Tree, Tree]]:
    """Return the traced step and the result of `step(carry)` with its gradient stopped.

    `select_step` can then be called with a predicate that depends on the result.
    """
    program = trace(functools.partial(_typed_step, step), carry)
    return program, jax.tree.map(lax.stop_gradient, program(carry))


def select_step(
    predicate: Flag, program: Program, computed: Tree, carry: Tree
) -> tuple[Tree, Tree]:
    """Return the results of `compute_step` if the predicate is true, else zeros and the carry.

    Only differentiation evaluates the step again. Differentiating the selection would give NaN
    if the derivative of a skipped step is infinite.
    """
    function, constants, output = program
    start = jax.tree.map(zeros_of_type, output[0]), carry
    return _run(_select, function, jnp.asarray(predicate), start, constants, computed)


def _typed_step(step: Callable[[Tree], tuple[Tree, Tree]], carry: Tree) -> tuple[Tree, Tree]:
    """Run a step that returns `(output, carry)`, and cast its carry to the input types."""
    output, new = step(carry)
    return output, jax.tree.map(like_type, new, carry)


def like_dtypes(tree: Tree, reference: Tree) -> Tree:
    """Cast all leaves except float0 to the dtypes of a reference tree, without weak types."""
    return jax.tree.map(_cast, tree, reference)


def _cast(x: Array, reference: Array) -> Array:
    dtype = jnp.result_type(reference)
    # Typed PRNG keys have no `astype` method and do not need a cast.
    is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    return x if is_float0(x) or is_key else jnp.asarray(x).astype(dtype)


def like_type(x: Array, reference: Array) -> Array:
    """Convert an array to the dtype and sharding of a reference array."""
    kind = jax.typeof(reference)
    if isinstance(x, jax.Array) and jax.typeof(x) == kind and not kind.weak_type:
        return x
    return x if is_float0(x) else reshard_like(_cast(x, reference), reference)


def _check_varying(before: Tree, after: Tree) -> None:
    """Raise if a step makes a value vary over mesh axes, which indicates a missing `pmean`."""
    for x, kind in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        axes = varying_axes(kind) - varying_axes(x) if jax.typeof(x) != kind else ()
        if axes:
            names = ", ".join(map(repr, sorted(axes)))
            rule = f"the same on all devices along {names}, like the parameters and the state"
            hint = f"Average gradients and loss first: `jax.lax.pmean(grads, {names})`."
            raise type_error("updates", rule, "values that differ", hint)


# A traced function `step(carry) -> (output, carry)`.
_Step: TypeAlias = Callable[[Tree], Tree]
# Signature of a function that executes a step conditionally,
# `(step, predicate, (zeros, carry), computed result or None) -> (output, carry)`.
_Form: TypeAlias = Callable[[_Step, Array, Tree, Tree | None], Tree]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _run(
    form: _Form,
    step: Callable[[list[Array], Tree], Tree],
    predicate: Array,
    start: Tree,
    constants: list[Array],
    computed: Tree | None,
) -> Tree:
    """Execute a step conditionally with `form`, and differentiate it like `lax.cond`."""
    return form(functools.partial(step, constants), predicate, start, computed)


@_run.defjvp
def _run_jvp(form: _Form, step: Callable[..., Tree], primals: Tree, tangents: Tree) -> Tree:
    def run(predicate: Array, start: Tree, constants: list[Array]) -> Tree:
        return lax.cond(predicate, lambda x: step(constants, x[1]), lambda x: x, start)

    return jax.jvp(run, primals[:3], tangents[:3])


def _loop(step: _Step, predicate: Array, start: Tree, computed: Tree | None) -> Tree:
    def iteration(state: tuple[Array, Tree]) -> tuple[Array, Tree]:
        return jnp.zeros_like(state[0]), step(state[1][1])

    return lax.while_loop(lambda state: state[0], iteration, (predicate, start))[1]


def _select(step: _Step, predicate: Array, start: Tree, computed: Tree | None) -> Tree:
    # XLA (JAX 0.10.2, H100 and TPU v5e) fuses the step with both the check and this selection.
    # AdamW then moves 11 N bytes and needs no scratch memory.
    predicate = shared(predicate)

    def choose(new: Array, old: Array) -> Array:
        return new if is_float0(new) else lax.select(predicate, new, old)

    return jax.tree.map(choose, step(start[1]) if computed is None else computed, start)


def _loop_or_select(step: _Step, predicate: Array, start: Tree, computed: Tree | None) -> Tree:
    loop, select = functools.partial(_loop, step), functools.partial(_select, step)
    return lax.platform_dependent(predicate, start, computed, cpu=loop, default=select)
