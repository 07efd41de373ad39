"""Summands of a gradient: the types that put off its sum over devices, and that sum.

Inside `shard_map` a gradient stays on its device if the parameter is typed as varying. Under
explicit axes it does if the parameter is typed as reduced: the gradient is then *unreduced*, a
summand. It is summed once, at the end of a window or a batch.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, reshard

from ._checks import is_float0
from ._mesh import max_over, sum_over, vary, varying_axes
from ._types import Array, Tree

HAS_TYPES: Final = jax.__version_info__ >= (0, 10)
"""Whether this JAX has types for what is reduced and unreduced."""


def sharding_with(x: Any, **axes: frozenset[str]) -> NamedSharding:
    """How an array is sharded, with other `reduced` and `unreduced` axes, or none of them."""
    sharding = jax.typeof(x).sharding
    # With such axes a spec is no longer a sequence of its entries.
    entries = sharding.spec.partitions if HAS_TYPES else sharding.spec
    return NamedSharding(sharding.mesh, PartitionSpec(*entries, **axes))


def reduced_axes(x: Any) -> frozenset[str]:
    """The mesh axes over which a gradient with respect to a value stays unreduced."""
    return frozenset(jax.typeof(x).sharding.spec.reduced) if HAS_TYPES else frozenset()


def unreduced_axes(x: Any) -> frozenset[str]:
    """The mesh axes over which each device holds a summand of the value, under explicit axes."""
    return frozenset(jax.typeof(x).sharding.spec.unreduced) if HAS_TYPES else frozenset()


def is_unreduced(tree: Any) -> bool:
    """Whether each device holds a summand of a leaf."""
    leaves = [x for x in jax.tree.leaves(tree) if hasattr(x, "shape")]
    return any(unreduced_axes(x) for x in leaves if x.dtype != jax.dtypes.float0)


def factor_for(value: Array, factor: Any) -> Any:
    """The factor, typed as what a value that is unreduced may be multiplied by."""
    axes = unreduced_axes(value)
    if not axes:
        return factor
    mesh = jax.typeof(value).sharding.mesh
    return reshard(factor, NamedSharding(mesh, PartitionSpec(reduced=axes)))


def without_reduced_axes(params: Tree) -> Tree:
    """The parameters as an optimizer sees them, whatever their gradients stay unreduced over."""

    def plain(param: Any) -> Any:
        if is_float0(param) or not reduced_axes(param):
            return param
        return reshard(param, sharding_with(param))

    return jax.tree.map(plain, params)


def reduce_over_devices(grads: Tree, inner_state: Any) -> Tree:
    """Unreduced leaves summed over devices, to the sharding of the inner optimizer's state."""
    if not is_unreduced(grads):
        return grads
    structure = jax.tree.structure(grads)

    def is_moment(node: Any) -> bool:
        return jax.tree.structure(node) == structure

    def reduce(grad: Any, *moments: Any) -> Any:
        if is_float0(grad) or not unreduced_axes(grad):
            return grad
        alike = [x for x in moments if np.shape(x) == grad.shape]
        return reshard(grad, sharding_with(alike[0] if alike else grad))

    nodes = jax.tree.leaves(inner_state, is_leaf=is_moment)
    return jax.tree.map(reduce, grads, *filter(is_moment, nodes))


class BatchAxes(NamedTuple):
    """The mesh axes over which a batch is spread, as far as types say.

    Attributes:
        varying: those of `shard_map`.
        sharded: explicit ones.
    """

    varying: frozenset[str] = frozenset()
    sharded: frozenset[str] = frozenset()


def batch_axes(args: Sequence[Any], batches: Sequence[int]) -> BatchAxes:
    """The axes of the arguments at these positions."""
    leaves = [x for i in batches for x in jax.tree.leaves(args[i])]
    kinds = (varying_axes, _sharded_axes)
    return BatchAxes(*(frozenset[str]().union(*map(axes_of, leaves)) for axes_of in kinds))


def _sharded_axes(x: Any) -> frozenset[str]:
    entries = sharding_with(x).spec
    names = [n for entry in entries for n in (entry if isinstance(entry, tuple) else [entry])]
    return frozenset(names) - {None}


def defer_sums(
    args: Sequence[Any],
    differentiated: Sequence[int],
    axes: BatchAxes,
    micro_batch: Callable[[Sequence[Any], Any], Any],
    *,
    all_summed: bool,
) -> list[Any]:
    """The arguments, typed so that gradients by some of them are not summed over the axes."""

    def typed(*, reduced: bool, at_once: Any = ()) -> list[Any]:
        def of_leaf(x: Any) -> Any:
            x = vary(x, axes.varying)
            missing = axes.sharded - _sharded_axes(x) - reduced_axes(x)
            # JAX (0.10.2 to 0.12) cannot add a reduced bias to activations that are sharded.
            if not (reduced and missing) or np.ndim(x) < 2:
                return x
            later = missing | reduced_axes(x)
            # XLA gets a scatter wrong that is summed over other axes now: docs/compiler_faults.md.
            if np.shape(x) in at_once and later != frozenset(
                jax.typeof(x).sharding.mesh.axis_names
            ):
                return x
            return reshard(x, sharding_with(x, reduced=later))

        return [jax.tree.map(of_leaf, x) if i in differentiated else x for i, x in enumerate(args)]

    if HAS_TYPES and axes.sharded and all_summed:
        local = typed(reduced=True)
        try:
            jaxpr, out = jax.make_jaxpr(functools.partial(micro_batch, local), return_shape=True)(0)
        except Exception as error:
            if not _says_no_rule(error):
                raise
        else:
            if not is_unreduced((out.value, out.aux)):
                return typed(reduced=True, at_once=_scattered_shapes(jaxpr))
    return typed(reduced=False)


def _scattered_shapes(jaxpr: Any) -> set[tuple[int, ...]]:
    """The shapes that are scattered into, as the gradient of an embedding is."""
    shapes = {e.outvars[0].aval.shape for e in jaxpr.eqns if e.primitive.name == "scatter-add"}
    params = [eqn.params for eqn in jaxpr.eqns]
    inner = jax.tree.leaves(params, is_leaf=lambda x: hasattr(x, "eqns"))
    return shapes.union(*(_scattered_shapes(x) for x in inner if hasattr(x, "eqns")))


def _says_no_rule(error: Exception) -> bool:
    """Whether this is how JAX says that an operation has no rule for what is reduced."""
    is_sharding = type(error).__name__ == "ShardingTypeError"  # which JAX does not export
    return is_sharding or isinstance(error, (NotImplementedError, ValueError))


def take_sum(grad: Array, arg: Any, axes: BatchAxes, *, largest: bool) -> Array:
    """What `jax.value_and_grad` sums over devices for each micro-batch, summed once."""
    missing = varying_axes(grad) & axes.varying - varying_axes(arg)
    grad = max_over(grad, missing) if largest else sum_over(grad, missing)
    if unreduced_axes(grad) == reduced_axes(arg):
        return grad
    return reshard(grad, sharding_with(arg, unreduced=reduced_axes(arg)))
