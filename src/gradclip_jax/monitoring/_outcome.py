"""What became of a step, from the states before and after it, and from its norms."""

import jax.numpy as jnp
import numpy as np

from .._run_if import Flag
from .._states import find_role, has_stepped
from .._types import Array, Scalar, Tree
from ._metrics import clip_factors
from ._rows import Outcome

_COUNTERS = {
    "skipped_nonfinite": Outcome.SKIPPED | Outcome.SKIPPED_NONFINITE,
    "skipped_large_norm": Outcome.SKIPPED | Outcome.SKIPPED_LARGE_NORM,
    "skipped_large_loss": Outcome.SKIPPED | Outcome.SKIPPED_LARGE_LOSS,
    "skipped_other": Outcome.SKIPPED,
    "empty_windows": Outcome.EMPTY_WINDOW,
}
"""Counters in states of guards and accumulations, and the meaning of an increment."""

_LIMITS = {
    "skip_threshold": ("skipped_large_norm", Outcome.HAS_NORM_LIMIT),
    "loss_threshold": ("skipped_large_loss", Outcome.HAS_LOSS_LIMIT),
}
"""Thresholds of guards, in the order of `Rows.limits`, and their counters."""

_IS_OF_STEP, _IS_OF_UPDATE = np.array([[[False, True, True, False]], [[False, True, False, False]]])
"""The columns of `measure` that a call without a gradient has, and that of the update."""


def flag_if(flag: int, is_set: Flag) -> Scalar:
    """Return a flag of `Outcome` where the condition is true, else 0."""
    return jnp.where(is_set, int(flag), 0)


def compare_states(before: Tree, after: Tree) -> tuple[Scalar, list[Scalar | int], list[Scalar]]:
    """Compare the states of guards and accumulations before and after a step.

    Return what happened, the thresholds of the guard that skipped, or else of the outermost, and
    the factors of all clips.
    """
    outcome, limits = flag_if(Outcome.APPLIED, has_stepped(after)), {}
    roles = "guard", "loss scale", "accumulation"
    pairs = zip(*(find_role(x, *roles) for x in (before, after)), strict=True)
    for (_, old), (_, new) in pairs:
        outcome |= flag_if(Outcome.GUARD_FAILED, getattr(new, "guard_failed", 0) > 0)
        for name, flag in _COUNTERS.items():
            if getattr(new, name, None) is not None:  # a guard may check only the norm
                outcome |= flag_if(flag, getattr(new, name) > getattr(old, name))
        for name, (counter, flag) in _LIMITS.items():
            limit = getattr(new, name, None)
            if limit is not None:
                has_skipped = getattr(new, counter) > getattr(old, counter)
                limits[name] = jnp.where(has_skipped, limit, limits.get(name, limit))
                outcome |= int(flag)
    factors = list(clip_factors(after).values())
    for factor in factors:
        outcome |= flag_if(Outcome.CLIPPED, factor < 1)
    return outcome, [limits.get(name, 0) for name in _LIMITS], factors


def compare_norms(outcome: Scalar, table: Array) -> tuple[Scalar, Array]:
    """Determine from the norms of a step what became of it; clear norms that were not measured."""
    ran, has_skipped = outcome & Outcome.APPLIED != 0, outcome & Outcome.SKIPPED != 0
    # An update of zero does not change a non-finite parameter.
    table = jnp.where(ran | jnp.isfinite(table) | ~_IS_OF_UPDATE, table, 0)
    table = jnp.where((outcome & Outcome.HAS_GRADIENT != 0) | _IS_OF_STEP, table, 0)
    has_changed = table[0, 1] != 0
    has_no_update = outcome & Outcome.HAS_UPDATE == 0
    # With `optax.partition`, some parameters may change although others are held.
    outcome |= flag_if(Outcome.APPLIED, has_changed)
    outcome |= flag_if(Outcome.UNCHANGED, ran & (table[0, 0] != 0) & ~(has_changed | has_no_update))
    outcome |= flag_if(Outcome.HELD, ~(ran | has_changed | has_skipped))
    was_applied = has_changed | (ran & has_no_update)
    return outcome & ~flag_if(Outcome.CLIPPED, ~was_applied), table
