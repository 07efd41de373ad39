"""Value and gradient of a batch, one micro-batch in memory at a time."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._checks import check_callable, check_count, check_dtype, check_transformation, error_message
from .._mesh import max_over, vary, varying_axes
from .._types import FLOAT32, Array, Scalar, Tree
from . import _devices as devices
from ._outputs import Kind, add_outputs, aux_kinds, batch_outputs, first_totals, value_kind
from ._reduction import check_reduction, leaf_reductions
from ._running import accumulator_dtype as sum_dtype
from ._split import Split, counted_from_zero, micro_arguments, positions
from ._window import as_weight

_NAME = "microbatched_value_and_grad"


class _Outputs(NamedTuple):
    """What a micro-batch, or a batch, gives; or shapes of it, or the kinds of its leaves.

    Attributes:
        value: float[].
        grads: one tree for each position.
        aux: None without.
        weight: [], None without.
    """

    value: Any
    grads: tuple[Tree, ...]
    aux: Tree
    weight: Any


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
    reduction: Any = "mean",
    aux_reduction: Any = None,
    micro_transform: Any = None,
    drop_nonfinite: bool = False,
) -> Callable[..., Any]:
    """Makes `jax.value_and_grad(fun)` need the memory of a micro-batch, not of the batch.

    The batch is split, `fun` is run on one part after the other, and values and gradients are
    averaged: the same as for the whole batch when `fun` is a mean over examples, or, with
    `has_weight`, a mean over whatever the weight counts, tokens for example.

    | what `fun` returns as aux | what comes back, unless `aux_reduction` says otherwise |
    | --- | --- |
    | an array whose first axis grows with the batch | those of all examples, in their order |
    | a floating scalar | the (weighted) mean over micro-batches |
    | anything else: a count, a flag, statistics, a random key | an error that asks for a word |

    | micro-batch | effect |
    | --- | --- |
    | of weight 0, even one full of NaN | adds nothing to value, gradient and means |
    | not finite, with `drop_nonfinite` | the same; all of them: value and gradient are NaN |

    Micro-batch i holds every `num_microbatches`-th example from i on, so that under jit each
    device splits the part of a sharded batch that it holds. Gradients with respect to arguments
    that are replicated over the devices of the batch are summed over them once, after the last
    micro-batch, inside `shard_map` and under explicit axes (JAX 0.10, if `fun` can be traced on
    arguments with `reduced` axes). Under plain jit XLA places that sum inside the loop.

    Use `accumulate_gradients` to add up over calls; the two compose.

    Args:
        fun: as for `jax.value_and_grad`: returns a scalar value, `(value, aux)` with `has_aux`,
            `(value, weight)` with `has_weight`, `(value, (weight, aux))` with both.
        num_microbatches: into how many parts the batch is split, an integer >= 1.
        argnums: positions of the arguments to differentiate by. By what is split: one row of
            the gradient for each example.
        has_aux: whether `fun` returns auxiliary data.
        batch_argnums: positions of the arguments that are split along the first axis of each
            of their leaves.
        rng_argnums: positions of random keys; each micro-batch gets its own.
        has_weight: whether `fun` returns a weight, a scalar >= 0; value and gradient are then
            the weighted means.
        accumulator_dtype: dtype of the sums of gradients, as for `accumulate_gradients`.
        reduction: of gradients, as for `accumulate_gradients`.
        aux_reduction: a prefix tree of aux of "mean" (weighted), "sum", "max", "last",
            "concatenate", and None for what the table says.
        micro_transform: applied to the gradient of each micro-batch: a function, or an Optax
            transformation such as a clip, every time as at its first step.
        drop_nonfinite: whether a micro-batch whose value or gradient is not finite is left out.
            With this or `micro_transform` devices sum the gradient of each micro-batch.

    Returns:
        A function that is called, and returns, as
        `jax.value_and_grad(fun, argnums, has_aux=has_aux or has_weight)`; the weight that comes
        back is the total.

    Raises:
        ValueError: `num_microbatches` is < 1 or does not divide the batch; the message names
            both numbers and the leaf. Or a leaf of aux needs a word.
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
    check_callable(_NAME, "fun", fun, "Pass the loss function.")
    check_count(_NAME, "num_microbatches", num_microbatches, "Pass 1 not to split.")
    check_dtype(_NAME, "accumulator_dtype", accumulator_dtype)
    check_reduction(_NAME, reduction)
    if micro_transform is not None and not callable(micro_transform):
        check_transformation(_NAME, "micro_transform", micro_transform)
    takes_one = isinstance(argnums, int)
    given = Split(int(num_microbatches), *map(positions, (batch_argnums, rng_argnums, argnums)))
    one_form = _in_one_form(fun, has_weight=has_weight, has_aux=has_aux)
    value_and_grad = jax.value_and_grad(one_form, given.differentiated, has_aux=True)

    def run(*args: Any, **kwargs: Any) -> Any:
        split = counted_from_zero(_NAME, given, args)

        def micro_batch(args: Sequence[Any], index: Any) -> _Outputs:
            chosen = micro_arguments(args, split, index)
            (value, (weight, aux)), grads = value_and_grad(*chosen, **kwargs)
            if micro_transform is not None:
                params = tuple(chosen[i] for i in split.differentiated)
                grads = _transformed(micro_transform, grads, params, takes_one=takes_one)
            if drop_nonfinite:
                weight = _weight_if_finite(weight, value, grads)
            return _Outputs(value, grads, aux, weight)

        def whole_aux() -> Tree:
            # Closed over, not passed: an argument may be anything, such as a flag or a model.
            return jax.eval_shape(lambda: one_form(*args, **kwargs))[1][1]

        by = tuple(args[i] for i in split.differentiated)
        words = leaf_reductions(_NAME, reduction, by[0] if takes_one else by)
        own_sums = micro_transform is None and not drop_nonfinite
        axes = devices.batch_axes(args, split.batches) if own_sums else frozenset[str]()
        local = devices.keep_apart(args, split.differentiated, axes, words, micro_batch)
        per_micro_batch = functools.partial(micro_batch, local)
        shapes = jax.eval_shape(per_micro_batch, 0)
        kinds = _Outputs(
            value=value_kind(split.parts, shapes.value),
            grads=_gradient_kinds(split, words, shapes.grads, accumulator_dtype),
            aux=aux_kinds(_NAME, aux_reduction, split.parts, shapes.aux, whole_aux),
            weight=None if shapes.weight is None else Kind("sum", False, shapes.weight.dtype),
        )
        out = _whole_batch(per_micro_batch, kinds, shapes, split.parts, nan_if_empty=drop_nonfinite)
        grads = devices.sum_over(out.grads, by, axes, words)
        rest = (
            (out.weight, out.aux)
            if has_weight and has_aux
            else out.weight
            if has_weight
            else out.aux
        )
        value = (out.value, rest) if has_weight or has_aux else out.value
        return value, grads[0] if takes_one else grads

    return run


def _in_one_form(fun: Callable[..., Any], *, has_weight: bool, has_aux: bool) -> Callable[..., Any]:
    """The function with `(value, (weight, aux))` as its result, None for what it has not."""

    def call(*args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, Any]]:
        out = fun(*args, **kwargs)
        if not (has_weight or has_aux):
            return out, (None, None)
        if not (isinstance(out, tuple) and len(out) == 2):
            rule = "a function that returns a pair, with `has_weight` or `has_aux`"
            hint = "Return `(value, weight)`, `(value, aux)` or `(value, (weight, aux))`."
            raise TypeError(error_message(_NAME, "fun", rule, type(out).__name__, hint))
        value, rest = out
        return value, rest if has_weight and has_aux else (rest, None) if has_weight else (
            None,
            rest,
        )

    return call


def _transformed(
    transform: Any, grads: tuple[Tree, ...], params: tuple[Tree, ...], *, takes_one: bool
) -> tuple[Tree, ...]:
    """The gradient of a micro-batch after a function or a transformation at its first step."""
    tree, like = (grads[0], params[0]) if takes_one else (grads, params)
    if hasattr(transform, "update"):
        tree, _ = transform.update(tree, transform.init(like), like)
    else:
        tree = transform(tree)
    return (tree,) if takes_one else tuple(tree)


def _weight_if_finite(weight: Any, value: Scalar, grads: Tree) -> Scalar:
    """The weight, or 0 if a number of the micro-batch is not finite on any device."""
    weight = jnp.float32(1) if weight is None else jnp.asarray(weight)
    flags = [~jnp.isfinite(x).all() for x in jax.tree.leaves((weight, value, grads))]
    is_bad = functools.reduce(jnp.logical_or, flags)
    is_bad = max_over(is_bad.astype(jnp.int32), varying_axes(is_bad)) > 0
    return jnp.where(is_bad, jnp.zeros_like(weight), weight)


def _gradient_kinds(
    split: Split, words: Sequence[str], grads: tuple[Tree, ...], dtype: Any
) -> tuple[Tree, ...]:
    """Gradients by what is split have rows, all others are added up."""
    names = iter(words)

    def kind_of(is_batch: bool, leaf: Any) -> Kind:
        word = next(names)
        if split.parts == 1 and word != "sum":
            word = "last"
        elif is_batch:
            word = "concatenate"
        is_sum = word in ("mean", "sum")
        return Kind(word, True, sum_dtype(leaf.dtype, dtype) if is_sum else leaf.dtype)

    return tuple(
        jax.tree.map(functools.partial(kind_of, i in split.batches), grad)
        for i, grad in zip(split.differentiated, grads, strict=True)
    )


def _whole_batch(
    micro_batch: Callable[[Array], _Outputs],
    kinds: _Outputs,
    shapes: _Outputs,
    parts: int,
    *,
    nan_if_empty: bool,
) -> _Outputs:
    """Runs one micro-batch after the other and puts together what they give."""
    kind_list = jax.tree.leaves(kinds, is_leaf=lambda x: isinstance(x, Kind))
    shape_list, structure = jax.tree.flatten(shapes)

    def step(carry: Any, index: Array) -> Any:
        totals, total_weight = carry
        outputs = micro_batch(index)
        weight = as_weight(_NAME, outputs.weight)
        totals, rows = add_outputs(kind_list, totals, jax.tree.leaves(outputs), weight)
        return (totals, total_weight + (1 if weight is None else weight)), rows

    totals = first_totals(kind_list, shape_list, shapes.weight)
    total_weight = jnp.float32(0)
    if shapes.weight is not None:
        total_weight = vary(total_weight, varying_axes(shapes.weight))
    (totals, total_weight), rows = lax.scan(step, (totals, total_weight), jnp.arange(parts))
    divisor = total_weight if nan_if_empty else jnp.where(total_weight > 0, total_weight, 1)
    leaves = batch_outputs(kind_list, totals, rows, divisor, shape_list)
    return jax.tree.unflatten(structure, leaves)
