"""Errors for invalid arguments, which begin with the name of the public function, and warnings.

Messages about values have this format:

    <function>: <argument> must be <rule>, got <value>[ at <path>]. <next step>

The decorator `public` adds the function name to errors that checks raise. If a public function
calls another one, the name of the outer function, which the user called, replaces the other name.
In a training step, the outer function would often be `apply_gradients`, which says little. `named`
therefore marks parts of a step, such as the `update` of a clip, and sets `ArgumentError.is_final`
for errors in them: public functions around this part do not replace the name.
"""

import contextlib
import functools
import inspect
import os
import pathlib
import types
import warnings
from collections.abc import Callable, Generator
from typing import Any, Final, ParamSpec, TypeVar

import jax
import optax

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


class ArgumentError(Exception):
    """Base class of errors for invalid arguments.

    Attributes:
        function: Name of the public function that the user called.
        is_final: Whether public functions around a part of a step must not replace this name.
    """

    function: str = ""
    is_final: bool = False

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


def warn(message: str) -> None:
    """Emit a warning at the innermost line outside of this package, JAX, Optax and `contextlib`."""
    folders = [pathlib.Path(file).parent for file in (__file__, jax.__file__, optax.__file__)]
    internal = contextlib.__file__, *(f"{folder}{os.sep}" for folder in folders)
    files = [frame.filename for frame in inspect.stack(context=0)]
    level = next((i for i, file in enumerate(files, 1) if not file.startswith(internal)), 1)
    warnings.warn(message, stacklevel=level)


@contextlib.contextmanager
def named(function: str) -> Generator[None]:
    """Name a part of a training step by its public function, in errors and in profiles.

    This context manager is also a decorator. An error that a public function inside this part
    raised keeps the name of that function.
    """
    try:
        with jax.named_scope(function):
            yield
    except ArgumentError as error:
        error.function = error.function or function
        error.is_final = True
        raise


def public(fun: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Decorate a public function so that its errors begin with its name.

    Functions and transformations that it returns are wrapped in `named`, so that errors in a later
    step keep this name.
    """
    name = fun.__qualname__.removesuffix(".__init__").removesuffix(".__post_init__")

    @functools.wraps(fun)
    def call(*args: _Args.args, **kwargs: _Args.kwargs) -> Any:
        try:
            result = fun(*args, **kwargs)
        except ArgumentError as error:
            error.function = error.function if error.is_final else name
            raise
        except TypeError:
            _check_signature(name, inspect.signature(fun), *args, **kwargs)
            raise
        if isinstance(result, optax.GradientTransformation):
            return type(result)(*[_part_of_step(name, x) for x in result])
        return _part_of_step(name, result)

    return call


def _part_of_step(name: str, result: Any) -> Any:
    """Wrap a Python function in `named`; return other objects unchanged.

    The `update` of a guard is a callable object, not a function. It names its errors itself.
    """
    if not isinstance(result, types.FunctionType):
        return result

    @functools.wraps(result)
    def call(*args: Any, **kwargs: Any) -> Any:
        # Optimistix compares the variables of closures, so `named(name)` must not be one.
        with named(name):
            return result(*args, **kwargs)

    return call


_OTHER_NAMES: Final = {
    "mask": "trainable",
    "every_k_schedule": "every",
    "norm_type": "ord",
    "clipnorm": "max_norm",
    "global_clipnorm": "max_norm",
    "max_consecutive_errors": "max_consecutive_skips",
}
"""A mapping from argument names of other libraries and earlier versions to current names."""


def _check_signature(name: str, signature: inspect.Signature, *args: Any, **kwargs: Any) -> None:
    """Raise an error that lists the arguments of a function if the given ones do not fit."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        parameters = signature.parameters.values()
        names = [f"`{x.name}=`" if x.kind is x.KEYWORD_ONLY else f"`{x.name}`" for x in parameters]
        right = [_OTHER_NAMES[x] for x in kwargs if _OTHER_NAMES.get(x) in signature.parameters]
        hint = f"Pass `{right[0]}=`. " if right else ""
        mistake = ArgumentTypeError(f"{error}. {hint}Arguments: {', '.join(names)}.")
        mistake.function = name
        raise mistake from None
