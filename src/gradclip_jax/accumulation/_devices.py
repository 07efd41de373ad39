"""The sum of a gradient over devices, put off to the end of a window or a batch.

Inside `shard_map` a gradient stays on its device if the parameter is typed as varying, under
explicit axes if the parameter is typed as reduced: the gradient is then *unreduced*, a summand.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec, reshard

from .. import _mesh as mesh
from .._checks import is_float0
from .._mesh import is_unreduced, reduced_axes, sharding_with, unreduced_axes, varying_axes
from .._types import Array, Tree
from ._reduction import is_summed, map_reduced


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
    reductions: Sequence[str],
    micro_batch: Callable[[Sequence[Any], Any], Any],
) -> list[Any]:
    """The arguments, typed so that gradients by some of them are not summed over the axes."""

    def typed(least_ndim: float) -> list[Any]:
        def of_leaf(x: Any) -> Any:
            x = mesh.vary(x, axes.varying)
            missing = axes.sharded - _sharded_axes(x) - reduced_axes(x)
            if not missing or np.ndim(x) < least_ndim:
                return x
            return reshard(x, sharding_with(x, reduced=missing | reduced_axes(x)))

        return [jax.tree.map(of_leaf, x) if i in differentiated else x for i, x in enumerate(args)]

    can_reduce = hasattr(PartitionSpec(), "reduced") and all(map(is_summed, reductions))
    # JAX 0.10.2 cannot add a reduced bias to activations that are sharded.
    for least_ndim in (0, 2) if axes.sharded and can_reduce else ():
        local = typed(least_ndim)
        try:
            out = jax.eval_shape(functools.partial(micro_batch, local), 0)
        except Exception:  # an operation has no rule for what is reduced; or the user's own fault
            continue
        if not is_unreduced((out.value, out.aux)):
            return local
    return typed(math.inf)


def take_sums(grads: Tree, args: Tree, axes: BatchAxes, reductions: Sequence[str]) -> Tree:
    """What `jax.value_and_grad` sums over devices for each micro-batch, summed once."""

    def total(reduction: str, grad: Array, arg: Any) -> Array:
        missing = varying_axes(grad) & axes.varying - varying_axes(arg)
        grad = mesh.max_over(grad, missing) if reduction == "max" else mesh.sum_over(grad, missing)
        if unreduced_axes(grad) == reduced_axes(arg):
            return grad
        return reshard(grad, sharding_with(arg, unreduced=reduced_axes(arg)))

    return map_reduced(total, reductions, grads, args)
