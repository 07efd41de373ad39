"""Counters, and functions that search Optax states for states of this package."""

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

    def is_gate(node: object) -> bool:
        others = optax.MultiStepsState, optax.ApplyIfFiniteState
        return kind_of(node).is_gate or isinstance(node, others)

    nodes = jax.tree.leaves(state, is_leaf=is_gate)
    flags = [_gate_has_stepped(node) for node in nodes if is_gate(node)]
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
