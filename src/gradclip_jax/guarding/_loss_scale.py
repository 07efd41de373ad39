"""Dynamic loss scaling for float16, and the guard that adapts the scale."""

from __future__ import annotations

from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import ArrayLike

from .._checks import check_array, check_count, check_number, is_float0
from .._clip_order import check_clip_order
from .._errors import public, type_error
from .._states import check_optimizer_state, find_states, increment_where, plain_arrays
from .._types import Array, AxisName, Count, Number, Scalar, Tree
from ..norms._leaves import wide_dtype
from ..norms._mask import Mask
from ..wrappers._update import wrap
from ._finite import is_nonfinite
from ._skip_nonfinite import Check, finite_guard

_MIN_SCALE: Final = 1.0
_MAX_SCALE: Final = 2.0**24


class LossScaleState(NamedTuple):
    """State of a loss scale.

    Attributes:
        loss_scale: Factor by which `scale_loss` multiplies the next gradient, float32[].
        good_steps: Number of applied steps since the scale changed or a step was skipped, int32[].
    """

    loss_scale: Scalar
    good_steps: Scalar

    def step_metrics(self) -> dict[str, Tree]:
        """Return the entry of `metrics` for this state."""
        return {"loss_scale": self.loss_scale}


@public
@jax.named_scope("scale_loss")
def scale_loss(state: Tree, loss: ArrayLike) -> Array:
    """Return the loss unchanged, with a gradient that is multiplied by the loss scale.

    The returned value is the unscaled loss, which cannot overflow. Log it, and pass it to `update`
    as `value`. The `update` function of `dynamic_loss_scale` divides the gradient by the scale.

    | loss | result |
    | --- | --- |
    | float32, float64 | the same value |
    | float16, bfloat16 | the same value in float32 |
    | NaN or infinite | NaN |
    | float16, at a scale above 65,504 | its gradient overflows and the step is skipped |

    In a float16 network, compute the last operations of the loss in float32, such as the
    log-softmax and the mean over the batch. This allows a larger scale.

    Args:
        state: State of `dynamic_loss_scale`, or a state that contains it, such as the state of a
            chain or an accumulation, or a train state.
        loss: Real floating-point array; for `jax.grad` a scalar.

    Returns:
        The loss in float32 or float64.

    Raises:
        TypeError: If `state` does not contain exactly one loss scale.

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
    check_optimizer_state(state)
    scales = find_states(state, LossScaleState)
    if len(scales) != 1:
        rule = "a state with exactly one loss scale"
        hint = "Wrap the whole optimizer in a single `dynamic_loss_scale`."
        raise type_error("state", rule, f"a state with {len(scales)}", hint)
    check_clip_order(state)
    check_array("loss", loss)
    value = jnp.asarray(loss)
    value = value.astype(wide_dtype(value.dtype))
    scale = jnp.asarray(plain_arrays(scales[0][1].loss_scale), value.dtype)
    constant = lax.stop_gradient(value)
    # `value - constant` is 0 with derivative 1.
    return constant + scale * (value - constant)


@public
def dynamic_loss_scale(
    inner: optax.GradientTransformation,
    *,
    init_scale: Number = 2.0**16,
    growth_interval: Count = 2000,
    check: Check = "gradient",
    axis_name: AxisName = None,
    trainable: Mask = None,
) -> optax.GradientTransformationExtraArgs:
    """Divide gradients by a dynamic loss scale, for training in float16.

    Gradients below 6e-8 underflow to zero in a float16 backward pass. To prevent this, `scale_loss`
    multiplies the gradient by the loss scale, and this transformation divides it by the scale in
    float32 before passing it to `inner`. It skips the same steps as `skip_nonfinite`:

    | step | result |
    | --- | --- |
    | finite | applied; after `growth_interval` such steps in a row, the scale is doubled, up to |
    | | 2^24 |
    | non-finite gradient, loss or weight | skipped; the scale is halved, down to 1 |
    | non-finite update or next state | applied by default; the same with `check="step"` |
    | non-finite at a scale of 1 | skipped; `guard_failed` is 1 from then on |
    | `scale_loss` was not called | applied; `grad_norm` is the norm divided by the scale |
    | a clip before this transformation in a chain | clips scaled gradients: `scale_loss` and |
    | | `apply_gradients` raise, and `metrics` warns; `update` cannot detect it |

    This transformation must be the outermost guard, so that clips and other guards receive unscaled
    gradients. Wrapping `dynamic_loss_scale` in another guard raises an error, because skipped steps
    would not lower the scale. If this transformation wraps an accumulation, each micro-batch counts
    as a step. Inside an accumulation, each window counts as a step, and the scale is constant
    within a window.

    Args:
        inner: Gradient transformation, as for `skip_nonfinite`. It receives gradients in float32 or
            wider; the updates have the dtypes that it returns for the incoming gradients.
        init_scale: Initial scale, from 1 to 2^24; scaling by a power of two is exact.
        growth_interval: Number of good steps after which the scale is doubled; an integer >= 1.
        check: See `skip_nonfinite`; "gradient" checks the unscaled gradient.
        axis_name: See `skip_nonfinite`.
        trainable: See `skip_nonfinite`.

    Returns:
        A gradient transformation with a `WrapperState`; `metrics` includes `loss_scale`, and
        `grad_norm` after division by the scale.

    Raises:
        TypeError: If `inner` is not a gradient transformation or already contains a loss scale, or
            if a leaf is not floating-point or complex.
        ValueError: If a number is out of range, or if `check` is unknown.

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
    interval = f"[{_MIN_SCALE}, {_MAX_SCALE}]"
    check_number("init_scale", init_scale, "Pass for example 2.0**16.", interval)
    check_count("growth_interval", growth_interval, "Pass the number of good steps before growth.")
    guard = finite_guard("dynamic_loss_scale", check, trainable, axis_name)

    def init(params: Tree) -> LossScaleState:
        scale = jnp.array(init_scale, jnp.float32)  # a copy, which may be donated
        return LossScaleState(scale, jnp.zeros((), jnp.int32))

    def advance(state: LossScaleState, observed: Tree, skipped: Scalar) -> LossScaleState:
        good_steps = jnp.where(skipped, 0, increment_where(state.good_steps))
        grows = good_steps >= growth_interval
        factor = jnp.where(skipped, 0.5, jnp.where(grows, 2.0, 1.0))
        scale = jnp.clip(state.loss_scale * factor, _MIN_SCALE, _MAX_SCALE)
        return LossScaleState(scale, jnp.where(grows, 0, good_steps))

    def has_failed(state: LossScaleState, skipped: Scalar) -> Scalar:
        return skipped & (state.loss_scale <= _MIN_SCALE)

    guard = guard._replace(init=init, advance=advance, has_failed=has_failed, unscale=_unscaled)
    return wrap(guard, inner)


def _unscaled(grads: Tree, state: LossScaleState) -> Tree:
    """Divide gradients by the scale in at least float32; non-finite float16 values become NaN.

    In some kernels, XLA may omit a cast to float16 that is followed by a cast to float32. The
    finiteness check and the optimizer could then read different values.
    """

    def divide(x: Array) -> Array:
        if is_float0(x):
            return x
        x = jnp.asarray(x)
        dtype = wide_dtype(x.dtype)
        quotient = x.astype(dtype) / state.loss_scale.astype(jnp.finfo(dtype).dtype)
        return quotient if dtype == x.dtype else jnp.where(is_nonfinite(x), jnp.nan, quotient)

    return jax.tree.map(divide, grads)
