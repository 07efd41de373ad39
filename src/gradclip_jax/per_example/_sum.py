"""Compute per-example gradient norms and the sum of clipped gradients.

One backward pass computes the factors of every per-example gradient. The gradient norms are
computed from Gram matrices of the factors. The clipped gradients are summed in one contraction,
after the smaller factor is multiplied by the clip factor of each example (book-keeping, Bu et al.
2022, arXiv 2210.00038). If the Gram matrices of an example are not accurate enough, its gradient is
materialized and added separately. The method used for an example, and thus its contribution to the
sum, does not depend on other examples.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from .._devices import device_count, fusion_barrier
from .._leaves import wide_dtype
from .._mesh import is_explicit, max_over, sum_over, varying_axes
from .._types import Array, Scalar, Tree
from ._lazy import Lazy, Value, as_wide_array
from ._losses import Outputs, part_of
from ._measure import norm_of, square

Groups: TypeAlias = Sequence[Sequence[int]]
"""Indices of the leaves of each group; the leaves of a group share one norm."""

Factors: TypeAlias = Callable[[Outputs, list[Array]], list[Array]]
"""Function from outputs and the norms of each group to clip factors, without weights."""


def sums_and_norms(
    outputs: Outputs, params: list[Array], groups: Groups, factors_of: Factors | None
) -> tuple[list[Array], list[Array]]:
    """Compute the per-example norm of each group of leaves and the sum of clipped gradients.

    Args:
        outputs: Outputs and gradients of a batch.
        params: Differentiated leaves.
        groups: Groups of leaves.
        factors_of: Function that computes the clip factors, or None to compute only the norms.
    """
    each = jax.typeof(outputs.value)
    axes = varying_axes(outputs.value)
    shards = [varying_axes(x) - axes for x in params]
    run = functools.partial(_sums_and_norms, groups=groups, shards=shards, factors_of=factors_of)
    types = [each, *map(jax.typeof, params)]
    if not any([is_explicit(x.sharding) for x in types]):
        return run(outputs)
    # Let XLA choose the sharding of intermediate products.
    summed = [] if factors_of is None else [x.sharding for x in types[1:]]
    out = (summed, [each.sharding] * len(groups))
    auto: Any = jax.sharding.auto_axes(run, out_sharding=out)
    return auto(outputs)


def _sums_and_norms(
    outputs: Outputs,
    groups: Groups,
    shards: Sequence[frozenset[str]],
    factors_of: Factors | None,
) -> tuple[list[Array], list[Array]]:
    # Norms and sums must be computed from identically rounded gradients.
    outputs = outputs._replace(grads=list(map(fusion_barrier, outputs.grads)), aux=None)
    size = outputs.value.shape[0]
    measure = functools.partial(_group_squares, groups=groups, shards=shards)
    squares = jax.vmap(measure, axis_size=size)(outputs.grads)
    norms: list[Array] = []
    is_exact_example = is_finite = jnp.ones(size, bool)
    for total, error in squares:
        norm, is_exact = norm_of(total, error)
        norms.append(norm)
        is_finite &= jnp.isfinite(total)
        # An example with weight 0 and a finite norm contributes 0, so its norm may be inaccurate.
        is_exact_example &= is_exact | (outputs.weight <= 0) & jnp.isfinite(total)

    def summed(part: Outputs, norms: list[Array], is_included: Array) -> list[Array]:
        if factors_of is None:
            return []
        is_added = is_included & (part.weight > 0)
        of_leaf: dict[int, Array] = {}
        for group, factor in zip(groups, factors_of(part, norms), strict=True):
            weighted = factor * part.weight.astype(factor.dtype)
            of_leaf.update(dict.fromkeys(group, jnp.where(is_added, weighted, 0)))
        return [_weighted_sum(g, of_leaf[i]) for i, g in enumerate(part.grads)]

    def at_once(grads: list[Value]) -> list[Array]:
        return summed(outputs._replace(grads=grads), norms, is_exact_example)

    def without_rest(grads: list[Value]) -> list[Array]:
        # Set the gradients of inexact examples to zero, because multiplying NaN by 0 returns NaN.
        select = jax.vmap(lambda keep, g: jax.tree.map(lambda x: jnp.where(keep, x, 0), g))
        return at_once(select(is_exact_example, grads))

    sums = lax.cond(is_finite.all(), at_once, without_rest, outputs.grads)

    def exact_norms(grads: list[Value]) -> tuple[list[Array], list[Scalar]]:
        arrays = list(map(as_wide_array, grads))
        return arrays, [_exact_norm(arrays, shards, group) for group in groups]

    if size:
        sums, norms = _add_inexact(outputs, is_exact_example, norms, sums, exact_norms, summed)
    return sums, norms


def _add_inexact(
    outputs: Outputs,
    is_exact_example: Array,
    norms: list[Array],
    sums: list[Array],
    exact_norms: Callable[[list[Value]], tuple[list[Array], list[Scalar]]],
    summed: Callable[[Outputs, list[Array], Array], list[Array]],
) -> tuple[list[Array], list[Array]]:
    """Add the examples with inaccurate norms, materializing one gradient at a time per device."""
    size = outputs.value.shape[0]
    steps = size // math.gcd(size, device_count(outputs.value))
    of_steps = is_exact_example.reshape(-1, steps).all(0)
    order, count = jnp.argsort(of_steps), jnp.sum(~of_steps, dtype=jnp.int32)

    def add_step(carry: Tree) -> Tree:
        step, norms, sums = carry
        index = order[step]
        part, before, known = part_of((outputs, norms, is_exact_example), steps, index)
        grads, after = jax.vmap(exact_norms, axis_size=size // steps)(part.grads)
        pairs = zip(before, after, strict=True)
        after = [jnp.where(known, old, new.astype(old.dtype)) for old, new in pairs]
        rows = zip(norms, after, strict=True)
        norms = [x.reshape(-1, steps).at[:, index].set(row).reshape(-1) for x, row in rows]
        terms = summed(part._replace(grads=grads), after, ~known)
        sums = [_add_compensated(*total, x) for total, x in zip(sums, terms, strict=True)]
        return step + 1, norms, sums

    carry = jnp.int32(0), norms, [(x, jnp.zeros_like(x)) for x in sums]
    _, norms, pairs = lax.while_loop(lambda carry: carry[0] < count, add_step, carry)
    return [total for total, _ in pairs], norms


def _add_compensated(total: Array, error: Array, term: Array) -> tuple[Array, Array]:
    """Add a term with Kahan summation, whose error does not grow with the number of terms."""
    term = term - error
    new = total + term
    # The compensation term would otherwise be NaN for a non-finite sum.
    return new, jnp.where(jnp.isfinite(new), (new - total) - term, 0)


def _weighted_sum(value: Value, factors: Array) -> Array:
    """Multiply per-example gradients by factors and sum over examples in float32 or wider."""
    if isinstance(value, Lazy):
        scaled = jax.vmap(Lazy.scale)(value, factors)
        return as_wide_array(scaled.stack(len(factors), summed=True))
    value = as_wide_array(value)
    each = jnp.expand_dims(factors.astype(value.dtype), range(1, value.ndim))
    # Use `jnp.where` instead of only multiplying by 0, because 0 * NaN is NaN.
    return jnp.sum(jnp.where(each == 0, 0, each * value), 0)


def _group_squares(
    grads: Sequence[Value], groups: Groups, shards: Sequence[frozenset[str]]
) -> list[tuple[Scalar, Scalar]]:
    """Return the squared gradient norm of each group for one example, summed over shards."""
    squares = list(map(square, grads))

    def joined(group: Sequence[int]) -> tuple[Scalar, Scalar]:
        wide = wide_dtype(*[squares[i][0].dtype for i in group])
        sums = jnp.zeros(2, wide)
        for axes in dict.fromkeys([shards[i] for i in group]):
            pairs = zip(*[squares[i] for i in group if shards[i] == axes], strict=True)
            sums += sum_over(jnp.stack([sum([x.astype(wide) for x in xs]) for xs in pairs]), axes)
        return sums[0], sums[1]

    return list(map(joined, groups))


def _exact_norm(
    grads: Sequence[Array], shards: Sequence[frozenset[str]], group: Sequence[int]
) -> Scalar:
    """Compute the norm of materialized leaves, which are scaled to avoid overflow."""
    sizes = [jnp.abs(grads[i]) for i in group]
    wide = wide_dtype(*[x.dtype for x in sizes])
    leaves = [(x.astype(wide), shards[i]) for x, i in zip(sizes, group, strict=True)]
    tops = [max_over(jnp.max(x, initial=0), axes) for x, axes in leaves]
    top, info = functools.reduce(jnp.maximum, tops, jnp.zeros((), wide)), jnp.finfo(wide)
    # XLA may replace division by multiplication with the reciprocal.
    # A subnormal reciprocal would be flushed to 0.
    is_regular = (top >= info.tiny) & jnp.isfinite(top)
    top = jnp.where(is_regular, jnp.minimum(top, info.max / 4), 1)
    return top * jnp.sqrt(sum([sum_over(jnp.sum(jnp.square(x / top)), axes) for x, axes in leaves]))
