"""Gradient accumulation as an Optax gradient transformation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import optax
from jax.typing import DTypeLike

from .._checks import check_choice, check_count, check_dtype, check_transformation
from .._errors import public
from .._types import FLOAT32, Count, Number, Scalar
from ..gates._execute import gated
from ._reduction import REDUCTIONS
from ._window import Accumulation


@public
def accumulate_gradients(
    inner: optax.GradientTransformation,
    every: Count | Callable[[Scalar], Number],
    *,
    reduction: Literal["mean", "sum"] = "mean",
    accumulator_dtype: DTypeLike = FLOAT32,
) -> optax.GradientTransformationExtraArgs:
    """Run the inner optimizer once for every `every` micro-batches, on their mean gradient.

    The gradient of an accumulation window is `sum(weight_i * g_i) / sum(weight_i)`. Before the last
    micro-batch, the updates are zeros and the inner optimizer does not run. If each weight is a
    number of tokens, accumulation is equivalent to one large batch. With `apply_gradients`, a
    micro-step that does not run the optimizer only adds the gradient to the accumulator.

    | micro-batch | result |
    | --- | --- |
    | `weight=0`, even with NaN gradients | counted, but contributes 0 |
    | NaN gradient | affects only its window; an outer `skip_nonfinite` skips the micro-batch |
    | the last of an epoch, with `flush=True` | emits the window, divided by its total weight |
    | the last of a window with a total weight of 0 | zero update; the inner state does not change |
    | | (see the metric `empty_windows`) |

    | mistake | result |
    | --- | --- |
    | an optimizer outside, as in `chain(accumulate_gradients(identity(), 4), adamw)` | a warning; |
    | | most of its gradients are 0 |
    | `optax.MultiSteps` around this transformation | windows of windows; not detected |

    Extra arguments of `update`:

    - `weight`, a scalar >= 0, for example the number of tokens. It is converted to float32.
    - `flush`, a bool that may be traced: whether to emit the window in this call.
    - `emit`, a Python bool, static under jit: whether this micro-batch closes the window. It
      replaces the counting of micro-batches and compiles one program for each value. These
      programs have no branch, so the host does not wait for the device. However, with a traced
      `weight`, the program that emits checks for a total weight of 0.

    The loss, a scalar passed as `value` or `loss`, must be equal on all devices. The call that runs
    the inner optimizer forwards its weighted mean over the window if it receives a loss. Other
    extra arguments are forwarded unchanged.

    Use `microbatched_value_and_grad` to split one batch inside one step; both can be combined.

    Args:
        inner: Gradient transformation, which must not contain another accumulation.
        every: Number of micro-batches in an accumulation window; an integer >= 1, or a function
            from the gradient step, int32[], to such a number (`every_k_schedule` in Optax). The
            integer 1 allocates no accumulator. It also emits an open window in the state of a
            longer accumulation.
        reduction: "mean" or "sum". To accumulate leaves that are not gradients in another way, such
            as the statistics of an fp8 layer, use `optax.partition`.
        accumulator_dtype: Dtype of the sum for leaves of up to 32 bits. Complex leaves use the
            corresponding complex dtype, and 64-bit leaves keep their dtype.

    Returns:
        A gradient transformation with an `AccumulationState`. The inner optimizer receives
        gradients in the accumulator's dtype or, if it raises for this dtype, in the dtype of the
        incoming gradients. The updates have the dtypes that it returns for the incoming gradients.

    Raises:
        ValueError: If `every` is less than 1, or if `reduction` is unknown.
        TypeError: If `inner` is not a gradient transformation or contains an accumulation, if
            `every` is not an integer, or if a leaf is not floating-point or complex or has a
            different shape than its parameter.

    Examples:
        >>> import jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = gcx.accumulate_gradients(optax.sgd(1.0), every=2)
        >>> params = jnp.array([0.0])
        >>> state = tx.init(params)
        >>> held, state = tx.update(jnp.array([2.0]), state, params, weight=1.0)
        >>> emitted, state = tx.update(jnp.array([6.0]), state, params, weight=3.0)
        >>> held.tolist(), emitted.tolist(), bool(gcx.has_updated(state))
        ([0.0], [-5.0], True)
    """
    check_transformation("inner", inner)
    if not callable(every):
        check_count("every", every, "Pass 1 to run the inner optimizer at every step.")
    check_choice("reduction", reduction, REDUCTIONS)
    check_dtype("accumulator_dtype", accumulator_dtype)
    accumulation = Accumulation(every, reduction, accumulator_dtype)
    return gated(accumulation, inner, accumulation.init)
