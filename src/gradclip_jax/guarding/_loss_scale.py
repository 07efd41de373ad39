"""The loss scale of a training in float16, and the guard that adapts it."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._checks import check_count, check_number, describe, is_float0, is_traced
from .._errors import public, type_error, value_error
from .._states import find_states, increment_where, plain_arrays, register_metrics
from .._types import Array, AxisName, Count, Scalar, Tree
from ..clipping._formula import wide_dtype
from ._detect import is_bad
from ._guard import zero
from ._skip_nonfinite import finite_guard

# Beyond these 1 / scale is no normal number, and a compiled program may take it for zero.
_SMALLEST, _LARGEST = 2.0**-126, 2.0**126


@register_metrics(
    "loss_scale", "skipped_nonfinite", "consecutive_skips", "guard_failed", gate="inner_state"
)
class LossScaleState(NamedTuple):
    """What `dynamic_loss_scale` keeps; int32[], saturating, but for the scale.

    Attributes:
        loss_scale: float32[], what the gradient of the next loss is multiplied by.
        good_steps: steps that were taken since the scale changed or one was skipped.
        skipped_nonfinite: steps that were skipped.
        consecutive_skips: steps that were skipped since the last one that was taken.
        guard_failed: 1 if a step was ever not finite at the smallest scale, else 0.
        inner_state: the state of the inner optimizer.
        incidents: an `IncidentLog`, or None.
    """

    loss_scale: Scalar
    good_steps: Scalar
    skipped_nonfinite: Scalar
    consecutive_skips: Scalar
    guard_failed: Scalar
    inner_state: Any
    incidents: Any = None


@public
def scale_loss(state: Any, loss: Any) -> Array:
    """Returns the loss as it is, with a gradient that is multiplied by the loss scale.

    The value is the true loss: to be logged, and to be given to `update` as `value`. It is
    never multiplied, so it cannot overflow. `update` of `dynamic_loss_scale` divides the gradient.

    | loss | effect |
    | --- | --- |
    | float32, float64 | the same value |
    | float16, bfloat16 | the same value in float32 |
    | float16, at a scale above 65,504 | its gradient overflows: skipped, and the scale halved |

    In a network that is computed in float16 make the last steps to the loss in float32, such as
    the logarithm of a softmax and the mean over the batch: the scale can then be larger.

    Args:
        state: the state of `dynamic_loss_scale`, or any state around it: that of a chain, of an
            accumulation, a train state.
        loss: a real floating array; with `jax.grad` a scalar.

    Returns:
        The loss in float32, or in float64.

    Raises:
        TypeError: `state` holds no loss scale, or several; `loss` is not floating.

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
        rule = "a state with one loss scale in it"
        hint = "Make the state with `dynamic_loss_scale(optimizer).init(params)`."
        if scales:
            hint = "Put one `dynamic_loss_scale` around all of the optimizer."
        raise type_error("state", rule, f"{len(scales)} in it", hint)
    value = jnp.asarray(loss)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        rule, hint = "real and floating", "Pass the number that is differentiated."
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
    init_scale: Any = 2.0**16,
    growth_factor: Any = 2.0,
    backoff_factor: Any = 0.5,
    growth_interval: Count = 2000,
    min_scale: Any = 1.0,
    max_scale: Any = 2.0**24,
    check: Literal["gradient", "step"] = "gradient",
    incidents: Count | None = None,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    """Trains in float16: divides gradients by a loss scale that finds itself.

    The small numbers of a backward pass in float16, below 6e-8, become zero. `scale_loss`
    multiplies its gradient by the loss scale; this divides it again, in float32, before `inner`
    sees it. It is `skip_nonfinite` with a scale, and its verdict is the same:

    | step | effect |
    | --- | --- |
    | finite | taken; `growth_interval` of them in a row double the scale |
    | not finite: gradient, loss, weight, update or next state | skipped; the scale is halved |
    | not finite at the smallest scale | skipped; `guard_failed` says so |

    It goes outermost: clips and other guards are inside, where gradients are unscaled. A guard
    around it is an error, because bad steps would never get here to lower the scale. Around an
    accumulation the steps are micro-batches; inside they are windows, and the scale is the same
    throughout a window.

    Args:
        inner: as for `skip_nonfinite`. It sees gradients in float32 or wider; the updates have
            the dtypes it gives on plain gradients.
        init_scale: the first scale, from `min_scale` to `max_scale`; a power of two rounds nothing.
        growth_factor: multiplies the scale after `growth_interval` good steps, a number > 1.
        backoff_factor: multiplies it after a bad step, between 0 and 1.
        growth_interval: an integer >= 1.
        min_scale: the smallest scale, a number > 0; if all three are alike the scale is fixed.
        max_scale: the largest scale.
        check: as for `skip_nonfinite`; "gradient" is about the unscaled one.
        incidents: as for `skip_nonfinite`.
        axis_name: as for `clip_by_global_norm`.

    Returns:
        An Optax transformation whose state reports `loss_scale` in `metrics`.

    Raises:
        TypeError: as `skip_nonfinite`, or there is a loss scale inside already.
        ValueError: a number is out of range, or `check` another word.

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

    def first(inner_state: Any) -> LossScaleState:
        scale = jnp.array(init_scale, jnp.float32)  # a copy: the state may be donated
        return LossScaleState(scale, zero(), zero(), zero(), zero(), inner_state)

    def grads_of(updates: Tree, state: LossScaleState) -> Tree:
        return jax.tree.map(lambda x: _unscaled(x, state.loss_scale), updates)

    def adapted(state: LossScaleState, refuses: Scalar) -> dict[str, Any]:
        given = (growth_factor, backoff_factor, min_scale, max_scale)
        growth, backoff, smallest, largest = (jnp.asarray(x, jnp.float32) for x in given)
        good_steps = jnp.where(refuses, 0, increment_where(state.good_steps))
        grows = good_steps >= growth_interval
        factor = jnp.where(refuses, backoff, jnp.where(grows, growth, 1))
        failed = refuses & (state.loss_scale <= smallest)
        return {
            "loss_scale": jnp.clip(state.loss_scale * factor, smallest, largest),
            "good_steps": jnp.where(grows, 0, good_steps),
            "guard_failed": state.guard_failed | failed.astype(jnp.int32),
        }

    options: dict[str, Any] = {"grads_of": grads_of, "adapted": adapted, "incidents": incidents}
    return finite_guard(inner, first, check, axis_name, **options)


def _unscaled(x: Any, scale: Scalar) -> Any:
    """`x / scale` in at least float32; NaN for what is not finite in a narrower dtype.

    A compiler leaves out a rounding to float16 whose result is widened again, in one place and not
    in another: the verdict would then be about another number than the step is taken on.
    """
    if is_float0(x):
        return x
    x = jnp.asarray(x)
    dtype = wide_dtype(x.dtype)
    quotient = x.astype(dtype) / scale.astype(jnp.finfo(dtype).dtype)
    return quotient if dtype == x.dtype else jnp.where(is_bad(x), jnp.nan, quotient)


def _check_scales(first: Any, smallest: Any, largest: Any) -> None:
    """Refuses scales out of range or out of order."""
    scales = {"init_scale": first, "min_scale": smallest, "max_scale": largest}
    for argument, value in scales.items():
        hint = "Pass a power of two."
        check_number(argument, value, hint, low=_SMALLEST, high=_LARGEST, closed=True)
    is_known = not any(map(is_traced, scales.values()))
    if is_known and not float(smallest) <= float(first) <= float(largest):
        words = f"between `min_scale` and `max_scale`, {smallest:g} and {largest:g}"
        hint = "Move the bounds, or start within them."
        raise value_error("init_scale", words, f"{first:g}", hint)
