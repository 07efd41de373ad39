"""Checks of hyperparameters and of pytrees, and the formatting of values for messages.

Hyperparameters are checked when a transformation is built, and pytrees at trace time. Traced values
are not checked.
"""

import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ._errors import type_error, value_error
from ._types import UNBOUNDED, Count, Labels, Order, Path, Tree

_MAX_LISTED: Final = 5  # maximum number of invalid leaves listed in an error message
_MAX_CHARACTERS: Final = 200
_TINY: Final = float(np.finfo(np.float32).tiny)

# Formatting of values and paths


def describe(leaf: Any) -> str:
    """Format an array as `dtype[shape]`, and any other leaf as the name of its type."""
    if not hasattr(leaf, "dtype"):
        return type(leaf).__name__
    return f"{leaf.dtype}[{', '.join(map(str, np.shape(leaf)))}]"


def shortened(value: object) -> str:
    """Format a value for an error message, with arrays as `dtype[shape]`."""

    def abstract(leaf: Any) -> object:
        if isinstance(leaf, int) and leaf.bit_length() > _MAX_CHARACTERS:
            # Python raises an error for the digits of a very large integer.
            return _Unquoted(f"an integer of {leaf.bit_length()} bits")
        is_number = np.ndim(leaf) == 0 and not isinstance(leaf, (Tracer, jax.ShapeDtypeStruct))
        return leaf if is_number else _Unquoted(describe(leaf))

    text = repr(jax.tree.map(abstract, value))
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}..."


class _Unquoted(str):
    """A string whose `repr` has no quotation marks."""

    __repr__ = str.__str__


def listed(items: Iterable[str]) -> str:
    """Join the first items with commas, and count the others."""
    items = list(items)
    rest = len(items) - _MAX_LISTED
    return ", ".join(items[:_MAX_LISTED]) + (f" and {rest} more" if rest > 0 else "")


def leaf_path(argument: str, path: Path) -> str:
    """Format the path of a leaf as a Python expression, such as `params['w']`."""
    return argument + jax.tree_util.keystr(path)


def leaf_name(path: Path, index: Iterable[int] = ()) -> str:
    """Format the path of a leaf, layer or row as its name in logs, such as `decoder/wi[3]`."""
    keys = tuple(key for key in path if str(key) != ".value")  # of a variable of Flax NNX
    name = jax.tree_util.keystr(keys, simple=True, separator="/")
    return name + "".join(f"[{i}]" for i in index)


def distinct(names: Iterable[str]) -> list[str]:
    """Number repeated names, such as those of the key `a/b` and of the key `b` inside `a`."""
    count, out = Counter[str](), list[str]()
    for name in names:
        count[name] += 1
        out.append(name if count[name] == 1 else f"{name} ({count[name]})")
    return out


# Types of values

ARRAY_LIKE: Final = (bool, int, float, complex, np.generic, np.ndarray, jax.Array)
"""Types of arrays and numbers, which jit can trace."""


def dtype_of(leaf: Any) -> np.dtype:
    """Return the dtype of an array or a Python number, or `object` for other values."""
    if hasattr(leaf, "dtype"):
        return leaf.dtype
    # `jnp.result_type` would raise for other objects.
    return np.dtype(type(leaf) if isinstance(leaf, (bool, int, float, complex)) else object)


def is_scalar(value: Any, *kinds: type) -> bool:
    """Return whether a value is a Python, NumPy or JAX scalar with a dtype in `kinds`."""
    if not isinstance(value, ARRAY_LIKE) or np.ndim(value):
        return False
    # bfloat16 scalars are not instances of `np.number`.
    return any(map(functools.partial(jnp.issubdtype, dtype_of(value)), kinds))


def is_float0(leaf: object) -> bool:
    """Return whether a leaf has dtype float0, the dtype of gradients of integers."""
    return getattr(leaf, "dtype", None) == jax.dtypes.float0


def is_traced(value: object) -> bool:
    """Return whether a value is a tracer of JAX."""
    return isinstance(value, Tracer)


# Hyperparameters


def check_number(argument: str, value: Any, hint: str, interval: str = "(0, inf]") -> Any:
    """Check that a value is a number and, unless it is traced, that it lies in an interval.

    A Python or NumPy number is returned as a float, because int32 cannot represent every integer.
    Traced values and JAX arrays remain arrays, so that a function that closes over a JAX array is
    not traced again for a new value.

    In `interval`, a bracket includes a bound, and a parenthesis excludes it, as in "[0, 1)".
    Numbers that float32 cannot represent raise, because they would become 0 or infinity; XLA may
    replace subnormal numbers by zero.
    """
    low, high = map(float, interval[1:-1].split(","))
    rule = f"a float32 number in {interval[0]}{low:g}, {high:g}{interval[-1]}"
    if not is_scalar(value, jnp.floating, jnp.integer):
        raise type_error(argument, rule, shortened(value), hint)
    if is_traced(value):
        return value
    try:
        known = float(value)
    except OverflowError:  # an integer above all floats
        known = math.nan
    is_above = low <= known if interval[0] == "[" else low < known
    is_below = known <= high if interval[-1] == "]" else known < high
    is_float32 = known in (0, math.inf, -math.inf) or _TINY <= abs(known) <= UNBOUNDED
    if not (is_above and is_below and is_float32):
        raise value_error(argument, rule, shortened(value), hint)
    return jnp.asarray(known) if isinstance(value, jax.Array) else known


def check_decay(argument: str, value: Any) -> Any:
    """Check a decay rate, a number in [0, 1), and return it like `check_number`."""
    return check_number(argument, value, "Pass a decay rate such as 0.99.", "[0, 1)")


def check_count(
    argument: str, value: Any, hint: str, *, low: int = 1, high: int = np.iinfo(np.int32).max
) -> Any:
    """Check that a value is an integer and, unless it is traced, that it is in `[low, high]`.

    Return a Python integer, or the traced value unchanged.
    """
    rule = f"an integer in [{low}, {high}]"
    if not is_scalar(value, jnp.integer):
        raise type_error(argument, rule, shortened(value), hint)
    if is_traced(value):
        return value
    if not low <= int(value) <= high:
        raise value_error(argument, rule, shortened(value), hint)
    return int(value)


def check_static(argument: str, value: object) -> None:
    """Raise if a static argument is a JAX array or a tracer."""
    if is_traced(value) or isinstance(value, jax.Array):
        rule = "a static Python value"
        hint = f"With `jit` or `inject_hyperparams`, add {argument!r} to the static arguments."
        raise type_error(argument, rule, describe(value), hint)


def check_length(argument: str, value: Count, hint: str, *, low: int = 1) -> int:
    """Check that a value is a static integer between `low` and 2^20, and return it."""
    check_static(argument, value)
    return check_count(argument, value, hint, low=low, high=2**20)


def check_rule_name(name: object, fun: Callable[..., Any]) -> str:
    """Return the name of a rule; by default that of its function, such as `my_rule.update`."""
    if not isinstance(name, str):
        raise type_error("name", "a string", shortened(name), "Pass the name of the rule.")
    default = getattr(fun, "__qualname__", None) or type(fun).__qualname__
    return name or default.replace(".<locals>", "")


def check_positions(argument: str, value: object, hint: str) -> tuple[int, ...]:
    """Return a static integer, or a sequence of static integers, as a tuple."""
    positions: Any = value if isinstance(value, (list, tuple, range)) else (value,)
    for i in positions:
        check_static(argument, i)
        check_count(argument, i, hint, low=-64)
    return tuple(map(int, positions))


def check_axis(axis: object) -> tuple[int, ...] | None:
    """Return axes of an array as a tuple, or None for None; raise unless they are integers."""
    if axis is None:
        return None
    return check_positions("axis", axis, "Pass for example 0 or (0, 1).")


def check_choice(argument: str, value: object, choices: Sequence[object]) -> None:
    """Raise if a value is not one of `choices`, which are strings, numbers or None."""
    kinds = str, int, float, np.generic, type(None)
    # True equals 1.
    if isinstance(value, bool) or not (isinstance(value, kinds) and value in choices):
        rule = f"one of {', '.join(map(repr, choices))}"
        raise value_error(argument, rule, shortened(value), "Pass one of these values.")


def check_ord(ord: Order | None) -> float:
    """Return the order of a norm as a Python float, 2 by default as in `jnp.linalg.norm`."""
    check_static("ord", ord)
    check_choice("ord", ord, (None, 1, 2, math.inf))
    return 2.0 if ord is None else float(ord)


def check_flag(argument: str, value: object) -> None:
    """Raise if a value is not a static bool."""
    if not isinstance(value, (bool, np.bool_)):
        raise type_error(argument, "True or False", shortened(value), "Pass a Python bool.")


# Functions and transformations


def call_schedule(argument: str, schedule: Any, step: Any) -> Any:
    """Call a schedule of a user, and raise if it does not return a real scalar.

    A NumPy or Python number becomes a float as in `check_number`.
    """
    value, hint = call_user(argument, "schedule", schedule, step), "Return one number per step."
    if not is_scalar(value, jnp.floating, jnp.integer):
        raise type_error(argument, "a schedule that returns a real scalar", describe(value), hint)
    is_array = isinstance(value, jax.Array)
    return value if is_array else check_number(argument, value, hint, "[-inf, inf]")


def check_callable(argument: str, value: object, hint: str) -> None:
    """Raise if a value is not a function, or is a factory of this package that was not called."""
    if is_factory(value):
        name = getattr(value, "__name__", "")
        got = f"the function `{name}`"
        raise type_error(argument, f"the result of `{name}(...)`", got, "Call the function.")
    if not callable(value) or isinstance(value, type):
        raise type_error(argument, "a function", shortened(value), hint)


def is_factory(value: Any) -> bool:
    """Return whether a value is a public function of this package."""
    is_decorated = inspect.isfunction(value) and hasattr(value, "__wrapped__")
    return is_decorated and _is_of_this_package(value) and "<" not in value.__qualname__


def _is_of_this_package(definition: Any) -> bool:
    """Return whether a function or a class is defined in this package."""
    return definition.__module__.split(".")[0] == __name__.split(".")[0]


def call_user(argument: str, name: str, fun: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a user-defined function, or raise if it cannot be called with these arguments."""
    check_callable(argument, fun, "Pass a function.")
    try:
        inspect.signature(fun).bind(*args, **kwargs)
    except TypeError as error:
        rule = f"a function `{name}` with {len(args)} positional parameters"
        if name in _SIGNATURES:
            rule = f"a function `{_SIGNATURES[name]}`"
        got = f"{name}{inspect.signature(fun)}: {error}"
        raise type_error(argument, rule, got, "Change its parameters.") from None
    except ValueError:  # a builtin without a signature
        pass
    return fun(*args, **kwargs)


_SIGNATURES = {
    "should_skip": "(grads, state, params, **extra_args) -> (skip, observed)",
    "advance": "(state, observed, skipped) -> state",
    "predicate": "(grads, params, **extra_args) -> bool[]",
    "reaction": "(norm, threshold) -> factor",
}
"""Signatures of user-defined functions, by the name of the argument or method."""


def has_init_and_update(value: object) -> bool:
    """Return whether a value has the two functions of a gradient transformation."""
    return callable(getattr(value, "init", None)) and callable(getattr(value, "update", None))


def check_transformation(argument: str, value: object) -> None:
    """Raise if a value has no `init` or no `update` function."""
    # A rule of this package has functions of the same names.
    is_rule = _is_of_this_package(type(value)) and not isinstance(value, tuple)
    if isinstance(value, type) or not has_init_and_update(value) or is_rule:
        rule, hint = "an `optax.GradientTransformation`", "Pass for example `optax.adamw(1e-3)`."
        raise type_error(argument, rule, shortened(value), hint)


# Arrays


def check_array(argument: str, value: object) -> None:
    """Raise if a value is not a concrete or traced array of real floating-point numbers."""
    if not isinstance(value, ARRAY_LIKE) or not jnp.issubdtype(dtype_of(value), jnp.floating):
        hint = "Pass a JAX or NumPy array."
        raise type_error(argument, "a floating-point array", shortened(value), hint)


def check_arrays(argument: str, tree: Tree) -> None:
    """Raise if a leaf of a tree is neither an array, nor a number, nor a shape with a dtype."""
    for path, x in jax.tree.leaves_with_path(tree):
        try:
            jax.typeof(x)
        except (TypeError, OverflowError) as error:
            got = f"{describe(x)} at {leaf_path(argument, path)}"
            raise type_error(argument, "a tree of arrays", got, "Exclude other leaves.") from error


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
    if any(map(is_traced, jax.tree.leaves(tree))):
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
            got, expected = _place("updates", path, x), _place("params", other, y)
            break
    else:
        if jax.tree.structure(updates) == jax.tree.structure(params):
            return
        got, expected = shortened(updates), shortened(params)
    rule = "a tree with the structure and shapes of `params`"
    hint = "For a model of Equinox, pass `eqx.filter(model, eqx.is_array)` as `params`."
    raise type_error("updates", rule, f"{got}, expected {expected}", hint)


def _place(argument: str, path: Path | None, leaf: object) -> str:
    """Describe a leaf and its path in an argument; "nothing" if the path is None."""
    return "nothing" if path is None else f"{describe(leaf)} at {leaf_path(argument, path)}"


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
