"""The sum of a gradient over devices, put off to the end of a window or a batch.

Inside `shard_map` a gradient stays on its device if the parameter is typed as varying, under
explicit axes if the parameter is typed as reduced: the gradient is then *unreduced*, a summand.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from .. import _mesh as mesh
from .._checks import is_float0
from .._mesh import is_unreduced, reduced_axes, unreduced_axes, varying_axes
from .._types import Array, Tree
from ._reduction import is_summed


def without_reduced_axes(params: Tree) -> Tree:
    """The parameters as an optimizer sees them, whatever their gradients stay unreduced over."""

    def plain(param: Any) -> Any:
        if is_float0(param) or not reduced_axes(param):
            return param
        return jax.sharding.reshard(param, mesh.sharding_with(param))

    return jax.tree.map(plain, params)


def reduce_over_devices(grads: Tree, inner_state: Any) -> Tree:
    """Unreduced leaves summed over devices, to the sharding of the inner optimizer's state."""
    if not is_unreduced(grads):
        return grads
    structure = jax.tree.structure(grads)

    def is_moment(node: Any) -> bool:
        return jax.tree.structure(node) == structure

    candidates = jax.tree.leaves(inner_state, is_leaf=is_moment)
    moments = [jax.tree.leaves(node) for node in candidates if is_moment(node)]

    def reduce(place: int, grad: Any) -> Any:
        if is_float0(grad) or not unreduced_axes(grad):
            return grad
        alike = [m[place] for m in moments if np.shape(m[place]) == grad.shape]
        return jax.sharding.reshard(grad, mesh.sharding_with(alike[0] if alike else grad))

    return jax.tree.unflatten(structure, [reduce(*x) for x in enumerate(jax.tree.leaves(grads))])


def zeros_like_unreduced(grads: Tree, acc: Tree) -> Tree:
    """Zero gradients, unreduced where the accumulator is."""
    if not is_unreduced(acc):
        return grads

    def zeros(grad: Any, total: Any) -> Any:
        return mesh.zeros_of_type(total, grad.dtype) if unreduced_axes(total) else grad

    return jax.tree.map(zeros, grads, acc)


def batch_axes(args: Sequence[Any], batches: Sequence[int]) -> frozenset[str]:
    """The mesh axes over which a batch is spread, as far as types say."""
    leaves = [x for i in batches for x in jax.tree.leaves(args[i])]
    return frozenset[str]().union(*(varying_axes(x) | _sharded_axes(x) for x in leaves))


def _sharded_axes(x: Any) -> frozenset[str]:
    """The explicit axes in the type of an array."""
    entries = mesh.sharding_with(x).spec
    names = [n for entry in entries for n in (entry if isinstance(entry, tuple) else [entry])]
    return _axes_of(x, AxisType.Explicit).intersection(names)


def keep_apart(
    args: Sequence[Any],
    differentiated: Sequence[int],
    axes: frozenset[str],
    words: Sequence[str],
    micro_batch: Callable[[Sequence[Any], Any], Any],
) -> list[Any]:
    """The arguments, typed so that gradients by some of them are not summed over the axes."""
    varying = list(args)
    for i in differentiated:
        varying[i] = jax.tree.map(lambda x: _vary(x, axes), args[i])
    is_typed = hasattr(PartitionSpec(), "reduced") and not axes.isdisjoint(
        _explicit_axes([args[i] for i in differentiated])
    )
    if not (is_typed and all(map(is_summed, words))):
        return varying
    # JAX 0.10.2 cannot add a reduced bias to activations that are sharded.
    for least_ndim in (0, 2):

        def reduced(x: Any, least_ndim: int = least_ndim) -> Any:
            return _reduced(x, axes) if np.ndim(x) >= least_ndim else x

        local = list(varying)
        for i in differentiated:
            local[i] = jax.tree.map(reduced, varying[i])
        try:
            out = jax.eval_shape(functools.partial(micro_batch, local), 0)
        except Exception:  # an operation has no rule for what is reduced; or the user's own fault
            continue
        if not mesh.is_unreduced((out.value, out.aux)):
            return local
    return varying


def sum_over(
    grads: tuple[Tree, ...], args: tuple[Tree, ...], axes: frozenset[str], words: Sequence[str]
) -> tuple[Tree, ...]:
    """What `jax.value_and_grad` sums over devices for each micro-batch, summed once."""

    def total(grad: Array, arg: Any, word: str) -> Array:
        missing = varying_axes(grad) & axes - varying_axes(arg)
        grad = mesh.max_over(grad, missing) if word == "max" else mesh.sum_over(grad, missing)
        if unreduced_axes(grad) == reduced_axes(arg):
            return grad
        return jax.sharding.reshard(grad, mesh.sharding_with(arg, unreduced=reduced_axes(arg)))

    leaves, structure = jax.tree.flatten(grads)
    columns = zip(leaves, jax.tree.leaves(args), words, strict=True)
    return jax.tree.unflatten(structure, [total(*column) for column in columns])


def _explicit_axes(tree: Tree) -> frozenset[str]:
    return frozenset[str]().union(*(_axes_of(x, AxisType.Explicit) for x in jax.tree.leaves(tree)))


def _axes_of(x: Any, kind: AxisType) -> frozenset[str]:
    """The axes of one kind of the mesh of an array."""
    own = jax.typeof(x).sharding.mesh
    kinds = zip(own.axis_names, own.axis_types, strict=True)
    return frozenset(name for name, its_kind in kinds if its_kind == kind)


def _vary(x: Any, axes: frozenset[str]) -> Any:
    return mesh.vary(x, axes & _axes_of(x, AxisType.Manual))


def _reduced(x: Any, axes: frozenset[str]) -> Any:
    missing = (axes & _axes_of(x, AxisType.Explicit)) - _sharded_axes(x) - reduced_axes(x)
    if not missing:
        return x
    return jax.sharding.reshard(x, mesh.sharding_with(x, reduced=missing | reduced_axes(x)))
