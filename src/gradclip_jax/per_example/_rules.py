"""Rules that evaluate JAX primitives on gradients stored as factors.

A rule takes an equation and its operands, which are ordinary or factored arrays. A rule returns one
factored array per output, or None if the equation must be evaluated with ordinary arrays. To
support another primitive, add an entry to `RULES`.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn, Literal, Var

from .._types import Array
from ._lazy import Axis, Factor, Labels, Lazy, Term, Value, all_or_none, as_lazy, product


class Rule(NamedTuple):
    """The evaluation rule of a primitive.

    Attributes:
        apply: Function `(equation, *operands) -> outputs` that returns None if the rule does not
            apply.
        follows: Positions of the operands in which the primitive is linear, or a function that
            returns these positions.
        starts: Whether the rule can return a product of factors although no operand is one.
    """

    apply: Callable[..., Lazy | list[Lazy] | None]
    follows: Sequence[int] | Callable[[JaxprEqn], Sequence[int]] = (0,)
    starts: bool = False


def aval_of(v: Var | Literal) -> ShapedArray:
    """Return the shape and dtype of a variable or literal."""
    return cast(ShapedArray, v.aval)


# Operations that create factors


def _dot_general(eqn: JaxprEqn, lhs: Array, rhs: Array) -> Lazy | None:
    """Represent a dot product by its two operands instead of computing it."""
    (left_summed, right_summed), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    left = list(range(lhs.ndim))
    right = [lhs.ndim + i for i in range(rhs.ndim)]
    for i, j in zip((*left_summed, *left_batch), (*right_summed, *right_batch), strict=True):
        right[j] = left[i]
    batch, summed = [left[i] for i in left_batch], [left[i] for i in left_summed]
    free = [k for k in (*left, *right) if k not in (*batch, *summed)]
    factors = [Factor(lhs, tuple(left)), Factor(rhs, tuple(right))]
    lazy = product(aval_of(eqn.outvars[0]), factors, [(k,) for k in (*batch, *free)])
    return None if 0 in lazy.shape or lazy.is_small() else lazy


def _scatter_add(eqn: JaxprEqn, operand: Value, numbers: Array, updates: Value) -> Lazy | None:
    """Represent the gradient of an embedding or of expert weights by rows and row indices."""
    dims, aval = eqn.params["dimension_numbers"], aval_of(eqn.outvars[0])
    windows, inserted = dims.update_window_dims, tuple(dims.inserted_window_dims)
    if len(inserted) != 1 or tuple(dims.scatter_dims_to_operand_dims) != inserted:
        return None
    (axis,) = inserted
    others = [n for i, n in enumerate(aval.shape) if i != axis]
    if dims.operand_batching_dims or [updates.shape[i] for i in windows] != others:
        return None
    is_clipped = eqn.params["mode"] == lax.GatherScatterMode.CLIP
    numbers = _row_numbers(numbers[..., 0], aval.shape[axis], is_clipped)
    total = _rows_at(as_lazy(updates), numbers, axis, aval.shape[axis], windows)
    return None if total is None or total.is_small() else total.add(as_lazy(operand))


def _row_numbers(numbers: Array, size: int, is_clipped: bool) -> Array:
    """Clip row indices to the valid range, or replace out-of-range indices by -1."""
    if jnp.iinfo(numbers.dtype).bits < 32:  # int8 or int16 cannot represent all row numbers
        numbers = numbers.astype(jnp.int32)
    if is_clipped:
        return jnp.clip(numbers, 0, size - 1).astype(jnp.int32)
    return jnp.where((numbers >= 0) & (numbers < size), numbers, -1).astype(jnp.int32)


def _rows_at(x: Lazy, numbers: Array, axis: int, size: int, windows: Sequence[int]) -> Lazy | None:
    """Scatter rows to the indices `numbers` of a new axis; `windows` are the axes of a row."""
    terms: list[Term] = []
    for term in x.terms:
        if term.shape != x.shape or term.hots:
            return None
        (hot,) = term.fresh()
        labels = [k for i, a in enumerate(term.axes) if i not in windows for k in a.labels]
        rows = Factor(numbers.reshape([term.sizes[k] for k in labels]), tuple(labels), hot, size)
        axes = [term.axes[i] for i in windows]
        axes.insert(axis, Axis((hot,)))
        kept = [_without_dropped(f, rows) for f in term.factors]
        terms.append(Term((rows, *kept), tuple(axes)))
    shape = [x.shape[i] for i in windows]
    return Lazy((*shape[:axis], size, *shape[axis:]), x.dtype, tuple(terms))


def _without_dropped(f: Factor, rows: Factor) -> Factor:
    """Set the rows with index -1 to zero, because a dropped row may contain NaN."""
    if not set(rows.labels) <= set(f.labels):
        return f
    order = [rows.labels.index(k) for k in f.labels if k in rows.labels]
    others = [i for i, k in enumerate(f.labels) if k not in rows.labels]
    is_kept = jnp.expand_dims((rows.array >= 0).transpose(order), others)
    return replace(f, array=jnp.where(is_kept, f.array, 0))


def _added_to(eqn: JaxprEqn) -> Sequence[int]:
    """Return the positions of the operands of a scatter that may be gradients.

    The updates of a scatter with fewer than two window axes are activations, not gradients.
    """
    return (0,) if len(eqn.params["dimension_numbers"].update_window_dims) < 2 else (0, 2)


def _convolution(eqn: JaxprEqn, lhs: Array, rhs: Array) -> Lazy | None:
    """Represent the gradient of a convolution kernel by image patches and output gradients.

    The kernel gradient is itself a convolution of the input images with the output gradient. Each
    output position of this convolution is a position in the kernel.
    """
    p, aval = eqn.params, aval_of(eqn.outvars[0])
    if p["feature_group_count"] != 1 or 0 in aval.shape:
        return None
    lhs_spec, rhs_spec, out_spec = p["dimension_numbers"]
    lhs, rhs = lhs.transpose(lhs_spec), rhs.transpose(rhs_spec)
    groups, window = p["batch_group_count"], rhs.shape[2:]
    n, features, *positions = (aval.shape[i] for i in out_spec)
    # Compare sizes before extracting patches, because most kernels are smaller than patches.
    size = groups * n * lhs.shape[1] * math.prod((*positions, *window))
    if math.prod(aval.shape) <= size + rhs.size:
        return None
    pairs = zip(p["padding"], p["lhs_dilation"], strict=True)
    widths = [(0, 0, 0), (0, 0, 0), *((int(a), int(b), int(d) - 1) for (a, b), d in pairs)]
    patches = lax.pad(lhs, jnp.zeros((), lhs.dtype), widths)
    # Split each image axis into an output position and a position within the kernel window.
    axes = zip(positions, window, p["window_strides"], p["rhs_dilation"], strict=True)
    for i, (count, width, stride, dilation) in enumerate(axes):
        axis, length = 2 + 2 * i, (width - 1) * dilation + 1
        starts = [stride * c for c in range(count)]
        rows = [lax.slice_in_dim(patches, a, a + length, dilation, axis) for a in starts]
        patches = jnp.stack(rows, axis)
    # The labels stand for groups, batch, output features, input features, positions and windows.
    g, b, o, c = range(4)
    y, k = (tuple(range(first, 4 + 2 * len(window), 2)) for first in (4, 5))
    patches = patches.reshape(groups, n, *patches.shape[1:])
    left = Factor(patches, (g, b, c, *range(4, 4 + 2 * len(window))))
    right = Factor(rhs.reshape(groups, features // groups, *rhs.shape[1:]), (g, o, c, *k))
    labels: list[Labels] = [(b,), (g, o), *((label,) for label in y)]
    return product(aval, [left, right], [labels[out_spec.index(i)] for i in range(len(out_spec))])


# Linear operations on factored gradients


def _is_zero(x: object) -> bool:
    """Return whether a value is known to be zero during tracing."""
    return isinstance(x, (np.ndarray, np.generic)) and bool(np.all(x == 0))


def _without_axes(eqn: JaxprEqn, x: Lazy) -> Lazy | None:
    """Sum over axes and remove them, which also implements `squeeze` for axes of length one."""
    axes = eqn.params["axes" if "axes" in eqn.params else "dimensions"]
    if any(_is_hot(x, axis) for axis in axes):
        return None
    return x.arrange([i for i in range(len(x.shape)) if i not in axes])


def _is_hot(x: Lazy, axis: int) -> bool:
    return any(f.hot in term.axes[axis].labels for term in x.terms for f in term.factors)


def _broadcast(eqn: JaxprEqn, x: Value, *_: Value) -> Lazy | None:
    aval = aval_of(eqn.outvars[0])
    if not isinstance(x, Lazy):
        return Lazy(aval.shape, aval.dtype) if _is_zero(x) else None
    sources = {axis: i for i, axis in enumerate(eqn.params["broadcast_dimensions"])}
    new = x.arrange([sources.get(i) for i in range(aval.ndim)])
    return new if new.shape == aval.shape else None


def _reshape(eqn: JaxprEqn, x: Lazy, *_: Value) -> Lazy | None:
    shape = aval_of(eqn.outvars[0]).shape
    if 0 in shape or any(term.shape != x.shape for term in x.terms):
        return None
    terms = all_or_none(term.split_axes(shape) for term in x.terms)
    return None if terms is None else Lazy(shape, x.dtype, tuple(terms))


def _cast(eqn: JaxprEqn, x: Lazy) -> Lazy | None:
    new = eqn.params["new_dtype"]
    # Casts to integers or booleans, and from complex to real, are not linear.
    for kind in (jnp.floating, jnp.complexfloating):
        if jnp.issubdtype(new, kind) and jnp.issubdtype(x.dtype, kind):
            return replace(x, dtype=np.dtype(new))
    return None


def _add(_: JaxprEqn, x: Value, y: Value) -> Lazy | None:
    return as_lazy(x).add(as_lazy(y)) if np.shape(x) == np.shape(y) else None


def _of_one_number(eqn: JaxprEqn) -> Sequence[int]:
    return () if aval_of(eqn.invars[0]).ndim else range(1, len(eqn.invars))


def _by_number(eqn: JaxprEqn) -> Sequence[int]:
    """Return the positions of operands that are multiplied or divided by a scalar."""
    return [i for i in range(2) if aval_of(eqn.invars[1 - i]).ndim == 0]


def _multiply(_: JaxprEqn, x: Value, y: Value) -> Lazy | None:
    if isinstance(y, Lazy):
        x, y = y, x
    return x.scale(jnp.asarray(y)) if isinstance(x, Lazy) and not isinstance(y, Lazy) else None


def _divide(eqn: JaxprEqn, x: Value, y: Value) -> Lazy | None:
    return None if isinstance(y, Lazy) else _multiply(eqn, x, 1 / jnp.asarray(y))


def _pad(eqn: JaxprEqn, x: Value, padding: Value) -> Lazy | None:
    """Pad with zeros, or slice if the padding is negative, as in the transpose of `lax.pad`."""
    widths = eqn.params["padding_config"]
    if not _is_zero(padding) or any(inner for _, _, inner in widths):
        return None
    return _window(as_lazy(x), [-low for low, _, _ in widths], aval_of(eqn.outvars[0]).shape)


def _slice(eqn: JaxprEqn, x: Lazy) -> Lazy | None:
    if any(step != 1 for step in eqn.params["strides"] or ()):
        return None
    return _window(x, eqn.params["start_indices"], aval_of(eqn.outvars[0]).shape)


def _window(x: Lazy, start: Sequence[int], shape: Sequence[int]) -> Lazy | None:
    """Slice or pad all axes."""
    for axis, (first, size) in enumerate(zip(start, shape, strict=True)):
        window = x.window(axis, first, size)
        if window is None:
            return None
        x = window
    return x


def _concatenate(eqn: JaxprEqn, *values: Value) -> Lazy | None:
    aval, axis, offset = aval_of(eqn.outvars[0]), eqn.params["dimension"], 0
    parts: list[Lazy | None] = []
    for value in map(as_lazy, values):
        parts.append(value.window(axis, -offset, aval.shape[axis]))
        offset += value.shape[axis]
    whole = all_or_none(parts)
    return None if whole is None else functools.reduce(Lazy.add, whole)


def _update_slice(_: JaxprEqn, zeros: Value, update: Value, *start: Array) -> Lazy | None:
    """Insert an array into zeros at a traced index, as in the gradient of `lax.dynamic_slice`."""
    axes = [i for i, n in enumerate(zeros.shape) if n != update.shape[i]]
    if not isinstance(zeros, Lazy) or zeros.terms or len(axes) != 1 or update.shape[axes[0]] != 1:
        return None
    (axis,), others = axes, [i for i in range(len(zeros.shape)) if i not in axes]
    number = _row_numbers(jnp.asarray(start[axis]), zeros.shape[axis], is_clipped=True)
    return _rows_at(as_lazy(update), number, axis, zeros.shape[axis], others)


def _reverse(eqn: JaxprEqn, x: Lazy) -> Lazy | None:
    """Reverse axes of the value by reversing the corresponding axes of its factors."""
    turned = eqn.params["dimensions"]

    def reversed_(term: Term) -> Term:
        for i in turned:
            (labels, start), size = term.axes[i], term.shape[i]
            term = term.with_axis(i, Axis(labels, x.shape[i] - start - size))
            for k in labels:
                term = term.along(k, lambda array, axis: lax.rev(array, [axis]))
        return term

    return None if any(_is_hot(x, axis) for axis in turned) else x.map(reversed_)


def _select(_: JaxprEqn, which: Array, *cases: Value) -> Lazy:
    """Select one case by a scalar index, and set the factors of all other cases to zero."""

    def kept(i: int, f: Factor) -> Factor:
        return f if f.hot is not None else replace(f, array=jnp.where(which == i, f.array, 0))

    lazy = list(map(as_lazy, cases))
    terms = [t.map(functools.partial(kept, i)) for i, x in enumerate(lazy) for t in x.terms]
    return replace(lazy[0], terms=tuple(terms))


def _unstack(eqn: JaxprEqn, x: Lazy) -> list[Lazy] | None:
    axis = eqn.params["axis"]
    left = [i for i in range(len(x.shape)) if i != axis]
    parts = None if _is_hot(x, axis) else _parts(x, axis, [1] * x.shape[axis])
    return parts and [part.arrange(left) for part in parts]


def _parts(x: Lazy, axis: int, sizes: Sequence[int]) -> list[Lazy] | None:
    starts = itertools.accumulate(map(int, sizes[:-1]), initial=0)
    return all_or_none(
        x.window(axis, start, int(n)) for start, n in zip(starts, sizes, strict=True)
    )


RULES: dict[str, Rule] = {
    # Primitives of linear layers, whose per-example gradients are products of two arrays.
    "dot_general": Rule(_dot_general, (), starts=True),
    "conv_general_dilated": Rule(_convolution, (), starts=True),
    **dict.fromkeys(("scatter-add", "scatter_add"), Rule(_scatter_add, _added_to, starts=True)),
    "broadcast_in_dim": Rule(_broadcast, starts=True),
    "pad": Rule(_pad, starts=True),
    "transpose": Rule(lambda eqn, x: x.arrange(eqn.params["permutation"])),
    "reshape": Rule(_reshape),
    **dict.fromkeys(("squeeze", "reduce_sum"), Rule(_without_axes)),
    "convert_element_type": Rule(_cast),
    # Ignore sharding constraints on per-example gradients, because only their sum is sharded.
    **dict.fromkeys(("sharding_constraint", "reshard"), Rule(lambda _, x: x)),
    **dict.fromkeys(("reduce_precision", "copy", "copy_p", "name"), Rule(lambda _, x: x)),
    "slice": Rule(_slice),
    "rev": Rule(_reverse),
    "select_n": Rule(_select, _of_one_number),
    "dynamic_update_slice": Rule(_update_slice, (0, 1)),
    "neg": Rule(lambda _, x: x.scale(jnp.asarray(-1, x.dtype))),
    **dict.fromkeys(("add", "add_any"), Rule(_add, (0, 1))),
    "mul": Rule(_multiply, _by_number),
    "div": Rule(_divide, _by_number),
    "concatenate": Rule(_concatenate, lambda eqn: range(len(eqn.invars))),
    # The backward pass through a concatenation of parameters splits the gradient.
    "split": Rule(lambda eqn, x: _parts(x, eqn.params["axis"], eqn.params["sizes"])),
    "unstack": Rule(_unstack),
}
