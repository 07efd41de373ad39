"""Check gradients with guards, and record which guards skip them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._errors import named
from .._types import Array, Scalar, Tree
from ._extra_args import ExtraArgs
from ._guard import Causes, GradientCheck, Guard, Rejections
from ._state import CallOutcome, GuardState


class Skips(NamedTuple):
    """Why each guard skips. Only the first guard that rejects a gradient or a step skips it.

    Attributes:
        causes: For each guard, from the outermost to the innermost, whether it skips for each
            cause, such as "nonfinite"; empty if the guard has not checked anything.
    """

    causes: tuple[Causes, ...]

    @classmethod
    def none(cls, num_guards: int) -> Skips:
        """Return the skips of guards that have not checked anything."""
        return cls(({},) * num_guards)

    @property
    def is_accepted(self) -> Scalar | bool:
        """Whether no guard skips.

        If no guard has checked anything, this is the Python bool True, which is known during
        tracing, so that no branch is compiled.
        """
        found = [x for causes in self.causes for x in causes.values()]
        return ~functools.reduce(operator.or_, found) if found else True

    @property
    def flags(self) -> Array | int:
        """The flags of `CallOutcome` for all guards, int32[]."""
        found = [
            flag_where(CallOutcome.SKIPPED | CallOutcome.of_cause(cause), x)
            for causes in self.causes
            for cause, x in causes.items()
        ]
        return functools.reduce(operator.or_, found, 0)

    def rejected_by(self, guard: int, rejections: Rejections) -> Skips:
        """Add the rejections of the guard with this index, unless a guard has already skipped."""
        is_first = self.is_accepted
        added = {cause: jnp.asarray(x & is_first) for cause, x in rejections.items()}
        causes = _union(self.causes[guard], added)
        return Skips((*self.causes[:guard], causes, *self.causes[guard + 1 :]))

    def where(self, is_checked: Scalar) -> Skips:
        """Return the skips where `is_checked` is true, and no skips elsewhere."""
        return jax.tree.map(lambda x: x & is_checked, self)

    def merged(self, others: Skips) -> Skips:
        """Return the union of the skips in two checks."""
        return Skips(tuple(map(_union, self.causes, others.causes)))


def _union(a: Causes, b: Causes) -> Causes:
    """Return whether a guard skips for each cause in one of two checks."""
    return {**a, **b, **{cause: a[cause] | b[cause] for cause in a.keys() & b.keys()}}


def flag_where(flag: CallOutcome, is_set: Scalar | bool) -> Array:
    """Return the bits of a flag where it is set, and 0 elsewhere."""
    return jnp.where(is_set, jnp.int32(int(flag)), 0)


class PlacedGuard(NamedTuple):
    """A guard, its place in `Skips.causes`, and its state before the call."""

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
