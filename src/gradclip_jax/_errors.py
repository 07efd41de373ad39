"""Argument errors, and the decorator that adds the name of the public function to them.

The format of messages is `<function>: <argument> must be <rule>, got <value>[ at <path>]. <next
step>`. Checks raise errors without the name of the function, and `public` adds the name. Values are
checked when a transformation is built, and trees at trace time. Traced values never raise.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, Self, TypeVar

import jax
import optax

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


class ArgumentError(Exception):
    """An invalid argument.

    Attributes:
        function: Name of the public function that the user called.
        is_named: Whether `function` is final. If the error was raised inside a user-defined
            function or the update of another transformation, outer functions keep its name.
    """

    function: str = ""
    is_named: bool = False

    def of(self, function: str) -> Self:
        """Set the name of the function in places where `public` cannot set it."""
        self.function, self.is_named = function, True
        return self

    def __str__(self) -> str:
        """Return the message with the name of the function as a prefix."""
        return f"{self.function}: {self.args[0]}" if self.function else str(self.args[0])


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument of an invalid type."""


class ArgumentValueError(ArgumentError, ValueError):
    """An argument of an invalid value."""


def type_error(argument: str, rule: str, got: object, hint: str) -> ArgumentTypeError:
    """Create an error for an argument of an invalid type."""
    return ArgumentTypeError(f"`{argument}` must be {rule}, got {got}. {hint}")


def value_error(argument: str, rule: str, got: object, hint: str) -> ArgumentValueError:
    """Create an error for an argument with an invalid value."""
    return ArgumentValueError(f"`{argument}` must be {rule}, got {got}. {hint}")


def public(fun: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Add the name of a public function to its errors and to profiles.

    The name is also added for functions that it returns, and for the `init` and `update` functions
    of a transformation that it returns.
    """

    @functools.wraps(fun)
    def wrapper(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        try:
            with jax.named_scope(fun.__name__):
                return _named_result(fun(*args, **kwargs), fun.__name__)
        except ArgumentError as error:
            if not error.is_named:
                error.function = fun.__name__
            raise

    return wrapper


def named(fun: Callable[..., Any], function: str) -> Callable[..., Any]:
    """Wrap a function so that its errors begin with the name of a public function."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            with jax.named_scope(function):
                return fun(*args, **kwargs)
        except ArgumentError as error:
            error.function, error.is_named = error.function or function, True
            raise

    return wrapper


def _named_result(result: Any, function: str) -> Any:
    if isinstance(result, optax.GradientTransformation):
        init, update = result
        # A `GatedUpdate` has a method `named`, because its type must be preserved.
        rename = getattr(update, "named", functools.partial(named, update))
        update = rename(function)
        return type(result)(named(init, function), update)
    return named(result, function) if callable(result) and hasattr(result, "__code__") else result
