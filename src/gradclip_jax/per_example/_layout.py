"""What moves, scales, adds up or splits lazy arrays, whatever the primitive is called."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from ._factors import Axis, Factor, Labels, Lazy, Term


def arrange(lazy: Lazy, shape: Sequence[int], sources: Sequence[int | None]) -> Lazy:
    """Makes each new axis of an old one, or for None of length one."""
    terms = [
        Term(t.factors, tuple(Axis() if i is None else t.axes[i] for i in sources))
        for t in lazy.terms
    ]
    return lazy.replace(shape=tuple(shape), terms=tuple(terms))


def scale(lazy: Lazy, scalar: Any) -> Lazy:
    """Multiplies a lazy array by a number."""

    def scaled(term: Term) -> Term:
        smallest = min((f for f in term.factors if f.hot is None), key=lambda f: f.array.size)
        # Promoted: the number may be complex, the factor of a complex product real.
        array = smallest.array * scalar
        factors = (f.replace(array=array) if f is smallest else f for f in term.factors)
        return Term(tuple(factors), term.axes)

    return lazy.replace(terms=tuple(map(scaled, lazy.terms)))


def add(x: Lazy, y: Lazy) -> Lazy:
    """Adds two lazy arrays; one without terms is zero."""
    if not (x.terms and y.terms):
        return x if x.terms else y
    return x.replace(terms=x.terms + y.terms)


def keep_if(flag: Any, lazy: Lazy) -> Lazy:
    """Selects a lazy array, or zeros."""

    def kept(f: Factor) -> Factor:
        return f if f.hot is not None else f.replace(array=jnp.where(flag, f.array, 0))

    terms = (Term(tuple(map(kept, term.factors)), term.axes) for term in lazy.terms)
    return lazy.replace(terms=tuple(terms))


def reverse(lazy: Lazy, axis: int) -> Lazy:
    """Turns an axis round, and with it every label of the axis."""
    terms: list[Term] = []
    for term in lazy.terms:
        labels, start = term.axes[axis]
        end = lazy.shape[axis] - start - term.shape()[axis]
        axes = (*term.axes[:axis], Axis(labels, end), *term.axes[axis + 1 :])
        terms.append(Term(tuple(_reversed(f, labels) for f in term.factors), axes))
    return lazy.replace(terms=tuple(terms))


def _reversed(f: Factor, labels: Labels) -> Factor:
    array = lax.rev(f.array, [i for i, k in enumerate(f.labels) if k in labels])
    if f.hot in labels:
        array = jnp.where(array < 0, -1, f.size - 1 - array)
    return f.replace(array=array)


def place(lazy: Lazy, shape: Sequence[int], start: Sequence[int]) -> Lazy:
    """Puts a lazy array in a larger one of zeros."""

    def placed(term: Term) -> Term:
        pairs = zip(term.axes, start, strict=True)
        return Term(term.factors, tuple(Axis(a.labels, a.start + n) for a, n in pairs))

    return lazy.replace(shape=tuple(shape), terms=tuple(map(placed, lazy.terms)))


def cut(lazy: Lazy, axis: int, start: int, size: int) -> Lazy | None:
    """Takes a range of one axis; None if its ends are within the rows of a label."""
    terms: list[Term] = []
    for term in lazy.terms:
        labels, first = term.axes[axis]
        low = max(start - first, 0)
        high = min(start + size - first, term.shape()[axis])
        if low >= high:
            continue
        if high - low < term.shape()[axis]:
            step = math.prod(term.sizes()[k] for k in labels[1:])
            if low % step or high % step:
                return None
            term = _cut_label(term, labels[0], low // step, high // step)
        inner = Axis(labels, max(first - start, 0))
        terms.append(Term(term.factors, (*term.axes[:axis], inner, *term.axes[axis + 1 :])))
    shape = (*lazy.shape[:axis], size, *lazy.shape[axis + 1 :])
    return lazy.replace(shape=shape, terms=tuple(terms))


def _cut_label(term: Term, label: int, low: int, high: int) -> Term:
    def shortened(f: Factor) -> Factor:
        if f.hot == label:
            inside = (f.array >= low) & (f.array < high)
            return f.replace(array=jnp.where(inside, f.array - low, -1), size=high - low)
        if label not in f.labels:
            return f
        return f.replace(array=lax.slice_in_dim(f.array, low, high, axis=f.labels.index(label)))

    return Term(tuple(map(shortened, term.factors)), term.axes)


def stack(lazy: Lazy, length: int, *, summed: bool) -> Lazy:
    """Labels the leading axis that a loop gave all factors; a new axis unless it is summed."""
    terms: list[Term] = []
    for term in lazy.terms:
        (k,) = term.fresh()
        factors = tuple(f.replace(labels=(k, *f.labels)) for f in term.factors)
        terms.append(Term(factors, term.axes if summed else (Axis((k,)), *term.axes)))
    if summed:
        return lazy.replace(terms=tuple(terms))
    return Lazy((length, *lazy.shape), lazy.dtype, tuple(terms))


def split_axes(term: Term, sizes: Sequence[int]) -> Term | None:
    """Gives the value of a term other axes, in the same order; None if a label is cut unevenly."""
    axes: list[Axis] = []
    labels = list(term.kept())
    for size in sizes:
        axis: list[int] = []
        while size > 1:
            if not labels:
                return None
            length = term.sizes()[labels[0]]
            if size % length:
                if length % size or any(f.hot == labels[0] for f in term.factors):
                    return None
                term, halves = _split_label(term, labels[0], size)
                labels[:1], length = halves, size
            axis.append(labels.pop(0))
            size //= length
        axes.append(Axis(tuple(axis)))
    if any(f.hot in labels for f in term.factors):
        return None
    return Term(term.factors, tuple(axes))


def _split_label(term: Term, label: int, first: int) -> tuple[Term, Labels]:
    """Splits a label in two, the first of the given length."""
    halves = term.fresh(2)

    def split(f: Factor) -> Factor:
        if label not in f.labels:
            return f
        i = f.labels.index(label)
        array = f.array.reshape(*f.array.shape[:i], first, -1, *f.array.shape[i + 1 :])
        return f.replace(array=array, labels=(*f.labels[:i], *halves, *f.labels[i + 1 :]))

    return Term(tuple(map(split, term.factors)), term.axes), halves
