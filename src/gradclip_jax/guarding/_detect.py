"""Whether a step would stay finite, found out without taking it.

Finite gradients do not make a finite step: 1e20 makes the second moment of Adam infinite for
good while its update still looks harmless. So the update and the next state are looked at too.
They are computed only to be reduced to one flag, never written, and there is no copy to restore.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from .._checks import is_traced
from .._mesh import max_over
from .._run_if import GatedUpdate
from .._types import Array, AxisName, Scalar, Tree
from ..clipping._layout import blocks_of, one_slot
from ..clipping._norm import has_norm


def all_finite(trees: Sequence[Tree], axis_name: AxisName) -> Scalar:
    """Whether every number of the trees is finite, alike on all devices.

    Leaves at the same place of trees with the structure of the first are looked at together:
    one reduction for a gradient, its update and its moments.
    """
    return ~_any_up(_columns([(tree, tree) for tree in trees]), axis_name)


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
            # Once more, or what is pending would be written down for it at every step.
            gate = gated_update.gate(grads, state, params, extra_args)
            seen, _ = gate.grads(gate.pending)
            inside = (inner, seen, gate.inner_state, params, gate.extra_args, axis_name)
            return is_finite_step(*inside)

        return all_finite([grads, gate.pending], axis_name) & look_if(gate.is_open, look_inside)

    def look_ahead() -> Scalar:
        update = optax.with_extra_args_support(tx).update
        updates, next_state = update(grads, state, params, **extra_args)
        states = _without_thresholds(next_state), _without_thresholds(state)
        return ~_any_up(_columns([(updates, updates), states]), axis_name)

    is_finite_gradient = all_finite([grads], axis_name)
    return is_finite_gradient & look_if(is_finite_gradient, look_ahead)


def look_if(predicate: Array, look: Callable[[], Scalar]) -> Scalar:
    """What a look finds, taken only where the predicate holds; True elsewhere."""
    if not is_traced(predicate):
        return look() if bool(predicate) else jnp.array(True)
    return lax.cond(predicate, look, lambda: jnp.array(True))


def _columns(pairs: Sequence[tuple[Tree, Tree]]) -> list[Array]:
    """Flags of what is not finite, one array for all leaves that share a place and a shape."""
    structure = jax.tree.structure(pairs[0][0])
    columns: list[Array] = [jnp.zeros((), bool)] * structure.num_leaves
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
                bad = _is_bad(jnp.asarray(x))
                if new is not old:
                    bad &= ~_is_bad(jnp.asarray(was))
                if is_column(subtree) and columns[i].shape in ((), bad.shape):
                    columns[i] |= bad
                else:
                    others.append(bad)
    return columns + others


def _is_bad(x: Array) -> Array:
    """What is not finite, as the dtype of x rounds it."""
    info = jnp.finfo(x.dtype)
    if info.bits >= 32:
        return ~jnp.isfinite(x)
    # XLA leaves out a rounding whose result is widened again, and with it an overflow.
    rounded = lax.reduce_precision(x.astype(jnp.float32), jnp.finfo(jnp.float32).nexp, info.nmant)
    return ~(jnp.abs(rounded) <= float(info.max))


@functools.partial(jax.jit, static_argnums=1)
def _any_up(flags: list[Array], axis_name: AxisName) -> Scalar:
    """Whether any flag is up, on any device: one pass, one all-reduce, and no branch."""
    blocks = blocks_of(flags, one_slot(flags), math.inf, axis_name, jnp.bool_)
    if not blocks:
        return jnp.array(False)
    found = jnp.stack([jnp.any(block.values) for block in blocks]).any()
    everywhere = frozenset[str]().union(*(block.shard_axes for block in blocks))
    return max_over(found.astype(jnp.int32), everywhere) > 0


def _without_thresholds(state: Any) -> Any:
    """The state without what a clip or guard tells, which may become infinite and harms nothing."""

    def tells(node: Any) -> bool:
        return hasattr(node, "clip_threshold")

    def strip(node: Any) -> Any:
        return _without_thresholds(getattr(node, "inner_state", ())) if tells(node) else node

    return jax.tree.map(strip, state, is_leaf=tells)
