"""Gaussian noise for a sum of clipped gradients, as an Optax transformation."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from .._checks import check_number, check_state
from .._mesh import varying_axes
from .._states import increment_where
from .._tree_checks import check_inexact
from .._types import Array, Number, Scalar, Tree
from ..clipping._norm import is_measured
from ..clipping._scale import wide_dtype


class NoisyMeanState(NamedTuple):
    """What the noise of the next step is drawn from.

    Attributes:
        key: the random key it began with.
        step: updates so far, int32[].
    """

    key: Array
    step: Scalar


def noisy_mean(
    noise_multiplier: Number,
    sensitivity: Number,
    expected_batch_size: Number,
    key: Array | int,
) -> optax.GradientTransformation:
    """Turns a sum of clipped gradients into a private mean: adds noise, divides by a public number.

    `(sum + sensitivity * noise_multiplier * N(0, I)) / expected_batch_size`, drawn in float32.
    Place it before the optimizer and inside `accumulate_gradients(..., reduction="sum")`, so that
    noise is drawn once for all micro-batches and devices:

        accumulate_gradients(optax.chain(noisy_mean(...), optimizer), every, reduction="sum")

    | case | what happens |
    | --- | --- |
    | `noise_multiplier=0` | the sum is divided, no noise |
    | two steps, two leaves, two shards of a leaf | noise of their own |
    | the same leaf on several devices (replicated) | the same noise |
    | bfloat16 leaves | noise is added in float32, the result rounded once |
    | a NaN in the sum | stays; use `clipped_value_and_grad(..., nonfinite="zero")` |

    The guarantee follows from `noise_multiplier`, the sampling of batches and the number of steps;
    compute it with `dp_accounting`. Divide by the *expected* size of a batch: the true size is not
    public under Poisson sampling. Random numbers are those of JAX, which are not cryptographic, and
    floating-point noise has known attacks.

    Args:
        noise_multiplier: standard deviation of the noise over the sensitivity, >= 0; may be traced.
        sensitivity: from `clipped_sum_sensitivity`, in the unit of the gradient of one example.
        expected_batch_size: what the sum is divided by, > 0.
        key: a random key, kept in the state, or a seed for one; fresh for each run.

    Returns:
        A transformation whose state is `NoisyMeanState`.

    Raises:
        ValueError: a number is out of range.
        TypeError: a leaf is an integer or a boolean; the message names its path.

    Examples:
        >>> import jax, jax.numpy as jnp, gradclip_jax as gcx
        >>> tx = gcx.noisy_mean(0.0, 1.0, expected_batch_size=4, key=jax.random.key(0))
        >>> params = {"w": jnp.zeros(2)}
        >>> updates, state = tx.update({"w": jnp.array([2.0, 4.0])}, tx.init(params))
        >>> updates["w"].tolist()
        [0.5, 1.0]

    References:
        Abadi et al. 2016, arXiv 1607.00133.
    """
    name = "noisy_mean"
    hint = "Pass 0 to draw no noise."
    check_number(name, "noise_multiplier", noise_multiplier, hint, closed=True)
    check_number(name, "sensitivity", sensitivity, "Pass `clipped_sum_sensitivity(max_norm)`.")
    check_number(name, "expected_batch_size", expected_batch_size, "Pass the public batch size.")

    def init(params: Tree) -> NoisyMeanState:
        first = jax.random.PRNGKey(key) if isinstance(key, int) else jnp.array(key)
        return NoisyMeanState(first, jnp.zeros((), jnp.int32))

    def update(
        updates: Tree, state: Any, params: Tree | None = None
    ) -> tuple[Tree, NoisyMeanState]:
        check_inexact(name, "updates", updates)
        check_state(name, state, NoisyMeanState)
        leaves, structure = jax.tree.flatten(updates)
        step_key = jax.random.fold_in(state.key, state.step)
        deviation = jnp.float32(noise_multiplier) * jnp.float32(sensitivity)
        noisy = [
            _noisy(x, jax.random.fold_in(step_key, i), deviation, expected_batch_size)
            if is_measured(x)
            else x
            for i, x in enumerate(leaves)
        ]
        return jax.tree.unflatten(structure, noisy), NoisyMeanState(
            state.key, increment_where(state.step)
        )

    return optax.GradientTransformation(init, update)


def _noisy(x: Array, key: Array, deviation: Scalar, divisor: Number) -> Array:
    x = jnp.asarray(x)
    for axis in sorted(varying_axes(x)):  # each shard of a leaf draws its own
        key = jax.random.fold_in(key, lax.axis_index(axis))
    dtype = wide_dtype(x.dtype)
    noise = _normal(key, x.shape, dtype) * deviation.astype(jnp.finfo(dtype).dtype)
    return ((x.astype(dtype) + noise) / jnp.asarray(divisor).astype(dtype)).astype(x.dtype)


def _normal(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Standard normal numbers; of a complex dtype both parts are, as each is a parameter."""
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        return jax.random.normal(key, shape, dtype)
    real, imag = jax.random.normal(key, (2, *shape), jnp.finfo(dtype).dtype)
    return lax.complex(real, imag)
