"""Configs: transformations as plain values that can be written to a file and read back.

One idea: `{"name": "zscore", "decay": 0.9}` is a call of the function of that name, and its
arguments may hold such dicts again. Only what the two tables list can be named.
"""

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import optax

from . import thresholds
from ._checks import check_choice, check_transformation, error_message
from ._serialize import check_arguments, from_plain, to_plain
from .accumulation import _transform as accumulation
from .adaptive import _acclip as moment
from .adaptive import _spam_clip as spam
from .adaptive import _stable_adamw as optimizer
from .adaptive import _stable_spam_clip as levels
from .adaptive import _transform as adaptive
from .adaptive import _u_clip as carry
from .clipping import _transform as clipping
from .guarding import _skip_nonfinite as nonfinite
from .guarding import _skip_spikes as spikes
from .monitoring import _record as monitoring

Table: TypeAlias = Mapping[str, Callable[..., Any]]


def _table(*constructors: Callable[..., Any]) -> Table:
    return {constructor.__name__: constructor for constructor in constructors}


_TRANSFORMATIONS: Final = _table(
    *(clipping.clip, clipping.clip_by_global_norm, clipping.clip_by_leaf_norm),
    *(clipping.clip_by_group_norm, clipping.clip_by_block_rms, clipping.zero_large_norm),
    *(adaptive.adaptive_grad_clip, adaptive.autoclip, adaptive.zclip),
    *(adaptive.adagc, adaptive.quantile_clip, carry.u_clip, moment.acclip, spam.spam_clip),
    *(levels.stable_spam_clip, optimizer.stable_adamw, accumulation.accumulate_gradients),
    *(nonfinite.skip_nonfinite, spikes.skip_large_norm, spikes.skip_spikes),
    *(monitoring.record_norms,),
)
_RULES: Final = _table(
    *(thresholds.percentile, thresholds.mean_std, thresholds.zscore, thresholds.ema),
    *(thresholds.quantile, thresholds.capped, thresholds.relative_to_params),
)
_INNER: Final = {"inner", "clip"}  # what a wrapper calls the transformation that it wraps


@dataclasses.dataclass(frozen=True)
class TransformConfig:
    """A transformation of this package as plain values, for JSON or YAML, and back.

    | instead of | the dict holds |
    | --- | --- |
    | `gcx.thresholds.zscore(decay=0.9)` | `{"name": "zscore", "decay": 0.9}` |
    | an inner transformation of this package | its dict |
    | any other inner transformation | nothing: give it to `build` |
    | infinity, which JSON lacks | `"inf"` or `"-inf"` |
    | `jnp.float32` | `"float32"` |
    | `(1.0, 2.0)` | `{"tuple": [1.0, 2.0]}` |
    | a mapping with keys other than strings | `{"items": [[key, value], ...]}` |
    | a schedule, any other function or array | an error: call the constructor itself |

    Names are checked at once, numbers by `build`, as if the constructor had been called.

    Attributes:
        name: of a public transformation, such as "clip_by_global_norm".
        arguments: its arguments by name; kept as the dict holds them.

    Raises:
        ValueError: a name or an argument that does not exist, or one that is missing.
        TypeError: an argument is not plain.

    Examples:
        >>> import json, optax, gradclip_jax as gcx
        >>> rule = {"name": "zscore", "decay": 0.9}
        >>> config = gcx.TransformConfig("clip_by_global_norm", {"max_norm": rule})
        >>> text = json.dumps(config.to_dict())
        >>> text
        '{"name": "clip_by_global_norm", "max_norm": {"name": "zscore", "decay": 0.9}}'
        >>> gcx.TransformConfig.from_dict(json.loads(text)) == config
        True
        >>> clip = config.build()
        >>> accumulate = gcx.TransformConfig("accumulate_gradients", {"every": 4})
        >>> tx = accumulate.build(optax.chain(clip, optax.adam(1e-3)))
    """

    name: str
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any], hash=False)

    def __post_init__(self) -> None:
        check_choice("TransformConfig", "name", self.name, tuple(_TRANSFORMATIONS))
        check_arguments(self.name, "arguments", self.arguments, _TRANSFORMATIONS[self.name])
        plain = {key: to_plain(self.name, key, x) for key, x in self.arguments.items()}
        object.__setattr__(self, "arguments", plain)
        _call(_TRANSFORMATIONS, self.to_dict(), dry=True)

    def build(self, inner: optax.GradientTransformation | None = None) -> Any:
        """The transformation; `inner` goes to the innermost wrapper, which then names none."""
        if inner is not None:
            check_transformation("TransformConfig.build", "inner", inner)
        return _call(_TRANSFORMATIONS, self.to_dict(), inner=inner)

    def to_dict(self) -> dict[str, Any]:
        """`{"name": ..., argument: value, ...}`, a copy."""
        return {"name": self.name, **copy.deepcopy(dict(self.arguments))}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "TransformConfig":
        """The inverse of `to_dict`."""
        if not isinstance(values, Mapping) or "name" not in values:
            rule, hint = "a mapping with the key 'name'", "Write it as `to_dict` does."
            function = "TransformConfig.from_dict"
            raise TypeError(error_message(function, "values", rule, repr(values), hint))
        return cls(values["name"], {key: x for key, x in values.items() if key != "name"})


def _call(table: Table, values: Mapping[str, Any], *, inner: Any = None, dry: bool = False) -> Any:
    """Calls what a dict names, its arguments first; a dry run only checks the names."""
    name = values["name"]
    check_choice("TransformConfig", "name", name, tuple(table))
    given = {key: x for key, x in values.items() if key != "name"}
    check_arguments(name, "arguments", given, table[name])
    parameters = inspect.signature(table[name]).parameters
    wraps = _INNER & parameters.keys()
    required = [key for key, x in parameters.items() if x.default is x.empty and key not in wraps]
    for key in required:
        if key not in given:
            raise ValueError(
                error_message(name, key, "given", "nothing", "Add it to the arguments.")
            )
    if inner is not None and not wraps:
        hint = "Join the two with `optax.chain`."
        raise ValueError(error_message(name, "inner", "left out", "a transformation", hint))

    def make(key: str, call: Mapping[str, Any]) -> Any:
        if key in wraps:
            return _call(_TRANSFORMATIONS, call, inner=inner, dry=dry)
        return _call(_RULES, call, dry=dry)

    # Labels are words: what looks like a call there is a tree with a parameter called "name".
    arguments = {
        key: from_plain(x, None if key == "param_labels" else functools.partial(make, key))
        for key, x in given.items()
    }
    if dry:
        return None
    for key in wraps - given.keys():
        if inner is None:
            hint = "Pass it to `build`, or name it in the arguments."
            raise ValueError(error_message(name, key, "given", "nothing", hint))
        arguments[key] = inner
    return table[name](**arguments)
