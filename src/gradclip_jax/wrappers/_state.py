"""The state of guards and an accumulation, and the outcome of a call."""

from __future__ import annotations

import enum
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._errors import public
from .._metrics import combined
from .._states import check_optimizer_state, is_own_state, plain_arrays
from .._types import Array, Scalar, Tree


class CallOutcome(enum.IntFlag):
    """Flags that describe one call of `update`. Their values are stored in checkpoints.

    | flag | meaning |
    | --- | --- |
    | `APPLIED` | the inner transformation ran |
    | `ACCUMULATED` | the accumulation only added the micro-batch |
    | `SKIPPED` | a guard skipped the step or the micro-batch |
    | `SKIPPED_NONFINITE`, `SKIPPED_LARGE_NORM`, `SKIPPED_LARGE_LOSS`, `SKIPPED_OTHER` | its cause |
    | `EMPTY_WINDOW` | the accumulation dropped a window whose weight is zero |
    """

    APPLIED = 0x200
    ACCUMULATED = 0x800
    SKIPPED = 0x2000
    SKIPPED_NONFINITE = 0x4000
    SKIPPED_LARGE_NORM = 0x8000
    SKIPPED_LARGE_LOSS = 0x10000
    EMPTY_WINDOW = 0x40000
    SKIPPED_OTHER = 0x100000

    @classmethod
    def of_cause(cls, cause: str) -> CallOutcome:
        """Return the flag for a cause, such as "large_norm"."""
        return cls[f"SKIPPED_{cause.upper()}"]


class GuardState(NamedTuple):
    """State of one guard.

    Attributes:
        skipped: Number of steps that this guard skipped for each cause, int32[].
        rule_state: The guard's own state, such as its thresholds or its loss scale.
    """

    skipped: dict[str, Scalar]
    rule_state: Tree


class WrapperState(NamedTuple):
    """State of directly nested guards and at most one accumulation.

    The order of the fields matters for donation. JAX drops donated arrays that `update` does not
    read, and pairs the others with the outputs by position. Fields that `update` does not read are
    therefore last: at the front, they would shift all later pairs, which XLA would then copy.

    Attributes:
        consecutive_skips: Number of skipped calls, and of windows whose total weight is 0, since
            the last applied step, int32[]. Calls that only accumulate do not count.
        guard_failed: 1 if a limit of consecutive skips was ever reached, or if a loss scale was
            ever too small, else 0, int32[].
        outer_guards: State of each guard around the accumulation, from the outermost to the
            innermost.
        accumulation: `AccumulationState`, or None without an accumulation.
        inner_guards: State of each guard inside the accumulation; of all guards if there is no
            accumulation.
        inner_state: State of the inner transformation.
        grad_norm: Norm of the last gradient that the outermost guard received, float32[]; None
            without guards.
        outcome: What the last call did, int32[], flags of `CallOutcome`; 0 before the first call.
    """

    consecutive_skips: Scalar
    guard_failed: Scalar
    outer_guards: tuple[GuardState, ...]
    accumulation: Tree
    inner_guards: tuple[GuardState, ...]
    inner_state: Tree
    grad_norm: Scalar | None
    outcome: Scalar

    def step_metrics(self) -> dict[str, Tree]:
        """Return the entries of `metrics` for the guards and the accumulation."""
        found: dict[str, list[Tree]] = {}
        guards = self.outer_guards + self.inner_guards
        if guards:
            names = "grad_norm", "consecutive_skips", "guard_failed"
            found = {name: [getattr(self, name)] for name in names}
        for guard in guards:
            for cause, count in guard.skipped.items():
                found.setdefault(f"skipped_{cause}", []).append(count)
        parts = [*(guard.rule_state for guard in guards), self.accumulation]
        for part in filter(is_own_state, parts):
            for name, value in part.step_metrics().items():
                found.setdefault(name, []).append(value)
        return {name: combined(name, values) for name, values in found.items()}


def outcome_of(state: Tree) -> Scalar:
    """Return the flags of the last call; `APPLIED` without guards and accumulations.

    If a state contains several guards or accumulations side by side, as in `optax.partition`, their
    flags are combined; `ACCUMULATED` is then set only if no update was applied.
    """
    kinds = WrapperState, optax.MultiStepsState, optax.ApplyIfFiniteState
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kinds))
    found = [x.outcome if isinstance(x, WrapperState) else x for x in nodes if isinstance(x, kinds)]
    return _combined_outcome(found)


@jax.jit  # outside jit, constants would be transferred to the device one by one
def _combined_outcome(nodes: list[Tree]) -> Array:
    """Combine outcomes with the states of `optax.MultiSteps` and `optax.apply_if_finite`."""
    found = [node if isinstance(node, jax.Array) else _outcome_of_optax(node) for node in nodes]
    outcome = found[0] if found else jnp.int32(int(CallOutcome.APPLIED))
    for other in found[1:]:
        outcome |= other
        is_applied = has_flag(outcome, CallOutcome.APPLIED)
        outcome = jnp.where(is_applied, outcome & ~int(CallOutcome.ACCUMULATED), outcome)
    return outcome


def _outcome_of_optax(node: Tree) -> Array:
    """Return the outcome of a state of `optax.MultiSteps` or `optax.apply_if_finite`."""
    if isinstance(node, optax.MultiStepsState):
        is_closed = (jnp.asarray(node.mini_step) == 0) & (jnp.asarray(node.gradient_step) > 0)
        ran, other = outcome_of(node.inner_opt_state), CallOutcome.ACCUMULATED
        return jnp.where(is_closed, ran, int(other))
    other = CallOutcome.SKIPPED | CallOutcome.SKIPPED_NONFINITE
    return jnp.where(node.last_finite, outcome_of(node.inner_state), int(other))


@public
def has_updated(state: Tree) -> Array:
    """Return whether the last update applied an optimizer step.

    Use this function to count optimizer steps, or to update other state, such as batch
    normalization statistics, only after applied steps.

    | state | result |
    | --- | --- |
    | a guard skipped the step, or the window is still open or was dropped | False |
    | the same for `optax.apply_if_finite` and `optax.MultiSteps` | False |
    | a guard or an accumulation before the first call | False |
    | no guard or accumulation | True |
    | several guards or accumulations, as in `optax.partition` | whether any applied a step |

    Args:
        state: Optimizer state, or a pytree that contains optimizer states.

    Returns:
        A bool[], with the leading axes of a vmapped state.

    Raises:
        TypeError: If `state` is a gradient transformation.

    Examples:
        >>> import jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = gcx.skip_nonfinite(gcx.skip_spikes(optax.sgd(1.0), norm=10.0))
        >>> params = jnp.zeros(1)
        >>> state, steps = tx.init(params), 0
        >>> for grad in (1.0, jnp.nan, 50.0, 2.0):
        ...     params, state = gcx.apply_gradients(tx, jnp.array([grad]), state, params)
        ...     steps += int(gcx.has_updated(state))
        >>> steps
        2
    """
    check_optimizer_state(state)
    return has_flag(outcome_of(plain_arrays(state)), CallOutcome.APPLIED)


@functools.partial(jax.jit, static_argnums=1)
def has_flag(outcome: Array, flag: int) -> Array:
    """Return whether an outcome contains a flag, or any of several flags."""
    return outcome & int(flag) != 0
