"""The norm of a lazy array from its factors.

The squared norm of `sum over t of F1_t F2_t` is that over s and t of `(F1_s . F1_t)(F2_s . F2_t)`:
two Gram matrices multiplied elementwise. Terms of one array are multiplied with each other the same
way. Each factor is divided by a power of two first, so that no square overflows or underflows.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from .._types import Array, Scalar
from ..clipping._norm import unit_norms
from ..clipping._units import tree_units
from ._cost import is_small
from ._factors import Axis, Factor, Labels, Lazy, Term, as_array, einsum, wide_dtype
from ._layout import split_axes


def norm(value: Array | Lazy) -> Scalar:
    """Measures an array or a lazy one: float32[], or float64[] for 64 bit."""
    if not isinstance(value, Lazy):
        return local_norm([value])
    if value.norms is not None:
        return local_norm([value.norms])
    parts = separate(value)
    return local_norm([as_array(value)] if parts is None else list(map(_part_norm, parts)))


def local_norm(arrays: Sequence[Array]) -> Scalar:
    """Measures all elements of all arrays on this device as one vector."""
    units = tree_units(arrays)._replace(is_local=True)
    return unit_norms(list(arrays), units, 2.0, None)[0]


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


def _at_start(term: Term) -> Term:
    return Term(term.factors, tuple(Axis(axis.labels) for axis in term.axes))


def _wide(terms: Sequence[Term]) -> Any:
    return jnp.result_type(*(wide_dtype(term.factors) for term in terms))


def _part_norm(part: Lazy) -> Scalar:
    terms = gram_terms(part)
    return local_norm([as_array(part)]) if terms is None else _gram_norm(terms, part.dtype)


def gram_terms(part: Lazy) -> list[Term] | None:
    """Labels all terms alike, 0, 1, ... along the axes, so that they have Gram matrices.

    None if the product is better written down, or the terms cannot be given such labels.
    """
    if is_small(part):
        return None
    finest = max(part.terms, key=lambda term: len(term.kept()))
    sizes = [finest.sizes()[k] for k in finest.kept()]
    terms: list[Term] = []
    for term in part.terms:
        divided = split_axes(term, sizes)
        if divided is None or any(len(axis.labels) != 1 for axis in divided.axes):
            return None
        order = {k: i for i, k in enumerate((*divided.kept(), *divided.summed()))}
        factors = tuple(_relabelled(f, order) for f in divided.factors)
        terms.append(Term(factors, tuple(Axis((i,)) for i in range(len(sizes)))))
    return terms


def _relabelled(factor: Factor, names: dict[int, int]) -> Factor:
    hot = None if factor.hot is None else names[factor.hot]
    return factor.replace(labels=tuple(names[k] for k in factor.labels), hot=hot)


def _gram_norm(terms: list[Term], dtype: Any) -> Scalar:
    scaled = [_scaled(term) for term in _joined(terms)]
    top = jnp.max(jnp.stack([e for _, e in scaled]))
    total = jnp.zeros((), jnp.finfo(dtype).dtype)
    for n, (right, b) in enumerate(scaled):
        for m, (left, a) in enumerate(scaled[: n + 1]):
            value = _inner(left, right) * (1 if m == n else 2)
            total = total + jnp.ldexp(value, a + b - 2 * top)
    return jnp.ldexp(jnp.sqrt(jnp.maximum(total, 0)), top)


def _scaled(term: Term) -> tuple[Term, Array]:
    """Scales the factors of a term to about one; returns the exponent that it takes out.

    The arrays stay as they are: on a TPU the scaled gradient of logits would be written down.
    """
    exponents = [None if f.hot is not None else _exponent(f.array) for f in term.factors]
    pairs = zip(term.factors, exponents, strict=True)
    one = jnp.ones((), jnp.finfo(wide_dtype(term.factors)).dtype)
    factors = [f if e is None else f.replace(scale=jnp.ldexp(one, -e)) for f, e in pairs]
    taken = jnp.stack([e for e in exponents if e is not None])
    return Term(tuple(factors), term.axes), jnp.sum(taken)


def _exponent(x: Array) -> Array:
    """Finds the power of two of the largest element; 0 if that is zero or not finite."""
    is_complex = jnp.issubdtype(x.dtype, jnp.complexfloating)
    size = jnp.maximum(jnp.abs(x.real), jnp.abs(x.imag)) if is_complex else jnp.abs(x)
    top = jnp.max(size, initial=0)
    _, exponent = jnp.frexp(top.astype(jnp.promote_types(top.dtype, jnp.float32)))
    limit = int(-math.log2(float(jnp.finfo(x.dtype).tiny)))
    return jnp.where(jnp.isfinite(top) & (top > 0), jnp.clip(exponent, -limit, limit), 0)


def _joined(terms: list[Term]) -> list[Term]:
    """Joins terms with like factors, as of a weight used several times, to one of more rows.

    Otherwise an unrolled loop of n steps would need n^2 products.
    """
    kinds: dict[Any, list[Term]] = {}
    for i, term in enumerate(terms):
        kept, summed = set(term.kept()), set(term.summed())
        axes = tuple(sorted(tuple(sorted(kept & set(f.labels))) for f in term.factors))
        can_join = all(f.hot is None and summed <= set(f.labels) for f in term.factors)
        is_plain = can_join and bool(summed) and len(set(axes)) == len(axes)
        kinds.setdefault(axes if is_plain else i, []).append(term)
    return [same[0] if len(same) == 1 else _join(same) for same in kinds.values()]


def _join(terms: list[Term]) -> Term:
    axes, kept = terms[0].axes, terms[0].kept()
    wide = jnp.result_type(*(f.array.dtype for term in terms for f in term.factors))
    columns: dict[Labels, list[Array]] = {}
    for term in terms:
        for f in term.factors:
            own = tuple(k for k in kept if k in f.labels)
            rows = f.array.transpose([f.labels.index(k) for k in (*term.summed(), *own)])
            shape = (term.rows(), *(f.sizes()[k] for k in own))
            columns.setdefault(own, []).append(rows.reshape(shape).astype(wide))
    joined = (Factor(jnp.concatenate(x), (len(kept), *own)) for own, x in columns.items())
    return Term(tuple(joined), axes)


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
    value = einsum([*ours, *theirs], ())
    return value.real if jnp.issubdtype(value.dtype, jnp.complexfloating) else value


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
