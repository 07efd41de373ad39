"""Combine the outputs of micro-batches into the outputs of the whole batch."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from .._checks import broadcast_prefix, describe, leaf_path
from .._devices import summand
from .._errors import type_error, value_error
from .._mesh import max_over, vary, varying_axes, zeros_of_type
from .._types import FLOAT32, Array, Number, Scalar, Tree
from ._reduction import REDUCTIONS, accumulator_dtype, add_weighted, as_weight, divide
from ._split import Split, in_order, rows_per_example, run_if_real

AUX_REDUCTIONS: Final = (*REDUCTIONS, "last", "concatenate")
_DTYPES: Final[dict[str | None, tuple[DTypeLike, ...]]] = {
    "mean": (jnp.inexact,),
    "sum": (jnp.number,),
}
_HINT: Final = (
    "'mean' requires floating-point leaves, 'sum' numbers, 'concatenate' leaves with the same "
    "number of rows for each example, and 'last' accepts every leaf."
)


class BatchOutputs(NamedTuple):
    """Loss, gradient, auxiliary data and weight of a batch, or a property of each of them.

    Attributes:
        value: Value of the loss, a scalar.
        grads: Gradient, as returned by `jax.value_and_grad`.
        aux: Auxiliary data, or None.
        weight: Scalar weight, or None.
    """

    value: Tree
    grads: Tree
    aux: Tree
    weight: Tree


@dataclasses.dataclass(frozen=True)
class LeafReduction:
    """The reduction of one leaf over micro-batches.

    Attributes:
        like: Shape and dtype of the leaf for one micro-batch.
        name: One of `AUX_REDUCTIONS`.
        is_weighted: Whether the leaf is multiplied by the weight, and ignored if the weight is 0.
        dtype: Dtype of the total.
        holds_weight: Whether the leaf is already multiplied by the weight.
        rows_per_example: Number of rows per example, if rows are concatenated.
    """

    like: jax.ShapeDtypeStruct
    name: str
    is_weighted: bool
    dtype: DTypeLike
    holds_weight: bool = False
    rows_per_example: int = 1

    def start(self, parts: int, axes: frozenset[str]) -> Array:
        """Initialize the sum over micro-batches, or the array of all outputs if concatenated."""
        zeros = vary(zeros_of_type(self.like, self.dtype), axes)
        return lax.broadcast(zeros, (parts,)) if self.name == "concatenate" else zeros

    def add(self, total: Array, x: ArrayLike, weight: Scalar | None, index: Array) -> Array:
        """Add a micro-batch to the total."""
        x = jnp.asarray(x)  # aux may be a Python number
        weight = weight if self.is_weighted and not self.holds_weight else None
        if self.name == "concatenate":
            x = x if weight is None else add_weighted(jnp.zeros_like(x), x, weight).astype(x.dtype)
            return lax.dynamic_update_index_in_dim(total, x, index, 0)
        if self.name == "last" and weight is None:
            return x
        if self.name == "last":
            return jnp.where(weight == 0, total, x)
        if not jnp.issubdtype(total.dtype, jnp.inexact):
            return total + x.astype(total.dtype)
        return add_weighted(total, x, weight).astype(total.dtype)

    def finish(
        self, total: Array, divisor: Scalar, has_run: Array | bool, if_empty: Array | float
    ) -> Array:
        """Return the result for the whole batch, in the dtype of the micro-batch results.

        `has_run` is whether at least one micro-batch was combined. If none was, the result of a
        weighted leaf is `if_empty`, and 0 otherwise.
        """
        is_rows = self.name == "concatenate"
        out = in_order(total, self.rows_per_example) if is_rows else total
        if self.is_weighted and self.name in ("mean", "concatenate"):
            out = divide(out, divisor)
        elif self.is_weighted and isinstance(if_empty, jax.Array):
            out = jnp.where(has_run, out, if_empty.astype(out.dtype))
        return out if out.dtype == self.like.dtype else out.astype(self.like.dtype)


def output_reductions(
    shapes: BatchOutputs,
    split: Split,
    grad_names: Tree,
    grad_dtype: DTypeLike,
    aux_names: Tree,
    *,
    holds_weight: bool,
) -> BatchOutputs:
    """Return the reduction of each leaf; `holds_weight` applies to value and gradient.

    A single micro-batch is returned without averaging, to avoid rounding.
    """

    def reduction(
        name: str,
        leaf: jax.ShapeDtypeStruct,
        dtype: DTypeLike = FLOAT32,
        *,
        is_derived: bool = False,
    ) -> LeafReduction:
        is_weighted = is_derived or name == "mean"
        if split.parts == 1 and not (is_derived and name == "sum"):
            name = "last"
        total = leaf.dtype
        if name in REDUCTIONS and jnp.issubdtype(total, jnp.inexact):
            total = accumulator_dtype(total, dtype)
        rows = rows_per_example(leaf.shape[0], split.sizes) if name == "concatenate" else 1
        return LeafReduction(leaf, name, is_weighted, total, is_derived and holds_weight, rows)

    derived = functools.partial(reduction, is_derived=True)
    weight = shapes.weight
    return BatchOutputs(
        value=derived("mean", shapes.value),
        grads=jax.tree.map(functools.partial(derived, dtype=grad_dtype), grad_names, shapes.grads),
        aux=jax.tree.map(reduction, aux_names, shapes.aux),
        weight=None if weight is None else reduction("sum", weight),
    )


def whole_batch(
    micro_batch: Callable[[Array], BatchOutputs],
    reductions: BatchOutputs,
    shapes: BatchOutputs,
    parts: int,
    real: Number | None,
    *,
    drops_nonfinite: bool,
) -> BatchOutputs:
    """Run the micro-batches sequentially, and combine their outputs.

    If no micro-batch has a positive weight, value and gradient are 0, or NaN if `drops_nonfinite`
    and a micro-batch was dropped.
    """
    rules, structure = jax.tree.flatten(reductions)
    holds_weight = reductions.value.holds_weight
    # Totals vary over the same mesh axes as the weights.
    axes = frozenset[str]().union(*map(varying_axes, jax.tree.leaves((shapes.weight, real))))

    def step(carry: Tree, index: Array) -> tuple[Tree, None]:
        def add(carry: Tree) -> Tree:
            totals, total_weight, dropped = carry
            outputs = micro_batch(index)
            if drops_nonfinite:
                outputs, is_dropped = _without_nonfinite(outputs)
                dropped |= is_dropped
            weight = as_weight(outputs.weight)
            is_added = total_weight >= 0 if weight is None else weight != 0
            if weight is None or holds_weight:
                kept = functools.partial(summand, is_added=is_added)
                value = kept(outputs.value) if holds_weight else outputs.value
                outputs = outputs._replace(value=value, grads=jax.tree.map(kept, outputs.grads))
            columns = zip(rules, totals, jax.tree.leaves(outputs), strict=True)
            totals = [rule.add(total, x, weight, index) for rule, total, x in columns]
            return totals, total_weight + (1 if weight is None else weight), dropped

        return run_if_real(real, index, add, carry), None

    totals = [rule.start(parts, axes) for rule in rules]
    first = totals, vary(jnp.float32(0), axes), vary(jnp.array(False), axes)
    (totals, total_weight, dropped), _ = lax.scan(step, first, jnp.arange(parts))
    has_weight = total_weight > 0
    has_run = True if real is None else jnp.asarray(real) > 0
    if_empty = jnp.where(dropped, jnp.nan, jnp.float32(0)) if drops_nonfinite else 0
    divisor = jnp.where(has_weight, total_weight, 1 - if_empty)
    out = [
        rule.finish(total, divisor, has_weight if rule.is_weighted else has_run, if_empty)
        for rule, total in zip(rules, totals, strict=True)
    ]
    return jax.tree.unflatten(structure, out)


def _without_nonfinite(out: BatchOutputs) -> tuple[BatchOutputs, Array]:
    """Set the weight of a micro-batch to 0 if it is non-finite on any device.

    Also return whether this changed the weight.
    """
    weight = jnp.asarray(out.weight)
    flags = [~jnp.isfinite(x).all() for x in jax.tree.leaves((weight, out.value, out.grads))]
    is_bad = functools.reduce(jnp.logical_or, flags)
    is_bad = max_over(is_bad.astype(jnp.int32), varying_axes(is_bad)) > 0
    return out._replace(weight=jnp.where(is_bad, 0, weight)), is_bad & (weight != 0)


def aux_reductions(reduction: Tree, split: Split, aux: Tree, whole_aux: Callable[[], Tree]) -> Tree:
    """Return a tree with the reduction of each leaf of the auxiliary output."""
    leaves, structure = jax.tree.flatten_with_path(aux)
    if not leaves and reduction is None:
        return aux
    given = broadcast_prefix("aux_reduction", reduction, "aux", aux, is_leaf=lambda x: x is None)
    if split.parts == 1:  # every reduction returns the only value, but a mean ignores a weight of 0
        defaults = ["mean" if _is_float_scalar(x) else "last" for _, x in leaves]
        names = [name or default for name, default in zip(given, defaults, strict=True)]
        return jax.tree.unflatten(structure, names)
    whole = jax.tree.leaves(whole_aux() if None in given else aux)

    names = []
    for name, (path, leaf), full in zip(given, leaves, whole, strict=True):
        place = leaf_path("aux", path)
        has_dtype = any(jnp.issubdtype(leaf.dtype, x) for x in _DTYPES.get(name, (leaf.dtype,)))
        has_rows = bool(leaf.shape) and rows_per_example(leaf.shape[0], split.sizes) > 0
        if not has_dtype or (name == "concatenate" and not has_rows):
            rule, got = f"a reduction that supports {describe(leaf)}", f"{name!r} for {place}"
            raise type_error("aux_reduction", rule, got, _HINT)
        if name is None:
            grows = has_rows and full.shape == (split.parts * leaf.shape[0], *leaf.shape[1:])
            name = "concatenate" if grows else _default_for(leaf, full, place)
        names.append(name)
    return jax.tree.unflatten(structure, names)


def _is_float_scalar(leaf: jax.ShapeDtypeStruct) -> bool:
    return not leaf.shape and jnp.issubdtype(leaf.dtype, jnp.floating)


def _default_for(micro: jax.ShapeDtypeStruct, whole: jax.ShapeDtypeStruct, place: str) -> str:
    """Return the reduction of a leaf without rows."""
    if _is_float_scalar(micro) and _is_float_scalar(whole):
        return "mean"
    rule = "specified for leaves that are not per-example rows or floating-point scalars"
    got = f"{describe(micro)} at {place}"
    raise value_error("aux_reduction", rule, got, _HINT)
