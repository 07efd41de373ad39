"""What a function returns for micro-batches, put together to what it returns for the batch."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._checks import describe, leaf_path
from .._devices import summand
from .._errors import type_error, value_error
from .._mesh import unreduced_axes, vary, varying_axes, zeros_of_type
from .._tree_checks import broadcast_prefix
from .._types import FLOAT32, Array, Scalar, Tree
from ._reduction import (
    REDUCTIONS,
    accumulator_dtype,
    as_weight,
    combine,
    divide,
    identity_of,
    is_summed,
    map_reduced,
)
from ._split import in_order, run_if_real

NAME: Final = "microbatched_value_and_grad"
AUX_REDUCTIONS: Final = (*REDUCTIONS, "concatenate")
_DTYPES: Final[dict[str, tuple[Any, ...]]] = {
    "mean": (jnp.inexact,),
    "sum": (jnp.number,),
    "max": (jnp.floating, jnp.integer, jnp.bool_),
}
_HINT: Final = (
    f"Pass `aux_reduction`, a prefix tree of {', '.join(map(repr, AUX_REDUCTIONS))} and, for what "
    "its shape decides, None."
)


class Outputs(NamedTuple):
    """What a micro-batch, or a batch, gives; or the shapes of it.

    Attributes:
        value: float[].
        grads: as `jax.value_and_grad` returns them.
        aux: None without.
        weight: [], None without.
    """

    value: Any
    grads: Tree
    aux: Tree
    weight: Any


@dataclasses.dataclass(frozen=True)
class LeafReduction:
    """How one leaf is put together.

    Attributes:
        name: one of `AUX_REDUCTIONS`.
        is_weighted: whether it is multiplied by the weight, and left out if that is 0.
        dtype: what it is added up in.
        holds_weight: whether that was done before.
    """

    name: str
    is_weighted: bool
    dtype: Any
    holds_weight: bool = False

    def start(self, shape: Any, parts: int, axes: frozenset[str], if_empty: float) -> Array:
        """The total before the first micro-batch, varying over the axes; or room for all rows."""
        zeros = vary(zeros_of_type(shape, self.dtype), axes)
        if self.name == "concatenate":
            return lax.broadcast(zeros, (parts,))
        is_kept = self.name == "last" and self.is_weighted
        first = if_empty if is_kept else identity_of(self.name, self.dtype)
        return zeros if first == 0 else zeros + first

    def add(self, total: Array, x: Any, weight: Scalar | None, index: Array) -> Array:
        """The total with one micro-batch in it."""
        x = jnp.asarray(x)  # aux may be a number
        weight = weight if self.is_weighted and not self.holds_weight else None
        if self.name != "concatenate":
            return combine(self.name, total, x, weight)
        x = x if weight is None else combine("sum", jnp.zeros_like(x), x, weight)
        return lax.dynamic_update_index_in_dim(total, x, index, 0)

    def finish(
        self, total: Array, shape: Any, divisor: Scalar, has_run: Array | bool, if_empty: float
    ) -> Array:
        """The result for the batch, in the dtype of a micro-batch."""
        out = in_order(total) if self.name == "concatenate" else total
        if self.name == "max":  # without a micro-batch, the total is -inf or the smallest integer
            out = jnp.where(has_run, out, jnp.full_like(out, if_empty if self.is_weighted else 0))
        if self.is_weighted and self.name in ("mean", "concatenate"):
            out = divide(out, divisor)
        return out if out.dtype == shape.dtype else out.astype(shape.dtype)


def output_reductions(
    shapes: Outputs,
    parts: int,
    grad_names: Sequence[str],
    grad_dtypes: Sequence[Any],
    aux_names: Sequence[str],
    *,
    holds_weight: bool,
) -> Outputs:
    """The reduction of each leaf; a single micro-batch is not averaged, as that would round.

    `holds_weight` is about value and gradient.
    """

    def reduction(name: str, leaf: Any, dtype: Any = FLOAT32, *, is_derived: bool = False) -> Any:
        is_weighted = is_derived or name == "mean"
        if parts == 1 and not (is_derived and name == "sum"):
            name = "last"
        kept = leaf.dtype
        if is_summed(name) and jnp.issubdtype(kept, jnp.inexact):
            kept = accumulator_dtype(kept, dtype)
        return LeafReduction(name, is_weighted, kept, is_derived and holds_weight)

    derived = functools.partial(reduction, is_derived=True)
    return Outputs(
        value=derived("mean", shapes.value),
        grads=map_reduced(derived, grad_names, shapes.grads, grad_dtypes),
        aux=map_reduced(reduction, aux_names, shapes.aux),
        weight=jax.tree.map(functools.partial(reduction, "sum"), shapes.weight),
    )


def whole_batch(
    micro_batch: Callable[[Array], Outputs],
    reductions: Outputs,
    shapes: Outputs,
    parts: int,
    real: Any,
    if_empty: float,
) -> Outputs:
    """Runs one real micro-batch after the other, and puts together what they give.

    Value and gradient are `if_empty`, 0 or NaN, if no micro-batch has a weight.
    """
    # A total varies over the devices over which the weights do.
    arrays = [x for x in (shapes.weight, real) if hasattr(x, "dtype")]
    axes = frozenset[str]().union(*map(varying_axes, arrays))

    def step(carry: Any, index: Array) -> tuple[Any, None]:
        def add(carry: Any) -> Any:
            totals, total_weight = carry
            outputs = micro_batch(index)
            weight = as_weight(outputs.weight)
            is_added = total_weight >= 0 if weight is None else weight != 0

            def kept(x: Any) -> Any:
                return x if unreduced_axes(x) else summand(x, is_added)

            if weight is None or reductions.value.holds_weight:
                outputs = outputs._replace(grads=jax.tree.map(kept, outputs.grads))
            if reductions.value.holds_weight:
                outputs = outputs._replace(value=kept(outputs.value))
            totals = jax.tree.map(
                lambda r, total, x: r.add(total, x, weight, index), reductions, totals, outputs
            )
            return totals, total_weight + (1 if weight is None else weight)

        return run_if_real(real, index, add, carry), None

    totals = jax.tree.map(lambda r, x: r.start(x, parts, axes, if_empty), reductions, shapes)
    first = (totals, vary(jnp.float32(0), axes))
    (totals, total_weight), _ = lax.scan(step, first, jnp.arange(parts))
    has_weight = total_weight > 0
    divisor = jnp.where(has_weight, total_weight, 1 - if_empty)
    has_run = True if real is None else jnp.asarray(real) > 0

    def finish(reduction: LeafReduction, total: Array, shape: Any) -> Array:
        is_filled = has_weight if reduction.is_weighted else has_run
        return reduction.finish(total, shape, divisor, is_filled, if_empty)

    return jax.tree.map(finish, reductions, totals, shapes)


def aux_reductions(
    reduction: Any, parts: int, aux: Tree, whole_aux: Callable[[], Tree]
) -> list[str]:
    """The reduction of each leaf of aux: the given one, or else by its shape."""
    leaves = jax.tree.leaves_with_path(aux)
    if parts == 1:
        return ["last"] * len(leaves)
    given = broadcast_prefix("aux_reduction", reduction, "aux", aux, is_leaf=lambda x: x is None)
    whole = jax.tree.leaves(whole_aux()) if None in given else [None] * len(leaves)

    names: list[str] = []
    for name, (path, leaf), full in zip(given, leaves, whole, strict=True):
        place = leaf_path("aux", path)
        has_dtype = any(jnp.issubdtype(leaf.dtype, x) for x in _DTYPES.get(name, (leaf.dtype,)))
        if not has_dtype or (name == "concatenate" and not leaf.shape):
            rule, got = f"a reduction that {describe(leaf)} has", f"{name!r} for {place}"
            raise type_error("aux_reduction", rule, got, _HINT)
        names.append(name or _default_for(parts, leaf, full, place))
    return names


def _default_for(parts: int, micro: Any, whole: Any, place: str) -> str:
    if micro.shape and whole.shape == (parts * micro.shape[0], *micro.shape[1:]):
        return "concatenate"
    if micro.shape == whole.shape == () and jnp.issubdtype(micro.dtype, jnp.floating):
        return "mean"
    rule = "said for what neither grows along its first axis nor is a floating scalar"
    got = f"{describe(micro)} for a micro-batch and {describe(whole)} for the batch at {place}"
    raise value_error("aux_reduction", rule, got, _HINT)
