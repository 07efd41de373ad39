"""Functions that read or change the window of an accumulation between calls."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._checks import ARRAY_LIKE, check_arrays, check_transformation, is_float0, is_traced
from .._errors import public, type_error
from .._format import describe
from .._run_if import run_step
from .._states import (
    check_one_run,
    check_optimizer_state,
    find_states,
    is_own_state,
    plain_arrays,
    replace_states,
    with_structure_of,
)
from .._types import Array, HostArray, Path, Scalar, Tree
from ..wrappers._accumulation import AccumulationState
from ..wrappers._guard import params_of
from ..wrappers._state import WrapperState


class AccumulationStats(NamedTuple):
    """Counts of an accumulation; integers, or arrays inside jit.

    Attributes:
        total_micro_batches: Number of micro-batches so far; the counter saturates.
        total_updates: Number of windows that were applied; the counter saturates.
        accumulation_steps: Number of micro-batches in the current window.
        registered_params: Number of accumulated leaves; 0 with `every=1`.
        total_param_elements: Total number of elements in these leaves.
    """

    total_micro_batches: int | Scalar
    total_updates: int | Scalar
    accumulation_steps: int | Scalar
    registered_params: int
    total_param_elements: int


@public
@jax.named_scope("flush")
def flush(
    tx: optax.GradientTransformation, state: Tree, params: Tree, **extra_args: Any
) -> tuple[Tree, Tree]:
    """Run the inner optimizer on the mean gradient of an unfinished accumulation window.

    Use this function at the end of an epoch whose number of micro-batches is not a multiple of
    `every`. Only the states of accumulations and of the transformations inside them change:

    | part of `tx` | result |
    | --- | --- |
    | an open window | the inner optimizer runs on its mean gradient |
    | a window without micro-batches | zero update; `has_updated` is False |
    | a guard around the accumulation, such as a loss scale | counts a skip if it drops the window |
    | a clip or a schedule outside the accumulation | its state does not change |
    | a group of `optax.partition` without an accumulation | zero update, state unchanged |

    Args:
        tx: Result of `accumulate_gradients`, or a transformation that wraps it and forwards extra
            arguments.
        state: State of `tx`.
        params: Parameters.
        **extra_args: Extra arguments for the inner optimizer and for guards, such as `value` if
            `skip_spikes` has a threshold of the loss.

    Returns:
        The updates and the new state.

    Raises:
        TypeError: If the state does not contain an accumulation.

    Examples:
        >>> import jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = gcx.accumulate_gradients(optax.sgd(1.0), every=100)
        >>> params = jnp.array([0.0])
        >>> _, state = tx.update(jnp.array([3.0]), tx.init(params), params)
        >>> updates, state = gcx.flush(tx, state, params)
        >>> updates.tolist()
        [-3.0]
    """
    check_transformation("tx", tx)
    for name in extra_args.keys() & {"weight", "flush"}:
        hint = "The window closes with the weights of its micro-batches."
        raise type_error(name, "omitted", describe(extra_args[name]), hint)
    check_arrays("params", params)
    arrays = plain_arrays(state)
    _accumulations(arrays)
    # Outside jit, constants would be transferred to the device one by one.
    is_traceable = all(isinstance(x, ARRAY_LIKE) for x in jax.tree.leaves(extra_args))
    close = _jitted_flush if is_traceable else _flush
    updates, flushed = close(tx, arrays, plain_arrays(params), extra_args)
    return with_structure_of(params, updates), with_structure_of(state, flushed)


def _flush(
    tx: optax.GradientTransformation, state: Tree, params: Tree, extra_args: dict[str, Any]
) -> tuple[Tree, Tree]:
    """Call `update` without a gradient and close the window; return the updates and the state."""
    windows = _accumulations(state)
    is_open = jnp.stack([x.mini_step for x in windows]).any()
    update = optax.with_extra_args_support(tx).update

    def zero(param: Array) -> Array | HostArray:
        if jnp.issubdtype(jnp.result_type(param), jnp.inexact):
            return jnp.zeros_like(param)
        return np.zeros(np.shape(param), jax.dtypes.float0)

    def close(state: Tree) -> tuple[Tree, Tree]:
        no_gradient = jax.tree.map(zero, params_of(params))
        closing = {"weight": jnp.zeros((), jnp.float32), "flush": True}
        updates, flushed = update(no_gradient, state, params, **closing, **extra_args)
        return _zeros_outside(windows, updates), _with_windows(state, flushed)

    return run_step(is_open, close, _without_outcomes(state))


_jitted_flush = jax.jit(_flush, static_argnums=0)


def _zeros_outside(windows: list[AccumulationState], updates: Tree) -> Tree:
    """Set the updates to zero for parameters whose gradients are not accumulated.

    If a wrapper such as `optax.flatten` renamed the parameters, all updates are returned unchanged.
    """
    totals = [window.gradient.total for window in windows]
    covered = {path for x in totals for path, _ in jax.tree.leaves_with_path(x)}
    if not covered <= {path for path, _ in jax.tree.leaves_with_path(updates)}:
        return updates

    def without_others(path: Path, update: Array) -> Array:
        return update if path in covered or is_float0(update) else jnp.zeros_like(update)

    return jax.tree.map_with_path(without_others, updates)


@jax.jit  # outside jit, constants would be transferred to the device one by one
def _without_outcomes(state: Tree) -> Tree:
    """Return a state in which `has_updated` is False."""

    def without(node: WrapperState) -> WrapperState:
        return node._replace(outcome=jnp.zeros_like(node.outcome))

    return replace_states(state, WrapperState, without)


def _with_windows(old: Tree, new: Tree) -> Tree:
    """Replace the states of `watch` and of all accumulations by the new ones."""

    def select(old: Tree, new: Tree) -> Tree:
        if isinstance(old, WrapperState):
            return old if old.accumulation is None else new
        if not hasattr(old, "inner_state") or not is_own_state(old):
            return old
        return new._replace(inner_state=_with_windows(old.inner_state, new.inner_state))

    return jax.tree.map(select, old, new, is_leaf=is_own_state)


@public
def reset_accumulation(state: Tree) -> Tree:
    """Discard the accumulated micro-batches without running the inner optimizer.

    Args:
        state: State of `accumulate_gradients`, or a state that contains it.

    Returns:
        The state with an empty window; the counts of micro-batches and updates do not change.

    Raises:
        TypeError: If the state does not contain an accumulation.

    Examples:
        >>> import jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = gcx.accumulate_gradients(optax.sgd(1.0), every=8)
        >>> params = jnp.array([0.0])
        >>> _, state = tx.update(jnp.array([3.0]), tx.init(params), params)
        >>> _, state = tx.update(jnp.array([5.0]), gcx.reset_accumulation(state), params)
        >>> gcx.flush(tx, state, params)[0].tolist()
        [-5.0]
    """
    arrays = plain_arrays(state)
    _accumulations(arrays)
    emptied = replace_states(_without_outcomes(arrays), AccumulationState, _closed)
    return with_structure_of(state, emptied)


@jax.jit  # outside jit, constants would be transferred to the device one by one
def _closed(window: AccumulationState) -> AccumulationState:
    """Return a window without micro-batches."""
    return window.close_if(True)


@public
def accumulation_stats(state: Tree) -> AccumulationStats:
    """Count micro-batches, updates and parameters.

    Args:
        state: State of `accumulate_gradients`, or a state that contains it.

    Returns:
        The counts as integers. Inside jit, the step counts are traced scalars.

    Raises:
        TypeError: If the state does not contain exactly one accumulation.

    Examples:
        >>> import jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = gcx.accumulate_gradients(optax.sgd(1.0), every=8)
        >>> stats = gcx.diagnostics.accumulation_stats(tx.init(jnp.zeros((2, 3))))
        >>> stats.total_micro_batches, stats.accumulation_steps, stats.total_param_elements
        (0, 8, 6)
    """
    (window,) = plain_arrays(_accumulations(state, only=True))
    counts = window.micro_batch_count, window.gradient_step, window.accumulation_steps
    check_one_run(counts)
    micro_batches, updates, steps = (x if is_traced(x) else int(x) for x in counts)
    sizes = [x.size for x in jax.tree.leaves(window.gradient.total)]
    return AccumulationStats(micro_batches, updates, steps, len(sizes), sum(sizes))


def _accumulations(state: Tree, *, only: bool = False) -> list[AccumulationState]:
    """Return all accumulations in a state.

    Raise an error if there are none, or if `only` is true and there are several.
    """
    check_optimizer_state(state)
    windows = [window for _, window in find_states(state, AccumulationState)]
    if not windows or (only and len(windows) > 1):
        rule = f"a state with {'exactly one' if only else 'an'} accumulation"
        hint = "Pass the state of `accumulate_gradients`, or a state that contains it."
        raise type_error("state", rule, f"{type(state).__name__} with {len(windows)}", hint)
    return windows
