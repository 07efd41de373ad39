"""Arrays that are stored as sums of products of factors.

For one example of T tokens, the gradient of `w` in `x @ w` is `sum over t of x_t g_t^T`, a product
of two factors with T rows. For an embedding, one factor contains the row indices. The gradient of
expert weights has three factors, and the gradient of a weight that is used twice is a sum of two
terms. All of these gradients have the form

    value[a, b, ...] = sum over t of F1[t, a] F2[t, b] ...

Axes are labeled as in `jnp.einsum`. Each axis of a factor has one label, and each axis of the value
has a tuple of labels. For a convolution, a factor would contain image patches, which are larger
than the images. Therefore, `Convolution` stores the images.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.typing import DTypeLike

from .._types import Array
from ..norms._leaves import wide_dtype

AxisLabels: TypeAlias = tuple[int, ...]


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
    labels: AxisLabels
    hot: int | None = None
    size: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class Term:
    """A product of factors, summed over all labels that do not appear in `axes`.

    Attributes:
        factors: Factors of the product.
        axes: For each axis of the value, the labels that are flattened into it in row-major order.
            Empty for an axis of length one.
    """

    factors: tuple[Factor, ...]
    axes: tuple[AxisLabels, ...]

    @functools.cached_property
    def sizes(self) -> dict[int, int]:
        """Map each label to its length."""
        sizes: dict[int, int] = {}
        for f in self.factors:
            sizes.update(zip(f.labels, f.array.shape, strict=True))
            if f.hot is not None:
                sizes[f.hot] = f.size
        return sizes

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        return tuple([math.prod([self.sizes[k] for k in axis]) for axis in self.axes])

    @functools.cached_property
    def kept(self) -> AxisLabels:
        """The labels that are not summed over, in the order of the value's axes."""
        return tuple([k for axis in self.axes for k in axis])

    @property
    def dense(self) -> list[Factor]:
        """The factors that are stored as ordinary arrays."""
        return [f for f in self.factors if f.hot is None]

    @property
    def hot(self) -> Factor | None:
        """The factor that represents a one-hot matrix; a term has at most one."""
        return next((f for f in self.factors if f.hot is not None), None)

    def map(self, change: Callable[[Factor], Factor]) -> "Term":
        """Apply a function to each factor."""
        return replace(self, factors=tuple(map(change, self.factors)))

    def fresh_label(self) -> int:
        """Return a label that this term does not use."""
        return 1 + max([k for f in self.factors for k in (*f.labels, f.hot or 0)])

    def window(self, label: int, start: int, size: int) -> "Term":
        """Slice or zero-pad the axes with a label to `size` elements, from index `start`."""

        def changed(f: Factor) -> Factor:
            if f.hot == label:
                moved = f.array - start
                is_inside = (f.array >= 0) & (moved >= 0) & (moved < size)
                return replace(f, array=jnp.where(is_inside, moved, -1), size=size)
            widths = [
                (-start, start + size - n, 0) if k == label else (0, 0, 0)
                for k, n in zip(f.labels, f.array.shape, strict=True)
            ]
            return replace(f, array=lax.pad(f.array, jnp.zeros((), f.array.dtype), widths))

        return self.map(changed)


@dataclasses.dataclass(frozen=True, eq=False)
class Factored:
    """An array represented as a sum of terms.

    Attributes:
        shape: Shape of the array.
        dtype: Dtype of the array.
        terms: Terms of the sum; empty for an array of zeros.
    """

    shape: tuple[int, ...]
    dtype: DTypeLike
    terms: tuple[Term, ...] = ()

    def map(self, change: Callable[[Term], Term], shape: Sequence[int] | None = None) -> "Factored":
        """Apply a function to each term, and optionally change the shape."""
        shape = self.shape if shape is None else tuple(shape)
        return Factored(shape, self.dtype, tuple(map(change, self.terms)))

    def arrange(self, sources: Sequence[int | None]) -> "Factored":
        """Permute the axes: the new axis i is the old axis `sources[i]`.

        None inserts an axis of length one. The value is summed over axes that are not in `sources`.
        """
        shape = [1 if i is None else self.shape[i] for i in sources]

        def arranged(term: Term) -> Term:
            return replace(term, axes=tuple(() if i is None else term.axes[i] for i in sources))

        return self.map(arranged, shape)

    def scale(self, scalar: Array) -> "Factored":
        """Multiply by a real scalar by scaling the smallest factor of each term."""

        def scaled(term: Term) -> Term:
            smallest = min(term.dense, key=lambda f: f.array.size)
            # A scaled float16 factor may overflow even if the product of all factors does not.
            dtype = wide_dtype(smallest.array.dtype, scalar.dtype)
            array = smallest.array.astype(dtype) * scalar.astype(dtype)
            return term.map(lambda f: replace(f, array=array) if f is smallest else f)

        return self.map(scaled)

    def add(self, other: "Factored") -> "Factored":
        """Add two factored arrays."""
        return replace(self, terms=self.terms + other.terms)

    def has_one_label(self, axis: int) -> bool:
        """Return whether this axis of the value has exactly one label in each term."""
        return all(len(term.axes[axis]) == 1 for term in self.terms)

    def window(self, axis: int, start: int, size: int) -> "Factored":
        """Slice or zero-pad an axis with a single label to `size` elements from `start`."""
        shape = (*self.shape[:axis], size, *self.shape[axis + 1 :])
        return self.map(lambda term: term.window(term.axes[axis][0], start, size), shape)

    def stack(self, length: int, *, summed: bool) -> "Factored":
        """Give the leading axis of all factors a new label, and sum over it or keep it."""

        def stacked(term: Term) -> Term:
            k = term.fresh_label()
            labeled = term.map(lambda f: replace(f, labels=(k, *f.labels)))
            return labeled if summed else replace(labeled, axes=((k,), *term.axes))

        return self.map(stacked, self.shape if summed else (length, *self.shape))


class ConvolutionSpec(NamedTuple):
    """Parameters of the convolution that computes a kernel gradient, by image axis.

    Attributes:
        groups: Number of groups of the channels.
        strides: Strides of the convolution, equal to the kernel dilation in the forward pass.
        dilation: Distance between the image positions that are multiplied by adjacent output
            gradients.
        interior: Dilation of the images.
        padding: Padding at the start and the end of the images.
        out: Positions of the input-channel, output-channel and spatial axes in the gradient.
    """

    groups: int
    strides: tuple[int, ...]
    dilation: tuple[int, ...]
    interior: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    out: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Convolution:
    """The gradient of a convolution kernel, represented by images and output gradients.

    A product of factors would need image patches, whose number of elements is that of the images
    times the kernel size. They are extracted only if another operation uses the gradient.

    Attributes:
        shape: Shape of the kernel.
        dtype: Dtype of the gradient.
        images: Images, of shape [groups * input channels, images, *image axes].
        grads: Output gradients, of shape [groups * output channels, images, *output axes].
        spec: Dimension numbers and window of the convolution that computes the gradient.
    """

    shape: tuple[int, ...]
    dtype: DTypeLike
    images: Array
    grads: Array
    spec: ConvolutionSpec

    def padded(self) -> Array:
        """Pad and dilate the images."""
        pairs = zip(self.spec.padding, self.spec.interior, strict=True)
        widths = [(0, 0, 0), (0, 0, 0), *((low, high, d - 1) for (low, high), d in pairs)]
        return lax.pad(self.images, jnp.zeros((), self.images.dtype), widths)

    def patches(self) -> Factored:
        """Represent the gradient by image patches and output gradients."""
        patches, spec = self.padded(), self.spec
        grads = self.grads.reshape(spec.groups, -1, *self.grads.shape[1:])
        patches = patches.reshape(spec.groups, -1, *patches.shape[1:])
        kernel = [self.shape[i] for i in spec.out[2:]]
        # Split each image axis into a kernel position and an output position.
        axes = zip(kernel, self.grads.shape[2:], spec.strides, spec.dilation, strict=True)
        for i, (count, width, stride, dilation) in enumerate(axes):
            axis, length = 3 + 2 * i, (width - 1) * dilation + 1
            starts = [stride * c for c in range(count)]
            rows = [lax.slice_in_dim(patches, a, a + length, dilation, axis) for a in starts]
            patches = jnp.stack(rows, axis)
        # The labels stand for groups, input channels, output channels, images and positions.
        g, b, o, c = range(4)
        y, k = (tuple(range(first, 4 + 2 * len(kernel), 2)) for first in (4, 5))
        left = Factor(patches, (g, b, c, *range(4, 4 + 2 * len(kernel))))
        right = Factor(grads, (g, o, c, *k))
        labels: list[AxisLabels] = [(b,), (g, o), *((label,) for label in y)]
        order = [labels[spec.out.index(i)] for i in range(len(spec.out))]
        return product(ShapedArray(self.shape, self.dtype), [left, right], order)

    def materialize(self) -> Array:
        """Compute the gradient in float32 or wider."""
        wide, spec = wide_dtype(self.images.dtype, self.grads.dtype), self.spec
        specs = tuple(range(len(spec.out)))
        return lax.conv_general_dilated(
            self.images.astype(wide),
            self.grads.astype(wide),
            spec.strides,
            spec.padding,
            lhs_dilation=spec.interior,
            rhs_dilation=spec.dilation,
            dimension_numbers=lax.ConvDimensionNumbers(specs, specs, spec.out),
            batch_group_count=spec.groups,
            precision=lax.Precision.HIGHEST,
        )

    def weighted_sum(self, factors: Array) -> "Convolution":
        """Represent the sum over a batch of kernel gradients, each multiplied by a factor.

        The leading axis of examples is merged into the image axis, as if one example had all
        images.
        """
        dtype = wide_dtype(self.grads.dtype, factors.dtype)
        scale = factors.astype(dtype).reshape(-1, *[1] * (self.grads.ndim - 1))

        def joined(x: Array) -> Array:
            return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])

        return replace(
            self, images=joined(self.images), grads=joined(self.grads.astype(dtype) * scale)
        )

    def gram_size(self) -> int:
        """Return the number of elements of the arrays with which `_gram` computes the norm.

        For each group, these are two matrices over pairs of pixels and four over pairs of
        positions: two for the images and two for the output gradients.
        """
        pixels = math.prod(jax.eval_shape(self.padded).shape[1:])
        positions = math.prod(self.grads.shape[1:])
        return self.spec.groups * (2 * pixels**2 + 4 * positions**2)


jax.tree_util.register_dataclass(Factor, ["array"], ["labels", "hot", "size"])
jax.tree_util.register_dataclass(Term, ["factors"], ["axes"])
jax.tree_util.register_dataclass(Factored, ["terms"], ["shape", "dtype"])
jax.tree_util.register_dataclass(Convolution, ["images", "grads"], ["shape", "dtype", "spec"])

Value: TypeAlias = Array | Factored | Convolution
"""An ordinary array, a sum of products of factors, or the gradient of a convolution kernel."""


def product(
    like: Array | ShapedArray, factors: Sequence[Factor], axes: Sequence[AxisLabels]
) -> Factored:
    """Represent an array as one product of factors, without the labels of axes of length one.

    Args:
        like: Array with the shape and dtype of the product.
        factors: Dense factors.
        axes: Labels of each axis of the product.
    """
    sizes = Term(tuple(factors), ()).sizes

    def squeezed(f: Factor) -> Factor:
        labels = tuple([k for k in f.labels if sizes[k] != 1])
        return Factor(f.array.reshape([sizes[k] for k in labels]), labels)

    places = [tuple([k for k in labels if sizes[k] != 1]) for labels in axes]
    return Factored(like.shape, like.dtype, (Term(tuple(map(squeezed, factors)), tuple(places)),))


def prefers_array(value: Factored | Convolution) -> bool:
    """Return whether a gradient has at most twice as many elements as its factors.

    It is then materialized, because this takes only slightly more time and makes fewer copies: with
    T rows and axes of lengths d and p, Gram matrices require `T^2 (d + p)` multiplications, and the
    product requires `T d p`, which is at most twice as many if `d p <= 2 T (d + p)`. A gradient
    whose factors have no elements is zero.
    """
    factors = sum(x.size for x in jax.tree.leaves(value))
    return factors == 0 or math.prod(value.shape) <= 2 * factors


def as_factored(value: Value) -> Factored:
    """Convert any value to a sum of products; an array is one term with a single factor."""
    if isinstance(value, Convolution):
        return value.patches()
    if isinstance(value, Factored):
        return value
    array = jnp.asarray(value)
    labels = tuple(range(array.ndim))
    return product(array, [Factor(array, labels)], [(k,) for k in labels])


# Materialization


def as_array(value: Value) -> Array:
    """Materialize a factored array, and return an ordinary array unchanged."""
    if isinstance(value, Convolution):
        return value.materialize().astype(value.dtype)
    if not isinstance(value, Factored):
        return value
    terms = [_multiply(term).astype(value.dtype) for term in value.terms]
    return functools.reduce(jnp.add, terms) if terms else jnp.zeros(value.shape, value.dtype)


def as_wide_array(value: Value) -> Array:
    """Materialize a gradient in float32 or wider, as required for summing clipped gradients."""
    wide = wide_dtype(value.dtype)
    value = replace(value, dtype=wide) if isinstance(value, Factored | Convolution) else value
    return as_array(value).astype(wide)


def _multiply(term: Term) -> Array:
    """Materialize a term.

    A one-hot factor becomes a scatter-add into zeros. If the rows of the factor are an axis of the
    value, it becomes a one-hot matrix instead.
    """
    dense, hot, kept = term.dense, term.hot, term.kept
    if hot is None:
        return einsum(dense, kept).reshape(term.shape)
    if set(hot.labels) & set(kept):
        rows = hot.array[..., None] == jnp.arange(hot.size, dtype=hot.array.dtype)
        one_hot = Factor(rows.astype(jnp.float32), (*hot.labels, cast(int, hot.hot)))
        return einsum([*dense, one_hot], kept).reshape(term.shape)
    ones = Factor(jnp.ones(hot.array.shape, jnp.float32), hot.labels)
    rows = einsum([*dense, ones], (*hot.labels, *[k for k in kept if k != hot.hot]))
    numbers = jnp.where(hot.array < 0, hot.size, hot.array)
    zeros = jnp.zeros((hot.size, *rows.shape[numbers.ndim :]), rows.dtype)
    placed = zeros.at[numbers].add(rows, mode="drop")
    return jnp.moveaxis(placed, 0, kept.index(cast(int, hot.hot))).reshape(term.shape)


def einsum(factors: Sequence[Factor], out: AxisLabels) -> Array:
    """Contract dense factors and return the result in float32 or a wider dtype."""
    dtypes = {f.array.dtype for f in factors}
    wide = functools.reduce(wide_dtype, dtypes, jnp.float32)
    is_cast = len(dtypes) > 1 or len(factors) == 1
    operands: list[Array | AxisLabels] = []
    for f in factors:
        operands += [f.array.astype(wide) if is_cast else f.array, f.labels]
    return jnp.einsum(*operands, out, precision=lax.Precision.HIGHEST, preferred_element_type=wide)
