"""Evaluates a jaxpr so that chosen outputs stay lazy.

First backwards: which variables reach a chosen output through operations that are followed. Then
forwards: those are computed by their rules, everything else as it stands. A lazy value that is
needed in another place as well, or by an operation without a rule, is multiplied out for it.
"""

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from .._types import Array
from ._factors import Lazy, as_array, as_lazy, is_lazy
from ._jaxprs import are_in, cut_out, variables
from ._layout import add, stack
from ._measure import norm
from ._rules import RULES, add_in_zeros
from ._sources import without_zeros

_INLINED = {"jit", "pjit", "closed_call", "core_call"}
_REMAT = {"remat", "remat2", "checkpoint"}


def evaluate(
    closed: Any, operands: Sequence[Any], chosen: Sequence[bool], varies: Sequence[bool]
) -> list[Any]:
    """Computes the outputs of a jaxpr, the chosen ones lazily where that is possible.

    Args:
        closed: a closed jaxpr.
        operands: one for each of its inputs; those that `_wanted` names may be lazy.
        chosen: one for each output.
        varies: for each input whether it depends on the example, or only on parameters.
    """
    jaxpr = closed.jaxpr
    varying = _varying(jaxpr, varies)
    wanted = _wanted(jaxpr, chosen, varying)
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(jaxpr.invars, operands, strict=True))
    arrays: dict[Any, Array] = {}

    def read(v: Any) -> Any:
        # A literal as a NumPy value, whose zeros can be seen.
        return np.asarray(v.val) if isinstance(v, core.Literal) else values[v]

    def read_array(v: Any) -> Any:
        value = read(v)
        if not is_lazy(value):
            return value
        if v not in arrays:
            arrays[v] = as_array(value)
        return arrays[v]

    for eqn in jaxpr.eqns:
        outs = None
        flags = [v in wanted for v in eqn.outvars]
        if any(flags):
            linear = _linear_operands(eqn, flags, varying)
            mixed = [read(v) if i in linear else read_array(v) for i, v in enumerate(eqn.invars)]
            if eqn.primitive.name == "dot_general" and not linear:
                mixed = without_zeros(eqn, *map(read, eqn.invars))
            outs = _follow(eqn, mixed, flags, varying)
        elif eqn.primitive.name in ("pad", "add", "add_any") and eqn.outvars[0] in varying:
            outs = _in_zeros(eqn, list(map(read, eqn.invars)))
        if outs is None:
            inputs, alone = cut_out(jaxpr, [eqn], eqn.outvars)
            outs = alone(*map(read_array, inputs))
        values.update(zip(eqn.outvars, outs, strict=True))
    results = zip(jaxpr.outvars, chosen, strict=True)
    return [read(v) if lazily else read_array(v) for v, lazily in results]


def _in_zeros(eqn: Any, operands: Sequence[Any]) -> Sequence[Any] | None:
    """Follows an array that is put in zeros, so that a product may leave them out."""
    if eqn.primitive.name == "pad":
        lazy = None if is_lazy(operands[0]) else RULES["pad"].apply(eqn, *operands)
    else:
        lazy = add_in_zeros(*operands)
    return None if lazy is None else [lazy]


def _varying(jaxpr: Any, varies: Sequence[bool]) -> set[Any]:
    """Finds the variables that depend on the example."""
    varying = {v for v, flag in zip(jaxpr.invars, varies, strict=True) if flag}
    for eqn in jaxpr.eqns:
        if any(are_in(eqn.invars, varying)):
            varying.update(eqn.outvars)
    return varying


def _wanted(jaxpr: Any, chosen: Sequence[bool], varying: set[Any]) -> set[Any]:
    """Finds the variables that reach a chosen output through operations that are followed."""
    outputs = zip(jaxpr.outvars, chosen, strict=True)
    wanted = set(variables(v for v, flag in outputs if flag))
    for eqn in reversed(jaxpr.eqns):
        flags = [v in wanted for v in eqn.outvars]
        if any(flags):
            wanted.update(variables(eqn.invars[i] for i in _linear_operands(eqn, flags, varying)))
    return wanted


def _linear_operands(eqn: Any, flags: Sequence[bool], varying: set[Any]) -> Collection[int]:
    name = eqn.primitive.name
    if name == "dot_general":
        # A lazy gradient times parameters stays lazy; two activations are where factors begin.
        return [1 - i for i, varies in enumerate(are_in(eqn.invars, varying)) if not varies]
    if name in ("mul", "div"):
        # A product of two arrays is no move; by a number it is.
        return [i for i in range(2) if eqn.invars[1 - i].aval.ndim == 0]
    if name.startswith("scatter") and len(eqn.params["dimension_numbers"].update_window_dims) < 2:
        return (0,)  # rows of activations
    if name in _INLINED:
        inner, inner_varying = _inner(eqn, varying)
        wanted = _wanted(inner.jaxpr, flags, inner_varying)
        return [i for i, v in enumerate(inner.jaxpr.invars) if v in wanted]
    if name == "scan":
        return [eqn.params["num_consts"] + i for i in _accumulated(eqn, flags)]
    rule = RULES.get(name)
    if rule is None:
        return ()
    return range(len(eqn.invars)) if rule.follows is None else rule.follows


def _inner(eqn: Any, varying: set[Any]) -> tuple[Any, set[Any]]:
    closed = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    if not hasattr(closed, "consts"):
        closed = core.ClosedJaxpr(closed, [])
    return closed, _varying(closed.jaxpr, are_in(eqn.invars, varying))


def _follow(
    eqn: Any, operands: Sequence[Any], flags: Sequence[bool], varying: set[Any]
) -> Sequence[Any] | None:
    name, varies = eqn.primitive.name, are_in(eqn.invars, varying)
    if name == "scan":
        return _scan(eqn, operands, flags, varies)
    if name in _REMAT and eqn.params["differentiated"] and eqn.params["prevent_cse"]:
        # As JAX does: otherwise XLA merges what is computed again with what was computed.
        operands = lax.optimization_barrier([jnp.asarray(as_array(x)) for x in operands])
    if name in _INLINED | _REMAT:
        return evaluate(_inner(eqn, varying)[0], operands, flags, varies)
    rule = RULES.get(name)
    if rule is None or not (rule.starts or any(map(is_lazy, operands))):
        return None
    found = rule.apply(eqn, *operands)
    return [found] if isinstance(found, Lazy) else found


# Loops


def _accumulated(eqn: Any, flags: Sequence[bool]) -> list[int]:
    """Finds the carries of a scan that are wanted and only ever added to."""
    p, jaxpr = eqn.params, eqn.params["jaxpr"].jaxpr
    carried = jaxpr.invars[p["num_consts"] : p["num_consts"] + p["num_carry"]]
    return [
        i for i, v in enumerate(carried) if flags[i] and _is_added_to(jaxpr, v, jaxpr.outvars[i])
    ]


def _is_added_to(jaxpr: Any, start: Any, end: Any) -> bool:
    made_by = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    uses = sum(v is start for eqn in jaxpr.eqns for v in eqn.invars)
    uses += sum(v is start for v in jaxpr.outvars)
    reached = variables([end])
    while reached:
        v = reached.pop()
        if v is start:
            return uses == 1
        if v in made_by and made_by[v].primitive.name in ("add", "add_any"):
            reached += variables(made_by[v].invars)
    return False


def _scan(
    eqn: Any, operands: Sequence[Any], flags: Sequence[bool], varies: Sequence[bool]
) -> Sequence[Any]:
    """Runs a loop: what it adds up becomes factors, what it stacks is measured inside."""
    p, closed = eqn.params, eqn.params["jaxpr"]
    first, count = p["num_consts"], p["num_carry"]
    consts, init, xs = operands[:first], operands[first : first + count], operands[first + count :]
    # What a carry depends on changes from step to step.
    inner_varies = [*varies[:first], *(True for _ in init), *varies[first + count :]]

    def run(lazy: Sequence[int]) -> tuple[Any, Any]:
        zeros = {i: Lazy(v.aval.shape, v.aval.dtype) for i, v in enumerate(closed.jaxpr.outvars)}
        chosen = [i in lazy if i < count else flag for i, flag in enumerate(flags)]

        def body(carry: Any, x: Any) -> tuple[Any, Any]:
            left = iter(carry)
            full = [zeros[i] if i in lazy else next(left) for i in range(count)]
            outs = evaluate(closed, [*consts, *full, *x], chosen, inner_varies)
            added = [as_lazy(outs[i]).replace(norms=None) for i in lazy]
            pairs = zip(outs[count:], flags[count:], strict=True)
            stacked = [_measured(y) if flag else y for y, flag in pairs]
            return [outs[i] for i in range(count) if i not in lazy], (added, stacked)

        carry = [as_array(x) for i, x in enumerate(init) if i not in lazy]
        return lax.scan(body, carry, xs, p["length"], reverse=p["reverse"], unroll=p["unroll"])

    lazy = _accumulated(eqn, flags)
    if lazy:
        # Traced once to see which have factors: an array added up at every step stays a carry.
        _, (added, _) = jax.eval_shape(lambda: run(lazy))
        pairs = zip(lazy, added, strict=True)
        lazy = [i for i, value in pairs if not any(term.is_dense() for term in value.terms)]
    carry, (added, stacked) = run(lazy)
    kept, sums = iter(carry), iter(added)
    outs = [
        add(as_lazy(x), stack(next(sums), p["length"], summed=True)) if i in lazy else next(kept)
        for i, x in enumerate(init)
    ]
    return [*outs, *(stack(y, p["length"], summed=False) if is_lazy(y) else y for y in stacked)]


def _measured(value: Any) -> Lazy:
    """Takes the norm of a stacked output, so that its factors need not be kept."""
    lazy = as_lazy(value)
    return lazy if lazy.norms is not None else lazy.replace(norms=norm(lazy))
