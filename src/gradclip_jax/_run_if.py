"""Conditional execution of a step: run it zero or one times, in place.

A step that rarely runs, such as that of an accumulation, is the body of a `while_loop` with zero
or one iterations, because XLA updates the carry of a loop in place. `lax.cond` copies the operands
that the branch does not change (9.0 N bytes moved and 3.0 N of scratch for an AdamW step that is
not run on an H100, instead of 3.0 N and none). `jnp.where` computes the step in any case.

A step that usually runs, such as that of a guard, is a loop on CPU, where a skipped step then costs
nothing. On GPU and TPU it is computed and selected, because the host of a GPU waits for the
predicate of a loop.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

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


class Program(NamedTuple):
    """A function that was traced once and can be evaluated in other places.

    Attributes:
        function: `(*constants, *leaves of the arguments) -> leaves`. It contains no tracer, so
            that a derivative or a checkpoint can evaluate it later.
        constants: the arrays that the traced function closes over.
        output: the types of its results.
    """

    function: Callable[..., list[Array]]
    constants: list[Array]
    output: Tree

    def __call__(self, *args: Tree) -> Tree:
        """Evaluate the function."""
        leaves = self.function(*self.constants, *jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(self.output), leaves)


def trace(function: Callable[..., Tree], *args: Tree) -> Program:
    """Trace a function on arguments, or on their shapes."""
    closed, output = jax.make_jaxpr(function, return_shape=True)(*args)
    # The shapes of JAX 0.7 do not say over which mesh axes a value varies; avals do.
    output = jax.tree.unflatten(jax.tree.structure(output), closed.out_avals)
    jaxpr = closed.jaxpr
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    pure = core.ClosedJaxpr(jaxpr.replace(constvars=[], invars=inputs), [])
    return Program(core.jaxpr_as_fun(pure), list(closed.consts), output)


def run_if(
    predicate: Array | np.bool_ | bool,
    step: Callable[[Tree], Tree],
    carry: Tree,
    *,
    usually: bool = False,
) -> Tree:
    """`step(carry)` if the predicate is true, else the carry, without copying it.

    A predicate that is known when the program is traced leaves no branch in it. The carry keeps
    its dtypes and sharding. Differentiable in forward and reverse mode: reverse mode does not
    support loops, so the derivative is that of the equivalent `lax.cond`. With `usually`, GPU and
    TPU compute the step and select.
    """
    return run_step(predicate, lambda carry: (None, step(carry)), carry, usually=usually)[1]


def run_step(
    predicate: Array | np.bool_ | bool,
    step: Callable[[Tree], tuple[Tree, Tree]],
    carry: Tree,
    *,
    usually: bool = False,
) -> tuple[Tree, Tree]:
    """Like `run_if` for a step that returns `(output, carry)`; the output is zero if it is not run."""

    def typed_step(carry: Tree) -> tuple[Tree, Tree]:
        output, new = step(carry)
        return output, _like(new, carry)

    is_known = not is_traced(predicate)
    if is_known and bool(predicate):
        return typed_step(carry)
    program = trace(typed_step, carry)
    start = jax.tree.map(zeros_of_type, program.output[0]), carry
    if is_known:
        return start
    return _apply(_loop_or_select if usually else _loop, _cond, program, predicate, start)


def run_checked(
    predicate: Array, step: Callable[[Tree], tuple[Tree, Tree, Array, Tree]], carry: Tree
) -> tuple[Tree, Tree, Array, Tree]:
    """Compute a step and select its result if the predicate is true and the step passes its check.

    The step returns `(output, carry, passed, report)`. Returns the output or zeros, the new carry
    or the old one, whether the step was applied, bool[], and the report.
    """

    def typed_step(carry: Tree) -> tuple[Tree, Tree, Array, Tree]:
        output, new, passed, report = step(carry)
        return output, _like(new, carry), passed, report

    program = trace(typed_step, carry)
    start = jax.tree.map(zeros_of_type, program.output[0]), carry
    return _apply(_select_checked, _cond_checked, program, predicate, start)


def like_dtypes(tree: Tree, reference: Tree) -> Tree:
    """The tree in the dtypes of the reference; float0 leaves are unchanged."""
    return jax.tree.map(_cast, tree, reference)


def _cast(x: Any, reference: Any) -> Any:
    """An array in the dtype of the reference, without a weak type."""
    dtype = jnp.result_type(reference)
    # Typed random keys have no `astype` and always have the same dtype.
    if is_float0(x) or jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return x
    return jnp.asarray(x).astype(dtype)


def _like(tree: Tree, carry: Tree) -> Tree:
    """The tree in the dtypes and the sharding of the carry."""
    return jax.tree.map(_leaf_like, tree, carry)


def _leaf_like(x: Any, reference: Any) -> Any:
    kind = jax.typeof(reference)
    if isinstance(x, jax.Array) and jax.typeof(x) == kind and not kind.weak_type:
        return x
    return x if is_float0(x) else reshard_like(_cast(x, reference), reference)


# How a conditional step is executed: `(step, predicate, (zeros, carry)) -> results`.
Form = Callable[[Callable[[Tree], Any], Any, Tree], Any]


def _apply(form: Form, branch: Form, program: Program, predicate: Array, start: Tree) -> Any:
    """Execute the step in one form, with the derivative of another."""
    function, constants, output = program
    _check_varying(start[1], output[1])
    structure, types = jax.tree.structure(output), map(jax.typeof, jax.tree.leaves(start))
    if HAS_TYPES and any(
        [x.sharding.spec.unreduced for x in (*types, *map(jax.typeof, constants))]
    ):
        # XLA (JAX 0.10.2) sums unreduced values over devices before a loop that carries them,
        # and again inside it.
        form = branch

    def step(constants: list[Array], start: Tree) -> Any:
        return jax.tree.unflatten(structure, function(*constants, *jax.tree.leaves(start[1])))

    return _run(form, branch, step, predicate, start, constants)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _run(
    form: Form,
    branch: Form,
    step: Callable[[list[Array], Tree], Any],
    predicate: Array,
    start: Tree,
    constants: list[Array],
) -> Any:
    return form(functools.partial(step, constants), predicate, start)


@_run.defjvp
def _run_jvp(form: Form, branch: Form, step: Any, primals: Any, tangents: Any) -> Any:
    return jax.jvp(functools.partial(_run.fun, branch, branch, step), primals, tangents)


def _check_varying(before: Tree, after: Tree) -> None:
    """Raise if the step makes a value vary over mesh axes: a `pmean` of the gradients is missing."""
    for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        if jax.typeof(x) == y:
            continue
        axes = varying_axes(y) - varying_axes(x)
        if axes:
            names = ", ".join(map(repr, sorted(axes)))
            rule = f"the same on all devices along {names}, as the state is"
            hint = f"Average the gradients first: `jax.lax.pmean(grads, {names})`; also the loss."
            raise type_error("updates", rule, "values that differ", hint)


def _cond(step: Callable[[Tree], Tree], predicate: Array, start: Tree) -> Tree:
    return lax.cond(predicate, step, lambda start: start, start)


def _loop(step: Callable[[Tree], Tree], predicate: Array, start: Tree) -> Tree:
    def iteration(state: tuple[Array, Tree]) -> tuple[Array, Tree]:
        return jnp.zeros_like(state[0]), step(state[1])

    return lax.while_loop(lambda state: state[0], iteration, (predicate, start))[1]


def _loop_or_select(step: Callable[[Tree], Tree], predicate: Array, start: Tree) -> Tree:
    def select(predicate: Array, start: Tree) -> Tree:
        return _select(predicate, step(start), start)

    loop = functools.partial(_loop, step)
    return lax.platform_dependent(predicate, start, cpu=loop, default=select)


def _select(predicate: Array, new: Tree, old: Tree) -> Tree:
    # XLA (JAX 0.10.2, H100 and TPU v5e) fuses the step both into a check before it and into this
    # selection: 11 N bytes moved for AdamW and no scratch.
    return jax.tree.map(functools.partial(lax.select, shared(predicate)), new, old)


def _select_checked(step: Callable[[Tree], Any], predicate: Array, start: Tree) -> Any:
    output, carry, passed, report = step(start)
    applied = lax.bitwise_and(predicate, passed)
    return *_select(applied, (output, carry), start), applied, report


def _cond_checked(step: Callable[[Tree], Any], predicate: Array, start: Tree) -> Any:
    """The derivative of `_select_checked`: a step that is not applied cannot make it NaN."""
    *_, passed, report = step(start)
    applied = lax.bitwise_and(predicate, passed)
    return *_cond(lambda start: step(start)[:2], applied, start), applied, report
