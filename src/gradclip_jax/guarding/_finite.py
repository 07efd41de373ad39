"""Check whether arrays, gradients and computed steps are finite."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._devices import fusion_barrier, tree_reduce
from .._states import is_own_state
from .._types import Array, AxisName, Path, Scalar, Tree
from ..norms._leaves import inexact_leaves, is_inexact
from ..norms._mask import Mask, broadcast_mask
from ..norms._mesh import max_over, shard_axes
from ..norms._reduce import norm_of_leaves
from ..wrappers._guard import params_of


def is_nonfinite(x: Array) -> Array:
    """Return a mask of the non-finite elements."""
    x = jnp.asarray(x)
    if jnp.iscomplexobj(x):
        return is_nonfinite(x.real) | is_nonfinite(x.imag)
    info = jnp.finfo(x.dtype)
    if info.bits < 32:
        # XLA may omit the rounding to a narrow dtype, so test in float32. The limit is between the
        # largest finite value of the dtype and the smallest value that rounds to infinity, which is
        # larger by a factor of 1 + eps / 4. After the multiplication, exactly the values above the
        # limit are infinite.
        limit = float(info.max) * (1 + float(info.eps) * 3 / 16)
        x = x.astype(jnp.float32) * jnp.float32(float(jnp.finfo(jnp.float32).max) / limit)
    return lax.bitwise_not(lax.is_finite(x))  # tracing `~jnp.isfinite(x)` takes four times as long


def all_finite(tree: Tree, axis_name: AxisName) -> Scalar:
    """Return whether all elements of a tree are finite on all devices."""
    return ~_is_any([is_nonfinite(x) for x in inexact_leaves(tree)], axis_name)


@functools.partial(jax.jit, static_argnums=1)
def _is_any(flags: list[Array], axis_name: AxisName) -> Scalar:
    """Return whether any element of `flags` is true on any device."""
    axes = frozenset[str]().union(*(shard_axes(x, axis_name) for x in flags))
    # On CPU, a maximum is a third faster than `jnp.any`, which XLA does not parallelize.
    largest = [jnp.max(x.astype(jnp.uint8), initial=0) for x in flags]
    return max_over(tree_reduce(jnp.max, largest or [jnp.uint8(0)]).astype(jnp.int32), axes) > 0


def is_narrow(x: Array) -> bool:
    """Return whether the dtype of an array has a smaller range than float32 and bfloat16."""
    return float(jnp.finfo(x.dtype).max) < 1e38


def has_finite_narrow_squares(tree: Tree, axis_name: AxisName) -> Scalar:
    """Return whether the squares of float16 and other narrow leaves are finite."""
    is_finite = jnp.bool_(True)
    leaves = inexact_leaves(tree)
    for dtype in {x.dtype: None for x in leaves if is_narrow(x)}:
        # Without the barrier, XLA may omit the rounding that makes these values infinite.
        same_dtype = [fusion_barrier(x) for x in leaves if x.dtype == dtype]
        largest = norm_of_leaves(same_dtype, math.inf, axis_name)
        is_finite &= largest <= math.sqrt(float(jnp.finfo(dtype).max))
    return is_finite


def is_finite_step(
    updates: Tree, before: Tree, after: Tree, params: Tree, trainable: Mask, axis_name: AxisName
) -> Scalar:
    """Return whether the update and the next state of a step are finite.

    | in the next state | verdict |
    | --- | --- |
    | a new NaN | non-finite |
    | a new infinity in an array, or in the moment of a parameter | non-finite |
    | an infinity in any other scalar, such as a hyperparameter | accepted |
    | a moment of a parameter that is not trainable | not checked |
    | measurements in states of this package | not checked, because no step depends on them |
    """
    leaves = jax.tree.leaves_with_path(params_of(updates))
    included = jax.tree.leaves(broadcast_mask(trainable, params_of(updates), params_of(params)))
    shapes = {path: np.shape(x) for path, x in leaves if is_inexact(x)}
    excluded = {path for (path, _), keep in zip(leaves, included, strict=True) if not keep}
    before, after = map(_without_measurements, (before, after))
    rows = [(path, x, None) for path, x in jax.tree.leaves_with_path(updates)]
    pairs = zip(jax.tree.leaves_with_path(after), jax.tree.leaves(before), strict=True)
    rows += [(path, x, old) for (path, x), old in pairs]
    flags: dict[Hashable, Array] = {}
    for path, x, old in rows:
        parameter = _parameter_of(path, x, shapes)
        if not is_inexact(x) or parameter in excluded:
            continue
        bad = jnp.isnan(x) if parameter is None and np.ndim(x) == 0 else is_nonfinite(x)
        if old is not None:
            bad = lax.bitwise_and(bad, lax.bitwise_not(is_nonfinite(old)))
        # Combine the update and the moments of a parameter, so that XLA reads them once.
        key = len(flags) if parameter is None else (parameter, jax.typeof(bad))
        flags[key] = lax.bitwise_or(flags[key], bad) if key in flags else bad
    return ~_is_any(list(flags.values()), axis_name)


def _parameter_of(path: Path, x: Array, shapes: dict[Path, tuple[int, ...]]) -> Path | None:
    """Return the path of the parameter whose update or moment is `x`, or None.

    The path of a moment ends with the path of its parameter.
    """
    suffixes = [path[i:] for i in range(len(path) + 1)]
    return next((y for y in suffixes if shapes.get(y) == np.shape(x)), None)


def _without_measurements(state: Tree) -> Tree:
    """Replace each gradclip_jax state by the inner state that it contains."""

    def without(node: Tree) -> Tree:
        if not is_own_state(node):
            return node
        return _without_measurements(getattr(node, "inner_state", ()))

    return jax.tree.map(without, state, is_leaf=is_own_state)
