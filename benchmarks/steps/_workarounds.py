"""The workarounds for backends, each with what the library would do without it.

The names are private. A workaround that was renamed or removed raises an error here, so that this
table stays true.
"""

import contextlib
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp

import gradclip_jax
from gradclip_jax import _run_if

Replacements = dict[str, Any]
"""For each private name, the value that replaces it in every module that uses it."""


def _same(x: Any) -> Any:
    return x


def _not_shared(scalar: jax.Array, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    return [scalar] * len(arrays)


def _one_by_one(fun: Callable[..., Any], *columns: Sequence[Any]) -> list[Any]:
    return list(map(fun, *columns))


def _two_sums(total: Callable[..., Any], *terms: Any) -> Any:
    return jnp.stack([total(x) for x in terms], -1)


def _forms(name: str, *labels: str) -> dict[str, Replacements]:
    return {label: {name: getattr(_run_if, f"_{label}")} for label in labels}


# Name of the workaround, the step of `_rows.ROWS` that shows it, and its alternatives.
ALL: tuple[tuple[str, str, dict[str, Replacements]], ...] = (
    ("a guard's step", "skip_nonfinite", _forms("_loop_or_select", "cond", "loop")),
    ("a window", "accumulate_gradients(clip)", _forms("_by_size", "cond", "loop", "select")),
    ("broadcast_scalar", "clip_by_global_norm", {"scalars": {"broadcast_scalar": _not_shared}}),
    ("map_arrays", "adaptive_grad_clip", {"one by one": {"map_arrays": _one_by_one}}),
    ("fusion_barrier", "clip_by_global_norm", {"without": {"fusion_barrier": _same}}),
    ("fusion_barrier", "skip_nonfinite", {"without": {"fusion_barrier": _same}}),
    ("pair_of_sums", "watch(clip)", {"two sums": {"pair_of_sums": _two_sums}}),
    ("stacks", "watch(clip)", {"one by one": {"MAX_STACKED_SIZE": 0}}),
    ("stacks", "clip_by_global_norm", {"one by one": {"MAX_STACKED_SIZE": 0}}),
)


@contextlib.contextmanager
def replaced(values: Replacements) -> Iterator[None]:
    """Replace private names in every module of the package, and clear the caches of traces."""
    found = [(module, name) for name in values for module in _modules() if hasattr(module, name)]
    missing = values.keys() - {name for _, name in found}
    if missing:
        raise LookupError(f"no module of gradclip_jax has {sorted(missing)}")
    before = [getattr(module, name) for module, name in found]
    jax.clear_caches()
    try:
        for module, name in found:
            setattr(module, name, values[name])
        yield
    finally:
        for (module, name), value in zip(found, before, strict=True):
            setattr(module, name, value)
        jax.clear_caches()


def _modules() -> list[Any]:
    names = pkgutil.walk_packages(gradclip_jax.__path__, "gradclip_jax.")
    return [importlib.import_module(x.name) for x in names if not x.name.endswith("__main__")]


def retraced(traced: Any) -> Callable[..., Any]:
    """A function that evaluates what was traced."""
    structure = jax.tree.structure(traced.out_info)
    evaluate = jax.extend.core.jaxpr_as_fun(traced.jaxpr)

    def run(*args: Any) -> Any:
        return jax.tree.unflatten(structure, evaluate(*jax.tree.leaves(args)))

    return run
