"""Detect clips in the wrong place, from the optimizer state alone.

The order of transformations in a chain is the order of their states in a tuple.
"""

from collections.abc import Callable, Mapping
from typing import Final

import jax

from ._errors import type_error
from ._states import is_own_state
from ._types import Tree

CLIP_INSIDE: Final = "Clip unscaled gradients: `dynamic_loss_scale(optax.chain(clip, optimizer))`."
"""How to order a clip and a loss scale."""


def check_clip_order(state: Tree) -> None:
    """Raise if a chain clips gradients before the loss scale divides them."""
    if is_clip_before_scale(state):
        rule = "a state without a clip before the loss scale in the same chain"
        raise type_error("state", rule, "one with a clip of scaled gradients", CLIP_INSIDE)


def is_clip_before_scale(state: Tree) -> bool:
    """Return whether a clip in a chain is before the loss scale and receives scaled gradients."""
    if is_own_state(state):
        return is_clip_before_scale(getattr(state, "inner_state", ()))
    if not _has_loss_scale(state):
        return False
    children = jax.tree.leaves(state, is_leaf=lambda node: node is not state)
    if type(state) is tuple:  # a chain
        scale = next(i for i, child in enumerate(children) if _has_loss_scale(child))
        return any(map(_has_clip, children[:scale])) or is_clip_before_scale(children[scale])
    if isinstance(state, Mapping):  # a named chain, whose state does not keep the order
        others = [child for child in children if not _has_loss_scale(child)]
        return any(map(_has_clip, others)) or any(map(is_clip_before_scale, children))
    # `optax.partition` also has a dictionary, but its groups receive different gradients.
    groups = [child.values() if isinstance(child, Mapping) else [child] for child in children]
    return any(is_clip_before_scale(child) for group in groups for child in group)


def is_only_clips(state: Tree) -> bool:
    """Return whether a state contains only clips, which may be in chains and other wrappers."""
    if hasattr(state, "inner_state"):
        return is_only_clips(state.inner_state)
    is_chain = (type(state) is tuple or isinstance(state, Mapping)) and len(state) > 0
    parts = state.values() if isinstance(state, Mapping) else state
    return _is_clip(state) or (is_chain and all(map(is_only_clips, parts)))


def _is_clip(node: object) -> bool:
    """Return whether a node of an optimizer state belongs to a clip of this package."""
    return hasattr(type(node), "is_clip")


def _is_loss_scale(node: object) -> bool:
    """Return whether a node of an optimizer state is the state of a loss scale of this package."""
    return is_own_state(node) and hasattr(type(node), "loss_scale")


def _has_clip(state: Tree) -> bool:
    """Return whether an optimizer state contains a clip of this package."""
    return _contains(state, _is_clip)


def _has_loss_scale(state: Tree) -> bool:
    """Return whether a state contains the state of a loss scale of this package."""
    return _contains(state, _is_loss_scale)


def _contains(state: Tree, is_kind: Callable[[object], bool]) -> bool:
    """Return whether `is_kind` is true for a node of a state."""
    return any(map(is_kind, jax.tree.leaves(state, is_leaf=is_kind)))
