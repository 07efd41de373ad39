"""The dtypes in which a transformation inside guards and accumulations receives gradients."""

import contextlib
from collections.abc import Callable

import jax

from .._run_if import like_dtypes
from .._types import Tree


def update_in_dtypes(
    update: Callable[[Tree, Tree], tuple[Tree, Tree]],
    grads: Tree,
    state: Tree,
    incoming: Tree,
    keeps_dtypes: bool,
) -> tuple[Tree, Tree]:
    """Return `update(grads, state)`.

    An accumulator or a loss scale computes gradients in float32. For transformations that raise for
    float32 gradients of 16-bit parameters, such as `optax.novograd` and `optax.apply_if_finite`,
    they are cast to the dtypes of the incoming gradients. With `keeps_dtypes`, updates have the
    dtypes that the transformation returns for the incoming gradients.
    """
    pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(incoming), strict=True)
    if all(jax.typeof(x).dtype == jax.typeof(y).dtype for x, y in pairs):
        return update(grads, state)
    narrow = like_dtypes(grads, incoming)
    expected = jax.eval_shape(update, narrow, state)[0] if keeps_dtypes else None
    try:
        updates, after = update(grads, state)
    except (TypeError, ValueError):
        with contextlib.suppress(TypeError, ValueError):
            return update(narrow, state)
        raise
    return updates if expected is None else like_dtypes(updates, expected), after
