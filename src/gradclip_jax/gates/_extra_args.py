"""The extra arguments of `update` that guards and accumulations read."""

import difflib
import warnings
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import describe, is_scalar
from .._errors import type_error
from .._run_if import Flag
from ._gate import ExtraArgs

EXTRA_ARGS: Final = ("value", "loss", "weight", "flush", "emit")


def check_extra_args(args: tuple[object, ...], extra_args: ExtraArgs) -> None:
    """Raise for additional positional arguments, and warn of misspelled names."""
    if args:
        got, hint = f"{3 + len(args)} positional arguments", "Pass the loss as `value=loss`."
        raise type_error("update", "called as `update(grads, state, params)`", got, hint)
    for name in extra_args.keys() - EXTRA_ARGS:  # all others are passed on
        near = difflib.get_close_matches(name, EXTRA_ARGS, n=1, cutoff=0.8)
        if near:
            warnings.warn(
                f"The extra argument `{name}` is passed to the inner transformation. Did you mean "
                f"`{near[0]}`?",
                stacklevel=2,
            )


def loss_argument(extra_args: ExtraArgs) -> tuple[str, Any]:
    """Return the name and the value of the loss, which is None if no loss was passed."""
    value, loss = extra_args.get("value"), extra_args.get("loss")
    numbers = (bool, int, float, complex, np.generic, np.ndarray, jax.Array)
    if not isinstance(loss, numbers):  # the inner transformation may have such an argument
        for leaf in jax.tree.leaves(value):
            if not isinstance(leaf, numbers):
                rule, hint = "a number or an array", "Pass the loss as `value=loss`."
                raise type_error("value", rule, describe(leaf), hint)
        return "value", value
    if value is not None:
        hint = "Pass the loss once, as `value`."
        raise type_error("loss", "omitted if `value` is passed", "both", hint)
    return "loss", loss


def has_weight(extra_args: ExtraArgs) -> Flag:
    """Return whether the weight of a micro-batch is not zero; True without a weight."""
    weight = extra_args.get("weight")
    if not is_scalar(weight, jnp.floating, jnp.integer, jnp.bool_):
        return True
    return weight != 0 if isinstance(weight, jax.Array) else bool(weight != 0)


def warn_of_weight(extra_args: ExtraArgs) -> None:
    """Warn if no accumulation reads the weight of a micro-batch."""
    if is_scalar(extra_args.get("weight"), jnp.floating, jnp.integer):
        warnings.warn(
            "No accumulation reads the extra argument `weight`, which is passed to the inner "
            "transformation. Wrap the optimizer in `accumulate_gradients`.",
            stacklevel=2,
        )


def warn_of_identity() -> None:
    """Warn if the transformation inside a guard or an accumulation returns gradients unchanged."""
    warnings.warn(
        "The transformation inside this guard or accumulation returns gradients unchanged. Place "
        "the optimizer inside: outside, it runs on zeros if a step is held or skipped.",
        stacklevel=2,
    )


def has_micro_batch(extra_args: ExtraArgs) -> Flag:
    """Return whether a call of `update` passes a gradient; `flush` passes zeros of weight 0."""
    flush, weight = extra_args.get("flush"), extra_args.get("weight")
    if flush is None or weight is None:
        return True
    return jnp.logical_not(jnp.logical_and(flush, weight == 0))
