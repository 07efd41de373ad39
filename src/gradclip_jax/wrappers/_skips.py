"""Check gradients with guards, and record which guards skip them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp

from .._errors import named
from .._types import Array, Scalar, Tree
from ._extra_args import ExtraArgs
from ._guard import Causes, Guard, Rejections
from ._state import CallOutcome, GuardState


class Skips(NamedTuple):
    """Which guards skip, and why. Only the first guard that rejects a gradient or a step skips it.

    Attributes:
        causes: Whether a guard skips for a cause, by the place of the guard and the cause, such as
            `(0, "nonfinite")`. Guards that have not checked anything have no entries.
    """

    causes: dict[tuple[int, str], Scalar]

    @property
    def is_accepted(self) -> Scalar | bool:
        """Whether no guard skips.

        If no guard has checked anything, this is the Python bool True, which is known during
        tracing, so that no branch is compiled.
        """
        return ~functools.reduce(operator.or_, self.causes.values()) if self.causes else True

    @property
    def flags(self) -> Array | int:
        """The flags of `CallOutcome` for all guards, int32[]."""
        flags: Array | int = 0
        for (_, cause), is_skipped in self.causes.items():
            flags |= flag_where(CallOutcome.SKIPPED | CallOutcome.of_cause(cause), is_skipped)
        return flags

    def of_guard(self, place: int) -> Causes:
        """Return whether the guard at a place skips for each cause."""
        return {cause: x for (guard, cause), x in self.causes.items() if guard == place}

    def rejected_by(self, place: int, rejections: Rejections) -> Skips:
        """Add the rejections of the guard at a place, unless a guard has already skipped."""
        is_first = self.is_accepted
        added = {(place, cause): jnp.asarray(x & is_first) for cause, x in rejections.items()}
        return self.merged(Skips(added))

    def merged(self, others: Skips) -> Skips:
        """Return the union of the skips in two checks."""
        causes = dict(self.causes)
        for key, is_skipped in others.causes.items():
            causes[key] = causes[key] | is_skipped if key in causes else is_skipped
        return Skips(causes)


def flag_where(flag: CallOutcome, is_set: Scalar | bool) -> Array:
    """Return the bits of a flag where it is set, and 0 elsewhere."""
    return jnp.where(is_set, jnp.int32(int(flag)), 0)


class PlacedGuard(NamedTuple):
    """A guard, its place among all guards from the outermost to the innermost, and its state."""

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
    grads: Tree,
    params: Tree,
    extra_args: ExtraArgs,
    skips: Skips,
    *,
    is_micro_batch: bool,
) -> Checked:
    """Unscale, mask and check a gradient with each of the guards."""
    observed: list[Tree] = []
    norms: list[Scalar] = []
    for place, guard, state in guards:
        check = guard.check_micro_batch if is_micro_batch else guard.check
        with named(guard.name):
            grads, extra_args = guard.receive(grads, extra_args, state.rule_state, params)
            norms.append(guard.norm(grads))
            rejections, seen = check(grads, norms[-1], state.rule_state, params, extra_args)
        skips = skips.rejected_by(place, rejections)
        observed.append(seen)
    norm = norms[0].astype(jnp.float32) if norms else None
    return Checked(grads, extra_args, skips, observed, norm)
