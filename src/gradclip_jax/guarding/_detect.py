"""Whether a step would stay finite, found out without taking it.

Finite gradients do not make a finite step: 1e20 makes the second moment of Adam infinite for
good while its update still looks harmless. So the update and the next state are looked at too.
They are computed only to be reduced to one flag, never written, and there is no copy to restore.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from .._checks import is_traced
from .._mesh import max_over
from .._run_if import Gate, GatedUpdate
from .._types import Array, AxisName, Scalar, Tree
from ..clipping._blocks import JOINED_ON_CPU, pack
from ..clipping._norm import is_measured, measured_leaves
from ..clipping._units import tree_units


def all_finite(tree: Tree, axis_name: AxisName) -> Scalar:
    """Whether every number of a tree is finite, alike on all devices: one read of it.

    For arrays that are there anyway: XLA may write down what it adds up.
    """
    leaves = measured_leaves(tree)
    values = [x for x in leaves if _is_added_fast(x.dtype)]
    flags = [_is_bad(x) for x in leaves if not _is_added_fast(x.dtype)]
    return ~_any_bad(values, flags, axis_name)


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

    def check_step() -> Scalar:
        if isinstance(tx.update, GatedUpdate):
            gate = functools.partial(tx.update.gate, grads, state, params, extra_args)
            return _is_finite_behind(gate, tx.update.inner, params, axis_name)
        update = optax.with_extra_args_support(tx).update
        updates, next_state = update(grads, state, params, **extra_args)
        states = _without_thresholds(next_state), _without_thresholds(state)
        return _none_bad([(updates, updates), states], axis_name)

    is_finite_gradient = all_finite(grads, axis_name)
    return is_finite_gradient & check_if(is_finite_gradient, check_step)


def _is_finite_behind(
    gate: Callable[[], Gate],
    inner: optax.GradientTransformation,
    params: Tree,
    axis_name: AxisName,
) -> Scalar:
    """Whether the step behind a gate is finite, and what is pending, where the gate is open.

    To look at a sum that is only being built would cost more than to build it.
    """

    def check_inner_step() -> Scalar:
        # Once more, or what is pending would be written down for it at every step.
        now = gate()
        inner_grads, _ = now.read_gradient(now.accumulator)
        inside = (inner, inner_grads, now.inner_state, params, now.extra_args, axis_name)
        # The gradient may be made of a sum that XLA has not rounded, the sum itself is.
        return _none_bad([(now.accumulator, now.accumulator)], axis_name) & is_finite_step(*inside)

    return check_if(gate().is_open, check_inner_step)


def guarded_extra_args(extra_args: dict[str, Any]) -> list[Any]:
    """The loss, and what can be the weight of a micro-batch."""
    weight = extra_args.get("weight")
    is_number = isinstance(weight, (float, np.generic, np.ndarray, jax.Array))
    return [extra_args.get("value"), weight if is_number and np.ndim(weight) == 0 else None]


def check_if(predicate: Array, look: Callable[[], Scalar]) -> Scalar:
    """What a look finds, taken only where the predicate holds; True elsewhere."""
    if not is_traced(predicate):
        return look() if bool(predicate) else jnp.array(True)
    return lax.cond(predicate, look, lambda: jnp.array(True))


def _none_bad(pairs: Sequence[tuple[Tree, Tree]], axis_name: AxisName) -> Scalar:
    """Whether the first tree of each pair is finite wherever the second one is.

    For what is only computed to be looked at. Leaves at the same place of trees with the
    structure of the first share their flags: one reduction for an update and its moments.
    """
    return ~_any_bad([], _columns(pairs), axis_name)


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
                if not is_measured(x):
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


def _is_added_fast(dtype: Any) -> bool:
    """Whether XLA on CPU adds up such an array as fast as it reads it, and writes little."""
    is_wide = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits >= 32
    return jax.__version_info__ >= (0, 10) and (is_wide or dtype == jnp.bfloat16)


def _raised(x: Array) -> Array:
    """X, where it is bfloat16 in float32 and 0.3 % larger: what rounds to infinity overflows.

    XLA leaves out a rounding whose result is widened again, and with it an overflow.
    """
    if x.dtype != jnp.bfloat16:
        return x
    return x.astype(jnp.float32) * jnp.float32(1 + 0.375 * float(jnp.finfo(x.dtype).eps))


@functools.partial(jax.jit, static_argnums=2)
def _any_bad(values: list[Array], flags: list[Array], axis_name: AxisName) -> Scalar:
    """Whether a value is not finite or a flag up, on any device: one all-reduce, no branch."""
    raised = [_raised(x) for x in values]
    numbers = pack(raised, tree_units(raised), axis_name, JOINED_ON_CPU)
    bits = pack(flags, tree_units(flags), axis_name, JOINED_ON_CPU)
    # x - x is 0, and NaN where x is not finite; or infinite, where a fused x = a * b overflows.
    found = [~jnp.isfinite(jnp.sum(block.values - block.values)) for block in numbers]
    # A third faster than `jnp.any`, which XLA on CPU does not vectorize.
    found += [jnp.max(block.values.astype(jnp.uint8), initial=0) > 0 for block in bits]
    if not found:
        return jnp.array(False)
    everywhere = frozenset[str]().union(*(block.shard_axes for block in (*numbers, *bits)))
    return max_over(jnp.stack(found).any().astype(jnp.int32), everywhere) > 0


def _without_thresholds(state: Any) -> Any:
    """The state without what a clip or guard tells, which may become infinite and harms nothing."""

    def tells(node: Any) -> bool:
        return hasattr(node, "clip_threshold")

    def strip(node: Any) -> Any:
        return _without_thresholds(getattr(node, "inner_state", ())) if tells(node) else node

    return jax.tree.map(strip, state, is_leaf=tells)
