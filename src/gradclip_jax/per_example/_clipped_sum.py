"""Compute per-example gradient norms and the sum of clipped gradients.

The gradient norms are computed from the factors of the gradients. The clipped gradients are summed
in one contraction, after the smallest factor is multiplied by the clip factor of each example. If
the norm of an example from its factors is not accurate enough, its gradient is materialized and
added separately. The method used for an example, and thus its contribution to the sum, does not
depend on other examples.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from .._devices import device_count, fusion_barrier
from .._types import Array, Scalar
from ..norms._leaves import wide_dtype
from ..norms._mesh import is_explicit, sum_over, varying_axes
from ._factored import Convolution, Factored, Value, as_wide_array
from ._gram import norm_of, root, squared_norm, sum_squares
from ._loss import Outputs, part_of

ClipFactors: TypeAlias = Callable[[Outputs, list[Array]], list[Array]]
"""Function from outputs and the norms of each group to clip factors, without weights."""


SumsAndNorms: TypeAlias = tuple[list[Array], list[Array]]
"""The clipped sum of each leaf, and the norms of each group of leaves."""


def sums_and_norms(
    outputs: Outputs,
    params: list[Array],
    groups: Sequence[Sequence[int]],
    clip_factors: ClipFactors | None,
) -> SumsAndNorms:
    """Compute the per-example norm of each group of leaves and the sum of clipped gradients.

    Args:
        outputs: Outputs and gradients of a batch.
        params: Differentiated leaves.
        groups: Indices of the leaves of each group.
        clip_factors: Function that computes the clip factors, or None to compute only the norms.
    """
    shards = [varying_axes(x) - varying_axes(outputs.value) for x in params]
    run = _Groups(groups, shards, clip_factors).sums_and_norms
    shardings = [jax.typeof(x).sharding for x in (outputs.value, *params)]
    if not any([is_explicit(x) for x in shardings]):
        return run(outputs)
    # Let XLA choose the sharding of intermediate products.
    summed = [] if clip_factors is None else shardings[1:]
    auto: Any = jax.sharding.auto_axes(run, out_sharding=(summed, shardings[:1] * len(groups)))
    return auto(outputs)


class _Groups(NamedTuple):
    """Groups of leaves that share one norm.

    Attributes:
        groups: Indices of the leaves of each group.
        shards: Mesh axes over which each leaf is sharded inside `shard_map`.
        clip_factors: Function that computes the clip factors, or None to compute only the norms.
    """

    groups: Sequence[Sequence[int]]
    shards: Sequence[frozenset[str]]
    clip_factors: ClipFactors | None

    def sums_and_norms(self, outputs: Outputs) -> SumsAndNorms:
        """Compute norms from factors, and materialize the examples where this is inaccurate."""
        # Norms and sums must be computed from identically rounded gradients.
        outputs = outputs._replace(grads=list(map(fusion_barrier, outputs.grads)), aux=None)
        size = outputs.value.shape[0]

        def measure(grads: list[Value]) -> list[Array]:
            return self.total([jnp.stack(squared_norm(g)) for g in grads])

        norms: list[Array] = []
        is_exact = jnp.ones(size, bool)
        for total, error in map(jnp.transpose, jax.vmap(measure, axis_size=size)(outputs.grads)):
            norm, is_close = norm_of(total, error)
            norms.append(norm)
            # An example with weight 0 and a finite norm contributes 0, so its norm may be inexact.
            is_exact &= is_close | (outputs.weight <= 0) & jnp.isfinite(total)

        def at_once(outputs: Outputs) -> SumsAndNorms:
            return self.clipped_sum(outputs, norms, is_exact), norms

        def one_by_one(outputs: Outputs) -> SumsAndNorms:
            exact = at_once(outputs._replace(grads=_select(is_exact, outputs.grads)))
            return self.add_inexact(outputs, is_exact, exact)

        return lax.cond(is_exact.all(), at_once, one_by_one if size else at_once, outputs)

    def total(self, numbers: Sequence[Array]) -> list[Array]:
        """Sum two numbers of each leaf over the leaves of each group and over their shards."""

        def total(group: Sequence[int]) -> Array:
            sums = jnp.zeros(2, wide_dtype(*[numbers[i].dtype for i in group]))
            for axes in dict.fromkeys([self.shards[i] for i in group]):
                of_axes = [numbers[i].astype(sums.dtype) for i in group if self.shards[i] == axes]
                sums += sum_over(functools.reduce(jnp.add, of_axes), axes)
            return sums

        return list(map(total, self.groups))

    def clipped_sum(self, outputs: Outputs, norms: list[Array], is_included: Array) -> list[Array]:
        """Sum the weighted clipped gradients of the included examples, or return no sums."""
        if self.clip_factors is None:
            return []
        is_added = is_included & (outputs.weight > 0)
        of_leaf: dict[int, Array] = {}
        for group, factor in zip(self.groups, self.clip_factors(outputs, norms), strict=True):
            weighted = factor * outputs.weight.astype(factor.dtype)
            of_leaf.update(dict.fromkeys(group, jnp.where(is_added, weighted, 0)))
        return [_weighted_sum(g, of_leaf[i]) for i, g in enumerate(outputs.grads)]

    def add_inexact(self, outputs: Outputs, is_exact: Array, exact: SumsAndNorms) -> SumsAndNorms:
        """Add the examples with inexact norms, materializing one gradient at a time per device."""
        size = outputs.value.shape[0]
        steps = size // math.gcd(size, device_count(outputs.value))

        def measure(grads: list[Value]) -> tuple[list[Array], list[Scalar]]:
            arrays = list(map(as_wide_array, grads))
            squares = [jnp.stack([sum_squares(x)] * 2) for x in arrays]
            return arrays, [root(x[0], x[0]) for x in self.total(squares)]

        def add(index: Array, carry: SumsAndNorms) -> SumsAndNorms:
            sums, norms = carry
            part, before, known = part_of((outputs, norms, is_exact), steps, index)
            grads, after = jax.vmap(measure, axis_size=size // steps)(part.grads)
            pairs = zip(before, after, strict=True)
            after = [jnp.where(known, x, y.astype(x.dtype)) for x, y in pairs]
            rows = zip(norms, after, strict=True)
            norms = [x.reshape(-1, steps).at[:, index].set(row).reshape(-1) for x, row in rows]
            is_finite = functools.reduce(jnp.logical_and, map(jnp.isfinite, after), ~known)
            part = part._replace(grads=_select(is_finite, grads))
            terms = self.clipped_sum(part, after, ~known)
            return list(map(jnp.add, sums, terms)), norms

        def step(carry: SumsAndNorms, index: Array) -> tuple[SumsAndNorms, None]:
            is_done = is_exact.reshape(-1, steps)[:, index].all()
            return lax.cond(is_done, lambda x: x, functools.partial(add, index), carry), None

        # Unlike a `while_loop`, a scan can be differentiated in reverse mode.
        return lax.scan(step, exact, jnp.arange(steps, dtype=jnp.int32))[0]


def _select(keep: Array, grads: Sequence[Value]) -> list[Value]:
    """Set the gradients of other examples to zero, because multiplying NaN by 0 returns NaN."""
    return jax.vmap(lambda k, g: jax.tree.map(lambda x: jnp.where(k, x, 0), g))(keep, grads)


def _weighted_sum(value: Value, factors: Array) -> Array:
    """Multiply per-example gradients by factors and sum over examples in float32 or wider."""
    if isinstance(value, Convolution):
        return as_wide_array(value.weighted_sum(factors))
    if isinstance(value, Factored):
        scaled = jax.vmap(Factored.scale)(value, factors)
        return as_wide_array(scaled.stack(len(factors), summed=True))
    value = as_wide_array(value)
    factors = factors.astype(value.dtype)
    return jnp.einsum("i,i...->...", factors, value, precision=lax.Precision.HIGHEST)
