"""Rules that evaluate JAX primitives on gradients stored as factors.

A rule takes an equation and its operands, which are ordinary or factored arrays. A rule returns one
factored array per output, or None if the equation must be evaluated with ordinary arrays. Without a
rule, the gradient of a weight is an ordinary array. Each rule is needed by common layers:

| primitive | layers |
| --- | --- |
| `dot_general`, `transpose` | dense layers, attention, `einsum`, recurrent networks |
| `conv_general_dilated` | convolutions: strided, dilated, transposed, grouped |
| `scatter-add` | embeddings, also vmapped ones as in Equinox; expert weights `W[id]` |
| `dynamic_update_slice` | an embedding of one id |
| `broadcast_in_dim` | zeros to which embeddings and loops add |
| `add_any` | tied weights, shared layers, recurrent networks, `scan` |
| `convert_element_type` | layers with `dtype=bfloat16` |
| `sharding_constraint`, `reshard` | Flax `with_partitioning` and explicit sharding |
| `split` | Flax `OptimizedLSTMCell`, which concatenates kernels |
| `concatenate` | Haiku `GRU`, which splits a kernel |
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn, Literal, Var

from .._types import Array
from ._factored import (
    Convolution,
    ConvolutionSpec,
    Factor,
    Factored,
    Term,
    Value,
    as_factored,
    prefers_array,
    product,
)


class PrimitiveRule(NamedTuple):
    """The evaluation rule of a primitive.

    Attributes:
        apply: Function `(equation, *operands) -> outputs` that returns None if the rule does not
            apply.
        follows: Positions of the operands in which the primitive is linear, or a function that
            returns these positions.
        starts: Whether the rule can return a product of factors even if no operand is a product.
    """

    apply: Callable[..., Factored | Convolution | list[Factored] | None]
    follows: Sequence[int] | Callable[[JaxprEqn], Sequence[int]] = (0,)
    starts: bool = False


def aval_of(v: Var | Literal) -> ShapedArray:
    """Return the shape and dtype of a variable or literal."""
    return cast(ShapedArray, v.aval)


# Operations that create factors


def _dot_general(eqn: JaxprEqn, lhs: Array, rhs: Array) -> Factored | None:
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
    return None if prefers_array(lazy) else lazy


def _scatter_add(eqn: JaxprEqn, operand: Value, numbers: Array, updates: Value) -> Factored | None:
    """Represent the gradient of an embedding or of expert weights by rows and row indices."""
    aval, dims = aval_of(eqn.outvars[0]), eqn.params["dimension_numbers"]
    inserted, indexed = dims.inserted_window_dims, dims.scatter_dims_to_operand_dims
    mode, modes = eqn.params["mode"], lax.GatherScatterMode
    is_clipped = mode == modes.CLIP
    # JAX 0.7 promises that the indices of a vmapped slice are in bounds; JAX 0.10 clips them.
    may_be_slice = not inserted and mode in (modes.CLIP, modes.PROMISE_IN_BOUNDS)
    if dims.operand_batching_dims:
        return None
    kept = [i for i in range(aval.ndim) if i not in inserted]
    windows = dict(zip(kept, dims.update_window_dims, strict=True))
    partial = [i for i, k in windows.items() if updates.shape[k] != aval.shape[i]]
    if len(inserted) == 1 and indexed == inserted and not partial:
        (axis,) = inserted
    elif may_be_slice and [updates.shape[windows[i]] for i in partial] == [1]:
        # A vmapped slice of one row. Along the other axes, the only index in bounds is 0.
        (axis,) = partial
        del windows[axis]
    else:
        return None
    numbers = numbers[..., indexed.index(axis)]
    numbers = _row_numbers(numbers, aval.shape[axis], is_clipped)
    total = _rows_at(as_factored(updates), numbers, axis, aval.shape[axis], list(windows.values()))
    return None if total is None or prefers_array(total) else total.add(as_factored(operand))


def _row_numbers(numbers: Array, size: int, is_clipped: bool) -> Array:
    """Clip row indices to the valid range, or replace out-of-range indices by -1."""
    if jnp.iinfo(numbers.dtype).bits < 32:  # int8 or int16 cannot represent all row numbers
        numbers = numbers.astype(jnp.int32)
    if is_clipped:
        return jnp.clip(numbers, 0, size - 1).astype(jnp.int32)
    return jnp.where((numbers >= 0) & (numbers < size), numbers, -1).astype(jnp.int32)


def _rows_at(
    x: Factored, numbers: Array, axis: int, size: int, windows: Sequence[int]
) -> Factored | None:
    """Scatter rows to the indices `numbers` of a new axis; `windows` are the axes of a row."""
    terms: list[Term] = []
    for term in x.terms:
        if term.hot:
            return None
        hot = term.fresh_label()
        labels = [k for i, a in enumerate(term.axes) if i not in windows for k in a]
        rows = Factor(numbers.reshape([term.sizes[k] for k in labels]), tuple(labels), hot, size)
        axes = [term.axes[i] for i in windows]
        axes.insert(axis, (hot,))
        terms.append(Term((rows, *term.factors), tuple(axes)))
    shape = [x.shape[i] for i in windows]
    return Factored((*shape[:axis], size, *shape[axis:]), x.dtype, tuple(terms))


def _added_to(eqn: JaxprEqn) -> Sequence[int]:
    """Return the positions of the operands of a scatter that may be gradients.

    The updates of a scatter with fewer than two window axes are activations, not gradients.
    """
    return (0,) if len(eqn.params["dimension_numbers"].update_window_dims) < 2 else (0, 2)


def _convolution(eqn: JaxprEqn, lhs: Array, rhs: Array) -> Convolution | None:
    """Represent the gradient of a convolution kernel by the images and the output gradients.

    The kernel gradient is itself a convolution of the input images with the output gradient.
    """
    p, aval = eqn.params, aval_of(eqn.outvars[0])
    if p["feature_group_count"] != 1:
        return None
    lhs_spec, rhs_spec, out_spec = p["dimension_numbers"]
    images, grads = lhs.transpose(lhs_spec), rhs.transpose(rhs_spec)
    names = ("window_strides", "rhs_dilation", "lhs_dilation")
    strides, dilation, interior = (tuple(map(int, p[name])) for name in names)
    padding = tuple([(int(low), int(high)) for low, high in p["padding"]])
    spec = ConvolutionSpec(p["batch_group_count"], strides, dilation, interior, padding, out_spec)
    lazy = Convolution(aval.shape, aval.dtype, images, grads, spec)
    return None if prefers_array(lazy) else lazy


# Linear operations on factored gradients


def _broadcast(eqn: JaxprEqn, x: Value, *_: Value) -> Factored | None:
    """Represent zeros as an empty sum, and add axes of length one to factored arrays."""
    aval = aval_of(eqn.outvars[0])
    if not isinstance(x, Factored):
        is_zero = isinstance(x, (np.ndarray, np.generic)) and bool(np.all(x == 0))
        return Factored(aval.shape, aval.dtype) if is_zero else None
    sources = {axis: i for i, axis in enumerate(eqn.params["broadcast_dimensions"])}
    new = x.arrange([sources.get(i) for i in range(aval.ndim)])
    return new if new.shape == aval.shape else None


def _cast(eqn: JaxprEqn, x: Factored | Convolution) -> Factored | Convolution | None:
    # Casts to integers or booleans, and between real and complex, are not linear.
    kind = jnp.complexfloating if jnp.issubdtype(x.dtype, jnp.complexfloating) else jnp.floating
    new = eqn.params["new_dtype"]
    return replace(x, dtype=np.dtype(new)) if jnp.issubdtype(new, kind) else None


def _add(_: JaxprEqn, x: Value, y: Value) -> Factored | None:
    return as_factored(x).add(as_factored(y)) if np.shape(x) == np.shape(y) else None


def _concatenate(eqn: JaxprEqn, *values: Value) -> Factored | None:
    """Represent concatenated arrays as a sum of arrays whose factors are padded with zeros."""
    aval, axis, start = aval_of(eqn.outvars[0]), eqn.params["dimension"], 0
    total = Factored(aval.shape, aval.dtype)
    for value in map(as_factored, values):
        if not value.has_one_label(axis):
            return None
        total = total.add(value.window(axis, -start, aval.shape[axis]))
        start += value.shape[axis]
    return total


def _split(eqn: JaxprEqn, x: Factored) -> list[Factored] | None:
    axis, sizes = eqn.params["axis"], list(map(int, eqn.params["sizes"]))
    if not x.has_one_label(axis):
        return None
    return [x.window(axis, sum(sizes[:i]), n) for i, n in enumerate(sizes)]


def _update_slice(_: JaxprEqn, zeros: Value, update: Value, *start: Array) -> Factored | None:
    """Insert an array into zeros at a traced index, as in the gradient of `lax.dynamic_slice`."""
    is_zero = isinstance(zeros, Factored) and not zeros.terms
    axes = [i for i, n in enumerate(zeros.shape) if n != update.shape[i]]
    if not is_zero or [update.shape[i] for i in axes] != [1]:
        return None
    (axis,), others = axes, [i for i in range(len(zeros.shape)) if i not in axes]
    number = _row_numbers(jnp.asarray(start[axis]), zeros.shape[axis], is_clipped=True)
    return _rows_at(as_factored(update), number, axis, zeros.shape[axis], others)


RULES: dict[str, PrimitiveRule] = {
    "dot_general": PrimitiveRule(_dot_general, (), starts=True),
    "conv_general_dilated": PrimitiveRule(_convolution, (), starts=True),
    # The name depends on the version of JAX.
    **dict.fromkeys(
        ("scatter-add", "scatter_add"), PrimitiveRule(_scatter_add, _added_to, starts=True)
    ),
    "dynamic_update_slice": PrimitiveRule(_update_slice, (0, 1)),
    "broadcast_in_dim": PrimitiveRule(_broadcast, starts=True),
    "transpose": PrimitiveRule(lambda eqn, x: x.arrange(eqn.params["permutation"])),
    "convert_element_type": PrimitiveRule(_cast),
    # Ignore sharding constraints on per-example gradients, because only their sum is sharded.
    **dict.fromkeys(("sharding_constraint", "reshard"), PrimitiveRule(lambda _, x: x)),
    **dict.fromkeys(("add", "add_any"), PrimitiveRule(_add, (0, 1))),
    "concatenate": PrimitiveRule(_concatenate, lambda eqn: range(len(eqn.invars))),
    "split": PrimitiveRule(_split),
}
