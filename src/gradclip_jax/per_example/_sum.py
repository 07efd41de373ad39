"""Per-example gradient norms, and the sum of gradients multiplied by their clip factors.

One backward pass computes the factors of every gradient. Their Gram matrices give the norms. The
sum is one contraction, in which the smaller factor is multiplied by the clip factor of each example
(book-keeping: Bu et al. 2022, arXiv 2210.00038). If the Gram matrices of an example are not
accurate enough, its gradient is materialized and added separately. The choice of method for an
example, and therefore its contribution, does not depend on other examples.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._devices import fusion_barrier
from .._mesh import device_count, is_explicit, max_over, sum_over, varying_axes
from .._types import Array, Scalar
from ._lazy import Lazy, as_wide_array
from ._losses import Outputs, part_of
from ._measure import is_exact, norm_of, square

LeafGroups = dict[Any, list[int]]
GroupNorms = dict[Any, Array]


def sums_and_norms(
    outputs: Outputs,
    params: list[Array],
    groups: LeafGroups,
    factors_of: Callable[[Outputs, GroupNorms], GroupNorms] | None,
) -> tuple[list[Array], GroupNorms]:
    """Compute the norm of each group of leaves per example, and the sum of clipped gradients.

    Args:
        outputs: Outputs and gradients of a batch.
        params: Differentiated leaves.
        groups: Mapping from each label to the indices of its leaves.
        factors_of: Function from outputs and norms to clip factors, without weights; None to
            compute only the norms.
    """
    each = jax.typeof(outputs.value)
    axes = varying_axes(outputs.value)
    shards = [varying_axes(x) - axes for x in params]
    run = functools.partial(_sums_and_norms, groups=groups, shards=shards, factors_of=factors_of)
    types = [each, *map(jax.typeof, params)]
    if not any(is_explicit(x.sharding) for x in types):
        return run(outputs)
    # Let XLA choose the sharding of intermediate products. The sum has the sharding of its leaf.
    summed = [] if factors_of is None else [x.sharding for x in types[1:]]
    out = (summed, dict.fromkeys(groups, each.sharding))
    auto: Any = jax.sharding.auto_axes(run, out_sharding=out)
    return auto(outputs)


def _sums_and_norms(
    outputs: Outputs,
    groups: LeafGroups,
    shards: Sequence[frozenset[str]],
    factors_of: Callable[[Outputs, GroupNorms], GroupNorms] | None,
) -> tuple[list[Array], GroupNorms]:
    # The norms and the sum must use identically rounded values.
    outputs = outputs._replace(grads=list(map(fusion_barrier, outputs.grads)))
    size = outputs.value.shape[0]
    squares = jax.vmap(lambda grads: _squares(grads, groups, shards), axis_size=size)(outputs.grads)
    norms = {k: jax.vmap(norm_of)(x) for k, x in squares.items()}
    # An example of weight 0 contributes 0 if its norm is finite, so its error does not matter.
    ignored = outputs.weight <= 0
    exact = [jax.vmap(is_exact)(x) | ignored & jnp.isfinite(x[:, 0]) for x in squares.values()]
    is_exact_example = functools.reduce(jnp.logical_and, exact, jnp.ones(size, bool))

    def summed(part: Outputs, norms: GroupNorms, is_included: Array) -> list[Array]:
        if factors_of is None:
            return []
        factors = factors_of(part, norms)
        is_added = is_included & (part.weight > 0)
        weighted = {k: jnp.where(is_added, x * part.weight, 0) for k, x in factors.items()}
        of_leaf = {i: weighted[k] for k, group in groups.items() for i in group}
        return [weighted_sum(g, of_leaf[i]) for i, g in enumerate(part.grads)]

    def without_rest(grads: list[Any]) -> list[Any]:
        """Set gradients of inexact examples to zero, because zero times NaN is NaN."""
        select = jax.vmap(lambda keep, g: jax.tree.map(lambda x: jnp.where(keep, x, 0), g))
        return select(is_exact_example, grads)

    def at_once(grads: list[Any]) -> list[Array]:
        return summed(outputs._replace(grads=grads), norms, is_exact_example)

    totals = [x[:, 0] for x in squares.values()]
    is_finite = jnp.all(jnp.isfinite(jnp.stack(totals))) if totals else jnp.array(True)
    sums = lax.cond(is_finite, at_once, lambda grads: at_once(without_rest(grads)), outputs.grads)
    if not size:
        return sums, norms

    # Process the inexact examples one at a time on each device.
    steps = size // math.gcd(size, device_count(outputs.value))
    of_steps = is_exact_example.reshape(-1, steps).all(0)
    order, count = jnp.argsort(of_steps), jnp.sum(~of_steps)

    def add_step(carry: Any) -> Any:
        step, norms, sums, errors = carry
        index = order[step]
        bare = outputs._replace(aux=None)
        part, before, known = part_of((bare, norms, is_exact_example), steps, index)
        some = functools.partial(jax.vmap, axis_size=size // steps)
        part = part._replace(grads=some(lambda grads: list(map(as_wide_array, grads)))(part.grads))
        after = some(lambda grads: _exact_norms(grads, groups, shards))(part.grads)
        after = {
            k: jnp.where(known, before[k], x.astype(before[k].dtype)) for k, x in after.items()
        }
        terms = summed(part, after, ~known)
        pairs = [_add_compensated(*row) for row in zip(sums, errors, terms, strict=True)]
        norms = {
            k: x.reshape(-1, steps).at[:, index].set(after[k]).reshape(-1) for k, x in norms.items()
        }
        return step + 1, norms, [x for x, _ in pairs], [x for _, x in pairs]

    carry = jnp.int32(0), norms, sums, [jnp.zeros_like(x) for x in sums]
    _, norms, sums, _ = lax.while_loop(lambda carry: carry[0] < count, add_step, carry)
    return sums, norms


def _add_compensated(total: Array, error: Array, term: Array) -> tuple[Array, Array]:
    """Add with Kahan compensation, whose error does not grow with the number of terms."""
    term = term - error
    new = total + term
    # If the sum is not finite, the compensation would be NaN.
    return new, jnp.where(jnp.isfinite(new), (new - total) - term, 0)


def weighted_sum(value: Array | Lazy, factors: Array) -> Array:
    """Multiply gradients by factors and sum over the first axis, in at least 32 bits."""
    if isinstance(value, Lazy):
        return as_wide_array(jax.vmap(Lazy.scale)(value, factors).stack(len(factors), summed=True))
    value = as_wide_array(value)
    each = factors.astype(value.dtype).reshape(-1, *(1 for _ in value.shape[1:]))
    # Select instead of multiplying by 0, because zero times NaN is NaN.
    return jnp.sum(jnp.where(each == 0, 0, each * value), 0)


def _squares(
    grads: Sequence[Array | Lazy], groups: LeafGroups, shards: Sequence[frozenset[str]]
) -> dict[Any, Array]:
    """Return the squared norm of each group for one example, summed over the shards of a leaf."""
    squares = list(map(square, grads))

    def joined(group: list[int]) -> Array:
        wide = jnp.result_type(jnp.float32, *(squares[i][0].dtype for i in group))
        sums = jnp.zeros(2, wide)
        for axes in dict.fromkeys(shards[i] for i in group):
            pairs = zip(*(squares[i] for i in group if shards[i] == axes), strict=True)
            sums += sum_over(jnp.stack([sum(x.astype(wide) for x in xs) for xs in pairs]), axes)
        return sums

    return {k: joined(group) for k, group in groups.items()}


def _exact_norms(
    grads: list[Array], groups: LeafGroups, shards: Sequence[frozenset[str]]
) -> dict[Any, Scalar]:
    """Compute the norms of one example from materialized gradients.

    Each leaf is divided by its largest magnitude before squaring.
    """
    tops: list[Array] = []
    totals: list[Array] = []
    for x, axes in zip(grads, shards, strict=True):
        sizes, info = jnp.abs(x), jnp.finfo(x.dtype)
        top = max_over(jnp.max(sizes, initial=0), axes)
        # XLA may replace the division by a multiplication with the reciprocal. If the reciprocal
        # is subnormal, it is flushed to 0.
        is_regular = (top >= info.tiny) & jnp.isfinite(top)
        base = jnp.where(is_regular, jnp.minimum(top, info.max / 4), 1)
        tops.append(base)
        totals.append(sum_over(jnp.sum(jnp.square(sizes / base)), axes))

    def joined(group: list[int]) -> Scalar:
        wide = jnp.result_type(jnp.float32, *(tops[i] for i in group))
        bases = jnp.stack([tops[i].astype(wide) for i in group])
        squares = jnp.stack([totals[i].astype(wide) for i in group])
        top = jnp.max(bases)
        return top * jnp.sqrt(jnp.sum(jnp.square(bases / top) * squares))

    return {k: joined(group) for k, group in groups.items()}
