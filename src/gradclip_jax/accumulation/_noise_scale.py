"""The gradient noise scale, an estimate of the largest useful batch size.

Accumulation provides gradients for two batch sizes, a single micro-batch and the whole window. For
n micro-batches with weights w, let W be the sum of the weights, S the weighted mean of the squared
gradient norms and B the squared norm of the mean gradient. Then the estimators

    tr(Sigma) ~ (S - B) W / (n - 1),    |G|^2 ~ B - tr(Sigma) / W

are unbiased (appendix A of McCandlish et al. 2018, arXiv 1812.06162, generalized to weights).
Both estimates are averaged over windows before the ratio tr(Sigma) / |G|^2 is computed.
"""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._run_if import run_if
from .._states import register_metrics
from .._types import Scalar, Tree
from ..clipping._norm import global_norm
from ._reduction import SUMMED, MicroBatch, window_gradient
from ._state import AccumulationState, WindowStep


@register_metrics("gradient_noise_scale")
class NoiseState(NamedTuple):
    """Statistics of the current accumulation window, and moving averages over completed windows.

    Attributes:
        weighted_squares: Sum of weight times squared gradient norm over the current window,
            float32[].
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
        """The batch size at which noise and signal are equal, in the units of the weights.

        The value is 0 until the first window completes. If the estimate of |G|^2 is not positive,
        the value is 3.4e38, the largest float32, because `jax_debug_infs` would raise for an
        infinity.
        """
        signal = self.squared_gradient
        ratio = jnp.maximum(self.covariance_trace, 0) / jnp.where(signal > 0, signal, 1)
        measured = (signal != 0) | (self.covariance_trace != 0)
        return jnp.where(signal > 0, ratio, jnp.where(measured, jnp.finfo(signal.dtype).max, 0))


def empty_noise() -> NoiseState:
    """Return the initial state."""
    return NoiseState(*(jnp.zeros((), kind) for kind in ("f4", "i4", "f4", "f4")))


def observe_noise(
    state: AccumulationState, step: WindowStep, micro_batch: MicroBatch, acc: Tree, decay: float
) -> AccumulationState:
    """Add a micro-batch to the statistics; update the moving averages when a window completes.

    Leaves whose reduction is neither "sum" nor "mean" are ignored. `acc` and the total weight in
    the state already include the micro-batch.
    """
    noise, total_weight = state.noise, state.total_weight
    selectors = [x in SUMMED for x in jax.tree.leaves(micro_batch.reductions)]
    trees = (micro_batch.grads, acc)
    grads, sums = (list(itertools.compress(jax.tree.leaves(x), selectors)) for x in trees)
    weight = jnp.float32(1) if micro_batch.weight is None else micro_batch.weight
    square = global_norm(grads).astype(jnp.float32) ** 2
    counts = step.arrived & (weight > 0)
    noise = noise._replace(
        weighted_squares=jnp.where(step.starts, 0, noise.weighted_squares)
        + jnp.where(counts, weight * square, 0),
        micro_batches=jnp.where(step.starts, 0, noise.micro_batches) + counts.astype(jnp.int32),
    )

    def observe_window(noise: NoiseState) -> NoiseState:
        window = MicroBatch(sums, ["mean"] * len(sums))
        big = global_norm(window_gradient(sums, window, total_weight)).astype(jnp.float32) ** 2
        small = noise.weighted_squares / total_weight
        n = noise.micro_batches.astype(jnp.float32)
        trace = (small - big) * total_weight / (n - 1)
        square = big - trace / total_weight
        usable = (n > 1) & jnp.isfinite(trace) & jnp.isfinite(square)

        def averaged(average: Scalar, estimate: Scalar) -> Scalar:
            return jnp.where(usable, decay * average + (1 - decay) * estimate, average)

        return noise._replace(
            squared_gradient=averaged(noise.squared_gradient, square),
            covariance_trace=averaged(noise.covariance_trace, trace),
        )

    return state._replace(noise=run_if(step.emits, observe_window, noise))
