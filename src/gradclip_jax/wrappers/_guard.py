"""The functions and arguments that define a guard."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
import optax

from .._checks import check_count, check_transformation
from .._errors import named, value_error
from .._states import increment_where
from .._types import AxisName, Count, Scalar, Tree
from ..norms._leaves import inexact_leaves
from ..norms._mask import Mask, check_mask, zero_excluded
from ..norms._mesh import check_axis_name
from ..norms._reduce import norm_of_leaves
from ._extra_args import ExtraArgs, is_gradient
from ._state import GuardState

Rejections: TypeAlias = dict[str, Scalar | bool]
"""Whether a guard rejects a step, for each cause, such as "nonfinite"."""

Measure: TypeAlias = Callable[[Tree, Tree], Tree]
"""A function `(updates, params) -> measurements`, called before updates are added in place."""

GradientCheck: TypeAlias = Callable[[Tree, Scalar, Tree, Tree, ExtraArgs], tuple[Rejections, Tree]]
"""A function `(grads, norm, rule_state, params, extra_args) -> (rejections, observed)`.

It checks `grads`, whose norm is `norm`. `Guard.advance` receives the pytree `observed`.
"""


class Guard(NamedTuple):
    """A guard, which skips a step if one of its checks rejects it.

    The functions below do not depend on the accumulation or on other guards. `execute` calls them
    and counts the skips. Their results must be equal on all devices.

    Attributes:
        name: Name of the public function, for errors and profiles.
        causes: Names of the causes for which the guard rejects a step.
        check: Function that checks the gradient of a step.
        check_micro_batch: Function that replaces `check` for the micro-batches of an accumulation
            inside this guard, or None.
        checks_window: Whether `check` also checks the gradient of each window of this accumulation.
        init: Function `params -> rule_state` that returns the guard's own initial state.
        advance: Function `(rule_state, observed, skipped) -> rule_state`, or None if the state does
            not change. Its result is kept if this guard skipped, or if the gradient was applied or
            accumulated.
        unscale: Function `(grads, rule_state) -> grads` that is applied before the check, or None.
        check_step: Function `(updates, before, after, params) -> rejections` that checks a computed
            step and the inner states before and after it, or None.
        has_failed: Function `(rule_state, skipped) -> bool[]` that returns whether training cannot
            recover from a skip, or None.
        trainable: Leaves that are checked; other leaves reach the inner transformation as zeros.
        axis_name: Mapped axes over which every leaf is sharded.
        max_consecutive_skips: Number of consecutive skips after which `guard_failed` is set, or
            None for no limit.
    """

    name: str
    causes: tuple[str, ...]
    check: GradientCheck
    check_micro_batch: GradientCheck | None = None
    checks_window: bool = False
    init: Callable[[Tree], Tree] = lambda params: ()
    advance: Callable[[Tree, Tree, Scalar], Tree] | None = None
    unscale: Callable[[Tree, Tree], Tree] | None = None
    check_step: Callable[..., Rejections] | None = None
    has_failed: Callable[[Tree, Scalar], Scalar] | None = None
    trainable: Mask = None
    axis_name: AxisName = None
    max_consecutive_skips: Count | None = None

    def prepare(
        self, grads: Tree, extra_args: ExtraArgs, rule_state: Tree, params: Tree
    ) -> tuple[Tree, ExtraArgs]:
        """Unscale a gradient, and set the leaves that are not trainable to zero.

        The extra argument `grad` is unscaled as well if it has the structure of the gradient.
        """
        if self.unscale is not None:
            if is_gradient(extra_args, grads):
                extra_args = extra_args | {"grad": self.unscale(extra_args["grad"], rule_state)}
            grads = self.unscale(grads, rule_state)
        return zero_excluded(self.trainable, grads, params_of(params)), extra_args

    def norm(self, grads: Tree) -> Scalar:
        """Return the norm of a gradient on all devices."""
        return norm_of_leaves(inexact_leaves(grads), 2.0, self.axis_name)

    def next_state(
        self,
        state: GuardState,
        causes: dict[str, Scalar],
        observed: Tree,
        is_used: Scalar | bool,
    ) -> GuardState:
        """Count a skip by its cause, and update the guard's own state.

        `is_used` is True if no guard skips and the gradient was accumulated or applied.
        """
        counts = {
            cause: increment_where(count, causes.get(cause, False))
            for cause, count in state.skipped.items()
        }
        if self.advance is None:
            return GuardState(counts, state.rule_state)
        is_skipped = has_any(causes)
        with named(self.name):
            advanced = self.advance(state.rule_state, observed, is_skipped)
        rule_state = optax.tree.where(is_skipped | is_used, advanced, state.rule_state)
        return GuardState(counts, rule_state)


def has_any(causes: dict[str, Scalar]) -> Scalar:
    """Return whether a guard skips."""
    return functools.reduce(jnp.logical_or, causes.values(), jnp.bool_(False))


def check_guard_arguments(
    inner: object, axis_name: AxisName, trainable: Mask, max_consecutive_skips: Count | None = None
) -> None:
    """Raise if an argument that all guards and `watch` share is invalid."""
    check_transformation("inner", inner)
    check_axis_name(axis_name)
    if axis_name == ():
        rule = "None or the names of mapped axes, because all devices must decide alike"
        raise value_error("axis_name", rule, "()", "Pass the axes over which leaves are sharded.")
    if max_consecutive_skips is not None:
        check_count("max_consecutive_skips", max_consecutive_skips, "Pass None for no limit.")
    check_mask(trainable)


def params_of(params: Tree) -> Tree:
    """Return the parameters that receive gradients: the fast parameters for `optax.lookahead`."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params
