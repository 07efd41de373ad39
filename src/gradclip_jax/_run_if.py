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
import numpy as np
from jax import lax
from jax.extend import core

from ._checks import is_float0, is_traced
from ._devices import HAS_TYPES, shared
from ._errors import type_error
from ._mesh import reshard_like, varying_axes, zeros_of_type
from ._types import Array, Tree

Flag: TypeAlias = Array | np.bool_
"""A bool[] array, or a NumPy bool, which is known at trace time and needs no branch."""


class Program(NamedTuple):
    """A traced function that can be evaluated several times.

    Attributes:
        function: Function that maps constants and argument leaves to output leaves. It contains no
            tracers, so that derivatives and `jax.checkpoint` can evaluate it later.
        constants: Arrays that the traced function closes over.
        output: Pytree of the abstract output values.
    """

    function: Callable[..., list[Array]]
    constants: list[Array]
    output: Tree

    def __call__(self, *args: Tree) -> Tree:
        leaves = self.function(*self.constants, *jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(self.output), leaves)


def trace(function: Callable[..., Tree], *args: Tree) -> Program:
    """Trace a function on arrays or on `jax.ShapeDtypeStruct` arguments."""
    closed, output = jax.make_jaxpr(function, return_shape=True)(*args)
    # In JAX 0.7, only avals carry the mesh axes over which a value varies.
    output = jax.tree.unflatten(jax.tree.structure(output), closed.out_avals)
    jaxpr = closed.jaxpr
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    pure = core.ClosedJaxpr(jaxpr.replace(constvars=[], invars=inputs), [])
    # With `jit`, the function is traced once for all backends and branches.
    return Program(jax.jit(core.jaxpr_as_fun(pure)), list(closed.consts), output)


def run_if(
    predicate: Flag, step: Callable[[Tree], Tree], carry: Tree, *, usually: bool = False
) -> Tree:
    """Return `step(carry)` if the predicate is true, otherwise the carry without a copy.

    If the predicate is known at trace time, no branch is compiled. The carry keeps its dtypes and
    sharding. Forward- and reverse-mode differentiation use the equivalent `lax.cond`, because JAX
    cannot differentiate a `while_loop` in reverse mode. If `usually` is True, the step is always
    computed on GPU and TPU, and its result is then selected.
    """
    return run_step(predicate, lambda carry: (None, step(carry)), carry, usually=usually)[1]


def run_step(
    predicate: Flag,
    step: Callable[[Tree], tuple[Tree, Tree]],
    carry: Tree,
    *,
    usually: bool = False,
) -> tuple[Tree, Tree]:
    """Run a step that returns `(output, carry)` as in `run_if`, with zeros as default output."""
    is_known = not is_traced(predicate)
    if is_known and bool(predicate):
        output, new = step(carry)
        return output, like_types(new, carry)
    program = _trace_step(step, carry)
    if is_known:
        return jax.tree.map(zeros_of_type, program.output[0]), carry
    _check_varying(carry, program.output[1])
    return _execute(_loop_or_select if usually else _loop, program, jnp.asarray(predicate), carry)


def compute_step(
    step: Callable[[Tree], tuple[Tree, Tree]], carry: Tree
) -> tuple[Program, tuple[Tree, Tree]]:
    """Return the traced step and the result of `step(carry)` with its gradient stopped.

    `select_step` can then be called with a predicate that depends on the result.
    """
    program = _trace_step(step, carry)
    return program, jax.tree.map(lax.stop_gradient, program(carry))


def select_step(
    predicate: Flag, program: Program, computed: Tree, carry: Tree
) -> tuple[Tree, Tree]:
    """Return the results of `compute_step` if the predicate is true, else zeros and the carry.

    Only differentiation evaluates the step again. Differentiating the selection would give NaN
    if the derivative of a skipped step is infinite.
    """
    return _execute(_select, program, jnp.asarray(predicate), carry, computed)


def _trace_step(step: Callable[[Tree], tuple[Tree, Tree]], carry: Tree) -> Program:
    """Trace a step that returns `(output, carry)`, and cast its carry to the input types."""

    def typed_step(carry: Tree) -> tuple[Tree, Tree]:
        output, new = step(carry)
        return output, like_types(new, carry)

    return trace(typed_step, carry)


def _execute(
    form: "Form", program: Program, predicate: Array, carry: Tree, computed: Tree | None = None
) -> tuple[Tree, Tree]:
    function, constants, output = program
    structure = jax.tree.structure(output)

    def run(constants: list[Array], start: Tree) -> Tree:
        return jax.tree.unflatten(structure, function(*constants, *jax.tree.leaves(start[1])))

    leaves = jax.tree.leaves((carry, constants))
    if (
        form is not _select
        and HAS_TYPES
        and any([jax.typeof(x).sharding.spec.unreduced for x in leaves])
    ):
        # XLA (JAX 0.10.2) sums unreduced values over devices both before and inside a loop.
        form = _cond
    start = jax.tree.map(zeros_of_type, output[0]), carry
    return _run(form, run, predicate, start, constants, computed)


def like_dtypes(tree: Tree, reference: Tree) -> Tree:
    """Cast all leaves except float0 to the dtypes of a reference tree, without weak types."""
    return jax.tree.map(_cast, tree, reference)


def _cast(x: Array, reference: Array) -> Array:
    dtype = jnp.result_type(reference)
    # Typed PRNG keys have no `astype` method and do not need a cast.
    is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    return x if is_float0(x) or is_key else jnp.asarray(x).astype(dtype)


def like_types(tree: Tree, reference: Tree) -> Tree:
    """Convert a tree to the dtypes and shardings of a reference tree."""
    return jax.tree.map(_leaf_like, tree, reference)


def _leaf_like(x: Array, reference: Array) -> Array:
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


# A traced function `step(zeros, carry) -> (output, carry)`.
_Step: TypeAlias = Callable[[Tree], Tree]
# Signature of a function that executes a step conditionally,
# `(step, predicate, (zeros, carry), computed result or None) -> (output, carry)`.
Form: TypeAlias = Callable[[_Step, Array, Tree, Tree | None], Tree]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _run(
    form: Form,
    step: Callable[[list[Array], Tree], Tree],
    predicate: Array,
    start: Tree,
    constants: list[Array],
    computed: Tree | None,
) -> Tree:
    """Execute a step conditionally with `form`, and differentiate it like `_cond`."""
    return form(functools.partial(step, constants), predicate, start, computed)


@_run.defjvp
def _run_jvp(form: Form, step: Callable[..., Tree], primals: Tree, tangents: Tree) -> Tree:
    def run(predicate: Array, start: Tree, constants: list[Array]) -> Tree:
        return _cond(functools.partial(step, constants), predicate, start, None)

    return jax.jvp(run, primals[:3], tangents[:3])


def _cond(step: _Step, predicate: Array, start: Tree, computed: Tree | None) -> Tree:
    return lax.cond(predicate, step, lambda start: start, start)


def _loop(step: _Step, predicate: Array, start: Tree, computed: Tree | None) -> Tree:
    def iteration(state: tuple[Array, Tree]) -> tuple[Array, Tree]:
        return jnp.zeros_like(state[0]), step(state[1])

    return lax.while_loop(lambda state: state[0], iteration, (predicate, start))[1]


def _select(step: _Step, predicate: Array, start: Tree, computed: Tree | None) -> Tree:
    # XLA (JAX 0.10.2, H100 and TPU v5e) fuses the step with both the check and this selection.
    # AdamW then moves 11 N bytes and needs no scratch memory.
    leaves, structure = jax.tree.flatten(step(start) if computed is None else computed)
    pairs, predicate = zip(leaves, jax.tree.leaves(start), strict=True), shared(predicate)
    none = jax.dtypes.float0
    chosen = [x if x.dtype == none else lax.select(predicate, x, y) for x, y in pairs]
    return jax.tree.unflatten(structure, chosen)


def _loop_or_select(step: _Step, predicate: Array, start: Tree, computed: Tree | None) -> Tree:
    loop, select = (functools.partial(form, step, computed=computed) for form in (_loop, _select))
    return lax.platform_dependent(predicate, start, cpu=loop, default=select)
