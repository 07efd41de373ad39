"""Checks of pytrees at trace time: arrays, optimizer states, updates and parameters."""

from collections.abc import Hashable, Iterable, Mapping
from itertools import zip_longest
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import type_error, value_error
from .._types import Labels, Path, Tree
from ._format import describe, leaf_path, shortened
from ._options import call_user, has_init_and_update
from ._values import dtype_of, is_array_like, is_float0, is_traced

# Arrays


def check_array(argument: str, value: object) -> None:
    """Raise if a value is not a concrete or traced array of real floating-point numbers."""
    if not is_array_like(value) or not jnp.issubdtype(dtype_of(value), jnp.floating):
        hint = "Pass a JAX or NumPy array."
        raise type_error(argument, "a floating-point array", shortened(value), hint)


def check_arrays(argument: str, tree: Tree) -> None:
    """Raise if a leaf of a tree is neither an array, nor a number, nor a shape with a dtype."""
    for path, x in jax.tree.leaves_with_path(tree):
        dtype = dtype_of(x)
        kinds = jnp.number, jnp.bool_, jax.dtypes.extended
        is_number = is_float0(x) or any([jnp.issubdtype(dtype, kind) for kind in kinds])
        is_array = is_array_like(x) or hasattr(x, "shape")
        is_wide = isinstance(x, int) and abs(x) >= 2**31
        if not (is_number and is_array) or is_wide:
            got = f"{describe(x)} at {leaf_path(argument, path)}"
            raise type_error(argument, "a tree of arrays", got, "Exclude other leaves.")


def check_values(argument: str, tree: Tree) -> None:
    """Raise if arrays have no values, because they were donated to a step or are abstract."""
    for x in jax.tree.leaves(tree):
        is_abstract = isinstance(x, jax.ShapeDtypeStruct)
        if is_abstract or (isinstance(x, jax.Array) and not is_traced(x) and x.is_deleted()):
            got = "an abstract array" if is_abstract else "a donated array"
            hint = f"Use the {argument} that the step returned."
            raise value_error(argument, "a tree of arrays with values", got, hint)


def check_concrete(argument: str, tree: Tree, hint: str) -> None:
    """Raise if a function that runs on the host is called inside jit or with donated arrays."""
    if any([is_traced(x) or isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(tree)]):
        raise type_error(argument, "passed outside `jit`", "an abstract array", hint)
    check_values(argument, tree)


def shapes_of(tree: Tree) -> tuple[Any, list[tuple[int, ...]]]:
    """Return the structure of a tree and the shapes of its leaves, for comparisons of trees."""
    return jax.tree.structure(tree), [np.shape(x) for x in jax.tree.leaves(tree)]


def check_dtype_kept(argument: str, new: Any, old: Any) -> None:
    """Raise if a floating-point value would replace an integer or a bool in a rule's state."""
    if jnp.issubdtype(dtype_of(new), jnp.inexact) and not jnp.issubdtype(old.dtype, jnp.inexact):
        rule, got = "a rule whose state keeps its dtypes", f"{describe(new)} for {describe(old)}"
        raise type_error(argument, rule, got, "Return floating-point numbers from `init`.")


# Optimizer states


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


# Updates beside parameters, and prefix trees


def check_params(updates: Tree, params: Tree | None) -> None:
    """Raise if the parameters are missing or do not match the updates."""
    if params is None:
        hint = "Call `update(grads, state, params)`."
        raise value_error("params", "passed to `update`", "None", hint)
    check_same_structure(updates, params)


def check_same_structure(updates: Tree, params: Tree) -> None:
    """Raise an error that describes the first difference in path or shape between two trees.

    A float0 leaf, which is the gradient of an integer, may have any shape.
    """
    missing: Any = (None, None)
    leaves = map(jax.tree.leaves_with_path, (updates, params))
    for (path, x), (other, y) in zip_longest(*leaves, fillvalue=missing):
        if path != other or (np.shape(x) != np.shape(y) and not is_float0(x)):
            _raise_different(_place("updates", path, x), _place("params", other, y))
    if jax.tree.structure(updates) != jax.tree.structure(params):
        _raise_different(shortened(updates), shortened(params))


def _place(argument: str, path: Path | None, leaf: object) -> str:
    """Describe a leaf and its path in an argument; "nothing" if the path is None."""
    return "nothing" if path is None else f"{describe(leaf)} at {leaf_path(argument, path)}"


def _raise_different(got: str, expected: str) -> NoReturn:
    """Raise an error for updates whose structure or shapes differ from those of `params`."""
    rule = "a tree with the structure and shapes of `params`"
    hint = "For a model of Equinox, pass `eqx.filter(model, eqx.is_array)` as `params`."
    raise type_error("updates", rule, f"{got}, expected {expected}", hint)


def broadcast_prefix(
    argument: str, prefix: Tree, like: str, tree: Tree, is_leaf: Any = None
) -> list[Any]:
    """Broadcast a prefix tree to a list with one entry for each leaf of `tree`.

    A tree without leaves, like the placeholder of `optax.tree.map_params`, may have any prefix.
    """
    if not jax.tree.leaves(tree):
        return []
    entries, structure = jax.tree.flatten(prefix, is_leaf)
    indices = structure.unflatten(range(len(entries)))  # an entry may be None or a tree
    try:
        return [entries[i] for i in jax.tree.leaves(jax.tree.broadcast(indices, tree))]
    except ValueError as error:  # it describes the first difference
        rule, kind = f"a prefix tree of `{like}`", type(tree).__name__
        hint = f"Give one entry per leaf or subtree of `{like}`, which is a `{kind}`."
        raise type_error(argument, rule, shortened(prefix), hint) from error


def labels_of(param_labels: Labels, like: str, tree: Tree) -> list[Hashable]:
    """Return the label of each leaf of `tree`."""
    labels: Any = param_labels
    if callable(labels):
        labels = call_user("param_labels", "param_labels", labels, tree)
    found = broadcast_prefix("param_labels", labels, like, tree)
    for label in found:
        if not isinstance(label, Hashable) or is_traced(label):
            hint = "Pass for example strings."
            raise type_error("param_labels", "a tree of hashable labels", shortened(label), hint)
    return found
