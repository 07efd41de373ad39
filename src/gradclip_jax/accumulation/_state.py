"""The state of an accumulation, and functions that read or change it between calls."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._checks import check_transformation, is_float0, is_traced
from .._errors import public, type_error
from .._run_if import run_step
from .._states import (
    discard_windows,
    find_states,
    kind_of,
    plain_arrays,
    register_state,
    with_structure_of,
)
from .._types import Array, HostArray, Path, Scalar, Tree
from ..gates._gate import params_of


@register_state(
    "mini_step", "gradient_step", "empty_windows", inner="inner_opt_state", role="accumulation"
)
class AccumulationState(NamedTuple):
    """The accumulated micro-batches, and the state of the inner optimizer.

    Attributes:
        mini_step: Number of micro-batches in the current accumulation window, int32[].
        gradient_step: Number of completed windows, including those that an inner guard skipped,
            int32[].
        inner_opt_state: State of the inner optimizer.
        acc_grads: Weighted sum of gradients, in the accumulator's dtype, or () for `every=1`; the
            values are ignored while `mini_step` is 0. Divide it by `total_weight` for the mean.
        total_weight: Sum of the accumulated weights, float32[].
        accumulation_steps: Length of the window, int32[].
        micro_batch_count: Number of all micro-batches so far, int32[].
        emitted: 1 if the last call emitted a window, else 0, int32[].
        empty_windows: Number of windows that closed without weight, int32[].
        loss_sum: Weighted sum of the losses in the current window, float32[].
        loss_weight: Sum of the weights of these losses, float32[].
    """

    mini_step: Scalar
    gradient_step: Scalar
    inner_opt_state: Tree
    acc_grads: Tree
    total_weight: Scalar
    accumulation_steps: Scalar
    micro_batch_count: Scalar
    emitted: Scalar
    empty_windows: Scalar
    loss_sum: Scalar
    loss_weight: Scalar


class AccumulationStats(NamedTuple):
    """Counts of an accumulation; integers, or arrays inside jit.

    Attributes:
        total_micro_batches: Number of micro-batches so far; the counter saturates.
        total_updates: Number of completed windows; the counter saturates.
        accumulation_steps: Number of micro-batches in the current window.
        registered_params: Number of accumulated leaves; 0 with `every=1`.
        total_param_elements: Total number of elements in these leaves.
        effective_batch_multiplier: Ratio of the batch size to the micro-batch size.
    """

    total_micro_batches: int | Scalar
    total_updates: int | Scalar
    accumulation_steps: int | Scalar
    registered_params: int
    total_param_elements: int
    effective_batch_multiplier: int | Scalar


@public
@jax.named_scope("flush")
def flush(
    tx: optax.GradientTransformation, state: Tree, params: Tree, **extra_args: Any
) -> tuple[Tree, Tree]:
    """Run the inner optimizer on the mean gradient of an unfinished accumulation window.

    Use this function at the end of an epoch whose number of micro-batches is not a multiple of
    `every`. It changes only accumulations and what is inside them:

    | part of `tx` | result |
    | --- | --- |
    | an open window | the inner optimizer runs on its mean gradient |
    | a window without micro-batches | zero update, state unchanged |
    | a guard around the accumulation, such as a loss scale | changes only if it drops the window |
    | a clip or a schedule outside the accumulation | its state does not change |
    | a group of `optax.partition` without an accumulation | zero update, state unchanged |

    Args:
        tx: Result of `accumulate_gradients`, or a transformation that wraps it and forwards extra
            arguments.
        state: State of `tx`.
        params: Parameters.
        **extra_args: Extra arguments for the inner optimizer.

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
    arrays, params = plain_arrays(state), plain_arrays(params)
    windows = _accumulations(arrays)
    is_open = jnp.stack([x.mini_step > 0 for x in windows]).any()
    update = optax.with_extra_args_support(tx).update
    ours = {"weight": jnp.float32(0), "flush": True}
    places = {path for path, _ in jax.tree.leaves_with_path(params_of(params))}
    covered = {path for x in windows for path, _ in jax.tree.leaves_with_path(x.acc_grads)}
    # A wrapper such as `optax.flatten` may rename the parameters.
    others = places - covered if covered <= places else set[Path]()

    def zero(param: Array) -> Array | HostArray:
        if jnp.issubdtype(jnp.result_type(param), jnp.inexact):
            return jnp.zeros_like(param)
        return np.zeros(np.shape(param), jax.dtypes.float0)

    def without_others(path: Path, update: Array) -> Array:
        return jnp.zeros_like(update) if path in others and not is_float0(update) else update

    def close(state: Tree) -> tuple[Tree, Tree]:
        nothing = jax.tree.map(zero, params_of(params))
        updates, flushed = update(nothing, state, params, **ours, **extra_args)
        return jax.tree.map_with_path(without_others, updates), _with_windows(state, flushed)

    updates, flushed = run_step(is_open, close, arrays)
    return updates, with_structure_of(state, flushed)


def _with_windows(old: Tree, new: Tree) -> Tree:
    """Return the old state with the new states of accumulations and of what is around them."""

    def select(old: Tree, new: Tree) -> Tree:
        name = kind_of(old).inner
        if isinstance(old, AccumulationState) or not name:
            return new if name else old
        return new._replace(**{name: _with_windows(getattr(old, name), getattr(new, name))})

    return jax.tree.map(select, old, new, is_leaf=lambda node: bool(kind_of(node).inner))


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
    return with_structure_of(state, discard_windows(arrays, True))


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
    micro_batches, updates, steps = (x if is_traced(x) else int(x) for x in counts)
    sizes = [x.size for x in jax.tree.leaves(window.acc_grads)]
    return AccumulationStats(micro_batches, updates, steps, len(sizes), sum(sizes), steps)


def _accumulations(state: Tree, *, only: bool = False) -> list[AccumulationState]:
    """Return all accumulations in a state; raise if there are none, or several with `only`."""
    windows = [window for _, window in find_states(state, AccumulationState)]
    if not windows or (only and len(windows) > 1):
        rule = f"a state with {'exactly one' if only else 'an'} accumulation"
        hint = "Pass the state of `accumulate_gradients`, or a state that contains it."
        raise type_error("state", rule, f"{type(state).__name__} with {len(windows)}", hint)
    return windows
