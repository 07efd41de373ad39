"""Squared norms of factored gradients, computed from Gram matrices with an error bound.

The squared norm of `sum over t of F1_t F2_t` is the sum over s and t of
`<F1_s, F1_t> <F2_s, F2_t>`, the elementwise product of two Gram matrices. If a gradient has several
terms, their inner products are computed in the same way. The error bound shows where cancellation
between tokens, overflow or underflow makes a norm inaccurate, so that the gradient of this example
must be materialized. The bound does not include the rounding error of a plain sum.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import jax.numpy as jnp
from jax import lax

from .._types import Array, Scalar
from ..norms._leaves import norm_dtype, wide_dtype
from ..norms._reduce import squares, sum_of_squares
from ._factored import (
    AxisLabels,
    Convolution,
    Factor,
    Factored,
    Term,
    Value,
    as_wide_array,
    einsum,
    prefers_array,
)

# Relative rounding error of a contraction, as a multiple of the machine epsilon, in addition to the
# error that `_gram` measures. It is an empirical margin: on a CPU, the measured error alone was
# sufficient for 16 to 256 tokens with 512 to 4,096 elements (normal, uniform, log-normal or all
# equal).
_ROUNDING = 4
# Maximum relative error of a squared norm; the norm has half of this error.
_TOLERANCE = 2e-5


def norm_of(total: Array, error: Array) -> tuple[Array, Array]:
    """Return the norm, rounded up, and whether its relative error is at most 1e-5."""
    rounding = _ROUNDING * float(jnp.finfo(total.dtype).eps)
    error = lax.stop_gradient(error)
    is_exact = jnp.isfinite(total) & (error <= (_TOLERANCE - rounding) * total)
    return root(total, total * (1 + rounding) + error), is_exact


def root(total: Array, bound: Array) -> Array:
    """Return `sqrt(bound)`, an upper bound of `sqrt(total)`.

    If `total` is 0 or NaN, return `total`. The derivative at 0 is then that of a sum of squares,
    which is 0, and not that of a square root.
    """
    is_positive = total > 0
    return jnp.where(is_positive, jnp.sqrt(jnp.where(is_positive, bound, 1)), total)


def squared_norm(value: Value) -> tuple[Scalar, Scalar]:
    """Return the squared norm of a gradient and its error bound, from factors where possible."""
    zero = jnp.zeros((), jnp.finfo(wide_dtype(value.dtype)).dtype)
    if isinstance(value, Convolution) and value.gram_size() < math.prod(value.shape):
        return _convolution_square(value, zero)
    terms = gram_terms(value)
    return _gram_square(terms, zero) if terms else (sum_squares(as_wide_array(value)), zero)


def sum_squares(x: Array) -> Scalar:
    """Return `sum(|x|^2)` in float32 or wider."""
    return sum_of_squares(x, tuple(range(x.ndim)), norm_dtype([x]))


def gram_terms(value: Value) -> list[Term] | None:
    """Convert all terms to a common layout from which Gram matrices can be computed.

    Return None for an ordinary array, if an array is preferred, or if there is no common layout.
    """
    if not isinstance(value, Factored) or prefers_array(value):
        return None
    if len({tuple(term.sizes[k] for k in term.kept) for term in value.terms}) > 1:
        return None
    if any(set(term.hot.labels) & set(term.kept) for term in value.terms if term.hot):
        return None
    return _joined(list(map(_by_rows, value.terms)))


# In the common layout, the axes of the value have the labels 0, 1, ..., n - 1.
# The row axis has label n in the left operand and label n + 1 in the right operand.


def _by_rows(term: Term) -> Term:
    """Reshape all factors of a product so that the summed axes become one leading axis."""
    kept, sizes = term.kept, term.sizes
    summed = sorted(sizes.keys() - set(kept))
    rows = [sizes[k] for k in summed]

    def in_rows(f: Factor) -> Factor:
        own = [k for k in kept if k in f.labels]
        order = [f.labels.index(k) for k in (*summed, *own) if k in f.labels]
        missing = [i for i, k in enumerate(summed) if k not in f.labels]
        shape = [sizes[k] for k in own]
        array = jnp.expand_dims(f.array.transpose(order), missing)
        array = jnp.broadcast_to(array, (*rows, *shape)).reshape(math.prod(rows), *shape)
        hot = None if f.hot is None else kept.index(f.hot)
        return Factor(array, (len(kept), *map(kept.index, own)), hot, f.size)

    factors = sorted(map(in_rows, term.factors), key=_kind)
    return Term(tuple(factors), tuple((i,) for i in range(len(kept))))


Kind: TypeAlias = tuple[bool, int, AxisLabels]
"""Labels of a factor. Factors of one kind can be concatenated along their rows."""


def _kind(f: Factor) -> Kind:
    """Return a sort key that puts one-hot factors first and identifies the axes of a factor."""
    return f.hot is None, f.hot or 0, f.labels


def _joined(terms: list[Term]) -> list[Term]:
    """Concatenate terms whose factors have the same labels into one term with more rows.

    Otherwise, a weight that is used n times in an unrolled loop would require n^2 inner products.
    """
    kinds: dict[tuple[Kind, ...], list[tuple[Factor, ...]]] = {}
    for term in terms:
        kinds.setdefault(tuple(map(_kind, term.factors)), []).append(term.factors)

    def joined(same: Sequence[Factor]) -> Factor:
        if len(same) == 1:
            return same[0]
        dtypes = {f.array.dtype for f in same}
        common = wide_dtype(*dtypes) if len(dtypes) > 1 else same[0].array.dtype
        return replace(same[0], array=jnp.concatenate([f.array.astype(common) for f in same]))

    axes = terms[0].axes
    return [Term(tuple(map(joined, zip(*same, strict=True))), axes) for same in kinds.values()]


def _gram_square(terms: list[Term], zero: Scalar) -> tuple[Scalar, Scalar]:
    """Return the squared norm of a sum of terms, and a bound on its error."""
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
    n, other = len(term.axes), _other_side(f)
    if f.hot is not None:
        gram = _picked(other, f)
        return gram, gram, jnp.zeros(())
    own = set(f.labels[1:]) - {k for g in term.factors if g is not f for k in g.labels}
    shared = [k for k in f.labels[1:] if k not in own]
    labels = (*shared, n, n + 1)
    array, bound, share = _with_error(einsum([f, other], labels), f, (*shared, n))
    return Factor(array, labels), Factor(bound, labels), share


def _with_error(array: Array, f: Factor, rows: AxisLabels) -> tuple[Array, Array, Scalar]:
    """Return a Gram matrix, a bound on its elements, and its relative error."""
    diagonal = jnp.sum(jnp.where(jnp.eye(array.shape[-1], dtype=bool), array, 0), -1).real
    # Backends may replace the square of a number by zero if it is subnormal.
    dtype = norm_dtype([array])
    tiny, eps = float(jnp.finfo(dtype).tiny), float(jnp.finfo(dtype).eps)
    each = jnp.maximum(squares(f.array, dtype), tiny)
    sizes = einsum([replace(f, array=jnp.where(f.array == 0, 0, each))], rows)
    underflow = tiny * (f.array.size // max(sizes.size, 1))
    off = jnp.maximum(jnp.abs(diagonal - sizes) - underflow, 0) / jnp.where(sizes > 0, sizes, 1)
    # Products and sums may underflow. The floor is divided by the smallest factor of all bounds,
    # `_ROUNDING * eps`.
    floor = 2 * underflow / (_ROUNDING * eps)
    bound = jnp.abs(array) + jnp.where(sizes > 0, floor, 0)[..., None]
    return array, bound, jnp.max(off, initial=0)


def _convolution_square(value: Convolution, zero: Scalar) -> tuple[Scalar, Scalar]:
    """Return the squared norm of a kernel gradient and its error bound, without image patches.

    The inner product of two patches is the sum, over positions in the kernel, of the products of
    two pixels. Thus the Gram matrix of patches is a sum of slices of the Gram matrix of pixels.
    """
    spec = value.spec
    pixels, bound, off = _position_gram(value.padded(), spec.groups)
    grads, grad_bound, grad_off = _position_gram(value.grads, spec.groups)
    kernel = [value.shape[i] for i in spec.out[2:]]
    axes = list(zip(kernel, value.grads.shape[2:], spec.strides, spec.dilation, strict=True))

    def over_patches(gram: Array) -> Array:
        for i, (count, width, stride, dilation) in enumerate(axes):
            length = (width - 1) * dilation + 1
            slices: list[Array] = []
            for start in range(0, stride * count, stride):
                part = gram
                for axis in (2 + i, 3 + len(axes) + i):
                    part = lax.slice_in_dim(part, start, start + length, dilation, axis)
                slices.append(part)
            gram = functools.reduce(jnp.add, slices)
        return gram

    total = jnp.sum(over_patches(pixels) * grads).real
    size = jnp.sum(over_patches(bound) * grad_bound)
    depth = _ROUNDING + sum(kernel)
    return total, (depth * jnp.finfo(zero.dtype).eps + off + grad_off) * size


def _position_gram(array: Array, groups: int) -> tuple[Array, Array, Scalar]:
    """Return `_with_error` of the Gram matrix of all positions, for each channel group."""
    channels, *positions = array.shape
    f = Factor(array.reshape(groups, channels // groups, math.prod(positions)), (0, 1, 2))
    gram = einsum([f, Factor(jnp.conj(f.array), (0, 1, 3))], (0, 2, 3))
    array, bound, off = _with_error(gram, f, (0, 2))
    shape = (groups, *positions, *positions)
    return array.reshape(shape), bound.reshape(shape), off


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
    """Return the conjugate of a factor as the right operand of an inner product."""
    return replace(f, array=jnp.conj(f.array), labels=(f.labels[0] + 1, *f.labels[1:]))


def _picked(f: Factor, hot: Factor) -> Factor:
    """Gather the rows of a factor that a one-hot factor selects, with zeros for the index -1."""
    if f.hot == hot.hot:
        rows = (f.array == hot.array[:, None]) & (f.array >= 0)
        return Factor(rows.astype(jnp.float32), (*hot.labels, *f.labels))
    if hot.hot not in f.labels:
        return f
    axis = f.labels.index(hot.hot)
    rows = jnp.moveaxis(jnp.take(f.array, hot.array, axis=axis, mode="clip"), axis, 0)
    array = jnp.where(jnp.expand_dims(hot.array >= 0, range(1, rows.ndim)), rows, 0)
    return replace(f, array=array, labels=(*hot.labels, *f.labels[:axis], *f.labels[axis + 1 :]))
