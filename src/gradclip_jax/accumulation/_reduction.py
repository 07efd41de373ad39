"""Accumulation of micro-batches, with a reduction and a dtype for each leaf."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import DTypeLike

from .._checks import (
    broadcast_prefix,
    check_choice,
    check_dtype,
    check_same_structure,
    describe,
    is_float0,
    is_function,
    is_scalar,
    is_traced,
    leaf_path,
)
from .._errors import type_error, value_error
from .._leaves import wide_dtype
from .._mesh import (
    factor_for,
    memory_of,
    reduce_over_devices,
    reduced_axes,
    reshard_like,
    sharding_with,
    unreduced_axes,
)
from .._rounding import rounded
from .._run_if import Flag
from .._types import Array, Number, Path, Scalar, Tree

Weight: TypeAlias = Array | np.float32
"""The weight of a micro-batch; NumPy scalars are known at trace time."""

SUMMED: Final = ("mean", "sum")
"""Reductions that multiply each micro-batch by its weight and add the products."""

REDUCTIONS: Final = (*SUMMED, "max", "last")


class _Choice(NamedTuple):
    """An argument that is one value, a prefix tree of values, or a function of a leaf's path.

    Attributes:
        argument: Name of the argument.
        check: Function `(argument, value)` that raises if the value is invalid.
    """

    argument: str
    check: Callable[[str, Any], None]

    def check_given(self, given: Any) -> None:
        """Raise for an invalid value; results of a function are checked at trace time."""
        entries = [] if is_function(given) else jax.tree.leaves_with_path(given)
        for path, value in entries if given is not None else [((), None)]:
            self.check(leaf_path(self.argument, path), value)

    def as_tree(self, given: Any, like: str, tree: Tree) -> Tree:
        """Return a tree with the value for each leaf of `tree`."""
        structure = jax.tree.structure(tree)
        if isinstance(given, (str, np.dtype)):
            return jax.tree.unflatten(structure, [given] * structure.num_leaves)
        if not is_function(given):
            values = broadcast_prefix(self.argument, given, like, tree)
            return jax.tree.unflatten(structure, values)

        def value_at(path: Path, leaf: Array) -> Any:
            value = given(jax.tree_util.keystr(path, simple=True, separator="/"))
            self.check(f"{self.argument}({leaf_path(like, path)})", value)
            return value

        return jax.tree.map_with_path(value_at, tree)


REDUCTION: Final = _Choice("reduction", functools.partial(check_choice, choices=REDUCTIONS))
DTYPE: Final = _Choice("accumulator_dtype", check_dtype)


def accumulator_dtype(kind: DTypeLike, dtype: DTypeLike) -> DTypeLike:
    """Return the accumulator dtype for gradients of dtype `kind`; 64-bit dtypes are kept."""
    if jnp.finfo(kind).bits == 64:
        return kind
    return wide_dtype(kind, dtype) if jnp.issubdtype(kind, jnp.complexfloating) else dtype


def as_weight(weight: Any) -> Weight | None:
    """Convert a weight to float32[], as a NumPy scalar unless it is a JAX array."""
    if weight is None:
        return None
    rule, hint = "a real scalar >= 0", "Pass the number of examples or tokens in the micro-batch."
    if not is_scalar(weight, jnp.floating, jnp.integer, jnp.bool_):
        raise type_error("weight", rule, describe(weight), hint)
    is_array = isinstance(weight, jax.Array)
    value = weight.astype(jnp.float32) if is_array else np.float32(weight)
    if not is_traced(value) and float(value) < 0:
        raise value_error("weight", rule, repr(weight), hint)
    return value


def has_micro_batch(flush: Flag | bool | None, weight: Number | None) -> Flag:
    """Return whether a call of `update` passes a gradient; `flush` passes zeros of weight 0."""
    if flush is None or weight is None:
        return np.True_
    return ~((np.bool_(flush) if isinstance(flush, bool) else flush) & (weight == 0))


def identity_of(reduction: str, dtype: DTypeLike) -> float:
    """Return the identity element of a reduction."""
    if reduction != "max" or dtype == jnp.bool_:
        return 0
    return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def combine(
    reduction: str,
    total: Array,
    value: Array,
    weight: Weight | None = None,
    key: Array | None = None,
) -> Array:
    """Combine a total with one more value; with a key, round bfloat16 sums stochastically.

    A value of weight 0 is masked instead of multiplied by 0, because it may be NaN.
    """
    if reduction == "last" and weight is None:
        new = value  # random keys do not support arithmetic
    else:
        # float16 cannot represent a weight of 70,000, and bfloat16 cannot represent 1,001.
        is_inexact = jnp.issubdtype(total.dtype, jnp.inexact)
        wide = wide_dtype(total.dtype) if is_inexact else total.dtype
        old, new = total.astype(wide), value.astype(wide)
        if reduction in SUMMED:
            new = old + (new if weight is None else new * factor_for(new, weight.astype(wide)))
        elif reduction == "max":
            new = jnp.maximum(old, new)
        new = new if weight is None else jnp.where(weight == 0, old, new)
    if key is not None:
        return rounded(total.dtype, new, key)
    return new if new.dtype == total.dtype else new.astype(total.dtype)


def divide(total: Array, weight: Scalar) -> Array:
    """Return the weighted mean, in the dtype of the total or wider."""
    wide = wide_dtype(total.dtype)
    total, weight = total.astype(wide), weight.astype(wide)
    return total * factor_for(total, 1 / weight) if unreduced_axes(total) else total / weight


def params_of(params: Tree) -> Tree:
    """Return the parameters that receive gradients; for `optax.lookahead` the fast ones."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params


def accumulator_like(params: Tree, dtype: Tree | Callable[[str], DTypeLike]) -> Tree:
    """Return an empty accumulator, with the dtype from `accumulator_dtype` for each leaf.

    The accumulator of an integer parameter, whose gradient is float0, is an unused scalar. The
    accumulator is unreduced over the same mesh axes as the gradients.
    """

    def zeros(dtype: DTypeLike, param: Array) -> Array:
        kind = jnp.result_type(param)
        if not jnp.issubdtype(kind, jnp.inexact):
            return jnp.zeros((), dtype)
        kind, axes = accumulator_dtype(kind, dtype), reduced_axes(param)
        if not axes:
            return jnp.zeros_like(param, kind)
        return lax.full(param.shape, 0, kind, sharding=sharding_with(param, unreduced=axes))

    return jax.tree.map(zeros, DTYPE.as_tree(dtype, "params", params), params)


def check_matches_accumulator(updates: Tree, acc: Tree) -> None:
    """Raise if gradients cannot be added to the accumulator; float0 leaves may have any shape."""
    if jax.tree.leaves(updates) and not jax.tree.leaves(acc):
        hint = "Convert the state of `every=1` with `convert_state`."
        raise value_error("state", "a state with an accumulator", "one without", hint)
    check_same_structure(updates, acc)
    given = jax.tree.leaves_with_path(updates)
    for (path, grad), total in zip(given, jax.tree.leaves(acc), strict=True):
        if is_float0(grad):
            continue
        ours, theirs = unreduced_axes(total), unreduced_axes(grad)
        if ours != theirs:
            rule = f"unreduced over {sorted(ours)}, like the accumulator"
            got = f"a leaf unreduced over {sorted(theirs)} at {leaf_path('updates', path)}"
            hint = "Pass parameters to `init` with the same `reduced` axes as in the loss."
            raise type_error("updates", rule, got, hint)
        ours, theirs = memory_of(total), memory_of(grad)
        if ours != theirs:
            rule = f"in the memory of the accumulator, {ours}"
            got = f"a leaf in {theirs} at {leaf_path('updates', path)}"
            hint = "Move one of them inside the step with `jax.device_put`; see docs/sharding.md."
            raise type_error("updates", rule, got, hint)


def check_unreduced(**given: object) -> None:
    """Raise for options that require a sum over devices in every micro-step."""
    for argument, value in given.items():
        if value is not None:
            rule = "omitted if gradients are unreduced over a mesh axis"
            hint = "Sum gradients over devices first, or remove `reduced` from the parameters."
            raise type_error(argument, rule, value, hint)


class MicroBatch(NamedTuple):
    """The gradients that one call of `update` adds to the accumulator.

    Attributes:
        grads: Gradients of the micro-batch.
        reductions: Tree with the reduction of each leaf.
        weight: Weight, float32[]; None means 1.
        key: Random key for stochastic rounding of sums and means; None to round to nearest.
    """

    grads: Tree
    reductions: Tree
    weight: Weight | None = None
    key: Array | None = None


def add_micro_batch(acc: Tree, micro_batch: MicroBatch, is_first: Array | bool) -> Tree:
    """Add a micro-batch to the accumulator; the first micro-batch of a window overwrites it.

    Old values are overwritten instead of multiplied by 0, because they may be NaN.
    """
    keys = _keys_of_leaves(micro_batch.key, acc)

    def add(reduction: str, total: Array, grad: Array) -> Array:
        key = next(keys)
        if is_float0(grad):
            return total
        identity = jnp.full_like(total, identity_of(reduction, total.dtype))
        start = jnp.where(is_first, identity, total)
        new = combine(reduction, start, jnp.asarray(grad), micro_batch.weight, key)
        return reshard_like(new, total)

    return jax.tree.map(add, micro_batch.reductions, acc, micro_batch.grads)


def _keys_of_leaves(key: Array | None, tree: Tree) -> Iterator[Array | None]:
    """Return a random key for each leaf; None if there is no key."""
    if key is None:
        return itertools.repeat(None)
    return iter(jax.random.split(key, len(jax.tree.leaves(tree))))  # one split for all leaves


def window_gradient(
    acc: Tree, micro_batch: MicroBatch, total_weight: Scalar, inner_state: Tree = ()
) -> Tree:
    """Return the accumulated gradient, summed over devices, with float0 leaves restored."""
    key = micro_batch.key
    if key is not None:  # differs from the keys of the sums
        key = jax.random.fold_in(key, len(jax.tree.leaves(acc)))
    keys = _keys_of_leaves(key, acc)

    def read(reduction: str, total: Array, grad: Array) -> Array:
        key = next(keys)
        if is_float0(grad) or reduction != "mean":
            return grad if is_float0(grad) else total
        mean = divide(total, total_weight)
        return mean.astype(total.dtype) if key is None else rounded(total.dtype, mean, key)

    totals = reduce_over_devices(acc, inner_state)
    return jax.tree.map(read, micro_batch.reductions, totals, micro_batch.grads)


def only_gradient(micro_batch: MicroBatch, inner_state: Tree) -> Tree:
    """Return the gradient of a single micro-batch, without a cast to another dtype."""
    weight = micro_batch.weight

    def read(reduction: str, grad: Array) -> Array:
        if is_float0(grad) or reduction != "sum" or weight is None:
            return grad
        return combine("sum", jnp.zeros_like(grad), grad, weight)

    grads = reduce_over_devices(micro_batch.grads, inner_state)
    return jax.tree.map(read, micro_batch.reductions, grads)
