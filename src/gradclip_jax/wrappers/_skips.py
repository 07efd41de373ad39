"""Check gradients and steps with guards, and record which guards skip them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp

from .._errors import named
from .._types import Array, Scalar, Tree
from ._extra_args import ExtraArgs
from ._guard import Guard, Rejections
from ._state import CallOutcome, GuardState


class Skips(NamedTuple):
    """Which guards skip, and why. Only the first guard that rejects a gradient or a step skips it.

    Attributes:
        causes: Whether a guard skips for a cause. The keys consist of the position of the guard and
            the cause, such as `(0, "nonfinite")`. Guards that have not checked anything have no
            entries.
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

    def of_guard(self, position: int) -> dict[str, Scalar]:
        """Return whether the guard with this position skips, for each cause."""
        return {cause: x for (guard, cause), x in self.causes.items() if guard == position}

    def rejected_by(self, position: int, rejections: Rejections) -> Skips:
        """Add the rejections of one guard, unless another guard already skips."""
        is_first = self.is_accepted
        added = {(position, cause): jnp.asarray(x & is_first) for cause, x in rejections.items()}
        return self.merged(Skips(added))

    def only_if(self, is_checked: Scalar) -> Skips:
        """Return this object if `is_checked` is true, and otherwise one in which no guard skips."""
        return Skips({key: x & is_checked for key, x in self.causes.items()})

    def merged(self, others: Skips) -> Skips:
        """Combine the results of two checks."""
        causes = dict(self.causes)
        for key, is_skipped in others.causes.items():
            causes[key] = causes[key] | is_skipped if key in causes else is_skipped
        return Skips(causes)


def flag_where(flag: CallOutcome, is_set: Scalar | bool) -> Array:
    """Return the bits of a flag where it is set, and 0 elsewhere."""
    return jnp.where(is_set, jnp.int32(int(flag)), 0)


class IndexedGuard(NamedTuple):
    """A guard, its position among all guards from the outermost to the innermost, and its state."""

    position: int
    guard: Guard
    state: GuardState


class Checked(NamedTuple):
    """The result of `check_gradient`.

    Attributes:
        grads: The gradient, unscaled and masked.
        extra_args: The extra arguments, in which `grad` is unscaled as well.
        skips: Which guards skip the gradient.
        observed: For each guard, the second result of its check, keyed by position; see
            `Guard.advance`.
        norm: Norm of the gradient that the first of these guards checked; None without guards.
    """

    grads: Tree
    extra_args: ExtraArgs
    skips: Skips
    observed: dict[int, Tree]
    norm: Scalar | None


def check_gradient(
    guards: Sequence[IndexedGuard],
    grads: Tree,
    params: Tree,
    extra_args: ExtraArgs,
    skips: Skips,
    *,
    is_micro_batch: bool = False,
) -> Checked:
    """Prepare and check a gradient with each of the guards."""
    observed: dict[int, Tree] = {}
    norms: list[Scalar] = []
    for position, guard, state in guards:
        check = (is_micro_batch and guard.check_micro_batch) or guard.check
        with named(guard.name):
            grads, extra_args = guard.prepare(grads, extra_args, state.rule_state, params)
            norms.append(guard.norm(grads))
            given = grads, norms[-1], state.rule_state, params, extra_args
            rejections, observed[position] = check(*given)
        skips = skips.rejected_by(position, rejections)
    norm = norms[0].astype(jnp.float32) if norms else None
    return Checked(grads, extra_args, skips, observed, norm)


def check_window(
    guards: Sequence[IndexedGuard], grads: Tree, params: Tree, extra_args: ExtraArgs
) -> Skips:
    """Check the gradient of a window with the guards around the accumulation.

    Micro-batches, and not windows, update the states of these guards.
    """
    skips = Skips({})
    for position, guard, state in guards:
        if guard.checks_window:
            with named(guard.name):
                given = grads, guard.norm(grads), state.rule_state, params, extra_args
                rejections, _ = guard.check(*given)
            skips = skips.rejected_by(position, rejections)
    return skips


def check_step(
    guards: Sequence[IndexedGuard],
    updates: Tree,
    before: Tree,
    after: Tree,
    params: Tree,
    skips: Skips,
) -> Skips:
    """Check a computed step and the inner states before and after it."""
    for position, guard, _ in guards:
        if guard.check_step is not None:
            with named(guard.name):
                rejections = guard.check_step(updates, before, after, params)
            skips = skips.rejected_by(position, rejections)
    return skips
