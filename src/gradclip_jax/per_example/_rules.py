"""Which operations are followed: one rule for each primitive.

A rule takes an equation and its operands, ordinary or lazy, and returns a lazy array, or None where
the operation is to be computed as it stands. To follow another primitive, add a line to `RULES`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from . import _layout, _sources
from ._factors import Lazy, as_array, as_lazy, is_lazy


class Rule(NamedTuple):
    """How a primitive is followed.

    Attributes:
        apply: `(equation, *operands)` to a lazy array or None.
        follows: positions of the operands in which the operation is linear, so that they may be
            lazy; None for all.
    """

    apply: Callable[..., Lazy | None]
    follows: Sequence[int] | None = (0,)


def _is_zero(x: Any) -> bool:
    """Whether a value is known to be zero when the program is traced."""
    known = isinstance(x, (np.ndarray, np.generic, int, float, complex))
    return bool(known and np.all(x == 0))


def _is_scalar(x: Any) -> bool:
    return not is_lazy(x) and np.ndim(x) == 0


def _lazy_only(apply: Callable[[Any, Lazy], Lazy | None]) -> Callable[..., Lazy | None]:
    """A rule that moves lazy arrays; ordinary ones are moved as they are."""
    return lambda eqn, x: apply(eqn, x) if is_lazy(x) else None


def _broadcast(eqn: Any, x: Any, *_: Any) -> Lazy | None:
    aval = eqn.outvars[0].aval
    if _is_zero(x):
        return Lazy(tuple(aval.shape), aval.dtype)
    if not is_lazy(x):
        return None
    return _layout.expand(x, aval.shape, eqn.params["broadcast_dimensions"])


def _reshape(eqn: Any, x: Any, *_: Any) -> Lazy | None:
    return _layout.reshape(x, eqn.outvars[0].aval.shape) if is_lazy(x) else None


def _cast(eqn: Any, x: Lazy) -> Lazy | None:
    new, old = eqn.params["new_dtype"], x.dtype
    kinds = [jnp.issubdtype(kind, jnp.complexfloating) for kind in (new, old)]
    return x.replace(dtype=np.dtype(new)) if kinds[0] == kinds[1] else None


def _add(_: Any, x: Any, y: Any) -> Lazy | None:
    if not (is_lazy(x) or is_lazy(y)) or np.shape(x) != np.shape(y):
        return None
    return _layout.add(as_lazy(x), as_lazy(y))


def _subtract(eqn: Any, x: Any, y: Any) -> Lazy | None:
    return _add(eqn, x, _layout.scale(y, -1) if is_lazy(y) else -y)


def _multiply(_: Any, x: Any, y: Any) -> Lazy | None:
    if is_lazy(x) and _is_scalar(y):
        return _layout.scale(x, y)
    if is_lazy(y) and _is_scalar(x):
        return _layout.scale(y, x)
    return None


def _divide(_: Any, x: Any, y: Any) -> Lazy | None:
    return _layout.scale(x, 1 / jnp.asarray(y)) if is_lazy(x) and _is_scalar(y) else None


def _pad(eqn: Any, x: Any, padding: Any) -> Lazy | None:
    widths = eqn.params["padding_config"]
    if not _is_zero(padding) or any(low < 0 or high < 0 or inner for low, high, inner in widths):
        return None
    lows = [int(low) for low, _, _ in widths]
    return _layout.place(as_lazy(x), eqn.outvars[0].aval.shape, lows)


def _concatenate(eqn: Any, *values: Any) -> Lazy | None:
    if not any(map(is_lazy, values)):
        return None
    return _layout.concatenate(values, eqn.outvars[0].aval, eqn.params["dimension"])


def _update_slice(eqn: Any, operand: Any, update: Any, *start: Any) -> Lazy | None:
    """Zeros with one part filled: the gradient of a dynamic slice."""
    if not (is_lazy(operand) and not operand.terms):
        return None
    value, shape = as_lazy(update), operand.shape
    lows = [0] * len(shape)
    for axis, (low, n, size) in enumerate(zip(start, update.shape, shape, strict=True)):
        if n == size:
            continue
        if isinstance(low, (int, np.generic, np.ndarray)):
            lows[axis] = min(max(int(low), 0), size - n)
        elif n == 1 and (placed := _layout.place_at(value, size, axis, jnp.asarray(low))):
            value = placed
        else:
            return None
    return _layout.place(value, shape, lows)


def _transpose(eqn: Any, x: Lazy) -> Lazy:
    return _layout.transpose(x, eqn.params["permutation"])


def _sum(eqn: Any, x: Lazy) -> Lazy | None:
    return _layout.sum_axes(x, eqn.params["axes"])


def _squeeze(eqn: Any, x: Lazy) -> Lazy | None:
    return _layout.sum_axes(x, eqn.params["dimensions"])


def _same(_: Any, x: Lazy) -> Lazy:
    return x


def _negate(_: Any, x: Lazy) -> Lazy:
    return _layout.scale(x, -1)


def _dot(eqn: Any, x: Any, y: Any) -> Lazy | None:
    return _sources.dot_general(eqn, x, y)


def _convolution(eqn: Any, x: Any, y: Any) -> Lazy | None:
    return _sources.convolution(eqn, as_array(x), as_array(y))


def _scatter(eqn: Any, operand: Any, numbers: Any, updates: Any) -> Lazy | None:
    return _sources.scatter_add(eqn, operand, as_array(numbers), updates)


RULES: dict[str, Rule] = {
    "dot_general": Rule(_dot, ()),  # which operand may be lazy depends on where it comes from
    "conv_general_dilated": Rule(_convolution, ()),
    "scatter-add": Rule(_scatter, (0, 2)),
    "scatter_add": Rule(_scatter, (0, 2)),
    "transpose": Rule(_lazy_only(_transpose)),
    "reshape": Rule(_reshape),
    "broadcast_in_dim": Rule(_broadcast),
    "squeeze": Rule(_lazy_only(_squeeze)),
    "reduce_sum": Rule(_lazy_only(_sum)),
    "convert_element_type": Rule(_lazy_only(_cast)),
    "reduce_precision": Rule(_lazy_only(_same)),
    "copy": Rule(_lazy_only(_same)),
    "copy_p": Rule(_lazy_only(_same)),
    "name": Rule(_lazy_only(_same)),
    "neg": Rule(_lazy_only(_negate)),
    "add": Rule(_add, None),
    "add_any": Rule(_add, None),
    "sub": Rule(_subtract, None),
    "mul": Rule(_multiply, ()),  # only by a number
    "div": Rule(_divide, ()),
    "pad": Rule(_pad),
    "concatenate": Rule(_concatenate, None),
    "dynamic_update_slice": Rule(_update_slice, (0, 1)),
}
