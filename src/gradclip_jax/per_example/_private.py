"""Noise and sensitivity for differentially private training, and the gradient noise scale."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from .._checks import check_axis_name, check_choice, check_number, check_state, describe
from .._errors import public, value_error
from .._leaves import flatten, wide_dtype
from .._mesh import shard_axes, varying_axes
from .._states import increment_where
from .._types import Array, AxisName, Number, Scalar, Tree
from ..accumulation._noise_scale import empty_noise
from ..clipping._norm import global_norm


class NoisyMeanState(NamedTuple):
    """State of `noisy_mean`.

    Attributes:
        key: Initial random key; the key of a step is `jax.random.fold_in(key, step)`.
        step: Number of updates so far, int32[].
    """

    key: Array
    step: Scalar


@public
def noisy_mean(
    noise_multiplier: Number,
    sensitivity: Number,
    expected_batch_size: Number,
    key: Array | int,
    *,
    axis_name: AxisName = None,
) -> optax.GradientTransformation:
    """Add Gaussian noise to a sum of clipped gradients and divide by the expected batch size.

    The update is `(sum + sensitivity * noise_multiplier * N(0, I)) / expected_batch_size`, and
    noise is sampled in float32 or wider. Place this transformation before the optimizer and inside
    `accumulate_gradients(..., reduction="sum")`, so that noise is added once per accumulation
    window:

        accumulate_gradients(optax.chain(noisy_mean(...), optimizer), every, reduction="sum")

    | case | result |
    | --- | --- |
    | `noise_multiplier=0` | the sum divided by `expected_batch_size`, without noise |
    | two steps, two leaves, two shards of a leaf | independent noise |
    | the same leaf on several devices (replicated) | identical noise |
    | neither types nor `axis_name` show whether a leaf is sharded | an error |
    | bfloat16 leaves | noise is added in float32, and the result is rounded once |
    | a NaN in the sum | NaN in the update; use `value_and_grad(..., nonfinite="zero")` |

    The privacy guarantee depends on `noise_multiplier`, the batch sampling and the number of steps,
    and can be computed with `dp_accounting`. Pass the *expected* batch size, because the actual
    batch size is not public under Poisson sampling. The random numbers of `jax.random` are not
    cryptographically secure, and there are known attacks on floating-point noise.

    Args:
        noise_multiplier: Ratio of the noise standard deviation to the sensitivity. A number >= 0,
            which may be traced.
        sensitivity: Result of `per_example.sensitivity`; finite, in the unit of the gradient.
        expected_batch_size: Divisor of the sum; a positive number.
        key: Random key or integer seed. The key is stored in the state. Use a new one for each run.
        axis_name: Mapped axes over which leaves are sharded. Required under `pmap` and
            `shard_map(check_vma=False)`, where array types do not carry the sharding. Pass `()` if
            leaves are replicated. Under `pmap`, older versions of JAX do not detect a missing
            `axis_name`.

    Returns:
        A gradient transformation with a `NoisyMeanState`.

    Raises:
        ValueError: If a number is out of range, or if `axis_name` is None although leaves may be
            sharded.
        TypeError: If a leaf has an integer or boolean dtype.

    Examples:
        >>> import jax, jax.numpy as jnp, gradclip_jax as gcx
        >>> tx = gcx.per_example.noisy_mean(0.0, 1.0, expected_batch_size=4, key=jax.random.key(0))
        >>> params = {"w": jnp.zeros(2)}
        >>> updates, state = tx.update({"w": jnp.array([2.0, 4.0])}, tx.init(params))
        >>> updates["w"].tolist()
        [0.5, 1.0]

    References:
        Abadi et al. 2016, arXiv 1607.00133.
    """
    hint = "Pass 0 for no noise."
    check_number("noise_multiplier", noise_multiplier, hint, closed=True)
    finite = "Pass `sensitivity(max_norm)` with a finite threshold."
    check_number("sensitivity", sensitivity, finite, high=math.inf, below_high=True)
    check_number("expected_batch_size", expected_batch_size, "Pass the mean batch size.")
    axes = check_axis_name(axis_name)

    def init(params: Tree) -> NoisyMeanState:
        is_seed = isinstance(key, (int, np.integer))
        first = jax.random.PRNGKey(int(key)) if is_seed else jnp.array(key)
        return NoisyMeanState(first, jnp.zeros((), jnp.int32))

    def update(
        updates: Tree, state: Tree, params: Tree | None = None
    ) -> tuple[Tree, NoisyMeanState]:
        leaves = flatten("updates", updates)
        check_state(state, NoisyMeanState)
        _check_known_shards(axes)
        step_key = jax.random.fold_in(state.key, state.step)
        deviation = jnp.float32(noise_multiplier) * jnp.float32(sensitivity)
        noisy: list[Array] = []
        for i, x in zip(leaves.places, leaves.arrays, strict=True):
            leaf_key = jax.random.fold_in(step_key, i)
            noisy.append(_noisy(x, leaf_key, deviation, expected_batch_size, axes))
        return leaves.replace(noisy), NoisyMeanState(state.key, increment_where(state.step))

    return optax.GradientTransformation(init, update)


def _check_known_shards(axis_name: AxisName) -> None:
    """Raise if array types do not show whether leaves are sharded or replicated."""
    manual = jax.sharding.get_abstract_mesh().manual_axes if axis_name is None else ()
    silent = [name for name in manual if name not in varying_axes(lax.axis_index(name))]
    if silent:
        rule = "specified inside `pmap` and `shard_map(check_vma=False)`"
        got = f"None inside the mapped axis {silent[0]!r}"
        hint = "Pass the axes over which leaves are sharded, or `()` if they are replicated."
        raise value_error("axis_name", rule, got, hint)


def _noisy(x: Array, key: Array, deviation: Scalar, divisor: Number, axes: AxisName) -> Array:
    for axis in sorted(shard_axes(x, axes)):  # independent noise for each shard
        key = jax.random.fold_in(key, lax.axis_index(axis))
    dtype = wide_dtype(x.dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        # `jax.random.normal` gives the real and imaginary parts a variance of 1/2 each.
        deviation = deviation * math.sqrt(2)
    noise = jax.random.normal(key, x.shape, dtype) * deviation.astype(jnp.finfo(dtype).dtype)
    return ((x.astype(dtype) + noise) / jnp.asarray(divisor).astype(dtype)).astype(x.dtype)


@public
def noise_scale(norms: Array, grads: Tree) -> Scalar:
    """Estimate the gradient noise scale from the per-example gradients of one batch.

    For B examples, let S be the mean of the squared gradient norms and M the squared norm of the
    mean gradient. Then

        tr(Sigma) ~ (S - M) B / (B - 1),    |G|^2 ~ M - tr(Sigma) / B,    scale = tr(Sigma) / |G|^2

    `accumulate_gradients(..., noise_scale_decay=)` uses the same estimators with micro-batches in
    place of examples. Average the noisy estimates of single batches over steps.

    | case | scale |
    | --- | --- |
    | all gradients are equal | 0 |
    | the estimated squared signal is not positive | 3.4e38, the largest float32 |
    | one example | NaN |

    Args:
        norms: Unclipped gradient norm of each example, shape [B] with B >= 2.
        grads: Mean of the unclipped gradients.

    Returns:
        The batch size at which noise and signal are equal, in examples, float32[].

    Raises:
        ValueError: If `norms` is not a vector.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> grads = jnp.array([[1.0, 1.0], [1.0, -1.0], [1.0, 1.0], [1.0, -1.0]])
        >>> norms = jnp.linalg.norm(grads, axis=1)
        >>> float(gcx.per_example.noise_scale(norms, grads.mean(0)))
        2.0

    References:
        McCandlish et al. 2018, arXiv 1812.06162, appendix A.
    """
    norms = jnp.asarray(norms)
    if norms.ndim != 1:
        rule, hint = "a vector with one norm per example", "Pass the result of `per_example.norms`."
        raise value_error("norms", rule, describe(norms), hint)
    size = norms.shape[0]
    if size < 2:
        return jnp.float32(jnp.nan)
    big = jnp.square(global_norm(grads).astype(jnp.float32))
    small = jnp.mean(jnp.square(norms.astype(jnp.float32)))
    trace = (small - big) * (size / (size - 1))
    state = empty_noise()._replace(squared_gradient=big - trace / size, covariance_trace=trace)
    return state.gradient_noise_scale


@public
def sensitivity(
    max_norm: Number | Mapping[Any, Number], adjacency: str = "add_or_remove_one"
) -> float:
    """Return the L2 sensitivity of a sum of clipped gradients to a change of one example.

    | adjacency | neighbouring data sets differ by | sensitivity |
    | --- | --- | --- |
    | "add_or_remove_one" | adding or removing one example | `max_norm` |
    | "replace_one" | replacing one example | `2 max_norm` |

    If each group has its own threshold, `max_norm` is replaced by `sqrt(sum of max_norm^2)`, which
    is infinite if one group is not clipped. Example weights must be 0 or 1, and a custom `reaction`
    must scale every gradient norm to at most the threshold.

    Args:
        max_norm: Clipping threshold, or a mapping from group label to threshold.
        adjacency: "add_or_remove_one" or "replace_one".

    Returns:
        The sensitivity, in the unit of the gradient of one example; inf if a threshold is inf.

    Raises:
        ValueError: If a threshold is not positive or `adjacency` is unknown.

    Examples:
        >>> import gradclip_jax as gcx
        >>> gcx.per_example.sensitivity({"head": 3.0, "body": 4.0}, "replace_one")
        10.0
    """
    check_choice("adjacency", adjacency, ("add_or_remove_one", "replace_one"))
    thresholds = list(max_norm.values()) if isinstance(max_norm, Mapping) else [max_norm]
    hint = "Pass the threshold that was used for clipping."
    for threshold in thresholds:
        check_number("max_norm", threshold, hint)
    alone = math.hypot(*map(float, thresholds))
    return alone if adjacency == "add_or_remove_one" else 2 * alone
