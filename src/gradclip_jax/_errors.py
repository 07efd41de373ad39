"""Errors for invalid arguments, which begin with the name of the public function.

All messages have this format:

    <function>: <argument> must be <rule>, got <value>[ at <path>]. <next step>

The decorator `public` adds the function name to errors that checks raise. Hyperparameters are
checked when a transformation is built, and pytrees at trace time. Traced values are not checked.
"""

import contextlib
import functools
from collections.abc import Callable, Generator
from typing import Any, ParamSpec, TypeVar

import jax
import optax

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


class ArgumentError(Exception):
    """Base class of errors for invalid arguments.

    Attributes:
        function: Name of the public function that the user called.
        is_named: Whether `function` is final. Enclosing public functions do not replace the name if
            a user-defined function or the update of another transformation raised the error.
    """

    function: str = ""
    is_named: bool = False

    def __str__(self) -> str:
        return f"{self.function}: {self.args[0]}" if self.function else str(self.args[0])


class ArgumentTypeError(ArgumentError, TypeError):
    """Raised if an argument has an invalid type."""


class ArgumentValueError(ArgumentError, ValueError):
    """Raised if an argument has an invalid value."""


def type_error(argument: str, rule: str, got: object, hint: str) -> ArgumentTypeError:
    return ArgumentTypeError(f"`{argument}` must be {rule}, got {got}. {hint}")


def value_error(argument: str, rule: str, got: object, hint: str) -> ArgumentValueError:
    return ArgumentValueError(f"`{argument}` must be {rule}, got {got}. {hint}")


def public(fun: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Decorate a public function so that its errors begin with its name.

    Functions that it returns, and the `init` and `update` functions of a transformation that it
    returns, are wrapped as well, so that profiles of a training step also contain the name.
    """
    name = fun.__qualname__.removesuffix(".__init__")

    def wrap(result: Any) -> Any:
        # The updates of guards and accumulations are objects with names of their own.
        return named(name)(result) if hasattr(result, "__code__") else result

    @functools.wraps(fun)
    @named(name, in_step=False)
    def call(*args: _Args.args, **kwargs: _Args.kwargs) -> Any:
        result = fun(*args, **kwargs)
        is_transformation = isinstance(result, optax.GradientTransformation)
        return type(result)(*map(wrap, result)) if is_transformation else wrap(result)

    return call


@contextlib.contextmanager
def named(function: str, *, in_step: bool = True) -> Generator[None]:
    """Context manager or decorator that adds the name of a public function to errors.

    With `in_step`, for code of a training step, profiles contain the name as well, and enclosing
    public functions such as `apply_gradients` do not replace the name in errors.
    """
    try:
        with jax.named_scope(function) if in_step else contextlib.nullcontext():
            yield
    except ArgumentError as error:
        if not error.is_named:
            is_inner = in_step and error.function  # raised by a public function
            error.function, error.is_named = error.function if is_inner else function, in_step
        raise
