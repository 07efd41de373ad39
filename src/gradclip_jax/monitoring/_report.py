"""Read the incidents of `watch` on the host, and find non-finite leaves."""

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import dtype_of, is_float0, refuse_traced
from .._errors import public, type_error, value_error
from .._states import find_states, plain_arrays
from .._types import Tree
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
