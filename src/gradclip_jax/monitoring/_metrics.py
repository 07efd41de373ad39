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
    | `grad_norm` | gradient norm before clipping; inside a loss scale after division by the scale |
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
    | `nonfinite_elements` | number of non-finite elements of the gradient in this call |

    Metrics of `watch` are 0 if not measured. A `Monitor` reads the norms of each leaf or layer.

    If several states have the same metric, the path of the state is appended to the key, as in
    `clip_factor/0` and `clip_factor/2` for two clips in a chain. When clipping by group, the group
    label is appended to the key, as in `grad_norm/body`. If guards are among these states, the key
    without a path combines all guards. Without a guard, `grad_norm` is that of the outermost clip.

    | key | value for several guards |
    | --- | --- |
    | `skipped_nonfinite` and other numbers of skipped steps | sum |
    | `consecutive_skips`, `guard_failed` | maximum |
    | `skip_threshold`, `loss_threshold` | minimum |
    | all others, such as `grad_norm` | value of the outermost guard |

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
    by_name: dict[str, list[tuple[str, bool, Tree]]] = {}
    for path, node in find_states(plain_arrays(state), tuple(KINDS)):
        place, kind = jax.tree_util.keystr(path, simple=True, separator="/"), kind_of(node)
        for name in kind.metrics:
            if (value := getattr(node, name)) is not None:  # a guard may check only the norm
                by_name.setdefault(name, []).append((place, kind.is_guard, value))
    out: dict[str, Tree] = {}
    for name, entries in by_name.items():
        guards = [x for _, is_guard, x in entries if is_guard]
        if len(entries) > 1:
            out |= {f"{name}/{place}".removesuffix("/"): x for place, _, x in entries}
        first, _, value = entries[0]
        is_of_all = name == "grad_norm" and "inner_states" not in first  # not of `partition`
        if guards or len(entries) == 1 or is_of_all:
            out[name] = _combined(name, guards or [value])
    for key, groups in list(out.items()):
        if isinstance(groups, dict):
            out |= {f"{key}/{label}": x for label, x in out.pop(key).items()}
    return {key: jnp.asarray(out[key]) for key in sorted(out)}


def _combined(name: str, values: list[Array]) -> Array:
    """Combine a metric of all guards, from the outermost to the innermost."""
    if name.startswith("skipped_"):
        return sum(values[1:], values[0])
    if name in ("consecutive_skips", "guard_failed"):
        return functools.reduce(jnp.maximum, values)
    return functools.reduce(jnp.minimum, values) if name.endswith("threshold") else values[0]
