"""Every scalar that the states of this package report, from any nested Optax state."""

from typing import Any

import jax
import jax.numpy as jnp

from .._states import METRICS, find_states
from .._types import Array


def metrics(state: Any) -> dict[str, Array]:
    """Collects the scalars to log from an optimizer state, however it is nested.

    Nothing is computed: the numbers are from the pass that clipped or guarded. The keys depend
    on the structure of the state alone, so they are the same at every step, from `init` on.

    | key | meaning |
    | --- | --- |
    | `grad_norm` | before clipping, in the unit of the gradients |
    | `clip_threshold`, `clip_factor` | the smallest of all units |
    | `clip_fraction` | the fraction of units that were clipped |
    | `mini_step`, `gradient_step` | of the accumulation |
    | `skip_threshold`, `loss`, `loss_threshold` | of a guard against spikes |
    | `loss_scale` | what the gradient of the next loss is multiplied by |
    | `skipped_nonfinite`, `skipped_large_norm`, `skipped_large_loss` | counts |
    | `consecutive_skips` | skips since the last step that was taken |
    | `guard_failed` | whether the limit of skips, or of the loss scale, was ever reached |
    | `gradient_noise_scale` | in micro-batches, or in the unit of the weights |
    | `nonfinite_norms` | steps that `record_norms` left out |

    A name that occurs once is its own key. If it occurs more often, the path in the state is
    appended, as in `grad_norm/inner_opt_state/0`, except for a state that is not nested. A clip
    by groups appends the label of the group, as in `grad_norm/body`.

    Args:
        state: any pytree that contains optimizer states, such as the state of `optax.chain`,
            `masked`, `partition`, `inject_hyperparams` or of a foreign wrapper, or a train state.

    Returns:
        Name to scalar, sorted; empty if the state contains no state of this package.

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
    by_name: dict[str, list[tuple[str, Any]]] = {}
    for path, found in find_states(state, tuple(METRICS)):
        place = jax.tree_util.keystr(path, simple=True, separator="/")
        kind = next(kind for kind in type(found).__mro__ if kind in METRICS)
        for name in METRICS[kind]:
            value = getattr(found, name)
            if value is not None:  # a guard that does not watch the loss has none to report
                by_name.setdefault(name, []).append((place, value))
    out: dict[str, Array] = {}
    for name, entries in by_name.items():
        for place, value in entries:
            key = name if len(entries) == 1 or not place else f"{name}/{place}"
            groups = value.items() if isinstance(value, dict) else [(None, value)]
            for group, scalar in groups:
                out[key if group is None else f"{key}/{group}"] = jnp.asarray(scalar)
    return dict(sorted(out.items()))
