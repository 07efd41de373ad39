"""Checks of arguments: hyperparameters, functions and pytrees.

Hyperparameters are checked when a transformation is built, and pytrees at trace time. Traced values
are not checked.
"""

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ._errors import type_error, value_error
from ._format import describe, leaf_path, shortened
from ._types import UNBOUNDED, Count, Order, Path, Tree

_TINY: Final = float(np.finfo(np.float32).tiny)


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
    """Return whether a value is a JAX tracer."""
    return isinstance(value, Tracer)


# Hyperparameters


def check_number(argument: str, value: Any, hint: str, interval: str = "(0, inf]") -> Any:
    """Check that a value is a number and, unless it is traced, that it lies in an interval.

    A Python or NumPy number is returned as a float, because int32 cannot represent every integer.
    Traced values and JAX arrays remain arrays, so that a function that closes over a JAX array is
    not traced again for a new value.

    In `interval`, a bracket includes a bound, and a parenthesis excludes it, as in "[0, 1)".
    Numbers outside the range of float32 raise an error, because they would become 0 or infinity;
    XLA may replace subnormal numbers by zero.
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
    """Call a user-defined schedule, and raise an error if the result is not a real scalar.

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


def call_user(argument: str, signature: str, fun: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call a user-defined function, or raise if it cannot be called with these arguments.

    `signature` is its name, or its name and parameters, as in "advance(state, observed, skipped)".
    """
    check_callable(argument, fun, "Pass a function.")
    try:
        inspect.signature(fun).bind(*args, **kwargs)
    except TypeError as error:
        name, has_parameters, _ = signature.partition("(")
        rule = f"a function `{signature}`"
        if not has_parameters:
            rule += f" with {len(args)} positional parameters"
        got = f"{name}{inspect.signature(fun)}: {error}"
        raise type_error(argument, rule, got, "Change its parameters.") from None
    except ValueError:  # a builtin without a signature
        pass
    return fun(*args, **kwargs)


def has_init_and_update(value: object) -> bool:
    """Return whether a value has the two functions of a gradient transformation."""
    return callable(getattr(value, "init", None)) and callable(getattr(value, "update", None))


def check_transformation(argument: str, value: object) -> None:
    """Raise if a value has no `init` or no `update` function."""
    # A `Rule` has functions `init` and `update` as well.
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


# Updates beside parameters


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
