"""What moves, joins, scales or adds up lazy arrays: one function for each kind of operation.

Each returns a lazy array, or None where the result has no factors of this kind; the caller then
multiplies out.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from .._types import Array
from ._factors import Factor, Labels, Lazy, Term, as_lazy


def transpose(lazy: Lazy, permutation: Sequence[int]) -> Lazy:
    """The axes in another order."""
    terms = [
        term.replace(
            out=tuple(term.out[i] for i in permutation),
            start=tuple(term.start[i] for i in permutation),
        )
        for term in lazy.terms
    ]
    return lazy.replace(shape=tuple(lazy.shape[i] for i in permutation), terms=tuple(terms))


def sum_axes(lazy: Lazy, axes: Sequence[int]) -> Lazy | None:
    """The sum over axes: their labels are summed over with the rest."""
    if any(
        f.hot is not None and f.hot in t.out[i] for t in lazy.terms for f in t.factors for i in axes
    ):
        return None
    left = [i for i in range(len(lazy.shape)) if i not in axes]
    is_move = all(lazy.shape[i] == 1 for i in axes)
    return transpose(lazy if is_move else lazy.replace(norms=None), left)


def expand(lazy: Lazy, shape: Sequence[int], dimensions: Sequence[int]) -> Lazy | None:
    """New axes of length one; None where an axis is repeated."""
    kept = dict(zip(dimensions, range(len(dimensions)), strict=True))
    if any(size != (lazy.shape[kept[i]] if i in kept else 1) for i, size in enumerate(shape)):
        return None
    terms = [
        term.replace(
            out=tuple(term.out[kept[i]] if i in kept else () for i in range(len(shape))),
            start=tuple(term.start[kept[i]] if i in kept else 0 for i in range(len(shape))),
        )
        for term in lazy.terms
    ]
    return lazy.replace(shape=tuple(shape), terms=tuple(terms))


def reshape(lazy: Lazy, shape: Sequence[int]) -> Lazy | None:
    """Axes split and joined; None where a placed product would be cut into pieces."""
    if 0 in lazy.shape:
        return None
    terms: list[Term] = []
    for term in lazy.terms:
        reshaped = _reshape_term(term, lazy.shape, tuple(shape))
        if reshaped is None:
            return None
        terms.append(reshaped)
    return lazy.replace(shape=tuple(shape), terms=tuple(terms))


def _reshape_term(term: Term, old: tuple[int, ...], new: tuple[int, ...]) -> Term | None:
    out: list[Labels] = []
    start: list[int] = []
    for inner, outer in _matched_axes(old, new):
        if [old[i] for i in inner if old[i] != 1] == [new[i] for i in outer if new[i] != 1]:
            moved = iter([i for i in inner if old[i] != 1])
            sources = [None if new[i] == 1 else next(moved) for i in outer]
            out += [() if i is None else term.out[i] for i in sources]
            start += [0 if i is None else term.start[i] for i in sources]
            continue
        shape = term.shape()
        if any(shape[i] != old[i] for i in inner):
            return None
        divided = split_labels(
            term, [k for i in inner for k in term.out[i]], [new[i] for i in outer]
        )
        if divided is None:
            return None
        term, axes = divided
        out += axes
        start += [0] * len(outer)
    return term.replace(out=tuple(out), start=tuple(start))


def _matched_axes(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Groups of old and new axes, in order, that hold the same number of elements."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        inner, outer = list(range(i, min(i + 1, len(old)))), list(range(j, min(j + 1, len(new))))
        i, j = i + 1, j + 1
        while (a := math.prod(old[k] for k in inner)) != (b := math.prod(new[k] for k in outer)):
            if (a < b and i < len(old)) or j >= len(new):
                inner.append(i)
                i += 1
            else:
                outer.append(j)
                j += 1
        groups.append((inner, outer))
    return groups


def split_labels(
    term: Term, labels: Sequence[int], sizes: Sequence[int]
) -> tuple[Term, list[Labels]] | None:
    """Labels of a run of axes divided so that they make up axes of the given sizes."""
    axes: list[Labels] = []
    queue = list(labels)
    for wanted in sizes:
        axis: list[int] = []
        while wanted > 1:
            if not queue:
                return None
            size = term.sizes()[queue[0]]
            if wanted % size == 0:
                axis.append(queue.pop(0))
                wanted //= size
                continue
            if size % wanted:
                return None
            divided = _split_label(term, queue[0], wanted, size // wanted)
            if divided is None:
                return None
            term, (left, right) = divided
            axis.append(left)
            queue[0] = right
            wanted = 1
        axes.append(tuple(axis))
    return term, axes


def _split_label(term: Term, label: int, left: int, right: int) -> tuple[Term, Labels] | None:
    if any(f.hot == label for f in term.factors):
        return None
    a, b = term.fresh(2)
    factors: list[Factor] = []
    for f in term.factors:
        if label in f.labels:
            i = f.labels.index(label)
            shape = (*f.array.shape[:i], left, right, *f.array.shape[i + 1 :])
            f = Factor(
                f.array.reshape(shape), (*f.labels[:i], a, b, *f.labels[i + 1 :]), f.hot, f.size
            )
        factors.append(f)
    out = tuple(
        tuple(x for k in axis for x in ((a, b) if k == label else (k,))) for axis in term.out
    )
    return term.replace(factors=tuple(factors), out=out), (a, b)


def scale(lazy: Lazy, scalar: Any) -> Lazy:
    """A number times a lazy array."""

    def scaled(term: Term) -> Term:
        i = min(
            (i for i, f in enumerate(term.factors) if f.hot is None),
            key=lambda i: math.prod(term.factors[i].array.shape),
        )
        f = term.factors[i]
        array = f.array * jnp.asarray(scalar).astype(f.array.dtype)
        return term.replace(
            factors=(*term.factors[:i], f.replace(array=array), *term.factors[i + 1 :])
        )

    norms = lazy.norms
    if norms is not None:
        norms = norms * jnp.abs(jnp.asarray(scalar)).astype(norms.dtype)
    return lazy.replace(terms=tuple(map(scaled, lazy.terms)), norms=norms)


def add(x: Lazy, y: Lazy) -> Lazy:
    """The sum of two."""
    if not y.terms:
        return x
    if not x.terms:
        return y
    return x.replace(terms=x.terms + y.terms, norms=None)


def place(lazy: Lazy, shape: Sequence[int], start: Sequence[int]) -> Lazy:
    """A lazy array inside a larger one of zeros."""
    terms = [
        term.replace(start=tuple(a + b for a, b in zip(term.start, start, strict=True)))
        for term in lazy.terms
    ]
    return lazy.replace(shape=tuple(shape), terms=tuple(terms))


def place_at(lazy: Lazy, size: int, axis: int, number: Array) -> Lazy | None:
    """An axis of length one put at a traced place along a longer axis."""
    number = jnp.clip(number, 0, size - 1).astype(jnp.int32)
    terms: list[Term] = []
    for term in lazy.terms:
        (hot,) = term.fresh()
        out = (*term.out[:axis], (hot,), *term.out[axis + 1 :])
        terms.append(term.replace(factors=(Factor(number, (), hot, size), *term.factors), out=out))
    shape = (*lazy.shape[:axis], size, *lazy.shape[axis + 1 :])
    return lazy.replace(shape=shape, terms=tuple(terms))


def concatenate(values: Sequence[Any], aval: Any, axis: int) -> Lazy:
    """Arrays and lazy arrays one after the other."""
    total = Lazy(tuple(aval.shape), aval.dtype)
    offset = 0
    for value in map(as_lazy, values):
        start = [offset if i == axis else 0 for i in range(len(aval.shape))]
        total = add(total, place(value, aval.shape, start))
        offset += value.shape[axis]
    return total


def stack(lazy: Lazy, length: int, *, summed: bool) -> Lazy:
    """A lazy array whose arrays got a leading axis, one entry for each step of a loop."""
    terms: list[Term] = []
    for term in lazy.terms:
        (k,) = term.fresh()
        factors = tuple(f.replace(labels=(k, *f.labels)) for f in term.factors)
        out, start = (term.out, term.start) if summed else (((k,), *term.out), (0, *term.start))
        terms.append(Term(factors, out, start))
    shape = lazy.shape if summed else (length, *lazy.shape)
    norms = None if summed or lazy.norms is None else lazy.norms.reshape(-1)
    return Lazy(shape, lazy.dtype, tuple(terms), norms)
