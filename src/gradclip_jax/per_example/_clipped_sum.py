"""Compute per-example gradient norms and the sum of clipped gradients.

The gradient norms are computed from the factors of the gradients. The clipped gradients are summed
in one contraction, after the smallest factor is multiplied by the clip factor of each example. If
the norm computed from the factors of an example is not accurate enough, its gradient is
materialized and added separately. The method used for an example, and thus its contribution to the
sum, does not depend on other examples.
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
from ..accumulation._split import in_order
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
        """Compute norms from factors, and materialize the gradients whose norms are inaccurate."""
        # Norms and sums must be computed from identically rounded gradients.
        outputs = outputs._replace(grads=list(map(fusion_barrier, outputs.grads)), aux=None)
        norms, is_accurate = self.norms_from_factors(outputs)
        operands = outputs, norms, is_accurate
        if outputs.value.size == 0:
            return self.clipped_sum(*operands)
        branches = self.clipped_sum, self.sums_with_inaccurate
        return lax.cond(is_accurate.all(), *branches, *operands)

    def norms_from_factors(self, outputs: Outputs) -> tuple[list[Array], Array]:
        """Return the norms of each group, and for each example whether they are accurate."""

        def measure(grads: list[Value]) -> list[Array]:
            return self.total([jnp.stack(squared_norm(g)) for g in grads])

        norms: list[Array] = []
        is_accurate = jnp.ones(outputs.value.shape, bool)
        pairs = jax.vmap(measure, axis_size=outputs.value.size)(outputs.grads)
        for total, error in map(jnp.transpose, pairs):
            norm, is_close = norm_of(total, error)
            norms.append(norm)
            # An example with weight 0 and a finite norm contributes 0, whatever its norm is.
            is_accurate &= is_close | (outputs.weight <= 0) & jnp.isfinite(total)
        return norms, is_accurate

    def total(self, of_leaves: Sequence[Array]) -> list[Array]:
        """Sum squared norms and error bounds over the leaves of each group and their shards."""

        def total(group: Sequence[int]) -> Array:
            sums = jnp.zeros(2, wide_dtype(*[of_leaves[i].dtype for i in group]))
            for axes in dict.fromkeys([self.shards[i] for i in group]):
                terms = [of_leaves[i].astype(sums.dtype) for i in group if self.shards[i] == axes]
                sums += sum_over(functools.reduce(jnp.add, terms), axes)
            return sums

        return list(map(total, self.groups))

    def clipped_sum(self, outputs: Outputs, norms: list[Array], is_included: Array) -> SumsAndNorms:
        """Sum the clipped gradients of the included examples, unless only norms are needed."""
        if self.clip_factors is None:
            return [], norms
        is_added = is_included & (outputs.weight > 0)
        of_leaf: dict[int, Array] = {}
        for group, factor in zip(self.groups, self.clip_factors(outputs, norms), strict=True):
            weighted = factor * outputs.weight.astype(factor.dtype)
            of_leaf.update(dict.fromkeys(group, jnp.where(is_added, weighted, 0)))
        return [_weighted_sum(g, of_leaf[i]) for i, g in enumerate(outputs.grads)], norms

    def sums_with_inaccurate(
        self, outputs: Outputs, norms: list[Array], is_accurate: Array
    ) -> SumsAndNorms:
        """Sum the clipped gradients of all examples, and recompute the inaccurate norms.

        Each device materializes the gradient of one example at a time.
        """
        size = outputs.value.size
        num_steps = size // math.gcd(size, device_count(outputs.value))

        def step(sums: list[Array], index: Array) -> SumsAndNorms:
            part = part_of((outputs, norms, is_accurate), num_steps, index)
            branches = _unchanged, self.add_materialized
            return lax.cond(part[2].all(), *branches, sums, *part)

        accurate = outputs._replace(grads=_select(is_accurate, outputs.grads))
        sums, _ = self.clipped_sum(accurate, norms, is_accurate)
        # Unlike a `while_loop`, a scan can be differentiated in reverse mode.
        sums, rows = lax.scan(step, sums, jnp.arange(num_steps, dtype=jnp.int32))
        return sums, list(map(in_order, rows))

    def add_materialized(
        self, sums: list[Array], outputs: Outputs, norms: list[Array], is_accurate: Array
    ) -> SumsAndNorms:
        """Materialize gradients, and add the examples with inaccurate norms to the sums."""
        materialize = jax.vmap(self.materialize, axis_size=outputs.value.size)
        grads, exact = materialize(outputs.grads)
        pairs = zip(norms, exact, strict=True)
        norms = [jnp.where(is_accurate, x, y.astype(x.dtype)) for x, y in pairs]
        is_added = functools.reduce(jnp.logical_and, map(jnp.isfinite, norms), ~is_accurate)
        outputs = outputs._replace(grads=_select(is_added, grads))
        terms, _ = self.clipped_sum(outputs, norms, ~is_accurate)
        return list(map(jnp.add, sums, terms)), norms

    def materialize(self, grads: list[Value]) -> tuple[list[Array], list[Scalar]]:
        """Return the gradients of one example as arrays, and the norm of each group."""
        arrays = list(map(as_wide_array, grads))
        totals = self.total([jnp.stack([sum_squares(x)] * 2) for x in arrays])
        return arrays, [root(x[0], x[0]) for x in totals]


def _unchanged(sums: list[Array], _: Outputs, norms: list[Array], __: Array) -> SumsAndNorms:
    """Return the sums and norms of examples whose norms are accurate."""
    return sums, norms


def _select(keep: Array, grads: Sequence[Value]) -> list[Value]:
    """Select zeros for the gradients of examples outside the mask, because NaN times 0 is NaN."""
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
