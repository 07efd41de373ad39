"""Gradients that are stored as sums of products of factors.

For one example of T tokens, the gradient of `w` in `x @ w` is `sum over t of x_t g_t^T`, a product
of two factors with T rows. For an embedding, one factor contains the row indices. For a
convolution, one factor contains image patches. The gradient of expert weights has three factors,
and the gradient of a weight that is used twice is a sum of two terms. All of these gradients have
the form

    value[a, b, ...] = sum over t of F1[t, a] F2[t, b] ...

Axes are labeled as in `jnp.einsum`. Each axis of a factor has one label, and each axis of the value
has a tuple of labels.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.typing import DTypeLike

from .._leaves import wide_dtype
from .._types import Array

Labels = tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Factor:
    """An array with labeled axes, or a one-hot matrix that is stored as indices.

    Attributes:
        array: Values of the factor. For a one-hot matrix, its int32 indices, where -1 represents a
            row of zeros.
        labels: Label of each axis of `array`.
        hot: Label of the one-hot axis; None for an ordinary array.
        size: Length of the one-hot axis.
    """

    array: Array
    labels: Labels
    hot: int | None = None
    size: int = 0


class Axis(NamedTuple):
    """One axis of the value of a term.

    Attributes:
        labels: Labels of the factor axes that are flattened into this axis in row-major order.
            Empty for an axis of length one.
        start: Index at which the product starts along this axis. The value is zero outside the
            product.
    """

    labels: Labels = ()
    start: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class Term:
    """A product of factors, summed over all labels that do not appear in `axes`."""

    factors: tuple[Factor, ...]
    axes: tuple[Axis, ...]

    def map(self, change: Callable[[Factor], Factor]) -> "Term":
        """Apply a function to each factor."""
        return replace(self, factors=tuple(map(change, self.factors)))

    @functools.cached_property
    def sizes(self) -> dict[int, int]:
        """Map each label to its length."""
        sizes: dict[int, int] = {}
        for f in self.factors:
            sizes.update(zip(f.labels, np.shape(f.array), strict=True))
            if f.hot is not None:
                sizes[f.hot] = f.size
        return sizes

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of the product before zero padding."""
        return tuple([math.prod([self.sizes[k] for k in axis.labels]) for axis in self.axes])

    @functools.cached_property
    def kept(self) -> Labels:
        """The labels that are not summed over, in the order of the value's axes."""
        return tuple([k for axis in self.axes for k in axis.labels])

    @functools.cached_property
    def summed(self) -> Labels:
        """The labels that are summed over."""
        return tuple(sorted(self.sizes.keys() - set(self.kept)))

    @functools.cached_property
    def rows(self) -> int:
        """The number of outer products in the sum, which is the token count for a dense layer."""
        return math.prod([self.sizes[k] for k in self.summed])

    @property
    def dense(self) -> list[Factor]:
        """The factors that are stored as ordinary arrays."""
        return [f for f in self.factors if f.hot is None]

    @property
    def hots(self) -> list[Factor]:
        """The factors that represent one-hot matrices."""
        return [f for f in self.factors if f.hot is not None]

    def fresh(self, count: int = 1) -> Labels:
        """Return `count` labels that this term does not use."""
        first = 1 + max([k for f in self.factors for k in (*f.labels, f.hot or 0)])
        return tuple(range(first, first + count))

    def along(
        self, label: int, change: Callable[[Array, int], Array], new: Labels | None = None
    ) -> "Term":
        """Apply `change(array, axis)` to the factors with a label, and rename the label."""

        def changed(f: Factor) -> Factor:
            if label not in f.labels:
                return f
            i = f.labels.index(label)
            labels = f.labels if new is None else (*f.labels[:i], *new, *f.labels[i + 1 :])
            return replace(f, array=change(f.array, i), labels=labels)

        return self.map(changed)

    def with_axis(self, i: int, axis: Axis) -> "Term":
        """Replace one axis of the value."""
        return replace(self, axes=(*self.axes[:i], axis, *self.axes[i + 1 :]))

    def cut(self, label: int, low: int, high: int) -> "Term":
        """Slice all factors along one label."""

        def shortened(f: Factor) -> Factor:
            if f.hot != label:
                return f
            inside = (f.array >= low) & (f.array < high)
            return replace(f, array=jnp.where(inside, f.array - low, -1), size=high - low)

        return self.map(shortened).along(label, lambda x, i: lax.slice_in_dim(x, low, high, axis=i))

    def split_axes(self, sizes: Sequence[int]) -> "Term | None":
        """Reshape the value to `sizes`, or return None if a label cannot be split evenly."""
        axes: list[Axis] = []
        term, labels = self, list(self.kept)
        for size in sizes:
            axis: list[int] = []
            while size > 1:
                if not labels:
                    return None
                length = term.sizes[labels[0]]
                if size % length:
                    if length % size or any(f.hot == labels[0] for f in term.factors):
                        return None
                    term, halves = term.split_label(labels[0], size)
                    labels[:1], length = halves, size
                axis.append(labels.pop(0))
                size //= length
            axes.append(Axis(tuple(axis)))
        is_left = any(f.hot in labels for f in term.factors)
        return None if is_left else replace(term, axes=tuple(axes))

    def split_label(self, label: int, first: int) -> "tuple[Term, Labels]":
        """Split a label into two labels, the first of which has length `first`."""
        halves = self.fresh(2)

        def split(x: Array, axis: int) -> Array:
            return x.reshape(*x.shape[:axis], first, -1, *x.shape[axis + 1 :])

        return self.along(label, split, halves), halves


@dataclasses.dataclass(frozen=True, eq=False)
class Lazy:
    """An array represented as a sum of terms.

    Attributes:
        shape: Shape of the array.
        dtype: Dtype of the array.
        terms: Terms of the sum; empty for an array of zeros.
    """

    shape: tuple[int, ...]
    dtype: DTypeLike
    terms: tuple[Term, ...] = ()

    def map(self, change: Callable[[Term], Term], shape: Sequence[int] | None = None) -> "Lazy":
        """Apply a function to each term, and optionally change the shape."""
        shape = self.shape if shape is None else tuple(shape)
        return Lazy(shape, self.dtype, tuple(map(change, self.terms)))

    def arrange(self, sources: Sequence[int | None]) -> "Lazy":
        """Permute the axes, where `sources[i]` is the old axis at the new position i.

        None inserts an axis of length one. The value is summed over axes that are not in `sources`.
        """
        shape = [1 if i is None else self.shape[i] for i in sources]

        def arranged(term: Term) -> Term:
            return replace(term, axes=tuple(Axis() if i is None else term.axes[i] for i in sources))

        return self.map(arranged, shape)

    def scale(self, scalar: Array) -> "Lazy":
        """Multiply by a scalar by scaling the smallest factor of each term."""

        def scaled(term: Term) -> Term:
            smallest = min(term.dense, key=lambda f: f.array.size)
            # The scalar may be complex even if this factor is real.
            dtypes = smallest.array.dtype, scalar.dtype
            # A scaled float16 factor may overflow even if the product of all factors does not.
            is_kept = dtypes[0] == dtypes[1] and jnp.finfo(dtypes[0]).maxexp >= 128
            dtype = dtypes[0] if is_kept else wide_dtype(*dtypes)
            array = smallest.array.astype(dtype) * scalar.astype(dtype)
            return term.map(lambda f: replace(f, array=array) if f is smallest else f)

        return self.map(scaled)

    def add(self, other: "Lazy") -> "Lazy":
        """Add two lazy arrays."""
        return replace(self, terms=self.terms + other.terms)

    def window(self, axis: int, start: int, size: int) -> "Lazy | None":
        """Slice or zero-pad one axis to `size` elements, beginning at index `start`.

        Return None if the slice is not aligned with the first label of the axis.
        """
        terms: list[Term] = []
        for term in self.terms:
            (labels, first), length = term.axes[axis], term.shape[axis]
            low, high = max(start - first, 0), min(start + size - first, length)
            if low >= high:
                continue
            if high - low < length:
                step = math.prod([term.sizes[k] for k in labels[1:]])
                if low % step or high % step:
                    return None
                term = term.cut(labels[0], low // step, high // step)
            terms.append(term.with_axis(axis, Axis(labels, max(first - start, 0))))
        shape = (*self.shape[:axis], size, *self.shape[axis + 1 :])
        return Lazy(shape, self.dtype, tuple(terms))

    def stack(self, length: int, *, summed: bool) -> "Lazy":
        """Label the leading axis of all factors, and either sum over this axis or keep it."""

        def stacked(term: Term) -> Term:
            (k,) = term.fresh()
            labelled = term.map(lambda f: replace(f, labels=(k, *f.labels)))
            return labelled if summed else replace(labelled, axes=(Axis((k,)), *term.axes))

        return self.map(stacked, self.shape if summed else (length, *self.shape))

    # With T rows and axes of lengths d and p, Gram matrices require `T^2 (d + p)` multiplications.
    # The product requires `T d p`, which is less if `d p < T (d + p)`.

    def elements(self) -> int:
        """Count the elements of the product, without zero padding."""
        return max((math.prod(term.shape) for term in self.terms), default=0)

    def factor_elements(self) -> int:
        """Count the stored elements of all factors, with one element per one-hot row."""
        return sum(f.array.size for term in self.terms for f in term.factors)

    def is_small(self) -> bool:
        """Return whether the product has no more elements than its factors."""
        return self.elements() <= self.factor_elements()


jax.tree_util.register_dataclass(Factor, ["array"], ["labels", "hot", "size"])
jax.tree_util.register_dataclass(Term, ["factors"], ["axes"])
jax.tree_util.register_dataclass(Lazy, ["terms"], ["shape", "dtype"])

Value: TypeAlias = Array | Lazy
"""An ordinary array or a sum of products of factors."""


def product(like: Array | ShapedArray, factors: Sequence[Factor], axes: Sequence[Labels]) -> Lazy:
    """Represent an array as one product of factors without labels of length one.

    Args:
        like: Array with the shape and dtype of the product.
        factors: Dense factors.
        axes: Labels of each axis of the product.
    """
    sizes = Term(tuple(factors), ()).sizes

    def squeezed(f: Factor) -> Factor:
        labels = tuple([k for k in f.labels if sizes[k] != 1])
        return Factor(f.array.reshape([sizes[k] for k in labels]), labels)

    places = [Axis(tuple([k for k in labels if sizes[k] != 1])) for labels in axes]
    return Lazy(like.shape, like.dtype, (Term(tuple(map(squeezed, factors)), tuple(places)),))


def as_lazy(value: Value) -> Lazy:
    """Convert an ordinary array to a sum with a single term and a single factor."""
    if isinstance(value, Lazy):
        return value
    array = jnp.asarray(value)
    labels = tuple(range(array.ndim))
    return product(array, [Factor(array, labels)], [(k,) for k in labels])


_T = TypeVar("_T")


def all_or_none(items: Iterable[_T | None]) -> list[_T] | None:
    """Return the items as a list, or None if any item is None."""
    found = list(items)
    present = [x for x in found if x is not None]
    return present if len(present) == len(found) else None


# Materialization


def as_array(value: Value) -> Array:
    """Materialize a factored array, and return an ordinary array unchanged."""
    if not isinstance(value, Lazy):
        return value
    pieces: list[Array] = []
    for term in value.terms:
        places = zip(term.axes, term.shape, value.shape, strict=True)
        widths = [(axis.start, size - axis.start - inner, 0) for axis, inner, size in places]
        piece = _multiply(term).astype(value.dtype)
        pieces.append(lax.pad(piece, jnp.zeros((), value.dtype), widths))
    return functools.reduce(jnp.add, pieces) if pieces else jnp.zeros(value.shape, value.dtype)


def as_wide_array(value: Value) -> Array:
    """Materialize a gradient in float32 or wider, as required for summing clipped gradients."""
    wide = wide_dtype(value.dtype)
    return as_array(replace(value, dtype=wide) if isinstance(value, Lazy) else value).astype(wide)


def _multiply(term: Term) -> Array:
    dense, hots = term.dense, term.hots
    kept = term.kept
    if len(hots) != 1 or set(hots[0].labels) & set(kept):
        return einsum([*dense, *map(_one_hot, hots)], kept).reshape(term.shape)
    (hot,) = hots
    ones = Factor(jnp.ones(hot.array.shape, jnp.float32), hot.labels)
    rows = einsum([*dense, ones], (*hot.labels, *[k for k in kept if k != hot.hot]))
    numbers = jnp.where(hot.array < 0, hot.size, hot.array)
    zeros = jnp.zeros((hot.size, *rows.shape[numbers.ndim :]), rows.dtype)
    placed = zeros.at[numbers].add(rows, mode="drop")
    return jnp.moveaxis(placed, 0, kept.index(hot.hot)).reshape(term.shape)


def _one_hot(f: Factor) -> Factor:
    rows = f.array[..., None] == jnp.arange(f.size, dtype=f.array.dtype)
    return Factor(rows.astype(jnp.float32), tuple(k for k in (*f.labels, f.hot) if k is not None))


def einsum(factors: Sequence[Factor], out: Labels) -> Array:
    """Contract dense factors and return the result in float32 or a wider dtype."""
    dtypes = {f.array.dtype for f in factors}
    wide = functools.reduce(wide_dtype, dtypes, jnp.float32)
    is_cast = len(dtypes) > 1 or len(factors) == 1
    operands: list[Array | Labels] = []
    for f in factors:
        operands += [f.array.astype(wide) if is_cast else f.array, f.labels]
    return jnp.einsum(*operands, out, precision=lax.Precision.HIGHEST, preferred_element_type=wide)
