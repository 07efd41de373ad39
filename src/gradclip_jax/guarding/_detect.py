"""Detection of non-finite values in gradients, losses and computed steps.

A finite gradient does not imply a finite optimizer step. For example, a gradient of 1e20 makes the
second moment of Adam infinite permanently, although the update is still finite. Guards can
therefore check the update and the next state as well.
"""

import functools
import math
import warnings
from collections.abc import Hashable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import describe, is_scalar
from .._devices import fusion_barrier, joined
from .._errors import type_error
from .._leaves import is_measured, measured_leaves
from .._mask import Mask, included_leaves
from .._mesh import max_over, shard_axes
from .._states import KINDS, kind_of, replace_states
from .._types import UNBOUNDED, Array, AxisName, Scalar, Tree
from ..clipping._norm import norm_of_leaves
from ..gates._extra_args import loss_argument
from ..gates._gate import ExtraArgs, params_of


def all_finite(tree: Tree, axis_name: AxisName) -> Scalar:
    """Return whether all elements of a tree are finite on all devices."""
    return ~_is_any([is_bad(x) for x in measured_leaves(tree)], axis_name)


def has_finite_squares(tree: Tree, norm: Scalar, axis_name: AxisName) -> Scalar:
    """Return whether the sum of squares is finite, so that no second moment becomes infinite.

    For dtypes with a smaller range than float32, such as float16, the individual squares must be
    finite in that dtype as well. `norm` is the norm of the tree.
    """
    leaves = measured_leaves(tree)
    largest = [float(jnp.finfo(x.dtype).max) for x in leaves]
    ok = norm <= math.sqrt(min([x for x in largest if x > 1e38], default=UNBOUNDED))
    # Without the barrier, XLA may omit the rounding that makes these values infinite.
    narrow = [fusion_barrier(x) for x, y in zip(leaves, largest, strict=True) if y < 1e38]
    if narrow:
        ok &= norm_of_leaves(narrow, math.inf, axis_name) <= math.sqrt(min(largest))
    return ok


def is_finite_step(
    updates: Tree, before: Tree, after: Tree, params: Tree, mask: Mask, axis_name: AxisName
) -> Scalar:
    """Return whether the update and the next state of a step are finite.

    | in the next state | verdict |
    | --- | --- |
    | a new NaN | non-finite |
    | a new infinity in an array, or in the moment of a parameter | non-finite |
    | an infinity in any other scalar, such as a hyperparameter | accepted |
    | a moment of a parameter that the mask excludes | not checked |
    | measurements in states of this package | not checked, because no step depends on them |
    """
    leaves = jax.tree.leaves_with_path(params_of(updates))
    included = included_leaves(mask, params_of(updates), params_of(params))
    shapes = {path: np.shape(x) for path, x in leaves if is_measured(x)}
    excluded = {path for (path, _), keep in zip(leaves, included, strict=True) if not keep}
    before, after = map(_without_measurements, (before, after))
    rows = [(path, x, None) for path, x in jax.tree.leaves_with_path(updates)]
    pairs = zip(jax.tree.leaves_with_path(after), jax.tree.leaves(before), strict=True)
    rows += [(path, x, old) for (path, x), old in pairs]
    flags: dict[Hashable, Array] = {}
    for path, x, old in rows:
        # The path of a moment ends with the path of its parameter.
        suffixes = [path[i:] for i in range(len(path) + 1)]
        place = next((y for y in suffixes if shapes.get(y) == np.shape(x)), None)
        if not is_measured(x) or place in excluded:
            continue
        is_number = old is not None and place is None and np.ndim(x) == 0
        bad = jnp.isnan(x) if is_number else is_bad(x)
        if old is not None:
            bad = lax.bitwise_and(bad, lax.bitwise_not(is_bad(old)))
        # Combine the update and the moments of a parameter, so that XLA reads them once.
        key = len(flags) if place is None else (place, jax.typeof(bad))
        flags[key] = lax.bitwise_or(flags[key], bad) if key in flags else bad
    return ~_is_any(list(flags.values()), axis_name)


def _without_measurements(state: Tree) -> Tree:
    """Keep only accumulators and the inner state of states of this package."""

    def without(node: Tree) -> Tree:
        names = kind_of(node).inner, "acc_grads"
        return [_without_measurements(getattr(node, name, ())) for name in names]

    return replace_states(state, tuple(KINDS), without)


def finite_extra_args(extra_args: ExtraArgs, axis_name: AxisName) -> Scalar:
    """Return whether the loss and the weight of a micro-batch are finite, if they are given."""
    name, loss = loss_argument(extra_args)
    if any(map(np.ndim, jax.tree.leaves(loss))):
        warnings.warn(
            f"`{name}` should be the mean loss, a scalar. The guard checks all elements of the "
            f"given {describe(loss)}.",
            stacklevel=2,
        )
    weight = extra_args.get("weight")
    return all_finite([loss, weight if is_scalar(weight, jnp.inexact) else None], axis_name)


def loss_of(extra_args: ExtraArgs, axis_name: AxisName) -> Scalar | None:
    """Return the loss in float32, averaged over devices if it differs between them."""
    name, value = loss_argument(extra_args)
    if value is None:
        return None
    if not is_scalar(value, jnp.floating, jnp.integer, jnp.bool_):
        hint = "Pass the mean loss over the batch."
        raise type_error(name, "a real scalar", describe(value), hint)
    loss = jnp.asarray(value, jnp.float32)
    axes = shard_axes(loss, axis_name)
    return lax.pmean(loss, tuple(sorted(axes))) if axes else loss


def is_bad(x: Array) -> Array:
    """Return a mask of the non-finite elements."""
    x = jnp.asarray(x)
    if jnp.iscomplexobj(x):
        return is_bad(x.real) | is_bad(x.imag)
    info = jnp.finfo(x.dtype)
    if info.bits < 32:
        # XLA may omit a cast to a narrow dtype that is followed by a cast to a wider one. Scale the
        # values so that float32 overflows between the largest finite value of the narrow dtype and
        # the smallest value that rounds to infinity.
        largest = float(info.max) * (1 + float(info.eps) * 3 / 16)
        x = x.astype(jnp.float32) * jnp.float32(float(jnp.finfo(jnp.float32).max) / largest)
    return lax.bitwise_not(lax.is_finite(x))  # tracing `~jnp.isfinite(x)` takes four times as long


@functools.partial(jax.jit, static_argnums=1)
def _is_any(flags: list[Array], axis_name: AxisName) -> Scalar:
    """Return whether any element of `flags` is true on any device."""
    axes = frozenset[str]().union(*(shard_axes(x, axis_name) for x in flags))
    # On CPU, a maximum is a third faster than `jnp.any`, which XLA does not parallelize.
    largest = [jnp.max(x.astype(jnp.uint8), initial=0) for x in flags]
    return max_over(joined(largest or [jnp.uint8(0)], is_sum=False).astype(jnp.int32), axes) > 0
