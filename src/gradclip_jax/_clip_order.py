"""Detect from an optimizer state whether gradients are clipped before they are unscaled.

The path of a state shows its place: states of a chain are in a tuple, in the order of their
transformations, and the state of a transformation inside a guard is in the field `inner_state`.
"""

import enum
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

from ._errors import type_error, warn
from ._states import is_own_state
from ._types import Path, Tree


class _Order(enum.Enum):
    """Place of a clip relative to a loss scale.

    | member | meaning |
    | --- | --- |
    | `BEFORE` | earlier in the same chain; the clip receives scaled gradients |
    | `AFTER` | later in the same chain or inside the loss scale; it receives unscaled gradients |
    | `UNRELATED` | in another group of `optax.partition` |
    | `UNKNOWN` | in the same named chain, whose state does not contain the order |
    """

    BEFORE = enum.auto()
    AFTER = enum.auto()
    UNRELATED = enum.auto()
    UNKNOWN = enum.auto()


def check_clip_order(state: Tree, *, raises: bool = True) -> None:
    """Raise or warn if a clip receives scaled gradients, and warn if it may receive them."""
    scales = _paths(state, lambda node: is_own_state(node) and hasattr(type(node), "loss_scale"))
    orders: set[_Order] = set()
    for clip in _paths(state, _is_clip):
        found = {_order(clip, scale) for scale in scales}
        # One loss scale before a clip is enough.
        orders |= found if _Order.AFTER not in found else set()
    hint = "Clip unscaled gradients: `dynamic_loss_scale(optax.chain(clip, optimizer))`."
    if _Order.BEFORE in orders and raises:
        rule = "a state without a clip before the loss scale in the same chain"
        # A tuple of the states of two optimizers looks like the state of a chain.
        hint += " If these are the states of two optimizers, pass only the one with the loss scale."
        raise type_error("state", rule, "one with a clip of scaled gradients", hint)
    if _Order.BEFORE in orders:
        warn(f"A clip receives scaled gradients. {hint}")
    elif _Order.UNKNOWN in orders:
        place = "If it comes before the loss scale in the named chain"
        warn(f"A clip may receive scaled gradients. {place}: {hint}")


def _order(clip: Path, scale: Path) -> _Order:
    """Return the place of a clip relative to a loss scale, from the first keys that differ.

    If these keys are neither indices of a tuple nor keys of a dictionary, they are the fields of
    one guard: the clip is in its `inner_state`, and thus after the loss scale.
    """
    i = next(i for i, keys in enumerate(zip(clip, scale, strict=False)) if keys[0] != keys[1])
    ours: Any = clip[i]
    theirs: Any = scale[i]
    if isinstance(ours, SequenceKey):  # a chain
        return _Order.BEFORE if ours.idx < theirs.idx else _Order.AFTER
    if isinstance(ours, DictKey):
        # The state of a named chain is a dictionary, too, but does not keep the order.
        is_partition = i > 0 and clip[i - 1] == GetAttrKey("inner_states")
        return _Order.UNRELATED if is_partition else _Order.UNKNOWN
    return _Order.AFTER


def is_only_clips(state: Tree) -> bool:
    """Return whether a state contains only clips, which may be in chains and other wrappers."""
    if hasattr(state, "inner_state"):
        return is_only_clips(state.inner_state)
    parts = tuple(state.values()) if isinstance(state, Mapping) else state
    if type(parts) is tuple:  # a chain
        return len(parts) > 0 and all(map(is_only_clips, parts))
    return _is_clip(parts)


def _paths(state: Tree, is_kind: Callable[[object], bool]) -> list[Path]:
    """Return the paths of the nodes of a state for which `is_kind` is true."""
    nodes = jax.tree.leaves_with_path(state, is_leaf=is_kind)
    return [path for path, node in nodes if is_kind(node)]


def _is_clip(node: object) -> bool:
    """Return whether a node of an optimizer state belongs to a clip of this package."""
    return hasattr(type(node), "is_clip")
