"""Checks of hyperparameters when a transformation is built, and of pytrees at trace time.

Traced values are not checked.
"""

import inspect
import math
from collections.abc import Hashable, Iterable, Sequence
from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ._errors import type_error, value_error
from ._types import Array, AxisName, Count, Labels, Order, Path, Tree

_SHOWN = 5  # maximum number of invalid leaves listed in an error message
_SHOWN_CHARACTERS = 200


def describe(leaf: Any) -> str:
    """Format an array as `dtype[shape]`, and any other leaf as the name of its type."""
    if not hasattr(leaf, "dtype"):
        return type(leaf).__name__
    return f"{leaf.dtype}[{', '.join(map(str, np.shape(leaf)))}]"


def shortened(value: object) -> str:
    """Format a value for an error message, with arrays as `dtype[shape]` and functions by name."""

    def abstract(leaf: Any) -> object:
        if inspect.isfunction(leaf):
            return _Shown(f"the function `{leaf.__name__}`")
        is_array = hasattr(leaf, "dtype") and hasattr(leaf, "shape")
        is_number = isinstance(leaf, (np.generic, jax.Array)) and not is_traced(leaf)
        is_shown = is_array and (leaf.shape or not is_number)
        return _Shown(describe(leaf)) if is_shown else leaf

    if isinstance(value, int) and value.bit_length() > 64:  # Python limits int-to-str conversion
        return f"an integer of {value.bit_length()} bits"
    text = repr(jax.tree.map(abstract, value))
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


class _Shown(str):
    """A string whose `repr` has no quotation marks."""

    __repr__ = str.__str__


def dtype_of(leaf: Any) -> np.dtype:
    """Return the dtype of an array or a Python number, or `object` for other values."""
    if hasattr(leaf, "dtype"):
        return leaf.dtype
    for kind in (bool, int, float, complex):
        if isinstance(leaf, kind):
            return np.dtype(kind)
    return np.dtype(object)  # `jnp.result_type` would raise


def is_scalar(value: object, *kinds: type) -> bool:
    """Return whether a value is a Python, NumPy or JAX scalar with a dtype in `kinds`."""
    if not isinstance(value, (int, float, np.generic, np.ndarray, jax.Array)) or np.ndim(value):
        return False
    dtype = dtype_of(value)  # bfloat16 scalars are not instances of `np.number`
    return any(jnp.issubdtype(dtype, kind) for kind in kinds)


def leaf_path(argument: str, path: Path) -> str:
    """Format the path of a leaf as a Python expression, such as `params['w']`."""
    return argument + jax.tree_util.keystr(path)


def is_traced(value: object) -> bool:
    return isinstance(value, Tracer)


def is_float0(leaf: object) -> bool:
    """Return whether a leaf has dtype float0, the dtype of gradients of integers."""
    return getattr(leaf, "dtype", None) == jax.dtypes.float0


def listed(places: Iterable[str]) -> str:
    places = list(places)
    rest = len(places) - _SHOWN
    return ", ".join(places[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def check_number(argument: str, value: Any, hint: str, interval: str = "(0, inf]") -> None:
    """Check that a value is a number and, unless it is traced, that it lies in an interval.

    In `interval`, a bracket includes a bound, and a parenthesis excludes it, as in "[0, 1)".
    """
    low, high = map(float, interval[1:-1].split(","))
    rule = f"a number in {interval[0]}{low:g}, {high:g}{interval[-1]}"
    if not is_scalar(value, jnp.floating, jnp.integer):
        hint = hint if value is None else "Pass one number."
        raise type_error(argument, rule, shortened(value), hint)
    if is_traced(value):
        return
    try:
        known = float(value)
    except OverflowError:  # an integer of hundreds of digits
        known = math.nan
    is_above = low <= known if interval[0] == "[" else low < known
    is_below = known <= high if interval[-1] == "]" else known < high
    if not (is_above and is_below):
        raise value_error(argument, rule, shortened(value), hint)


def check_decays(**decays: object) -> None:
    """Raise if a decay rate is not a number in [0, 1)."""
    hint = "Pass a decay rate such as 0.99."
    for argument, value in decays.items():
        check_number(argument, value, hint, "[0, 1)")


def check_percentile(argument: str, value: Any) -> None:
    """Check a percentile out of 100, and raise for a fraction such as 0.9."""
    check_number(argument, value, "Pass 50 for the median.", "[0, 100]")
    if not is_traced(value) and 0 < value < 1:
        hint = "Percentiles are out of 100: pass 90 for a value above 90 % of the others."
        raise value_error(argument, "0, or between 1 and 100", value, hint)


def check_count(argument: str, value: Any, hint: str, *, low: int = 1) -> None:
    """Check that a value is an integer and, unless it is traced, that it is at least `low`."""
    rule = f"an integer >= {low}"
    if hasattr(value, "dtype"):
        is_integer = jnp.issubdtype(value.dtype, jnp.integer)
    else:
        is_integer = hasattr(value, "__index__") and not isinstance(value, bool)
    if not is_integer or inspect.isclass(value) or np.ndim(value) != 0:
        hint = hint if value is None else "Pass one integer."
        raise type_error(argument, rule, shortened(value), hint)
    if is_traced(value) or low <= int(value) <= np.iinfo(np.int32).max:
        return
    if int(value) >= low:  # counters in states have 32 bits
        rule, hint = f"an integer <= {np.iinfo(np.int32).max}", "Pass a smaller integer."
    raise value_error(argument, rule, shortened(value), hint)


def check_static(argument: str, value: object) -> None:
    """Raise if a static argument is a JAX array or a tracer."""
    if is_traced(value) or isinstance(value, jax.Array):
        rule = "a static Python value"
        hint = f"Under `optax.inject_hyperparams` pass `static_args=({argument!r},)`."
        raise type_error(argument, rule, describe(value), hint)


def check_length(argument: str, value: Count) -> None:
    """Raise if a history length is not a static integer between 1 and 2^20."""
    check_static(argument, value)
    check_count(argument, value, "Pass the number of steps to keep.")
    if int(value) > 2**20:  # the state contains every value of the window
        rule, hint = "an integer <= 2**20", "Pass a shorter window, such as 1000."
        raise value_error(argument, rule, shortened(value), hint)


def refuse_traced(argument: str, value: object) -> None:
    """Raise if a value is a tracer, which code on the host cannot read."""
    if is_traced(value):
        hint = "Call this function outside jit, on the outputs of the step."
        raise type_error(argument, "known on the host", "a tracer", hint)


def is_function(value: object) -> bool:
    """Return whether a value is callable and not a type such as `jnp.float32`."""
    return callable(value) and not isinstance(value, type)


def check_dtype(argument: str, value: Any) -> None:
    """Raise if a value is not a real floating dtype."""
    try:
        is_dtype = value is not None and not isinstance(value, (jax.Array, np.ndarray))
        is_floating = is_dtype and jnp.issubdtype(jnp.dtype(value), jnp.floating)
    except (TypeError, ValueError):
        is_floating = False
    if not is_floating:
        rule, hint = "a real floating dtype", "Use jnp.float32, or jnp.bfloat16 to save memory."
        raise type_error(argument, rule, shortened(value), hint)


def check_choice(argument: str, value: object, choices: Sequence[object]) -> None:
    """Raise if a value is not one of `choices`, which are strings, bools or None."""
    if not isinstance(value, (str, bool, type(None))) or value not in choices:
        names = list(map(repr, choices))
        rule = " or ".join(names) if len(names) == 2 else f"one of {listed(names)}"
        raise value_error(argument, rule, shortened(value), "Pass one of these values.")


def check_ord(ord: Order | None) -> float:
    """Return the order of a norm as a Python float, 2 by default as in `jnp.linalg.norm`."""
    if ord is None:
        return 2.0
    check_static("ord", ord)
    hint = "Pass 1, 2 or `jnp.inf`."
    check_number("ord", ord, hint)
    if float(ord) not in (1, 2, math.inf):
        raise value_error("ord", "1, 2 or inf", shortened(ord), hint)
    return float(ord)


def check_axis_name(axis_name: AxisName, argument: str = "axis_name") -> AxisName:
    """Return the names of mapped axes as a tuple, or None."""
    if axis_name is None:
        return None
    names = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
    if not all(isinstance(name, str) for name in names):
        rule = "a string, a tuple of strings or None"
        hint = "Pass the names of mapped axes, as in `jax.lax.psum`."
        raise type_error(argument, rule, shortened(axis_name), hint)
    return names


def check_callable(argument: str, value: object, hint: str) -> None:
    if not callable(value):
        raise type_error(argument, "a function", shortened(value), hint)


def check_transformation(argument: str, value: object) -> None:
    """Raise if a value has no `init` or no `update` function."""
    is_pair = callable(getattr(value, "init", None)) and callable(getattr(value, "update", None))
    if isinstance(value, type) or not is_pair:
        hint = "Pass for example `optax.adamw(1e-3)` or `optax.clip_by_global_norm(1.0)`."
        if inspect.isfunction(value):
            hint = f"Call the function: `{value.__name__}(...)`."
        rule = "an `optax.GradientTransformation`"
        raise type_error(argument, rule, shortened(value), hint)


def check_no_transformation(state: object) -> None:
    """Raise if a transformation was passed instead of its state."""
    if callable(getattr(state, "init", None)) and callable(getattr(state, "update", None)):
        hint = "Pass the state that `init(params)` or `update` returned."
        got = type(state).__name__
        raise type_error("state", "an optimizer state", got, hint)


def check_state(state: object, kind: type) -> None:
    """Raise if the state is missing or belongs to another transformation."""
    name = kind.__name__
    rule = f"{'an' if name[0] in 'AEIOU' else 'a'} `{name}`"
    if state is None:
        hint = "Pass the state that `init(params)` or the last `update` returned."
        raise value_error("state", rule, "None", hint)
    if not isinstance(state, kind):
        hint = "Call `update(grads, state, params)` with the state that `init(params)` returned."
        raise type_error("state", rule, type(state).__name__, hint)


def check_no_state(argument: str, updates: Tree) -> None:
    """Raise if an optimizer state of this package was passed instead of the updates."""

    def is_state(node: object) -> bool:
        return isinstance(node, tuple) and type(node).__module__.startswith(f"{__package__}.")

    for path, node in jax.tree.leaves_with_path(updates, is_leaf=is_state):
        if is_state(node):
            got = f"{type(node).__name__} at {leaf_path(argument, path)}"
            hint = "The order of arguments is `update(grads, state, params)`."
            raise type_error(argument, "a tree of gradients", got, hint)


def check_axis(axis: object) -> None:
    """Check that `axis` is None, an integer or a sequence of integers."""
    check_static("axis", axis)
    plain = axis.tolist() if isinstance(axis, np.ndarray) else axis
    axes = plain if isinstance(plain, (tuple, list, range)) else () if plain is None else (plain,)
    if not all(hasattr(a, "__index__") and not isinstance(a, bool) for a in axes):
        hint = "Pass, for example, 0 or (0, 1), or None to choose axes by rank."
        rule = "an integer, a sequence of integers or None"
        raise type_error("axis", rule, shortened(axis), hint)


def axes_within(axis: Any, x: Array, owner: str, place: str, hint: str) -> tuple[int, ...]:
    """Normalize axes to sorted, nonnegative integers, or raise if the array does not have them."""
    rank = np.ndim(x)
    axes = (axis,) if np.ndim(axis) == 0 else tuple(axis)
    got = f"{axis} for {describe(x)}" + (f" at {place}" if place else "")
    if any(not -rank <= a < rank for a in axes):
        raise value_error("axis", f"in [{-rank}, {rank}) for {owner}", got, hint)
    found = sorted({int(a) % rank for a in axes})
    if len(found) < len(axes):
        raise value_error("axis", f"distinct axes of {owner}", got, f"Pass {tuple(found)}.")
    return tuple(found)


def check_same_structure(updates: Tree, params: Tree) -> None:
    """Raise an error that describes the first difference in path or shape between two trees.

    A float0 leaf, which is the gradient of an integer, may have any shape.
    """
    is_alike = jax.tree.structure(updates) == jax.tree.structure(params)
    leaves = jax.tree.leaves(updates), jax.tree.leaves(params)
    if not is_alike or any(map(_has_other_shape, *leaves)):
        got = _first_difference("updates", updates, "params", params)
        hint = "Pass `updates` with the structure of `params`."
        if got and got.startswith("nothing"):
            hint += " For a model of Equinox, pass `eqx.filter(model, eqx.is_array)` as `params`."
        raise type_error("updates", "a tree like `params`", got, hint)


def check_params(updates: Tree, params: Tree | None) -> None:
    """Raise if the parameters are missing or do not match the updates."""
    if params is None:
        hint = "Call `update(grads, state, params)`."
        raise value_error("params", "passed to `update`", "None", hint)
    check_same_structure(updates, params)


def _has_other_shape(leaf: Array, other: Array) -> bool:
    return np.shape(leaf) != np.shape(other) and not is_float0(leaf)


def _first_difference(place: str, tree: Tree, other_place: str, other: Tree) -> str | None:
    """Describe the first difference between two trees, or return None if they are alike."""
    (ours, structure), (theirs, other_structure) = children_of(tree), children_of(other)
    if structure == other_structure == jax.tree.structure(0):
        expected = f"{describe(tree)} at {place}, expected shape {list(np.shape(other))}"
        return expected if _has_other_shape(tree, other) else None
    for (path, x), (other_path, y) in zip_longest(ours, theirs, fillvalue=(None, None)):
        if path is None or other_path is None or path != other_path:
            missing = _first_leaf(other_place, other_path, y)
            return f"{_first_leaf(place, path, x)} where {missing} was expected"
        difference = _first_difference(leaf_path(place, path), x, leaf_path(other_place, path), y)
        if difference:
            return difference
    kinds = f"a {type(tree).__name__} at {place}, expected a {type(other).__name__}"
    return None if structure == other_structure else kinds


def _first_leaf(place: str, path: Path | None, child: Tree) -> str:
    leaves = jax.tree.leaves_with_path(child) or [((), None)]
    return "nothing" if path is None else leaf_path(place, (*path, *leaves[0][0]))


def children_of(node: Tree) -> tuple[list[tuple[Path, Tree]], Any]:
    """Return the children of a pytree node with their paths, and its structure."""
    return jax.tree.flatten_with_path(node, is_leaf=lambda x: x is not node)


def broadcast_prefix(
    argument: str, prefix: Tree, like: str, tree: Tree, is_leaf: Any = None
) -> list[Any]:
    """Broadcast a prefix tree to a list with one entry for each leaf of `tree`."""
    entries, structure = jax.tree.flatten(prefix, is_leaf)
    try:
        subtrees = structure.flatten_up_to(tree)
    except (ValueError, TypeError) as mismatch:
        given = jax.tree.leaves_with_path(prefix, is_leaf=is_leaf)
        leaves = jax.tree.leaves_with_path(tree)
        rule = f"a prefix tree of `{like}`"
        hint = f"Give one entry per leaf or per subtree of `{like}`."
        got = str(mismatch).splitlines()[0]
        if type(prefix) is not type(tree):
            got = f"a {type(prefix).__name__} where `{like}` is a {type(tree).__name__}"
        for path, _ in reversed(given):
            if not any(place[: len(path)] == path for place, _ in leaves):
                got = f"an entry at {leaf_path(argument, path)}, where `{like}` has no leaf"
        for place, _ in reversed(leaves):
            if not any(place[: len(path)] == path for path, _ in given):
                got = f"no entry for {leaf_path(like, place)}"
        raise type_error(argument, rule, got, hint) from None
    pairs = zip(entries, subtrees, strict=True)
    return [entry for entry, subtree in pairs for _ in jax.tree.leaves(subtree)]


def labels_of(param_labels: Labels, like: str, tree: Tree) -> list[Hashable]:
    """Return the label of each leaf of `tree`."""
    prefix = param_labels(tree) if callable(param_labels) else param_labels
    labels = broadcast_prefix("param_labels", prefix, like, tree)
    for label in labels:
        if not isinstance(label, Hashable):
            hint = "Use strings or integers as labels."
            raise type_error("param_labels", "a tree of hashable labels", describe(label), hint)
    return labels
