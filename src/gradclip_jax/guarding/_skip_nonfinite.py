"""Guard that skips steps with non-finite values.

A finite gradient does not imply a finite optimizer step. For example, a gradient of 1e20 makes the
second moment of Adam infinite permanently, although the update is still finite. Guards can
therefore check the update and the next state as well.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import jax.numpy as jnp
import optax

from .._checks import check_choice, is_scalar
from .._errors import public
from .._types import UNBOUNDED, AxisName, Count, Scalar, Tree
from ..norms._leaves import inexact_leaves
from ..norms._mask import Mask
from ..wrappers._extra_args import ExtraArgs, loss_of
from ..wrappers._guard import Guard, Rejections
from ..wrappers._update import wrap
from ._finite import all_finite, has_finite_narrow_squares, is_finite_step, is_narrow

Check: TypeAlias = Literal["gradient", "step"]
"""Whether a guard checks only the gradient, or the computed step as well."""


@public
def skip_nonfinite(
    inner: optax.GradientTransformation,
    *,
    check: Check = "gradient",
    max_consecutive_skips: Count | None = 50,
    axis_name: AxisName = None,
    trainable: Mask = None,
) -> optax.GradientTransformationExtraArgs:
    """Skip steps with non-finite gradients; parameters and state stay unchanged.

    A step is applied only if the gradient and its sum of squares are finite. If `update` receives
    the loss (`value` or `loss`) or a `weight`, they must be finite, too. With `check="step"`, the
    update and the next inner state must be finite as well.

    | step | result |
    | --- | --- |
    | a NaN or infinity in gradient, loss or weight | zero update, state unchanged |
    | a norm above 1.8e19 in float32 | the same |
    | an element above 255 in float16, unless it is accumulated in float32 | the same |
    | a NaN or infinity in the update, or a new one in a state array | applied by default |
    | the same with `check="step"` | zero update, state unchanged |
    | an infinity in a scalar of the state, such as an infinite clip threshold | applied |
    | a micro-batch of weight 0 of an accumulation inside this guard | not checked |
    | `weight` without an accumulation | passed to `inner`; `apply_gradients` warns |
    | 50 consecutive steps without an applied update | `guard_failed` is 1 from then on |

    A guard around `accumulate_gradients` skips single non-finite micro-batches, and drops an
    accumulation window if its gradient or step is non-finite. A guard inside `accumulate_gradients`
    only drops whole accumulation windows. A guard around a chain or another wrapper that contains
    an accumulation raises an error at `init`, because it would not see the windows. Instead, place
    the guard directly around the accumulation, as in
    `optax.chain(clip, skip_nonfinite(accumulate_gradients(optimizer, 4)))`.

    `check="gradient"` has no cost if a clip by global norm follows, and otherwise costs one read of
    the gradient. Gradients whose squares overflow are skipped because they would make a second
    moment infinite; for all other gradients, the optimizers of Optax return finite updates. Use
    `check="step"` if a schedule, a parameter or a custom transformation can produce a NaN. This
    mode applies steps with large gradients if the computed step is finite. It computes and checks
    every step, then selects the old or the new state. On an accelerator, this increases the memory
    traffic of AdamW from 8 N to 11 N bytes for N bytes of parameters; on CPU, the selection also
    copies the state.

    Args:
        inner: Gradient transformation. With `check="step"`, use `accumulate_gradients` instead of
            `optax.MultiSteps`, in which an overflow of the gradient sum fails all later steps.
        check: "gradient" to check only the gradient, or "step" to check the computed step as well.
        max_consecutive_skips: Number of consecutive skips after which `guard_failed` is set to 1
            permanently; an integer >= 1, or None for no limit. The guard only sets this flag. Check
            it in the training loop with `if gcx.metrics(state)["guard_failed"]: ...`.
        axis_name: See `clip_by_global_norm`; `()` raises, because devices would decide differently.
        trainable: Leaves that are trained, as a prefix tree of bools or a function
            `params -> bools`. All other leaves are frozen: they are not checked and reach `inner`
            as zeros, so that their NaNs cannot reach other leaves through a clip. None trains all
            leaves. To check only some of the trained leaves, use `skip_if` with a predicate, such
            as `lambda grads, params, **_: ~jnp.isfinite(gcx.global_norm(grads["adam"]))`.

    Returns:
        A gradient transformation with a `WrapperState`. With `apply_gradients` and donated
        arguments, no buffers are copied, except those of a small accumulation on CUDA.

    Raises:
        TypeError: If `inner` is not a gradient transformation, if a leaf is not floating-point or
            complex, or if the loss is not a real scalar.
        ValueError: If `max_consecutive_skips` is less than 1, or if `check` is unknown.

    Examples:
        >>> import jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = gcx.skip_nonfinite(optax.adam(0.1))
        >>> params = jnp.array([1.0])
        >>> updates, state = tx.update(jnp.array([jnp.nan]), tx.init(params), params)
        >>> updates.tolist(), int(gcx.metrics(state)["skipped_nonfinite"])
        ([0.0], 1)
    """
    guard = finite_guard("skip_nonfinite", check, trainable, axis_name)
    return wrap(guard._replace(max_consecutive_skips=max_consecutive_skips), inner)


def finite_guard(name: str, check: Check, trainable: Mask, axis_name: AxisName) -> Guard:
    """Return a guard that rejects non-finite gradients.

    With `check="step"`, it also rejects non-finite steps.
    """
    check_choice("check", check, ("gradient", "step"))

    def check_micro_batch(
        grads: Tree, norm: Scalar, state: Tree, params: Tree, extra_args: ExtraArgs
    ) -> tuple[Rejections, Tree]:
        leaves = inexact_leaves(grads)
        scalars = loss_of(extra_args, axis_name), extra_args.get("weight")
        checked = [x for x in scalars if is_scalar(x, jnp.inexact)]
        if check == "step":
            return {"nonfinite": ~all_finite([*checked, *leaves], axis_name)}, ()
        # A finite norm shows that all leaves are finite, except for narrow dtypes.
        narrow = [x for x in leaves if is_narrow(x)]
        largest = [float(jnp.finfo(x.dtype).max) for x in leaves if not is_narrow(x)]
        limit = math.sqrt(min(largest, default=UNBOUNDED))
        return {"nonfinite": ~(all_finite([*checked, *narrow], axis_name) & (norm <= limit))}, ()

    def check_gradient(
        grads: Tree, norm: Scalar, state: Tree, params: Tree, extra_args: ExtraArgs
    ) -> tuple[Rejections, Tree]:
        rejections, observed = check_micro_batch(grads, norm, state, params, extra_args)
        if check == "gradient":
            rejections["nonfinite"] |= ~has_finite_narrow_squares(grads, axis_name)
        return rejections, observed

    def check_step(updates: Tree, before: Tree, after: Tree, params: Tree) -> Rejections:
        accepted = is_finite_step(updates, before, after, params, trainable, axis_name)
        return {"nonfinite": ~accepted}

    return Guard(
        name,
        ("nonfinite",),
        check_gradient,
        check_micro_batch=check_micro_batch,
        checks_window=check == "gradient",
        check_step=check_step if check == "step" else None,
        trainable=trainable,
        axis_name=axis_name,
    )
