"""Whether a step would stay finite, found out without taking it.

Finite gradients do not make a finite step: 1e20 makes the second moment of Adam infinite for
good while its update still looks harmless. So the update and the next state are looked at too.
They are computed only to be reduced to one flag, never written: no scratch, no copy to restore.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from .._checks import is_traced
from .._run_if import GatedUpdate
from .._types import Array, AxisName, Scalar, Tree
from ..clipping._norm import counted_leaves, has_norm, is_finite, norm_dtype


def all_finite(trees: Sequence[Tree], axis_name: AxisName) -> Scalar:
    """Whether every number of the trees is finite, alike on all devices.

    Leaves at the same place of trees with the structure of the first are looked at together:
    one reduction for a gradient, its update and its moments.
    """
    return is_finite(_columns([(tree, tree) for tree in trees]), axis_name)


def is_finite_step(
    tx: optax.GradientTransformation,
    grads: Tree,
    state: Any,
    params: Tree,
    extra_args: dict[str, Any],
    axis_name: AxisName,
) -> Scalar:
    """Whether gradient, update and next state of a step are finite.

    What was not finite in the state before, such as an initial best loss of infinity, may stay,
    and a threshold may become infinite: it then clips nothing.
    """
    gated_update = tx.update
    if isinstance(gated_update, GatedUpdate):
        inner = gated_update.inner
        gate = gated_update.gate(grads, state, params, extra_args)

        def look_inside() -> Scalar:
            seen, _ = gate.grads(gate.pending)
            inside = (inner, seen, gate.inner_state, params, gate.extra_args, axis_name)
            return is_finite_step(*inside)

        return all_finite([grads, gate.pending], axis_name) & look_if(gate.is_open, look_inside)
    update = optax.with_extra_args_support(tx).update
    updates, next_state = update(grads, state, params, **extra_args)
    states = _without_thresholds(next_state), _without_thresholds(state)
    return is_finite(_columns([(grads, grads), (updates, updates), states]), axis_name)


def look_if(predicate: Array, look: Callable[[], Scalar]) -> Scalar:
    """What a look finds, taken only where the predicate holds; True elsewhere."""
    if not is_traced(predicate):
        return look() if bool(predicate) else jnp.array(True)
    return lax.cond(predicate, look, lambda: jnp.array(True))


def _columns(pairs: Sequence[tuple[Tree, Tree]]) -> list[Array]:
    """Largest magnitudes, element by element, over the leaves that share a place and a shape."""
    structure = jax.tree.structure(pairs[0][0])
    dtype = norm_dtype(leaf for tree, _ in pairs for leaf in counted_leaves(tree))
    columns: list[Array] = [jnp.zeros((), dtype)] * structure.num_leaves
    others: list[Array] = []

    def is_column(node: Any) -> bool:
        return jax.tree.structure(node) == structure

    for new, old in pairs:
        for subtree, before in zip(
            jax.tree.leaves(new, is_leaf=is_column),
            jax.tree.leaves(old, is_leaf=is_column),
            strict=True,
        ):
            leaves = zip(jax.tree.leaves(subtree), jax.tree.leaves(before), strict=True)
            for i, (x, was) in enumerate(leaves):
                if not has_norm(x):
                    continue
                magnitude = _newly_large(jnp.asarray(x), jnp.asarray(was), dtype, same=new is old)
                if is_column(subtree) and columns[i].shape in ((), magnitude.shape):
                    columns[i] = jnp.maximum(columns[i], magnitude)
                else:
                    others.append(magnitude)
    return columns + others


def _newly_large(x: Array, before: Array, dtype: Any, *, same: bool) -> Array:
    """The magnitude as the leaf's dtype rounds it; zero where it was not finite before either."""
    parts = (x.real, x.imag) if jnp.issubdtype(x.dtype, jnp.complexfloating) else (x,)
    magnitude = functools.reduce(jnp.maximum, [jnp.abs(part.astype(dtype)) for part in parts])
    info = jnp.finfo(x.dtype)
    if info.bits < 32:
        # XLA leaves out a rounding whose result is widened again, and with it an overflow.
        magnitude = lax.reduce_precision(magnitude, jnp.finfo(dtype).nexp, info.nmant)
        magnitude = jnp.where(magnitude > float(info.max), jnp.inf, magnitude)
    if same:
        return magnitude
    return jnp.where(jnp.isfinite(before), magnitude, jnp.zeros_like(magnitude))


def _without_thresholds(state: Any) -> Any:
    """The state without what a clip or guard tells, which may become infinite and harms nothing."""

    def tells(node: Any) -> bool:
        return hasattr(node, "clip_threshold")

    def strip(node: Any) -> Any:
        return _without_thresholds(getattr(node, "inner_state", ())) if tells(node) else node

    return jax.tree.map(strip, state, is_leaf=tells)
