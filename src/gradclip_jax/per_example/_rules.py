"""Which operations are followed: one rule for each primitive.

A rule takes an equation and its operands, ordinary or lazy, and returns a lazy array, or a list of
them where the equation has several outputs, or None where it is to be computed as it stands. To
follow another primitive, add a line to `RULES`.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ._factors import Axis, Factor, Lazy, Term, as_lazy, is_lazy
from ._layout import add, arrange, cut, keep_if, place, reverse, scale, split_axes
from ._sources import convolution, dot_general, scatter_add


class Rule(NamedTuple):
    """How a primitive is followed.

    Attributes:
        apply: `(equation, *operands)` to what the equation returns, or None.
        follows: positions of the operands in which the operation is linear, so that they may be
            lazy; None for all.
        starts: whether it makes a lazy array of ordinary ones.
    """

    apply: Callable[..., Lazy | list[Lazy] | None]
    follows: Sequence[int] | None = (0,)
    starts: bool = False


def _is_zero(x: Any) -> bool:
    """Says whether a value is known to be zero when the program is traced."""
    known = isinstance(x, (np.ndarray, np.generic, int, float, complex))
    return bool(known and np.all(x == 0))


def _is_scalar(x: Any) -> bool:
    return not is_lazy(x) and np.ndim(x) == 0


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
    labels = {k for term in x.terms for i in axes for k in term.axes[i].labels}
    if any(f.hot in labels for term in x.terms for f in term.factors):
        return None
    left = [i for i in range(len(x.shape)) if i not in axes]
    return arrange(x, eqn.outvars[0].aval.shape, left)


def _broadcast(eqn: Any, x: Any, *_: Any) -> Lazy | None:
    shape, dimensions = tuple(eqn.outvars[0].aval.shape), eqn.params["broadcast_dimensions"]
    if _is_zero(x):
        return Lazy(shape, eqn.outvars[0].aval.dtype)
    if not is_lazy(x) or np.prod(shape) != np.prod(x.shape):
        return None
    sources = {axis: i for i, axis in enumerate(dimensions)}
    return arrange(x, shape, [sources.get(i) for i in range(len(shape))])


def _reshape(eqn: Any, x: Lazy, *_: Any) -> Lazy | None:
    shape = tuple(eqn.outvars[0].aval.shape)
    is_whole = 0 not in shape and all(term.shape() == x.shape for term in x.terms)
    terms = [split_axes(term, shape) for term in x.terms] if is_whole else [None]
    sized = tuple(term for term in terms if term is not None)
    return x.replace(shape=shape, terms=sized) if len(sized) == len(terms) else None


def _cast(eqn: Any, x: Lazy) -> Lazy | None:
    new = eqn.params["new_dtype"]
    kinds = {jnp.issubdtype(kind, jnp.complexfloating) for kind in (new, x.dtype)}
    return x.replace(dtype=np.dtype(new)) if len(kinds) == 1 else None


def _negate(_: Any, x: Lazy) -> Lazy:
    return scale(x, -1)


def _add(_: Any, x: Any, y: Any) -> Lazy | None:
    return add(as_lazy(x), as_lazy(y)) if np.shape(x) == np.shape(y) else None


def _subtract(eqn: Any, x: Any, y: Any) -> Lazy | None:
    return _add(eqn, x, scale(y, -1) if is_lazy(y) else -y)


def _multiply(_: Any, x: Any, y: Any) -> Lazy | None:
    lazy, scalar = (x, y) if is_lazy(x) else (y, x)
    return scale(lazy, scalar) if _is_scalar(scalar) else None


def _divide(_: Any, x: Any, y: Any) -> Lazy | None:
    return scale(x, 1 / jnp.asarray(y)) if _is_scalar(y) else None


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


def _concatenate(eqn: Any, *values: Any) -> Lazy | None:
    aval, axis, offset = eqn.outvars[0].aval, eqn.params["dimension"], 0
    total = Lazy(tuple(aval.shape), aval.dtype)
    for value in map(as_lazy, values):
        start = [offset if i == axis else 0 for i in range(len(aval.shape))]
        total = add(total, place(value, aval.shape, start))
        offset += value.shape[axis]
    return total


def _reverse(eqn: Any, x: Lazy) -> Lazy:
    return functools.reduce(reverse, eqn.params["dimensions"], x)


def _select(_: Any, which: Any, *cases: Any) -> Lazy | None:
    """Chooses by one number between a lazy array and zeros: `lax.select(flag, w, frozen)`."""
    lazy = [i for i, x in enumerate(cases) if is_lazy(x) and x.terms]
    if not _is_scalar(which) or len(lazy) != 1:
        return None
    (i,) = lazy
    if any(not is_lazy(x) and not _is_zero(x) for j, x in enumerate(cases) if j != i):
        return None
    return keep_if(jnp.asarray(which, jnp.int32) == i, cases[i])


def _split(eqn: Any, x: Lazy) -> list[Lazy] | None:
    """Cuts the gradient of joined parameters into theirs."""
    return _parts(x, eqn.params["axis"], eqn.params["sizes"])


def _unstack(eqn: Any, x: Lazy) -> list[Lazy] | None:
    axis = eqn.params["axis"]
    if any(f.hot in term.axes[axis].labels for term in x.terms for f in term.factors):
        return None
    left = [i for i in range(len(x.shape)) if i != axis]
    parts = _parts(x, axis, [1] * x.shape[axis])
    return parts and [arrange(part, eqn.outvars[0].aval.shape, left) for part in parts]


def _parts(x: Lazy, axis: int, sizes: Sequence[int]) -> list[Lazy] | None:
    starts = itertools.accumulate(map(int, sizes[:-1]), initial=0)
    parts = [cut(x, axis, start, int(n)) for start, n in zip(starts, sizes, strict=True)]
    whole = [part for part in parts if part is not None]
    return whole if len(whole) == len(parts) else None


def _update_slice(_: Any, operand: Any, update: Any, *start: Any) -> Lazy | None:
    """Fills one part of zeros: the gradient of a dynamic slice."""
    if not is_lazy(operand) or operand.terms:
        return None
    value, shape = as_lazy(update), operand.shape
    lows = [0] * len(shape)
    for axis, (low, n, size) in enumerate(zip(start, update.shape, shape, strict=True)):
        if n == size:
            continue
        if isinstance(low, (int, np.generic, np.ndarray)):
            lows[axis] = min(max(int(low), 0), size - n)
        elif n == 1:
            value = _place_at(value, size, axis, jnp.asarray(low))
        else:
            return None
    return place(value, shape, lows)


def _place_at(lazy: Lazy, size: int, axis: int, number: Any) -> Lazy:
    """Puts an axis of length one at a traced place along a longer axis."""
    number = jnp.clip(number, 0, size - 1).astype(jnp.int32)
    terms: list[Term] = []
    for term in lazy.terms:
        (hot,) = term.fresh()
        axes = (*term.axes[:axis], Axis((hot,)), *term.axes[axis + 1 :])
        terms.append(Term((Factor(number, (), hot, size), *term.factors), axes))
    shape = (*lazy.shape[:axis], size, *lazy.shape[axis + 1 :])
    return lazy.replace(shape=shape, terms=tuple(terms))


RULES: dict[str, Rule] = {
    # Which operand may be lazy depends on where it comes from.
    "dot_general": Rule(dot_general, (), starts=True),
    "conv_general_dilated": Rule(convolution, (), starts=True),
    "scatter-add": Rule(scatter_add, (0, 2), starts=True),
    "scatter_add": Rule(scatter_add, (0, 2), starts=True),
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
    "select_n": Rule(_select, ()),
    "neg": Rule(_negate),
    "add": Rule(_add, None),
    "add_any": Rule(_add, None),
    "sub": Rule(_subtract, None),
    "mul": Rule(_multiply, ()),  # only by a number
    "div": Rule(_divide, ()),
    "concatenate": Rule(_concatenate, None),
    "split": Rule(_split),
    "unstack": Rule(_unstack),
    "dynamic_update_slice": Rule(_update_slice, (0, 1)),
}
