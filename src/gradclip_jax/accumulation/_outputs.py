"""Combine the outputs of micro-batches into the outputs of the whole batch."""

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
from .._mesh import unreduced_axes, vary, varying_axes, zeros_of_type
from .._types import FLOAT32, Array, Number, Scalar, Tree
from ._reduction import (
    REDUCTIONS,
    SUMMED,
    accumulator_dtype,
    as_weight,
    combine,
    divide,
    identity_of,
)
from ._split import in_order, run_if_real

AUX_REDUCTIONS: Final = (*REDUCTIONS, "concatenate")
_DTYPES: Final[dict[str | None, tuple[DTypeLike, ...]]] = {
    "mean": (jnp.inexact,),
    "sum": (jnp.number,),
    "max": (jnp.floating, jnp.integer, jnp.bool_),
}
_HINT: Final = (
    "'mean' requires floating-point leaves, 'max' real leaves, 'concatenate' leaves with a batch "
    "axis, and 'last' accepts every leaf."
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


class LeafReduction(NamedTuple):
    """The reduction of one leaf over micro-batches.

    Attributes:
        name: One of `AUX_REDUCTIONS`.
        is_weighted: Whether the leaf is multiplied by the weight, and ignored if the weight is 0.
        dtype: Dtype of the total.
        holds_weight: Whether the leaf is already multiplied by the weight.
    """

    name: str
    is_weighted: bool
    dtype: DTypeLike
    holds_weight: bool = False

    def start(self, shape: jax.ShapeDtypeStruct, parts: int, axes: frozenset[str]) -> Array:
        """Initialize the sum over micro-batches, or the array of all outputs if concatenated."""
        zeros = zeros_of_type(shape, self.dtype)
        zeros = vary(zeros, axes) if axes else zeros
        if self.name == "concatenate":
            return lax.broadcast(zeros, (parts,))
        first = identity_of(self.name, self.dtype)
        return zeros if first == 0 else zeros + first

    def add(self, total: Array, x: ArrayLike, weight: Scalar | None, index: Array) -> Array:
        """Add a micro-batch to the total."""
        x = jnp.asarray(x)  # aux may be a Python number
        weight = weight if self.is_weighted and not self.holds_weight else None
        if self.name != "concatenate":
            return combine(self.name, total, x, weight)
        x = x if weight is None else combine("sum", jnp.zeros_like(x), x, weight)
        return lax.dynamic_update_index_in_dim(total, x, index, 0)

    def finish(
        self,
        total: Array,
        shape: jax.ShapeDtypeStruct,
        divisor: Scalar,
        has_run: Array | bool,
        if_empty: Array | float,
    ) -> Array:
        """Return the result for the whole batch, in the dtype of the micro-batch results.

        `has_run` is whether at least one micro-batch was combined. If none was, the result of a
        weighted leaf is `if_empty`, and 0 otherwise.
        """
        out = in_order(total) if self.name == "concatenate" else total
        if self.is_weighted and self.name in ("mean", "concatenate"):
            out = divide(out, divisor)
        elif self.name == "max" or (self.is_weighted and isinstance(if_empty, jax.Array)):
            # The initial total of a maximum is -inf or the smallest integer.
            empty = jnp.full_like(out, if_empty if self.is_weighted else 0)
            out = jnp.where(has_run, out, empty)
        return out if out.dtype == shape.dtype else out.astype(shape.dtype)


def output_reductions(
    shapes: BatchOutputs,
    parts: int,
    grad_names: Tree,
    grad_dtypes: Tree,
    aux_names: Tree,
    *,
    holds_weight: bool,
) -> BatchOutputs:
    """Return the reduction of each leaf.

    A single micro-batch is returned without averaging, to avoid rounding. `holds_weight` applies to
    value and gradient.
    """

    def reduction(
        name: str,
        leaf: jax.ShapeDtypeStruct,
        dtype: DTypeLike = FLOAT32,
        *,
        is_derived: bool = False,
    ) -> LeafReduction:
        is_weighted = is_derived or name == "mean"
        if parts == 1 and not (is_derived and name == "sum"):
            name = "last"
        total = leaf.dtype
        if name in SUMMED and jnp.issubdtype(total, jnp.inexact):
            total = accumulator_dtype(total, dtype)
        return LeafReduction(name, is_weighted, total, is_derived and holds_weight)

    derived = functools.partial(reduction, is_derived=True)
    weight = shapes.weight
    return BatchOutputs(
        value=derived("mean", shapes.value),
        grads=jax.tree.map(derived, grad_names, shapes.grads, grad_dtypes),
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
    is_nan_if_ignored: bool,
) -> BatchOutputs:
    """Run the micro-batches sequentially, and combine their outputs.

    If no micro-batch has a positive weight, value and gradient are 0, or NaN if `is_nan_if_ignored`
    and at least one micro-batch ran.
    """
    leaves, structure = jax.tree.flatten(shapes)
    rules = structure.flatten_up_to(reductions)
    holds_weight = reductions.value.holds_weight
    # Totals vary over the same mesh axes as the weights.
    arrays = [x for x in (shapes.weight, real) if hasattr(x, "dtype")]
    axes = frozenset[str]().union(*map(varying_axes, arrays))

    def step(carry: Tree, index: Array) -> tuple[Tree, None]:
        def add(carry: Tree) -> Tree:
            totals, total_weight = carry
            outputs = micro_batch(index)
            weight = as_weight(outputs.weight)
            is_added = total_weight >= 0 if weight is None else weight != 0
            if weight is None or holds_weight:
                kept = functools.partial(_kept, is_added)
                value = kept(outputs.value) if holds_weight else outputs.value
                outputs = outputs._replace(value=value, grads=jax.tree.map(kept, outputs.grads))
            columns = zip(rules, totals, structure.flatten_up_to(outputs), strict=True)
            totals = [rule.add(total, x, weight, index) for rule, total, x in columns]
            return totals, total_weight + (1 if weight is None else weight)

        return run_if_real(real, index, add, carry), None

    pairs = zip(rules, leaves, strict=True)
    totals = [rule.start(x, parts, axes) for rule, x in pairs]
    first = totals, vary(jnp.float32(0), axes)
    (totals, total_weight), _ = lax.scan(step, first, jnp.arange(parts))
    has_weight = total_weight > 0
    has_run = True if real is None else jnp.asarray(real) > 0
    if_empty = jnp.where(has_run, jnp.nan, jnp.float32(0)) if is_nan_if_ignored else 0
    divisor = jnp.where(has_weight, total_weight, 1 - if_empty)
    out = [
        rule.finish(total, x, divisor, has_weight if rule.is_weighted else has_run, if_empty)
        for rule, total, x in zip(rules, totals, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, out)


def _kept(is_added: Array, x: Array) -> Array:
    return x if unreduced_axes(x) else summand(x, is_added)


def aux_reductions(reduction: Tree, parts: int, aux: Tree, whole_aux: Callable[[], Tree]) -> Tree:
    """Return a tree with the reduction of each leaf of the auxiliary output."""
    leaves, structure = jax.tree.flatten_with_path(aux)
    if not leaves and reduction is None:
        return aux
    given = broadcast_prefix("aux_reduction", reduction, "aux", aux, is_leaf=lambda x: x is None)
    if parts == 1:  # every reduction returns the only value, but a mean ignores a weight of 0
        defaults = ["mean" if _is_float_scalar(x) else "last" for _, x in leaves]
        names = [name or default for name, default in zip(given, defaults, strict=True)]
        return jax.tree.unflatten(structure, names)
    whole = jax.tree.leaves(whole_aux() if None in given else aux)

    names = []
    for name, (path, leaf), full in zip(given, leaves, whole, strict=True):
        place = leaf_path("aux", path)
        has_dtype = any(jnp.issubdtype(leaf.dtype, x) for x in _DTYPES.get(name, (leaf.dtype,)))
        if not has_dtype or (name == "concatenate" and not leaf.shape):
            rule, got = f"a reduction that supports {describe(leaf)}", f"{name!r} for {place}"
            raise type_error("aux_reduction", rule, got, _HINT)
        names.append(name or _default_for(parts, leaf, full, place))
    return jax.tree.unflatten(structure, names)


def _is_float_scalar(leaf: jax.ShapeDtypeStruct) -> bool:
    return not leaf.shape and jnp.issubdtype(leaf.dtype, jnp.floating)


def _default_for(
    parts: int, micro: jax.ShapeDtypeStruct, whole: jax.ShapeDtypeStruct, place: str
) -> str:
    if micro.shape and whole.shape == (parts * micro.shape[0], *micro.shape[1:]):
        return "concatenate"
    if _is_float_scalar(micro) and _is_float_scalar(whole):
        return "mean"
    rule = "specified for leaves that are not per-example rows or floating-point scalars"
    got = f"{describe(micro)} at {place}"
    raise value_error("aux_reduction", rule, got, _HINT)
