"""How the values of several micro-batches become one: the reduction and the dtype of each leaf."""

import contextlib
import functools
from collections.abc import Callable, Generator, Sequence
from contextvars import ContextVar
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import (
    check_choice,
    check_dtype,
    describe,
    error_message,
    is_function,
    is_traced,
    leaf_path,
)
from .._mesh import factor_for, unreduced_axes
from .._rounding import rounded
from .._tree_checks import broadcast_prefix
from .._types import Array, Scalar, Tree
from ..clipping._formula import wide_dtype

REDUCTIONS: Final = ("mean", "sum", "max", "last")
_asked: ContextVar[list[Any] | None] = ContextVar("reductions of init", default=None)


@contextlib.contextmanager
def reductions_of_init() -> Generator[list[Any]]:
    """Collects the reduction of each accumulation whose `init` is called.

    For `convert_state`: a chain is two closures, and no state says what was given to its parts.
    """
    reductions: list[Any] = []
    token = _asked.set(reductions)
    try:
        yield reductions
    finally:
        _asked.reset(token)


def note_reduction(reduction: Any) -> None:
    """Says the reduction of an accumulation to who asks."""
    asked = _asked.get()
    if asked is not None:
        asked.append(reduction)


class _Choice(NamedTuple):
    """An argument that is one value, a prefix tree of them, or a function of the path of a leaf.

    Attributes:
        argument: its name.
        check: `(function, argument, value)`, refuses what is no such value.
    """

    argument: str
    check: Callable[[str, str, Any], None]

    def check_given(self, function: str, given: Any) -> None:
        """Refuses a bad value; what a function returns is checked when traced."""
        entries = [] if is_function(given) else jax.tree_util.tree_leaves_with_path(given)
        for path, value in entries if given is not None else [((), None)]:
            self.check(function, leaf_path(self.argument, path), value)

    def of_leaves(self, function: str, given: Any, like: str, tree: Tree) -> list[Any]:
        """The value of each leaf of a tree."""
        if not is_function(given):
            return broadcast_prefix(function, self.argument, given, like, tree)
        values: list[Any] = []
        for path, _ in jax.tree_util.tree_leaves_with_path(tree):
            values.append(given(jax.tree_util.keystr(path, simple=True, separator="/")))
            place = leaf_path(f"{self.argument} of {like}", path)
            self.check(function, place, values[-1])
        return values


REDUCTION: Final = _Choice("reduction", functools.partial(check_choice, choices=REDUCTIONS))
DTYPE: Final = _Choice("accumulator_dtype", check_dtype)


def map_reduced(fun: Callable[..., Any], choices: Sequence[Any], tree: Tree, *others: Tree) -> Tree:
    """The tree of what `fun(choice, leaf, *counterparts)` makes of each leaf."""
    leaves, structure = jax.tree.flatten(tree)
    columns = zip(choices, leaves, *map(jax.tree.leaves, others), strict=True)
    return jax.tree.unflatten(structure, [fun(*column) for column in columns])


def is_summed(reduction: str) -> bool:
    """Whether a leaf is a gradient: it is multiplied by the weight, and summed over devices."""
    return reduction in ("mean", "sum")


def accumulator_dtype(kind: Any, dtype: Any) -> Any:
    """What gradients of dtype `kind` are added up in: `dtype`, or their own 64 bit."""
    if jnp.finfo(kind).bits == 64:
        return kind
    return wide_dtype(kind, dtype) if jnp.issubdtype(kind, jnp.complexfloating) else dtype


def as_weight(function: str, weight: Any) -> Any:
    """The weight of a micro-batch as float32[], on the host if it is there."""
    if weight is None:
        return None
    rule, hint = "a real scalar >= 0", "Pass the number of examples or tokens in the micro-batch."
    is_array = isinstance(weight, jax.Array)
    is_number = is_array or isinstance(weight, (int, float, np.generic, np.ndarray))
    if not is_number or np.ndim(weight) or not is_real(weight):
        raise TypeError(error_message(function, "weight", rule, describe(weight), hint))
    value = weight.astype(jnp.float32) if is_array else np.float32(weight)
    if not is_traced(value) and float(value) < 0:
        raise ValueError(error_message(function, "weight", rule, repr(weight), hint))
    return value


def is_real(value: Any) -> bool:
    """Whether a number or an array is neither complex nor anything else, such as a key."""
    kind = jnp.result_type(value)
    return any(jnp.issubdtype(kind, real) for real in (jnp.floating, jnp.integer, jnp.bool_))


def identity_of(reduction: str, dtype: Any) -> Any:
    """What a leaf starts from: combined with it, the first value is itself."""
    if reduction != "max" or dtype == jnp.bool_:
        return 0
    return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def combine(
    reduction: str,
    total: Array,
    value: Array,
    weight: Scalar | None = None,
    key: Array | None = None,
) -> Array:
    """The total with one more value in it; with a key, sums in bfloat16 are rounded at random.

    Selects, never multiplies by zero: a value without weight may be NaN.
    """
    if reduction == "last" and weight is None:
        return rounded(total.dtype, value, key)  # also a random key, which has no arithmetic
    # A weight of 40,000 fits no float16, and 1,001 no bfloat16.
    is_inexact = jnp.issubdtype(total.dtype, jnp.inexact)
    wide = wide_dtype(total.dtype) if is_inexact else total.dtype
    old, new = total.astype(wide), value.astype(wide)
    if is_summed(reduction):
        new = old + (new if weight is None else new * factor_for(new, weight.astype(wide)))
    elif reduction == "max":
        new = jnp.maximum(old, new)
    new = new if weight is None else jnp.where(weight == 0, old, new)
    return rounded(total.dtype, new, key)


def divide(total: Array, weight: Scalar) -> Array:
    """The weighted mean, in the dtype of the total or wider."""
    wide = wide_dtype(total.dtype)
    total, weight = total.astype(wide), weight.astype(wide)
    return total * factor_for(total, 1 / weight) if unreduced_axes(total) else total / weight
