"""Gradient accumulation as an Optax gradient transformation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import optax
from jax.typing import DTypeLike

from .._checks import check_choice, check_count, check_transformation
from .._errors import public
from .._types import FLOAT32, Count, Number, Scalar
from .._weighted_sum import REDUCTIONS, check_dtype
from ..wrappers._accumulation import Accumulation
from ..wrappers._update import wrap


@public
def accumulate_gradients(
    inner: optax.GradientTransformation,
    every: Count | Callable[[Scalar], Number],
    *,
    reduction: Literal["mean", "sum"] = "mean",
    accumulator_dtype: DTypeLike | None = FLOAT32,
) -> optax.GradientTransformationExtraArgs:
    """Run the inner optimizer once for every `every` micro-batches, on their mean gradient.

    The gradient of an accumulation window is `sum(weight_i * g_i) / sum(weight_i)`. Before the last
    micro-batch, the updates are zeros and the inner optimizer does not run. If each weight is a
    number of tokens, accumulation is equivalent to one large batch. With `apply_gradients`, a
    micro-step that does not run the optimizer only adds the gradient to the accumulator.

    | micro-batch | result |
    | --- | --- |
    | `weight=0`, even with NaN gradients | contributes 0; counted, unless `flush=True` |
    | NaN gradient | affects only its window; an outer `skip_nonfinite` skips the micro-batch |
    | the last of an epoch, with `flush=True` | emits the window, divided by its total weight |
    | the last of a window with a total weight of 0 | zero update; the inner state does not change |
    | | (see the metric `empty_windows`) |

    | mistake | result |
    | --- | --- |
    | an optimizer outside, as in `chain(accumulate_gradients(identity(), 4), adamw)` | a warning; |
    | | most of its gradients are 0 |
    | `optax.MultiSteps` around this transformation | windows of windows; not detected |
    | a guard around a chain with this transformation | an error at `init`, because the guard |
    | | would not see the windows |

    Extra arguments of `update`:

    - `weight`, a scalar >= 0, for example the number of tokens. It is converted to float32.
    - `flush`, a bool that may be traced: whether to close the window in this call.

    The loss, a scalar passed as `value` or `loss`, must be equal on all devices. If the call that
    closes the window receives a loss, the inner optimizer receives the weighted mean of the losses
    of the window instead, or their weighted sum with `reduction="sum"`. If the argument `grad` has
    the structure of the gradient, the gradient of the window replaces it as well. Other extra
    arguments are forwarded unchanged: the `value_fn` of a line search must be the loss of the whole
    window.

    A float32 sum of n equal terms has a relative error of up to 1.5e-4 for n = 1e4 and 1.5e-2 for
    n = 1e6.

    Use `microbatched_value_and_grad` to split one batch inside one step; both can be combined.

    Args:
        inner: Gradient transformation, which must not contain another accumulation.
        every: Number of micro-batches in an accumulation window; an integer >= 1, or a function
            from the gradient step, int32[], to such a number (`every_k_schedule` in Optax). The
            integer 1 allocates no accumulator.
        reduction: "mean" or "sum". To accumulate leaves that are not gradients in another way, such
            as the statistics of an fp8 layer, use `optax.partition`.
        accumulator_dtype: Dtype of the sum for leaves of up to 32 bits, or None to keep the dtype
            of each parameter. Complex leaves use the corresponding complex dtype, and 64-bit leaves
            keep their dtype.

    Returns:
        A gradient transformation with a `WrapperState`, whose field `accumulation` is an
        `AccumulationState`. The inner optimizer receives gradients in the dtype of the accumulator.
        The updates have the dtypes that this optimizer returns for the incoming gradients.

    Raises:
        ValueError: If `every` is less than 1, or if `reduction` is unknown.
        TypeError: If `inner` is not a gradient transformation or contains an accumulation, if
            `every` is not an integer, or if a leaf is not floating-point or complex or has a
            different shape than its parameter.

    Examples:
        >>> import jax, jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = gcx.accumulate_gradients(optax.sgd(1.0), every=2)
        >>> params = jnp.array([0.0])
        >>> update, state = jax.jit(tx.update), tx.init(params)
        >>> held, state = update(jnp.array([2.0]), state, params, weight=1.0)
        >>> emitted, state = update(jnp.array([6.0]), state, params, weight=3.0)
        >>> held.tolist(), emitted.tolist(), bool(gcx.has_updated(state))
        ([0.0], [-5.0], True)
    """
    check_transformation("inner", inner)
    if not callable(every):
        check_count("every", every, "Pass 1 to run the inner optimizer at every step.")
    check_choice("reduction", reduction, REDUCTIONS)
    check_dtype("accumulator_dtype", accumulator_dtype)
    return wrap(Accumulation(every, reduction, accumulator_dtype), inner)
