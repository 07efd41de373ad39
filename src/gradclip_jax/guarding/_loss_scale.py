"""Dynamic loss scaling for float16, and the guard that adapts the scale."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._checks import (
    check_axis_name,
    check_count,
    check_number,
    describe,
    is_float0,
    is_traced,
)
from .._errors import public, type_error, value_error
from .._leaves import measured_leaves
from .._states import find_states, increment_where, plain_arrays, register_guard
from .._types import Array, AxisName, Count, Number, Scalar, Tree
from ..clipping._formula import wide_dtype
from ..clipping._norm import norm_of_leaves
from ._detect import is_bad
from ._guard import OUTERMOST, Check, zero
from ._skip_nonfinite import finite_guard

# Beyond these 1 / scale is subnormal, and a compiled program may flush it to zero.
_SMALLEST, _LARGEST = 2.0**-126, 2.0**126


@register_guard(
    *("loss_scale", "unscaled_grad_norm"),
    *("skipped_nonfinite", "consecutive_skips", "guard_failed"),
)
class LossScaleState(NamedTuple):
    """The state of `dynamic_loss_scale`; counters are int32[], saturating.

    Attributes:
        loss_scale: float32[], the factor of the gradient of the next loss.
        good_steps: number of applied steps since the scale changed or a step was skipped.
        skipped_nonfinite: number of skipped steps.
        consecutive_skips: number of steps skipped since the last one that was applied.
        guard_failed: 1 if a step was ever non-finite at the smallest scale, else 0.
        inner_state: the state of the inner optimizer.
        unscaled_grad_norm: float32[], the norm of the last finite gradient after the division by
            the scale. If it is about 1 / scale of what you expect, `scale_loss` is missing.
    """

    loss_scale: Scalar
    good_steps: Scalar
    skipped_nonfinite: Scalar
    consecutive_skips: Scalar
    guard_failed: Scalar
    inner_state: Any
    unscaled_grad_norm: Scalar


OUTERMOST.append(LossScaleState)


@public
def scale_loss(state: Any, loss: Any) -> Array:
    """Return the loss unchanged, with a gradient that is multiplied by the loss scale.

    The value is the true loss: log it, and pass it to `update` as `value`. It is not multiplied,
    so it cannot overflow. `update` of `dynamic_loss_scale` divides the gradient.

    | loss | effect |
    | --- | --- |
    | float32, float64 | the same value |
    | float16, bfloat16 | the same value in float32 |
    | float16, at a scale above 65,504 | its gradient overflows; the step is skipped |

    In a float16 network compute the last operations of the loss in float32, such as the
    log-softmax and the mean over the batch; the scale can then be larger.

    Args:
        state: the state of `dynamic_loss_scale`, or any state around it: that of a chain, of an
            accumulation, a train state.
        loss: a real floating array; with `jax.grad` a scalar.

    Returns:
        The loss in float32, or in float64.

    Raises:
        TypeError: `state` contains no loss scale, or several; `loss` is not floating.

    Examples:
        >>> import jax, jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = gcx.dynamic_loss_scale(optax.sgd(1.0), init_scale=1024.0)
        >>> params = jnp.array(3.0)
        >>> state = tx.init(params)
        >>> loss, grads = jax.value_and_grad(lambda p: gcx.scale_loss(state, p**2))(params)
        >>> updates, state = tx.update(grads, state, params)
        >>> float(loss), float(grads), float(updates)
        (9.0, 6144.0, -6.0)
    """
    scales = find_states(state, LossScaleState)
    if len(scales) != 1:
        rule = "a state with one loss scale"
        hint = "Make the state with `dynamic_loss_scale(optimizer).init(params)`."
        if scales:
            hint = "Put one `dynamic_loss_scale` around all of the optimizer."
        raise type_error("state", rule, f"one with {len(scales)}", hint)
    value = jnp.asarray(loss)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        rule, hint = "real and floating", "Pass the value that is differentiated."
        raise type_error("loss", rule, describe(value), hint)
    scale = plain_arrays(scales[0][1].loss_scale)
    return _with_scaled_derivative(value.astype(wide_dtype(value.dtype)), jnp.asarray(scale))


@jax.custom_jvp
def _with_scaled_derivative(loss: Array, scale: Array) -> Array:
    return loss


@_with_scaled_derivative.defjvp
def _with_scaled_derivative_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    loss, scale = primals
    return loss, tangents[0] * scale.astype(loss.dtype)


@public
def dynamic_loss_scale(
    inner: optax.GradientTransformation,
    *,
    init_scale: Number = 2.0**16,
    growth_factor: Number = 2.0,
    backoff_factor: Number = 0.5,
    growth_interval: Count = 2000,
    min_scale: Number = 1.0,
    max_scale: Number = 2.0**24,
    check: Check = "gradient",
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    """Train in float16: divide gradients by a loss scale that is adapted during training.

    Gradients below 6e-8 underflow to zero in a float16 backward pass. `scale_loss` multiplies the
    gradient by the loss scale; this transformation divides it again, in float32, before `inner`
    gets it. It is `skip_nonfinite` with a scale and skips the same steps:

    | step | effect |
    | --- | --- |
    | finite | applied; `growth_interval` of them in a row double the scale |
    | non-finite gradient, loss or weight | skipped; the scale is halved |
    | non-finite update or next state | applied by default; the same with `check="step"` |
    | non-finite at the smallest scale | skipped; `guard_failed` is 1 from then on |
    | `scale_loss` is missing | applied, too small: `unscaled_grad_norm` is the norm / scale |

    It has to be outermost, so that clips and other guards get unscaled gradients. A guard around it
    is an error, because skipped steps would not lower the scale. Around an accumulation its steps
    are micro-batches; inside one they are windows, and the scale is constant in a window.

    Args:
        inner: as for `skip_nonfinite`. It gets gradients in float32 or wider; the updates have
            the dtypes that it returns for the incoming gradients.
        init_scale: the first scale, from `min_scale` to `max_scale`; a power of two is exact.
        growth_factor: multiplies the scale after `growth_interval` good steps, a number > 1.
        backoff_factor: multiplies it after a skipped step, between 0 and 1.
        growth_interval: an integer >= 1.
        min_scale: the smallest scale, a number > 0; if all three are equal the scale is fixed.
        max_scale: the largest scale.
        check: as for `skip_nonfinite`; "gradient" is the unscaled one.
        axis_name: as for `clip_by_global_norm`.

    Returns:
        An Optax transformation with a `LossScaleState`; `metrics` report `loss_scale` and
        `unscaled_grad_norm`.

    Raises:
        TypeError: as `skip_nonfinite`, or `inner` already contains a loss scale.
        ValueError: a number is out of range, or `check` is unknown.

    Examples:
        >>> import jax, jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = gcx.dynamic_loss_scale(optax.sgd(1.0))
        >>> params = jnp.float32(2.0)
        >>> state = tx.init(params)
        >>> def loss_fn(params):
        ...     small = params.astype(jnp.float16) * jnp.float16(1e-4)
        ...     return small.astype(jnp.float32) * 1e-4
        >>> float(jax.grad(loss_fn)(params))  # 1e-8 is too small for float16
        0.0
        >>> grads = jax.grad(lambda p: gcx.scale_loss(state, loss_fn(p)))(params)
        >>> updates, state = tx.update(grads, state, params)
        >>> f"{float(updates):.2g}", float(gcx.metrics(state)["loss_scale"])
        ('-1e-08', 65536.0)

    References:
        Micikevicius et al. 2018, Mixed Precision Training, arXiv 1710.03740.
    """
    _check_scales(init_scale, min_scale, max_scale)
    check_number("growth_factor", growth_factor, "Pass for example 2.0.", low=1.0)
    hint = "Pass for example 0.5."
    check_number("backoff_factor", backoff_factor, hint, high=1.0, below_high=True)
    check_count("growth_interval", growth_interval, "Pass the number of good steps.")

    axes = check_axis_name(axis_name)

    def make_state(inner_state: Any) -> LossScaleState:
        scale = jnp.array(init_scale, jnp.float32)  # a copy: the state may be donated
        return LossScaleState(scale, zero(), zero(), zero(), zero(), inner_state, zero(jnp.float32))

    def unscale(updates: Tree, state: LossScaleState) -> Tree:
        return jax.tree.map(lambda x: _unscaled(x, state.loss_scale), updates)

    def adapt(state: LossScaleState, grads: Tree, skipped: Scalar) -> LossScaleState:
        given = (growth_factor, backoff_factor, min_scale, max_scale)
        growth, backoff, smallest, largest = (jnp.asarray(x, jnp.float32) for x in given)
        good_steps = jnp.where(skipped, 0, increment_where(state.good_steps))
        grows = good_steps >= growth_interval
        factor = jnp.where(skipped, backoff, jnp.where(grows, growth, 1))
        failed = skipped & (state.loss_scale <= smallest)
        norm = norm_of_leaves(measured_leaves(grads), 2.0, axes).astype(jnp.float32)
        return state._replace(
            loss_scale=jnp.clip(state.loss_scale * factor, smallest, largest),
            good_steps=jnp.where(grows, 0, good_steps),
            guard_failed=state.guard_failed | failed.astype(jnp.int32),
            unscaled_grad_norm=jnp.where(jnp.isfinite(norm), norm, state.unscaled_grad_norm),
        )

    return finite_guard(inner, make_state, check, axes, unscale=unscale, adapt=adapt)


def _unscaled(x: Any, scale: Scalar) -> Any:
    """`x / scale` in at least float32; NaN for non-finite values of a narrower dtype.

    XLA may omit a rounding to float16 whose result is widened again, in one place and not in
    another. The check and the step would then see different values.
    """
    if is_float0(x):
        return x
    x = jnp.asarray(x)
    dtype = wide_dtype(x.dtype)
    quotient = x.astype(dtype) / scale.astype(jnp.finfo(dtype).dtype)
    return quotient if dtype == x.dtype else jnp.where(is_bad(x), jnp.nan, quotient)


def _check_scales(first: Any, smallest: Any, largest: Any) -> None:
    """Raise if a scale is out of range, or the three are not in order."""
    scales = {"init_scale": first, "min_scale": smallest, "max_scale": largest}
    for argument, value in scales.items():
        hint = "Pass a power of two."
        check_number(argument, value, hint, low=_SMALLEST, high=_LARGEST, closed=True)
    is_known = not any(map(is_traced, scales.values()))
    if is_known and not float(smallest) <= float(first) <= float(largest):
        words = f"between `min_scale` and `max_scale`, {smallest:g} and {largest:g}"
        hint = "Move the bounds, or start within them."
        raise value_error("init_scale", words, f"{first:g}", hint)
