"""The lazy gradient: a sum of products of factors that is not multiplied out.

The gradient of a weight `x @ w` over the T tokens of one example is `sum over t of x_t g_t^T`:
two factors of T rows. Embeddings have row numbers for one factor, convolutions patches of the
image, experts three factors; a weight used twice has two terms. All are sums of

    value[a, b, ...] = sum over t of F1[t, a] F2[t, b] ...

written as an einsum: each axis of a factor has a label, each axis of the value lists labels.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._types import Array

Labels = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Factor:
    """An array whose axes are labelled, or rows of an identity matrix.

    Attributes:
        array: the values; with `hot` the row numbers, int32, -1 for a row of zeros.
        labels: one for each axis of `array`.
        hot: the label along which a row is one at its number and zero elsewhere.
        size: the length along `hot`.
    """

    array: Array
    labels: Labels
    hot: int | None = None
    size: int = 0

    def sizes(self) -> dict[int, int]:
        """Returns the length along each label."""
        sizes = dict(zip(self.labels, np.shape(self.array), strict=True))
        return sizes if self.hot is None else {**sizes, self.hot: self.size}

    def replace(self, **changes: Any) -> "Factor":
        """Makes a copy with other fields."""
        return dataclasses.replace(self, **changes)


class Axis(NamedTuple):
    """An axis of the value of a term.

    Attributes:
        labels: those that make it up, slowest first; none for a length of one.
        start: where along the axis the product begins; there are zeros around it.
    """

    labels: Labels = ()
    start: int = 0


@dataclasses.dataclass(frozen=True)
class Term:
    """A product of factors, summed over every label that no axis has."""

    factors: tuple[Factor, ...]
    axes: tuple[Axis, ...]

    def sizes(self) -> dict[int, int]:
        """Returns the length along each label."""
        return {k: n for factor in self.factors for k, n in factor.sizes().items()}

    def shape(self) -> tuple[int, ...]:
        """Returns the shape of the product, without the zeros around it."""
        sizes = self.sizes()
        return tuple(math.prod(sizes[k] for k in axis.labels) for axis in self.axes)

    def kept(self) -> Labels:
        """Lists the labels of the value, in the order of its axes."""
        return tuple(k for axis in self.axes for k in axis.labels)

    def summed(self) -> Labels:
        """Lists the labels that are summed over."""
        return tuple(sorted(self._labels() - set(self.kept())))

    def rows(self) -> int:
        """Counts the products that are summed: T."""
        sizes = self.sizes()
        return math.prod(sizes[k] for k in self.summed())

    def fresh(self, count: int = 1) -> Labels:
        """Makes labels that are not in use."""
        first = 1 + max(self._labels(), default=-1)
        return tuple(range(first, first + count))

    def _labels(self) -> set[int]:
        return {k for f in self.factors for k in (*f.labels, f.hot) if k is not None}

    def is_dense(self) -> bool:
        """Says whether it is an ordinary array."""
        return len(self.factors) == 1 and not self.summed()


@dataclasses.dataclass(frozen=True)
class Lazy:
    """A sum of terms that stands for an array.

    Attributes:
        shape: of the array.
        dtype: of the array.
        terms: none for zeros.
    """

    shape: tuple[int, ...]
    dtype: Any
    terms: tuple[Term, ...] = ()

    def replace(self, **changes: Any) -> "Lazy":
        """Makes a copy with other fields."""
        return dataclasses.replace(self, **changes)


jax.tree_util.register_dataclass(Factor, ["array"], ["labels", "hot", "size"])
jax.tree_util.register_dataclass(Term, ["factors"], ["axes"])
jax.tree_util.register_dataclass(Lazy, ["terms"], ["shape", "dtype"])


def is_lazy(value: Any) -> TypeGuard[Lazy]:
    """Says whether a value is a lazy array."""
    return isinstance(value, Lazy)


def product(aval: Any, factors: Sequence[Factor], axes: Iterable[Labels]) -> Lazy:
    """Makes a lazy array of one term that fills it; labels of length one are left out."""
    long = {k for f in factors for k, n in f.sizes().items() if n != 1}
    kept = tuple(_without_ones(f) for f in factors)
    places = tuple(Axis(tuple(k for k in labels if k in long)) for labels in axes)
    return Lazy(tuple(aval.shape), aval.dtype, (Term(kept, places),))


def _without_ones(f: Factor) -> Factor:
    long = [i for i, n in enumerate(f.array.shape) if n != 1]
    array = f.array.reshape([f.array.shape[i] for i in long])
    return f.replace(array=array, labels=tuple(f.labels[i] for i in long))


def as_lazy(value: Any) -> Lazy:
    """Makes an ordinary array its own single factor; a lazy one stays."""
    if is_lazy(value):
        return value
    array = jnp.asarray(value)
    labels = tuple(range(array.ndim))
    return product(array, [Factor(array, labels)], [(k,) for k in labels])


def as_array(value: Any) -> Array:
    """Multiplies out a lazy array; anything else stays."""
    if not is_lazy(value):
        return value
    total = jnp.zeros(value.shape, value.dtype)
    for term in value.terms:
        places = zip(term.axes, term.shape(), value.shape, strict=True)
        widths = [(axis.start, size - axis.start - inner, 0) for axis, inner, size in places]
        piece = multiply(term).astype(value.dtype)
        total = total + lax.pad(piece, jnp.zeros((), value.dtype), widths)
    return total


def multiply(term: Term) -> Array:
    """Multiplies out a term, without the zeros around it."""
    kept, hots = term.kept(), [f for f in term.factors if f.hot is not None]
    dense = [f for f in term.factors if f.hot is None]
    if len(hots) != 1 or set(hots[0].labels) & set(kept):
        dense += map(one_hot, hots)
        return einsum(dense, kept).reshape(term.shape())
    (hot,) = hots
    order = [hot.hot, *(k for k in kept if k != hot.hot)]
    ones = Factor(jnp.ones(hot.array.shape, wide_dtype(dense)), hot.labels)
    rows = einsum([*dense, ones], [*hot.labels, *(k for k in kept if k != hot.hot)])
    numbers = jnp.where(hot.array < 0, hot.size, hot.array)
    zeros = jnp.zeros((hot.size, *rows.shape[numbers.ndim :]), rows.dtype)
    placed = zeros.at[numbers].add(rows, mode="drop")
    return placed.transpose([order.index(k) for k in kept]).reshape(term.shape())


def one_hot(factor: Factor) -> Factor:
    """Writes row numbers out as rows."""
    assert factor.hot is not None
    rows = factor.array[..., None] == jnp.arange(factor.size, dtype=factor.array.dtype)
    return Factor(rows.astype(jnp.float32), (*factor.labels, factor.hot))


def wide_dtype(factors: Iterable[Factor]) -> Any:
    """Chooses the dtype to add up in: at least 32 bit, and complex if a factor is."""
    kinds = [f.array.dtype for f in factors if f.hot is None]
    wide = any(jnp.finfo(kind).bits == 64 for kind in kinds)
    if any(jnp.issubdtype(kind, jnp.complexfloating) for kind in kinds):
        return np.dtype(np.complex128 if wide else np.complex64)
    return np.dtype(np.float64 if wide else np.float32)


# What a norm costs: with T rows, and axes of lengths d and p, Gram matrices take `T^2 (d + p)`
# multiplications and the product `T d p`: it costs less exactly where it is smaller than its
# factors, `d p < T (d + p)`. Counted for one example, from shapes alone.


def rows(lazy: Lazy) -> int:
    """Counts the products that are summed in all terms."""
    return sum(term.rows() for term in lazy.terms)


def elements(lazy: Lazy) -> int:
    """Counts the elements of a product, without the zeros around it."""
    return max((math.prod(term.shape()) for term in lazy.terms), default=0)


def factor_elements(lazy: Lazy) -> int:
    """Counts the elements of all factors; row numbers count one for each row."""
    return sum(term.rows() * (1 + _width(term)) for term in lazy.terms)


def _width(term: Term) -> int:
    kept, dense = term.kept(), [f.sizes() for f in term.factors if f.hot is None]
    return sum(math.prod(n for k, n in sizes.items() if k in kept) for sizes in dense)


def is_small(lazy: Lazy) -> bool:
    """Decides whether to write a product down: it is no larger than its factors, and costs less."""
    return elements(lazy) <= factor_elements(lazy)


def einsum(factors: Iterable[Factor], out: Sequence[int]) -> Array:
    """Sums products of dense factors, in 32 bit at least."""
    factors = list(factors)
    wide = wide_dtype(factors)
    alike = len({f.array.dtype for f in factors}) == 1 and len(factors) > 1
    operands: list[Any] = []
    for f in factors:
        operands += [f.array if alike else f.array.astype(wide), list(f.labels)]
    return jnp.einsum(
        *operands, list(out), precision=lax.Precision.HIGHEST, preferred_element_type=wide
    )
