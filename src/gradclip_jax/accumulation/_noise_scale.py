"""The gradient noise scale, an estimate of the largest useful batch size.

A window contains gradients for two batch sizes, a single micro-batch and the whole window. For n
micro-batches with weights w, let W be the sum of the weights, S the weighted mean of the squared
gradient norms and B the squared norm of the mean gradient. Then the estimators

    tr(Sigma) ~ (S - B) W / (n - 1),    |G|^2 ~ B - tr(Sigma) / W

are unbiased (appendix A of McCandlish et al. 2018, arXiv 1812.06162, generalized to weights).
Both are averaged over windows before the ratio tr(Sigma) / |G|^2 is computed.
"""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._run_if import run_if
from .._states import register_metrics
from .._types import Scalar, Tree
from ..clipping._norm import global_norm
from ._reduction import MicroBatch, is_summed, window_gradient
from ._state import AccumulationState, WindowStep


@register_metrics("gradient_noise_scale")
class NoiseState(NamedTuple):
    """Statistics of the current window, and moving averages over completed windows.

    Attributes:
        weighted_squares: Sum of weight times squared norm over the current window, float32[].
        micro_batches: Number of micro-batches with positive weight in the current window, int32[].
        squared_gradient: Moving average of the estimates of |G|^2, without bias correction,
            float32[].
        covariance_trace: Moving average of the estimates of tr(Sigma), without bias correction,
            float32[].
    """

    weighted_squares: Scalar
    micro_batches: Scalar
    squared_gradient: Scalar
    covariance_trace: Scalar

    @property
    def gradient_noise_scale(self) -> Scalar:
        """The batch size at which noise and signal are equal, in the unit of the weights.

        The value is 0 before the first window. If the estimate of the signal is not positive, it is
        3.4e38, the largest float32, because `jax_debug_infs` would raise for an infinity.
        """
        signal = self.squared_gradient
        ratio = jnp.maximum(self.covariance_trace, 0) / jnp.where(signal > 0, signal, 1)
        measured = (signal != 0) | (self.covariance_trace != 0)
        return jnp.where(signal > 0, ratio, jnp.where(measured, jnp.finfo(signal.dtype).max, 0))


def empty_noise() -> NoiseState:
    """Return the initial state."""
    return NoiseState(*(jnp.zeros((), kind) for kind in ("f4", "i4", "f4", "f4")))


def observe_noise(
    state: AccumulationState, micro_batch: MicroBatch, step: WindowStep, acc: Tree, decay: float
) -> NoiseState:
    """Update the statistics of the window, and the moving averages if the window is emitted.

    Leaves with other reductions than a sum or a mean are ignored. `state.total_weight` already
    includes the micro-batch, but `state.noise` does not.
    """
    selectors = list(map(is_summed, micro_batch.reductions))
    trees = (micro_batch.grads, acc)
    grads, sums = (list(itertools.compress(jax.tree.leaves(x), selectors)) for x in trees)
    weight = jnp.float32(1) if micro_batch.weight is None else micro_batch.weight
    observed = observe_micro_batch(state.noise, grads, weight, step.starts)
    # Select instead of using a loop, because on GPU the host waits for the predicate of a loop.
    noise = optax.tree.where(step.arrived, observed, state.noise)

    def observe(noise: NoiseState) -> NoiseState:
        window = MicroBatch(sums, ["mean"] * len(sums))
        mean = window_gradient(sums, window, state.total_weight)
        return observe_window(noise, mean, state.total_weight, decay)

    return run_if(step.emits, observe, noise)


def observe_micro_batch(
    state: NoiseState, grads: Tree, weight: Scalar, starts: Scalar | bool
) -> NoiseState:
    """Add the squared norm of one micro-batch."""
    square = global_norm(grads).astype(jnp.float32) ** 2
    counts = weight > 0
    return state._replace(
        weighted_squares=jnp.where(starts, 0, state.weighted_squares)
        + jnp.where(counts, weight * square, 0),
        micro_batches=jnp.where(starts, 0, state.micro_batches) + counts.astype(jnp.int32),
    )


def observe_window(state: NoiseState, mean: Tree, total_weight: Scalar, decay: float) -> NoiseState:
    """Add the estimates of a window of at least two micro-batches."""
    n = state.micro_batches.astype(jnp.float32)
    big = global_norm(mean).astype(jnp.float32) ** 2
    small = state.weighted_squares / total_weight
    trace = (small - big) * total_weight / (n - 1)
    square = big - trace / total_weight
    usable = (n > 1) & jnp.isfinite(trace) & jnp.isfinite(square)

    def averaged(average: Scalar, estimate: Scalar) -> Scalar:
        return jnp.where(usable, decay * average + (1 - decay) * estimate, average)

    return state._replace(
        squared_gradient=averaged(state.squared_gradient, square),
        covariance_trace=averaged(state.covariance_trace, trace),
    )
