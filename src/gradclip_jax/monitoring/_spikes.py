"""What norms, units and losses are compared with: their means so far, and deviations from them."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from .._types import UNBOUNDED, Array

MEMORY = 64
"""Values before the first threshold; then the newest weighs 1 / 64, as in a mean of 128."""


def compare(
    levels: Array, norms: Array, loss: Any, spike: Any
) -> tuple[dict[str, Array], Array, Array]:
    """The thresholds of a step, the rise of each unit, and the levels after it.

    A unit rises by its norm over its usual norm, in proportion to the others; 0 if it is no spike.

    Norms and losses have a long tail, and look normally distributed in logarithms; a loss may be
    negative. A spike enters its level as the threshold: so it hides no other, and a rise for good
    is learned. The threshold of units, which are many, is half as far again.
    """
    has_loss = jnp.array(False) if loss is None else jnp.isfinite(loss)
    loss = jnp.where(has_loss, 0 if loss is None else loss, 0).astype(jnp.float32)
    sizes = jnp.append(norms, loss)
    has_log = jnp.isfinite(sizes) & (sizes > 0)
    values = jnp.append(jnp.log(jnp.where(has_log, sizes, 1)), loss)
    is_known = jnp.append(has_log, has_loss)
    is_unit = np.repeat([False, True, False], [1, norms.size - 1, 2])

    count, mean, variance = levels
    changes = values - mean
    # A hard batch raises all units together: what one does beside the others says more.
    is_reference = is_unit & is_known & (count > 0)
    references = jnp.maximum(jnp.sum(is_reference, dtype=jnp.float32), 1)
    shared = jnp.where(is_unit, jnp.sum(jnp.where(is_reference, changes, 0)) / references, 0)
    floor = jnp.where(np.arange(mean.size) < sizes.size, 0.01, jnp.maximum(abs(mean) / 100, 1e-6))
    deviation = jnp.maximum(jnp.sqrt(variance), floor)
    is_warm = count >= MEMORY
    bounds = jnp.where(is_warm, jnp.where(is_unit, 1.5, 1) * spike * deviation, UNBOUNDED)
    excess = changes - shared
    steps, learned = jnp.minimum(count + 1, MEMORY), jnp.minimum(excess, bounds)
    means = mean + (learned + shared) / steps
    variances = (1 - 1 / steps) * (variance + learned**2 / steps)
    after = jnp.stack([steps, means, variances])

    thresholds = jnp.where(is_warm, mean + bounds, UNBOUNDED)
    of_logs = jnp.where(thresholds < 88, jnp.exp(jnp.minimum(thresholds, 88)), UNBOUNDED)
    of_loss = jnp.where(is_warm[-2], jnp.maximum(thresholds[-1], of_logs[-2]), thresholds[-1])
    is_rise = is_unit & is_known & (excess > bounds)
    rises = jnp.where(is_rise, jnp.exp(jnp.minimum(excess, 88)), 0)[1 : norms.size]
    bounds_by_name = {"norm_threshold": of_logs[0], "loss_threshold": of_loss}
    return bounds_by_name, rises, jnp.where(is_known, after, levels)
