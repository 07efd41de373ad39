"""Find the states of this package in an optimizer state, and collect their metrics.

A state of this package has a method `step_metrics`, which returns its entries of `metrics`. If it
contains the state of another transformation, its field `inner_state` is that state.
"""

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from ._checks import check_no_transformation
from ._errors import public, type_error
from ._types import Array, Path, Tree


def is_own_state(node: object) -> bool:
    """Return whether a node of an optimizer state is a state of this package."""
    return hasattr(type(node), "step_metrics")


def own_states(state: Tree, path: Path = ()) -> Iterator[tuple[Path, Tree]]:
    """Yield `(path, state)` for every state of this package, from the outermost to the innermost.

    A path omits the field `inner_state` of these states, so that it is short enough for the key of
    a metric.
    """
    for place, node in jax.tree.leaves_with_path(state, is_leaf=is_own_state):
        if is_own_state(node):
            yield (*path, *place), node
            yield from own_states(getattr(node, "inner_state", ()), (*path, *place))


def find_states(state: Tree, kind: type) -> list[tuple[Path, Tree]]:
    """Return `(path, state)` for every state of a type, including nested states."""
    found: list[tuple[Path, Tree]] = [((), state)] if isinstance(state, kind) else []

    def is_inside(node: object) -> bool:
        return isinstance(node, kind) and node is not state

    for path, node in jax.tree.leaves_with_path(state, is_leaf=is_inside):
        for inner_path, inner in find_states(node, kind) if is_inside(node) else ():
            found.append(((*path, *inner_path), inner))
    return found


def replace_states(state: Tree, kind: type, replace: Callable[[Tree], Tree]) -> Tree:
    """Apply `replace` to the outermost states of a type."""

    def visit(node: Tree) -> Tree:
        return replace(node) if isinstance(node, kind) else node

    return jax.tree.map(visit, state, is_leaf=lambda node: isinstance(node, kind))


def metric_names(state: Tree) -> set[str]:
    """Return the names of all metrics in a state."""
    return {name for _, node in own_states(state) for name in node.step_metrics()}


def is_clip(node: object) -> bool:
    """Return whether a node of an optimizer state is the state of a clip of this package."""
    return hasattr(type(node), "is_clip")


def has_clip(state: Tree) -> bool:
    """Return whether a state contains the state of a clip of this package."""
    return _contains(state, is_clip)


def is_only_clips(state: Tree) -> bool:
    """Return whether a state is that of a clip, or of clips in chains and other wrappers."""
    if hasattr(state, "inner_state"):
        return is_only_clips(state.inner_state)
    is_chain = (type(state) is tuple or isinstance(state, Mapping)) and len(state) > 0
    parts = state.values() if isinstance(state, Mapping) else state
    return is_clip(state) or (is_chain and all(map(is_only_clips, parts)))


def is_clip_before_scale(state: Tree) -> bool:
    """Return whether a clip in a chain is before the loss scale and receives scaled gradients.

    The state of `optax.named_chain` is a dictionary, which does not keep the order.
    """
    if is_own_state(state):
        return is_clip_before_scale(getattr(state, "inner_state", ()))
    if not _has_loss_scale(state):
        return False
    is_chain = type(state) is tuple or isinstance(state, Mapping)
    children = jax.tree.leaves(state, is_leaf=lambda node: node is not state)
    if not is_chain:  # the groups of `optax.partition` are not a chain
        groups = [[*x.values()] if isinstance(x, Mapping) else [x] for x in children]
        return any(is_clip_before_scale(x) for group in groups for x in group)
    for child in children:
        if _has_loss_scale(child) and not isinstance(state, Mapping):
            return is_clip_before_scale(child)
        if not _has_loss_scale(child) and has_clip(child):
            return True
    return any(map(is_clip_before_scale, children))


def _has_loss_scale(state: Tree) -> bool:
    """Return whether a state contains the state of a loss scale of this package."""

    def is_loss_scale(node: object) -> bool:
        return is_own_state(node) and hasattr(type(node), "loss_scale")

    return _contains(state, is_loss_scale)


def _contains(state: Tree, is_kind: Callable[[object], bool]) -> bool:
    """Return whether `is_kind` is true for a node of a state."""
    return any(map(is_kind, jax.tree.leaves(state, is_leaf=is_kind)))


def check_clip_order(state: Tree) -> None:
    """Raise if a chain clips gradients before the loss scale divides them."""
    if is_clip_before_scale(state):
        rule = "a state without a clip before the loss scale in the same chain"
        raise type_error("state", rule, "one with a clip of scaled gradients", _CLIP_INSIDE)


_CLIP_INSIDE: Final = "Clip unscaled gradients: `dynamic_loss_scale(optax.chain(clip, optimizer))`."


def increment_where(count: Array, happened: Array | bool = True) -> Array:
    """Increment a counter where `happened` is true, saturating instead of overflowing."""
    # If the sum overflows, it is less than `count`.
    return jnp.maximum(count, count + jnp.asarray(happened, count.dtype))


@public
def metrics(state: Tree) -> dict[str, Array]:
    """Collect metrics for logging from a nested optimizer state.

    All values are read from the states without recomputing them. The keys depend only on the
    structure of the state and are the same at every step.

    | key | meaning |
    | --- | --- |
    | `grad_norm` | norm of the gradient that the outermost `watch`, guard or clip received, |
    | | after division by the loss scale |
    | `clip_threshold`, `clip_factor` | smallest threshold and factor of all norm groups |
    | `clip_fraction` | fraction of norm groups that were clipped |
    | `mini_step`, `gradient_step` | counters of the accumulation |
    | `empty_windows` | number of windows that closed without weight |
    | `loss_scale` | factor of the next loss |
    | `skip_threshold`, `loss_threshold` | smallest thresholds of `skip_spikes` |
    | `skipped_nonfinite`, `skipped_large_norm` | numbers of skipped steps by cause |
    | `skipped_large_loss` | number of steps that `skip_spikes` skipped because of the loss |
    | `skipped_other` | number of steps that `skip_if` skipped |
    | `consecutive_skips` | number of steps without an applied update since the last one |
    | `guard_failed` | 1 if a limit of skipped steps or of the loss scale was ever reached, else 0 |
    | `update_norm`, `parameter_norm` | norms in the last call of `watch` |
    | `nonfinite_elements` | number of non-finite elements of the gradient in this call |

    Metrics of `watch` are 0 if not measured. A `Monitor` reads the norms of each leaf or layer.

    Each number has one key. Guards that are directly around each other are one state, whose skips
    are sums. If several clips or other states have the same metric, the path of the state is
    appended to the key, as in `clip_factor/0` and `clip_factor/2` for two clips in a chain, and the
    key without a path is the sum of skips, the largest `consecutive_skips` and `guard_failed`, and
    the smallest `skip_threshold` and `loss_threshold`. When clipping by group, the label is
    appended, as in `grad_norm/body`. With `optax.partition`, each group has a `grad_norm`.

    Args:
        state: Pytree that contains optimizer states, such as a train state or the state of
            `optax.chain`, `masked`, `partition`, `inject_hyperparams` or another wrapper.

    Returns:
        Dictionary of scalars, sorted by name; empty if no state of this package is found.

    Raises:
        TypeError: If `state` is a gradient transformation instead of its state.

    Examples:
        >>> import jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = optax.chain(gcx.clip_by_global_norm(1.0), optax.adam(1e-3))
        >>> params = jnp.array([3.0, 4.0])
        >>> _, state = tx.update(params, tx.init(params), params)
        >>> sorted(gcx.metrics(state))
        ['clip_factor', 'clip_fraction', 'clip_threshold', 'grad_norm']
        >>> float(gcx.metrics(state)["grad_norm"])
        5.0
    """
    check_no_transformation(state)
    entries: dict[str, list[tuple[str, Tree]]] = {}
    for path, node in own_states(plain_arrays(state)):
        place = jax.tree_util.keystr(path, simple=True, separator="/")
        for name, value in node.step_metrics().items():
            entries.setdefault(name, []).append((place, value))
    if "loss_scale" in entries and is_clip_before_scale(state):
        warnings.warn(f"A clip receives scaled gradients. {_CLIP_INSIDE}", stacklevel=2)
    out: dict[str, Tree] = {}
    for name, found in entries.items():
        if name == "grad_norm":
            out |= _outermost(found)
            continue
        if len(found) > 1:
            out |= {f"{name}/{place}": value for place, value in found if place}
        if name in _COMBINE or len(found) == 1 or not found[0][0]:
            out[name] = combined(name, [value for _, value in found])
    return {key: jnp.asarray(out[key]) for key in sorted(out)}


@jax.jit  # outside jit, the constant would be transferred to the device
def _saturating_sum(x: Array, y: Array) -> Array:
    """Add two counts, whose sum is at most the largest int32."""
    return x + jnp.minimum(y, np.iinfo(np.int32).max - x)


_COMBINE: Final = {
    "consecutive_skips": jnp.maximum,
    "guard_failed": jnp.maximum,
    "skip_threshold": jnp.minimum,
    "loss_threshold": jnp.minimum,
    "skipped_nonfinite": _saturating_sum,
    "skipped_large_norm": _saturating_sum,
    "skipped_large_loss": _saturating_sum,
    "skipped_other": _saturating_sum,
}
"""How the values of a metric in several states are combined; other metrics are not combined."""


def combined(name: str, values: Sequence[Array]) -> Array:
    """Combine the values of a metric in several guards; for other metrics, return the first one."""
    return functools.reduce(_COMBINE[name], values) if name in _COMBINE else values[0]


def _outermost(found: Sequence[tuple[str, Tree]]) -> dict[str, Tree]:
    """Return the gradient norm of the outermost state, and of each group of `optax.partition`.

    `found` are pairs of a path and a norm.
    """
    norms: dict[str, Tree] = {}
    for place, value in found:
        _, _, inside = place.partition("inner_states/")
        label = inside.partition("/")[0]
        norms.setdefault(f"grad_norm/{label}" if label else "grad_norm", value)
    return norms if len(norms) > 1 else {"grad_norm": found[0][1]}


def plain_arrays(tree: Tree) -> Tree:
    """Replace array wrappers, such as `flax.nnx.Variable`, by their arrays."""

    def holds_array(node: Tree) -> bool:
        return hasattr(type(node), "__jax_array__") and not isinstance(node, jax.Array)

    def unwrap(node: Tree) -> Tree:
        return jax.tree.leaves(node)[0] if holds_array(node) else node

    return jax.tree.map(unwrap, tree, is_leaf=holds_array)


def with_structure_of(reference: Tree, tree: Tree) -> Tree:
    """Return the leaves of `tree` with the pytree structure of `reference`."""
    return jax.tree.unflatten(jax.tree.structure(reference), jax.tree.leaves(tree))
