"""The squared norm of a lazy array from its factors, and how far it may be off.

The squared norm of `sum over t of F1_t F2_t` is that over s and t of `(F1_s . F1_t)(F2_s . F2_t)`:
two Gram matrices multiplied elementwise. Terms of one array are multiplied with each other the same
way. Where tokens cancel, that total is small beside its terms, and its digits are lost; squares
may overflow or underflow. The bound on the error shows each of these, and the gradient is then
written down.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from .._types import Array, Scalar
from ._factors import (
    Axis,
    Factor,
    Labels,
    Lazy,
    Term,
    as_array,
    as_lazy,
    einsum,
    is_lazy,
    is_small,
    wide_dtype,
)
from ._layout import split_axes

# What rounding takes off a product, in units of eps: the sums over axes and tokens are blocked.
_ROUNDING = 4
# Norms off by no more than this share are right to 1e-5, as the square root halves it.
_TOLERANCE = 2e-5
_FLOOR = 2.0**-100  # the square of what underflows, over the rounding


class Square(NamedTuple):
    """A squared norm, and a bound on its rounding error, scalars."""

    total: Scalar
    error: Scalar

    def norm(self) -> Scalar:
        """Returns the norm, rounded up."""
        return jnp.where(self.total > 0, jnp.sqrt(self.total + self.error), self.total)

    def is_exact(self) -> Array:
        """Says whether the norm is right to 1e-5."""
        return jnp.isfinite(self.total) & (self.error <= _TOLERANCE * self.total)


def square(value: Array | Lazy) -> Square:
    """Squares an array or a lazy one, without writing the latter down."""
    parts = separate(value) if is_lazy(value) else None
    if parts is None:
        return _dense_square(as_array(value))
    squares = [_part_square(part) for part in parts]
    return add_squares(squares, value.dtype)


def add_squares(squares: Sequence[Square], dtype: Any = jnp.float32) -> Square:
    """Joins the squares of disjoint parts."""
    zero = jnp.zeros((), jnp.finfo(_wide_real(dtype)).dtype)
    return Square(sum((x.total for x in squares), zero), sum((x.error for x in squares), zero))


def count_nonzero(value: Array | Lazy) -> Square:
    """Counts terms that are not zero: a total of 0 says that no square has underflown."""
    terms = as_lazy(value).terms
    dense = [[f.array for f in term.factors if f.hot is None] for term in terms]
    flags = [jnp.all(jnp.stack([jnp.any(x != 0) for x in arrays])) for arrays in dense]
    zero = jnp.zeros((), _wide_real(value.dtype))
    return Square(sum((flag.astype(zero.dtype) for flag in flags), zero), zero)


def largest(x: Array) -> Scalar:
    """Finds the largest real number of an array."""
    return jnp.max(jnp.stack([jnp.max(jnp.abs(part), initial=0) for part in _real_parts(x)]))


def separate(lazy: Lazy) -> list[Lazy] | None:
    """Cuts a lazy array into parts that do not overlap; None if its terms overlap in part."""
    parts: dict[Any, list[Term]] = {}
    for term in lazy.terms:
        starts = tuple(axis.start for axis in term.axes)
        parts.setdefault((starts, term.shape()), []).append(term)
    windows = list(parts)
    for i, (start, shape) in enumerate(windows):
        for other_start, other_shape in windows[:i]:
            ranges = zip(start, shape, other_start, other_shape, strict=True)
            if all(a < b + m and b < a + n for a, n, b, m in ranges):
                return None
    return [
        Lazy(shape, _wide(terms), tuple(_at_start(term) for term in terms))
        for (_, shape), terms in parts.items()
    ]


def _real_parts(x: Array) -> list[Array]:
    """Returns the real numbers of an array, in 32 bit at least."""
    parts = [x.real, x.imag] if jnp.issubdtype(x.dtype, jnp.complexfloating) else [x]
    return [part.astype(_wide_real(x.dtype)) for part in parts]


def _wide_real(dtype: Any) -> Any:
    return jnp.float64 if jnp.finfo(dtype).bits == 64 else jnp.float32


def _dense_square(x: Array) -> Square:
    total = jnp.sum(jnp.stack([jnp.sum(jnp.square(part)) for part in _real_parts(x)]))
    info = jnp.finfo(total.dtype)
    return Square(total, _ROUNDING * float(info.eps) * total + x.size * float(info.tiny))


def _part_square(part: Lazy) -> Square:
    terms = gram_terms(part)
    return (
        _dense_square(as_array(part))
        if terms is None
        else _gram_square(terms, _wide_real(part.dtype))
    )


def _at_start(term: Term) -> Term:
    return Term(term.factors, tuple(Axis(axis.labels) for axis in term.axes))


def _wide(terms: Sequence[Term]) -> Any:
    return jnp.result_type(*(wide_dtype(term.factors) for term in terms))


def gram_terms(part: Lazy) -> list[Term] | None:
    """Labels all terms alike, 0, 1, ... along the axes, so that they have Gram matrices.

    None if the product is better written down, or the terms cannot be given such labels.
    """
    if is_small(part):
        return None
    finest = max(part.terms, key=lambda term: len(term.kept()))
    sizes = [finest.sizes()[k] for k in finest.kept()]
    if any(f.hot is not None and _is_shared(f, term) for term in part.terms for f in term.factors):
        return None
    terms: list[Term] = []
    for term in part.terms:
        divided = split_axes(term, sizes)
        if divided is None or any(len(axis.labels) != 1 for axis in divided.axes):
            return None
        order = {k: i for i, k in enumerate((*divided.kept(), *divided.summed()))}
        factors = tuple(_relabelled(f, order) for f in divided.factors)
        terms.append(Term(factors, tuple(Axis((i,)) for i in range(len(sizes)))))
    return terms


def _is_shared(f: Factor, term: Term) -> bool:
    others = {k for g in term.factors if g is not f for k in g.sizes()}
    return f.hot not in term.kept() or f.hot in others


def _relabelled(factor: Factor, names: dict[int, int]) -> Factor:
    hot = None if factor.hot is None else names[factor.hot]
    return factor.replace(labels=tuple(names[k] for k in factor.labels), hot=hot)


def _gram_square(terms: list[Term], dtype: Any) -> Square:
    total, sizes = jnp.zeros((), dtype), list[Scalar]()
    off = jnp.zeros((), dtype)
    terms = _joined(terms)
    for n, term in enumerate(terms):
        grams, shares = zip(*(_gram(f, term) for f in term.factors), strict=True)
        total = total + _real(einsum(grams, ()))
        off = off + sum(shares)
        sizes.append(einsum([g.replace(array=jnp.abs(g.array) + _FLOOR) for g in grams], ()))
        for other in terms[:n]:
            total = total + 2 * _inner(other, term)
    # By Cauchy and Schwarz the terms of two lazy arrays are no larger than those of each.
    size = jnp.square(sum(map(jnp.sqrt, sizes)))
    return Square(total, (_ROUNDING * jnp.finfo(dtype).eps + off) * size)


def _gram(f: Factor, term: Term) -> tuple[Factor, Scalar]:
    """Multiplies the rows of a factor with each other; also how far that is off, as a share.

    A product adds up in order: 4,096 equal numbers are off by 1.6e-5 on a CPU. The diagonal is
    added up once more by `sum`, which does so in pairs.
    """
    shift, kept = 1 + max(term.sizes()), set(term.kept())
    names = {k: k if k in kept else k + shift for k in f.sizes()}
    other = _relabelled(_conjugate(f), names)
    if f.hot is not None:
        return _same_rows(f, other), jnp.zeros(())
    rows = [k for k in f.labels if k not in kept]
    both = [k for k in f.labels if any(k in g.labels for g in term.factors if g is not f)]
    shared = [k for k in both if k in kept]
    gram = Factor(einsum([f, other], (*shared, *rows, *(names[k] for k in rows))), ())
    labels, own = (*shared, *rows, *rows), (*shared, *rows)
    diagonal = _real(einsum([gram.replace(labels=labels)], own))
    own_first = [f.labels.index(k) for k in own]
    order = [*own_first, *(i for i in range(len(f.labels)) if i not in own_first)]
    summed = tuple(range(len(own), len(order)))
    parts = [jnp.square(x.transpose(order)) for x in _real_parts(f.array)]
    squares = jnp.sum(jnp.stack([jnp.sum(x, summed) for x in parts]), 0)
    off = jnp.abs(diagonal - squares) / jnp.where(squares > 0, squares, 1)
    gram = gram.replace(labels=(*shared, *rows, *(names[k] for k in rows)))
    return gram, jnp.max(off, initial=0)


def _joined(terms: list[Term]) -> list[Term]:
    """Joins terms with like factors, as of a weight used several times, to one of more rows.

    Otherwise an unrolled loop of n steps would need n^2 products.
    """
    kinds: dict[Any, list[Term]] = {}
    for i, term in enumerate(terms):
        summed = set(term.summed())
        axes = tuple(sorted((_own(f, term.kept()), f.hot is None) for f in term.factors))
        can_join = all(summed <= set(f.labels) for f in term.factors)
        is_plain = can_join and bool(summed) and len(dict(axes)) == len(axes)
        kinds.setdefault(axes if is_plain else i, []).append(term)
    return [same[0] if len(same) == 1 else _join(same) for same in kinds.values()]


def _own(f: Factor, kept: Labels) -> Labels:
    return tuple(k for k in kept if k in f.labels or k == f.hot)


def _join(terms: list[Term]) -> Term:
    kept = terms[0].kept()
    columns: dict[Labels, list[Factor]] = {}
    for term in terms:
        for f in term.factors:
            own = [k for k in _own(f, kept) if k != f.hot]
            rows = f.array.transpose([f.labels.index(k) for k in (*term.summed(), *own)])
            rows = rows.reshape(term.rows(), *(f.sizes()[k] for k in own))
            columns.setdefault(_own(f, kept), []).append(
                f.replace(array=rows, labels=(len(kept), *own))
            )
    joined = (
        same[0].replace(array=jnp.concatenate([f.array.astype(_common(same)) for f in same]))
        for same in columns.values()
    )
    return Term(tuple(joined), terms[0].axes)


def _common(factors: Sequence[Factor]) -> Any:
    return jnp.result_type(*(f.array.dtype for f in factors))


def _inner(left: Term, right: Term) -> Scalar:
    """Sums over the elements of one term times the conjugate of another."""
    kept, shift = set(left.kept()), 1 + max(left.sizes(), default=0)
    names = {k: k if k in kept else k + shift for k in right.sizes()}
    ours = list(left.factors)
    theirs = [_relabelled(_conjugate(f), names) for f in right.factors]
    for some, others in ((ours, theirs), (theirs, ours)):
        for hot in [f for f in some if f.hot is not None]:
            some.remove(hot)
            alike = next((f for f in others if f.hot == hot.hot), None)
            if alike is None:
                others[:] = [_picked(f, hot) for f in others]
            else:
                others.remove(alike)
                some.append(_same_rows(hot, alike))
    return _real(einsum([*ours, *theirs], ()))


def _real(x: Array) -> Array:
    return x.real if jnp.issubdtype(x.dtype, jnp.complexfloating) else x


def _conjugate(factor: Factor) -> Factor:
    return factor if factor.hot is not None else factor.replace(array=jnp.conj(factor.array))


def _same_rows(x: Factor, y: Factor) -> Factor:
    """Makes the Gram matrix of two factors of row numbers: one where they are equal."""
    a = x.array.reshape(*x.array.shape, *(1 for _ in y.array.shape))
    return Factor(((a == y.array) & (a >= 0)).astype(jnp.float32), (*x.labels, *y.labels))


def _picked(factor: Factor, numbers: Factor) -> Factor:
    """Takes the rows of a dense factor at the row numbers of another; zeros for -1."""
    if numbers.hot not in factor.labels:
        return factor
    axis = factor.labels.index(numbers.hot)
    before, after = factor.labels[:axis], factor.labels[axis + 1 :]
    picked = jnp.take(factor.array, numbers.array, axis=axis, mode="clip")
    valid = (numbers.array >= 0).reshape(*numbers.array.shape, *(1 for _ in after))
    array = jnp.where(valid, picked, 0)
    return factor.replace(array=array, labels=(*before, *numbers.labels, *after))
