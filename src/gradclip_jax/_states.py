"""Find, read and replace gradclip_jax states in an optimizer state.

Classes of states have these members, which are read wherever a state is nested:

| member | states | meaning |
| --- | --- | --- |
| `step_metrics()` | all states of this package | its entries of `metrics` |
| `inner_state` | states of guards, accumulations and `watch` | state of the transformation inside |
| `is_clip` | states of clips | the attribute exists only to mark the class |
| `loss_scale` | `LossScaleState` | factor of the next loss |
| `continued_from(earlier)` | states whose options may change | see `convert_state` |
"""

from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp

from ._checks import shortened
from ._errors import type_error
from ._types import Array, Path, Tree


def is_own_state(node: object) -> bool:
    """Return whether a node of an optimizer state is a state of this package."""
    return hasattr(type(node), "step_metrics")


def own_states(state: Tree, path: Path = ()) -> Iterator[tuple[Path, Tree]]:
    """Yield `(path, state)` for every gradclip_jax state, from the outermost to the innermost.

    A path omits the field `inner_state` of these states, so that it is short enough for the key of
    a metric.
    """
    for place, node in jax.tree.leaves_with_path(state, is_leaf=is_own_state):
        if is_own_state(node):
            yield (*path, *place), node
            yield from own_states(getattr(node, "inner_state", ()), (*path, *place))


def find_states(state: Tree, kind: type) -> list[tuple[Path, Tree]]:
    """Return `(path, state)` for every state of a named tuple type, including nested states."""
    found: list[tuple[Path, Tree]] = []
    for path, node in jax.tree.leaves_with_path(state, is_leaf=lambda x: isinstance(x, kind)):
        if isinstance(node, kind):
            found.append((path, node))
            for name, value in node._asdict().items():
                field = (*path, jax.tree_util.GetAttrKey(name))
                found += [((*field, *inner), x) for inner, x in find_states(value, kind)]
    return found


def replace_states(state: Tree, kind: type, replace: Callable[[Tree], Tree]) -> Tree:
    """Apply `replace` to each state of the given type that is not inside another one."""

    def visit(node: Tree) -> Tree:
        return replace(node) if isinstance(node, kind) else node

    return jax.tree.map(visit, state, is_leaf=lambda node: isinstance(node, kind))


def state_of_rule(argument: str, name: str, state: Tree) -> Tree:
    """Return the state of a rule from a dictionary keyed by rule names.

    Raise an error if it is missing.
    """
    if not isinstance(state, Mapping) or name not in state:
        hint = "Pass the state of this transformation, or convert it with `gcx.convert_state`."
        raise type_error(
            "state", f"a state of the rule {name!r} for `{argument}`", shortened(state), hint
        )
    return state[name]


def increment_where(count: Array, happened: Array | bool = True) -> Array:
    """Increment a counter where `happened` is true, saturating instead of overflowing."""
    # If the sum overflows, it is less than `count`.
    return jnp.maximum(count, count + jnp.asarray(happened, count.dtype))


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
