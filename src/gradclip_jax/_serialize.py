"""Values as JSON can hold them, and back: what the configs share."""

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._checks import error_message, is_traced

_HINT = "Call the constructor itself with a function, an array or an object."


def to_plain(function: str, argument: str, value: Any) -> Any:
    """A copy made of strings, numbers, bools, None, lists and dicts with string keys."""
    again = functools.partial(to_plain, function, argument)
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: again(x) for key, x in value.items()}
        return {"items": [[again(key), again(x)] for key, x in value.items()]}
    if isinstance(value, list):
        return [again(x) for x in value]
    if type(value) is tuple:  # a NamedTuple would come back as another type
        return {"tuple": [again(x) for x in value]}
    if isinstance(value, (np.dtype, type)) and jnp.issubdtype(value, jnp.number):
        return jnp.dtype(value).name
    if isinstance(value, (np.generic, np.ndarray, jax.Array)) and not is_traced(value):
        value = value.item() if value.ndim == 0 else value
    if isinstance(value, float) and math.isinf(value):
        return str(value)
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    rule = "a plain value, or lists, tuples and mappings of such"
    raise TypeError(error_message(function, argument, rule, repr(value), _HINT))


def from_plain(plain: Any, make: Callable[[Mapping[str, Any]], Any] | None = None) -> Any:
    """The inverse of `to_plain`; `make` is given what reads `{"name": ..., ...}`."""
    again = functools.partial(from_plain, make=make)
    if isinstance(plain, list):
        return [again(x) for x in plain]
    if isinstance(plain, str) and plain in ("inf", "-inf"):
        return float(plain)
    if not isinstance(plain, Mapping):
        return plain
    if make is not None and isinstance(plain.get("name"), str):
        return make(plain)
    match plain:
        case {"tuple": [*entries], **others} if not others:
            return tuple(map(again, entries))
        case {"items": [*pairs], **others} if not others and all(map(_is_pair, pairs)):
            return {again(key): again(x) for key, x in pairs}
        case _:
            return {key: again(x) for key, x in plain.items()}


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2


def check_arguments(
    function: str, argument: str, given: Any, constructor: Callable[..., Any]
) -> None:
    """Refuses a mapping with keys that are not arguments of the constructor."""
    known = list(inspect.signature(constructor).parameters)
    rule = "a mapping with keys among " + ", ".join(known)
    if not isinstance(given, Mapping):
        hint = "Write it as `to_dict` does."
        raise TypeError(error_message(function, argument, rule, repr(given), hint))
    unknown = [key for key in given if key not in known]
    if unknown:
        raise ValueError(
            error_message(function, argument, rule, repr(unknown[0]), "Take the key out.")
        )
