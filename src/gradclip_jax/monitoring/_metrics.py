"""Collect metrics from nested optimizer states."""

import functools

import jax
import jax.numpy as jnp

from .._checks import check_no_transformation
from .._errors import public
from .._states import KINDS, find_states, kind_of, plain_arrays
from .._types import Array, Tree


@public
def metrics(state: Tree) -> dict[str, Array]:
    """Collect metrics for logging from a nested optimizer state.

    All values are read from the states without recomputing them. The keys depend only on the
    structure of the state and are the same at every step.

    | key | meaning |
    | --- | --- |
    | `grad_norm` | gradient norm before clipping |
    | `clip_threshold`, `clip_factor` | smallest threshold and factor of all units |
    | `clip_fraction` | fraction of units that were clipped |
    | `mini_step`, `gradient_step` | counters of the accumulation |
    | `empty_windows` | number of windows that closed without weight |
    | `loss_scale` | factor of the next loss |
    | `skip_threshold`, `loss_threshold` | thresholds of `skip_spikes` |
    | `skipped_nonfinite`, `skipped_large_norm` | skipped steps by cause |
    | `skipped_large_loss` | number of skipped steps by cause |
    | `skipped_other` | number of steps that `skip_if` skipped |
    | `consecutive_skips` | number of steps without an applied update since the last one |
    | `guard_failed` | 1 if a limit of skipped steps or of the loss scale was ever reached, else 0 |
    | `gradient_norm`, `update_norm`, `parameter_norm` | norms in the last call of `watch` |
    | `update_ratio` | ratio of the update norm to the parameter norm |
    | `nonfinite_elements` | number of non-finite elements of the gradient |
    | `watch_step` | index of this call |

    Metrics of `watch` are 0 if not measured. A `Monitor` reads the norms of each leaf or layer.

    If several states have the same metric, the path of the state is appended to the key, as in
    `grad_norm/inner_opt_state/0`. Guards are omitted from the path, so that wrapping a
    transformation in a guard such as `skip_nonfinite` does not change its keys. When clipping by
    group, the group label is appended to the key, as in `grad_norm/body`.

    | key without a path, if several states have the metric | value |
    | --- | --- |
    | `skipped_nonfinite`, `skipped_large_norm`, `skipped_large_loss` | sum over all guards |
    | `consecutive_skips` | largest value of all guards |
    | `guard_failed` | 1 if any has failed |
    | `grad_norm` | of the outermost guard; without one, of the outermost clip, if it receives all |
    | | leaves; inside a loss scale after division by the scale |
    | a metric of guards only | of the outermost guard |
    | a metric of several other states, such as the `clip_factor` of two clips | no such key |

    Args:
        state: Pytree that contains optimizer states, such as a train state or the state of
            `optax.chain`, `masked`, `partition`, `inject_hyperparams` or another wrapper.

    Returns:
        Dictionary of scalars, sorted by name; empty if no state of this package is found.

    Raises:
        TypeError: If `state` is a gradient transformation instead of its state.

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
    states = find_states(plain_arrays(state), tuple(KINDS))
    guards = {path for path, node in states if kind_of(node).is_guard}
    by_name: dict[str, list[tuple[str, bool, Tree]]] = {}
    for path, node in states:
        kind = kind_of(node)
        if not kind.is_guard:  # so that adding a guard does not change other keys
            path = tuple(key for i, key in enumerate(path) if path[:i] not in guards)
        place = jax.tree_util.keystr(path, simple=True, separator="/") or "outermost"
        for name in kind.metrics:
            value = getattr(node, name)
            if value is not None:  # metrics of the loss are None without a threshold for it
                by_name.setdefault(name, []).append((place, kind.is_guard, value))
    out: dict[str, Array] = {}
    for name, entries in by_name.items():
        of_guards, others = (
            [x for _, y, x in entries if y == is_guard] for is_guard in (True, False)
        )
        values = [(f"{name}/{place}", x) for place, _, x in entries] if len(entries) > 1 else []
        if name == "grad_norm" and (of_guards or not any("inner_states" in x for x, *_ in entries)):
            values.append((name, [*of_guards, *others][0]))
        elif len(others) < 2:
            values.append((name, others[0] if others else _of_all_guards(name, of_guards)))
        for key, value in values:
            # When clipping by group, the key None contains the combined value of all groups.
            groups = value if isinstance(value, dict) else {None: value}
            out |= {key if x is None else f"{key}/{x}": y for x, y in groups.items()}
    return {key: jnp.asarray(out[key]) for key in sorted(out)}


def clip_factors(state: Tree) -> dict[str, Array]:
    """Return the factors of all clips and groups in a state by their keys in `metrics`."""
    return {k: x for k, x in metrics(state).items() if k.partition("/")[0] == "clip_factor"}


def _of_all_guards(name: str, values: list[Array]) -> Array:
    """Combine a metric of all guards: the maximum, the sum, or that of the outermost."""
    if name in ("guard_failed", "consecutive_skips"):
        return functools.reduce(jnp.maximum, values)
    return sum(values[1:], values[0]) if name.startswith("skipped_") else values[0]
