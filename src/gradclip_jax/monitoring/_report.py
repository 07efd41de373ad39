"""Read the incidents of `watch` on the host, and find their causes."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import check_callable, check_count, dtype_of, is_float0, refuse_traced
from .._errors import public, type_error, value_error
from .._leaves import measured_leaves
from .._states import find_states, plain_arrays
from .._types import Array, HostArray, Tree
from ..accumulation._split import batch_size
from ..clipping._norm import global_norm
from ._incident import Incident, IncidentLog, names_in, read_log


@public
def incidents(state: Tree) -> list[Incident]:
    """Return the most recent incidents recorded by `watch`, oldest first.

    Each incident prints as a sentence: "step 1203: skipped, gradient norm 3.1e5 (threshold 4.2);
    97 % of it in decoder/layers_7/mlp/wi; loss 3.2". If equal incidents follow each other, only the
    first and the last are kept, and `streak` counts them. The call blocks until the state is
    computed.

    | kind | flag in the metric `incident_kind` | meaning |
    | --- | --- | --- |
    | "nan", "infinity" | 1, 2 | the gradient norm is NaN or infinite |
    | "norm", "loss" | 4, 8 | an outlier of the gradient norm or the loss, or a non-finite loss |
    | "update" | 16 | an outlier or non-finite update without another cause; or a guard |
    | | | skipped the step because of its update, next state or weight, or, inside an |
    | | | accumulation, because of the accumulated gradient |
    | "skipped", "held" | 32, 64 | a guard inside skipped the step, or an accumulation inside |
    | | | added the micro-batch without an optimizer step |
    | "clipped" | 128 | a clip inside clipped the gradient |
    | "leaf" | 256 | the gradient norm of a unit has risen relative to the other units |
    | "parameter" | 512 | the parameters of a unit have jumped or are non-finite |
    | "zero" | 1024 | the gradient, or the gradient of a unit, has become zero |
    | "drift" | 2048 | the gradient norm of a unit has slowly risen to 2.5 times its long-term |
    | | | mean, or up to 8 times in the first 512 steps, relative to the other units |
    | "replica" | 4096 | the parameters on one device differ from the parameters on the others |
    | "unchanged" | 8192 | the update was zero for a reason that is not known to this package |
    | "jump" | 16384 | the norm of all parameters has jumped |

    Args:
        state: Optimizer state, or any pytree that contains it. The first `watch` state is used.

    Returns:
        List of at most `max_incidents` incidents.

    Raises:
        TypeError: If called inside jit, or if `state` contains no `watch` state.
        ValueError: If the state was vmapped.


    Examples:
        >>> import jax, jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = gcx.watch(gcx.skip_large_norm(optax.sgd(0.1), 4.0))
        >>> params = {"wi": jnp.ones(2), "wo": jnp.ones(2)}
        >>> grads = {"wi": jnp.array([30.0, 40.0]), "wo": jnp.array([0.5, 0.5])}
        >>> _, state = jax.jit(tx.update)(grads, tx.init(params), params)
        >>> print(gcx.incidents(state)[-1])
        step 0: skipped, gradient norm 50 (threshold 4); 100 % of it in wi
    """
    log = plain_arrays(_log_of(state))
    refuse_traced("state", log.rows)
    if np.ndim(log.rows) > 2:
        rule, hint = "the state of one run", "Select run i: `jax.tree.map(lambda x: x[i], state)`."
        raise value_error("state", rule, f"a batch of {len(log.rows)} states", hint)
    return read_log(log)


@public
def unit_names(state: Tree) -> list[str]:
    """Return the names of the leaves or layers that `watch` measures.

    The metric `largest_share_index` is an index into this list.

    Args:
        state: State of `watch`, or any pytree that contains it. The first `watch` state is used.

    Returns:
        List of names such as `decoder/layers_3/mlp/wi`; empty for `granularity="global"`.

    Raises:
        TypeError: If `state` contains no `watch` state.


    Examples:
        >>> import jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = gcx.watch(optax.sgd(0.1), granularity=gcx.granularities.layer({"h": 1, "out": 0}))
        >>> params = {"h": {"wi": jnp.ones((2, 3)), "wo": jnp.ones((2, 3))}, "out": jnp.ones(2)}
        >>> gcx.diagnostics.unit_names(tx.init(params))
        ['h_0/wi', 'h_1/wi', 'h_0/wo', 'h_1/wo', 'out']
    """
    return names_in(_log_of(state))


def _log_of(state: Tree) -> IncidentLog:
    """Return the incident log of the first `watch` state."""
    logs = find_states(state, IncidentLog)
    if not logs:
        rule, hint = "a state of `watch`", "Pass the state of an optimizer inside `gcx.watch`."
        raise type_error("state", rule, type(state).__name__, hint)
    return logs[0][1]


@public
def nonfinite_leaves(tree: Tree, *, include_finite: bool = False) -> dict[str, int]:
    """Count the non-finite elements of each leaf.

    When `guard_failed` becomes 1, call this function outside jit on gradients, parameters,
    activations or a whole optimizer state. The call blocks until the values are computed.

    Args:
        tree: Any pytree of arrays. Integer leaves are finite.
        include_finite: Whether to list all leaves in the order of the tree, with a count of 0 for
            finite leaves, to show the layer where NaN first appears.

    Returns:
        Dictionary from paths to the number of non-finite elements, in descending order; empty if
        all elements are finite.

    Raises:
        TypeError: If called inside jit.


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
    fun: Callable[[Tree, Tree], Array], params: Tree, batch: Tree, k: int = 3
) -> dict[str, dict[Any, float]]:
    """Find the examples and tokens of a batch with the largest gradient norms and losses.

    Pass the batch for which `watch` recorded an incident. Examples are processed one by one, so
    that only one gradient is in memory at a time. Non-finite values rank first.

    | key | value for each index |
    | --- | --- |
    | `grad_norm`, `loss` | gradient norm and loss of each example |
    | `input` | root mean square of the floating-point inputs of an example, if it has any |
    | `deviation` | distance of the loss from the median of the batch, in robust standard |
    | | deviations of the logarithm; or that of the gradient norm or the input, if it exceeds 6 |
    | `token_grad_norm`, `token_loss` | the same for each `(example, token)` of the k examples |
    | | with the largest deviation, if `fun` returns the loss of each token |

    In networks with normalization or saturating activations, an example with very large inputs may
    have a typical gradient, so that only `input` identifies it.

    Args:
        fun: Function `(params, example) -> loss` that returns the loss of one example, a scalar or
            float[tokens]. The loss of the example is the mean over tokens. Each token requires one
            backward pass.
        params: Parameters.
        batch: Pytree of arrays with a leading batch axis.
        k: Number of examples and tokens to return.

    Returns:
        For each key, a dictionary from the indices of the k largest values to these values, in
        descending order.

    Raises:
        ValueError: If `k` is < 1, or if `batch` is empty or its leaves have different lengths.
        TypeError: If `fun` is not a function.


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
    check_callable("fun", fun, "Pass a function that returns the loss of one example.")
    check_count("k", k, "Pass how many examples to return.")

    def largest(values: HostArray, places: Sequence[Any]) -> dict[Any, float]:
        order = np.argsort(-np.where(np.isfinite(values), values, np.inf), kind="stable")
        return {places[i]: float(values[i]) for i in order[:k].tolist()}

    rows = range(batch_size({"batch": batch}))
    if not rows:
        hint = "Pass the batch of the incident."
        raise value_error("batch", "a batch with at least one example", "an empty batch", hint)
    # Compile `fun` anew in each call, because the values that it closes over may have changed.
    measure = jax.jit(functools.partial(_measure, fun))
    columns = jax.device_get(measure(params, batch, (np.array(rows),)))
    columns["deviation"] = _ranking(columns)
    worst = {key: largest(x, rows) for key, x in columns.items()}
    losses = jax.eval_shape(fun, params, jax.tree.map(lambda x: x[0], batch))
    if losses.ndim:
        places = [(i, token) for i in worst["deviation"] for token in range(losses.size)]
        columns = jax.device_get(measure(params, batch, tuple(np.transpose(places))))
        worst |= {f"token_{key}": largest(columns[key], places) for key in ("loss", "grad_norm")}
    return worst


def _measure(
    fun: Callable[[Tree, Tree], Array], params: Tree, batch: Tree, places: tuple[HostArray, ...]
) -> dict[str, Array]:
    """Compute the losses and gradient norms of examples `(i,)` or tokens `(i, token)`."""

    def one(place: tuple[Array, ...]) -> dict[str, Array]:
        example = jax.tree.map(lambda x: x[place[0]], batch)

        def loss_of(params: Tree) -> Array:
            losses = fun(params, example)
            return jnp.mean(losses) if len(place) == 1 else losses[place[1]]

        loss, grads = jax.value_and_grad(loss_of)(params)
        columns, numbers = {"grad_norm": global_norm(grads), "loss": loss}, measured_leaves(example)
        size = sum(x.size for x in numbers)
        return columns | ({"input": global_norm(numbers) / size**0.5} if size else {})

    return jax.lax.map(one, places)


def _ranking(columns: dict[str, HostArray]) -> HostArray:
    """Return a score for each example that is large for suspicious examples.

    A wrong label mainly increases the loss. Gradient norms and inputs only affect the score if they
    are outliers.
    """
    of_loss = _deviations(columns["loss"])
    others = [_deviations(columns["grad_norm"])]
    if "input" in columns:
        others.append(np.abs(_deviations(columns["input"])))
    return np.max([of_loss, *(np.where(x > 6, x, -np.inf) for x in others)], 0)


def _deviations(values: HostArray) -> HostArray:
    """Return robust z-scores of the values, or of their logarithms if no value is negative."""
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
