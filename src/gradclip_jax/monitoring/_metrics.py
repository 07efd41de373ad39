"""Every scalar that the states of this package report, from any nested Optax state."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._checks import check_no_transformation
from .._errors import public
from .._states import GATES, METRICS, find_states, has_updated, is_guard, plain_arrays
from .._types import Array
from ._incident import IncidentLog
from ._watch import NOT_MEASURED, WatchState


@public
def metrics(state: Any) -> dict[str, Array]:
    """Collects the scalars to log from an optimizer state, however it is nested.

    The numbers are from the pass that clipped or guarded. The keys depend
    on the structure of the state alone, so they are the same at every step, from `init` on.

    | key | meaning |
    | --- | --- |
    | `grad_norm` | before clipping, in the unit of the gradients |
    | `clip_threshold`, `clip_factor` | the smallest of all units |
    | `clip_fraction` | the fraction of units that were clipped |
    | `mini_step`, `gradient_step` | of the accumulation |
    | `loss_scale` | what the gradient of the next loss is multiplied by |
    | `skip_threshold`, `loss`, `loss_threshold` | of a guard against spikes |
    | `update_norm`, `update_threshold` | of one that watches the update |
    | `skipped_nonfinite`, `skipped_large_norm` | counts |
    | `skipped_large_loss`, `skipped_large_update` | counts |
    | `consecutive_skips` | skips since the last step that was taken |
    | `guard_failed` | 1 if the limit of skips, or of the loss scale, was ever reached, else 0 |
    | `gradient_noise_scale` | in micro-batches, or in the unit of the weights |
    | `nonfinite_norms` | steps of which `record_norms` saw a norm that is not finite |
    | `gradient_norm`, `update_norm`, `parameter_norm`, `update_ratio` | of `watch`, also by unit |
    | | -1 where the last call measured nothing |
    | `largest_share`, `largest_share_index` | of a unit in the squared gradient norm, and which |
    | `taps/<name>/rms` and so on | of the taps whose statistics `watch` got; see `taps.metrics` |
    | `watch_step`, `has_updated` | calls of `watch`; whether the last changed the parameters |
    | `incident_count`, `incident_step`, `incident_kind` | how many, and the last: see `incidents` |

    A name that occurs once is its own key. If it occurs more often, each has the path in the state
    appended, as in `grad_norm/inner_opt_state/0`; guards are left out of the paths of all else, so
    a key stays what it is when a guard is put around. A clip by groups appends the label of the
    group, as in `grad_norm/body`.

    | the plain key, if a name occurs more often | |
    | --- | --- |
    | `skipped_nonfinite`, `skipped_large_norm`, `skipped_large_loss` | the sum over guards |
    | `consecutive_skips` | the largest of all guards |
    | `guard_failed` | 1 if any has failed |
    | what guards and one other state report, as a clip `grad_norm` | that of the other |
    | what guards alone report, as `grad_norm` | that of the outermost |
    | what several others report, as two clips `grad_norm` | none |

    Args:
        state: any pytree that contains optimizer states, such as the state of `optax.chain`,
            `masked`, `partition`, `inject_hyperparams` or of a foreign wrapper, or a train state.

    Returns:
        Name to scalar, sorted; empty if the state contains no state of this package.

    Raises:
        TypeError: `state` is a transformation, not the state of one.

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
    check_no_transformation(state)
    states = find_states(state, tuple(METRICS))
    guards = {path for path, node in states if is_guard(node)}
    gates = [(path, node) for path, node in states if type(node) in GATES]
    by_name: dict[str, list[tuple[str, bool, Any]]] = {}
    for path, node in states:
        if isinstance(node, WatchState):
            node = _if_measured(node, [gate for at, gate in gates if path[: len(at)] == at])
        # The place of what is no guard stays what it was when a guard is put around it.
        if not is_guard(node) and not isinstance(node, IncidentLog):
            path = tuple(key for i, key in enumerate(path) if path[:i] not in guards)
        place = jax.tree_util.keystr(path, simple=True, separator="/")
        kind = next(kind for kind in type(node).__mro__ if kind in METRICS)
        for name in METRICS[kind]:
            value = getattr(node, name)
            if value is not None:  # a guard that does not watch the loss has none to report
                by_name.setdefault(name, []).append((place, is_guard(node), value))
    out: dict[str, Array] = {}
    for name, entries in by_name.items():
        # A guard leaves the plain key to what reports the same without being a guard.
        plain = [value for _, guards_it, value in entries if not guards_it] or [
            _of_all_guards(name, [jnp.asarray(value) for _, _, value in entries])
        ]
        if len(plain) == 1:
            out |= _with_groups(name, plain[0])
        if len(entries) > 1:
            for place, _, value in entries:
                out |= _with_groups(f"{name}/{place or 'outermost'}", value)
    return dict(sorted(out.items()))


def _if_measured(watched: WatchState, gates: Sequence[Any]) -> WatchState:
    """The state of a `watch` inside gates, with norms of -1 if the last call did not reach it."""
    for gate in gates:
        stepped = has_updated(gate._replace(**{GATES[type(gate)]: ()}))
        norms = {
            kind: jnp.where(jnp.expand_dims(stepped, -1), x, NOT_MEASURED)
            for kind, x in plain_arrays(watched.norms).items()
        }
        watched = watched._replace(norms=norms)
        if watched.tap_sums is not None:
            stepped = jnp.expand_dims(stepped, (-3, -2, -1))
            sums = jnp.where(stepped, plain_arrays(watched.tap_sums), 0)
            watched = watched._replace(tap_sums=sums)
    return watched


def _of_all_guards(name: str, values: list[Array]) -> Array:
    """One number for all guards: whether any failed, the longest streak, the sum of skips."""
    if name in ("guard_failed", "consecutive_skips"):
        return functools.reduce(jnp.maximum, values)
    return functools.reduce(jnp.add, values) if name.startswith("skipped_") else values[0]


def _with_groups(key: str, value: Any) -> dict[str, Array]:
    """The entry, or those of a clip by groups."""
    if isinstance(value, dict):
        # None stands for all groups together.
        return {f"{key}/{group}" if group else key: jnp.asarray(x) for group, x in value.items()}
    return {key: jnp.asarray(value)}
