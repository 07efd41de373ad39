"""The extra arguments of `update` that guards and accumulations read: the loss and the gradient."""

from __future__ import annotations

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from .._checks import is_scalar
from .._errors import type_error, value_error
from .._format import describe
from .._types import AxisName, Scalar, Tree
from ..norms._mesh import shard_axes

ExtraArgs: TypeAlias = dict[str, Any]
"""The extra arguments of `update` by name."""


def is_gradient(extra_args: ExtraArgs, grads: Tree) -> bool:
    """Return whether there is an extra argument `grad` with the structure of the gradient."""
    if "grad" not in extra_args:
        return False
    return jax.tree.structure(extra_args["grad"]) == jax.tree.structure(grads)


def loss_argument(extra_args: ExtraArgs) -> tuple[str, Any]:
    """Return the name and the value of the loss; the value is None if no loss was passed."""
    value, loss = extra_args.get("value"), extra_args.get("loss")
    # If `loss` is not a number, it is an extra argument of the inner transformation.
    is_loss = value is None and is_scalar(loss, jnp.floating, jnp.integer, jnp.bool_)
    return ("loss", loss) if is_loss else ("value", value)


def loss_of(extra_args: ExtraArgs, axis_name: AxisName) -> Scalar | None:
    """Return the mean loss over all devices, or None if no loss was passed."""
    _, value = loss_argument(extra_args)
    return None if value is None else mean_loss(extra_args, axis_name)


def as_loss(argument: str, value: Any) -> Scalar:
    """Convert a loss to float32[], or raise if it is not a real scalar."""
    hint = "Call `update(grads, state, params, value=loss)` with the mean loss over the batch."
    if not is_scalar(value, jnp.floating, jnp.integer, jnp.bool_):
        raise type_error(argument, "a real scalar", describe(value), hint)
    try:
        return jnp.asarray(value, jnp.float32)
    except OverflowError:
        rule = "a number that float32 can represent"
        raise value_error(argument, rule, "a larger integer", hint) from None


def mean_loss(extra_args: ExtraArgs, axis_name: AxisName) -> Scalar:
    """Return the loss in float32, averaged over devices if it differs between them."""
    loss = as_loss(*loss_argument(extra_args))
    axes = shard_axes(loss, axis_name)
    return lax.pmean(loss, tuple(sorted(axes))) if axes else loss
