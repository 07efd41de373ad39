"""Configs: calls of this package as plain values that can be written to a file and read back."""

import copy
import dataclasses
import functools
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._checks import check_choice, check_count, check_number, check_transformation, error_message
from .accumulation._transform import accumulate_gradients
from .clipping._transform import clip_by_global_norm

_INNER = {"inner", "clip"}  # what a wrapper calls the transformation that it wraps
_BUILTINS = {"float": float, "tuple": tuple, "dict": dict}
_MAX_DEPTH = 32


@dataclasses.dataclass(frozen=True)
class TransformConfig:
    """A call of a public function of this package, as plain values for JSON or YAML.

    | value | as plain values |
    | --- | --- |
    | a transformation or rule of this package | `{"name": "zscore", "decay": 0.9}` |
    | an inner transformation from elsewhere | nothing: pass it to `build` |
    | infinity, which JSON lacks | `{"name": "float", "value": "inf"}` |
    | `(1.0, 2.0)` | `{"name": "tuple", "value": [1.0, 2.0]}` |
    | a mapping with the key "name", or one that is no string | `{"name": "dict", "value": [...]}` |
    | `jnp.float32` | `"float32"` |
    | any other object, such as a schedule or an array | an error: call the function itself |

    Attributes:
        name: of a public function that makes a transformation or a threshold rule.
        arguments: by name; they may contain other configs. Kept as plain values.

    Raises:
        ValueError: the name or an argument does not exist, or an argument is missing; `build`
            raises what the function raises.
        TypeError: an argument cannot be written as plain values.

    Examples:
        >>> import json, optax, gradclip_jax as gcx
        >>> rule = gcx.TransformConfig("zscore", {"decay": 0.9})
        >>> config = gcx.TransformConfig("clip_by_global_norm", {"max_norm": rule})
        >>> text = json.dumps(config.to_dict())
        >>> text
        '{"name": "clip_by_global_norm", "max_norm": {"name": "zscore", "decay": 0.9}}'
        >>> gcx.TransformConfig.from_dict(json.loads(text)) == config
        True
        >>> tx = optax.chain(config.build(), optax.adam(1e-3))
    """

    name: str
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any], hash=False)

    def __post_init__(self) -> None:
        check_choice("TransformConfig", "name", self.name, tuple(_constructors()))
        _check_arguments(self.name, _constructors()[self.name], self.arguments)
        object.__setattr__(self, "arguments", {k: _to_plain(x) for k, x in self.arguments.items()})

    def build(self, inner: optax.GradientTransformation | None = None) -> Any:
        """Calls the function; the innermost wrapper gets `inner`."""
        unused = [] if inner is None else [inner]

        def call(name: str, arguments: dict[str, Any]) -> Any:
            constructor = _constructors()[name]
            for key in _INNER & (inspect.signature(constructor).parameters.keys() - arguments):
                arguments[key] = unused.pop() if unused else None
            return constructor(**arguments)

        built = _from_plain(self.to_dict(), call)
        if unused:
            hint = "Combine the two with `optax.chain`."
            raise ValueError(error_message(self.name, "inner", "omitted", "one", hint))
        return built

    def to_dict(self) -> dict[str, Any]:
        """`{"name": ..., argument: value, ...}`, a copy."""
        return {"name": self.name, **copy.deepcopy(dict(self.arguments))}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "TransformConfig":
        """The inverse of `to_dict`; it calls nothing that it reads."""
        made = _from_plain(values, cls)
        if not isinstance(made, cls):
            rule, hint = "a mapping with the key 'name'", "Write it as `to_dict` does."
            raise TypeError(error_message("TransformConfig", "values", rule, repr(values), hint))
        return made


@dataclasses.dataclass(frozen=True)
class AccumulationConfig:
    """Accumulation as plain values; `TransformConfig("accumulate_gradients")` has all arguments.

    Attributes:
        accumulation_steps: micro-batches in a window, >= 1.
        normalize: True averages the window, False sums it.
        max_grad_norm: largest global norm of the accumulated gradient, > 0; None does not clip.

    Examples:
        >>> import optax, gradclip_jax as gcx
        >>> config = gcx.AccumulationConfig(accumulation_steps=8, max_grad_norm=1.0)
        >>> config.effective_batch_size(16)
        128
        >>> gcx.AccumulationConfig.from_dict(config.to_dict()) == config
        True
        >>> tx = config.build(optax.adamw(1e-3))
    """

    accumulation_steps: int = 4
    normalize: bool = True
    max_grad_norm: float | None = None

    def __post_init__(self) -> None:
        name = "AccumulationConfig"
        check_count(name, "accumulation_steps", self.accumulation_steps, "1 is every step.")
        check_choice(name, "normalize", self.normalize, (True, False))
        if self.max_grad_norm is not None:
            check_number(name, "max_grad_norm", self.max_grad_norm, "Pass None not to clip.")

    def effective_batch_size(self, micro_batch_size: int) -> int:
        """Examples in one optimizer step."""
        name = "AccumulationConfig.effective_batch_size"
        check_count(name, "micro_batch_size", micro_batch_size, "Pass the examples of one call.")
        return int(micro_batch_size) * int(self.accumulation_steps)

    def build(self, inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
        """Wraps an inner optimizer."""
        check_transformation("AccumulationConfig.build", "inner", inner)
        if self.max_grad_norm is not None:
            inner = optax.chain(clip_by_global_norm(self.max_grad_norm), inner)
        reduction = "mean" if self.normalize else "sum"
        return accumulate_gradients(inner, self.accumulation_steps, reduction=reduction)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as in `TransformConfig`."""
        return _to_plain(dataclasses.asdict(self))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "AccumulationConfig":
        """The inverse of `to_dict`; refuses unknown keys."""
        _check_arguments("AccumulationConfig", cls, values)
        return cls(**_from_plain(dict(values), TransformConfig))


@functools.cache
def _constructors() -> dict[str, Callable[..., Any]]:
    """The public functions that make a transformation, or a part of one such as a rule."""
    found: dict[str, Callable[..., Any]] = {}
    for name, value in vars(sys.modules[__package__ or ""]).items():
        if inspect.isfunction(value):
            made = inspect.get_annotations(value).get("return")
            if isinstance(made, type) and issubclass(made, optax.GradientTransformation):
                found[name] = value
        elif inspect.ismodule(value) and name[0] != "_":  # a namespace, such as `thresholds`
            found |= {key: x for key, x in vars(value).items() if inspect.isfunction(x)}
    return found


def _check_arguments(function: str, constructor: Callable[..., Any], given: Any) -> None:
    signature = inspect.signature(constructor)
    inner = dict.fromkeys(_INNER & signature.parameters.keys())
    try:
        signature.bind(**(inner | given))
    except TypeError as error:
        rule = f"a mapping for {function}{signature}"
        hint = "Name the arguments as in its signature."
        message = error_message(function, "arguments", rule, f"{given!r}: {error}", hint)
        raise ValueError(message) from None


def _deeper(depth: int) -> int:
    if depth < _MAX_DEPTH:
        return depth + 1
    rule, hint = f"nested at most {_MAX_DEPTH} deep", "Call the functions themselves."
    raise ValueError(error_message("TransformConfig", "arguments", rule, "more", hint))


def _to_plain(value: Any, depth: int = 0) -> Any:
    """A copy made of strings, numbers, bools, None, lists and dicts with string keys."""
    again = functools.partial(_to_plain, depth=_deeper(depth))
    if isinstance(value, (np.generic, np.ndarray, jax.Array)) and value.ndim == 0:
        value = value.item()
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"name": "float", "value": str(value)}
    if isinstance(value, TransformConfig):
        return value.to_dict()
    if isinstance(value, list):
        return [again(x) for x in value]
    if type(value) is tuple:  # a NamedTuple would come back as another type
        return {"name": "tuple", "value": [again(x) for x in value]}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and key != "name" for key in value):
            return {key: again(x) for key, x in value.items()}
        return {"name": "dict", "value": [[again(key), again(x)] for key, x in value.items()]}
    if isinstance(value, (np.dtype, type)) and jnp.issubdtype(value, jnp.number):
        return jnp.dtype(value).name
    rule = "a plain value, or lists, tuples and mappings of such"
    hint = "Call the function itself with a function, an array or an object."
    raise TypeError(error_message("TransformConfig", "arguments", rule, repr(value), hint))


def _from_plain(plain: Any, make: Callable[[Any, dict[str, Any]], Any], depth: int = 0) -> Any:
    """The inverse of `_to_plain`; `make` is called with each name and its arguments."""
    again = functools.partial(_from_plain, make=make, depth=_deeper(depth))
    if isinstance(plain, list):
        return [again(x) for x in plain]
    if not isinstance(plain, Mapping):
        return plain
    values = {key: again(x) for key, x in plain.items()}
    if "name" not in values:
        return values
    name = values.pop("name")
    if not isinstance(name, str) or name not in _BUILTINS:
        return make(name, values)
    try:
        (value,) = values.values()
        return _BUILTINS[name](value)
    except (TypeError, ValueError):
        rule, hint = f"the value of a {name}", "Write it as `to_dict` does."
        raise ValueError(
            error_message("TransformConfig", "arguments", rule, repr(plain), hint)
        ) from None
