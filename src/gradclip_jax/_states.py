"""States: their counters, and how to find them inside any Optax state, whatever wraps them."""

from collections.abc import Callable
from typing import Any, Final, TypeVar

import jax
import jax.numpy as jnp
import optax

from ._types import Array

METRICS: Final[dict[type, tuple[str, ...]]] = {}
"""Each state of this package that `metrics` reads, and the fields or properties it reports."""

_State = TypeVar("_State", bound=type)


def register_metrics(*names: str) -> Callable[[_State], _State]:
    """A class decorator: `metrics` reports these fields or properties of the state."""

    def register(kind: _State) -> _State:
        METRICS[kind] = names
        return kind

    return register


def increment_where(count: Array, happened: Array | bool = True) -> Array:
    """A counter one higher where something happened; it saturates instead of wrapping."""
    return jnp.where(happened, jnp.asarray(optax.safe_increment(count)), count)


def find_states(state: Any, kinds: type | tuple[type, ...]) -> list[tuple[Any, Any]]:
    """`(path, state)` of every state of the given kinds, also those inside one another."""
    found: list[tuple[Any, Any]] = []

    def search(prefix: Any, node: Any, *, inside: bool) -> None:
        def stop(value: Any) -> bool:
            return isinstance(value, kinds) and not (inside and value is node)

        for path, value in jax.tree_util.tree_leaves_with_path(node, is_leaf=stop):
            if isinstance(value, kinds):
                found.append(((*prefix, *path), value))
                search((*prefix, *path), value, inside=True)

    search((), state, inside=False)
    return found


def replace_states(
    state: Any, kinds: type | tuple[type, ...], replace: Callable[[Any], Any]
) -> Any:
    """The same state with the outermost states of the given kinds replaced."""

    def visit(node: Any) -> Any:
        return replace(node) if isinstance(node, kinds) else node

    return jax.tree.map(visit, state, is_leaf=lambda node: isinstance(node, kinds))


def plain_arrays(tree: Any) -> Any:
    """The same tree with arrays in the place of what holds one, such as Flax's `nnx.Variable`."""

    def holds_array(node: Any) -> bool:
        return hasattr(type(node), "__jax_array__") and not isinstance(node, jax.Array)

    def unwrap(node: Any) -> Any:
        return jax.tree.leaves(node)[0] if holds_array(node) else node

    return jax.tree.map(unwrap, tree, is_leaf=holds_array)


def with_structure_of(reference: Any, tree: Any) -> Any:
    """The arrays of a tree, in what holds those of the reference."""
    return jax.tree.unflatten(jax.tree.structure(reference), jax.tree.leaves(tree))
