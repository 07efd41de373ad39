"""Counters of states, and the search for states of this package inside any Optax state."""

import functools
from collections.abc import Callable
from typing import Any, Final, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ._checks import check_no_transformation
from ._errors import public
from ._types import Array

METRICS: Final[dict[type, tuple[str, ...]]] = {}
"""Each state of this package that `metrics` reads, and the fields or properties it reports."""

GATES: Final[dict[type, str]] = {}
"""The states of guards and accumulations, and the field of each that holds the inner state."""

GUARDS: Final[set[type]] = set()
"""The states of guards."""

_State = TypeVar("_State", bound=type)


def register_metrics(*names: str) -> Callable[[_State], _State]:
    """A class decorator: `metrics` reports these fields or properties of the state."""

    def register(kind: _State) -> _State:
        METRICS[kind] = names
        return kind

    return register


def register_guard(*names: str) -> Callable[[_State], _State]:
    """The same for the state of a guard, whose inner state is in `inner_state`."""

    def register(kind: _State) -> _State:
        GATES[kind] = "inner_state"
        GUARDS.add(kind)
        return register_metrics(*names)(kind)

    return register


def increment_where(count: Array, happened: Array | np.bool_ | bool = True) -> Array:
    """Increment a counter where `happened`; it saturates instead of wrapping around."""
    return jnp.maximum(count, count + jnp.asarray(happened, count.dtype))  # one that wraps is less


def find_states(state: Any, kinds: type | tuple[type, ...]) -> list[tuple[Any, Any]]:
    """`(path, state)` of every state of the given kinds, also of nested ones."""
    matches: list[tuple[Any, Any]] = []

    def search(prefix: Any, node: Any, *, inside: bool) -> None:
        def stop(value: Any) -> bool:
            return isinstance(value, kinds) and not (inside and value is node)

        for path, value in jax.tree.leaves_with_path(node, is_leaf=stop):
            if isinstance(value, kinds):
                matches.append(((*prefix, *path), value))
                search((*prefix, *path), value, inside=True)

    search((), state, inside=False)
    return matches


def replace_states(
    state: Any, kinds: type | tuple[type, ...], replace: Callable[[Any], Any]
) -> Any:
    """Replace the outermost states of the given kinds."""

    def visit(node: Any) -> Any:
        return replace(node) if isinstance(node, kinds) else node

    return jax.tree.map(visit, state, is_leaf=lambda node: isinstance(node, kinds))


def is_guard(state: Any) -> bool:
    """Whether a state is that of a guard."""
    return type(state) in GUARDS


@public
def has_updated(state: Any) -> Array:
    """Whether the last call applied a step: the optimizer inside all guards and accumulations ran.

    Use it to count optimizer steps, and to update other state, such as the statistics of batch
    normalization, only with steps that were applied.

    | state | value |
    | --- | --- |
    | a guard skipped the step, or the window is still open or was dropped | False |
    | an accumulation before the first call | False |
    | no guard or accumulation; guards before the first call | True |
    | several side by side, as in `optax.partition` | whether any of them applied a step |

    Args:
        state: any pytree that contains optimizer states, as for `metrics`.

    Returns:
        bool[], with the leading axes of a state that was vmapped.

    Raises:
        TypeError: `state` is a transformation.

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


def _stepped(state: Any) -> Array | None:
    """Whether any of the outermost gates in a state let a step through; None without gates."""
    nodes = jax.tree.leaves(state, is_leaf=lambda node: type(node) in GATES)
    flags = [_stack_stepped(node) for node in nodes if type(node) in GATES]
    return functools.reduce(jnp.logical_or, flags) if flags else None


def _stack_stepped(node: Any) -> Array:
    """Whether gates directly in one another let a step through, and so did what is inside them."""
    stepped = jnp.array(True)
    while type(node) in GATES:
        # An accumulation knows of guards around it; its window closes without what they skip.
        stepped = stepped & (node.consecutive_skips == 0) if is_guard(node) else node.emitted > 0
        node = getattr(node, GATES[type(node)])
    inside = _stepped(node)
    return stepped if inside is None else stepped & inside


def plain_arrays(tree: Any) -> Any:
    """Replace wrappers of arrays, such as `flax.nnx.Variable`, by their arrays."""

    def holds_array(node: Any) -> bool:
        return hasattr(type(node), "__jax_array__") and not isinstance(node, jax.Array)

    def unwrap(node: Any) -> Any:
        return jax.tree.leaves(node)[0] if holds_array(node) else node

    return jax.tree.map(unwrap, tree, is_leaf=holds_array)


def with_structure_of(reference: Any, tree: Any) -> Any:
    """The arrays of a tree in the structure of another tree."""
    return jax.tree.unflatten(jax.tree.structure(reference), jax.tree.leaves(tree))
