"""A backward pass that computes large residuals again instead of keeping them.

Two backward passes over one batch read the same logits, say. XLA computes them once and would keep
them from the one to the other: of GPT-2 with 32 x 256 tokens that is a fifth of all memory.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.extend import core

from .._types import Array, Tree
from ._jaxprs import are_in, cut_out, variables


def vjp_recomputing(
    fun: Callable[[Tree], Array], primals: Tree, largest: int | None
) -> tuple[Array, Callable[[Array], tuple[Tree]]]:
    """Differentiates as `jax.vjp`, but keeps no residual of more than `largest` elements.

    Those that a loop stacks are kept: XLA shares no loops, and to run one again costs too much. All
    are kept where they are a small part of what is kept anyway.
    """
    if largest is None:
        return jax.vjp(fun, primals)
    closed, shapes = jax.make_jaxpr(lambda x: jax.vjp(fun, x), return_shape=True)(primals)
    jaxpr, structure = closed.jaxpr, jax.tree.structure(shapes)
    eqns = _equations_of_large(jaxpr, largest)
    is_made = are_in(jaxpr.outvars, {v for eqn in eqns for v in eqn.outvars})
    made = [v for v, flag in zip(jaxpr.outvars, is_made, strict=True) if flag]
    kept, again = cut_out(jaxpr, eqns, made)
    forward = core.ClosedJaxpr(jaxpr.replace(outvars=[*jaxpr.outvars, *kept]), closed.consts)
    outs = core.jaxpr_as_fun(forward)(*jax.tree.leaves(primals))
    first, saved = outs[: len(is_made)], outs[len(is_made) :]

    def backward(cotangent: Array) -> Any:
        # With the cotangent, so that it is computed late, and apart from what was computed before.
        inputs, seeds = lax.optimization_barrier((saved, cotangent))
        new = iter(again(*inputs))
        residuals = [next(new) if flag else x for x, flag in zip(first, is_made, strict=True)]
        return jax.tree.unflatten(structure, residuals)[1](seeds)

    return jax.tree.unflatten(structure, first)[0], backward


def _equations_of_large(jaxpr: Any, largest: int) -> list[Any]:
    """Finds the equations between what is kept and what is large, loops left out."""

    def size(kept: set[Any]) -> int:
        return sum(math.prod(v.aval.shape) for v in kept)

    def large(atoms: Any) -> set[Any]:
        return {v for v in variables(atoms) if math.prod(v.aval.shape) > largest}

    wanted, chosen = large(jaxpr.outvars), list[Any]()
    # Of GPT-2 the logits are an eleventh at 32 x 256 tokens, which is a fifth of the scratch of a
    # TPU; at 8 x 1,024 a twentieth, not worth a tenth of the FLOPs of an ordinary gradient.
    if 16 * size(wanted) < size(set(variables(jaxpr.outvars))):
        return chosen
    for eqn in reversed(jaxpr.eqns):
        if wanted.intersection(eqn.outvars) and eqn.primitive.name not in ("scan", "while"):
            wanted |= large(eqn.invars)
            chosen.append(eqn)
    return chosen[::-1]
