"""Counters, and functions that search Optax states for states of this package."""

import functools
from collections.abc import Callable
from typing import Final, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ._checks import check_no_transformation
from ._errors import public
from ._types import Array, Path, Tree

METRICS: Final[dict[type, tuple[str, ...]]] = {}
"""State types that `metrics` reads, and the names of the fields or properties that it returns."""

GATES: Final[dict[type, str]] = {}
"""State types of guards and accumulations, and the name of the field with the inner state."""

GUARDS: Final[set[type]] = set()
"""State types of guards."""

_State = TypeVar("_State", bound=type)


def register_metrics(*names: str) -> Callable[[_State], _State]:
    """Return a class decorator that adds the named fields of a state to `metrics`."""

    def register(kind: _State) -> _State:
        METRICS[kind] = names
        return kind

    return register


def register_guard(*names: str) -> Callable[[_State], _State]:
    """Return a decorator like `register_metrics` for the state of a guard.

    `consecutive_skips` and `guard_failed`, which all guards have, are added to the names.
    """

    def register(kind: _State) -> _State:
        GATES[kind] = "inner_state"
        GUARDS.add(kind)
        return register_metrics(*names, "consecutive_skips", "guard_failed")(kind)

    return register


def increment_where(count: Array, happened: Array | np.bool_ | bool = True) -> Array:
    """Increment a counter where `happened` is true, saturating instead of overflowing."""
    # If the sum overflows, it is less than `count`.
    return jnp.maximum(count, count + jnp.asarray(happened, count.dtype))


def find_states(state: Tree, kinds: type | tuple[type, ...]) -> list[tuple[Path, Tree]]:
    """Return `(path, state)` for every state of the given types, including nested states."""
    found: list[tuple[Path, Tree]] = [((), state)] if isinstance(state, kinds) else []

    def is_inside(node: object) -> bool:
        return isinstance(node, kinds) and node is not state

    for path, node in jax.tree.leaves_with_path(state, is_leaf=is_inside):
        for inner_path, inner in find_states(node, kinds) if is_inside(node) else ():
            found.append(((*path, *inner_path), inner))
    return found


def replace_states(
    state: Tree, kinds: type | tuple[type, ...], replace: Callable[[Tree], Tree]
) -> Tree:
    """Apply `replace` to the outermost states of the given types."""

    def visit(node: Tree) -> Tree:
        return replace(node) if isinstance(node, kinds) else node

    return jax.tree.map(visit, state, is_leaf=lambda node: isinstance(node, kinds))


def is_guard(state: Tree) -> bool:
    """Return whether a state belongs to a guard such as `skip_nonfinite`."""
    return type(state) in GUARDS


@public
def has_updated(state: Tree) -> Array:
    """Return whether the last update applied an optimizer step.

    Use this function to count optimizer steps, or to update other state, such as batch
    normalization statistics, only after applied steps.

    | state | result |
    | --- | --- |
    | a guard skipped the step, or the window is still open or was dropped | False |
    | an accumulation before the first call | False |
    | no guard or accumulation; guards before the first call | True |
    | several guards or accumulations, as in `optax.partition` | whether any applied a step |

    Args:
        state: Optimizer state, or a pytree that contains optimizer states.

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
    return has_stepped(plain_arrays(state))


def has_stepped(state: Tree) -> Array:
    """Return whether an outermost guard or accumulation applied a step, or True if none exists."""
    nodes = jax.tree.leaves(state, is_leaf=lambda node: type(node) in GATES)
    flags = [_stack_stepped(node) for node in nodes if type(node) in GATES]
    return functools.reduce(jnp.logical_or, flags) if flags else jnp.array(True)


def _stack_stepped(node: Tree) -> Array:
    """Return whether all nested guards and accumulations applied the step."""
    stepped = jnp.array(True)
    while type(node) in GATES:
        # `emitted` already accounts for outer guards.
        # An accumulation may run the optimizer even if an outer guard skipped the last micro-batch.
        stepped = stepped & (node.consecutive_skips == 0) if is_guard(node) else node.emitted > 0
        node = getattr(node, GATES[type(node)])
    return stepped & has_stepped(node)


def plain_arrays(tree: Tree) -> Tree:
    """Replace array wrappers, such as `flax.nnx.Variable`, by their arrays."""

    def holds_array(node: Tree) -> bool:
        return hasattr(type(node), "__jax_array__") and not isinstance(node, jax.Array)

    def unwrap(node: Tree) -> Tree:
        return jax.tree.leaves(node)[0] if holds_array(node) else node

    return jax.tree.map(unwrap, tree, is_leaf=holds_array)


def with_structure_of(reference: Tree, tree: Tree) -> Tree:
    """Return the leaves of `tree` with the pytree structure of `reference`."""
    return jax.tree.unflatten(jax.tree.structure(reference), jax.tree.leaves(tree))
