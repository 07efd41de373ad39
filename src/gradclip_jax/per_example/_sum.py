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

from .._mesh import device_count, is_explicit, max_over, sum_over, varying_axes, zeros_of_type
from .._types import Array, Scalar
from ..accumulation._split import in_order
from ._lazy import Lazy, is_lazy, scale, stack, written
from ._losses import Outputs, part_of
from ._measure import is_exact, largest, norm_of, square

Groups = dict[Any, list[int]]
Norms = dict[Any, Array]


def norms_and_sums(
    outputs: Outputs,
    params: list[Array],
    groups: Groups,
    factors_of: Callable[[Outputs, Norms], Norms] | None,
) -> tuple[Norms, list[Array]]:
    """Measures each group of leaves of each example, and sums the gradients times their factors.

    Args:
        outputs: of a batch.
        params: what is differentiated by.
        groups: the leaves of each.
        factors_of: from outputs and norms to factors; without it nothing is summed.
    """
    each = jax.typeof(outputs.value)
    axes = varying_axes(outputs.value)
    shards = [varying_axes(x) - axes for x in params]
    run = functools.partial(_norms_and_sums, groups=groups, shards=shards, factors_of=factors_of)
    types = [each, *map(jax.typeof, params)]
    if not any(is_explicit(x.sharding) for x in types):
        return run(outputs)
    # How a product of two sharded factors is sharded is for XLA to say; the sum is as its leaf.
    summed = [] if factors_of is None else [x.sharding for x in types[1:]]
    out = (dict.fromkeys(groups, each.sharding), summed)
    auto: Any = jax.sharding.auto_axes(run, out_sharding=out)
    return auto(outputs)


def _norms_and_sums(
    outputs: Outputs,
    groups: Groups,
    shards: Sequence[frozenset[str]],
    factors_of: Callable[[Outputs, Norms], Norms] | None,
) -> tuple[Norms, list[Array]]:
    # XLA may keep more digits of a bfloat16 factor for one reader than for the other.
    outputs = outputs._replace(grads=list(map(lax.optimization_barrier, outputs.grads)))
    size = outputs.value.shape[0]
    squares = jax.vmap(lambda grads: _squares(grads, groups, shards), axis_size=size)(outputs.grads)
    # At once as many as there are devices: each holds one.
    steps = size // math.gcd(size, device_count(outputs.value)) if size else 0

    def summed(part: Outputs, norms: Norms) -> tuple[Norms, list[Array]]:
        if factors_of is None:
            return norms, []
        factors = factors_of(part, norms)
        of_leaf = {i: factors[k] for k, group in groups.items() for i in group}
        return norms, [weighted_sum(g, of_leaf[i]) for i, g in enumerate(part.grads)]

    def at_once() -> tuple[Norms, list[Array]]:
        return summed(outputs, {k: jax.vmap(norm_of)(x) for k, x in squares.items()})

    def one_by_one() -> tuple[Norms, list[Array]]:
        def add(sums: list[Array], index: Array) -> tuple[list[Array], Norms]:
            part: Outputs = part_of(outputs._replace(aux=None), steps, index)
            some = functools.partial(jax.vmap, axis_size=size // steps)
            part = part._replace(grads=some(lambda grads: list(map(written, grads)))(part.grads))
            norms = some(lambda grads: _exact_norms(grads, groups, shards))(part.grads)
            norms, new = summed(part, norms)
            return [x + y for x, y in zip(sums, new, strict=True)], norms

        zeros = list(map(zeros_of_type, jax.eval_shape(at_once)[1]))
        sums, norms = lax.scan(add, zeros, jnp.arange(steps, dtype=jnp.int32))
        return jax.tree.map(in_order, norms), sums

    exact = functools.reduce(jnp.logical_and, [jax.vmap(is_exact)(x) for x in squares.values()])
    if outputs.weight is not None:
        # An example of weight 0 adds 0 whatever its norm, if only that is finite.
        finite = [jnp.isfinite(x[:, 0]) for x in squares.values()]
        exact |= (outputs.weight <= 0) & functools.reduce(jnp.logical_and, finite)
    return lax.cond(jnp.all(exact), at_once, one_by_one) if size else at_once()


def weighted_sum(value: Array | Lazy, factors: Array) -> Array:
    """Sums over the first axis the gradients times their factors, in 32 bit at least."""
    if is_lazy(value):
        return written(stack(jax.vmap(scale)(value, factors), len(factors), summed=True))
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
        wide = jnp.result_type(jnp.float32, *(squares[i].dtype for i in group))
        parts: dict[frozenset[str], Array] = {}
        for i in group:
            parts[shards[i]] = parts.get(shards[i], 0) + squares[i].astype(wide)
        return sum((sum_over(x, axes) for axes, x in parts.items()), jnp.zeros(2, wide))

    return {k: joined(group) for k, group in groups.items()}


def _exact_norms(
    grads: list[Array], groups: Groups, shards: Sequence[frozenset[str]]
) -> dict[Any, Scalar]:
    """Measures written gradients of one example, scaled so that no square is out of range."""
    tops = [max_over(largest(x), axes) for x, axes in zip(grads, shards, strict=True)]
    top = jnp.max(jnp.stack([x.astype(jnp.result_type(*tops)) for x in tops]))
    _, exponent = jnp.frexp(jnp.where(jnp.isfinite(top), top, 1))
    # In two halves: the power itself may be out of range.
    for part in (exponent // 2, exponent - exponent // 2):
        power = jnp.ldexp(jnp.ones_like(top), -part)
        grads = [x * power.astype(x.dtype) for x in grads]
    squares = _squares(grads, groups, shards)
    return {k: jnp.ldexp(jnp.sqrt(x[0]), exponent) for k, x in squares.items()}
