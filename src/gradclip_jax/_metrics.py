"""Metrics of all gradclip_jax states in an optimizer state."""

import functools
from collections.abc import Iterator, Sequence
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from ._clip_order import check_clip_order
from ._errors import public
from ._states import check_optimizer_state, own_states, plain_arrays
from ._types import Array, Path, Tree


@public
def metrics(state: Tree) -> dict[str, Array]:
    """Collect metrics for logging from a nested optimizer state.

    All values are read from the states without recomputing them. The keys depend only on the
    structure of the state and are the same at every step.

    | key | meaning |
    | --- | --- |
    | `grad_norm` | norm of the gradient that the outermost `watch`, guard or clip received, |
    | | after division by the loss scale |
    | `clip_threshold`, `clip_factor` | smallest threshold and factor of all norm groups |
    | `clip_fraction` | fraction of norm groups that were clipped |
    | `mini_step`, `gradient_step` | counters of the accumulation |
    | `empty_windows` | number of windows that closed with a total weight of zero |
    | `loss_scale` | factor of the next loss |
    | `skip_threshold`, `loss_threshold` | smallest thresholds of `skip_spikes` |
    | `skipped_nonfinite`, `skipped_large_norm` | numbers of skipped steps by cause |
    | `skipped_large_loss` | number of steps that `skip_spikes` skipped because of the loss |
    | `skipped_other` | number of steps that `skip_if` skipped |
    | `consecutive_skips` | number of consecutive skipped steps; only accumulating does not count |
    | `guard_failed` | 1 if a limit of skipped steps or of the loss scale was ever reached, else 0 |
    | `update_norm`, `parameter_norm` | norms in the last call of `watch` |
    | `nonfinite_elements` | number of non-finite elements of the gradient in this call |

    Metrics of `watch` are 0 if not measured. A `Monitor` reads the norms of each leaf or layer.

    Directly nested guards share one state and one count of skips. The keys of a metric depend on
    how many states contain the metric:

    | states | keys |
    | --- | --- |
    | one | its name, such as `clip_factor` |
    | several, as in a chain of two clips | one key with the path of each state, such as |
    | | `clip_factor/0` and `clip_factor/2` |
    | several, and `state` itself is one of them | the key of `state` itself has no path |
    | several, for a count of skips | also the key without a path, for the sum |
    | several, for `consecutive_skips` and `guard_failed` | the same, for the maximum |
    | several, for `skip_threshold` and `loss_threshold` | the same, for the minimum |
    | several, for `grad_norm` | only that of the outermost state, and of the outermost state in |
    | | each group of `optax.partition`, such as `grad_norm/body` |

    When clipping by group, the label is appended in the same way.

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
    check_optimizer_state(state)
    return collect_metrics(plain_arrays(state))


def collect_metrics(state: Tree) -> dict[str, Array]:
    """Implement `metrics` for an optimizer state whose leaves are arrays."""
    entries: dict[str, list[tuple[Path, Array]]] = {}
    for path, name, value in own_metrics(state):
        entries.setdefault(name, []).append((path, value))
    if "loss_scale" in entries:
        check_clip_order(state, raises=False)
    out: dict[str, Array] = {}
    for name, found in entries.items():
        out |= _outermost_norms(found) if name == "grad_norm" else _keyed_by_path(name, found)
    return {key: jnp.asarray(out[key]) for key in sorted(out)}


def own_metrics(state: Tree) -> Iterator[tuple[Path, str, Array]]:
    """Yield `(path, name, value)` for every metric of every state of this package."""
    for path, node in own_states(state):
        for name, value in node.step_metrics().items():
            yield path, name, value


def metric_names(state: Tree) -> set[str]:
    """Return the names of all metrics in a state."""
    return {name for _, name, _ in own_metrics(state)}


def _outermost_norms(found: Sequence[tuple[Path, Array]]) -> dict[str, Array]:
    """Return the gradient norm of the outermost state, and of each group of `optax.partition`.

    `found` contains pairs of a path and a norm, from the outermost to the innermost state.
    """
    norms: dict[str, Array] = {}
    for path, norm in found:
        label = _partition_label(path)
        norms.setdefault("grad_norm" if label is None else f"grad_norm/{label}", norm)
    return norms if len(norms) > 1 else {"grad_norm": found[0][1]}


def _partition_label(path: Path) -> str | None:
    """Return the label of the outermost group of `optax.partition` on a path, or None."""
    groups = jax.tree_util.GetAttrKey("inner_states")  # a dictionary by label
    if groups not in path:
        return None
    return jax.tree_util.keystr((path[path.index(groups) + 1],), simple=True)


def _keyed_by_path(name: str, found: Sequence[tuple[Path, Array]]) -> dict[str, Array]:
    """Return the value of a metric for each path if there are several, and the combined value."""
    out: dict[str, Array] = {}
    if len(found) > 1:
        for path, value in found:
            if path:
                out[f"{name}/{jax.tree_util.keystr(path, simple=True, separator='/')}"] = value
    has_outermost = found[0][0] == ()  # this state contains the others
    if name in _COMBINE or len(found) == 1 or has_outermost:
        out[name] = combined(name, [value for _, value in found])
    return out


def combined(name: str, values: Sequence[Array]) -> Array:
    """Combine the values of a metric in several guards; for other metrics, return the first one."""
    return functools.reduce(_COMBINE[name], values) if name in _COMBINE else values[0]


@jax.jit  # outside jit, the constant would be transferred to the device
def _saturating_sum(x: Array, y: Array) -> Array:
    """Add two counts, whose sum is at most the largest int32."""
    return x + jnp.minimum(y, np.iinfo(np.int32).max - x)


_COMBINE: Final = {
    "consecutive_skips": jnp.maximum,
    "guard_failed": jnp.maximum,
    "skip_threshold": jnp.minimum,
    "loss_threshold": jnp.minimum,
    "skipped_nonfinite": _saturating_sum,
    "skipped_large_norm": _saturating_sum,
    "skipped_large_loss": _saturating_sum,
    "skipped_other": _saturating_sum,
}
"""How the values of a metric in several states are combined; other metrics are not combined."""
