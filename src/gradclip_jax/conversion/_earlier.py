"""Convert states of an earlier version of this package, in which each guard had its own state.

In that version, an accumulation had its own state as well, and the names of rules were not stored.
To remove these conversions, delete this module and the uses of its two public names.
"""

from collections.abc import Callable
from typing import Any, Final

import jax

from .._states import with_structure_of
from .._types import Tree
from .._weighted_sum import WeightedSum
from ..guarding._loss_scale import LossScaleState
from ..guarding._skip_spikes import SpikeState
from ..wrappers._accumulation import AccumulationState
from ..wrappers._state import GuardState, WrapperState
from ._partial import accumulation, guard


def _from_accumulation(old: Any) -> WrapperState:
    """Convert the state of `accumulate_gradients`."""
    window = AccumulationState(
        mini_step=old.mini_step,
        gradient_step=old.gradient_step,
        accumulation_steps=old.accumulation_steps,
        micro_batch_count=old.micro_batch_count,
        empty_windows=old.empty_windows,
        gradient=WeightedSum(total=old.acc_grads, weight=old.total_weight),
        loss=WeightedSum(total=old.loss_sum, weight=old.loss_weight),
    )
    return accumulation(window, old.inner_opt_state)


def _from_guard(old: Any) -> WrapperState:
    """Convert the state of a guard, which contained the counts and the fields of its rule."""
    fields = {name: value for name, value in old._asdict().items() if value is not None}
    skipped = {
        name.removeprefix("skipped_"): count
        for name, count in fields.items()
        if name.startswith("skipped_")
    }
    rule_state = fields.get("rule_state", ())  # of `skip_if`
    if "loss_scale" in fields:
        rule_state = LossScaleState(old.loss_scale, old.good_steps)
    if "rule_states" in fields:  # of `skip_spikes`, where thresholds that are None are omitted
        names = {"skip_threshold": "norm", "loss_threshold": "loss"}
        thresholds = {names[name]: x for name, x in fields.items() if name in names}
        rule_state = SpikeState(thresholds, old.rule_states)
    return guard(
        GuardState(skipped, rule_state),
        old.inner_state,
        consecutive_skips=old.consecutive_skips,
        guard_failed=old.guard_failed,
        grad_norm=old.grad_norm,
    )


EARLIER_CONVERSIONS: Final[dict[frozenset[str], Callable[[Any], WrapperState]]] = {
    frozenset({"acc_grads", "total_weight"}): _from_accumulation,
    frozenset({"grad_norm", "guard_failed", "inner_state"}): _from_guard,
}
"""A mapping from names of fields that identify a type of state to its conversion."""


def with_rule_names(like: Tree, state: Tree) -> Tree:
    """Add the names of rules to the state of a clip or guard.

    If the paths of the old state are those of `like`, except that the key with the name of the rule
    may be missing, its arrays are put into the structure of `like`. Other states are returned
    unchanged.
    """
    paths = [[path for path, _ in jax.tree.leaves_with_path(x)] for x in (like, state)]

    def is_without_one_key(new: Any, old: Any) -> bool:
        return new == old or any(old == (*new[:i], *new[i + 1 :]) for i in range(len(new)))

    if len(paths[0]) == len(paths[1]) and all(map(is_without_one_key, *paths)):
        return with_structure_of(like, state)
    return state
