"""Check gradients with guards, and record which guards skip them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp

from .._errors import named
from .._types import Array, Scalar, Tree
from ._extra_args import ExtraArgs
from ._guard import GradientCheck, Guard, Rejections
from ._state import CallOutcome, GuardState

Flags: TypeAlias = Array | int
"""An int32[] with flags of `CallOutcome`, or the integer 0 if no guard has made a check.

The integer is known during tracing, so no branch is compiled for it.
"""


class Skips(NamedTuple):
    """Why each guard skips. Only the first guard that rejects a gradient or a step skips it.

    Attributes:
        flags: For each guard, from the outermost to the innermost, `CallOutcome.SKIPPED` and the
            causes; 0 if the guard does not skip.
    """

    flags: tuple[Flags, ...]

    @classmethod
    def none(cls, num_guards: int) -> Skips:
        """Return the flags of guards that have not checked anything."""
        return cls((0,) * num_guards)

    @property
    def union(self) -> Flags:
        """The flags of all guards."""
        return functools.reduce(operator.or_, self.flags, 0)

    @property
    def is_accepted(self) -> Scalar | bool:
        """Whether no guard skips; the Python bool True if no guard has checked anything."""
        return self.union == 0

    def rejected_by(self, guard: int, rejections: Rejections) -> Skips:
        """Add the rejections of the guard with this index, unless a guard has already skipped."""
        flags = self.flags[guard]
        is_first = self.is_accepted
        for cause, is_rejected in rejections.items():
            is_cause = is_rejected if is_first is True else is_first & is_rejected
            flags |= flag_where(CallOutcome.SKIPPED | CallOutcome.of_cause(cause), is_cause)
        return Skips((*self.flags[:guard], flags, *self.flags[guard + 1 :]))

    def where(self, is_checked: Scalar) -> Skips:
        """Return the skips where `is_checked` is true, and no skips elsewhere."""
        return Skips(tuple([jnp.where(is_checked, flags, 0) for flags in self.flags]))

    def as_arrays(self) -> Skips:
        """Return the flags as int32[] arrays, which can be the output of a branch."""
        return Skips(tuple([jnp.asarray(flags, jnp.int32) for flags in self.flags]))

    def merged(self, others: Skips) -> Skips:
        """Return the union of the skips in two checks."""
        return Skips(tuple(map(operator.or_, self.flags, others.flags)))


def flag_where(flag: CallOutcome, is_set: Scalar | bool) -> Array:
    """Return the bits of a flag where it is set, and 0 elsewhere."""
    return jnp.where(is_set, jnp.int32(int(flag)), 0)


class PlacedGuard(NamedTuple):
    """A guard, its place in `Skips.flags`, and its state before the call."""

    place: int
    guard: Guard
    state: GuardState


class Checked(NamedTuple):
    """A gradient that guards have received and checked.

    Attributes:
        grads: The gradient, unscaled and masked.
        extra_args: The extra arguments, in which a gradient `grad` is unscaled as well.
        skips: Which guards skip the gradient.
        observed: Second result of the check of each of these guards; see `Guard.advance`.
        norm: Norm of the gradient that the first of these guards checked; None without guards.
    """

    grads: Tree
    extra_args: ExtraArgs
    skips: Skips
    observed: list[Tree]
    norm: Scalar | None


def receive(
    guards: Sequence[PlacedGuard],
    checks: Sequence[GradientCheck],
    grads: Tree,
    params: Tree,
    extra_args: ExtraArgs,
    skips: Skips,
) -> Checked:
    """Unscale, mask and check a gradient with each of the guards."""
    observed: list[Tree] = []
    norms: list[Scalar] = []
    for (i, guard, state), check in zip(guards, checks, strict=True):
        with named(guard.name):
            grads, extra_args = guard.receive(grads, extra_args, state.rule_state, params)
            norms.append(guard.norm(grads))
            rejections, seen = check(grads, norms[-1], state.rule_state, params, extra_args)
        skips = skips.rejected_by(i, rejections)
        observed.append(seen)
    norm = norms[0].astype(jnp.float32) if norms else None
    return Checked(grads, extra_args, skips, observed, norm)
