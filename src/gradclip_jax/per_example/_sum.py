"""Norms of each example's gradient, and the sum of the gradients times their factors.

One backward pass gives the factors of every gradient. Norms come from their Gram matrices, and the
sum is one product, of which the smaller factor is multiplied by each example's clip factor
(book-keeping: Bu et al. 2022, arXiv 2210.00038). Where a Gram matrix cannot be trusted, or an
example that is left out holds a NaN, gradients are written down one after the other instead.
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
from ._lazy import Lazy, written
from ._losses import Outputs, part_of, sum_parts
from ._measure import is_exact, norm_of, square

Groups = dict[Any, list[int]]
Norms = dict[Any, Array]


def sums_and_norms(
    outputs: Outputs,
    params: list[Array],
    groups: Groups,
    factors_of: Callable[[Outputs, Norms], Norms] | None,
) -> tuple[list[Array], Norms]:
    """Measures each group of leaves of each example, and sums the gradients times their factors.

    Args:
        outputs: of a batch.
        params: what is differentiated by.
        groups: the leaves of each.
        factors_of: from outputs and norms to factors, without weights; without it
            nothing is summed.
    """
    each = jax.typeof(outputs.value)
    axes = varying_axes(outputs.value)
    shards = [varying_axes(x) - axes for x in params]
    run = functools.partial(_sums_and_norms, groups=groups, shards=shards, factors_of=factors_of)
    types = [each, *map(jax.typeof, params)]
    if not any(is_explicit(x.sharding) for x in types):
        return run(outputs)
    # How a product of two sharded factors is sharded is left open; the sum is as its leaf.
    summed = [] if factors_of is None else [x.sharding for x in types[1:]]
    out = (summed, dict.fromkeys(groups, each.sharding))
    auto: Any = jax.sharding.auto_axes(run, out_sharding=out)
    return auto(outputs)


def _sums_and_norms(
    outputs: Outputs,
    groups: Groups,
    shards: Sequence[frozenset[str]],
    factors_of: Callable[[Outputs, Norms], Norms] | None,
) -> tuple[list[Array], Norms]:
    # The same digits for the norms and for the sum.
    outputs = outputs._replace(grads=list(map(fusion_barrier, outputs.grads)))
    size = outputs.value.shape[0]
    squares = jax.vmap(lambda grads: _squares(grads, groups, shards), axis_size=size)(outputs.grads)
    # At once as many as there are devices: each holds one.
    steps = size // math.gcd(size, device_count(outputs.value))

    def summed(part: Outputs, norms: Norms) -> tuple[list[Array], Norms]:
        if factors_of is None:
            return [], norms
        factors = factors_of(part, norms)
        weighted = {k: jnp.where(part.weight > 0, x * part.weight, 0) for k, x in factors.items()}
        of_leaf = {i: weighted[k] for k, group in groups.items() for i in group}
        return [weighted_sum(g, of_leaf[i]) for i, g in enumerate(part.grads)], norms

    def at_once() -> tuple[list[Array], Norms]:
        return summed(outputs, {k: jax.vmap(norm_of)(x) for k, x in squares.items()})

    def at_index(index: Array) -> tuple[list[Array], Norms]:
        part: Outputs = part_of(outputs._replace(aux=None), steps, index)
        some = functools.partial(jax.vmap, axis_size=size // steps)
        part = part._replace(grads=some(lambda grads: list(map(written, grads)))(part.grads))
        return summed(part, some(lambda grads: _exact_norms(grads, groups, shards))(part.grads))

    # An example of weight 0 adds 0 whatever its norm, if only that is finite.
    masked = outputs.weight <= 0
    exact = [jax.vmap(is_exact)(x) | masked & jnp.isfinite(x[:, 0]) for x in squares.values()]
    one_by_one = functools.partial(sum_parts, at_index, steps)
    return lax.cond(jnp.all(jnp.stack(exact)), at_once, one_by_one) if size else at_once()


def weighted_sum(value: Array | Lazy, factors: Array) -> Array:
    """Sums over the first axis the gradients times their factors, in 32 bit at least."""
    if isinstance(value, Lazy):
        return written(jax.vmap(Lazy.scale)(value, factors).stack(len(factors), summed=True))
    value = written(value)
    each = factors.astype(value.dtype).reshape(-1, *(1 for _ in value.shape[1:]))
    # Selected: zero times a NaN is a NaN.
    return jnp.sum(jnp.where(each == 0, 0, each * value), 0)


def _squares(
    grads: Sequence[Array | Lazy], groups: Groups, shards: Sequence[frozenset[str]]
) -> dict[Any, Array]:
    """Squares each group of leaves of one example, over the devices that share a leaf."""
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
    grads: list[Array], groups: Groups, shards: Sequence[frozenset[str]]
) -> dict[Any, Scalar]:
    """Measures written gradients of one example, scaled so that no square is out of range."""
    tops = list(map(lambda x, axes: max_over(jnp.max(jnp.abs(x), initial=0), axes), grads, shards))
    top = jnp.max(jnp.stack([x.astype(jnp.result_type(*tops)) for x in tops]))
    top = jnp.where(jnp.isfinite(top) & (top > 0), top, 1)
    squares = _squares([x / top.astype(x.dtype) for x in grads], groups, shards)
    return {k: top * jnp.sqrt(x[0]) for k, x in squares.items()}
