"""The extra arguments of `update` that guards and accumulations read."""

import difflib
import warnings
from typing import Any, Final

import jax.numpy as jnp
from jax import lax

from .._checks import describe, is_scalar
from .._errors import type_error
from .._run_if import Flag
from .._states import find_role
from .._types import AxisName, Scalar, Tree
from ..norms._mesh import shard_axes
from ._gate import ExtraArgs

EXTRA_ARGS: Final = ("value", "loss", "weight", "flush", "emit")


def warn_of_misspelled(extra_args: ExtraArgs) -> None:
    """Warn of extra arguments with nearly the same name as one that gates read."""
    for name in extra_args.keys() - EXTRA_ARGS:  # all others are passed on
        for near in difflib.get_close_matches(name, EXTRA_ARGS, n=1, cutoff=0.8):
            message = f"Extra argument `{name}` is passed on. Did you mean `{near}`?"
            warnings.warn(message, stacklevel=2)


def warn_of_unread_weight(extra_args: ExtraArgs, state: Tree) -> None:
    """Warn if the weight of a micro-batch is passed, but no accumulation reads it."""
    is_weight = is_scalar(extra_args.get("weight"), jnp.floating, jnp.integer)
    if is_weight and not find_role(state, "accumulation"):
        hint = "Wrap the optimizer in `accumulate_gradients`."
        warnings.warn(f"No accumulation reads the extra argument `weight`. {hint}", stacklevel=2)


def loss_argument(extra_args: ExtraArgs) -> tuple[str, Any]:
    """Return the name and the value of the loss, which is None if no loss was passed."""
    value, loss = extra_args.get("value"), extra_args.get("loss")
    # The inner transformation may read another `loss`, which is not a number.
    is_loss = value is None and is_scalar(loss, jnp.floating, jnp.integer, jnp.bool_)
    return ("loss", loss) if is_loss else ("value", value)


def loss_of(extra_args: ExtraArgs, axis_name: AxisName) -> Scalar | None:
    """Return the result of `mean_loss`, or None if no loss was passed."""
    _, value = loss_argument(extra_args)
    return None if value is None else mean_loss(extra_args, axis_name)


def mean_loss(extra_args: ExtraArgs, axis_name: AxisName) -> Scalar:
    """Return the loss in float32, averaged over devices if it differs between them."""
    name, value = loss_argument(extra_args)
    if not is_scalar(value, jnp.floating, jnp.integer, jnp.bool_):
        hint = "Call `update(grads, state, params, value=loss)` with the mean loss over the batch."
        raise type_error(name, "a real scalar", describe(value), hint)
    loss = jnp.asarray(value, jnp.float32)
    axes = shard_axes(loss, axis_name)
    return lax.pmean(loss, tuple(sorted(axes))) if axes else loss


def has_weight(extra_args: ExtraArgs, state: Tree) -> Flag:
    """Return whether the weight of a micro-batch is not zero, as bool[].

    Return True if no weight was passed, or if no accumulation in `state` reads it.
    """
    weight = extra_args.get("weight")
    if is_scalar(weight, jnp.floating, jnp.integer, jnp.bool_) and find_role(state, "accumulation"):
        return jnp.asarray(weight, jnp.float32) != 0
    return True


def has_micro_batch(extra_args: ExtraArgs) -> Flag:
    """Return whether a call of `update` passes a gradient; `flush` passes zeros of weight 0."""
    flush, weight = extra_args.get("flush"), extra_args.get("weight")
    if flush is None or weight is None:
        return True
    return jnp.logical_not(jnp.logical_and(flush, weight == 0))
