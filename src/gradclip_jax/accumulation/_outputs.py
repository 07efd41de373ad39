"""How what a function returns for micro-batches becomes what it returns for the batch."""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp

from .._checks import check_choice, describe, error_message, leaf_path
from .._mesh import vary, varying_axes, zeros_of_type
from .._tree_checks import broadcast_prefix
from .._types import Array, Scalar, Tree
from ..clipping._scale import wide_dtype
from ._reduction import REDUCTIONS, combine, divide, identity_of, round_to
from ._split import in_order

AUX_REDUCTIONS: Final = (*REDUCTIONS, "concatenate")


class Kind(NamedTuple):
    """How one leaf is put together.

    Attributes:
        word: one of `AUX_REDUCTIONS`.
        is_weighted: whether it is multiplied by the weight, and left out if that is 0.
        dtype: what it is added up in.
    """

    word: str
    is_weighted: bool
    dtype: Any

    @property
    def has_rows(self) -> bool:
        """Whether every micro-batch has rows of its own."""
        return self.word == "concatenate"


def first_totals(kinds: Sequence[Kind], shapes: Sequence[Any], weight: Any) -> list[Any]:
    """What leaves start from; None for one that has rows.

    A total varies over the devices over which the weights do.
    """
    axes = frozenset[str]() if weight is None else varying_axes(weight)

    def start(kind: Kind, shape: Any) -> Any:
        if kind.has_rows:
            return None
        zeros = vary(zeros_of_type(shape, kind.dtype), axes)
        return zeros + identity_of("max", kind.dtype) if kind.word == "max" else zeros

    return [start(*pair) for pair in zip(kinds, shapes, strict=True)]


def add_outputs(
    kinds: Sequence[Kind], totals: Sequence[Any], leaves: Sequence[Any], weight: Scalar | None
) -> tuple[list[Any], list[Any]]:
    """The totals with one micro-batch in them, and its rows."""

    def add(kind: Kind, total: Any, x: Any) -> tuple[Any, Any]:
        x = jnp.asarray(x)  # aux may be a number
        factor = weight if kind.is_weighted else None
        if not kind.has_rows:
            return round_to(total.dtype, combine(kind.word, total, x, factor), None), None
        return None, x if factor is None else combine("sum", jnp.zeros_like(x), x, factor)

    pairs = [add(*column) for column in zip(kinds, totals, leaves, strict=True)]
    return [total for total, _ in pairs], [rows for _, rows in pairs]


def batch_outputs(
    kinds: Sequence[Kind],
    totals: Sequence[Any],
    rows: Sequence[Any],
    divisor: Scalar,
    shapes: Sequence[Any],
) -> list[Array]:
    """What the batch as a whole gives, in the dtypes of a micro-batch."""

    def finish(kind: Kind, total: Any, rows: Any, shape: Any) -> Array:
        out = in_order(rows) if kind.has_rows else total
        if kind.word == "mean" or (kind.has_rows and kind.is_weighted):
            out = divide(out, divisor)
        return round_to(shape.dtype, out, None)

    return [finish(*column) for column in zip(kinds, totals, rows, shapes, strict=True)]


def value_kind(parts: int, value: Any) -> Kind:
    """The weighted mean; of a single micro-batch its own value."""
    dtype = wide_dtype(value.dtype)
    return Kind("last" if parts == 1 else "mean", True, dtype)


def aux_kinds(
    function: str, reduction: Any, parts: int, aux: Tree, whole_aux: Callable[[], Tree]
) -> Tree:
    """How each leaf of aux is put together: as it is said, or else as its shape decides."""
    paths, structure = jax.tree_util.tree_flatten_with_path(aux)
    if parts == 1:
        words = ["last"] * len(paths)
    else:
        words = _aux_words(function, reduction, parts, aux, whole_aux)

    def kind_of(word: str, leaf: Any) -> Kind:
        is_sum = word in ("mean", "sum") and jnp.issubdtype(leaf.dtype, jnp.inexact)
        dtype = wide_dtype(leaf.dtype) if is_sum else leaf.dtype
        return Kind(word, word == "mean", dtype)

    leaves = [leaf for _, leaf in paths]
    return jax.tree.unflatten(structure, list(map(kind_of, words, leaves)))


def _aux_words(
    function: str, reduction: Any, parts: int, aux: Tree, whole_aux: Callable[[], Tree]
) -> list[str]:
    given = broadcast_prefix(
        function, "aux_reduction", reduction, "aux", aux, is_leaf=lambda x: x is None
    )
    leaves = jax.tree_util.tree_leaves_with_path(aux)
    whole = jax.tree.leaves(whole_aux()) if None in given else [None] * len(leaves)

    def word_for(word: Any, path: Any, leaf: Any, whole: Any) -> str:
        place = leaf_path("aux", path)
        if word is None:
            return _word_of_shape(function, parts, leaf, whole, place)
        check_choice(function, "aux_reduction", word, AUX_REDUCTIONS)
        if not _allows(word, leaf):
            rule = f"a reduction that {describe(leaf)} has"
            got = f"{word!r} for {place}"
            raise TypeError(error_message(function, "aux_reduction", rule, got, _HINT))
        return word

    columns = (given, leaves, whole)
    return [word_for(word, *leaf, full) for word, leaf, full in zip(*columns, strict=True)]


_HINT: Final = (
    f"Pass `aux_reduction`, a prefix tree of {', '.join(map(repr, AUX_REDUCTIONS))} and, for what "
    "its shape decides, None."
)


def _word_of_shape(function: str, parts: int, micro: Any, whole: Any, place: str) -> str:
    if micro.shape and whole.shape == (parts * micro.shape[0], *micro.shape[1:]):
        return "concatenate"
    if micro.shape == whole.shape == () and jnp.issubdtype(micro.dtype, jnp.floating):
        return "mean"
    rule = "said for what neither grows along its first axis nor is a floating scalar"
    got = f"{describe(micro)} for a micro-batch and {describe(whole)} for the batch at {place}"
    raise ValueError(error_message(function, "aux_reduction", rule, got, _HINT))


def _allows(word: str, leaf: Any) -> bool:
    """Whether a reduction is defined for the dtype and the shape of a leaf."""
    if word == "concatenate":
        return bool(leaf.shape)
    if word == "max":
        is_real = any(jnp.issubdtype(leaf.dtype, kind) for kind in (jnp.floating, jnp.integer))
        return is_real or leaf.dtype == jnp.bool_
    number = {"mean": jnp.inexact, "sum": jnp.number}.get(word)
    return number is None or jnp.issubdtype(leaf.dtype, number)
