"""State as large as the parameters: moments of the gradient, element by element."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from .._checks import check_state, is_float0
from .._states import increment_where
from .._tree_checks import check_inexact, check_same_structure
from .._types import Array, Scalar, Tree
from ..clipping._formula import wide_dtype
from ..clipping._threshold import check_params
from ._averages import where_finite

LeafStep: TypeAlias = Callable[[Array, Any, Array, Any], tuple[Array, Any, Array]]
"""`(grad, first, second, param) -> (update, first, second)`, for one leaf, as wide as its moments;
None for a first moment that is not kept, and for parameters that are not needed."""


class MomentState(NamedTuple):
    """Moments of the gradient, float32 or wider, in the structure of the parameters.

    Attributes:
        step_count: int32[], steps so far, saturating.
        first: exponential moving average of the gradient, or () where it is not needed.
        second: exponential moving average of a power of its magnitude.
    """

    step_count: Scalar
    first: Any
    second: Tree


def moment_transformation(
    name: str,
    step_of: Callable[[Scalar], LeafStep],
    *,
    keeps_first: bool = True,
    needs_params: bool = False,
) -> optax.GradientTransformation:
    """A transformation that is one step for each leaf, chosen by the count of steps before it."""

    def init(params: Tree) -> MomentState:
        zeros = wide_zeros(params)
        second = jax.tree.map(jnp.abs, zeros)  # real, also of a complex leaf
        return MomentState(jnp.zeros((), jnp.int32), zeros if keeps_first else (), second)

    def update(updates: Tree, state: Any, params: Tree | None = None) -> tuple[Tree, MomentState]:
        check_update(name, updates, state, MomentState, "second")
        if needs_params:
            check_params(name, updates, params)
        step = step_of(state.step_count)

        def step_leaf(grad: Any, first: Any, second: Array, param: Any) -> tuple[Any, Any, Array]:
            if is_float0(grad):
                return grad, first, second
            wide = grad.astype(wide_dtype(grad.dtype, second.dtype))
            out, first, second = step(wide, first, second, param)
            return out.astype(grad.dtype), first, second

        grads, structure = jax.tree.flatten(updates)
        nothing = [None] * len(grads)
        firsts = jax.tree.leaves(state.first) if keeps_first else nothing
        leaves = jax.tree.leaves(params) if needs_params else nothing
        columns = (grads, firsts, jax.tree.leaves(state.second), leaves)
        rows = [step_leaf(*row) for row in zip(*columns, strict=True)]
        out, first, second = (jax.tree.unflatten(structure, [x[i] for x in rows]) for i in range(3))
        count = increment_where(state.step_count)
        return out, MomentState(count, first if keeps_first else (), second)

    return optax.GradientTransformation(init, update)


def where_finite_grad(
    step: Callable[[Array, Any, Array], tuple[Array, Any, Array]],
    grad: Array,
    first: Any,
    second: Array,
) -> tuple[Array, Any, Array]:
    """The step of finite elements; for others the update is NaN, and the moments stay."""
    # Double `where`: 0 * nan in the unused branch would give NaN derivatives.
    finite = jnp.isfinite(jnp.abs(grad))
    out, *moments = step(jnp.where(finite, grad, 0), first, second)
    first, second = where_finite(finite, moments, [first, second])
    return jnp.where(finite, out, jnp.nan), first, second


def wide_zeros(params: Tree) -> Tree:
    """Zeros like the parameters, in float32 or wider; one scalar for an integer parameter."""

    def zeros(param: Any) -> Array:
        dtype = jnp.result_type(param)
        if not jnp.issubdtype(dtype, jnp.inexact):
            return jnp.zeros((), jnp.float32)
        return jnp.zeros_like(param, wide_dtype(dtype))

    return jax.tree.map(zeros, params)


def check_update(function: str, updates: Tree, state: Any, kind: type, field: str) -> None:
    """Refuses a step without its state, or whose updates do not match that field of it."""
    check_inexact(function, "updates", updates)
    check_state(function, state, kind)
    check_same_structure(function, "updates", updates, "params", getattr(state, field))
