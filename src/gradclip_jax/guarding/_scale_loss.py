"""The loss scale: where it is kept, and how a loss takes it on."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._checks import describe, error_message
from .._states import find_states, plain_arrays, register_metrics
from .._types import Array, Scalar
from ..clipping._scale import wide_dtype

_NAME = "scale_loss"


@register_metrics("loss_scale")
class LossScaleState(NamedTuple):
    """What `dynamic_loss_scale` keeps.

    Attributes:
        loss_scale: float32[], what the gradient of the next loss is multiplied by.
        good_steps: int32[], steps that were taken since the scale changed or one was skipped.
        inner_state: a `SkipNonfiniteState`, with the counts of what was skipped.
    """

    loss_scale: Scalar
    good_steps: Scalar
    inner_state: Any


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
    found = find_states(state, LossScaleState)
    if len(found) != 1:
        rule = "a state with one loss scale in it"
        hint = "Make the state with `dynamic_loss_scale(optimizer).init(params)`."
        if found:
            hint = "Put one `dynamic_loss_scale` around all of the optimizer."
        raise TypeError(error_message(_NAME, "state", rule, f"{len(found)} in it", hint))
    value = jnp.asarray(loss)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        hint = "Pass the number that is differentiated."
        raise TypeError(error_message(_NAME, "loss", "real and floating", describe(value), hint))
    scale = plain_arrays(found[0][1].loss_scale)
    return _with_scaled_derivative(value.astype(wide_dtype(value.dtype)), jnp.asarray(scale))


@jax.custom_jvp
def _with_scaled_derivative(loss: Array, scale: Array) -> Array:
    return loss


@_with_scaled_derivative.defjvp
def _with_scaled_derivative_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    loss, scale = primals
    return loss, tangents[0] * scale.astype(loss.dtype)
