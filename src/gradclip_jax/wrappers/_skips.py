"""Skip flags, in lists with one entry for each guard.

| value | meaning |
| --- | --- |
| int32[] with `CallOutcome.SKIPPED` and the flags of the causes | the guard skips |
| int32[] of 0 | the guard does not skip |
| the Python number 0 | the guard checks nothing, and no branch is compiled |
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import TypeAlias

import jax.numpy as jnp

from .._types import Array, Scalar
from ._guard import Rejections
from ._state import CallOutcome

SkipFlags: TypeAlias = Array | int


def skip_flags(rejections: Rejections) -> SkipFlags:
    """Combine the flags of all causes for which a guard rejects; 0 if there are none."""
    flags = (
        flag_where(CallOutcome.SKIPPED | CallOutcome.of_cause(cause), is_rejected)
        for cause, is_rejected in rejections.items()
    )
    return functools.reduce(operator.or_, flags, 0)


def first_skip(skips: Sequence[SkipFlags]) -> list[SkipFlags]:
    """Keep the flags of the first guard that skips, and set the flags of later guards to 0."""
    kept: list[SkipFlags] = []
    for skip in skips:
        is_first = is_accepted_by_all(kept)
        # Flags that are known at trace time stay known.
        is_known = is_first is True or isinstance(skip, int)
        kept.append(skip if is_known else jnp.where(is_first, skip, 0))
    return kept


def is_accepted_by_all(skips: Sequence[SkipFlags]) -> Scalar | bool:
    """Return whether no guard skips; the Python bool True if no guard checks anything."""
    return functools.reduce(operator.or_, skips, 0) == 0


def flag_where(flag: CallOutcome, is_set: Scalar | bool) -> Array:
    """Return the bits of a flag where it is set, and 0 elsewhere."""
    return jnp.where(is_set, jnp.int32(int(flag)), 0)
