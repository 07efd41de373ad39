"""Discarding and flushing the accumulation windows in the state of any transformation."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ._checks import is_float0, is_scalar
from ._run_if import Flag
from ._states import KINDS, find_role, kind_of, replace_states
from ._types import Array, Path, Tree


def discard_windows(state: Tree, where: Array | bool) -> Tree:
    """Discard all unfinished accumulation windows if the scalar `where` is true."""

    def discard(window: Tree) -> Tree:
        fields = ("mini_step", "total_weight", "emitted")
        empty = {name: jnp.where(where, 0, getattr(window, name)) for name in fields}
        return window._replace(**empty)

    kinds = tuple(kind for kind, x in KINDS.items() if x.role == "accumulation")
    return replace_states(state, kinds, discard)


def empty_windows(state: Tree) -> Array | int:
    """Return the number of windows of all accumulations that closed without weight."""
    return sum(window.empty_windows for _, window in find_role(state, "accumulation"))


def closes_window(state: Tree, extra_args: dict[str, Any]) -> Flag:
    """Return whether `flush` or `emit` closes an open window of an accumulation in a state."""
    flush, emit = extra_args.get("flush"), extra_args.get("emit")
    closes = flush if emit is None else emit
    are_open = [window.mini_step > 0 for _, window in find_role(state, "accumulation")]
    if not are_open or closes is False or not is_scalar(closes, jnp.bool_):
        return False
    return jnp.stack(are_open).any() & jnp.array(closes)


def flush_where(
    inner: optax.GradientTransformation, where: Flag
) -> optax.GradientTransformationExtraArgs:
    """Return a transformation that only closes windows where the scalar `where` is true.

    The gradient is then replaced by zeros of weight 0, and only the states of accumulations, of
    what is inside them, and of guards around them change. Groups of `optax.partition` without an
    accumulation return zeros. `where` must be false unless `flush` or `emit` is true.
    """

    def select(old: Array | int, new: Array) -> Array:
        return new if is_float0(new) else jnp.where(where, old, new)

    def is_ours(node: object) -> bool:
        return bool(kind_of(node).inner)

    def with_windows(old: Tree, new: Tree) -> Tree:
        name = kind_of(old).inner
        if kind_of(old).role == "accumulation" or not name:
            return new if name else select(old, new)
        inner = getattr(old, name), getattr(new, name)
        return new._replace(**{name: jax.tree.map(with_windows, *inner, is_leaf=is_ours)})

    def update(
        updates: Tree, state: Tree, params: Tree = None, *, weight: Any = None, **extra: Any
    ) -> tuple[Tree, Tree]:
        windows = [window.acc_grads for _, window in find_role(state, "accumulation")]
        covered = {path for x in windows for path, _ in jax.tree.leaves_with_path(x)}
        places = {path for path, _ in jax.tree.leaves_with_path(updates)}
        # A wrapper such as `optax.flatten` may rename the parameters.
        others = places - covered if covered <= places else set[Path]()

        def without_others(path: Path, x: Array) -> Array:
            return select(0, x) if path in others else x

        weight = jnp.where(where, 0, 1 if weight is None else weight)
        if extra.get("emit") is True and extra.get("flush") is None:
            # Only `flush` does not count a micro-batch of weight 0.
            extra |= {"flush": True, "emit": None}
        zeros = jax.tree.map(functools.partial(select, 0), updates)
        updates, after = tx.update(zeros, state, params, weight=weight, **extra)
        after = jax.tree.map(with_windows, state, after, is_leaf=is_ours)
        return jax.tree.map_with_path(without_others, updates), after

    tx = optax.with_extra_args_support(inner)
    return optax.GradientTransformationExtraArgs(tx.init, update)
