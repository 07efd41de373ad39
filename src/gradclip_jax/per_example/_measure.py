"""The norm of a lazy array from its factors.

The squared norm of `sum over t of F1_t F2_t` is that over s and t of `(F1_s . F1_t)(F2_s . F2_t)`:
two Gram matrices multiplied elementwise. Terms of one array are multiplied with each other the same
way. Each factor is divided by a power of two first, so that no square overflows or underflows.
"""

import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from .._types import Array, Scalar
from ._cost import elements, is_dense, prefers_gram, rows, tile_elements
from ._factors import Factor, Lazy, Term, as_array, einsum, wide_dtype
from ._layout import split_labels


def norm(value: Array | Lazy) -> Scalar:
    """The 2-norm of an array or a lazy one: float32[], or float64[] for 64 bit."""
    if not isinstance(value, Lazy):
        return norm_of_arrays([value])
    if value.norms is not None:
        return norm_of_arrays([value.norms])
    parts = separate(value)
    if parts is None:
        return norm_of_arrays([as_array(value)])
    return norm_of_arrays([_part_norm(part) for part in parts])


def norm_of_arrays(arrays: Sequence[Array]) -> Scalar:
    """The 2-norm of all elements of all arrays, for every magnitude."""
    arrays = [x for x in arrays if x.size]
    if not arrays:
        return jnp.zeros((), jnp.float32)
    scaled = [_scaled(x) for x in arrays]
    top = jnp.max(jnp.stack([e for _, e in scaled]))
    dtype = jnp.result_type(*(jnp.finfo(x.dtype).dtype for x in arrays), jnp.float32)
    total = jnp.zeros((), dtype)
    for x, e in scaled:
        total = total + jnp.ldexp(jnp.sum(_square(x, dtype)), 2 * (e - top))
    return jnp.ldexp(jnp.sqrt(total), top)


def _square(x: Array, dtype: jnp.dtype) -> Array:
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return _square(x.real, dtype) + _square(x.imag, dtype)
    return lax.square(x.astype(dtype))


def _scaled(x: Array) -> tuple[Array, Array]:
    """An array divided by a power of two so that its largest element is about one."""
    exponent = _exponent(x)
    kind = jnp.promote_types(jnp.finfo(x.dtype).dtype, jnp.float32)
    return x * jnp.ldexp(jnp.ones((), kind), -exponent).astype(x.dtype), exponent


def _exponent(x: Array) -> Array:
    """That of the largest element, for two."""
    info = jnp.finfo(x.dtype)
    is_complex = jnp.issubdtype(x.dtype, jnp.complexfloating)
    size = jnp.maximum(jnp.abs(x.real), jnp.abs(x.imag)) if is_complex else jnp.abs(x)
    top = jnp.max(size, initial=0)
    top = top.astype(jnp.promote_types(top.dtype, jnp.float32))
    _, exponent = jnp.frexp(top)
    limit = int(-math.log2(float(info.tiny)))
    exponent = jnp.where(jnp.isfinite(top) & (top > 0), jnp.clip(exponent, -limit, limit), 0)
    return exponent


def separate(lazy: Lazy) -> list[Lazy] | None:
    """A lazy array cut into parts that do not overlap; None if its terms overlap in part."""
    parts: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Term]] = {}
    for term in lazy.terms:
        parts.setdefault((term.start, term.shape()), []).append(term)
    windows = list(parts)
    for i, (start, shape) in enumerate(windows):
        for other_start, other_shape in windows[:i]:
            spans = zip(start, shape, other_start, other_shape, strict=True)
            if all(a < b + m and b < a + n for a, n, b, m in spans):
                return None
    return [
        Lazy(shape, lazy.dtype, tuple(t.replace(start=(0,) * len(t.out)) for t in terms))
        for (_, shape), terms in parts.items()
    ]


def method(lazy: Lazy) -> str:
    """How the norm of a part is taken: from Gram matrices, the product, or tiles of it."""
    if all(map(is_dense, lazy.terms)):
        return "product"
    if prefers_gram(lazy) and _aligned(lazy) is not None:
        return "gram"
    return "tiles" if _tile_axis(lazy) is not None else "product"


def _part_norm(lazy: Lazy) -> Scalar:
    chosen = method(lazy)
    if chosen == "product":
        return norm_of_arrays([as_array(lazy.replace(dtype=_out_dtype(lazy)))])
    if chosen == "tiles":
        return _tiled_norm(lazy)
    return _gram_norm(lazy)


def _out_dtype(lazy: Lazy) -> jnp.dtype:
    return jnp.result_type(*(wide_dtype(term.factors) for term in lazy.terms))


# Gram matrices


def _aligned(lazy: Lazy) -> list[Term] | None:
    """Terms that have labels of the same lengths along every axis, and no others in common."""
    finest = max(lazy.terms, key=lambda term: len(term.kept()))
    sizes = finest.sizes()
    wanted = [[sizes[k] for k in axis] for axis in finest.out]
    terms: list[Term] = []
    for term in lazy.terms:
        divided = split_labels(term, term.kept(), [n for axis in wanted for n in axis])
        if divided is None:
            return None
        term, labels = divided
        if any(len(axis) != 1 for axis in labels):
            return None
        terms.append(_relabelled(term, [axis[0] for axis in labels]))
    return terms


def _relabelled(term: Term, kept: Sequence[int]) -> Term:
    """The labels of the value renamed to 0, 1, ...; those summed over follow."""
    order = {k: i for i, k in enumerate((*kept, *term.summed()))}
    factors = tuple(
        Factor(f.array, tuple(order[k] for k in f.labels), order.get(f.hot), f.size)  # pyright: ignore[reportArgumentType, reportCallIssue]
        for f in term.factors
    )
    return term.replace(factors=factors, out=tuple((order[k],) for k in kept))


def _gram_norm(lazy: Lazy) -> Scalar:
    aligned = _aligned(lazy)
    assert aligned is not None
    scaled = [_scaled_term(term) for term in _joined(aligned)]
    top = jnp.max(jnp.stack([e for _, e in scaled]))
    pairs = [(m, n) for n in range(len(scaled)) for m in range(n + 1)]
    total = jnp.zeros((), jnp.finfo(_out_dtype(lazy)).dtype)
    for m, n in pairs:
        (left, a), (right, b) = scaled[m], scaled[n]
        value = _inner(left, right) * (1 if m == n else 2)
        total = total + jnp.ldexp(value, a + b - 2 * top)
    return jnp.ldexp(jnp.sqrt(jnp.maximum(total, 0)), top)


def _scaled_term(term: Term) -> tuple[Term, Array]:
    factors: list[Factor] = []
    total = jnp.zeros((), jnp.int32)
    for f in term.factors:
        if f.hot is None:
            exponent = _exponent(f.array)
            one = jnp.ones((), jnp.finfo(f.array.dtype).dtype)
            scale = jnp.ldexp(one.astype(jnp.promote_types(one.dtype, jnp.float32)), -exponent)
            f, total = f.replace(scale=scale), total + exponent
        factors.append(f)
    return term.replace(factors=tuple(factors)), total


def _joined(terms: list[Term]) -> list[Term]:
    """Terms of the same kind as one, their rows one after the other: fewer, larger products."""
    kinds: dict[object, list[Term]] = {}
    for i, term in enumerate(terms):
        kept, summed = set(term.kept()), set(term.summed())
        can_join = all(f.hot is None and summed <= set(f.labels) for f in term.factors)
        axes = tuple(sorted(tuple(sorted(kept & set(f.labels))) for f in term.factors))
        is_plain = can_join and bool(summed) and len(set(axes)) == len(axes)
        kinds.setdefault(axes if is_plain else i, []).append(term)
    return [same[0] if len(same) == 1 else _join(same) for same in kinds.values()]


def _join(terms: list[Term]) -> Term:
    first = terms[0]
    kept = first.kept()
    count = len(kept)
    wide = jnp.result_type(*(f.array.dtype for term in terms for f in term.factors))
    columns: dict[tuple[int, ...], list[Array]] = {}
    for term in terms:
        for f in term.factors:
            own = tuple(k for k in kept if k in f.labels)
            order = [f.labels.index(k) for k in (*term.summed(), *own)]
            shape = (rows(term), *(f.sizes()[k] for k in own))
            columns.setdefault(own, []).append(f.array.transpose(order).reshape(shape).astype(wide))
    factors = tuple(
        Factor(jnp.concatenate(arrays), (count, *own)) for own, arrays in columns.items()
    )
    return first.replace(factors=factors)


def _inner(left: Term, right: Term) -> Scalar:
    """The sum over elements of one term times the conjugate of another."""
    shift = 1 + max(left.sizes(), default=0)
    kept = set(left.kept())

    def moved(k: int) -> int:
        return k if k in kept else k + shift

    others = [
        f.replace(
            array=f.array if f.hot is not None else jnp.conj(f.array),
            labels=tuple(map(moved, f.labels)),
        )
        for f in right.factors
    ]
    factors = list(left.factors)
    for mine in [f for f in factors if f.hot is not None]:
        theirs = next((f for f in others if f.hot == mine.hot), None)
        factors.remove(mine)
        if theirs is not None:
            others.remove(theirs)
            factors.append(_same_rows(mine, theirs))
        else:
            others = [_picked(f, mine) for f in others]
    for theirs in [f for f in others if f.hot is not None]:
        others.remove(theirs)
        factors = [_picked(f, theirs) for f in factors]
    value = einsum([*factors, *others], ())
    return value.real if jnp.issubdtype(value.dtype, jnp.complexfloating) else value


def _same_rows(x: Factor, y: Factor) -> Factor:
    """The Gram matrix of two factors of row numbers: one where they are equal."""
    a = x.array.reshape(*x.array.shape, *(1 for _ in y.array.shape))
    return Factor(((a == y.array) & (a >= 0)).astype(jnp.float32), (*x.labels, *y.labels))


def _picked(factor: Factor, numbers: Factor) -> Factor:
    """The rows of a dense factor at the row numbers of another; zeros for -1."""
    if numbers.hot not in factor.labels:
        return factor
    axis = factor.labels.index(numbers.hot)
    before, after = factor.labels[:axis], factor.labels[axis + 1 :]
    picked = jnp.take(factor.array, numbers.array, axis=axis, mode="clip")
    valid = (numbers.array >= 0).reshape(*numbers.array.shape, *(1 for _ in after))
    array = jnp.where(valid, picked, 0)
    return factor.replace(array=array, labels=(*before, *numbers.labels, *after))


# Tiles


def _tile_axis(lazy: Lazy) -> int | None:
    """The longest axis, where the product is to be made in tiles along it."""
    budget = max(map(tile_elements, lazy.terms))
    if math.prod(lazy.shape) <= budget or all(map(is_dense, lazy.terms)):
        return None
    axis = max(range(len(lazy.shape)), key=lambda i: lazy.shape[i])
    return axis if all(len(term.out[axis]) == 1 for term in lazy.terms) else None


def _tiled_norm(lazy: Lazy) -> Scalar:
    axis = _tile_axis(lazy)
    assert axis is not None
    length = lazy.shape[axis]
    budget = max(map(tile_elements, lazy.terms))
    tile = max(1, min(length, budget * length // elements(lazy.terms[0])))
    count = -(-length // tile)
    dtype = _out_dtype(lazy)

    def tile_norm(i: Array) -> Scalar:
        # The last tile starts early enough to fit, and leaves out what the one before it had.
        start = jnp.minimum(i * tile, length - tile)
        cut = lazy.replace(
            dtype=dtype,
            shape=tuple(tile if j == axis else n for j, n in enumerate(lazy.shape)),
            terms=tuple(_cut(term, term.out[axis][0], start, tile) for term in lazy.terms),
        )
        value = as_array(cut)
        new = start + lax.broadcasted_iota(jnp.int32, value.shape, axis) >= i * tile
        return norm_of_arrays([jnp.where(new, value, 0)])

    return norm_of_arrays([lax.map(tile_norm, jnp.arange(count, dtype=jnp.int32))])


def _cut(term: Term, label: int, start: Array, size: int) -> Term:
    factors: list[Factor] = []
    for f in term.factors:
        if label in f.labels:
            axis = f.labels.index(label)
            f = f.replace(array=lax.dynamic_slice_in_dim(f.array, start, size, axis))
        if f.hot == label:
            inside = (f.array >= start) & (f.array < start + size)
            f = f.replace(array=jnp.where(inside, f.array - start, -1), size=size)
        factors.append(f)
    return term.replace(factors=tuple(factors))
