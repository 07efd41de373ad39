"""Errors of arguments, and the decorator that adds the name of the public function to them.

Every message reads `<function>: <argument> must be <rule>, got <value>[ at <path>]. <next step>`.
Checks raise without the name of the function; `public` adds it. Values are checked when a
transformation is built, trees when it is traced. Traced values never raise.
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
        function: the public function that the user called.
        is_named: whether `function` is final. An error inside a function that the user wrote, or
            inside the update of another transformation, keeps the name that it got there.
    """

    function: str = ""
    is_named: bool = False

    def of(self, function: str) -> Self:
        """The same error with the name of the function, where `public` cannot add it."""
        self.function, self.is_named = function, True
        return self

    def __str__(self) -> str:
        """The message, after the name of the function."""
        return f"{self.function}: {self.args[0]}" if self.function else str(self.args[0])


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument of an invalid type."""


class ArgumentValueError(ArgumentError, ValueError):
    """An argument of an invalid value."""


def type_error(argument: str, rule: str, got: object, hint: str) -> ArgumentTypeError:
    """The error of an argument of an invalid type."""
    return ArgumentTypeError(f"`{argument}` must be {rule}, got {got}. {hint}")


def value_error(argument: str, rule: str, got: object, hint: str) -> ArgumentValueError:
    """The error of an argument of an invalid value."""
    return ArgumentValueError(f"`{argument}` must be {rule}, got {got}. {hint}")


def public(fun: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Make a function public: its errors begin with its name, and profiles show it.

    The same holds for the `init` and `update` of a transformation that it returns, and for a
    function that it returns.
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
    """A function whose errors begin with the name of the public function that made it."""

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
        # The update of a guard or an accumulation must stay recognizable: it names itself.
        rename = getattr(update, "named", functools.partial(named, update))
        update = rename(function)
        return type(result)(named(init, function), update)
    return named(result, function) if callable(result) and hasattr(result, "__code__") else result
