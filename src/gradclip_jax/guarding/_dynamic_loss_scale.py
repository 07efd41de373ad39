"""A guard that looks for the largest loss scale at which nothing overflows."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from .._checks import check_choice, check_state
from .._gate import Gate, gate_of, gated
from .._tree_checks import check_inexact
from .._types import AxisName, Count, Tree
from ._adapt_scale import ScaleRule, adapted_scale, check_scale_rule
from ._guard import check_guard, zero
from ._scale_loss import LossScaleState
from ._skip_nonfinite import skip_nonfinite
from ._unscale import unscaled

_NAME = "dynamic_loss_scale"


def dynamic_loss_scale(
    inner: optax.GradientTransformation,
    *,
    init_scale: Any = 2.0**16,
    growth_factor: Any = 2.0,
    backoff_factor: Any = 0.5,
    growth_interval: Count = 2000,
    min_scale: Any = 1.0,
    max_scale: Any = 2.0**24,
    check: Literal["step", "gradient"] = "step",
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

    It goes outermost: clips and other guards stand inside, where gradients are unscaled. A guard
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
    axes = check_guard(_NAME, inner, axis_name)
    check_choice(_NAME, "check", check, ("step", "gradient"))
    rule = ScaleRule(
        init_scale, growth_factor, backoff_factor, growth_interval, min_scale, max_scale
    )
    check_scale_rule(_NAME, rule)
    guarded = skip_nonfinite(inner, check=check, axis_name=axes)
    innermost, guard_gate = gate_of(guarded)

    def init(params: Tree) -> LossScaleState:
        scale = jnp.array(init_scale, jnp.float32)  # a copy: the state may be donated
        return LossScaleState(scale, zero(), guarded.init(params))

    def gate(
        updates: Tree, state: Any, params: Tree, extra_args: dict[str, Any], admitted: Any
    ) -> Gate:
        check_inexact(_NAME, "updates", updates)
        check_state(_NAME, state, LossScaleState)
        grads = jax.tree.map(lambda x: unscaled(x, state.loss_scale), updates)
        now = guard_gate(grads, state.inner_state, params, extra_args, admitted)

        def next_state(inner_state: Any, accumulator: Tree, stepped: Any) -> LossScaleState:
            after = now.next_state(inner_state, accumulator, stepped)
            skipped = after.consecutive_skips > 0
            counts = state.loss_scale, state.good_steps
            scale, good_steps, failed = adapted_scale(*counts, skipped, rule)
            after = after._replace(guard_failed=after.guard_failed | failed)
            return LossScaleState(scale, good_steps, after)

        return now._replace(next_state=next_state)

    return gated(innermost, init, gate)
