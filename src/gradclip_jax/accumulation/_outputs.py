"""Run micro-batches one after another, and reduce their outputs."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from .._checks import is_traced
from .._errors import type_error
from .._format import describe, leaf_path
from .._run_if import run_step
from .._types import Array, Scalar, Tree
from .._weighted_sum import REDUCTIONS, WeightedSum
from ..norms._leaves import wide_dtype
from ..norms._mesh import vary, varying_axes, zeros_of_type
from ..norms._prefix import broadcast_prefix
from ._split import Split, in_order

AUX_REDUCTIONS: Final = (*REDUCTIONS, "last", "concatenate")
_HINT: Final = (
    "'mean' requires floating-point leaves, 'sum' numbers, 'concatenate' leaves with the same "
    "number of rows for each example, and 'last' accepts every leaf. The default is 'concatenate' "
    "for leaves that grow with the batch, and 'mean' for floating-point scalars."
)


class AuxLeaf(NamedTuple):
    """A leaf of the auxiliary output, and how it is reduced over micro-batches.

    Attributes:
        reduction: "mean", "sum", "last" or "concatenate".
        like: Shape and dtype of the leaf in one micro-batch.
    """

    reduction: str
    like: Any

    @property
    def dtype(self) -> DTypeLike:
        """Dtype of the reduced leaf; integers are summed as by `jnp.sum`."""
        if self.reduction != "sum" or jnp.issubdtype(self.like.dtype, jnp.inexact):
            return self.like.dtype
        return jax.eval_shape(jnp.sum, jax.ShapeDtypeStruct((), self.like.dtype)).dtype

    def updated(self, old: Array, x: Array) -> Array:
        """Add a value to the sum for the reduction "sum"; replace the value for "last"."""
        x = jnp.asarray(x).astype(old.dtype)
        return old + x if self.reduction == "sum" else x


class _Carry(NamedTuple):
    """The carry of the loop over micro-batches.

    Attributes:
        sums: Weighted sum of `(value, grads, means)`, where `means` maps the index of each averaged
            leaf of aux to its sum.
        kept: Leaves of aux with the reduction "sum" or "last", by index.
        num_done: Number of micro-batches so far, int32[].
    """

    sums: WeightedSum
    kept: dict[int, Array]
    num_done: Scalar


def run_micro_batches(
    micro_batch: Callable[[Array, Scalar], tuple[tuple[Scalar, Tree], Tree]],
    empty: WeightedSum,
    aux: Sequence[AuxLeaf],
    scales: Array,
    split: Split,
) -> tuple[WeightedSum, dict[int, Array]]:
    """Run all micro-batches, and reduce their outputs inside the loop.

    Leaves of aux are stacked only if their reduction is "concatenate".

    Args:
        micro_batch: Function `(index, scale) -> ((value, aux), grads)`, where `grads` are already
            multiplied by the scale.
        empty: Empty sum of `(value, grads, means)`; see `empty_outputs`.
        aux: Leaves of the auxiliary output.
        scales: Weight of each micro-batch divided by the mean weight, float32[num_parts]; 0 for
            padding and for micro-batches of weight 0.
        split: How the arguments are split.

    Returns:
        The sum over the micro-batches, and a dict from indices to the leaves of aux that are not
        averaged. The weight of the sum is the number of nonzero scales.
    """
    kept = [i for i, leaf in enumerate(aux) if leaf.reduction in ("sum", "last")]
    concatenated = [i for i, leaf in enumerate(aux) if leaf.reduction == "concatenate"]

    def run(index: Array, scale: Scalar, carry: _Carry) -> tuple[dict[int, Array], _Carry]:
        (value, aux_tree), grads = micro_batch(index, scale)
        leaves = jax.tree.leaves(aux_tree)

        def scaled(x: Array) -> Array:
            return x.astype(wide_dtype(x.dtype)) * scale

        terms = scaled(value), grads, {i: scaled(leaves[i]) for i in _averaged(aux)}
        # The first comparison is always true, but XLA does not know this; see `summand`.
        is_added = (carry.num_done >= 0) & (scale != 0)
        new = _Carry(
            sums=carry.sums.add(terms, None, is_added, is_zeroed=True),
            kept={i: aux[i].updated(carry.kept[i], leaves[i]) for i in kept},
            num_done=carry.num_done + 1,
        )
        return {i: leaves[i] for i in concatenated}, new

    def step(carry: _Carry, x: tuple[Array, Scalar]) -> tuple[_Carry, dict[int, Array]]:
        index, scale = x
        is_real = index < split.num_real if is_traced(split.num_real) else True
        rows, carry = run_step(is_real, functools.partial(run, index, scale), carry)
        return carry, rows

    zeros = {i: zeros_of_type(aux[i].like, aux[i].dtype) for i in kept}
    start = _Carry(empty, zeros, jnp.int32(0))
    start = jax.tree.map(lambda x: vary(x, varying_axes(scales)), start)
    xs = jnp.arange(split.num_scanned), scales[: split.num_scanned]
    end, rows = lax.scan(step, start, xs)
    return end.sums, end.kept | {i: _joined(rows[i], aux[i], split) for i in concatenated}


def empty_outputs(
    value: Any, grads: Tree, aux: Sequence[AuxLeaf], grad_dtype: Callable[[DTypeLike], DTypeLike]
) -> WeightedSum:
    """Return an empty `WeightedSum` for the values, gradients and averaged outputs of `fun`.

    `grad_dtype` maps the dtype of a gradient to the dtype of its sum.
    """

    def zeros(like: Any) -> Array:
        return zeros_of_type(like, wide_dtype(like.dtype))

    def zeros_of_grad(like: Any) -> Array:
        return zeros_of_type(like, grad_dtype(like.dtype))

    means = {i: zeros(aux[i].like) for i in _averaged(aux)}
    total = zeros(value), jax.tree.map(zeros_of_grad, grads), means
    return WeightedSum(total, jnp.zeros((), jnp.float32))


def _averaged(aux: Sequence[AuxLeaf]) -> list[int]:
    """Return the indices of the leaves that are averaged."""
    return [i for i, leaf in enumerate(aux) if leaf.reduction == "mean"]


def _joined(rows: Array, leaf: AuxLeaf, split: Split) -> Array:
    """Concatenate rows that are stacked by micro-batch, in the order of the examples.

    The rows of micro-batches that do not run are zeros.
    """
    num_missing = split.num_parts - split.num_scanned
    if num_missing:
        zeros = lax.broadcast(zeros_of_type(leaf.like), (num_missing,))
        rows = jnp.concatenate([rows, vary(zeros, varying_axes(rows))])
    return in_order(rows, split.rows_per_example(leaf.like.shape))


def aux_leaves(
    reduction: Tree, split: Split, aux: Tree, whole_aux: Callable[[], Tree]
) -> list[AuxLeaf]:
    """Return the leaves of the auxiliary output with their reductions, or raise.

    Args:
        reduction: The argument `aux_reduction`.
        split: How the arguments are split.
        aux: Shapes of the auxiliary output of a micro-batch.
        whole_aux: Function that returns the shapes of the auxiliary output of the whole batch.
    """
    places = jax.tree.leaves_with_path(aux)
    if not places:
        return []
    given = broadcast_prefix("aux_reduction", reduction, "aux", aux, is_leaf=lambda x: x is None)
    needs_whole = any(name in (None, "concatenate") for name in given)
    whole_leaves = jax.tree.leaves(whole_aux() if needs_whole else aux)
    leaves: list[AuxLeaf] = []
    for name, (path, like), whole in zip(given, places, whole_leaves, strict=True):
        supported = _supported_reductions(like, whole, split)
        if name is None:
            name = _default_reduction(like, whole, supported)
        if name not in supported:
            rule = "a reduction that supports every leaf of aux"
            got = f"{name!r} for {describe(like)} at {leaf_path('aux', path)}"
            raise type_error("aux_reduction", rule, got, _HINT)
        leaves.append(AuxLeaf(name, like))
    return leaves


def _supported_reductions(like: Any, whole: Any, split: Split) -> list[str]:
    """Return the reductions for a leaf, given its shape in a micro-batch and in the batch."""
    has_rows = split.rows_per_example(like.shape) > 0
    is_supported = {
        "mean": jnp.issubdtype(like.dtype, jnp.inexact),
        "sum": jnp.issubdtype(like.dtype, jnp.number),
        "concatenate": has_rows
        and whole.shape == (split.num_parts * like.shape[0], *like.shape[1:]),
        "last": True,
    }
    return [name for name in AUX_REDUCTIONS if is_supported[name]]


def _default_reduction(like: Any, whole: Any, supported: Sequence[str]) -> str | None:
    """Return the default reduction of a leaf, or None if it has no default."""
    if "concatenate" in supported:
        return "concatenate"
    is_number = like.shape == whole.shape == () and jnp.issubdtype(like.dtype, jnp.floating)
    return "mean" if is_number else None
