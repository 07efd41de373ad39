"""The squared norm of a lazy array from its factors, and how far it may be off.

The squared norm of `sum over t of F1_t F2_t` is that over s and t of `(F1_s . F1_t)(F2_s . F2_t)`:
two Gram matrices multiplied elementwise. Terms of one array are multiplied with each other the same
way. Where tokens cancel, that total is small beside its terms, and its digits are lost; squares
may overflow or underflow. The bound on the error shows each of these, and the gradient is then
written down.

A squared norm is two numbers here: the total, and a bound on its error beyond that of a plain sum.
Of a gradient that is exactly zero both are zero, and of no other.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from .._types import Array, Scalar
from ..clipping._formula import wide_dtype
from ._lazy import Axis, Factor, Lazy, Term, as_array, einsum

# What rounding takes off a product, in units of eps: the sums over axes and tokens are blocked.
_ROUNDING = 4
# Norms off by no more than this share are right to 1e-5, as the square root halves it.
_TOLERANCE = 2e-5
_FLOOR = 2.0**-100  # the square of what underflows, over the rounding
# Sums above this multiple of the smallest normal number are right, though a few squares underflow.
_UNDERFLOW = 2.0**48


def norm_of(square: Array) -> Scalar:
    """Returns the norm, rounded up."""
    total, error = square
    eps = float(jnp.finfo(total.dtype).eps)
    return jnp.where(total > 0, jnp.sqrt(total * (1 + _ROUNDING * eps) + error), total)


def is_exact(square: Array) -> Array:
    """Says whether the norm is right to 1e-5."""
    total, error = square
    info = jnp.finfo(total.dtype)
    is_close = error <= (_TOLERANCE - _ROUNDING * float(info.eps)) * total
    is_in_range = (total == 0) | (total > _UNDERFLOW * float(info.tiny))
    return jnp.isfinite(total) & is_close & is_in_range


def square(value: Array | Lazy) -> tuple[Scalar, Scalar]:
    """Squares an array or a lazy one, without writing the latter down."""
    zero = jnp.zeros((), jnp.finfo(wide_dtype(value.dtype)).dtype)
    pairs = [_part_square(part, zero) for part in separate(value)]
    return sum((x for x, _ in pairs), zero), sum((x for _, x in pairs), zero)


def separate(value: Array | Lazy) -> Sequence[Array | Lazy]:
    """Cuts a lazy array into parts that do not overlap; terms that do in part are written down."""
    if not isinstance(value, Lazy):
        return [value]
    parts: dict[Any, list[Term]] = {}
    for term in value.terms:
        starts = tuple(axis.start for axis in term.axes)
        at_start = replace(term, axes=tuple(Axis(axis.labels) for axis in term.axes))
        parts.setdefault((starts, term.shape()), []).append(at_start)
    for window, other in itertools.combinations(parts, 2):
        if all(a < b + m and b < a + n for a, n, b, m in zip(*window, *other, strict=True)):
            return [as_array(value)]
    wide = wide_dtype(value.dtype)
    return [Lazy(shape, wide, tuple(terms)) for (_, shape), terms in parts.items()]


def gram_terms(part: Array | Lazy) -> list[Term] | None:
    """Brings all terms to rows, labelled alike along the axes, so that they have Gram matrices.

    None if the product is better written down, or the terms cannot be given such labels.
    """
    if not isinstance(part, Lazy) or part.is_small():
        return None
    finest = max(part.terms, key=lambda term: len(term.kept()))
    sizes = [finest.sizes()[k] for k in finest.kept()]
    terms = [_by_rows(term.split_axes(sizes)) for term in part.terms]
    whole = [term for term in terms if term is not None]
    return _joined(whole) if len(whole) == len(terms) else None


def _squares(x: Array) -> Array:
    """Squares magnitudes, in 32 bit at least; what is not zero stays above zero."""
    x = x.astype(wide_dtype(x.dtype))
    squares = (x * jnp.conj(x)).real
    return jnp.where(x == 0, 0, jnp.maximum(squares, float(jnp.finfo(x.dtype).tiny)))


# Gram matrices: the axes have the labels 0, 1, ..., n - 1, and rows the label n, those of the other
# side n + 1.


def _by_rows(term: Term | None) -> Term | None:
    """Joins all summed labels of a term to one, the first of each factor."""
    if term is None or any(len(axis.labels) != 1 for axis in term.axes):
        return None
    kept, summed, sizes, count = term.kept(), term.summed(), term.sizes(), term.rows()

    def in_rows(f: Factor) -> Factor:
        own = [k for k in kept if k in f.labels]
        order = [f.labels.index(k) for k in (*summed, *own) if k in f.labels]
        missing = [i for i, k in enumerate(summed) if k not in f.labels]
        array = jnp.expand_dims(f.array.transpose(order), missing)
        shape = [sizes[k] for k in own]
        array = jnp.broadcast_to(array, (*(sizes[k] for k in summed), *shape))
        hot = None if f.hot is None else kept.index(f.hot)
        labels = (len(kept), *map(kept.index, own))
        return Factor(array.reshape(count, *shape), labels, hot, f.size)

    for f in term.factors:
        others = {k for g in term.factors if g is not f for k in g.sizes()}
        if f.hot is not None and (
            f.hot not in kept or f.hot in others or set(f.labels) & set(kept)
        ):
            return None
    factors = sorted(map(in_rows, term.factors), key=_kind)
    return Term(tuple(factors), tuple(Axis((i,)) for i in range(len(kept))))


def _kind(f: Factor) -> tuple[Any, ...]:
    return f.hot is None, f.hot or 0, f.labels


def _joined(terms: list[Term]) -> list[Term]:
    """Joins terms with like factors, as of a weight used several times, to one of more rows.

    Otherwise an unrolled loop of n steps would need n^2 products.
    """
    kinds: dict[Any, list[tuple[Factor, ...]]] = {}
    for term in terms:
        kinds.setdefault(tuple(map(_kind, term.factors)), []).append(term.factors)

    def joined(same: Sequence[Factor]) -> Factor:
        dtypes = {f.array.dtype for f in same}
        common = wide_dtype(*dtypes) if len(dtypes) > 1 else same[0].array.dtype
        return replace(same[0], array=jnp.concatenate([f.array.astype(common) for f in same]))

    return [
        Term(tuple(map(joined, zip(*same, strict=True))), terms[0].axes) for same in kinds.values()
    ]


def _part_square(part: Array | Lazy, zero: Scalar) -> tuple[Scalar, Scalar]:
    terms = gram_terms(part)
    if terms is None:
        return jnp.sum(_squares(as_array(part))), zero
    total, off, sizes = zero, zero, list[Scalar]()
    for n, term in enumerate(terms):
        grams, bounds, shares = zip(*(_gram(f, term) for f in term.factors), strict=True)
        total = total + einsum(grams, ()).real
        off = off + sum(shares)
        sizes.append(einsum(bounds, ()))
        total = total + 2 * sum((_inner(other, term) for other in terms[:n]), zero)
    # By Cauchy and Schwarz the terms of two lazy arrays are no larger than those of each.
    size = jnp.square(sum(map(jnp.sqrt, sizes)))
    return total, (_ROUNDING * jnp.finfo(zero.dtype).eps + off) * size


def _gram(f: Factor, term: Term) -> tuple[Factor, Factor, Scalar]:
    """Multiplies the rows of a factor with each other; also their size, and how far that is off.

    A product may add up in order: 4,096 equal numbers are off by 1.6e-5. The diagonal is
    added up once more by `sum`, which does so in pairs.
    """
    n = len(term.axes)
    other = _other_side(f)
    if f.hot is not None:
        gram = _picked(other, f)
        return gram, gram, jnp.zeros(())
    own = set(f.labels[1:]) - {k for g in term.factors if g is not f for k in g.labels}
    shared = [k for k in f.labels[1:] if k not in own]
    array = einsum([f, other], (*shared, n, n + 1))
    diagonal = jnp.sum(jnp.where(jnp.eye(array.shape[-1], dtype=bool), array, 0), -1).real
    squares = einsum([replace(f, array=_squares(f.array))], (*shared, n))
    # Squares near underflow have no share: `_FLOOR` is larger.
    off = jnp.abs(diagonal - squares) / jnp.where(squares > 2**10 * _FLOOR, squares, 1)
    gram = Factor(array, (*shared, n, n + 1))
    bound = jnp.abs(array) + jnp.where(squares > 0, _FLOOR, 0)[..., None]
    return gram, replace(gram, array=bound), jnp.max(off, initial=0)


def _inner(left: Term, right: Term) -> Scalar:
    """Sums over the elements of one term times the conjugate of another."""
    ours, theirs = list(left.factors), list(map(_other_side, right.factors))
    for _ in range(2):
        hots = [f for f in ours if f.hot is not None]
        ours, theirs = theirs, [f for f in ours if f.hot is None]
        for hot in hots:
            ours = [_picked(f, hot) for f in ours]
    return einsum([*ours, *theirs], ()).real


def _other_side(f: Factor) -> Factor:
    return replace(f, array=jnp.conj(f.array), labels=(f.labels[0] + 1, *f.labels[1:]))


def _picked(f: Factor, hot: Factor) -> Factor:
    """Takes the rows of a factor at the row numbers of another; zeros for -1."""
    if f.hot == hot.hot:
        rows = (f.array == hot.array[:, None]) & (f.array >= 0)
        return Factor(rows.astype(jnp.float32), (*hot.labels, *f.labels))
    if hot.hot not in f.labels:
        return f
    axis = f.labels.index(hot.hot)
    rows = jnp.moveaxis(jnp.take(f.array, hot.array, axis=axis, mode="clip"), axis, 0)
    array = jnp.where((hot.array >= 0).reshape(-1, *(1 for _ in rows.shape[1:])), rows, 0)
    return replace(f, array=array, labels=(*hot.labels, *f.labels[:axis], *f.labels[axis + 1 :]))
