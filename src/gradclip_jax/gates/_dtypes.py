"""Transformations that accept only gradients in the dtypes of the parameters."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._leaves import is_measured, wide_dtype
from .._run_if import like_dtypes
from .._states import register_state
from .._types import Array, HostArray, Tree


@register_state(inner="inner_state")
class NarrowState(NamedTuple):
    """State of a transformation that raises for gradients in float32 of 16-bit parameters.

    Examples are `optax.novograd` and `optax.apply_if_finite`. Their gradients, which an accumulator
    or a loss scale computes in float32, are cast to the dtypes of the incoming gradients.

    Attributes:
        inner_state: State of the transformation.
    """

    inner_state: Tree


def init_in_dtypes(inner: optax.GradientTransformationExtraArgs, params: Tree) -> Tree:
    """Return the initial state, in a `NarrowState` if `inner` requires narrow gradients."""
    state = inner.init(params)
    leaves = [x for x in jax.tree.leaves(params) if is_measured(x)]
    if not all(hasattr(x, "dtype") for x in leaves):  # placeholders of `optax.tree.map_params`
        return state
    if all(wide_dtype(x.dtype) == x.dtype for x in leaves):
        return state

    def accepts(cast: Callable[[Array], Array]) -> bool:
        def update(params: Tree, state: Tree) -> Tree:
            grads = jax.tree.map(lambda x: cast(x) if is_measured(x) else _float0(x), params)
            return inner.update(grads, state, params, value=jnp.float32(0))

        try:
            jax.eval_shape(update, params, state)
        except (TypeError, ValueError):
            return False
        return True

    is_narrow = not accepts(lambda x: x.astype(wide_dtype(x.dtype))) and accepts(lambda x: x)
    return NarrowState(state) if is_narrow else state


def _float0(param: Array) -> HostArray:
    """Return the gradient of an integer parameter."""
    return np.zeros(np.shape(param), jax.dtypes.float0)


def update_in_dtypes(
    update: Callable[[Tree, Tree], tuple[Tree, Tree]],
    grads: Tree,
    state: Tree,
    incoming: Tree,
    keeps_dtypes: bool,
) -> tuple[Tree, Tree]:
    """Return `update(grads, state)`.

    With `keeps_dtypes`, updates have the dtypes that the transformation returns for the incoming
    gradients.
    """
    narrow = like_dtypes(grads, incoming)
    if isinstance(state, NarrowState):
        updates, after = update(narrow, state.inner_state)
        return updates, NarrowState(after)
    pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(incoming), strict=True)
    if not keeps_dtypes or all([x.dtype == jax.typeof(y).dtype for x, y in pairs]):
        return update(grads, state)
    expected, _ = jax.eval_shape(update, narrow, state)
    updates, after = update(grads, state)
    return like_dtypes(updates, expected), after
