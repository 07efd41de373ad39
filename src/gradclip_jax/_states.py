"""Counters and metrics of states of this package inside Optax states."""

import functools
from collections.abc import Callable
from typing import Final, Literal, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import optax

from ._checks import check_no_transformation
from ._errors import public
from ._types import Array, Path, Tree

Role: TypeAlias = Literal["guard", "loss scale", "accumulation", "watch", ""]


class StateKind(NamedTuple):
    """How functions that search a state treat one of its types.

    Attributes:
        metrics: Names of the fields or properties that `metrics` returns.
        inner: Name of the field with the state of the inner transformation; "" without one.
        role: What the transformation is.
    """

    metrics: tuple[str, ...] = ()
    inner: str = ""
    role: Role = ""

    @property
    def is_guard(self) -> bool:
        return self.role in ("guard", "loss scale")

    @property
    def is_gate(self) -> bool:
        return self.is_guard or self.role == "accumulation"


KINDS: Final[dict[type, StateKind]] = {}
"""The types of states of this package."""

_OTHER: Final = StateKind()
_State = TypeVar("_State", bound=type)


def register_state(*metrics: str, inner: str = "", role: Role = "") -> Callable[[_State], _State]:
    """Return a class decorator that adds a type of states to `KINDS`."""

    def register(kind: _State) -> _State:
        KINDS[kind] = StateKind(metrics, inner, role)
        return kind

    return register


def register_guard(*metrics: str, role: Role = "guard") -> Callable[[_State], _State]:
    """Return a decorator like `register_state` that adds the metrics of all guards."""
    common = ("grad_norm", "consecutive_skips", "guard_failed")
    return register_state(*metrics, *common, inner="inner_state", role=role)


def kind_of(node: object) -> StateKind:
    """Return how to treat a node of a state; a kind without any properties for other nodes."""
    return KINDS.get(type(node), _OTHER)


def find_role(state: Tree, *roles: str) -> list[tuple[Path, Tree]]:
    """Return `(path, state)` for every state of a transformation with one of these roles."""
    return find_states(state, tuple(kind for kind, x in KINDS.items() if x.role in roles))


def increment_where(count: Array, happened: Array | bool = True) -> Array:
    """Increment a counter where `happened` is true, saturating instead of overflowing."""
    # If the sum overflows, it is less than `count`.
    return jnp.maximum(count, count + jnp.asarray(happened, count.dtype))


def find_states(state: Tree, kinds: type | tuple[type, ...]) -> list[tuple[Path, Tree]]:
    """Return `(path, state)` for every state of the given types, including nested states."""
    found: list[tuple[Path, Tree]] = [((), state)] if isinstance(state, kinds) else []

    def is_inside(node: object) -> bool:
        return isinstance(node, kinds) and node is not state

    for path, node in jax.tree.leaves_with_path(state, is_leaf=is_inside):
        for inner_path, inner in find_states(node, kinds) if is_inside(node) else ():
            found.append(((*path, *inner_path), inner))
    return found


def replace_states(
    state: Tree, kinds: type | tuple[type, ...], replace: Callable[[Tree], Tree]
) -> Tree:
    """Apply `replace` to the outermost states of the given types."""

    def visit(node: Tree) -> Tree:
        return replace(node) if isinstance(node, kinds) else node

    return jax.tree.map(visit, state, is_leaf=lambda node: isinstance(node, kinds))


def discard_windows(state: Tree, where: Array | bool) -> Tree:
    """Discard all unfinished accumulation windows if the scalar `where` is true."""

    def discard(window: Tree) -> Tree:
        fields = ("mini_step", "total_weight", "emitted")
        empty = {name: jnp.where(where, 0, getattr(window, name)) for name in fields}
        return window._replace(**empty)

    kinds = tuple(kind for kind, x in KINDS.items() if x.role == "accumulation")
    return replace_states(state, kinds, discard)


@public
def has_updated(state: Tree) -> Array:
    """Return whether the last update applied an optimizer step.

    Use this function to count optimizer steps, or to update other state, such as batch
    normalization statistics, only after applied steps.

    | state | result |
    | --- | --- |
    | a guard skipped the step, or the window is still open or was dropped | False |
    | the same for `optax.apply_if_finite` and `optax.MultiSteps` | False |
    | an accumulation before the first call | False |
    | no guard or accumulation; guards before the first call | True |
    | several guards or accumulations, as in `optax.partition` | whether any applied a step |

    Args:
        state: Optimizer state, or a pytree that contains optimizer states.

    Returns:
        A bool[], with the leading axes of a vmapped state.

    Raises:
        TypeError: If `state` is a gradient transformation.

    Examples:
        >>> import jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = gcx.skip_nonfinite(gcx.skip_spikes(optax.sgd(1.0), norm=10.0))
        >>> params = jnp.zeros(1)
        >>> state, steps = tx.init(params), 0
        >>> for grad in (1.0, jnp.nan, 50.0, 2.0):
        ...     params, state = gcx.apply_gradients(tx, jnp.array([grad]), state, params)
        ...     steps += int(gcx.has_updated(state))
        >>> steps
        2
    """
    check_no_transformation(state)
    return has_stepped(plain_arrays(state))


def has_stepped(state: Tree) -> Array:
    """Return whether an outermost guard or accumulation applied a step, or True if none exists."""
    gates = [kind for kind, x in KINDS.items() if x.is_gate]
    kinds = (optax.MultiStepsState, optax.ApplyIfFiniteState, *gates)
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kinds))
    flags = [_gate_has_stepped(node) for node in nodes if isinstance(node, kinds)]
    return functools.reduce(jnp.logical_or, flags) if flags else jnp.array(True)


def _gate_has_stepped(node: Tree) -> Array:
    """Return whether all nested guards and accumulations applied the step."""
    if isinstance(node, optax.MultiStepsState):
        is_closed = (jnp.asarray(node.mini_step) == 0) & (jnp.asarray(node.gradient_step) > 0)
        return is_closed & has_stepped(node.inner_opt_state)
    if isinstance(node, optax.ApplyIfFiniteState):
        return node.last_finite & has_stepped(node.inner_state)
    stepped = jnp.array(True)
    while (kind := kind_of(node)).is_gate:
        # An accumulation may run the optimizer even if an outer guard skipped the micro-batch.
        stepped = stepped & (node.consecutive_skips == 0) if kind.is_guard else node.emitted > 0
        node = getattr(node, kind.inner)
    return stepped & has_stepped(node)


@public
def metrics(state: Tree) -> dict[str, Array]:
    """Collect metrics for logging from a nested optimizer state.

    All values are read from the states without recomputing them. The keys depend only on the
    structure of the state and are the same at every step.

    | key | meaning |
    | --- | --- |
    | `grad_norm` | gradient norm before clipping; inside a loss scale after division by the scale |
    | `clip_threshold`, `clip_factor` | smallest threshold and factor of all units |
    | `clip_fraction` | fraction of units that were clipped |
    | `mini_step`, `gradient_step` | counters of the accumulation |
    | `empty_windows` | number of windows that closed without weight |
    | `loss_scale` | factor of the next loss |
    | `skip_threshold`, `loss_threshold` | thresholds of `skip_spikes` |
    | `skipped_nonfinite`, `skipped_large_norm` | skipped steps by cause |
    | `skipped_large_loss` | number of skipped steps by cause |
    | `skipped_other` | number of steps that `skip_if` skipped |
    | `consecutive_skips` | number of steps without an applied update since the last one |
    | `guard_failed` | 1 if a limit of skipped steps or of the loss scale was ever reached, else 0 |
    | `gradient_norm`, `update_norm`, `parameter_norm` | norms in the last call of `watch` |
    | `nonfinite_elements` | number of non-finite elements of the gradient in this call |

    Metrics of `watch` are 0 if not measured. A `Monitor` reads the norms of each leaf or layer.

    If several states have the same metric, the path of the state is appended to the key, as in
    `clip_factor/0` and `clip_factor/2` for two clips in a chain. When clipping by group, the group
    label is appended to the key, as in `grad_norm/body`. If guards are among these states, the key
    without a path combines all guards. Without a guard, `grad_norm` is that of the outermost clip.

    | key | value for several guards |
    | --- | --- |
    | `skipped_nonfinite` and other numbers of skipped steps | sum |
    | `consecutive_skips`, `guard_failed` | maximum |
    | `skip_threshold`, `loss_threshold` | minimum |
    | all others, such as `grad_norm` | value of the outermost guard |

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
    by_name: dict[str, list[tuple[str, bool, Tree]]] = {}
    for path, node in find_states(plain_arrays(state), tuple(KINDS)):
        place, kind = jax.tree_util.keystr(path, simple=True, separator="/"), kind_of(node)
        for name in kind.metrics:
            if (value := getattr(node, name)) is not None:  # a guard may check only the norm
                by_name.setdefault(name, []).append((place, kind.is_guard, value))
    out: dict[str, Tree] = {}
    for name, entries in by_name.items():
        guards = [x for _, is_guard, x in entries if is_guard]
        if len(entries) > 1:
            out |= {f"{name}/{place}".removesuffix("/"): x for place, _, x in entries}
        first, _, value = entries[0]
        is_of_all = name == "grad_norm" and "inner_states" not in first  # not of `partition`
        if guards or len(entries) == 1 or is_of_all:
            out[name] = _combined(name, guards or [value])
    for key, groups in list(out.items()):
        if isinstance(groups, dict):
            out |= {f"{key}/{label}": x for label, x in out.pop(key).items()}
    return {key: jnp.asarray(out[key]) for key in sorted(out)}


def _combined(name: str, values: list[Array]) -> Array:
    """Combine a metric of all guards, from the outermost to the innermost."""
    if name.startswith("skipped_"):
        return sum(values[1:], values[0])
    if name in ("consecutive_skips", "guard_failed"):
        return functools.reduce(jnp.maximum, values)
    return functools.reduce(jnp.minimum, values) if name.endswith("threshold") else values[0]


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
