"""Private training: noise for a sum of clipped gradients, its sensitivity; the noise scale."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from .._checks import (
    check_axis_name,
    check_choice,
    check_number,
    check_state,
    describe,
)
from .._errors import public, value_error
from .._leaves import is_measured
from .._mesh import shard_axes, varying_axes
from .._states import increment_where
from .._tree_checks import check_inexact
from .._types import Array, AxisName, Number, Scalar, Tree
from ..accumulation._noise_scale import empty_noise
from ..clipping._formula import wide_dtype
from ..clipping._norm import global_norm


class NoisyMeanState(NamedTuple):
    """What the noise of the next step is drawn from.

    Attributes:
        key: the random key it began with.
        step: updates so far, int32[].
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
    | which of the two, types do not say, nor does `axis_name` | an error |
    | bfloat16 leaves | noise is added in float32, the result rounded once |
    | a NaN in the sum | stays; use `value_and_grad(..., nonfinite="zero")` |

    The guarantee follows from `noise_multiplier`, the sampling of batches and the number of steps;
    compute it with `dp_accounting`. Divide by the *expected* size of a batch: the true size is not
    public under Poisson sampling. Random numbers are those of JAX, which are not cryptographic, and
    floating-point noise has known attacks.

    Args:
        noise_multiplier: standard deviation of the noise over the sensitivity, >= 0; may be traced.
        sensitivity: from `per_example.sensitivity`, finite, in the unit of the gradient.
        expected_batch_size: what the sum is divided by, > 0.
        key: a random key, kept in the state, or a seed for one; fresh for each run.
        axis_name: mapped axes over which leaves are shards, where types do not say so: `pmap`,
            `shard_map(check_vma=False)`; `()` if each device holds all. An older JAX cannot refuse
            a `pmap` without it.

    Returns:
        A transformation whose state is `NoisyMeanState`.

    Raises:
        ValueError: a number is out of range, or devices may hold shards and `axis_name` is None.
        TypeError: a leaf is an integer or a boolean; the message names its path.

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
    hint = "Pass 0 to draw no noise."
    check_number("noise_multiplier", noise_multiplier, hint, closed=True)
    finite = "Pass a finite `sensitivity(max_norm)`."
    check_number("sensitivity", sensitivity, finite, high=math.inf, below_high=True)
    check_number("expected_batch_size", expected_batch_size, "Pass the public batch size.")
    axes = check_axis_name(axis_name)

    def init(params: Tree) -> NoisyMeanState:
        is_seed = isinstance(key, (int, np.integer))
        first = jax.random.PRNGKey(int(key)) if is_seed else jnp.array(key)
        return NoisyMeanState(first, jnp.zeros((), jnp.int32))

    def update(
        updates: Tree, state: Any, params: Tree | None = None
    ) -> tuple[Tree, NoisyMeanState]:
        check_inexact("updates", updates)
        check_state(state, NoisyMeanState)
        _check_known_shards(axes)
        leaves, structure = jax.tree.flatten(updates)
        step_key = jax.random.fold_in(state.key, state.step)
        deviation = jnp.float32(noise_multiplier) * jnp.float32(sensitivity)
        keys = [jax.random.fold_in(step_key, i) for i in range(len(leaves))]
        noisy = [
            _noisy(x, k, deviation, expected_batch_size, axes) if is_measured(x) else x
            for x, k in zip(leaves, keys, strict=True)
        ]
        new = NoisyMeanState(state.key, increment_where(state.step))
        return jax.tree.unflatten(structure, noisy), new

    return optax.GradientTransformation(init, update)


def _check_known_shards(axis_name: AxisName) -> None:
    """Refuses devices of which it is not known whether they hold the same."""
    manual = jax.sharding.get_abstract_mesh().manual_axes if axis_name is None else ()
    silent = [name for name in manual if name not in varying_axes(lax.axis_index(name))]
    if silent:
        rule = "given where types do not say which leaves are shards"
        got = f"None inside the mapped axis {silent[0]!r}"
        hint = "Name the axes over which leaves are shards; `()` if each device holds all."
        raise value_error("axis_name", rule, got, hint)


def _noisy(x: Array, key: Array, deviation: Scalar, divisor: Number, axes: AxisName) -> Array:
    x = jnp.asarray(x)
    for axis in sorted(shard_axes(x, axes)):  # each shard of a leaf draws its own
        key = jax.random.fold_in(key, lax.axis_index(axis))
    dtype = wide_dtype(x.dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        deviation = deviation * math.sqrt(2)  # both parts are parameters; JAX halves their variance
    noise = jax.random.normal(key, x.shape, dtype) * deviation.astype(jnp.finfo(dtype).dtype)
    return ((x.astype(dtype) + noise) / jnp.asarray(divisor).astype(dtype)).astype(x.dtype)


@public
def noise_scale(norms: Array, grads: Tree) -> Scalar:
    """Estimates the gradient noise scale from one batch, instead of over windows.

    With B examples, S the mean of their squared norms and M the squared norm of their mean,

        tr(Sigma) ~ (S - M) B / (B - 1),    |G|^2 ~ M - tr(Sigma) / B,    scale = tr(Sigma) / |G|^2

    The same estimators as `accumulate_gradients(..., noise_scale_decay=)` uses for micro-batches,
    at the finest grain: average over steps with less noise, or use both and compare.

    | case | scale |
    | --- | --- |
    | all examples alike | 0 |
    | no signal stands out of the noise | inf |
    | one example | NaN: it shows no noise |

    Args:
        norms: of each example's gradient, unclipped, [B], B >= 2.
        grads: the mean of the same gradients, unclipped.

    Returns:
        The batch size at which noise and signal are equal, in examples, float32[].

    Raises:
        ValueError: `norms` is no vector.

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
        rule, hint = "a vector with one norm per example", "Pass those of `per_example.norms`."
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
def sensitivity(max_norm: Any, adjacency: str = "add_or_remove_one") -> float:
    """How far one example can move the sum of clipped gradients, in 2-norm.

    | adjacency | two data sets differ in | sensitivity |
    | --- | --- | --- |
    | "add_or_remove_one" | one example more or less | `max_norm` |
    | "replace_one" | one example exchanged for another | `2 max_norm` |

    Groups clipped to thresholds of their own count as `sqrt(sum of max_norm^2)`: infinite, if one
    is not clipped. Weights, if any, must be 0 or 1; a `reaction` of your own must not let a norm
    exceed the threshold.

    Args:
        max_norm: the threshold, or a mapping from label to threshold.
        adjacency: "add_or_remove_one" or "replace_one".

    Returns:
        The sensitivity, in the unit of the gradient of one example; inf if a threshold is.

    Raises:
        ValueError: a threshold is not > 0, or the adjacency is unknown.

    Examples:
        >>> import gradclip_jax as gcx
        >>> gcx.per_example.sensitivity({"head": 3.0, "body": 4.0}, "replace_one")
        10.0
    """
    check_choice("adjacency", adjacency, ("add_or_remove_one", "replace_one"))
    thresholds = list(max_norm.values()) if isinstance(max_norm, Mapping) else [max_norm]
    hint = "Pass the threshold that examples are clipped to."
    for threshold in thresholds:
        check_number("max_norm", threshold, hint)
    alone = math.hypot(*map(float, thresholds))
    return alone if adjacency == "add_or_remove_one" else 2 * alone
