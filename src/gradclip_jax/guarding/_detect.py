"""Whether a step would stay finite, found out without taking it.

Finite gradients do not make a finite step: 1e20 makes the second moment of Adam infinite for
good while its update still looks harmless. So the update and the next state are looked at too.
They are computed only to be reduced to one flag, never written: no scratch, no copy to restore.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from .._checks import is_traced
from .._run_if import GatedTransformation
from .._types import Array, AxisName, Scalar, Tree
from ..clipping._norm import has_norm, one_slot, pooled_norms


def all_finite(trees: Sequence[Tree], axis_name: AxisName) -> Scalar:
    """Whether every number of the trees is finite, alike on all devices.

    Leaves at the same place of trees with the structure of the first are looked at together:
    one reduction for a gradient, its update and its moments.
    """
    return _is_finite(_columns([(tree, tree) for tree in trees]), axis_name)


def is_finite_step(
    tx: optax.GradientTransformation,
    grads: Tree,
    state: Any,
    params: Tree,
    extra_args: dict[str, Any],
    axis_name: AxisName,
) -> Scalar:
    """Whether gradient, update and next state of a step are finite.

    What was not finite in the state before, such as an initial best loss of infinity, may stay.
    """
    if isinstance(tx, GatedTransformation):
        gate = tx.gate(grads, state, params, extra_args)

        def look_inside() -> Scalar:
            seen, _ = gate.grads(gate.pending)
            inside = (tx.inner, seen, gate.inner_state, params, gate.extra_args, axis_name)
            return is_finite_step(*inside)

        return all_finite([grads, gate.pending], axis_name) & _if(gate.is_open, look_inside)
    update = optax.with_extra_args_support(tx).update
    updates, next_state = update(grads, state, params, **extra_args)
    return _is_finite(
        _columns([(grads, grads), (updates, updates), (next_state, state)]), axis_name
    )


def _if(predicate: Array, look: Any) -> Scalar:
    if not is_traced(predicate):
        return look() if bool(predicate) else jnp.array(True)
    return lax.cond(predicate, look, lambda: jnp.array(True))


def _is_finite(columns: list[Array], axis_name: AxisName) -> Scalar:
    return jnp.isfinite(pooled_norms(columns, one_slot(columns), np.inf, axis_name)[0])


def _columns(pairs: Sequence[tuple[Tree, Tree]]) -> list[Array]:
    """Largest magnitudes, element by element, over the leaves that share a place and a shape."""
    structure = jax.tree.structure(pairs[0][0])
    columns: list[Array] = [jnp.zeros(())] * structure.num_leaves
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
                magnitude = _newly_large(jnp.asarray(x), jnp.asarray(was), same=new is old)
                if is_column(subtree) and columns[i].shape in ((), magnitude.shape):
                    columns[i] = jnp.maximum(columns[i].astype(magnitude.dtype), magnitude)
                else:
                    others.append(magnitude)
    return columns + others


def _newly_large(x: Array, before: Array, *, same: bool) -> Array:
    """The magnitude in at least float32; zero where it was not finite before either."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        magnitude = jnp.maximum(jnp.abs(x.real), jnp.abs(x.imag))
    else:
        magnitude = jnp.abs(x)
    magnitude = magnitude.astype(jnp.promote_types(magnitude.dtype, jnp.float32))
    return magnitude if same else jnp.where(jnp.isfinite(before), magnitude, 0)
