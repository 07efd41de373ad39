"""AdamW with update clipping."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ._checks import call_schedule, check_arrays, check_decay, check_number, check_params, is_float0
from ._errors import public
from ._states import check_state, increment_where
from ._types import Array, AxisName, Number, Scalar, Tree
from .norms._leaves import checked_leaves, is_inexact, wide_dtype
from .norms._mesh import check_axis_name, num_devices, shard_axes
from .norms._reduce import norm_of_leaves


class StableAdamWState(NamedTuple):
    """The state of `stable_adamw`.

    Attributes:
        step_count: Number of steps so far, saturating, int32[].
        mu: Moving averages of the gradient, in float32 or wider.
        nu: Moving averages of the squared gradient, in float32 or wider.
    """

    step_count: Scalar
    mu: Tree
    nu: Tree


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
    square of `g / sqrt(max(u, eps^2))` and the second moment u includes g. The weight decay is
    multiplied by the same learning rate. The bias correction adjusts `b1` and `b2` at each step
    instead of dividing the moments. Use `optax.chain` with `clip_by_block_rms` to clip the updates
    of another optimizer.

    Args:
        learning_rate: Learning rate; a positive number or a schedule.
        b1: Decay rate of the first moment, at least 0 and below 1.
        b2: Decay rate of the second moment, at least 0 and below 1.
        eps: Constant added to the root of the second moment, in the unit of the gradients, > 0.
        weight_decay: Decoupled weight decay, >= 0.
        clipping: RMS above which the learning rate is reduced; a positive number.
        axis_name: See `clip_by_global_norm`.

    Returns:
        An optimizer; `update` requires `params`. As with Adam, a NaN remains in the moments, so
        wrap it in `skip_nonfinite`.

    Raises:
        ValueError: If a number is out of range, or if `params` is missing.
        TypeError: If an argument is not a number, or if a leaf is not real floating-point.

    Examples:
        >>> import jax, jax.numpy as jnp, gradclip_jax as gcx
        >>> tx, params = gcx.stable_adamw(0.1, b1=0.0), jnp.zeros(1)
        >>> update = jax.jit(tx.update)
        >>> _, state = update(jnp.array([1.0]), tx.init(params), params)
        >>> round(update(jnp.array([1000.0]), state, params)[0].item(), 3)  # AdamW: -0.141
        -0.1

    References:
        Wortsman et al., 2023, arXiv 2304.13013, algorithm 2.
    """
    if not callable(learning_rate):
        learning_rate = check_number("learning_rate", learning_rate, "The paper uses 0.002.")
    b1, b2 = check_decay("b1", b1), check_decay("b2", b2)
    eps = check_number("eps", eps, "The paper uses 1e-6.")
    hint = "Pass 0 for no weight decay."
    weight_decay = check_number("weight_decay", weight_decay, hint, "[0, inf]")
    clipping = check_number("clipping", clipping, "The paper uses 1.")
    check_axis_name(axis_name)

    def init(params: Tree) -> StableAdamWState:
        check_arrays("params", params)
        mu, nu = (jax.tree.map(_zero_moment, params) for _ in range(2))
        return StableAdamWState(jnp.zeros((), jnp.int32), mu, nu)

    def update(
        updates: Tree, state: Tree, params: Tree | None = None
    ) -> tuple[Tree, StableAdamWState]:
        checked_leaves("updates", updates, real=True)
        check_state(state, StableAdamWState, "step_count")
        check_params(updates, params)
        count = increment_where(state.step_count)
        rate: Any = learning_rate
        if callable(rate):
            rate = call_schedule("learning_rate", rate, state.step_count)
        decays = [_with_bias_correction(b, count.astype(jnp.float32)) for b in (b1, b2)]

        def step(grad: Array, mu: Array, nu: Array, param: Array) -> tuple[Array, Array, Array]:
            if is_float0(grad):
                return grad, mu, nu
            grad, mu, nu, param = map(jnp.asarray, (grad, mu, nu, param))
            dtype = nu.dtype
            wide, d1, d2 = (x.astype(dtype) for x in (grad, *decays))
            mu = d1 * mu + (1 - d1) * wide
            nu = d2 * nu + (1 - d2) * jnp.square(wide)
            tiny = jnp.finfo(dtype).tiny  # `eps^2` may underflow, and at 0 a root has no derivative
            ratio = wide / jnp.sqrt(jnp.maximum(nu, jnp.maximum(eps**2, tiny)))
            direction = mu / (jnp.sqrt(jnp.maximum(nu, tiny)) + eps)
            direction += weight_decay * param.astype(dtype)
            update = -rate / jnp.maximum(1, _rms(ratio, axis_name) / clipping) * direction
            return update.astype(grad.dtype), mu, nu

        trees = updates, state.mu, state.nu, params
        steps = [step(*xs) for xs in zip(*map(jax.tree.leaves, trees), strict=True)]
        structure = jax.tree.structure(updates)
        out, mu, nu = (structure.unflatten([x[i] for x in steps]) for i in range(3))
        return out, StableAdamWState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def _zero_moment(param: Array) -> Array:
    """Return the initial moment of a parameter, in at least float32."""
    if not is_inexact(param):
        return jnp.zeros(jnp.shape(param), jnp.int32)  # unused
    return jnp.zeros_like(param, wide_dtype(jnp.result_type(param)))


def _rms(x: Array, axis_name: AxisName) -> Scalar:
    """Return the root mean square of a leaf, which may be sharded over mesh axes."""
    size = x.size * num_devices(shard_axes(x, axis_name))
    return norm_of_leaves([x], 2.0, axis_name) / math.sqrt(max(size, 1))


def _with_bias_correction(decay: Number, step: Array) -> Array:
    """Return `decay * (1 - decay^(step - 1)) / (1 - decay^step)`, without cancellation."""
    log = jnp.log(jnp.maximum(decay, 1e-30))
    return jnp.expm1(log * (step - 1)) / jnp.expm1(log * step) * decay
