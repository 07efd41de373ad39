"""Norms at any granularity: right for every dtype, magnitude, tree and mesh.

A tree is cut into units, and one norm is taken of each. `pooled_norms` serves units made of
whole leaves, or of the layers stacked in them (global, group, leaf), and returns one vector;
`own_norms` serves units inside the leaves (rows, filters), and returns one array a leaf.
How a sum of powers survives overflow and underflow is the business of `_power_sum.py`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import check_axis_name, check_inexact, check_ord, is_float0
from .._mesh import is_joinable, max_over, replication, shard_axes, sum_over
from .._types import Array, AxisName, Scalar, Tree
from ._power_sum import magnitude_rank, power, robust_norms

# Up to this many elements a leaf is cheaper to copy into one long vector, and to reduce there,
# than to compile and launch a reduction of its own.
_SMALL = 65_536


@dataclasses.dataclass(frozen=True)
class Slots:
    """Which entries of the norm vector the leaves of a tree count towards.

    Attributes:
        first: for each leaf, the entry of its first layer.
        stack_axes: for each leaf, how many of its leading axes index layers.
        size: how many entries there are.
    """

    first: tuple[int, ...]
    stack_axes: tuple[int, ...]
    size: int


def one_slot(leaves: Sequence[Any]) -> Slots:
    """All leaves are one unit: the global norm."""
    return Slots((0,) * len(leaves), (0,) * len(leaves), 1)


def leaf_slots(leaves: Sequence[Any], stack_axes: Sequence[int]) -> Slots:
    """Each leaf, or each layer stacked in it, is a unit."""
    layers = [math.prod(np.shape(x)[:axes]) for x, axes in zip(leaves, stack_axes, strict=True)]
    bounds = [0, *np.cumsum(layers).tolist()]
    return Slots(tuple(bounds[:-1]), tuple(stack_axes), int(bounds[-1]))


def global_norm(tree: Tree, *, ord: float = 2.0, axis_name: AxisName = None) -> Scalar:
    """Measures a whole tree: the norm of all its elements as one vector.

    `(sum |x|^ord)^(1/ord)`; the largest magnitude for `ord=inf`.

    | tree | norm |
    | --- | --- |
    | float16 `[300, 400]` | 500, though its squares overflow float16 |
    | float32 `[1e20, 1e20]`, `[3e-23, 4e-23]` | 1.4142e20, 5e-23 |
    | empty, or only `None`, masked or zero-size leaves | 0 |
    | any NaN | NaN |
    | an infinity and no NaN | inf |
    | sharded | that of the whole, see `axis_name` |

    Args:
        tree: floating or complex leaves of any shape, in the unit of the gradients.
        ord: order of the norm, 1, 2, inf or any number > 0.
        axis_name: mapped axes over which every leaf is a shard, where types cannot tell (inside
            `pmap`, or `shard_map` with `check_vma=False`). Elsewhere leave it out.

    Returns:
        The norm, float32[], or float64[] when a leaf is float64 or complex128.

    Raises:
        TypeError: a leaf is an integer or a boolean; the message names its path.
        ValueError: `ord` is not > 0.

    Example:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> float(gcx.global_norm({"w": jnp.float16([300, 0]), "b": jnp.float16([400])}))
        500.0
    """
    check_inexact("global_norm", "tree", tree)
    leaves = counted_leaves(tree)
    return pooled_norms(
        leaves,
        one_slot(leaves),
        check_ord("global_norm", ord),
        check_axis_name("global_norm", axis_name),
    )[0]


def leaf_norms(tree: Tree, *, ord: float = 2.0, axis_name: AxisName = None) -> Tree:
    """Measures each leaf by itself: `global_norm` of every leaf, all in one pass.

    Args:
        tree: floating or complex leaves of any shape, in the unit of the gradients.
        ord: order of the norm, 1, 2, inf or any number > 0.
        axis_name: as for `global_norm`.

    Returns:
        A tree of the same structure, each leaf a scalar of one common dtype: float32, or
        float64 when a leaf is float64 or complex128. A float0 leaf has norm 0.

    Raises:
        TypeError: a leaf is an integer or a boolean; the message names its path.
        ValueError: `ord` is not > 0.

    Example:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> norms = gcx.leaf_norms({"w": jnp.array([3.0, 4.0]), "b": jnp.array(-2.0)})
        >>> float(norms["w"]), float(norms["b"])
        (5.0, 2.0)
    """
    check_inexact("leaf_norms", "tree", tree)
    leaves = counted_leaves(tree)
    slots = leaf_slots(leaves, [0] * len(leaves))
    norms = iter(
        pooled_norms(
            leaves,
            slots,
            check_ord("leaf_norms", ord),
            check_axis_name("leaf_norms", axis_name),
        )
    )
    return jax.tree.map(lambda x: next(norms) if has_norm(x) else jnp.float32(0), tree)


def has_norm(leaf: Any) -> bool:
    """Whether a leaf is measured: a float0, or the integer parameter it belongs to, is not."""
    return not is_float0(leaf) and jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def counted_leaves(tree: Tree) -> list[Array]:
    """The leaves that are measured, in order."""
    return [jnp.asarray(x) for x in jax.tree.leaves(tree) if has_norm(x)]


def norm_dtype(leaves: Iterable[Any]) -> Any:
    """float32, or float64 when a leaf is float64 or complex128."""
    return jnp.float64 if any(jnp.finfo(x.dtype).bits == 64 for x in leaves) else jnp.float32


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def pooled_norms(leaves: list[Array], slots: Slots, ord: float, axis_name: AxisName) -> Array:
    """One norm for each slot, as a vector: one pass, and one all-reduce for all of them."""
    dtype = norm_dtype(leaves)
    pieces = _joined(_pieces(leaves, slots, ord, axis_name), dtype)
    everywhere = frozenset[str]().union(*(piece.shard_axes for piece in pieces))
    if not pieces:
        return jnp.zeros(slots.size, dtype)

    def pool(totals: list[Array], combine: Any) -> Array:
        rows: dict[int, list[Array]] = {}
        for piece, total in zip(pieces, totals, strict=True):
            rows.setdefault(piece.slot, []).append(total.reshape(-1))
        pooled = [combine(jnp.stack(row), axis=0) for _, row in sorted(rows.items())]
        return jnp.concatenate(pooled)

    def largest(of: Callable[[Array], Array]) -> Array:
        tops = [jnp.max(of(piece.values), axis=piece.inner, initial=0) for piece in pieces]
        return max_over(pool(tops, jnp.max), everywhere)

    def power_sums(exponents: list[Array] | None) -> list[Array]:
        totals: list[Array] = []
        for piece in pieces:
            exponent = None if exponents is None else piece.entries(exponents[0])
            total = jnp.sum(power(piece.values, ord, dtype, exponent), axis=piece.inner)
            copies = replication(piece.shard_axes, everywhere)
            totals.append(total if copies == 1 else total / copies)
        return [sum_over(pool(totals, jnp.sum), everywhere)]

    if math.isinf(ord):
        return largest(lambda x: jnp.abs(x.astype(dtype)))
    elements = np.zeros(slots.size)
    for piece in pieces:
        elements[piece.slot : piece.slot + piece.layers] += piece.values.size / piece.layers
    peak_ranks = functools.partial(largest, lambda x: magnitude_rank(x, dtype))
    return robust_norms(power_sums, lambda: [peak_ranks()], ord, [elements])[0]


@functools.partial(jax.jit, static_argnums=(1, 2))
def own_norms(leaves: list[Array], axes: Sequence[tuple[int, ...]], ord: float) -> list[Array]:
    """The norms of the units inside each leaf, over the given axes, which are kept as 1."""
    dtype = norm_dtype(leaves)
    values = [_real(x, ord) for x in leaves]

    def reduced(reduce: Any, of: Callable[..., Array], exponents: list[Any]) -> list[Array]:
        out: list[Array] = []
        for x, leaf, over, exponent in zip(values, leaves, axes, exponents, strict=True):
            pairs = tuple(range(leaf.ndim, x.ndim))  # real and imaginary parts
            scale = exponent if exponent is None else jnp.expand_dims(exponent, pairs)
            total = reduce(of(x, scale), axis=(*over, *pairs), keepdims=True)
            out.append(total.reshape(total.shape[: leaf.ndim]))
        return out

    nothing = [None] * len(leaves)
    largest = functools.partial(jnp.max, initial=0)
    if math.isinf(ord):
        return reduced(largest, lambda x, _: jnp.abs(x.astype(dtype)), nothing)
    return robust_norms(
        lambda exponents: reduced(
            jnp.sum,
            lambda x, k: power(x, ord, dtype, k),
            nothing if exponents is None else exponents,
        ),
        lambda: reduced(largest, lambda x, _: magnitude_rank(x, dtype), nothing),
        ord,
        [math.prod(x.shape[axis] for axis in over) for x, over in zip(leaves, axes, strict=True)],
    )


class _Piece(NamedTuple):
    """Real values that count towards consecutive slots, one for each layer stacked in them."""

    values: Array
    slot: int
    stack_axes: int
    shard_axes: frozenset[str]

    @property
    def inner(self) -> tuple[int, ...]:
        """The axes within a layer."""
        return tuple(range(self.stack_axes, self.values.ndim))

    @property
    def layers(self) -> int:
        return math.prod(self.values.shape[: self.stack_axes])

    def entries(self, vector: Array) -> Array:
        """This piece's entries of a vector with one entry a slot, shaped to broadcast."""
        stack = self.values.shape[: self.stack_axes]
        return vector[self.slot : self.slot + self.layers].reshape(stack + (1,) * len(self.inner))


def _real(x: Array, ord: float) -> Array:
    """Real values with the norms of x: parts on a last axis, or magnitudes."""
    if not jnp.issubdtype(x.dtype, jnp.complexfloating):
        return x
    return jnp.stack([x.real, x.imag], axis=-1) if ord == 2.0 else jnp.abs(x)


def _pieces(
    leaves: Sequence[Array], slots: Slots, ord: float, axis_name: AxisName
) -> Iterable[_Piece]:
    for x, slot, stack_axes in zip(leaves, slots.first, slots.stack_axes, strict=True):
        values = _real(x, ord)
        if 0 in x.shape[:stack_axes]:
            continue
        if is_joinable(x):  # a flat reduction is the most exact, and moves no shard
            values = values.reshape(*x.shape[:stack_axes], -1)
        yield _Piece(values, slot, stack_axes, shard_axes(x, axis_name))


def _joined(pieces: Iterable[_Piece], dtype: Any) -> list[_Piece]:
    """The pieces with the small ones of a slot joined into one, to compile one reduction."""
    small: dict[tuple[int, frozenset[str]], list[Array]] = {}
    joined: list[_Piece] = []
    for piece in pieces:
        values = piece.values
        if piece.stack_axes == 0 and values.size <= _SMALL and is_joinable(values):
            small.setdefault((piece.slot, piece.shard_axes), []).append(values.astype(dtype))
        else:
            joined.append(piece)
    for (slot, axes), parts in small.items():
        joined.append(
            _Piece(parts[0] if len(parts) == 1 else jnp.concatenate(parts), slot, 0, axes)
        )
    return joined
