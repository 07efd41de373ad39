"""The state of an accumulation, and what can be asked and done between micro-batches."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._checks import check_transformation, error_message, is_traced
from .._states import find_states, register_metrics, replace_states
from .._types import Scalar, Tree
from ._running import window_gradient


@register_metrics("mini_step", "gradient_step")
class AccumulationState(NamedTuple):
    """A window of micro-batches, and the optimizer that waits for it.

    Attributes:
        mini_step: int32[], micro-batches in the open window.
        gradient_step: int32[], windows that were emitted.
        inner_opt_state: the state of the inner optimizer.
        acc_grads: the weighted sum of the window, in the accumulator's dtype; what it holds
            while `mini_step` is 0 means nothing.
        total_weight: float32[], the weight in the window.
        accumulation_steps: int32[], the length of the window.
        micro_batch_count: int32[], all micro-batches so far.
        emitted: bool[], whether the last call ran the inner optimizer.
        noise: a `NoiseState`, or () if the noise scale is not measured.
    """

    mini_step: Scalar
    gradient_step: Scalar
    inner_opt_state: Any
    acc_grads: Tree
    total_weight: Scalar
    accumulation_steps: Scalar
    micro_batch_count: Scalar
    emitted: Scalar
    noise: Any


class AccumulationStats(NamedTuple):
    """Counts of an accumulation; integers, or traced scalars inside jit.

    Attributes:
        total_micro_batches: micro-batches so far, saturating.
        total_updates: windows that were emitted, saturating.
        accumulation_steps: micro-batches in a window now.
        registered_params: leaves that are accumulated.
        total_param_elements: their elements.
        effective_batch_multiplier: by how much the batch is larger than a micro-batch.
    """

    total_micro_batches: Any
    total_updates: Any
    accumulation_steps: Any
    registered_params: int
    total_param_elements: int
    effective_batch_multiplier: Any


def flush(
    tx: optax.GradientTransformation, state: Any, params: Tree, **extra_args: Any
) -> tuple[Tree, Any]:
    """Emits the open window now, divided by what was really accumulated.

    For the end of an epoch that is no multiple of the window. An empty window gives zero
    updates and leaves the state alone.

    Args:
        tx: `accumulate_gradients`, or what wraps it and passes extra arguments on.
        state: its state.
        params: the parameters.
        **extra_args: passed on to the inner optimizer.

    Returns:
        The updates and the new state.

    Raises:
        TypeError: the state holds no accumulation.

    Examples:
        >>> import jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = gcx.accumulate_gradients(optax.sgd(1.0), every=100)
        >>> params = jnp.array([0.0])
        >>> _, state = tx.update(jnp.array([3.0]), tx.init(params), params)
        >>> updates, state = gcx.flush(tx, state, params)
        >>> updates.tolist()
        [-3.0]
    """
    check_transformation("flush", "tx", tx)
    _accumulation("flush", state)
    nothing = jax.tree.map(_zero_grad, params)
    tx = optax.with_extra_args_support(tx)
    return tx.update(nothing, state, params, weight=jnp.float32(0), flush=True, **extra_args)


def _zero_grad(param: Any) -> Any:
    if jnp.issubdtype(jnp.result_type(param), jnp.inexact):
        return jnp.zeros_like(param)
    return np.zeros(np.shape(param), jax.dtypes.float0)


def accumulated_gradients(state: Any) -> Tree:
    """The weighted mean of the open window so far, in the accumulator's dtype.

    Args:
        state: the state of `accumulate_gradients`, or any state around it.

    Returns:
        The mean gradient; inside jit, zeros for an empty window.

    Raises:
        ValueError: nothing was accumulated (on the host).
        TypeError: the state holds no accumulation.

    Examples:
        >>> import jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = gcx.accumulate_gradients(optax.sgd(1.0), every=8)
        >>> params = jnp.array([0.0])
        >>> _, state = tx.update(jnp.array([3.0]), tx.init(params), params)
        >>> gcx.accumulated_gradients(state).tolist()
        [3.0]
    """
    found = _accumulation("accumulated_gradients", state)
    empty = (found.mini_step == 0) | ~(found.total_weight > 0)
    if not is_traced(empty) and bool(empty):
        hint = "Call `update` with a micro-batch first."
        rule = "a state with an open window"
        raise ValueError(
            error_message("accumulated_gradients", "state", rule, "an empty one", hint)
        )
    weight = jnp.where(empty, 1, found.total_weight)
    mean = window_gradient(found.acc_grads, found.acc_grads, weight, mean=True)
    return jax.tree.map(lambda x: jnp.where(empty, jnp.zeros_like(x), x), mean)


def reset_accumulation(state: Any) -> Any:
    """Discards the open window; the inner optimizer is not stepped.

    Args:
        state: the state of `accumulate_gradients`, or any state around it.

    Returns:
        The state with an empty window; counts of past micro-batches and updates stay.

    Raises:
        TypeError: the state holds no accumulation.

    Examples:
        >>> import jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = gcx.accumulate_gradients(optax.sgd(1.0), every=8)
        >>> params = jnp.array([0.0])
        >>> _, state = tx.update(jnp.array([3.0]), tx.init(params), params)
        >>> _, state = tx.update(jnp.array([5.0]), gcx.reset_accumulation(state), params)
        >>> gcx.accumulated_gradients(state).tolist()
        [5.0]
    """
    _accumulation("reset_accumulation", state)
    return discard_windows(state)


def discard_windows(state: Any, where: Any = True) -> Any:
    """The state with every open window emptied, also those inside another one.

    `where`, bool[], may be traced. Only states of this package are touched.
    """

    def discard(found: AccumulationState) -> AccumulationState:
        return clear_emitted(found, where)._replace(
            mini_step=jnp.where(where, 0, found.mini_step),
            total_weight=jnp.where(where, 0, found.total_weight),
            inner_opt_state=discard_windows(found.inner_opt_state, where),
        )

    return replace_states(state, AccumulationState, discard)


def clear_emitted(state: Any, where: Any = True) -> Any:
    """The state in which `has_updated` says no, also that of a window inside another one."""

    def clear(found: AccumulationState) -> AccumulationState:
        return found._replace(
            emitted=found.emitted & ~jnp.asarray(where),
            inner_opt_state=clear_emitted(found.inner_opt_state, where),
        )

    return replace_states(state, AccumulationState, clear)


def has_updated(state: Any) -> Scalar:
    """Whether the last call of `update` ran the inner optimizer.

    Args:
        state: the state of `accumulate_gradients`, or any state around it.

    Returns:
        bool[].

    Raises:
        TypeError: the state holds no accumulation.

    Examples:
        >>> import jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = gcx.accumulate_gradients(optax.sgd(1.0), every=2)
        >>> params = jnp.array([0.0])
        >>> _, held = tx.update(jnp.array([3.0]), tx.init(params), params)
        >>> _, emitted = tx.update(jnp.array([5.0]), held, params)
        >>> bool(gcx.has_updated(held)), bool(gcx.has_updated(emitted))
        (False, True)
    """
    return _accumulation("has_updated", state).emitted


def accumulation_stats(state: Any) -> AccumulationStats:
    """Counts micro-batches, updates and parameters.

    Args:
        state: the state of `accumulate_gradients`, or any state around it.

    Returns:
        Integers on the host; the counts are traced scalars inside jit.

    Raises:
        TypeError: the state holds no accumulation.

    Examples:
        >>> import jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = gcx.accumulate_gradients(optax.sgd(1.0), every=8)
        >>> params = jnp.zeros((2, 3))
        >>> _, state = tx.update(jnp.ones((2, 3)), tx.init(params), params)
        >>> stats = gcx.accumulation_stats(state)
        >>> stats.total_micro_batches, stats.total_updates, stats.total_param_elements
        (1, 0, 6)
    """
    found = _accumulation("accumulation_stats", state)
    counts = (found.micro_batch_count, found.gradient_step, found.accumulation_steps)
    micro, updates, steps = (x if is_traced(x) else int(x) for x in counts)
    leaves = jax.tree.leaves(found.acc_grads)
    return AccumulationStats(
        total_micro_batches=micro,
        total_updates=updates,
        accumulation_steps=steps,
        registered_params=len(leaves),
        total_param_elements=sum(x.size for x in leaves),
        effective_batch_multiplier=steps,
    )


def _accumulation(function: str, state: Any) -> AccumulationState:
    found = find_states(state, AccumulationState)
    if not found:
        hint = "Pass the state that `accumulate_gradients(...).init(params)` made."
        rule = "a state of `accumulate_gradients`, or one around it"
        raise TypeError(error_message(function, "state", rule, type(state).__name__, hint))
    return found[0][1]
