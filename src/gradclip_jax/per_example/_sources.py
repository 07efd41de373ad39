"""Where factors come from: products, convolutions and scattered rows that end in a gradient.

Each function takes an equation of a jaxpr and its operands, and returns a lazy array, or None
where the result is best, or can only be, computed as it stands.
"""

import itertools
import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from .._types import Array
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
    product,
)
from ._layout import add, arrange


def dot_general(eqn: Any, lhs: Any, rhs: Any) -> Lazy | None:
    """Makes factors of a product of two arrays; contracts a lazy one with an array."""
    aval = eqn.outvars[0].aval
    (left_summed, right_summed), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    if is_lazy(lhs) != is_lazy(rhs):
        if left_batch:
            return None
        if is_lazy(lhs):
            return _chained(aval, lhs, left_summed, rhs, right_summed)
        chained = _chained(aval, rhs, right_summed, lhs, left_summed)
        count = len(rhs.shape) - len(right_summed)
        order = [*range(count, len(aval.shape)), *range(count)]
        return chained and arrange(chained, aval.shape, order)
    lhs, rhs = as_array(lhs), as_array(rhs)
    left = list(range(lhs.ndim))
    right = [lhs.ndim + i for i in range(rhs.ndim)]
    for i, j in zip((*left_summed, *left_batch), (*right_summed, *right_batch), strict=True):
        right[j] = left[i]
    batch, summed = [left[i] for i in left_batch], [left[i] for i in left_summed]
    free = [k for k in (*left, *right) if k not in (*batch, *summed)]
    factors = [Factor(lhs, tuple(left)), Factor(rhs, tuple(right))]
    return _unless_small(product(aval, factors, [(k,) for k in (*batch, *free)]))


def _unless_small(lazy: Lazy) -> Lazy | None:
    return None if 0 in lazy.shape or is_small(lazy) else lazy


def _chained(aval: Any, lazy: Lazy, axes: Any, array: Array, array_axes: Any) -> Lazy | None:
    """Contracts an array with the one factor of `lazy @ array` that has the axes."""
    if all(term.is_dense() for term in lazy.terms):
        return None  # an ordinary product, once; not one for each term
    terms: list[Term] = []
    for term in lazy.terms:
        inner = [k for i in axes for k in term.axes[i].labels]
        owners = [f for f in term.factors if set(inner) & {*f.labels, f.hot}]
        is_whole = all(term.shape()[i] == lazy.shape[i] for i in axes)
        if not is_whole or len(owners) != 1 or not set(inner) <= set(owners[0].labels):
            return None
        (owner,), sizes = owners, term.sizes()
        free = [i for i in range(array.ndim) if i not in array_axes]
        other = array.transpose([*array_axes, *free])
        other = other.reshape(*(sizes[k] for k in inner), *other.shape[len(array_axes) :])
        new = term.fresh(len(free))
        labels = (*(k for k in owner.labels if k not in inner), *new)
        merged = Factor(einsum([owner, Factor(other, (*inner, *new))], labels), labels)
        left = [axis for i, axis in enumerate(term.axes) if i not in axes]
        factors = tuple(merged if f is owner else f for f in term.factors)
        terms.append(Term(factors, (*left, *(Axis((k,)) for k in new))))
    return Lazy(tuple(aval.shape), aval.dtype, tuple(terms))


def scatter_add(eqn: Any, operand: Any, numbers: Any, updates: Any) -> Lazy | None:
    """Makes factors of rows added at row numbers: the gradient of an embedding, or of experts."""
    dims, aval = eqn.params["dimension_numbers"], eqn.outvars[0].aval
    windows, inserted = dims.update_window_dims, tuple(dims.inserted_window_dims)
    if len(inserted) != 1 or tuple(dims.scatter_dims_to_operand_dims) != inserted:
        return None
    (axis,), shape, sizes = inserted, aval.shape, updates.shape
    others = [n for i, n in enumerate(shape) if i != axis]
    if dims.operand_batching_dims or [sizes[i] for i in windows] != others:
        return None
    numbers = _valid_numbers(as_array(numbers)[..., 0], shape[axis], eqn.params["mode"])
    terms: list[Term] = []
    for term in as_lazy(updates).terms:
        if term.shape() != tuple(sizes) or any(f.hot is not None for f in term.factors):
            return None
        own, (hot,) = term.sizes(), term.fresh()
        labels = [k for i, a in enumerate(term.axes) if i not in windows for k in a.labels]
        rows = Factor(numbers.reshape([own[k] for k in labels]), tuple(labels), hot, shape[axis])
        axes = [term.axes[i] for i in windows]
        axes.insert(axis, Axis((hot,)))
        terms.append(Term((rows, *term.factors), tuple(axes)))
    total = Lazy(tuple(shape), aval.dtype, tuple(terms))
    return None if is_small(total) else add(total, as_lazy(operand))


def _valid_numbers(numbers: Array, size: int, mode: Any) -> Array:
    if mode == lax.GatherScatterMode.CLIP:
        return jnp.clip(numbers, 0, size - 1).astype(jnp.int32)
    return jnp.where((numbers >= 0) & (numbers < size), numbers, -1).astype(jnp.int32)


def convolution(eqn: Any, lhs: Any, rhs: Any) -> Lazy | None:
    """Makes factors of the gradient of a kernel: patches of the image, gradient of the output.

    In that convolution the gradient of the output is the kernel; the positions of the window are
    those of the weights, and what is summed over are the pixels and the images.
    """
    p, aval = eqn.params, eqn.outvars[0].aval
    if p["feature_group_count"] != 1 or 0 in aval.shape:
        return None
    lhs_spec, rhs_spec, out_spec = p["dimension_numbers"]
    lhs, rhs = as_array(lhs).transpose(lhs_spec), as_array(rhs).transpose(rhs_spec)
    groups, window = p["batch_group_count"], rhs.shape[2:]
    n, features, *positions = (aval.shape[i] for i in out_spec)
    shape = (groups, n, lhs.shape[1], *positions, *window)
    # Counted before the patches are made: most kernels are smaller.
    if math.prod(aval.shape) <= math.prod(shape) + rhs.size:
        return None
    pairs = zip(p["padding"], p["lhs_dilation"], strict=True)
    widths = [(0, 0, 0), (0, 0, 0), *((int(a), int(b), int(d) - 1) for (a, b), d in pairs)]
    image = lax.pad(lhs, jnp.zeros((), lhs.dtype), widths)
    cut = [
        _window(image, corner, window, p["window_strides"], p["rhs_dilation"])
        for corner in itertools.product(*map(range, positions))
    ]
    rank = len(window)
    # Labels: group, own batch, own features, summed features, positions, window.
    g, b, o, c = range(4)
    y, k = tuple(range(4, 4 + rank)), tuple(range(4 + rank, 4 + 2 * rank))
    patches = Factor(jnp.stack(cut, axis=2).reshape(shape), (g, b, c, *y, *k))
    right = rhs.reshape(groups, features // groups, *rhs.shape[1:])
    axes: list[Labels] = [(b,), (g, o), *((label,) for label in y)]
    out = [axes[out_spec.index(i)] for i in range(len(out_spec))]
    return product(aval, [patches, Factor(right, (g, o, c, *k))], out)


def _window(image: Array, corner: Any, window: Any, strides: Any, dilation: Any) -> Array:
    """Cuts out every pixel that one weight of the kernel meets."""
    low = [c * s for c, s in zip(corner, strides, strict=True)]
    high = [a + (w - 1) * d + 1 for a, w, d in zip(low, window, dilation, strict=True)]
    return lax.slice(image, (0, 0, *low), (*image.shape[:2], *high), (1, 1, *dilation))
