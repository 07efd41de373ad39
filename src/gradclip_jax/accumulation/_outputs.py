"""Run micro-batches one after another, and reduce their outputs."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from .._checks import broadcast_prefix, describe, is_traced, leaf_path
from .._errors import type_error
from .._run_if import run_step
from .._types import Array, Scalar, Tree
from .._weighted_sum import REDUCTIONS, WeightedSum
from ..norms._leaves import wide_dtype
from ..norms._mesh import vary, varying_axes, zeros_of_type
from ._split import Split, in_order

AUX_REDUCTIONS: Final = (*REDUCTIONS, "last", "concatenate")
_HINT: Final = (
    "'mean' requires floating-point leaves, 'sum' numbers, 'concatenate' leaves with the same "
    "number of rows for each example, and 'last' accepts every leaf. The default is 'concatenate' "
    "for leaves that grow with the batch, and 'mean' for floating-point scalars."
)

Terms: TypeAlias = tuple[Scalar, Tree, list[Array]]
"""Value, gradients and averaged auxiliary outputs of a micro-batch, multiplied by its scale."""


def run_micro_batches(
    micro_batch: Callable[[Array, Scalar], tuple[Any, Tree]],
    start: WeightedSum,
    like: Sequence[Any],
    names: Sequence[str],
    scales: Array,
    split: Split,
) -> tuple[WeightedSum, list[Array | None]]:
    """Return the sum of the `Terms` of all micro-batches, and the other auxiliary outputs.

    `micro_batch(index, scale)` returns `(value, aux)` and gradients that are multiplied by the
    scale. `like` are the shapes of the leaves of aux, and `names` their reductions; each leaf is
    reduced inside the loop, except for rows, which are concatenated. Averaged leaves are part of
    the sum, and None in the list. The sum counts the micro-batches of nonzero scale.
    """
    leaves = list(zip(names, like, strict=True))

    def add(x: tuple[Array, Scalar], carry: Tree) -> tuple[Tree, Tree]:
        (index, scale), (sums, kept, count) = x, carry
        (value, aux), grads = micro_batch(index, scale)
        found = list(zip(names, jax.tree.leaves(aux), strict=True))

        def scaled(x: Array) -> Array:
            return x.astype(wide_dtype(x.dtype)) * scale

        terms = scaled(value), grads, [scaled(x) for name, x in found if name == "mean"]
        is_added = (count >= 0) & (scale != 0)  # not a constant (see `summand`)
        sums = sums.add(terms, None, is_added, is_zeroed=True)
        new = [_kept(name, x, old) for (name, x), old in zip(found, kept, strict=True)]
        rows = [x if name == "concatenate" else None for name, x in found]
        return rows, (sums, new, count + 1)

    def step(carry: Tree, x: tuple[Array, Scalar]) -> tuple[Tree, Tree]:
        is_real = x[0] < split.real if is_traced(split.real) else True
        rows, carry = run_step(is_real, functools.partial(add, x), carry)
        return carry, rows

    zeros = [zeros_of_type(x, _sum_dtype(name, x)) for name, x in leaves]
    kept = [x if name in ("sum", "last") else None for name, x in zip(names, zeros, strict=True)]
    first = jax.tree.map(lambda x: vary(x, varying_axes(scales)), (start, kept, jnp.int32(0)))
    indices = jnp.arange(split.num_run)
    (sums, kept, _), rows = lax.scan(step, first, (indices, scales[: split.num_run]))
    for i, (name, x) in enumerate(leaves):
        if name == "concatenate":
            kept[i] = in_order(_padded(rows[i], x, split), split.rows_per_example(x.shape))
    return sums, kept


def _kept(name: str, x: Array, old: Array | None) -> Array | None:
    """Return the next value of an auxiliary output that is summed, or the last one."""
    if old is None:
        return None
    return old + x.astype(old.dtype) if name == "sum" else jnp.asarray(x).astype(old.dtype)


def _sum_dtype(name: str, x: Any) -> Any:
    """Return the dtype of a reduced output; sums of small integers are those of `jnp.sum`."""
    if name != "sum" or jnp.issubdtype(x.dtype, jnp.inexact):
        return x.dtype
    return jax.eval_shape(jnp.sum, jax.ShapeDtypeStruct((), x.dtype)).dtype


def _padded(stack: Array, like: Any, split: Split) -> Array:
    """Append zeros for the micro-batches that are known not to run."""
    if split.num_run == split.parts:
        return stack
    zeros = lax.broadcast(zeros_of_type(like), (split.parts - split.num_run,))
    return jnp.concatenate([stack, vary(zeros, varying_axes(stack))])


def aux_reductions(
    reduction: Tree, split: Split, aux: Tree, whole_aux: Callable[[], Tree]
) -> list[str]:
    """Return the reduction of each leaf of the auxiliary output."""
    leaves = jax.tree.leaves_with_path(aux)
    if not leaves:
        return []
    given = broadcast_prefix("aux_reduction", reduction, "aux", aux, is_leaf=lambda x: x is None)
    needs_whole = any(name in (None, "concatenate") for name in given)
    whole = jax.tree.leaves(whole_aux() if needs_whole else aux)
    names: list[str] = []
    for name, (path, leaf), full in zip(given, leaves, whole, strict=True):
        num_rows = split.parts * leaf.shape[0] if split.rows_per_example(leaf.shape) else -1
        is_supported = {
            "mean": jnp.issubdtype(leaf.dtype, jnp.inexact),
            "sum": jnp.issubdtype(leaf.dtype, jnp.number),
            "concatenate": full.shape == (num_rows, *leaf.shape[1:]),
            "last": True,
        }
        if name is None and is_supported["concatenate"]:
            name = "concatenate"
        is_number = leaf.shape == full.shape == () and jnp.issubdtype(leaf.dtype, jnp.floating)
        if name is None and is_number:
            name = "mean"
        if name is None or not is_supported[name]:
            rule = "a reduction that supports every leaf of aux"
            got = f"{name!r} for {describe(leaf)} at {leaf_path('aux', path)}"
            raise type_error("aux_reduction", rule, got, _HINT)
        names.append(name)
    return names
