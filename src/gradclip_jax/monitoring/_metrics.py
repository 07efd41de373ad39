"""Every scalar that the states of this package have to tell, from any nested Optax state."""

from typing import Any

import jax
import jax.numpy as jnp

from .._states import find_states
from .._types import Array
from ..accumulation._noise import NoiseState, gradient_noise_scale
from ..accumulation._state import AccumulationState
from ..clipping._step import ClipState
from ..guarding._skip_nonfinite import SkipNonfiniteState
from ..guarding._skip_spikes import SkipSpikesState
from ._record import NormRecordState

_FIELDS: dict[type, tuple[str, ...]] = {
    ClipState: ("grad_norm", "clip_threshold", "clip_factor", "clip_fraction"),
    AccumulationState: ("mini_step", "gradient_step"),
    SkipNonfiniteState: ("skipped_nonfinite", "consecutive_skips", "guard_failed"),
    SkipSpikesState: (
        "grad_norm",
        "skip_threshold",
        "skipped_large_norm",
        "loss",
        "loss_threshold",
        "skipped_large_loss",
        "skipped_nonfinite",
        "consecutive_skips",
        "guard_failed",
    ),
    NormRecordState: ("nonfinite_norms",),
    NoiseState: ("gradient_noise_scale",),
}


def metrics(state: Any) -> dict[str, Array]:
    """Collects what there is to log from an optimizer state, however it is nested.

    Nothing is computed: the numbers are from the pass that clipped or guarded. The keys depend
    on the structure of the state alone, so they are the same at every step, from `init` on.

    | key | meaning |
    | --- | --- |
    | `grad_norm` | before clipping, in the unit of the gradients |
    | `clip_threshold`, `clip_factor`, `clip_fraction` | the smallest of the units; a fraction |
    | `mini_step`, `gradient_step` | of the accumulation |
    | `skip_threshold`, `loss`, `loss_threshold` | of a guard against spikes |
    | `skipped_nonfinite`, `skipped_large_norm`, `skipped_large_loss`, `consecutive_skips` | counts |
    | `guard_failed` | whether the limit of consecutive skips was ever reached |
    | `gradient_noise_scale` | in micro-batches, or in the unit of the weights |
    | `nonfinite_norms` | steps that `record_norms` left out |

    A name that occurs once is its own key. Where it occurs twice, each key carries the place in
    the state, as `grad_norm/inner_opt_state/0`, the outermost
    none; one of several groups, its label, as `grad_norm/body`.

    Args:
        state: any pytree that holds optimizer states: that of `optax.chain`, `masked`,
            `partition`, `inject_hyperparams`, of a wrapper unknown here, or a train state.

    Returns:
        Name to scalar, sorted; empty if no state of this package is found.

    Examples:
        >>> import jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = optax.chain(gcx.clip_by_global_norm(1.0), optax.adam(1e-3))
        >>> params = jnp.array([3.0, 4.0])
        >>> _, state = tx.update(params, tx.init(params), params)
        >>> sorted(gcx.metrics(state))
        ['clip_factor', 'clip_fraction', 'clip_threshold', 'grad_norm']
        >>> float(gcx.metrics(state)["grad_norm"])
        5.0
    """
    told: dict[str, list[tuple[Any, Any]]] = {}
    for path, found in find_states(state, tuple(_FIELDS)):
        for name in _FIELDS[type(found)]:
            value = _value(found, name)
            if value is not None:
                told.setdefault(name, []).append((path, value))
    out: dict[str, Array] = {}
    for name, places in told.items():
        for path, value in places:
            place = jax.tree_util.keystr(path, simple=True, separator="/")
            key = name if len(places) == 1 or not place else f"{name}/{place}"
            if isinstance(value, dict):
                out.update({f"{key}/{group}": jnp.asarray(x) for group, x in value.items()})
            else:
                out[key] = jnp.asarray(value)
    return dict(sorted(out.items()))


def _value(state: Any, name: str) -> Any:
    return gradient_noise_scale(state) if isinstance(state, NoiseState) else getattr(state, name)
