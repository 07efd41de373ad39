"""On the host: what happened in a run, its log in numbers, and where to look for the cause."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import check_count, dtype_of, is_float0, refuse_traced
from .._errors import public, type_error, value_error
from .._states import find_states, plain_arrays
from ..clipping._incident import Incident, IncidentLog, names_in, read_log
from ..clipping._norm import global_norm, measured_leaves
from ._watch import WatchState


@public
def incidents(state: Any) -> list[Incident]:
    """Returns the last incidents that `watch`, a guard or a clip kept, the oldest first.

    Each is a record, and printed a sentence: "step 1203: skipped, gradient norm 3.1e5 above 4.2;
    97 % of it in decoder/layers_7/mlp/wi; loss 3.2, usual". It waits for the values.

    | kind | flag in the metric `incident_kind` | what it says |
    | --- | --- | --- |
    | "nan", "infinity" | 1, 2 | the gradient norm is not finite |
    | "norm", "loss" | 4, 8 | a spike; a loss also where it is not finite |
    | "update" | 16 | nothing of these, but the step: its update or next state is not finite, its |
    | | | update is a spike, a square of the gradient overflows, or its weight is not finite |
    | "skipped", "held", "clipped" | 32, 64, 128 | what became of the step |
    | "leaf" | 256 | a leaf, or what else the unit is, has risen far beside the others; `watch` |

    `watch` keeps incidents of all that is inside it. Without one, guards and clips built with
    `incidents=16` keep their own: what they refused, and what they clipped.

    Args:
        state: the state of an optimizer, or any state that contains it. The first `watch` in it is
            read, or else all guards and clips that keep incidents, in the order of their steps.

    Returns:
        At most as many as are kept. The step of a clip inside a guard counts the steps that the
        guard lets through.

    Raises:
        TypeError: nothing in the state keeps incidents, or it is traced.
        ValueError: the state was vmapped.

    Examples:
        >>> import jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = gcx.watch(gcx.skip_large_norm(optax.sgd(0.1), 4.0))
        >>> params = {"wi": jnp.ones(2), "wo": jnp.ones(2)}
        >>> grads = {"wi": jnp.array([30.0, 40.0]), "wo": jnp.array([0.5, 0.5])}
        >>> _, state = tx.update(grads, tx.init(params), params)
        >>> print(gcx.incidents(state)[-1])
        step 0: skipped, gradient norm 50 above 4; 100 % of it in wi
    """
    records: list[Incident] = []
    for log in plain_arrays(_logs(state)):
        refuse_traced("state", log.rows)
        if np.ndim(log.rows) > 2:
            rule, hint = "of one run", "Of seed i pass `jax.tree.map(lambda x: x[i], state)`."
            got = f"one that was vmapped over {len(log.rows)}"
            raise value_error("state", rule, got, hint)
        records += read_log(log)
    return sorted(records, key=lambda record: record.step)


@public
def unit_names(state: Any) -> list[str]:
    """Names the units that `watch` measures, in the order of `largest_share_index`.

    Args:
        state: the state of `watch`, or any state that contains it, or one of a guard or a clip that
            keeps incidents. Of several the first is read.

    Returns:
        The names, such as `decoder/layers_3/mlp/wi`; none for `granularity="global"`.

    Raises:
        TypeError: nothing in the state keeps incidents.

    Examples:
        >>> import jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = gcx.watch(optax.sgd(0.1), granularity=gcx.granularities.layer({"h": 1, "out": 0}))
        >>> params = {"h": {"wi": jnp.ones((2, 3)), "wo": jnp.ones((2, 3))}, "out": jnp.ones(2)}
        >>> gcx.diagnostics.unit_names(tx.init(params))
        ['h_0/wi', 'h_1/wi', 'h_0/wo', 'h_1/wo', 'out']
    """
    return names_in(_logs(state)[0])


def _logs(state: Any) -> list[IncidentLog]:
    """That of the first watch, or else those of all guards and clips."""
    watches = find_states(state, WatchState)
    logs = [watches[0][1].incidents] if watches else [x for _, x in find_states(state, IncidentLog)]
    if not logs:
        rule, hint = "a state that keeps incidents", "Put `gcx.watch` around the optimizer."
        raise type_error("state", rule, type(state).__name__, hint)
    return logs


@public
def nonfinite_leaves(tree: Any) -> dict[str, int]:
    """Counts the NaN and infinite elements of each leaf that has any.

    Call it outside jit when `guard_failed` becomes True, on gradients, parameters or a whole
    optimizer state. It waits for the values.

    Args:
        tree: any pytree of arrays; integer leaves are finite.

    Returns:
        Path to number of bad elements, the largest number first; empty if all are finite.

    Raises:
        TypeError: called inside jit.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> gcx.diagnostics.nonfinite_leaves(
        ...     {"w": jnp.array([1.0, jnp.nan, jnp.inf]), "b": jnp.zeros(3)}
        ... )
        {"['w']": 2}
    """
    counts: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        refuse_traced("tree", leaf)
        if not is_float0(leaf) and jnp.issubdtype(dtype_of(leaf), jnp.inexact):
            bad = int(jnp.sum(~jnp.isfinite(leaf)))
            if bad:
                counts[jax.tree_util.keystr(path)] = bad
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


@public
def worst_examples(
    fun: Callable[[Any, Any], Any], params: Any, batch: Any, k: int = 3
) -> dict[str, dict[Any, float]]:
    """Finds the examples of a batch with the largest gradient norms and losses, and their tokens.

    For the batch of an incident: it takes one example after the other, in the memory of one
    gradient. What is not finite counts as largest.

    | key | index to value |
    | --- | --- |
    | `grad_norm`, `loss` | of each example |
    | `input` | the root mean square of the numbers of an example, if it holds any floating ones |
    | `deviation` | the largest of the three: the distance of the logarithm from the median of the |
    | | batch, in 1.4826 median distances, which is robust; what is too small deviates too |
    | `token_grad_norm`, `token_loss` | of each `(example, token)` of the k examples that deviate |
    | | most, if `fun` returns the loss of each token |

    A row of the batch that is far out of range hides in a network that normalizes or saturates: its
    gradient is ordinary, and `input` shows it.

    Args:
        fun: `(params, example) -> loss` of one example: a scalar, or float[tokens], of which the
            mean is the loss of the example. The gradient of each token takes a backward pass.
        params: the parameters.
        batch: a tree whose leaves have the examples along their first axis.
        k: how many examples, and how many tokens, are returned.

    Returns:
        Under each key the index of each of the k largest, to its value; the largest first.

    Raises:
        ValueError: `k` is < 1.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> fun = lambda w, x: (w * x) ** 2
        >>> worst = gcx.diagnostics.worst_examples(fun, 1.0, jnp.array([1.0, -3.0, 2.0]), k=2)
        >>> worst["grad_norm"], worst["loss"]
        ({1: 18.0, 2: 8.0}, {1: 9.0, 2: 4.0})
        >>> batch = jnp.array([[1.0, 9.0], [2.0, 1.0], [1.0, 2.0]])
        >>> gcx.diagnostics.worst_examples(fun, 1.0, batch, k=1)["token_loss"]
        {(0, 1): 81.0}
    """
    check_count("k", k, "Pass how many examples to return.")

    def largest(values: Any, places: Sequence[Any]) -> dict[Any, float]:
        order = np.argsort(-np.nan_to_num(values, nan=np.inf), kind="stable")
        return {places[i]: float(values[i]) for i in order[:k].tolist()}

    rows = range(len(jax.tree.leaves(batch)[0]))
    columns = jax.device_get(_measure(fun, params, batch, (np.array(rows),)))
    columns["deviation"] = np.max([_deviations(x) for x in columns.values()], 0)
    worst = {key: largest(x, rows) for key, x in columns.items()}
    losses = jax.eval_shape(fun, params, jax.tree.map(lambda x: x[0], batch))
    if losses.ndim:
        places = [(i, token) for i in worst["deviation"] for token in range(losses.size)]
        columns = jax.device_get(_measure(fun, params, batch, tuple(np.transpose(places))))
        worst |= {f"token_{key}": largest(columns[key], places) for key in ("loss", "grad_norm")}
    return worst


@functools.partial(jax.jit, static_argnums=0)
def _measure(fun: Any, params: Any, batch: Any, places: Any) -> dict[str, Any]:
    """The losses and norms of some examples `(i,)`, or of tokens `(i, token)` of them."""

    def one(place: Any) -> Any:
        example = jax.tree.map(lambda x: x[place[0]], batch)

        def loss_of(params: Any) -> Any:
            losses = fun(params, example)
            return jnp.mean(losses) if len(place) == 1 else losses[place[1]]

        loss, grads = jax.value_and_grad(loss_of)(params)
        columns, numbers = {"grad_norm": global_norm(grads), "loss": loss}, measured_leaves(example)
        size = sum(x.size for x in numbers)
        return columns | ({"input": global_norm(numbers) / size**0.5} if size else {})

    return jax.lax.map(one, places)


def _deviations(values: Any) -> Any:
    """How far positive values are from their median, in logarithms and robust deviations."""
    logs = np.log(np.maximum(np.abs(values.astype(np.float64)), 1e-30))
    finite = logs[np.isfinite(logs)]
    center = np.median(finite) if finite.size else 0.0
    spread = np.median(np.abs(finite - center)) if finite.size else 0.0
    return np.where(np.isfinite(logs), np.abs(logs - center), np.inf) / max(1.4826 * spread, 0.01)
