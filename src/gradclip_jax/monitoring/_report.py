"""On the host: what happened in a run, its log in numbers, and where to look for the cause."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import check_count, dtype_of, is_float0, refuse_traced
from .._errors import public, type_error, value_error
from .._leaves import measured_leaves
from .._states import find_states, plain_arrays
from ..clipping._norm import global_norm
from ._incident import Incident, IncidentLog, names_in, read_log


@public
def incidents(state: Any) -> list[Incident]:
    """Return the last incidents that `watch` kept, the oldest first.

    Each is a record, and prints as a sentence: "step 1203: skipped, gradient norm 3.1e5 above 4.2;
    97 % of it in decoder/layers_7/mlp/wi; loss 3.2". It waits for the values. Of a streak of equal
    incidents the first and the last are kept; `streak` says how many there were.

    | kind | flag in the metric `incident_kind` | meaning |
    | --- | --- | --- |
    | "nan", "infinity" | 1, 2 | the gradient norm is not finite |
    | "norm", "loss" | 4, 8 | an outlier; a loss also where it is not finite |
    | "update" | 16 | an outlier or a non-finite update, whose cause is none of the others; or a |
    | | | guard skipped the step for its update, its next state or its weight |
    | "skipped", "held" | 32, 64 | what became of the step: a guard inside skipped it, or an |
    | | | accumulation inside holds its micro-batch |
    | "clipped" | 128 | a clip inside was active |
    | "leaf" | 256 | the gradient of a unit has risen far, in proportion to the other units |
    | "parameter" | 512 | the parameters of a unit have jumped, or are not finite |
    | "zero" | 1024 | the gradient, or that of a unit, has become zero, beyond coincidence |
    | "drift" | 2048 | the gradient of a unit has slowly risen to 4 times its long-term norm |
    | "replica" | 4096 | the parameters on a device differ from those on the others |
    | "unchanged" | 8192 | the update was zero, and nothing of this package says why |

    Args:
        state: the state of an optimizer, or any state that contains it. The first `watch` is read.

    Returns:
        At most `max_incidents` records.

    Raises:
        TypeError: the state contains no `watch`, or it is traced.
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
    log = plain_arrays(_log_of(state))
    refuse_traced("state", log.rows)
    if np.ndim(log.rows) > 2:
        rule, hint = "of one run", "Of seed i pass `jax.tree.map(lambda x: x[i], state)`."
        raise value_error("state", rule, f"one that was vmapped over {len(log.rows)}", hint)
    return read_log(log)


@public
def unit_names(state: Any) -> list[str]:
    """Return the names of the units of `watch`, in the order of `largest_share_index`.

    Args:
        state: the state of `watch`, or any state that contains it. Of several the first is read.

    Returns:
        The names, such as `decoder/layers_3/mlp/wi`; none for `granularity="global"`.

    Raises:
        TypeError: the state contains no `watch`.

    Examples:
        >>> import jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = gcx.watch(optax.sgd(0.1), granularity=gcx.granularities.layer({"h": 1, "out": 0}))
        >>> params = {"h": {"wi": jnp.ones((2, 3)), "wo": jnp.ones((2, 3))}, "out": jnp.ones(2)}
        >>> gcx.diagnostics.unit_names(tx.init(params))
        ['h_0/wi', 'h_1/wi', 'h_0/wo', 'h_1/wo', 'out']
    """
    return names_in(_log_of(state))


def _log_of(state: Any) -> IncidentLog:
    """The log of the first `watch` in a state."""
    logs = find_states(state, IncidentLog)
    if not logs:
        rule, hint = "a state that keeps incidents", "Put `gcx.watch` around the optimizer."
        raise type_error("state", rule, type(state).__name__, hint)
    return logs[0][1]


@public
def nonfinite_leaves(tree: Any, *, include_finite: bool = False) -> dict[str, int]:
    """Count the NaN and infinite elements of each leaf.

    Call it outside jit when `guard_failed` becomes 1, on gradients, parameters, activations or a
    whole optimizer state. It waits for the values.

    Args:
        tree: any pytree of arrays; integer leaves are finite.
        include_finite: whether to list finite leaves as well, with a count of 0, all in the order
            of the tree. The layer where NaN begins is then between two rows.

    Returns:
        Path to number of non-finite elements, the largest number first; empty if all are finite.

    Raises:
        TypeError: called inside jit.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> tree = {"a": jnp.zeros(3), "b": jnp.array([1.0, jnp.nan, jnp.inf])}
        >>> gcx.diagnostics.nonfinite_leaves(tree)
        {"['b']": 2}
        >>> gcx.diagnostics.nonfinite_leaves(tree, include_finite=True)
        {"['a']": 0, "['b']": 2}
    """
    counts: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        refuse_traced("tree", leaf)
        if not is_float0(leaf) and jnp.issubdtype(dtype_of(leaf), jnp.inexact):
            counts[jax.tree_util.keystr(path)] = int(jnp.sum(~jnp.isfinite(leaf)))
    if include_finite:
        return counts
    bad = {path: count for path, count in counts.items() if count}
    return dict(sorted(bad.items(), key=lambda item: -item[1]))


@public
def worst_examples(
    fun: Callable[[Any, Any], Any], params: Any, batch: Any, k: int = 3
) -> dict[str, dict[Any, float]]:
    """Find the examples of a batch with the largest gradient norms and losses, and their tokens.

    Use it on the batch of an incident. Examples are measured one after the other, in the memory of
    one gradient. Non-finite values count as the largest.

    | key | index to value |
    | --- | --- |
    | `grad_norm`, `loss` | of each example |
    | `input` | the root mean square of the numbers of an example, if it holds any floating ones |
    | `deviation` | how far the loss is above the median of the batch, in robust standard |
    | | deviations of the logarithm; or how far the gradient norm is above, or the input is from, |
    | | their medians, where that is more than 6 |
    | `token_grad_norm`, `token_loss` | of each `(example, token)` of the k examples that deviate |
    | | most, if `fun` returns the loss of each token |

    In a network that normalizes or saturates, a row far out of range has an ordinary gradient, and
    only `input` shows it.

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
    columns["deviation"] = _ranking(columns)
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


def _ranking(columns: dict[str, Any]) -> Any:
    """One number for each example, large for suspicious ones.

    A wrong label shows in the loss first. Gradient norm and input count where they are outliers.
    """
    of_loss = _deviations(columns["loss"])
    others = [_deviations(columns["grad_norm"])]
    if "input" in columns:
        others.append(np.abs(_deviations(columns["input"])))
    return np.max([of_loss, *(np.where(x > 6, x, -np.inf) for x in others)], 0)


def _deviations(values: Any) -> Any:
    """Robust deviations from the median: of logarithms if all values are positive."""
    finite = np.isfinite(values)
    is_positive = bool(np.all(values[finite] >= 0))
    numbers = values.astype(np.float64)
    numbers = np.log(np.maximum(numbers, 1e-30)) if is_positive else numbers
    if not finite.any():
        return np.full(len(values), np.inf)
    center = np.median(numbers[finite])
    spread = 1.4826 * np.median(np.abs(numbers[finite] - center))
    spread = max(spread, 0.01 if is_positive else 0.01 * abs(center), 1e-12)
    return np.where(finite, (np.where(finite, numbers, 0) - center) / spread, np.inf)
