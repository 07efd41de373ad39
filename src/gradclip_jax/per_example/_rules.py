"""Which operations are followed: one rule for each primitive.

A rule takes an equation and its operands, ordinary or lazy, and returns a lazy array, or a list of
them where the equation has several outputs, or None where it is to be computed as it stands. To
follow another primitive, add a line to `RULES`.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from .._types import Array
from ._lazy import Axis, Factor, Labels, Lazy, Term, as_lazy, product


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
    return None if 0 in lazy.shape or lazy.is_small() else lazy


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
    numbers, size = _as_row_numbers(numbers[..., 0]), shape[axis]
    if eqn.params["mode"] == lax.GatherScatterMode.CLIP:
        numbers = jnp.clip(numbers, 0, size - 1)
    is_valid = (numbers >= 0) & (numbers < size)
    numbers = jnp.where(is_valid, numbers, -1).astype(jnp.int32)
    total = _rows_at(as_lazy(updates), numbers, axis, size, windows)
    return None if total is None or total.is_small() else total.add(as_lazy(operand))


def _as_row_numbers(numbers: Array) -> Array:
    """Row numbers of at least 32 bits: a narrower type cannot hold the number of rows."""
    return numbers.astype(jnp.int32) if jnp.iinfo(numbers.dtype).bits < 32 else numbers


def _rows_at(x: Lazy, numbers: Array, axis: int, size: int, windows: Sequence[int]) -> Lazy | None:
    """Adds the rows of an array at numbers along a new axis of zeros; windows are its others."""
    terms: list[Term] = []
    for term in x.terms:
        if term.shape() != x.shape or any(f.hot is not None for f in term.factors):
            return None
        own, (hot,) = term.sizes(), term.fresh()
        labels = [k for i, a in enumerate(term.axes) if i not in windows for k in a.labels]
        rows = Factor(numbers.reshape([own[k] for k in labels]), tuple(labels), hot, size)
        axes = [term.axes[i] for i in windows]
        axes.insert(axis, Axis((hot,)))
        kept = [f if f.hot is not None else _without_dropped(f, rows) for f in term.factors]
        terms.append(Term((rows, *kept), tuple(axes)))
    shape = [x.shape[i] for i in windows]
    return Lazy((*shape[:axis], size, *shape[axis:]), x.dtype, tuple(terms))


def _without_dropped(f: Factor, rows: Factor) -> Factor:
    """The factor with zeros in dropped rows, because zero times NaN is NaN."""
    if not set(rows.labels) <= set(f.labels):
        return f
    order = [rows.labels.index(k) for k in f.labels if k in rows.labels]
    others = [i for i, k in enumerate(f.labels) if k not in rows.labels]
    is_kept = jnp.expand_dims((rows.array >= 0).transpose(order), others)
    return replace(f, array=jnp.where(is_kept, f.array, 0))


def _added_to(eqn: Any) -> Sequence[int]:
    """Where rows of activations are scattered, only what they are added to is a gradient."""
    return (0,) if len(eqn.params["dimension_numbers"].update_window_dims) < 2 else (0, 2)


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
    # Counted before the patches are made: most kernels are smaller.
    size = groups * n * lhs.shape[1] * math.prod((*positions, *window))
    if math.prod(aval.shape) <= size + rhs.size:
        return None
    pairs = zip(p["padding"], p["lhs_dilation"], strict=True)
    widths = [(0, 0, 0), (0, 0, 0), *((int(a), int(b), int(d) - 1) for (a, b), d in pairs)]
    patches = lax.pad(lhs, jnp.zeros((), lhs.dtype), widths)
    # Each axis of the image becomes two: a position, and the pixels that the kernel meets there.
    axes = zip(positions, window, p["window_strides"], p["rhs_dilation"], strict=True)
    for i, (count, width, stride, dilation) in enumerate(axes):
        axis, length = 2 + 2 * i, (width - 1) * dilation + 1
        starts = [stride * c for c in range(count)]
        rows = [lax.slice_in_dim(patches, a, a + length, dilation, axis) for a in starts]
        patches = jnp.stack(rows, axis)
    # Labels: group, own batch, own features, summed features; position and window of each axis.
    g, b, o, c = range(4)
    y, k = (tuple(range(first, 4 + 2 * len(window), 2)) for first in (4, 5))
    patches = patches.reshape(groups, n, *patches.shape[1:])
    left = Factor(patches, (g, b, c, *range(4, 4 + 2 * len(window))))
    right = Factor(rhs.reshape(groups, features // groups, *rhs.shape[1:]), (g, o, c, *k))
    labels: list[Labels] = [(b,), (g, o), *((label,) for label in y)]
    return product(aval, [left, right], [labels[out_spec.index(i)] for i in range(len(out_spec))])


# What happens to factors on the way to the gradient


def _is_zero(x: Any) -> bool:
    """Says whether a value is known to be zero when the program is traced."""
    return isinstance(x, (np.ndarray, np.generic)) and bool(np.all(x == 0))


def _without_axes(eqn: Any, x: Lazy) -> Lazy | None:
    """Sums over the labels of the axes with the rest; axes of length one have none."""
    axes = eqn.params["axes" if "axes" in eqn.params else "dimensions"]
    if any(_is_hot(x, axis) for axis in axes):
        return None
    return x.arrange([i for i in range(len(x.shape)) if i not in axes])


def _is_hot(x: Lazy, axis: int) -> bool:
    return any(f.hot in term.axes[axis].labels for term in x.terms for f in term.factors)


def _broadcast(eqn: Any, x: Any, *_: Any) -> Lazy | None:
    aval = eqn.outvars[0].aval
    if not isinstance(x, Lazy):
        return Lazy(tuple(aval.shape), aval.dtype) if _is_zero(x) else None
    sources = {axis: i for i, axis in enumerate(eqn.params["broadcast_dimensions"])}
    new = x.arrange([sources.get(i) for i in range(aval.ndim)])
    return new if new.shape == tuple(aval.shape) else None


def _reshape(eqn: Any, x: Lazy, *_: Any) -> Lazy | None:
    shape = tuple(eqn.outvars[0].aval.shape)
    is_whole = 0 not in shape and all(term.shape() == x.shape for term in x.terms)
    terms = [term.split_axes(shape) for term in x.terms] if is_whole else [None]
    sized = tuple(term for term in terms if term is not None)
    return Lazy(shape, x.dtype, sized) if len(sized) == len(terms) else None


def _cast(eqn: Any, x: Lazy) -> Lazy | None:
    new = eqn.params["new_dtype"]
    # A cast to an integer, a boolean, or from complex to real is not linear.
    for kind in (jnp.floating, jnp.complexfloating):
        if jnp.issubdtype(new, kind) and jnp.issubdtype(x.dtype, kind):
            return replace(x, dtype=np.dtype(new))
    return None


def _add(_: Any, x: Any, y: Any) -> Lazy | None:
    return as_lazy(x).add(as_lazy(y)) if np.shape(x) == np.shape(y) else None


def _of_one_number(eqn: Any) -> Sequence[int]:
    return () if eqn.invars[0].aval.ndim else range(1, len(eqn.invars))


def _by_number(eqn: Any) -> Sequence[int]:
    """A product of two arrays is no move; one by a number is."""
    return [i for i in range(2) if eqn.invars[1 - i].aval.ndim == 0]


def _multiply(_: Any, x: Any, y: Any) -> Lazy | None:
    lazy, number = (x, y) if isinstance(x, Lazy) else (y, x)
    return None if isinstance(number, Lazy) else lazy.scale(jnp.asarray(number))


def _divide(eqn: Any, x: Any, y: Any) -> Lazy | None:
    return None if isinstance(y, Lazy) else _multiply(eqn, x, 1 / jnp.asarray(y))


def _pad(eqn: Any, x: Any, padding: Any) -> Lazy | None:
    """Puts an array in zeros; where the loss itself pads a weight, cuts them off."""
    widths = eqn.params["padding_config"]
    if not _is_zero(padding) or any(inner for _, _, inner in widths):
        return None
    pairs = zip(widths, x.shape, strict=True)
    part = _crop(as_lazy(x), ((max(-low, 0), n + min(high, 0)) for (low, high, _), n in pairs))
    start = [max(int(low), 0) for low, _, _ in widths]
    return None if part is None else part.place(eqn.outvars[0].aval.shape, start)


def _slice(eqn: Any, x: Lazy) -> Lazy | None:
    p = eqn.params
    if any(step != 1 for step in p["strides"] or ()):
        return None
    return _crop(x, zip(p["start_indices"], p["limit_indices"], strict=True))


def _crop(x: Lazy | None, ranges: Iterable[tuple[int, int]]) -> Lazy | None:
    for axis, (low, high) in enumerate(ranges):
        x = None if x is None else x.cut(axis, low, high - low)
    return x


def _concatenate(eqn: Any, *values: Any) -> Lazy:
    aval, axis, offset = eqn.outvars[0].aval, eqn.params["dimension"], 0
    total = Lazy(tuple(aval.shape), aval.dtype)
    for value in map(as_lazy, values):
        start = [offset if i == axis else 0 for i in range(len(aval.shape))]
        total = total.add(value.place(aval.shape, start))
        offset += value.shape[axis]
    return total


def _update_slice(_: Any, zeros: Any, update: Any, *start: Any) -> Lazy | None:
    """Puts an array at a traced number of a stack of zeros: the gradient of what is taken there."""
    axes = [i for i, n in enumerate(zeros.shape) if n != update.shape[i]]
    if not isinstance(zeros, Lazy) or zeros.terms or len(axes) != 1 or update.shape[axes[0]] != 1:
        return None
    number = _as_row_numbers(jnp.asarray(start[axes[0]]))
    number = jnp.clip(number, 0, zeros.shape[axes[0]] - 1).astype(jnp.int32)
    others = [i for i in range(len(zeros.shape)) if i not in axes]
    return _rows_at(as_lazy(update), number, axes[0], zeros.shape[axes[0]], others)


def _reverse(eqn: Any, x: Lazy) -> Lazy | None:
    """Turns axes round, and with them the labels that they are made of."""
    turned = eqn.params["dimensions"]

    def reversed_(term: Term) -> Term:
        for i in turned:
            (labels, start), size = term.axes[i], term.shape()[i]
            term = term.with_axis(i, Axis(labels, x.shape[i] - start - size))
            for k in labels:
                term = term.along(k, lambda array, axis: lax.rev(array, [axis]))
        return term

    return None if any(_is_hot(x, axis) for axis in turned) else x.map(reversed_)


def _select(_: Any, which: Array, *cases: Any) -> Lazy:
    """Chooses by one number: factors of the other cases are zero, whatever they hold."""

    def kept(i: int, f: Factor) -> Factor:
        return f if f.hot is not None else replace(f, array=jnp.where(which == i, f.array, 0))

    lazy = list(map(as_lazy, cases))
    terms = [t.map(functools.partial(kept, i)) for i, x in enumerate(lazy) for t in x.terms]
    return replace(lazy[0], terms=tuple(terms))


def _unstack(eqn: Any, x: Lazy) -> list[Lazy] | None:
    axis = eqn.params["axis"]
    left = [i for i in range(len(x.shape)) if i != axis]
    parts = None if _is_hot(x, axis) else _parts(x, axis, [1] * x.shape[axis])
    return parts and [part.arrange(left) for part in parts]


def _parts(x: Lazy, axis: int, sizes: Sequence[int]) -> list[Lazy] | None:
    starts = itertools.accumulate(map(int, sizes[:-1]), initial=0)
    parts = [x.cut(axis, start, int(n)) for start, n in zip(starts, sizes, strict=True)]
    whole = [part for part in parts if part is not None]
    return whole if len(whole) == len(parts) else None


RULES: dict[str, Rule] = {
    # Two activations are where factors begin.
    "dot_general": Rule(_dot_general, (), starts=True),
    "conv_general_dilated": Rule(_convolution, (), starts=True),
    **dict.fromkeys(("scatter-add", "scatter_add"), Rule(_scatter_add, _added_to, starts=True)),
    "broadcast_in_dim": Rule(_broadcast, starts=True),
    "pad": Rule(_pad, starts=True),
    "transpose": Rule(lambda eqn, x: x.arrange(eqn.params["permutation"])),
    "reshape": Rule(_reshape),
    **dict.fromkeys(("squeeze", "reduce_sum"), Rule(_without_axes)),
    "convert_element_type": Rule(_cast),
    # Where the result is placed is for the weighted sum to say, not for each example.
    **dict.fromkeys(("sharding_constraint", "reshard"), Rule(lambda _, x: x)),
    **dict.fromkeys(("reduce_precision", "copy", "copy_p", "name"), Rule(lambda _, x: x)),
    "slice": Rule(_slice),
    "rev": Rule(_reverse),
    "select_n": Rule(_select, _of_one_number),
    "dynamic_update_slice": Rule(_update_slice, (0, 1)),
    "neg": Rule(lambda _, x: x.scale(jnp.asarray(-1, x.dtype))),
    **dict.fromkeys(("add", "add_any"), Rule(_add, None)),
    "mul": Rule(_multiply, _by_number),
    "div": Rule(_divide, _by_number),
    "concatenate": Rule(_concatenate, None),
    # The gradient of joined parameters is cut into theirs.
    "split": Rule(lambda eqn, x: _parts(x, eqn.params["axis"], eqn.params["sizes"])),
    "unstack": Rule(_unstack),
}
