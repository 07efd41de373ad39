"""Configs that store the name and arguments of a transformation as JSON or YAML."""

import copy
import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from . import granularities, thresholds
from ._checks import (
    check_choice,
    check_count,
    check_number,
    check_transformation,
    shortened,
)
from ._errors import named, type_error, value_error
from .accumulation._transform import accumulate_gradients
from .clipping._transform import clip_by_global_norm


@dataclasses.dataclass(frozen=True)
class TransformConfig:
    """Config of a transformation, threshold rule or granularity, for storage as JSON or YAML.

    | argument | representation |
    | --- | --- |
    | a rule or granularity of this package | `{"name": "zscore", "decay": 0.9}`, or a config |
    | a tuple | a list |
    | `jnp.float32` | `"float32"` |
    | infinity | unchanged; Python's `json` writes `Infinity`, YAML `.inf` |
    | an inner transformation | not part of the config; pass it to `build` |
    | any other object, such as a schedule or an array | an error; call the function directly |

    Attributes:
        name: Name of a public function, as in `"clip_by_global_norm"` or `"zscore"`.
        arguments: Mapping from argument names to plain values or nested configs.

    Raises:
        ValueError: If `name` or an argument name is unknown. `build` also raises this error if an
            argument is missing, and propagates errors of the function.
        TypeError: If an argument cannot be represented by plain values.

    Examples:
        >>> import json, optax, gradclip_jax as gcx
        >>> rule = gcx.configs.TransformConfig("zscore", {"decay": 0.9})
        >>> config = gcx.configs.TransformConfig("clip_by_global_norm", {"max_norm": rule})
        >>> text = json.dumps(config.to_dict())
        >>> text
        '{"name": "clip_by_global_norm", "max_norm": {"name": "zscore", "decay": 0.9}}'
        >>> gcx.configs.TransformConfig.from_dict(json.loads(text)) == config
        True
        >>> tx = optax.chain(config.build(), optax.adam(1e-3))
    """

    name: str
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any], hash=False)

    @functools.partial(named, function="TransformConfig")
    def __post_init__(self) -> None:
        plain = _to_plain(self.arguments)
        _check_call(self.name, plain)
        object.__setattr__(self, "arguments", plain)

    def build(self, *inner: optax.GradientTransformation) -> Any:
        """Call the function, passing `inner` to a function that wraps a transformation."""
        arguments = {key: _built(value) for key, value in self.arguments.items()}
        _check_call(self.name, arguments, inner)
        return _constructors()[self.name](*inner, **arguments)

    def to_dict(self) -> dict[str, Any]:
        """Return a new dict `{"name": ..., argument: value, ...}`."""
        return {"name": self.name, **copy.deepcopy(dict(self.arguments))}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "TransformConfig":
        """Create a config from the output of `to_dict`, without calling the function."""
        if not isinstance(values, Mapping) or "name" not in values:
            rule, hint = "a mapping with the key 'name'", "Pass the output of `to_dict`."
            raise type_error("values", rule, shortened(values), hint).of(
                "TransformConfig.from_dict"
            )
        arguments = dict(values)
        return cls(arguments.pop("name"), arguments)


@dataclasses.dataclass(frozen=True)
class AccumulationConfig:
    """Config of the most common gradient accumulation options, for storage as JSON or YAML.

    To set other options, use `TransformConfig("accumulate_gradients", ...)`.

    Attributes:
        accumulation_steps: Number of micro-batches per optimizer step, >= 1.
        normalize: Whether to average gradients over micro-batches instead of summing them.
        max_grad_norm: Maximum global norm of the accumulated gradient, > 0; None disables clipping.

    Examples:
        >>> import optax, gradclip_jax as gcx
        >>> config = gcx.configs.AccumulationConfig(accumulation_steps=8, max_grad_norm=1.0)
        >>> config.effective_batch_size(16)
        128
        >>> gcx.configs.AccumulationConfig.from_dict(config.to_dict()) == config
        True
        >>> tx = config.build(optax.adamw(1e-3))
    """

    accumulation_steps: int = 4
    normalize: bool = True
    max_grad_norm: float | None = None

    @functools.partial(named, function="AccumulationConfig")
    def __post_init__(self) -> None:
        check_count(
            "accumulation_steps", self.accumulation_steps, "Pass 1 to disable accumulation."
        )
        check_choice("normalize", self.normalize, (True, False))
        if self.max_grad_norm is not None:
            check_number("max_grad_norm", self.max_grad_norm, "Pass None to disable clipping.")

    def effective_batch_size(self, micro_batch_size: int) -> int:
        """Return the number of examples per optimizer step."""
        check_count("micro_batch_size", micro_batch_size, "Pass the number of examples.")
        return int(micro_batch_size) * int(self.accumulation_steps)

    def build(self, inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
        """Wrap an optimizer with gradient accumulation."""
        check_transformation("inner", inner)
        if self.max_grad_norm is not None:
            inner = optax.chain(clip_by_global_norm(self.max_grad_norm), inner)
        reduction = "mean" if self.normalize else "sum"
        return accumulate_gradients(inner, self.accumulation_steps, reduction=reduction)

    def to_dict(self) -> dict[str, Any]:
        """Convert the config to a dict of plain values."""
        return _to_plain(vars(self))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "AccumulationConfig":
        """Create a config from the output of `to_dict`."""
        names = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(values, Mapping) or not set(values) <= set(names):
            rule, hint = f"a mapping with keys among {names}", "Pass the output of `to_dict`."
            raise type_error("values", rule, shortened(values), hint).of(
                "AccumulationConfig.from_dict"
            )
        return cls(**values)


_MAX_DEPTH = 32  # maximum nesting depth of lists and configs


@functools.cache
def _constructors() -> dict[str, Callable[..., Any]]:
    """Return all public functions that create a transformation, a rule or a granularity."""
    package = sys.modules[__package__ or ""]
    namespaces = (package, package.contrib, package.per_example, thresholds, granularities)
    kinds = (optax.GradientTransformation, thresholds.Rule, granularities.Granularity)

    def makes_one(value: object) -> bool:
        made = inspect.get_annotations(value).get("return") if inspect.isfunction(value) else None
        return isinstance(made, type) and issubclass(made, kinds)

    public = {name: x for namespace in namespaces for name, x in vars(namespace).items()}
    return {name: x for name, x in public.items() if makes_one(x)}


def _check_call(name: str, arguments: object, inner: tuple[object, ...] | None = None) -> None:
    """Raise if a function does not accept the arguments; without `inner`, some may be missing."""
    hint = "Pass the name of a function that returns a transformation, a rule or a granularity."
    check_choice("name", name, tuple(_constructors()), hint)
    signature = inspect.signature(_constructors()[name])
    bind = signature.bind_partial if inner is None else functools.partial(signature.bind, *inner)
    if not isinstance(arguments, Mapping):
        rule, hint = "a mapping from names to values", "Pass a dict of the function's arguments."
        raise type_error("arguments", rule, shortened(arguments), hint)
    try:
        bind(**arguments)
    except TypeError as error:
        if "multiple values" in str(error):
            rule, hint = f"omitted for `{name}`", "Call `build()`."
            raise value_error("inner", rule, "a transformation", hint) from None
        if inner and len(inner) > 1:
            rule, got = f"one transformation for `{name}`", f"{len(inner)} transformations"
            raise value_error("inner", rule, got, "Call `build(inner)`.") from None
        rule, hint = f"valid arguments for `{name}`", f"`{name}` raises: {error}."
        if "'inner'" in str(error):
            hint += " Pass the inner transformation to `build`."
        raise value_error("arguments", rule, shortened(arguments), hint) from None


def _built(plain: Any) -> Any:
    """Recursively build the configs in dictionaries and lists."""
    if isinstance(plain, list):
        return [_built(x) for x in plain]
    if not isinstance(plain, dict):
        return plain
    if "name" in plain:
        return TransformConfig.from_dict(plain).build()
    return {key: _built(x) for key, x in plain.items()}


def _to_plain(value: object, depth: int = 0) -> Any:
    """Convert a value to strings, numbers, bools, None, lists, and dicts with string keys."""
    if depth > _MAX_DEPTH:
        rule, hint = f"nested at most {_MAX_DEPTH} levels deep", "Flatten the config."
        raise value_error("arguments", rule, f"a {type(value).__name__} at a deeper level", hint)
    if isinstance(value, (np.generic, np.ndarray, jax.Array)) and value.ndim == 0:
        value = value.item()
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, TransformConfig):
        return value.to_dict()
    if isinstance(value, list) or type(value) is tuple:
        return [_to_plain(x, depth + 1) for x in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        plain = {key: _to_plain(x, depth + 1) for key, x in value.items()}
        if depth and "name" in plain:  # another config
            _check_call(plain["name"], {key: x for key, x in plain.items() if key != "name"})
        return plain
    if isinstance(value, (np.dtype, type)) and jnp.issubdtype(value, jnp.number):
        return jnp.dtype(value).name
    rule = "a plain value, a list, or a dict with string keys"
    hint = "Call the function directly to pass other values."
    raise type_error("arguments", rule, shortened(value), hint)
