"""What a run gains by an adapter: the same numbers through their part, and through ours."""

import jax
import jax.numpy as jnp
import numpy as np

GRADS = jnp.bfloat16(np.random.default_rng(0).normal(1, 1, (64, 1_000)))


def error_of_mean(mean):
    """Compare the mean of 64 bfloat16 gradients with the exact mean, in float64."""
    exact = np.mean(np.float64(GRADS), axis=0)
    error = np.linalg.norm(np.float64(mean).ravel() - exact) / np.linalg.norm(exact)
    return f"error {error:.1%}"


def after_a_nan(tx, **extra_args):
    """Count the steps that are applied of the 100 after a step whose gradient is NaN."""
    update = jax.jit(tx.update)
    params = jnp.zeros(2)
    state, taken = tx.init(params), 0
    for step, size in enumerate(np.random.default_rng(0).uniform(0.9, 1.1, 301)):
        value = jnp.float32(np.nan if step == 200 else size)
        passed = {name: value for name in extra_args if extra_args[name]}
        updates, state = update(jnp.full(2, value), state, params, loss=value, **passed)
        params = params + updates
        taken += int(step > 200 and bool((updates != 0).any()))
    is_finite = bool(jnp.isfinite(params).all())
    return f"{taken} of 100 steps after a NaN" if is_finite else "parameters NaN after a NaN"
