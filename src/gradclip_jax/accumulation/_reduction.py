"""How the values of several micro-batches become one: mean, sum, max or last, leaf by leaf."""

from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from .._checks import check_choice, leaf_path
from .._mesh import unreduced_axes
from .._tree_checks import broadcast_prefix
from .._types import Array, Scalar, Tree
from ..clipping._scale import wide_dtype

REDUCTIONS: Final = ("mean", "sum", "max", "last")


def check_reduction(function: str, reduction: Any) -> None:
    """Refuses a word that is no reduction; what a function returns is checked when traced."""
    for word in () if callable(reduction) else jax.tree.leaves(reduction):
        check_choice(function, "reduction", word, REDUCTIONS)


def leaf_reductions(
    function: str, reduction: str | Tree | Callable[[str], str], tree: Tree
) -> list[str]:
    """The word for each leaf of a tree of gradients."""
    if not callable(reduction):
        return broadcast_prefix(function, "reduction", reduction, "updates", tree)
    words: list[str] = []
    for path, _ in jax.tree_util.tree_leaves_with_path(tree):
        word: Any = reduction(jax.tree_util.keystr(path, simple=True, separator="/"))
        check_choice(function, leaf_path("reduction of updates", path), word, REDUCTIONS)
        words.append(word)
    return words


def is_summed(word: str) -> bool:
    """Whether a leaf is a gradient: it is multiplied by the weight, and summed over devices."""
    return word in ("mean", "sum")


def identity_of(word: str, dtype: Any) -> Any:
    """What a leaf starts from: combined with it, the first value is itself."""
    if word != "max" or dtype == jnp.bool_:
        return 0
    return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def combine(word: str, total: Array, value: Array, weight: Scalar | None = None) -> Array:
    """The total with one more value in it, not yet rounded to the dtype of the total.

    Selects, never multiplies by zero: a value without weight may be NaN.
    """
    if word == "last" and weight is None:
        return value  # also a random key, which has no arithmetic
    # A weight of 40,000 fits no float16, and 1,001 no bfloat16.
    is_inexact = jnp.issubdtype(total.dtype, jnp.inexact)
    wide = wide_dtype(total.dtype) if is_inexact else total.dtype
    old, new = total.astype(wide), value.astype(wide)
    if is_summed(word):
        new = old + (new if weight is None else new * _factor(weight.astype(wide), new))
    elif word == "max":
        new = jnp.maximum(old, new)
    return new if weight is None else jnp.where(weight == 0, old, new)


def divide(total: Array, weight: Scalar) -> Array:
    """The weighted mean."""
    wide = wide_dtype(total.dtype)
    total, weight = total.astype(wide), weight.astype(wide)
    return total * _factor(1 / weight, total) if unreduced_axes(total) else total / weight


def _factor(weight: Scalar, value: Array) -> Scalar:
    """The weight, typed as what a value that is unreduced may be multiplied by."""
    axes = unreduced_axes(value)
    if not axes:
        return weight
    mesh = jax.typeof(value).sharding.mesh
    return jax.sharding.reshard(weight, NamedSharding(mesh, PartitionSpec(reduced=axes)))


def round_to(dtype: Any, x: Array, key: Array | None) -> Array:
    """The value in another dtype; with a key bfloat16 is rounded at random, right in the mean."""
    if x.dtype == dtype:
        return x
    if key is None or dtype != jnp.bfloat16:
        return x.astype(dtype)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    bits += jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    rounded = jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
    # A carry would turn a NaN into a zero.
    return jnp.where(jnp.isfinite(x), rounded, x.astype(dtype))
