"""The running sum of a window of micro-batches: added to in place, never poisoned."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from .._checks import error_message, is_float0, leaf_path
from .._mesh import (
    is_unreduced,
    memory_of,
    reduce_over_devices,
    reduced_axes,
    reshard_like,
    sharding_with,
    unreduced_axes,
)
from .._tree_checks import check_same_structure
from .._types import Array, Scalar, Tree
from ._reduction import DTYPE, accumulator_dtype, combine, divide, identity_of, map_reduced


def params_of(params: Tree) -> Tree:
    """The parameters that have gradients: of the two copies of `optax.lookahead` the fast one."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params


def accumulator_like(function: str, params: Tree, dtype: Any) -> Tree:
    """Zeros to add gradients up in, of the dtype that `accumulator_dtype` says for each leaf.

    An integer parameter, whose gradient is float0, gets an idle scalar. Where gradients stay
    unreduced over mesh axes, so do the zeros.
    """

    def zeros(dtype: Any, param: Any) -> Array:
        kind = jnp.result_type(param)
        if not jnp.issubdtype(kind, jnp.inexact):
            return jnp.zeros((), dtype)
        kind, axes = accumulator_dtype(kind, dtype), reduced_axes(param)
        if not axes:
            return jnp.zeros_like(param, kind)
        return lax.full(param.shape, 0, kind, sharding=sharding_with(param, unreduced=axes))

    return map_reduced(zeros, DTYPE.of_leaves(function, dtype, "params", params), params)


def check_matches_accumulator(function: str, updates: Tree, acc: Tree) -> None:
    """Refuses gradients unlike what they are added to; a float0 leaf may have its own shape."""
    check_same_structure(function, "updates", updates, "params", acc)
    given = jax.tree_util.tree_leaves_with_path(updates)
    for (path, grad), total in zip(given, jax.tree.leaves(acc), strict=True):
        if is_float0(grad):
            continue
        ours, theirs = (sorted(unreduced_axes(x)) for x in (total, grad))
        if ours != theirs:
            rule = f"unreduced over {ours}, as the parameters that `init` was given say"
            got = f"a leaf unreduced over {theirs} at {leaf_path('updates', path)}"
            hint = "Give `init` the parameters with the `reduced` axes that the loss sees."
            raise TypeError(error_message(function, "updates", rule, got, hint))
        ours, theirs = map(memory_of, (total, grad))
        if ours != theirs:
            rule = f"in the memory of the accumulator, {ours}"
            got = f"a leaf in {theirs} at {leaf_path('updates', path)}"
            hint = "Move one of them inside the step with `jax.device_put`: docs/sharding.md."
            raise TypeError(error_message(function, "updates", rule, got, hint))


class MicroBatch(NamedTuple):
    """What is added to a window.

    Attributes:
        grads: the gradients.
        reductions: the reduction of each leaf.
        weight: float32[]; None counts as one.
        key: rounds the sum stochastically; None does not.
    """

    grads: Tree
    reductions: Sequence[str]
    weight: Any = None
    key: Array | None = None


def add_micro_batch(acc: Tree, micro_batch: MicroBatch, is_first: Array | bool) -> Tree:
    """The sum with a micro-batch in it, begun anew if that is the first of a window.

    What the last window left behind may be NaN.
    """
    keys: Iterator[Any] = itertools.repeat(None)
    if micro_batch.key is not None:  # at once: a key for each leaf by itself is a kernel of its own
        keys = iter(jax.random.split(micro_batch.key, len(jax.tree.leaves(acc))))

    def add(reduction: str, total: Array, grad: Any) -> Array:
        key = next(keys)
        if is_float0(grad):
            return total
        identity = jnp.full_like(total, identity_of(reduction, total.dtype))
        start = jnp.where(is_first, identity, total)
        new = combine(reduction, start, jnp.asarray(grad), micro_batch.weight, key)
        return reshard_like(new, total)

    return map_reduced(add, micro_batch.reductions, acc, micro_batch.grads)


def window_gradient(
    acc: Tree, micro_batch: MicroBatch, total_weight: Scalar, inner_state: Any = ()
) -> Tree:
    """The gradient of the window, summed over devices; a float0 leaf is that of the micro-batch."""

    def read(reduction: str, total: Array, grad: Any) -> Any:
        if is_float0(grad) or reduction != "mean":
            return grad if is_float0(grad) else total
        return divide(total, total_weight).astype(total.dtype)

    totals = reduce_over_devices(acc, inner_state)
    return map_reduced(read, micro_batch.reductions, totals, micro_batch.grads)


def spent_accumulator(acc: Tree, window: Tree, *, is_measured: bool) -> Tree:
    """What is left of the accumulator after the step that reads the window: anything.

    Where XLA makes an array of the gradient, the accumulator has room for it: 0 N of scratch, not
    1. On a CPU it always does, on a GPU and a TPU where the gradient is measured before the step
    reads it. An optimizer alone adds within its kernels: 8 N moved, not 9 (JAX 0.10.2, H100).
    """
    if is_unreduced(acc):
        return acc
    window = jax.tree.map(lambda x, room: room if is_float0(x) else x, window, acc)
    if is_measured:
        return window
    return lax.platform_dependent(
        acc, window, cpu=lambda acc, window: window, default=lambda acc, window: acc
    )


def only_gradient(micro_batch: MicroBatch, inner_state: Any) -> Tree:
    """The gradient of a window of one micro-batch, bit for bit: no sum is made."""
    weight = micro_batch.weight

    def read(reduction: str, grad: Any) -> Any:
        if is_float0(grad) or reduction != "sum" or weight is None:
            return grad
        return combine("sum", jnp.zeros_like(grad), grad, weight)

    grads = reduce_over_devices(micro_batch.grads, inner_state)
    return map_reduced(read, micro_batch.reductions, grads)
