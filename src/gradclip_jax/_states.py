"""Check optimizer states, and find, read and replace gradclip_jax states in them.

Classes of states have these members, which are read wherever a state is nested:

| member | states | meaning |
| --- | --- | --- |
| `step_metrics()` | all states of this package | its entries of `metrics` |
| `inner_state` | states of guards, accumulations and `watch` | state of the transformation inside |
| `is_clip` | states of clips | the attribute exists only to mark the class |
| `loss_scale` | `LossScaleState` | factor of the next loss |
| `continued_from(earlier)` | states whose options may change | see `convert_state` |
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._checks import check_values, dtype_of, has_init_and_update
from ._errors import type_error
from ._format import describe, shortened
from ._types import Array, Path, Tree

# Reading and replacing states


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


# States of rules


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


def check_dtype_kept(argument: str, new: Any, old: Any) -> None:
    """Raise if a floating-point value would replace an integer or a bool in a rule's state."""
    if jnp.issubdtype(dtype_of(new), jnp.inexact) and not jnp.issubdtype(old.dtype, jnp.inexact):
        rule, got = "a rule whose state keeps its dtypes", f"{describe(new)} for {describe(old)}"
        raise type_error(argument, rule, got, "Return floating-point numbers from `init`.")


# Arrays


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


# Checks


def check_state(state: Any, kind: type, count: str) -> None:
    """Raise if the state is missing, belongs to another transformation, or cannot be read.

    `count` is the name of a scalar field. If it has an axis, the state belongs to several runs.
    """
    if not isinstance(state, kind):
        hint = "Call `update(grads, state, params)` with the state that `init(params)` returned."
        raise type_error("state", f"of type `{kind.__name__}`", type(state).__name__, hint)
    check_values("state", state)
    check_one_run([getattr(state, count)])


def check_optimizer_state(state: object) -> None:
    """Raise if no state can be read from a value that was passed as the optimizer state."""
    if has_init_and_update(state):
        hint = "Pass the state that `init(params)` or `update` returned."
        raise type_error("state", "an optimizer state", type(state).__name__, hint)
    if any(map(_is_untyped_state, jax.tree.leaves(state, is_leaf=_is_untyped_state))):
        hint = "Restore the checkpoint into the structure of `tx.init(params)`."
        raise type_error("state", "a state with its types", "its fields in a dict", hint)
    check_values("state", state)


def _is_untyped_state(node: object) -> bool:
    """Return whether a node has the fields, but not the type, of a state of a guard or `watch`."""
    fields = {"outcome", "guard_failed"}, {"step_count", "rows"}
    return isinstance(node, Mapping) and any(x <= node.keys() for x in fields)


def check_one_run(counts: Iterable[Any]) -> None:
    """Raise if the counts of a state have an axis of `vmap`."""
    if any(map(np.ndim, counts)):
        hint = "Use `jax.vmap`, or select run i with `jax.tree.map(lambda x: x[i], state)`."
        raise type_error("state", "the state of one run", "a state with an axis of `vmap`", hint)
