"""Which operations are followed: one rule for each primitive.

A rule takes an equation and its operands, ordinary or lazy, and returns a lazy array, or a list of
them where the equation has several outputs, or None where it is to be computed as it stands. To
follow another primitive, add a line to `RULES`.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from .._types import Array
from ._lazy import (
    Axis,
    Factor,
    Labels,
    Lazy,
    Term,
    add,
    arrange,
    as_lazy,
    cut,
    is_lazy,
    is_small,
    place,
    product,
    reverse,
    scale,
    split_axes,
)


class Rule(NamedTuple):
    """How a primitive is followed.

    Attributes:
        apply: `(equation, *operands)` to what the equation returns, or None.
        follows: positions of the operands in which the operation is linear, so that they may be
            lazy, or a function from the equation to these; None for all.
        starts: whether it makes a lazy array of ordinary ones.
    """

    apply: Callable[..., Lazy | list[Lazy] | None]
    follows: Sequence[int] | Callable[[Any], Sequence[int]] | None = (0,)
    starts: bool = False


def linear_operands(eqn: Any) -> Sequence[int]:
    """Finds the operands of an equation that may be lazy."""
    rule = RULES.get(eqn.primitive.name)
    if rule is None:
        return ()
    if rule.follows is None:
        return range(len(eqn.invars))
    return rule.follows(eqn) if callable(rule.follows) else rule.follows


# Where factors come from: products, convolutions and scattered rows that end in a gradient


def _dot_general(eqn: Any, lhs: Array, rhs: Array) -> Lazy | None:
    """Makes factors of a product of two arrays."""
    (left_summed, right_summed), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    left = list(range(lhs.ndim))
    right = [lhs.ndim + i for i in range(rhs.ndim)]
    for i, j in zip((*left_summed, *left_batch), (*right_summed, *right_batch), strict=True):
        right[j] = left[i]
    batch, summed = [left[i] for i in left_batch], [left[i] for i in left_summed]
    free = [k for k in (*left, *right) if k not in (*batch, *summed)]
    factors = [Factor(lhs, tuple(left)), Factor(rhs, tuple(right))]
    lazy = product(eqn.outvars[0].aval, factors, [(k,) for k in (*batch, *free)])
    return None if 0 in lazy.shape or is_small(lazy) else lazy


def _scatter_add(eqn: Any, operand: Any, numbers: Array, updates: Any) -> Lazy | None:
    """Makes factors of rows added at row numbers: the gradient of an embedding, or of experts."""
    dims, aval = eqn.params["dimension_numbers"], eqn.outvars[0].aval
    windows, inserted = dims.update_window_dims, tuple(dims.inserted_window_dims)
    if len(inserted) != 1 or tuple(dims.scatter_dims_to_operand_dims) != inserted:
        return None
    (axis,), shape, sizes = inserted, aval.shape, updates.shape
    others = [n for i, n in enumerate(shape) if i != axis]
    if dims.operand_batching_dims or [sizes[i] for i in windows] != others:
        return None
    numbers = _valid_numbers(numbers[..., 0], shape[axis], eqn.params["mode"])
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


def _added_to(eqn: Any) -> Sequence[int]:
    """Where rows of activations are scattered, only what they are added to is a gradient."""
    return (0,) if len(eqn.params["dimension_numbers"].update_window_dims) < 2 else (0, 2)


def _valid_numbers(numbers: Array, size: int, mode: Any) -> Array:
    if mode == lax.GatherScatterMode.CLIP:
        return jnp.clip(numbers, 0, size - 1).astype(jnp.int32)
    return jnp.where((numbers >= 0) & (numbers < size), numbers, -1).astype(jnp.int32)


def _convolution(eqn: Any, lhs: Array, rhs: Array) -> Lazy | None:
    """Makes factors of the gradient of a kernel: patches of the image, gradient of the output.

    In that convolution the gradient of the output is the kernel; the positions of the window are
    those of the weights, and what is summed over are the pixels and the images.
    """
    p, aval = eqn.params, eqn.outvars[0].aval
    if p["feature_group_count"] != 1 or 0 in aval.shape:
        return None
    lhs_spec, rhs_spec, out_spec = p["dimension_numbers"]
    lhs, rhs = lhs.transpose(lhs_spec), rhs.transpose(rhs_spec)
    groups, window = p["batch_group_count"], rhs.shape[2:]
    n, features, *positions = (aval.shape[i] for i in out_spec)
    shape = (groups, n, lhs.shape[1], *positions, *window)
    # Counted before the patches are made: most kernels are smaller.
    if math.prod(aval.shape) <= math.prod(shape) + rhs.size:
        return None
    pairs = zip(p["padding"], p["lhs_dilation"], strict=True)
    widths = [(0, 0, 0), (0, 0, 0), *((int(a), int(b), int(d) - 1) for (a, b), d in pairs)]
    image = lax.pad(lhs, jnp.zeros((), lhs.dtype), widths)
    pixels = [
        _window(image, corner, window, p["window_strides"], p["rhs_dilation"])
        for corner in itertools.product(*map(range, positions))
    ]
    rank = len(window)
    # Labels: group, own batch, own features, summed features, positions, window.
    g, b, o, c = range(4)
    y, k = tuple(range(4, 4 + rank)), tuple(range(4 + rank, 4 + 2 * rank))
    patches = Factor(jnp.stack(pixels, axis=2).reshape(shape), (g, b, c, *y, *k))
    right = rhs.reshape(groups, features // groups, *rhs.shape[1:])
    axes: list[Labels] = [(b,), (g, o), *((label,) for label in y)]
    out = [axes[out_spec.index(i)] for i in range(len(out_spec))]
    return product(aval, [patches, Factor(right, (g, o, c, *k))], out)


def _window(image: Array, corner: Any, window: Any, strides: Any, dilation: Any) -> Array:
    """Cuts out every pixel that one weight of the kernel meets."""
    low = [c * s for c, s in zip(corner, strides, strict=True)]
    high = [a + (w - 1) * d + 1 for a, w, d in zip(low, window, dilation, strict=True)]
    return lax.slice(image, (0, 0, *low), (*image.shape[:2], *high), (1, 1, *dilation))


# What happens to factors on the way to the gradient


def _is_zero(x: Any) -> bool:
    """Says whether a value is known to be zero when the program is traced."""
    return isinstance(x, (np.ndarray, np.generic)) and bool(np.all(x == 0))


def _same(_: Any, x: Lazy) -> Lazy:
    return x


def _transpose(eqn: Any, x: Lazy) -> Lazy:
    return arrange(x, eqn.outvars[0].aval.shape, eqn.params["permutation"])


def _squeeze(eqn: Any, x: Lazy) -> Lazy:
    left = [i for i in range(len(x.shape)) if i not in eqn.params["dimensions"]]
    return arrange(x, eqn.outvars[0].aval.shape, left)


def _sum(eqn: Any, x: Lazy) -> Lazy | None:
    """Sums over the labels of the axes with the rest."""
    axes = eqn.params["axes"]
    if any(_is_hot(x, axis) for axis in axes):
        return None
    left = [i for i in range(len(x.shape)) if i not in axes]
    return arrange(x, eqn.outvars[0].aval.shape, left)


def _is_hot(x: Lazy, axis: int) -> bool:
    return any(f.hot in term.axes[axis].labels for term in x.terms for f in term.factors)


def _broadcast(eqn: Any, x: Any, *_: Any) -> Lazy | None:
    shape, dimensions = tuple(eqn.outvars[0].aval.shape), eqn.params["broadcast_dimensions"]
    if _is_zero(x):
        return Lazy(shape, eqn.outvars[0].aval.dtype)
    if not is_lazy(x) or math.prod(shape) != math.prod(x.shape):
        return None
    sources = {axis: i for i, axis in enumerate(dimensions)}
    return arrange(x, shape, [sources.get(i) for i in range(len(shape))])


def _reshape(eqn: Any, x: Lazy, *_: Any) -> Lazy | None:
    shape = tuple(eqn.outvars[0].aval.shape)
    is_whole = 0 not in shape and all(term.shape() == x.shape for term in x.terms)
    terms = [split_axes(term, shape) for term in x.terms] if is_whole else [None]
    sized = tuple(term for term in terms if term is not None)
    return Lazy(shape, x.dtype, sized) if len(sized) == len(terms) else None


def _cast(eqn: Any, x: Lazy) -> Lazy | None:
    new = eqn.params["new_dtype"]
    kinds = {jnp.issubdtype(kind, jnp.complexfloating) for kind in (new, x.dtype)}
    return replace(x, dtype=np.dtype(new)) if len(kinds) == 1 else None


def _negate(_: Any, x: Lazy) -> Lazy:
    return scale(x, jnp.asarray(-1, x.dtype))


def _add(_: Any, x: Any, y: Any) -> Lazy | None:
    return add(as_lazy(x), as_lazy(y)) if np.shape(x) == np.shape(y) else None


def _by_number(eqn: Any) -> Sequence[int]:
    """A product of two arrays is no move; one by a number is."""
    return [i for i in range(2) if eqn.invars[1 - i].aval.ndim == 0]


def _multiply(_: Any, x: Any, y: Any) -> Lazy | None:
    lazy, number = (x, y) if is_lazy(x) else (y, x)
    return None if is_lazy(number) else scale(lazy, jnp.asarray(number))


def _divide(eqn: Any, x: Any, y: Any) -> Lazy | None:
    return None if is_lazy(y) else _multiply(eqn, x, 1 / jnp.asarray(y))


def _pad(eqn: Any, x: Any, padding: Any) -> Lazy | None:
    """Puts an array in zeros; where the loss itself pads a weight, cuts them off."""
    widths = eqn.params["padding_config"]
    if not _is_zero(padding) or any(inner for _, _, inner in widths):
        return None
    ranges = [
        (max(-low, 0), n - max(-high, 0)) for (low, high, _), n in zip(widths, x.shape, strict=True)
    ]
    part = _crop(as_lazy(x), ranges)
    start = [max(int(low), 0) for low, _, _ in widths]
    return None if part is None else place(part, eqn.outvars[0].aval.shape, start)


def _slice(eqn: Any, x: Lazy) -> Lazy | None:
    p = eqn.params
    if any(step != 1 for step in p["strides"] or ()):
        return None
    return _crop(x, list(zip(p["start_indices"], p["limit_indices"], strict=True)))


def _crop(x: Lazy, ranges: Sequence[tuple[int, int]]) -> Lazy | None:
    part: Lazy | None = x
    for axis, (low, high) in enumerate(ranges):
        part = None if part is None else cut(part, axis, low, high - low)
    return part


def _concatenate(eqn: Any, *values: Any) -> Lazy:
    aval, axis, offset = eqn.outvars[0].aval, eqn.params["dimension"], 0
    total = Lazy(tuple(aval.shape), aval.dtype)
    for value in map(as_lazy, values):
        start = [offset if i == axis else 0 for i in range(len(aval.shape))]
        total = add(total, place(value, aval.shape, start))
        offset += value.shape[axis]
    return total


def _reverse(eqn: Any, x: Lazy) -> Lazy:
    return functools.reduce(reverse, eqn.params["dimensions"], x)


def _split(eqn: Any, x: Lazy) -> list[Lazy] | None:
    """Cuts the gradient of joined parameters into theirs."""
    axis, sizes = eqn.params["axis"], [int(n) for n in eqn.params["sizes"]]
    starts = itertools.accumulate(sizes[:-1], initial=0)
    parts = [cut(x, axis, start, n) for start, n in zip(starts, sizes, strict=True)]
    whole = [part for part in parts if part is not None]
    return whole if len(whole) == len(parts) else None


def _unstack(eqn: Any, x: Lazy) -> list[Lazy] | None:
    axis = eqn.params["axis"]
    left = [i for i in range(len(x.shape)) if i != axis]
    parts = [cut(x, axis, i, 1) for i in range(x.shape[axis])]
    whole = [arrange(part, eqn.outvars[0].aval.shape, left) for part in parts if part is not None]
    return None if _is_hot(x, axis) or len(whole) < len(parts) else whole


RULES: dict[str, Rule] = {
    # Two activations are where factors begin.
    "dot_general": Rule(_dot_general, (), starts=True),
    "conv_general_dilated": Rule(_convolution, (), starts=True),
    **dict.fromkeys(("scatter-add", "scatter_add"), Rule(_scatter_add, _added_to, starts=True)),
    "broadcast_in_dim": Rule(_broadcast, starts=True),
    "pad": Rule(_pad, starts=True),
    "transpose": Rule(_transpose),
    "reshape": Rule(_reshape),
    "squeeze": Rule(_squeeze),
    "reduce_sum": Rule(_sum),
    "convert_element_type": Rule(_cast),
    # Where the result is placed is for the weighted sum to say, not for each example.
    **dict.fromkeys(("sharding_constraint", "reshard"), Rule(_same)),
    **dict.fromkeys(("reduce_precision", "copy", "copy_p", "name"), Rule(_same)),
    "slice": Rule(_slice),
    "rev": Rule(_reverse),
    "neg": Rule(_negate),
    **dict.fromkeys(("add", "add_any"), Rule(_add, None)),
    "mul": Rule(_multiply, _by_number),
    "div": Rule(_divide, _by_number),
    "concatenate": Rule(_concatenate, None),
    "split": Rule(_split),
    "unstack": Rule(_unstack),
}
