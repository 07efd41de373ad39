"""Evaluate a jaxpr without materializing the gradients among its outputs.

A backward pass over the equations finds the variables that are connected to a selected output by
primitives with an entry in `RULES`. A forward pass applies these rules and evaluates all other
equations unchanged. A factored value is materialized before any other operation uses it.
"""

import functools
import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from .._devices import fusion_barrier
from .._types import Array
from ._factored import Convolution, Factored, Value, as_array, as_factored
from ._rules import RULES, aval_of

_INLINED = {"jit", "pjit", "closed_call", "core_call"}
_REMAT = {"remat", "remat2", "checkpoint"}


def evaluate(
    closed: core.ClosedJaxpr, operands: Sequence[Value], chosen: Sequence[bool]
) -> list[Value]:
    """Evaluate a jaxpr, and keep the selected outputs as products of factors where possible.

    Args:
        closed: Closed jaxpr.
        operands: Value of each input. Only the inputs in `_required(jaxpr, chosen)` may be
            factored.
        chosen: Whether to keep each output as a product of factors.
    """
    jaxpr = closed.jaxpr
    required = _required(jaxpr, chosen)
    values: dict[core.Var, Value] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(jaxpr.invars, operands, strict=True))

    @functools.cache
    def materialized(v: core.Var) -> Array:
        return as_array(values[v])

    def read(v: core.Var | core.Literal) -> Value:
        # Convert literals to NumPy arrays, whose values are known during tracing.
        return cast(Array, np.asarray(v.val)) if isinstance(v, core.Literal) else values[v]

    def read_array(v: core.Var | core.Literal) -> Array:
        return materialized(v) if isinstance(v, core.Var) else cast(Array, read(v))

    for eqn in jaxpr.eqns:
        outs = None
        flags = [v in required for v in eqn.outvars]
        if any(flags):
            linear = _linear_operands(eqn, flags)
            mixed = [read(v) if i in linear else read_array(v) for i, v in enumerate(eqn.invars)]
            outs = _follow(eqn, mixed, flags)
        if outs is None:  # evaluate the equation alone
            inputs = list(dict.fromkeys(_variables(eqn.invars)))
            alone = jaxpr.replace(constvars=[], invars=inputs, outvars=eqn.outvars, eqns=[eqn])
            outs = core.jaxpr_as_fun(core.ClosedJaxpr(alone, []))(*map(read_array, inputs))
        values.update(zip(eqn.outvars, outs, strict=True))
    outputs = zip(jaxpr.outvars, chosen, strict=True)
    return [read(v) if is_chosen else read_array(v) for v, is_chosen in outputs]


def _variables(atoms: Iterable[core.Var | core.Literal]) -> list[core.Var]:
    """Return only the variables, without the literals."""
    return [v for v in atoms if not isinstance(v, core.Literal)]


def _required(jaxpr: core.Jaxpr, chosen: Sequence[bool]) -> set[core.Var]:
    """Find the variables that are connected to a selected output by supported primitives."""
    required = set(_variables(itertools.compress(jaxpr.outvars, chosen)))
    for eqn in reversed(jaxpr.eqns):
        flags = [v in required for v in eqn.outvars]
        if any(flags):
            linear = _linear_operands(eqn, flags)
            required.update(_variables([eqn.invars[i] for i in linear]))
    return required


def _linear_operands(eqn: core.JaxprEqn, flags: Sequence[bool]) -> Collection[int]:
    """Return the positions of operands that may be factored, given the required outputs."""
    name = eqn.primitive.name
    if name in _INLINED:
        jaxpr = _inner(eqn).jaxpr
        required = _required(jaxpr, flags)
        return [i for i, v in enumerate(jaxpr.invars) if v in required]
    if name == "scan":
        return [_loop_counts(eqn)[0] + i for i in _accumulated(eqn, flags)]
    rule = RULES.get(name)
    if rule is None:
        return ()
    return rule.follows(eqn) if callable(rule.follows) else rule.follows


def _inner(eqn: core.JaxprEqn) -> core.ClosedJaxpr:
    """Return the jaxpr that an equation calls, such as the body of `jit`."""
    closed = eqn.params["jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"]
    return closed if hasattr(closed, "consts") else core.ClosedJaxpr(closed, [])


def _follow(
    eqn: core.JaxprEqn, operands: Sequence[Value], flags: Sequence[bool]
) -> Sequence[Value] | None:
    """Evaluate an equation by its rule, or return None if no rule applies."""
    name = eqn.primitive.name
    if name == "scan":
        return _scan(eqn, operands, flags)
    if name in _REMAT and eqn.params["differentiated"] and eqn.params["prevent_cse"]:
        # As in JAX, prevent XLA from merging the recomputed values with the original values.
        operands = fusion_barrier([jnp.asarray(x) for x in operands])
    if name in _INLINED | _REMAT:
        return evaluate(_inner(eqn), operands, flags)
    if name != "convert_element_type":
        operands = [as_factored(x) if isinstance(x, Convolution) else x for x in operands]
    is_any_lazy = any([isinstance(x, Factored | Convolution) for x in operands])
    rule = RULES.get(name)
    result = rule.apply(eqn, *operands) if rule and (rule.starts or is_any_lazy) else None
    return [result] if isinstance(result, Factored | Convolution) else result


# Loops

Values: TypeAlias = dict[int, Value]
"""Values of carries, by position."""

ScanResult: TypeAlias = tuple[Values, tuple[dict[int, Factored], list[Value]]]
"""Ordinary carries, the values that each step adds to factored carries, and stacked outputs."""


def _loop_counts(eqn: core.JaxprEqn) -> tuple[int, int]:
    """Return the numbers of constants and carries of a `lax.scan` equation.

    A scanned input or output has one more axis outside the scan body than inside it. JAX 0.11 has
    no parameters `num_consts` and `num_carry`, only pytrees of a private class.
    """
    jaxpr = eqn.params["jaxpr"].jaxpr
    inputs = zip(eqn.invars, jaxpr.invars, strict=True)
    outputs = zip(eqn.outvars, jaxpr.outvars, strict=True)
    count = [aval_of(v).ndim > aval_of(w).ndim for v, w in outputs].count(False)
    return [aval_of(v).ndim > aval_of(w).ndim for v, w in inputs].count(False) - count, count


def _accumulated(eqn: core.JaxprEqn, flags: Sequence[bool]) -> list[int]:
    """Find the required scan carries that are only used to accumulate a sum."""
    jaxpr, (first, count) = eqn.params["jaxpr"].jaxpr, _loop_counts(eqn)
    carries = zip(flags, jaxpr.invars[first : first + count], jaxpr.outvars, strict=False)
    return [i for i, (flag, v, out) in enumerate(carries) if flag and _is_added_to(jaxpr, v, out)]


def _is_added_to(jaxpr: core.Jaxpr, start: core.Var, end: core.Var | core.Literal) -> bool:
    """Return whether a scan body uses a carry only to add values to it.

    Each partial sum must be read only once, by the next addition. `w + w` reads it twice.
    """
    v = start
    while True:
        readers = [eqn for eqn in jaxpr.eqns for x in eqn.invars if x is v]
        results = sum([x is v for x in jaxpr.outvars])
        if v is end:
            return results == 1 and not readers and v is not start
        if results or len(readers) != 1 or readers[0].primitive.name not in ("add", "add_any"):
            return False
        (v,) = readers[0].outvars


def _scan(eqn: core.JaxprEqn, operands: Sequence[Value], flags: Sequence[bool]) -> list[Value]:
    """Evaluate a `lax.scan` without materializing the gradients that it sums or stacks."""
    p, closed = eqn.params, eqn.params["jaxpr"]
    first, count = _loop_counts(eqn)
    consts, init = operands[:first], operands[first : first + count]
    xs = list(map(as_array, operands[first + count :]))

    def run(lazy: Sequence[int]) -> ScanResult:
        chosen = [i in lazy if i < count else flag for i, flag in enumerate(flags)]
        zeros = {i: Factored(init[i].shape, init[i].dtype) for i in lazy}

        def body(carry: Values, x: list[Array]) -> ScanResult:
            start = {**zeros, **carry}
            outs = evaluate(closed, [*consts, *[start[i] for i in range(count)], *x], chosen)
            added = {i: as_factored(outs[i]) for i in lazy}
            rows = [as_factored(y) if isinstance(y, Convolution) else y for y in outs[count:]]
            return {i: outs[i] for i in carry}, (added, cast(list[Value], rows))

        carry: Values = {i: as_array(x) for i, x in enumerate(init) if i not in lazy}
        return lax.scan(body, carry, xs, p["length"], reverse=p["reverse"], unroll=p["unroll"])

    lazy = _accumulated(eqn, flags)
    if lazy:
        # Trace the body once to find the carries whose terms are products of several factors.
        _, (added, _) = jax.eval_shape(lambda: run(lazy))
        lazy = [i for i in lazy if all([len(term.factors) > 1 for term in added[i].terms])]
    values, (added, rows) = run(lazy)
    steps = p["length"]
    for i in lazy:
        values[i] = as_factored(init[i]).add(added[i].stack(steps, summed=True))
    stacked = [y.stack(steps, summed=False) if isinstance(y, Factored) else y for y in rows]
    return [*[values[i] for i in range(count)], *stacked]
