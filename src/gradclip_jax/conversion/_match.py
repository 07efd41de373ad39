"""Match the arrays of a new optimizer state with their counterparts in an old one.

In both states, guards and accumulations of other types have been converted to `WrapperState`.
"""

import collections
import itertools
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from .._errors import type_error
from .._format import describe, leaf_path
from .._metrics import metric_names
from .._states import is_own_state
from .._types import Array, Path, Tree
from ..wrappers._accumulation import AccumulationState
from ..wrappers._state import GuardState, WrapperState
from ._converters import MultiStepsWindow

# Arrays outside the states of this package


class _Leaf(NamedTuple):
    """An array that belongs to no clip, guard, accumulation or `watch`.

    Attributes:
        keys: Types of the containers around the array, and the key of the array in each. Tuples,
            which are the states of `optax.chain`, are omitted, because chains may be nested
            differently.
        path: Path of the array in the optimizer state.
        value: The array.
    """

    keys: tuple[Hashable, ...]
    path: Path
    value: Array


def _leaves(node: Tree, path: Path = (), keys: tuple[Hashable, ...] = ()) -> Iterator[_Leaf]:
    """Yield the arrays that belong to no clip, guard, accumulation or `watch`."""
    if is_own_state(node):
        if hasattr(node, "inner_state"):
            yield from _leaves(node.inner_state, field_path(path, "inner_state"), keys)
        return
    children, structure = jax.tree.flatten_with_path(node, is_leaf=lambda x: x is not node)
    if structure == jax.tree.structure(0):
        yield _Leaf(keys, path, node)
        return
    for key, child in children:
        child_keys = keys if type(node) is tuple else (*keys, type(node), *key)
        yield from _leaves(child, (*path, *key), child_keys)


def matched_leaves(new: Tree, old: Tree, old_path: Path = ()) -> Iterator[tuple[Path, Array]]:
    """Yield the path of each array in a new state, and the value of its counterpart in an old one.

    `old_path` is the path of the old state in the optimizer state, for error messages.
    """
    for like, given in itertools.zip_longest(_leaves(new), _leaves(old, old_path)):
        got = f"{_shown('state', given)} instead of {_shown('tx.init(params)', like)}"
        if like is None or given is None or like.keys != given.keys:
            rule = "a state that matches the state of `tx`"
            hint = (
                "Pass an `.opt_state` or a checkpoint of it. Only clips, guards, accumulations and "
                "`watch` may be added, removed or moved."
            )
            raise type_error("state", rule, got, hint)
        if np.shape(like.value) != np.shape(given.value):
            rule, hint = "the parameters of `state`", "Pass the parameters of its last update."
            raise type_error("params", rule, got, hint)
        yield like.path, given.value


def _shown(argument: str, leaf: _Leaf | None) -> str:
    """Describe an array, the state that contains it and its path for an error message."""
    if leaf is None:
        return "nothing"
    types = ", ".join(x.__name__ for x in leaf.keys if isinstance(x, type))
    of = f" of {types}" if types else ""
    return f"{describe(leaf.value)}{of} at {leaf_path(argument, leaf.path)}"


def field_path(path: Path, *names: str) -> Path:
    """Return the path of a (possibly nested) field of the state at `path`."""
    return (*path, *map(jax.tree_util.GetAttrKey, names))


# States of this package


class Kind(NamedTuple):
    """What a part is. Only parts of the same kind are counterparts.

    Attributes:
        state: Type of the part's state.
        has_loss_scale: Whether it is the guard `dynamic_loss_scale`.
        causes: For a guard, the causes of its skips.
    """

    state: type
    has_loss_scale: bool = False
    causes: tuple[str, ...] = ()


class Part(NamedTuple):
    """A clip, a guard, an accumulation or a `watch` in an optimizer state.

    Directly nested guards share the fields `consecutive_skips` and `guard_failed`. These fields
    form an additional part, whose state is a `WrapperState` without guards.

    Attributes:
        kind: What the part is.
        depth: Number of accumulations around it.
        path: Path of its state.
        state: Its state without the inner state.
        source: For an accumulation, "optax" if it is an `optax.MultiSteps`, otherwise "own".
        has_inner_scale: Whether this is an accumulation with a loss scale inside, so that the
            gradients it accumulates are still scaled.
    """

    kind: Kind
    depth: int
    path: Path
    state: Any
    source: Literal["optax", "own"] | None = None
    has_inner_scale: bool = False


def matched_parts(new: Tree, old: Tree) -> tuple[list[tuple[Part, Part]], list[Part]]:
    """Return the pairs of new parts and their counterparts, and old parts without a counterpart.

    Parts of the same kind and depth are paired in order if both states have equally many of them.
    """
    groups: dict[Hashable, tuple[list[Part], list[Part]]]
    groups = collections.defaultdict(lambda: ([], []))
    for i, state in enumerate((new, old)):
        for part in _without_shared_counts(_parts(state)):
            groups[part.kind, part.depth][i].append(part)
    pairs: list[tuple[Part, Part]] = []
    dropped: list[Part] = []
    for new_parts, old_parts in groups.values():
        if len(new_parts) == len(old_parts):
            pairs += zip(new_parts, old_parts, strict=True)
        else:
            dropped += old_parts
    return pairs, dropped


def _without_shared_counts(parts: Iterable[Part]) -> list[Part]:
    """Omit the counts of guards directly inside other guards, because the outer counts are used."""
    parts = list(parts)
    counts = {part.path for part in parts if part.kind == Kind(WrapperState)}
    inner_counts = {field_path(path, "inner_state") for path in counts} & counts
    return [part for part in parts if part.path not in inner_counts]


def _parts(state: Tree, path: Path = (), depth: int = 0) -> Iterator[Part]:
    """Yield all parts of a state, from the outermost to the innermost.

    `path` is the path of the state in the optimizer state, and `depth` the number of accumulations
    around it.
    """

    def is_part(node: object) -> bool:
        return isinstance(node, GuardState) or is_own_state(node)

    for place, node in jax.tree.leaves_with_path(state, is_leaf=is_part):
        here = (*path, *place)
        if isinstance(node, GuardState):
            yield _guard_part(node, here, depth)
        elif isinstance(node, WrapperState):
            yield from _wrapper_parts(node, here, depth)
        elif hasattr(node, "inner_state"):
            yield from _watch_parts(node, here, depth)
        elif is_own_state(node):  # a clip
            yield Part(Kind(type(node)), depth, here, node)


def _guard_part(node: GuardState, path: Path, depth: int) -> Part:
    """Return the part of one guard."""
    has_loss_scale = hasattr(node.rule_state, "loss_scale")
    return Part(Kind(GuardState, has_loss_scale, tuple(sorted(node.skipped))), depth, path, node)


def _watch_parts(node: Tree, path: Path, depth: int) -> Iterator[Part]:
    """Yield the `Part` of a `watch`, and the parts of its inner state."""
    yield Part(Kind(type(node)), depth, path, node._replace(inner_state=()))
    yield from _parts(node.inner_state, field_path(path, "inner_state"), depth)


def _wrapper_parts(node: WrapperState, path: Path, depth: int) -> Iterator[Part]:
    """Yield counts, guards and accumulation of a wrapper, and the parts of its inner state."""
    if node.outer_guards or node.inner_guards:
        counts = node._replace(outer_guards=(), accumulation=None, inner_guards=(), inner_state=())
        yield Part(Kind(WrapperState), depth, path, counts)
    yield from _parts(node.outer_guards, field_path(path, "outer_guards"), depth)
    if node.accumulation is not None:
        yield _accumulation_part(node, field_path(path, "accumulation"), depth)
        depth += 1
    for name in ("inner_guards", "inner_state"):
        yield from _parts(getattr(node, name), field_path(path, name), depth)


def _accumulation_part(node: WrapperState, path: Path, depth: int) -> Part:
    """Return the `Part` that describes the accumulation of a wrapper."""
    source = "optax" if isinstance(node.accumulation, MultiStepsWindow) else "own"
    has_inner_scale = "loss_scale" in metric_names((node.inner_guards, node.inner_state))
    kind = Kind(AccumulationState)
    return Part(kind, depth, path, node.accumulation, source, has_inner_scale)
