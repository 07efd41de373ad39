"""ACClip, SPAM and StableAdamW, which use elementwise moments of the gradient."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from .._checks import (
    check_axis_name,
    check_count,
    check_decays,
    check_number,
    check_params,
    check_same_structure,
    check_state,
    is_float0,
    is_traced,
)
from .._errors import public, value_error
from .._leaves import flatten, wide_dtype
from .._mesh import in_memory_of, on_device, replica_count, shard_axes
from .._states import increment_where
from .._types import Array, AxisName, Number, Scalar, Tree
from ..adaptive._averages import bias_correction, power_of, where_finite
from ..clipping._formula import scale_factor, scale_leaf
from ..clipping._norm import norm_of_leaves

LeafStep: TypeAlias = Callable[[Array, Any, Array, Any], tuple[Array, Any, Array]]
"""The update of one leaf, `(grad, first, second, param) -> (update, first, second)`, in the dtype
of its moments. `first` and `param` are None if the method does not use them."""


class MomentState(NamedTuple):
    """Elementwise moments of the gradient in float32 or a wider dtype.

    Attributes:
        step_count: Number of steps so far, saturating, int32[].
        first: Exponential moving average of the gradient, or () if the method does not use it.
        second: Exponential moving average of a power of the gradient magnitude.
    """

    step_count: Scalar
    first: Tree
    second: Tree


class ACClipState(MomentState):
    """The state of `acclip`."""


class SPAMState(MomentState):
    """The state of `spam_clip`."""


class StableAdamWState(MomentState):
    """The state of `stable_adamw`."""


def moment_transformation(
    kind: type[MomentState],
    step_of: Callable[[Scalar], LeafStep],
    *,
    keeps_first: bool = True,
    needs_params: bool = False,
) -> optax.GradientTransformation:
    """Create a transformation that applies the function `step_of(step_count)` to each leaf."""

    def init(params: Tree) -> MomentState:
        zeros = wide_zeros(params)
        second = jax.tree.map(jnp.abs, zeros)  # real even if the leaf is complex
        return kind(jnp.zeros((), jnp.int32), zeros if keeps_first else (), second)

    def update(updates: Tree, state: Tree, params: Tree | None = None) -> tuple[Tree, MomentState]:
        check_update(updates, state, kind, "second")
        if needs_params:
            check_params(updates, params)
        step = step_of(state.step_count)

        def step_leaf(grad: Any, first: Any, second: Array, param: Any) -> tuple[Any, Any, Array]:
            if is_float0(grad):
                return grad, first, second
            wide = on_device(grad).astype(wide_dtype(grad.dtype, second.dtype))
            out, first, second = step(wide, first, second, param)
            return in_memory_of(out.astype(grad.dtype), grad), first, second

        grads, structure = jax.tree.flatten(updates)
        nothing = [None] * len(grads)
        firsts = jax.tree.leaves(state.first) if keeps_first else nothing
        leaves = jax.tree.leaves(params) if needs_params else nothing
        columns = (grads, firsts, jax.tree.leaves(state.second), leaves)
        rows = [step_leaf(*row) for row in zip(*columns, strict=True)]
        out, first, second = (jax.tree.unflatten(structure, [x[i] for x in rows]) for i in range(3))
        count = increment_where(state.step_count)
        return out, kind(count, first if keeps_first else (), second)

    return optax.GradientTransformation(init, update)


def where_finite_grad(step: LeafStep) -> LeafStep:
    """Wrap `step` so that non-finite elements have NaN updates and unchanged moments."""

    def step_finite(grad: Array, first: Any, second: Array, param: Any) -> tuple[Array, Any, Array]:
        # Replace NaN before `step`, because 0 * nan in the unused branch gives NaN derivatives.
        finite = jnp.isfinite(jnp.abs(grad))
        out, *moments = step(jnp.where(finite, grad, 0), first, second, param)
        first, second = where_finite(finite, moments, [first, second])
        return jnp.where(finite, out, jnp.nan), first, second

    return step_finite


def wide_zeros(params: Tree) -> Tree:
    """Create zeros like the parameters in float32 or wider; a scalar zero for an integer leaf."""

    def zeros(param: Array) -> Array:
        dtype = jnp.result_type(param)
        if not jnp.issubdtype(dtype, jnp.inexact):
            return jnp.zeros((), jnp.float32)
        return jnp.zeros_like(param, wide_dtype(dtype))

    return jax.tree.map(zeros, params)


def check_update(updates: Tree, state: Tree, kind: type, field: str) -> None:
    """Raise if `state` has the wrong type or if its field does not match the updates."""
    flatten("updates", updates)  # raises for integer leaves
    check_state(state, kind)
    check_same_structure(updates, getattr(state, field))


@public
def acclip(
    b1: Number = 0.9, b2: Number = 0.99, alpha: Number = 1.0, eps: Number = 1e-5
) -> optax.GradientTransformation:
    """Clip each element of the momentum to a moving average of gradient magnitudes (ACClip).

    `m = b1 m + (1 - b1) g`, `tau^alpha = b2 tau^alpha + (1 - b2) |g|^alpha`,
    `update = min(tau / (|m| + eps), 1) m`. ACClip is designed for heavy-tailed gradient noise. Use
    `optax.scale_by_learning_rate`, or SGD without momentum, after it.

    | gradient | effect |
    | --- | --- |
    | the first steps | updates are up to 100 times smaller, because there is no bias correction |
    | a NaN or infinite element | its update is NaN; its moving averages do not change |

    Args:
        b1: Decay rate of the momentum, at least 0 and below 1.
        b2: Decay rate of the threshold, at least 0 and below 1.
        alpha: Exponent of the averaged magnitude, > 0; the paper uses 1.
        eps: Constant added to the magnitude of the momentum, in the unit of the gradients, > 0.

    Returns:
        A gradient transformation with a `MomentState`, which has twice the size of the parameters.

    Raises:
        ValueError: If a number is out of range.
        TypeError: If an argument is not a number, or a leaf is not floating-point or complex.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> clip = gcx.contrib.acclip(b1=0.0, b2=0.5)
        >>> _, state = clip.update(jnp.array([4.0, 4.0]), clip.init(jnp.zeros(2)))
        >>> [round(x, 3) for x in clip.update(jnp.array([2.0, 100.0]), state)[0].tolist()]
        [2.0, 51.0]

    References:
        Zhang et al., 2020, arXiv 1912.03194, algorithm 2.
    """
    check_decays(b1=b1, b2=b2)
    check_number("alpha", alpha, "The paper uses 1.")
    check_number("eps", eps, "The paper uses 1e-5.")

    @where_finite_grad
    def step(grad: Array, first: Any, second: Any, param: None) -> tuple[Array, Array, Array]:
        first = b1 * first + (1 - b1) * grad
        second = b2 * second + (1 - b2) * power_of(jnp.abs(grad), alpha)
        # A lower bound is needed because the derivative of the root at zero is infinite.
        tau = jnp.maximum(second, jnp.finfo(second.dtype).tiny) ** (1 / alpha)
        return scale_leaf(first, scale_factor(jnp.abs(first) + eps, tau)), first, second

    return moment_transformation(ACClipState, lambda step_count: step)


@public
def spam_clip(
    spike_threshold: Number = 5000.0,
    decay: Number = 0.999,
    warmup_steps: int = 20,
    reset_every: int | None = 500,
) -> optax.GradientTransformation:
    """Clip gradient elements whose square is far above their second moment (SPAM).

    If `g^2 > spike_threshold * v`, the element g becomes `sign(g) sqrt(spike_threshold * v)`. The
    second moment v has no bias correction, and is updated with the clipped element after the
    comparison. Place this transformation before Adam, and pass Adam's `b2` as `decay`. The momentum
    reset of SPAM is not included.

    | element | effect |
    | --- | --- |
    | in the first `warmup_steps - 1` steps, and in the | not clipped, as in the authors' code |
    | `warmup_steps` steps from each reset | |
    | v is 0 | not clipped; in the paper, the element would remain 0 |
    | NaN or infinite | its update is NaN; its second moment does not change |

    Args:
        spike_threshold: Maximum ratio of g^2 to v; a positive number.
        decay: Decay rate of the second moment, at least 0 and below 1.
        warmup_steps: Number of steps without clipping from each reset, >= 1. The start counts as
            the step after a reset, as in the authors' code.
        reset_every: Number of steps after which v is reset to 0, >= 1; None for no reset.

    Returns:
        A gradient transformation with a `MomentState`, which has the size of the parameters.

    Raises:
        ValueError: If a number is out of range.
        TypeError: If an argument is not a number, or a leaf is not floating-point or complex.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> clip = gcx.contrib.spam_clip(4.0, decay=0.75, warmup_steps=1)
        >>> _, state = clip.update(jnp.array([4.0, 4.0]), clip.init(jnp.zeros(2)))
        >>> [round(x, 3) for x in clip.update(jnp.array([1.0, 100.0]), state)[0].tolist()]
        [1.0, 4.0]

    References:
        Huang et al., 2025, arXiv 2501.06842, algorithm 1.
    """
    check_number("spike_threshold", spike_threshold, "The paper uses 5000.")
    check_decays(decay=decay)
    check_count("warmup_steps", warmup_steps, "The authors' code uses 20.")
    if reset_every is not None:
        check_count("reset_every", reset_every, "Pass None for no reset.")
        if not (is_traced(reset_every) or is_traced(warmup_steps) or reset_every > warmup_steps):
            hint = "Otherwise no step is clipped."
            rule = f"greater than warmup_steps={warmup_steps}"
            raise value_error("reset_every", rule, reset_every, hint)

    def step_of(step_count: Scalar) -> LeafStep:
        count = increment_where(step_count)
        since_reset = count if reset_every is None else count % reset_every
        resets = False if reset_every is None else since_reset == 0
        is_warm = since_reset >= warmup_steps

        @where_finite_grad
        def clip(grad: Array, first: None, second: Any, param: None) -> tuple[Array, None, Array]:
            is_clamped = is_warm & (second > 0)
            bound = jnp.sqrt(spike_threshold * jnp.where(is_clamped, second, 1))
            threshold = jnp.where(is_clamped, bound, jnp.finfo(second.dtype).max)
            magnitude = jnp.abs(grad)
            second = decay * second + (1 - decay) * jnp.minimum(magnitude, threshold) ** 2
            return scale_leaf(grad, scale_factor(magnitude, threshold)), first, second

        def step(grad: Array, first: None, second: Array, param: None) -> tuple[Array, None, Array]:
            return clip(grad, first, jnp.where(resets, 0, second), param)

        return step

    return moment_transformation(SPAMState, step_of, keeps_first=False)


@public
def stable_adamw(
    learning_rate: Number | optax.Schedule,
    b1: Number = 0.9,
    b2: Number = 0.99,
    eps: Number = 1e-6,
    weight_decay: Number = 0.0,
    clipping: Number = 1.0,
    *,
    axis_name: AxisName = None,
) -> optax.GradientTransformation:
    """AdamW with a smaller learning rate for leaves whose second moment lags behind the gradient.

    The learning rate of a leaf is divided by `max(1, RMS / clipping)`, where RMS is the root mean
    square of `g / sqrt(max(u, eps^2))` and the second moment u includes g. As in version 2 of the
    authors' code, the weight decay is scaled by the same factor. The decay rates of the moments
    include the bias correction.

    Args:
        learning_rate: Learning rate; a positive number or a schedule.
        b1: Decay rate of the first moment, at least 0 and below 1.
        b2: Decay rate of the second moment, at least 0 and below 1.
        eps: Constant added to the root of the second moment, in the unit of the gradients, > 0.
        weight_decay: Decoupled weight decay, multiplied by the learning rate, >= 0.
        clipping: Threshold of the RMS above which the learning rate is reduced; a positive number.
        axis_name: Mapped axes over which leaves are sharded, required where the array's type does
            not carry the sharding.

    Returns:
        An optimizer; `update` requires `params`. As with Adam, a NaN remains in the moments, so
        wrap it in `skip_nonfinite`.

    Raises:
        ValueError: If a number is out of range, or if `params` is missing.
        TypeError: If an argument is not a number, or a leaf is not floating-point or complex.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> tx, params = gcx.contrib.stable_adamw(0.1, b1=0.0), jnp.zeros(1)
        >>> _, state = tx.update(jnp.array([1.0]), tx.init(params), params)
        >>> round(tx.update(jnp.array([1000.0]), state, params)[0].item(), 3)  # AdamW: -0.141
        -0.1

    References:
        Wortsman et al., 2023, arXiv 2304.13013, algorithm 2.
    """
    check_decays(b1=b1, b2=b2)
    check_number("eps", eps, "The paper uses 1e-6.")
    check_number("weight_decay", weight_decay, "Pass 0 for no weight decay.", closed=True)
    check_number("clipping", clipping, "The paper uses 1.")
    axes = check_axis_name(axis_name)
    if not callable(learning_rate):
        check_number("learning_rate", learning_rate, "The paper uses 0.002.")

    def step_of(step_count: Scalar) -> LeafStep:
        rate = learning_rate(step_count) if callable(learning_rate) else learning_rate
        steps = increment_where(step_count).astype(jnp.float32)
        decays = [b * bias_correction(b, steps - 1) / bias_correction(b, steps) for b in (b1, b2)]

        def step(
            grad: Array, first: Array, second: Array, param: Any
        ) -> tuple[Array, Array, Array]:
            d1, d2 = (decay.astype(second.dtype) for decay in decays)
            first = first * d1 + grad * (1 - d1)
            second = second * d2 + jnp.abs(grad) ** 2 * (1 - d2)
            floor = jnp.maximum(eps**2, jnp.finfo(second.dtype).tiny)  # eps^2 may underflow
            ratio = grad / jnp.sqrt(jnp.maximum(second, floor))
            norm = norm_of_leaves([ratio], 2.0, axes)
            size = ratio.size * replica_count(frozenset(), shard_axes(ratio, axes))
            shortened = rate / jnp.maximum(1, norm / math.sqrt(max(size, 1)) / clipping)
            decayed = weight_decay * param.astype(first.dtype)
            direction = first / (power_of(second, 0.5) + eps) + decayed
            return -shortened * direction, first, second

        return step

    return moment_transformation(StableAdamWState, step_of, needs_params=True)
