"""Errors for invalid arguments, which begin with the name of the public function, and warnings.

All messages have this format:

    <function>: <argument> must be <rule>, got <value>[ at <path>]. <next step>

The decorator `public` adds the function name to errors that checks raise. Hyperparameters are
checked when a transformation is built, and pytrees at trace time. Traced values are not checked.
"""

import contextlib
import functools
import inspect
import os
import pathlib
import types
import warnings
from collections.abc import Callable, Generator, Mapping
from typing import Any, Final, ParamSpec, TypeVar

import jax
import optax

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


class ArgumentError(Exception):
    """Base class of errors for invalid arguments.

    Attributes:
        function: Name of the public function that the user called.
        is_final: Whether enclosing public functions must not replace this name.
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
    files: list[Any] = [__file__, jax.__file__, optax.__file__]
    internal = (contextlib.__file__, *(f"{pathlib.Path(file).parent}{os.sep}" for file in files))
    frame, level = inspect.currentframe(), 1
    while frame and frame.f_back and frame.f_code.co_filename.startswith(internal):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


@contextlib.contextmanager
def named(function: str) -> Generator[None]:
    """Name a part of a training step by its public function, in errors and in profiles.

    Enclosing public functions, such as `apply_gradients`, do not replace the name. An error that
    a public function inside this part raised keeps the name of that function.
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

    If a public function calls another one, errors contain the name of the outer function. If it
    returns a function or a transformation, that is a part of a training step; see `named`.
    """
    name = fun.__qualname__.removesuffix(".__init__").removesuffix(".__post_init__")
    signature = inspect.signature(fun)

    @functools.wraps(fun)
    def call(*args: _Args.args, **kwargs: _Args.kwargs) -> Any:
        try:
            _check_names(signature, args, kwargs)
            result = fun(*args, **kwargs)
        except ArgumentError as error:
            if not error.is_final:
                error.function = name
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


def _check_names(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Raise an error that suggests the right name if an argument does not exist."""
    with contextlib.suppress(TypeError):
        signature.bind(*args, **kwargs)
        return
    kinds = {x.name: x.kind for x in signature.parameters.values()}
    if {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} & {*kinds.values()}:
        return
    keyword_only = [x for x, kind in kinds.items() if kind is inspect.Parameter.KEYWORD_ONLY]
    unknown = [x for x in kwargs if x not in kinds]
    if unknown:
        right = _OTHER_NAMES.get(unknown[0])
        hint = f"Pass `{right}=`." if right in kinds else f"Arguments: {', '.join(kinds)}."
        raise type_error(unknown[0], "an argument of this function", "an unknown name", hint)
    if keyword_only and len(args) > len(kinds) - len(keyword_only):
        names = " or ".join(f"`{x}=`" for x in keyword_only)
        got = f"{len(args)} positional arguments"
        raise type_error(keyword_only[0], "passed by name", got, f"Pass {names}.")
