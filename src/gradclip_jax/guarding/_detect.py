"""Detection of non-finite values in gradients, losses and computed steps.

A finite gradient does not imply a finite optimizer step. For example, a gradient of 1e20 makes the
second moment of Adam infinite permanently, although the update is still finite. Guards can
therefore check the update and the next state as well.
"""

import functools
import itertools
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
from .._leaves import is_measured, measured_leaves, wide_dtype
from .._mask import Mask, included_leaves
from .._mesh import max_over, replica_count, shard_axes, sum_over
from .._states import KINDS, kind_of, replace_states
from .._types import UNBOUNDED, Array, AxisName, Path, Scalar, Tree
from ..clipping._norm import norm_of_leaves
from ..gates._extra_args import loss_argument
from ..gates._gate import ExtraArgs, Step, params_of


def all_finite(tree: Tree, axis_name: AxisName) -> Scalar:
    """Return whether all elements of a tree are finite on all devices."""
    return ~_is_any([is_bad(x) for x in measured_leaves(tree)], axis_name)


def has_finite_squares(tree: Tree, norm: Scalar, axis_name: AxisName) -> Scalar:
    """Return whether the sum of squares is finite, so that no second moment becomes infinite.

    For dtypes with a smaller range than float32, only the individual squares must be finite in that
    dtype. `norm` is the norm of the tree.
    """
    leaves = measured_leaves(tree)
    bounds = [math.sqrt(jnp.finfo(x.dtype).max) for x in leaves]
    # For float16 and float8, each square and the float32 sum of squares must be finite.
    bound = min([x if x > 1e18 else UNBOUNDED for x in bounds], default=UNBOUNDED)
    ok = norm <= bound
    if min(bounds, default=bound) < bound:
        narrow = [(x, y) for x, y in zip(leaves, bounds, strict=True) if y < 1e18]
        # Without the barrier, XLA may omit the rounding that makes these values infinite.
        rounded = [fusion_barrier(x) for x, _ in narrow]
        ok &= norm_of_leaves(rounded, math.inf, axis_name) <= min(bound for _, bound in narrow)
    return ok


def is_finite_step(step: Step, mask: Mask, axis_name: AxisName) -> Scalar:
    """Return whether the update and the next state of a step are finite.

    | in the next state | verdict |
    | --- | --- |
    | a new NaN | non-finite |
    | a new infinity in an array, or in the moment of a parameter | non-finite |
    | an infinity in any other scalar, such as a hyperparameter | accepted |
    | a moment of a parameter that the mask excludes | not checked |
    | measurements in states of this package | not checked, because no step depends on them |
    """
    leaves = jax.tree.leaves_with_path(step.grads)
    included = included_leaves(mask, step.grads, params_of(step.params))
    is_included = {path: x for (path, _), x in zip(leaves, included, strict=True)}
    shapes = {path: np.shape(x) for path, x in leaves if is_measured(x)}
    flags: dict[Hashable, Array] = {}
    after, before = map(_without_measurements, (step.after, step.before))
    pairs = [(step.updates, None), (after, before)]
    for number, (new, old) in enumerate(pairs):
        before = itertools.repeat(None) if old is None else jax.tree.leaves(old)
        for (path, x), was in zip(jax.tree.leaves_with_path(new), before, strict=False):
            place = _place(path, np.shape(x), shapes)
            if not is_measured(x) or (place is not None and not is_included[place]):
                continue
            is_moment = place is not None or np.ndim(x) > 0 or old is None
            bad = is_bad(x) if is_moment else jnp.isnan(x)
            if was is not None:
                bad = lax.bitwise_and(bad, lax.bitwise_not(is_bad(was)))
            # Combine the update and the moments of a parameter, so that XLA reads them once.
            key = (number, path) if place is None else (place, jax.typeof(bad))
            flags[key] = lax.bitwise_or(flags[key], bad) if key in flags else bad
    return ~_is_any(list(flags.values()), axis_name)


def _without_measurements(state: Tree) -> Tree:
    """Keep only accumulators and the inner state of states of this package."""

    def without(node: Tree) -> Tree:
        kept = [getattr(node, name, ()) for name in (kind_of(node).inner, "acc_grads") if name]
        return [_without_measurements(x) for x in kept]

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
    numbers = [loss, weight if is_scalar(weight, jnp.inexact) else None]
    return all_finite(numbers, axis_name) if jax.tree.leaves(numbers) else jnp.array(True)


def loss_of(extra_args: ExtraArgs, axis_name: AxisName) -> Scalar | None:
    """Return the loss in at least float32, averaged over devices if it differs between them."""
    name, value = loss_argument(extra_args)
    if value is None:
        return None
    if np.ndim(value) != 0 or not jnp.isrealobj(value):
        hint = "Pass the mean loss over the batch."
        raise type_error(name, "a real scalar", describe(value), hint)
    loss = jnp.asarray(value)
    is_float = jnp.issubdtype(loss.dtype, jnp.floating)
    loss = loss.astype(wide_dtype(loss.dtype) if is_float else jnp.float32)
    axes = shard_axes(loss, axis_name)
    return sum_over(loss / replica_count(frozenset(), axes), axes)


def _place(path: Path, shape: tuple[int, ...], shapes: dict[Path, tuple[int, ...]]) -> Path | None:
    """Return the path of the parameter that a state array belongs to.

    The path of the parameter is a suffix of the path of the state array.
    """
    for start in range(len(path) + 1):
        if shapes.get(path[start:]) == shape:
            return path[start:]
    return None


def _overflowing(x: Array) -> Array:
    """Convert to float32, scaled so that values that overflow the narrow dtype overflow float32.

    XLA may omit a cast to a narrow dtype that is followed by a cast to a wider one, and then no
    value overflows.
    """
    info = jnp.finfo(x.dtype)
    if info.bits >= 32:
        return x
    # This bound is between the largest finite value and the smallest value that rounds to infinity.
    largest = float(info.max) * (1 + float(info.eps) * 3 / 16)
    return x.astype(jnp.float32) * jnp.float32(float(jnp.finfo(jnp.float32).max) / largest)


def is_bad(x: Array) -> Array:
    """Return a mask of the non-finite elements."""
    x = _overflowing(jnp.asarray(x))
    if jnp.iscomplexobj(x):
        return is_bad(x.real) | is_bad(x.imag)
    return lax.bitwise_not(lax.is_finite(x))  # tracing `~jnp.isfinite(x)` takes four times as long


@functools.partial(jax.jit, static_argnums=1)
def _is_any(flags: list[Array], axis_name: AxisName) -> Scalar:
    """Return whether any element of `flags` is true on any device."""
    axes = frozenset[str]().union(*(shard_axes(x, axis_name) for x in flags))
    # On CPU, a maximum is a third faster than `jnp.any`, which XLA does not parallelize.
    largest = [jnp.max(x.astype(jnp.uint8), initial=0) for x in flags]
    return max_over(joined(largest or [jnp.uint8(0)], is_sum=False).astype(jnp.int32), axes) > 0
