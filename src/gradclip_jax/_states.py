"""Counters in states, and search for states of this package inside any Optax state."""

import functools
from collections.abc import Callable
from typing import Any, Final, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ._checks import check_no_transformation
from ._errors import public
from ._types import Array, Tree

METRICS: Final[dict[type, tuple[str, ...]]] = {}
"""State types that `metrics` reads, and the names of the fields or properties that it returns."""

GATES: Final[dict[type, str]] = {}
"""State types of guards and accumulations, and the name of the field with the inner state."""

GUARDS: Final[set[type]] = set()
"""State types of guards."""

Path: TypeAlias = tuple[Any, ...]
"""The keys of a node in a pytree."""

_State = TypeVar("_State", bound=type)


def register_metrics(*names: str) -> Callable[[_State], _State]:
    """Return a class decorator that adds these fields or properties of a state to `metrics`."""

    def register(kind: _State) -> _State:
        METRICS[kind] = names
        return kind

    return register


def register_guard(*names: str) -> Callable[[_State], _State]:
    """Like `register_metrics`, for the state of a guard with a field `inner_state`."""

    def register(kind: _State) -> _State:
        GATES[kind] = "inner_state"
        GUARDS.add(kind)
        return register_metrics(*names)(kind)

    return register


def increment_where(count: Array, happened: Array | np.bool_ | bool = True) -> Array:
    """Increment a counter where `happened`; it saturates instead of overflowing."""
    # After an overflow the sum is less than `count`.
    return jnp.maximum(count, count + jnp.asarray(happened, count.dtype))


def find_states(state: Tree, kinds: type | tuple[type, ...]) -> list[tuple[Path, Tree]]:
    """Return `(path, state)` for every state of the given types, including nested states."""
    matches: list[tuple[Path, Tree]] = []

    def search(prefix: Path, node: Tree, *, inside: bool) -> None:
        def stop(value: object) -> bool:
            return isinstance(value, kinds) and not (inside and value is node)

        for path, value in jax.tree.leaves_with_path(node, is_leaf=stop):
            if isinstance(value, kinds):
                matches.append(((*prefix, *path), value))
                search((*prefix, *path), value, inside=True)

    search((), state, inside=False)
    return matches


def replace_states(
    state: Tree, kinds: type | tuple[type, ...], replace: Callable[[Any], Tree]
) -> Tree:
    """Replace the outermost states of the given types."""

    def visit(node: Tree) -> Tree:
        return replace(node) if isinstance(node, kinds) else node

    return jax.tree.map(visit, state, is_leaf=lambda node: isinstance(node, kinds))


def is_guard(state: Tree) -> bool:
    """Return whether a state is the state of a guard."""
    return type(state) in GUARDS


@public
def has_updated(state: Tree) -> Array:
    """Return whether the last call ran the optimizer inside all guards and accumulations.

    Use this function to count optimizer steps, or to update other state, such as the statistics of
    batch normalization, only at steps that were applied.

    | state | result |
    | --- | --- |
    | a guard skipped the step, or the window is still open or was dropped | False |
    | an accumulation before the first call | False |
    | no guard or accumulation; guards before the first call | True |
    | several branches, as in `optax.partition` | whether any of them applied a step |

    Args:
        state: Pytree that contains optimizer states, as for `metrics`.

    Returns:
        A bool[], with the leading axes of a vmapped state.

    Raises:
        TypeError: If `state` is a gradient transformation.

    Examples:
        >>> import jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = gcx.skip_nonfinite(gcx.skip_large_norm(optax.sgd(1.0), 10.0))
        >>> params = jnp.zeros(1)
        >>> state, steps = tx.init(params), 0
        >>> for grad in (1.0, jnp.nan, 50.0, 2.0):
        ...     params, state = gcx.apply_gradients(tx, jnp.array([grad]), state, params)
        ...     steps += int(gcx.has_updated(state))
        >>> steps
        2
    """
    check_no_transformation(state)
    stepped = _stepped(plain_arrays(state))
    return jnp.array(True) if stepped is None else stepped


def _stepped(state: Tree) -> Array | None:
    """Return whether any outermost guard or accumulation applied a step; None if there is none."""
    nodes = jax.tree.leaves(state, is_leaf=lambda node: type(node) in GATES)
    flags = [_stack_stepped(node) for node in nodes if type(node) in GATES]
    return functools.reduce(jnp.logical_or, flags) if flags else None


def _stack_stepped(node: Tree) -> Array:
    """Return whether nested guards and accumulations applied a step."""
    stepped = jnp.array(True)
    while type(node) in GATES:
        # `emitted` already includes the outer guards. A window may be emitted although an outer
        # guard skipped the last micro-batch.
        stepped = stepped & (node.consecutive_skips == 0) if is_guard(node) else node.emitted > 0
        node = getattr(node, GATES[type(node)])
    inside = _stepped(node)
    return stepped if inside is None else stepped & inside


def plain_arrays(tree: Tree) -> Tree:
    """Replace array wrappers, such as `flax.nnx.Variable`, by their arrays."""

    def holds_array(node: Tree) -> bool:
        return hasattr(type(node), "__jax_array__") and not isinstance(node, jax.Array)

    def unwrap(node: Tree) -> Tree:
        return jax.tree.leaves(node)[0] if holds_array(node) else node

    return jax.tree.map(unwrap, tree, is_leaf=holds_array)


def with_structure_of(reference: Tree, tree: Tree) -> Any:
    """Put the arrays of a tree into the structure of another tree."""
    return jax.tree.unflatten(jax.tree.structure(reference), jax.tree.leaves(tree))
