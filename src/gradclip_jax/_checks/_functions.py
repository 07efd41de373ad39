"""Checks of functions and transformations, and calls of user-defined functions."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp

from .._errors import type_error
from ._format import describe, shortened
from ._options import check_number
from ._values import is_scalar


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


def is_factory(value: object) -> bool:
    """Return whether a value is a public function of this package."""
    if not (inspect.isfunction(value) and hasattr(value, "__wrapped__")):
        return False
    return _is_of_this_package(value) and "<" not in value.__qualname__


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
