"""Squared gradient norms, computed from the factors of each gradient with an error bound.

The squared norm of `sum over t of F1_t F2_t` is the sum over s and t of
`<F1_s, F1_t> <F2_s, F2_t>`, the elementwise product of two Gram matrices. If a gradient has several
terms, their inner products are computed in the same way. The gradient of an example is materialized
if cancellation between tokens, overflow or underflow makes its norm inaccurate.

Each squared norm is returned with an error bound, which does not include the rounding error of a
plain sum. Both numbers are zero if and only if the gradient is exactly zero.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import jax.numpy as jnp

from .._leaves import wide_dtype
from .._types import Array, Scalar
from ._lazy import Axis, Factor, Labels, Lazy, Term, Value, all_or_none, as_array, einsum

# Relative rounding error of a contraction, as a multiple of the machine epsilon.
# The error is small because backends sum over axes and tokens in blocks.
_ROUNDING = 4
# Maximum relative error of a squared norm; the norm has half of this error.
_TOLERANCE = 2e-5
# The error bound adds this constant to absolute values, because their squares may underflow.
_FLOOR = 2.0**-100
# A squared norm above this multiple of `finfo.tiny` is accurate even if some squares underflow.
_UNDERFLOW = 2.0**48


def norm_of(total: Array, error: Array) -> tuple[Array, Array]:
    """Return the norm, rounded up, and whether its relative error is at most 1e-5."""
    info = jnp.finfo(total.dtype)
    rounding = _ROUNDING * float(info.eps)
    norm = jnp.where(total > 0, jnp.sqrt(total * (1 + rounding) + error), total)
    is_close = error <= (_TOLERANCE - rounding) * total
    is_in_range = (total == 0) | (total > _UNDERFLOW * float(info.tiny))
    return norm, jnp.isfinite(total) & is_close & is_in_range


def square(value: Value) -> tuple[Scalar, Scalar]:
    """Return the squared norm of a gradient and its error bound, from factors where possible."""
    total = error = zero = jnp.zeros((), jnp.finfo(wide_dtype(value.dtype)).dtype)
    for part in separate(value):
        part_total, part_error = _part_square(part, zero)
        total, error = total + part_total, error + part_error
    return total, error


def separate(value: Value) -> Sequence[Value]:
    """Split a gradient into blocks of terms that do not overlap.

    If terms overlap only partially, return the materialized array.
    """
    if not isinstance(value, Lazy):
        return [value]
    parts: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Term]] = {}
    for term in value.terms:
        starts = tuple(axis.start for axis in term.axes)
        at_start = replace(term, axes=tuple(Axis(axis.labels) for axis in term.axes))
        parts.setdefault((starts, term.shape), []).append(at_start)
    for window, other in itertools.combinations(parts, 2):
        if all(a < b + m and b < a + n for a, n, b, m in zip(*window, *other, strict=True)):
            return [as_array(value)]
    wide = wide_dtype(value.dtype)
    return [Lazy(shape, wide, tuple(terms)) for (_, shape), terms in parts.items()]


def gram_terms(part: Value) -> list[Term] | None:
    """Convert all terms to a common layout from which Gram matrices can be computed.

    Return None if the product is no larger than its factors or if there is no common layout.
    """
    if not isinstance(part, Lazy) or part.is_small():
        return None
    finest = max(part.terms, key=lambda term: len(term.kept))
    sizes = [finest.sizes[k] for k in finest.kept]
    terms = all_or_none(_by_rows(term.split_axes(sizes)) for term in part.terms)
    return _joined(terms) if terms and len(terms) > 1 else terms


def _squares(x: Array) -> Array:
    """Square magnitudes in float32 or wider, and keep the squares of nonzero values positive."""
    x = x.astype(wide_dtype(x.dtype))
    squares = (x * jnp.conj(x)).real
    return jnp.where(x == 0, 0, jnp.maximum(squares, float(jnp.finfo(x.dtype).tiny)))


# Gram matrices. The axes of the value have the labels 0, 1, ..., n - 1.
# The row axis has label n in the left operand and label n + 1 in the right operand.


def _by_rows(term: Term | None) -> Term | None:
    """Reshape all factors of a product so that the summed axes become one leading axis."""
    if term is None or any(len(axis.labels) != 1 for axis in term.axes):
        return None
    kept, summed, sizes, count = term.kept, term.summed, term.sizes, term.rows

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

    for hot in term.hots:
        uses = [f for f in term.factors if hot.hot in (*f.labels, f.hot)]
        if hot.hot not in kept or len(uses) > 1 or set(hot.labels) & set(kept):
            return None
    factors = sorted(map(in_rows, term.factors), key=_kind)
    return Term(tuple(factors), tuple(Axis((i,)) for i in range(len(kept))))


Kind: TypeAlias = tuple[bool, int, Labels]
"""Labels of a factor. Factors of one kind can be concatenated along their rows."""


def _kind(f: Factor) -> Kind:
    return f.hot is None, f.hot or 0, f.labels


def _joined(terms: list[Term]) -> list[Term]:
    """Concatenate terms whose factors have the same labels into one term with more rows.

    Otherwise, a weight that is used n times in an unrolled loop would require n^2 inner products.
    """
    kinds: dict[tuple[Kind, ...], list[tuple[Factor, ...]]] = {}
    for term in terms:
        kinds.setdefault(tuple(map(_kind, term.factors)), []).append(term.factors)

    def joined(same: Sequence[Factor]) -> Factor:
        dtypes = {f.array.dtype for f in same}
        common = wide_dtype(*dtypes) if len(dtypes) > 1 else same[0].array.dtype
        return replace(same[0], array=jnp.concatenate([f.array.astype(common) for f in same]))

    return [
        Term(tuple(map(joined, zip(*same, strict=True))), terms[0].axes) for same in kinds.values()
    ]


def _part_square(part: Value, zero: Scalar) -> tuple[Scalar, Scalar]:
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
    # By the Cauchy-Schwarz inequality, this also bounds the inner products of different terms.
    size = jnp.square(sum(map(jnp.sqrt, sizes)))
    return total, (_ROUNDING * jnp.finfo(zero.dtype).eps + off) * size


def _gram(f: Factor, term: Term) -> tuple[Factor, Factor, Scalar]:
    """Return the Gram matrix of a factor, a bound on its elements, and its relative error.

    Some backends add the terms of a matrix product sequentially, with an error of 1.6e-5 for 4,096
    equal numbers. To measure this error, the diagonal is recomputed with pairwise summation.
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
    # The error of squares near underflow can be ignored, because `_FLOOR` is larger.
    off = jnp.abs(diagonal - squares) / jnp.where(squares > 2**10 * _FLOOR, squares, 1)
    gram = Factor(array, (*shared, n, n + 1))
    bound = jnp.abs(array) + jnp.where(squares > 0, _FLOOR, 0)[..., None]
    return gram, replace(gram, array=bound), jnp.max(off, initial=0)


def _inner(left: Term, right: Term) -> Scalar:
    """Return the real part of the inner product of two terms."""
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
    """Gather the rows of a factor at one-hot indices, with zeros for the index -1."""
    if f.hot == hot.hot:
        rows = (f.array == hot.array[:, None]) & (f.array >= 0)
        return Factor(rows.astype(jnp.float32), (*hot.labels, *f.labels))
    if hot.hot not in f.labels:
        return f
    axis = f.labels.index(hot.hot)
    rows = jnp.moveaxis(jnp.take(f.array, hot.array, axis=axis, mode="clip"), axis, 0)
    array = jnp.where(jnp.expand_dims(hot.array >= 0, range(1, rows.ndim)), rows, 0)
    return replace(f, array=array, labels=(*hot.labels, *f.labels[:axis], *f.labels[axis + 1 :]))
