"""Run the transformation inside guards and an accumulation, and apply its updates."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from .._checks import dtype_of, is_float0, shortened
from .._clip_order import is_only_clips
from .._errors import named, type_error, warn
from .._run_if import like_dtypes
from .._types import Tree
from ._guard import ExtraArgs
from ._nesting import Wrappers


def run_inner(
    wrappers: Wrappers,
    grads: Tree,
    state: Tree,
    params: Tree,
    extra_args: ExtraArgs,
) -> tuple[Tree, Tree]:
    """Run the inner transformation, and raise if it changes the structure of its state."""
    updates, after = wrappers.inner.update(grads, state, params, **extra_args)
    if jax.tree.structure(after) != jax.tree.structure(state):
        hint = (
            "If a checkpoint contains lists instead of tuples, restore its leaves into the "
            "structure of `tx.init(params)` with `jax.tree.unflatten`."
        )
        rule = "a state whose structure the inner transformation keeps, with tuples and no lists"
        with named(wrappers.name):
            raise type_error("state", rule, shortened(state), hint)
    is_identity = updates is grads and not jax.tree.leaves(state)
    if is_identity or is_only_clips(state):
        warn(
            "The transformation inside this guard or accumulation contains no optimizer. Place the "
            "optimizer inside: outside, it runs on zeros if a step is skipped or accumulated.",
        )
    return updates, after


def updates_for_caller(
    wrappers: Wrappers,
    updates: Tree,
    callers_grads: Tree,
    grads: Tree,
    state: Tree,
    params: Tree,
    extra_args: ExtraArgs,
) -> Tree:
    """Cast updates to the dtypes that the caller expects.

    An accumulation or a loss scale computes the gradient `grads` in float32. The caller expects the
    dtypes that the inner transformation returns for the gradient of the caller.
    """
    if _dtypes(grads) == _dtypes(callers_grads):
        return updates

    def update(grads: Tree, state: Tree) -> Tree:
        return wrappers.inner.update(grads, state, params, **extra_args)[0]

    return like_dtypes(updates, jax.eval_shape(update, like_dtypes(grads, callers_grads), state))


def _dtypes(tree: Tree) -> list[jnp.dtype]:
    """Return the dtypes of the leaves of a tree."""
    return [dtype_of(x) for x in jax.tree.leaves(tree)]


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """Call `optax.apply_updates` with support for float0 updates and strict dtype promotion."""

    def addend(update: Tree, param: Tree) -> Tree:
        return jnp.zeros_like(param) if is_float0(update) else update

    with jax.numpy_dtype_promotion("standard"):
        return optax.apply_updates(params, jax.tree.map(addend, updates, params))
