"""Where factors come from: products, convolutions and scattered rows that end in a gradient.

Each function takes an equation of a jaxpr and its operands, and returns a lazy array, or None
where the result is best, or can only be, computed as it stands.
"""

import dataclasses
import itertools
from typing import Any

import jax.numpy as jnp
from jax import lax

from .._types import Array
from ._cost import is_dense, is_small
from ._factors import Factor, Labels, Lazy, Term, as_array, as_lazy, einsum, is_lazy, product
from ._layout import add


def dot_general(eqn: Any, lhs: Any, rhs: Any) -> Lazy | None:
    """A product of two arrays, or of a lazy one and an array."""
    dimensions = eqn.params["dimension_numbers"]
    aval = eqn.outvars[0].aval
    if is_lazy(lhs) != is_lazy(rhs):
        return _chained(aval, dimensions, lhs, rhs)
    lhs, rhs = as_array(lhs), as_array(rhs)
    (left_summed, right_summed), (left_batch, right_batch) = dimensions
    left = list(range(lhs.ndim))
    right = [lhs.ndim + i for i in range(rhs.ndim)]
    for i, j in zip((*left_summed, *left_batch), (*right_summed, *right_batch), strict=True):
        right[j] = left[i]
    left_free = [k for i, k in enumerate(left) if i not in (*left_summed, *left_batch)]
    right_free = [k for i, k in enumerate(right) if i not in (*right_summed, *right_batch)]
    out = [left[i] for i in left_batch] + left_free + right_free
    factors = [Factor(lhs, tuple(left)), Factor(rhs, tuple(right))]
    return _unless_small(product(aval, factors, [(k,) for k in out]))


def _unless_small(lazy: Lazy) -> Lazy | None:
    return None if 0 in lazy.shape or is_small(lazy) else lazy


def _chained(aval: Any, dimensions: Any, lhs: Any, rhs: Any) -> Lazy | None:
    """`lazy @ array`: the array is contracted with the one factor that has the axis."""
    (left_summed, right_summed), (left_batch, _) = dimensions
    if left_batch:
        return None
    lazy, array = (lhs, rhs) if is_lazy(lhs) else (rhs, lhs)
    ours, theirs = (left_summed, right_summed) if is_lazy(lhs) else (right_summed, left_summed)
    if all(map(is_dense, lazy.terms)):
        return None  # an ordinary product, once; not one for each term
    terms: list[Term] = []
    for term in lazy.terms:
        chained = _contract(term, lazy.shape, ours, array, theirs)
        if chained is None:
            return None
        kept, new = chained
        terms.append(kept.replace(out=(*kept.out, *new), start=(*kept.start, *(0 for _ in new))))
    joined = Lazy(tuple(aval.shape), aval.dtype, tuple(terms))
    if is_lazy(lhs):
        return joined
    new_axes = array.ndim - len(theirs)
    old_axes = len(aval.shape) - new_axes
    order = [*range(old_axes, old_axes + new_axes), *range(old_axes)]
    moved = [
        term.replace(
            out=tuple(term.out[i] for i in order), start=tuple(term.start[i] for i in order)
        )
        for term in terms
    ]
    return joined.replace(terms=tuple(moved))


def _contract(
    term: Term, shape: tuple[int, ...], axes: Any, array: Array, array_axes: Any
) -> tuple[Term, list[Labels]] | None:
    """A term without the contracted axes, and the labels of the array's other axes."""
    inner = [k for i in axes for k in term.out[i]]
    owners = [f for f in term.factors if set(inner) & {*f.labels, f.hot}]
    if len(owners) != 1 or owners[0].hot in inner or not set(inner) <= set(owners[0].labels):
        return None
    if any(term.shape()[i] != shape[i] for i in axes):
        return None
    owner, sizes = owners[0], term.sizes()
    free = [i for i in range(array.ndim) if i not in array_axes]
    split = [sizes[k] for k in inner]
    array = array.transpose([*array_axes, *free])
    array = array.reshape(*split, *array.shape[len(array_axes) :])
    new = term.fresh(len(free))
    labels = (*(k for k in owner.labels if k not in inner), *new)
    merged = Factor(einsum([owner, Factor(array, (*inner, *new))], labels), labels)
    factors = tuple(merged if f is owner else f for f in term.factors)
    left = [i for i in range(len(term.out)) if i not in axes]
    kept = Term(factors, tuple(term.out[i] for i in left), tuple(term.start[i] for i in left))
    return kept, [(k,) for k in new]


def scatter_add(eqn: Any, operand: Any, numbers: Any, updates: Any) -> Lazy | None:
    """Rows added at row numbers: the gradient of an embedding, or of experts."""
    dims = eqn.params["dimension_numbers"]
    windows, (*inserted,) = dims.update_window_dims, dims.inserted_window_dims
    if len(inserted) != 1 or tuple(dims.scatter_dims_to_operand_dims) != tuple(inserted):
        return None
    shape = eqn.outvars[0].aval.shape
    (axis,), others = inserted, [i for i in range(len(shape)) if i != inserted[0]]
    sizes = updates.shape
    if dims.operand_batching_dims or [sizes[i] for i in windows] != [shape[i] for i in others]:
        return None
    numbers = _valid_numbers(numbers[..., 0], shape[axis], eqn.params["mode"])
    scattered = [i for i in range(len(sizes)) if i not in windows]
    total = Lazy(tuple(shape), eqn.outvars[0].aval.dtype)
    for term in as_lazy(updates).terms:
        labels = [k for i in scattered for k in term.out[i]]
        if term.shape() != tuple(sizes) or any(f.hot is not None for f in term.factors):
            return None
        own = term.sizes()
        (hot,) = term.fresh()
        rows = Factor(numbers.reshape([own[k] for k in labels]), tuple(labels), hot, shape[axis])
        out: list[Labels] = [term.out[i] for i in windows]
        out.insert(axis, (hot,))
        placed = Term((rows, *term.factors), tuple(out), (0,) * len(shape))
        total = total.replace(terms=(*total.terms, placed))
    if is_small(total):
        return None
    return add(total, as_lazy(operand))


def _valid_numbers(numbers: Array, size: int, mode: Any) -> Array:
    if mode == lax.GatherScatterMode.CLIP:
        return jnp.clip(numbers, 0, size - 1).astype(jnp.int32)
    return jnp.where((numbers >= 0) & (numbers < size), numbers, -1).astype(jnp.int32)


def convolution(eqn: Any, lhs: Any, rhs: Any) -> Lazy | None:
    """The gradient of a kernel: patches of the image times the gradient of the output.

    In that convolution the gradient of the output is the kernel; the positions of the window are
    those of the weights, and what is summed over are the pixels and the images.
    """
    p, aval = eqn.params, eqn.outvars[0].aval
    if p["feature_group_count"] != 1 or 0 in aval.shape:
        return None
    lhs_spec, rhs_spec, out_spec = p["dimension_numbers"]
    lhs, rhs = as_array(lhs).transpose(lhs_spec), as_array(rhs).transpose(rhs_spec)
    groups, window = p["batch_group_count"], rhs.shape[2:]
    sizes = [aval.shape[i] for i in out_spec]
    n, features, positions = sizes[0], sizes[1], sizes[2:]
    rank = len(window)
    # Labels: group, own batch, own features, summed features, positions, window.
    g, b, o, c = range(4)
    y, k = tuple(range(4, 4 + rank)), tuple(range(4 + rank, 4 + 2 * rank))
    right = rhs.reshape(groups, features // groups, *rhs.shape[1:])
    # Counted before the patches are made: most kernels are smaller than the image.
    patches_shape = (groups, n, lhs.shape[1], *positions, *window)
    patches = Factor(_Shape(patches_shape, lhs.dtype), (g, b, c, *y, *k))  # pyright: ignore[reportArgumentType]
    axes: list[Labels] = [(b,), (g, o), *((label,) for label in y)]
    out = [axes[out_spec.index(i)] for i in range(len(out_spec))]
    lazy = product(aval, [patches, Factor(right, (g, o, c, *k))], out)
    if _unless_small(lazy) is None:
        return None
    pairs = zip(p["padding"], p["lhs_dilation"], strict=True)
    widths = [(0, 0, 0), (0, 0, 0), *((int(a), int(b), int(d) - 1) for (a, b), d in pairs)]
    image = lax.pad(lhs, jnp.zeros((), lhs.dtype), widths)
    cut = [
        _window(image, corner, window, p["window_strides"], p["rhs_dilation"])
        for corner in itertools.product(*map(range, positions))
    ]
    stacked = jnp.stack(cut, axis=2).reshape(groups, n, lhs.shape[1], *positions, *window)
    factors = (patches.replace(array=stacked), lazy.terms[0].factors[1])
    return lazy.replace(terms=(lazy.terms[0].replace(factors=factors),))


@dataclasses.dataclass(frozen=True)
class _Shape:
    shape: tuple[int, ...]
    dtype: Any


def _window(image: Array, corner: Any, window: Any, strides: Any, dilation: Any) -> Array:
    """Every pixel that one weight of the kernel meets."""
    low = [c * s for c, s in zip(corner, strides, strict=True)]
    high = [a + (w - 1) * d + 1 for a, w, d in zip(low, window, dilation, strict=True)]
    return lax.slice(image, (0, 0, *low), (*image.shape[:2], *high), (1, 1, *dilation))
