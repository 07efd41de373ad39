"""Value and gradient of a batch, one micro-batch in memory at a time."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import check_callable, check_count, check_dtype, describe, error_message, leaf_path
from .._mesh import sum_over, vary, varying_axes
from .._run_if import like_dtypes
from .._types import FLOAT32, Array, Tree
from ._running import accumulator_like, add_weighted, as_weight, window_gradient


def microbatched_value_and_grad(
    fun: Callable[..., Any],
    num_microbatches: int,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    batch_argnums: int | Sequence[int] = 1,
    rng_argnums: int | Sequence[int] = (),
    has_weight: bool = False,
    accumulator_dtype: Any = FLOAT32,
) -> Callable[..., Any]:
    """Makes `jax.value_and_grad(fun)` need the memory of a micro-batch, not of the batch.

    The batch is split, `fun` is run on one part after the other, and values and gradients are
    averaged: the same as for the whole batch when `fun` is a mean over examples, or, with
    `has_weight`, a mean over whatever the weight counts, tokens for example.

    | what `fun` returns as aux | what comes back |
    | --- | --- |
    | an array whose first axis grows with the batch | those of all examples, in their order |
    | a floating scalar or array that does not | the (weighted) mean over micro-batches |
    | an integer that does not, such as a count | the sum |
    | a boolean that does not | whether any is true |

    Micro-batch i holds every `num_microbatches`-th example from i on, so that under jit each
    device splits the part of a sharded batch that it holds. Inside `shard_map` gradients with
    respect to replicated arguments are summed over devices once, after the last micro-batch,
    where `jax.value_and_grad` in a loop would do it for each. Under plain jit XLA places that
    sum inside the loop: wrap the function in `shard_map` over the data axis to have it once.

    Use `accumulate_gradients` to add up over calls; the two compose.

    Args:
        fun: as for `jax.value_and_grad`: returns a scalar value, `(value, aux)` with `has_aux`,
            `(value, weight)` with `has_weight`, `(value, (weight, aux))` with both.
        num_microbatches: into how many parts the batch is split, an integer >= 1.
        argnums: positions of the arguments to differentiate by.
        has_aux: whether `fun` returns auxiliary data.
        batch_argnums: positions of the arguments that are split along the first axis of each
            of their leaves.
        rng_argnums: positions of random keys; each micro-batch gets its own.
        has_weight: whether `fun` returns a weight, a scalar >= 0; value and gradient are then
            the weighted means. A micro-batch of weight 0 adds nothing, even if it is NaN.
        accumulator_dtype: dtype of the sums, as for `accumulate_gradients`.

    Returns:
        A function that is called, and returns, as
        `jax.value_and_grad(fun, argnums, has_aux=has_aux or has_weight)`; the weight that comes
        back is the total.

    Raises:
        ValueError: `num_microbatches` is < 1 or does not divide the batch; the message names
            both numbers and the leaf. Or an auxiliary array grows along another axis.
        TypeError: `fun` cannot be called, or the value or the weight is no scalar.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> def loss(w, x):
        ...     return jnp.mean((w * x) ** 2)
        >>> value_and_grad = gcx.microbatched_value_and_grad(loss, 2)
        >>> value, grad = value_and_grad(jnp.array(1.0), jnp.array([1.0, 2.0, 3.0, 4.0]))
        >>> float(value), float(grad)
        (7.5, 15.0)
    """
    name = "microbatched_value_and_grad"
    check_callable(name, "fun", fun, "Pass the loss function.")
    check_count(name, "num_microbatches", num_microbatches, "Pass 1 not to split.")
    check_dtype(name, "accumulator_dtype", accumulator_dtype)
    parts = int(num_microbatches)
    batches, keys, wanted = map(_positions, (batch_argnums, rng_argnums, argnums))

    def weighted(*args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, Any]]:
        out = fun(*args, **kwargs)
        if not (has_weight or has_aux):
            return out, (None, None)
        if not (isinstance(out, tuple) and len(out) == 2):
            rule = "a function that returns a pair, with `has_weight` or `has_aux`"
            hint = "Return `(value, weight)`, `(value, aux)` or `(value, (weight, aux))`."
            raise TypeError(error_message(name, "fun", rule, type(out).__name__, hint))
        value, rest = out
        weight, aux = (
            rest if has_weight and has_aux else (rest, None) if has_weight else (None, rest)
        )
        return value, (weight, aux)

    value_and_grad = jax.value_and_grad(weighted, argnums, has_aux=True)

    def run(*args: Any, **kwargs: Any) -> Any:
        _check_positions(name, args, (*batches, *keys, *wanted))
        _check_batch(name, args, batches, parts)
        apart = frozenset[str]().union(
            *(varying_axes(x) for i in batches for x in jax.tree.leaves(args[i]))
        )
        differentiated = [i % len(args) for i in wanted]
        local = [vary_tree(x, apart) if i in differentiated else x for i, x in enumerate(args)]

        def micro_batch(index: Array) -> Any:
            chosen = list(local)
            for i in batches:
                chosen[i] = jax.tree.map(lambda x: _every_nth(x, index, parts), args[i])
            for i in keys:
                chosen[i] = jax.random.split(args[i], parts)[index]
            return value_and_grad(*chosen, **kwargs)

        (value, (weight, aux)), grads = jax.eval_shape(micro_batch, 0)
        whole_aux = None
        if has_aux:
            # Closed over, not passed: an argument may be anything, such as a flag or a model.
            _, (_, whole_aux) = jax.eval_shape(lambda: weighted(*local, **kwargs))
        kinds = jax.tree_util.tree_map_with_path(
            functools.partial(_aux_kind, name, parts), aux, whole_aux
        )

        def pick(tree: Tree, *wanted_kinds: str) -> list[Any]:
            leaves = zip(jax.tree.leaves(tree), jax.tree.leaves(kinds), strict=True)
            return [x for x, kind in leaves if kind in wanted_kinds]

        def step(carry: Any, index: Array) -> tuple[Any, list[Array]]:
            sums, counts, total = carry
            (value, (weight, aux)), grads = micro_batch(index)
            weight = as_weight(name, weight)
            terms = (value, grads, pick(aux, "mean"))
            sums = add_weighted(sums, terms, weight, jnp.array(False))
            counts = [old + new for old, new in zip(counts, pick(aux, "sum", "any"), strict=True)]
            total = total + (1 if weight is None else weight)
            return (sums, counts, total), pick(aux, "rows")

        terms = (value, grads, pick(aux, "mean"))
        counts = [jnp.zeros_like(x) for x in pick(aux, "sum", "any")]
        total = jnp.float32(0) if weight is None else jnp.zeros_like(weight, jnp.float32)
        # A sum varies over the devices over which its weights do.
        sums = vary_tree(accumulator_like(terms, accumulator_dtype), varying_axes(total))
        start = (sums, counts, total)
        (sums, counts, total), rows = lax.scan(step, start, jnp.arange(parts))

        divisor = jnp.where(total > 0, total, 1)
        averages = like_dtypes(window_gradient(sums, sums, divisor, mean=True), terms)
        value, grads, means = averages
        grads = _summed_once(grads, args, argnums, apart)
        found = {"mean": iter(means), "count": iter(counts), "rows": iter(map(_in_order, rows))}
        words = {"mean": "mean", "sum": "count", "any": "count", "rows": "rows"}
        aux = jax.tree.map(lambda kind: next(found[words[kind]]), kinds)
        if has_weight:
            total = total.astype(jnp.result_type(weight))
            return (value, (total, aux) if has_aux else total), grads
        return ((value, aux) if has_aux else value), grads

    return run


def vary_tree(tree: Tree, axes: frozenset[str]) -> Tree:
    """Every leaf as one that may differ along the axes."""
    return jax.tree.map(lambda x: vary(x, axes), tree)


def _positions(argnums: int | Sequence[int]) -> tuple[int, ...]:
    return (argnums,) if isinstance(argnums, int) else tuple(argnums)


def _check_positions(function: str, args: Sequence[Any], positions: Sequence[int]) -> None:
    """Refuses a call without one of the arguments that are split or differentiated by."""
    needed = max(i if i >= 0 else -i - 1 for i in positions) + 1
    if len(args) < needed:
        hint = "What is split or differentiated by cannot be passed by name."
        rule = f"at least {needed} positional arguments"
        raise TypeError(error_message(function, "args", rule, f"{len(args)}", hint))


def _check_batch(function: str, args: Sequence[Any], batches: Sequence[int], parts: int) -> None:
    """Refuses leaves that have no batch axis, or one that the parts do not divide."""
    for i in batches:
        hint = "Change one of the two, or pad the batch with examples of weight 0."
        for path, x in jax.tree_util.tree_leaves_with_path(args[i]):
            if not np.ndim(x) or np.shape(x)[0] % parts:
                place = leaf_path(f"args[{i}]", path)
                rule = f"split evenly by num_microbatches={parts} along its first axis"
                raise ValueError(
                    error_message(function, "batch", rule, f"{describe(x)} at {place}", hint)
                )


def _every_nth(x: Array, index: Array, parts: int) -> Array:
    """Examples index, index + parts, ...: each device takes them from the part that it holds."""
    split = jnp.reshape(x, (x.shape[0] // parts, parts, *x.shape[1:]))
    return lax.dynamic_index_in_dim(split, index, axis=1, keepdims=False)


def _in_order(rows: Array) -> Array:
    """Undoes `_every_nth` for rows stacked by micro-batch."""
    by_example = jnp.swapaxes(rows, 0, 1)
    return by_example.reshape(-1, *by_example.shape[2:])


def _aux_kind(function: str, parts: int, path: Any, micro: Any, whole: Any) -> str:
    """How an auxiliary array of micro-batches becomes that of the batch."""
    if micro.shape != whole.shape:
        if not micro.shape or whole.shape != (parts * micro.shape[0], *micro.shape[1:]):
            rule = "of one shape for every batch, or grow with it along the first axis"
            got = f"{describe(micro)} for a micro-batch and {describe(whole)} for the batch"
            got += f" at {leaf_path('aux', path)}"
            hint = "Move its batch axis to the front."
            raise ValueError(error_message(function, "aux", rule, got, hint))
        return "rows"
    if micro.dtype == jnp.bool_:
        return "any"
    return "mean" if jnp.issubdtype(micro.dtype, jnp.inexact) else "sum"


def _summed_once(
    grads: Tree, args: Sequence[Any], argnums: int | Sequence[int], apart: frozenset[str]
) -> Tree:
    """What `jax.value_and_grad` sums over devices for each micro-batch, summed here."""

    def total(grad: Array, arg: Any) -> Array:
        return sum_over(grad, apart - varying_axes(arg))

    if isinstance(argnums, int):
        return jax.tree.map(total, grads, args[argnums])
    return tuple(jax.tree.map(total, grad, args[i]) for grad, i in zip(grads, argnums, strict=True))
