"""Variables of a jaxpr, and some of its equations run alone."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax.extend import core

from .._types import Array


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Leaves out literals, which cannot be looked up."""
    return [v for v in atoms if not isinstance(v, core.Literal)]


def are_in(atoms: Iterable[Any], group: set[Any]) -> list[bool]:
    """Says of each variable or literal whether it is one of a set of variables."""
    return [not isinstance(v, core.Literal) and v in group for v in atoms]


def cut_out(
    jaxpr: Any, eqns: Sequence[Any], outvars: Sequence[Any]
) -> tuple[list[Any], Callable[..., list[Array]]]:
    """Makes a function of some equations; also returns the variables that are its arguments."""
    made = {v for eqn in eqns for v in eqn.outvars}
    read = dict.fromkeys(v for eqn in eqns for v in variables(eqn.invars) if v not in made)
    alone = jaxpr.replace(constvars=[], invars=list(read), outvars=list(outvars), eqns=list(eqns))
    return list(read), core.jaxpr_as_fun(core.ClosedJaxpr(alone, []))
