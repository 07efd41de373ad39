"""Value and gradient of a batch, one micro-batch in memory at a time."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._checks import check_callable, check_choice, check_count, check_transformation
from .._errors import public
from .._mesh import is_unreduced, max_over, sum_over, vary, varying_axes
from .._types import FLOAT32, Tree
from ._outputs import AUX_REDUCTIONS, Outputs, aux_reductions, output_reductions, whole_batch
from ._reduction import DTYPE, REDUCTION, as_weight, is_summed, map_reduced
from ._split import Split, check_real, counted_from_zero, in_one_form, micro_arguments, positions


@public
def microbatched_value_and_grad(
    fun: Callable[..., Any],
    num_microbatches: int,
    *,
    num_real_microbatches: Any = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    batch_argnums: int | Sequence[int] = 1,
    rng_argnums: int | Sequence[int] = (),
    has_weight: bool = False,
    accumulator_dtype: Any = FLOAT32,
    reduction: Any = "mean",
    aux_reduction: Any = None,
    microbatch_transform: Any = None,
    drop_nonfinite: bool = False,
) -> Callable[..., Any]:
    """Makes `jax.value_and_grad(fun)` need the memory of a micro-batch, not of the batch.

    The batch is split, `fun` is run on one part after the other, and values and gradients are
    averaged: those of the whole batch if `fun` is a mean over examples, or, with `has_weight`, over
    what the weight counts, tokens for example. To add up over calls use `accumulate_gradients`; the
    two compose.

    | what `fun` returns as aux | what comes back, unless `aux_reduction` says otherwise |
    | --- | --- |
    | an array whose first axis grows with the batch | those of all examples, in their order |
    | a floating scalar | the (weighted) mean over micro-batches |
    | anything else: a count, a flag, statistics, a key | an error: say `aux_reduction` |

    | micro-batch | effect |
    | --- | --- |
    | of weight 0, even one full of NaN | adds nothing to value, gradient and means |
    | not finite, with `drop_nonfinite` | the same; all of them: value and gradient are NaN |
    | not real, by `num_real_microbatches` | is not run; none is real: zeros, as if of weight 0 |

    Micro-batch i holds every `num_microbatches`-th example from i on, so that under jit each
    device splits the part of a sharded batch that it holds. Gradients with respect to arguments
    that are replicated over the devices of the batch are summed over them once, after the last
    micro-batch, inside `shard_map`, and in `jit`, except on a CPU. By arguments that are typed as
    `reduced` over explicit axes they come back unreduced, as those of JAX do.

    Args:
        fun: as for `jax.value_and_grad`: returns a scalar value, `(value, aux)` with `has_aux`,
            `(value, weight)` with `has_weight`, a scalar >= 0, `(value, (weight, aux))` with both.
        num_microbatches: into how many parts the batch is split, an integer >= 1.
        num_real_microbatches: how many of them are run, an integer that may be traced, for batches
            of changing size in one program; None runs all. The others, from this number on, are
            padding that is not read: no value, gradient, weight or aux comes from them, their
            rows are zeros. More than there are run all, a traced number below 0 none.
        argnums: positions of the arguments to differentiate by; the gradient by what is split
            has a row for each example.
        has_aux: whether `fun` returns auxiliary data.
        batch_argnums: positions of what is split, along the first axis of each leaf.
        rng_argnums: positions of random keys; each micro-batch gets its own.
        has_weight: whether `fun` returns a weight; value and gradient are then weighted means.
        accumulator_dtype: of the sums of gradients, leaf by leaf, as for `accumulate_gradients`.
        reduction: of gradients, as for `accumulate_gradients`.
        aux_reduction: a prefix tree of aux of "mean" (weighted), "sum", "max", "last",
            "concatenate", and None for what the table says.
        microbatch_transform: applied to the gradient of each micro-batch: a function, or an Optax
            transformation such as a clip, every time as at its first step.
        drop_nonfinite: leave out a micro-batch whose value or gradient is not finite. With this
            or `microbatch_transform` devices sum the gradient of each micro-batch.

    Returns:
        A function as `jax.value_and_grad(fun, argnums, has_aux=has_aux or has_weight)`; its
        weight is the total.

    Raises:
        ValueError: `num_microbatches` is < 1 or does not divide a leaf of the batch, or is below
            a known `num_real_microbatches`; a leaf of aux needs `aux_reduction`.
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
    check_callable("fun", fun, "Pass the loss function.")
    check_count("num_microbatches", num_microbatches, "Pass 1 not to split.")
    check_real(num_real_microbatches, num_microbatches)
    DTYPE.check_given(accumulator_dtype)
    REDUCTION.check_given(reduction)
    for word in jax.tree.leaves(aux_reduction):
        check_choice("aux_reduction", word, AUX_REDUCTIONS)
    if microbatch_transform is not None and not callable(microbatch_transform):
        check_transformation("microbatch_transform", microbatch_transform)
    groups = map(positions, (batch_argnums, rng_argnums, argnums))
    given = Split(int(num_microbatches), *groups, takes_one=isinstance(argnums, int))
    one_form = in_one_form(fun, has_weight, has_aux)
    value_and_grad = jax.value_and_grad(one_form, argnums, has_aux=True)
    transform = functools.partial(_transformed, microbatch_transform, drop_nonfinite=drop_nonfinite)

    def run(*args: Any, **kwargs: Any) -> Any:
        split = counted_from_zero(given, args)
        by, parts = split.differentiated_of(args), split.parts

        def micro_batch(args: Sequence[Any], index: Any, *, holds_weight: bool = False) -> Outputs:
            chosen = micro_arguments(args, split, index)
            if holds_weight:
                return _weighted(functools.partial(one_form, **kwargs), split, chosen)
            (value, (weight, aux)), grads = value_and_grad(*chosen, **kwargs)
            return transform(Outputs(value, grads, aux, weight), split.differentiated_of(chosen))

        def whole_aux() -> Tree:
            # Closed over, not passed: an argument may be anything, such as a flag or a model.
            return jax.eval_shape(lambda: one_form(*args, **kwargs))[1][1]

        names = REDUCTION.of_leaves(reduction, "updates", by)
        dtypes = DTYPE.of_leaves(accumulator_dtype, "updates", by)
        sums_once = microbatch_transform is None and not drop_nonfinite
        of_batch = jax.tree.leaves([args[i] for i in split.batches]) if sums_once else []
        axes = frozenset[str]().union(*map(varying_axes, of_batch))
        local = [
            jax.tree.map(lambda x: vary(x, axes), x) if i in split.differentiated else x
            for i, x in enumerate(args)
        ]
        shapes = jax.eval_shape(functools.partial(micro_batch, local), 0)
        is_plain = parts > 1 and sums_once and not axes and all(map(is_summed, names))
        holds_weight = has_weight and is_plain and _fits_weight(shapes)
        of_part = functools.partial(micro_batch, local, holds_weight=holds_weight)
        aux_names = aux_reductions(aux_reduction, parts, shapes.aux, whole_aux)
        grad_names = _with_rows(names, args, split)
        reductions = output_reductions(
            shapes, parts, grad_names, dtypes, aux_names, holds_weight=holds_weight
        )
        if_empty = jnp.nan if drop_nonfinite else 0
        out = whole_batch(of_part, reductions, shapes, parts, num_real_microbatches, if_empty)
        rest = [x for x, has in ((out.weight, has_weight), (out.aux, has_aux)) if has]
        value = (out.value, rest[0] if len(rest) == 1 else tuple(rest)) if rest else out.value

        def summed(reduction: str, grad: Any, arg: Any) -> Any:
            missing = varying_axes(grad) & axes - varying_axes(arg)
            return (max_over if reduction == "max" else sum_over)(grad, missing)

        return value, map_reduced(summed, names, out.grads, by)

    return run


def _weighted(one_form: Callable[..., Any], split: Split, args: Sequence[Any]) -> Outputs:
    """Value and gradient of a micro-batch, both times its weight.

    In `jit` the gradients are then summed over devices behind the loop: once, and not k times.
    """

    def form(by: Any) -> Any:
        chosen = list(args)
        for i, x in zip(split.differentiated, (by,) if split.takes_one else by, strict=True):
            chosen[i] = x
        return one_form(*chosen)

    value, pull_back, (weight, aux) = jax.vjp(form, split.differentiated_of(args), has_aux=True)
    factor = jnp.asarray(as_weight(weight)).astype(value.dtype)
    (grads,) = pull_back(factor)
    return Outputs(value * factor, grads, aux, weight)


def _fits_weight(shapes: Outputs) -> bool:
    """Whether a loss can be multiplied by its weight: 40,000 fits no float16, 1,001 no bfloat16.

    Nor where gradients are unreduced: those of weight 0 could not be selected away afterwards.
    """
    leaves = jax.tree.leaves((shapes.value, shapes.grads))
    is_wide = all(jnp.finfo(x.dtype).bits >= 32 for x in leaves) and not is_unreduced(shapes.grads)
    return is_wide and varying_axes(shapes.weight) == varying_axes(shapes.value)


def _transformed(transform: Any, out: Outputs, params: Tree, *, drop_nonfinite: bool) -> Outputs:
    """A micro-batch, its gradient transformed; of weight 0 if it is to be left out."""
    if hasattr(transform, "update"):
        grads, _ = transform.update(out.grads, transform.init(params), params)
        out = out._replace(grads=grads)
    elif transform is not None:
        out = out._replace(grads=transform(out.grads))
    if not drop_nonfinite:
        return out
    weight = jnp.float32(1) if out.weight is None else jnp.asarray(out.weight)
    flags = [~jnp.isfinite(x).all() for x in jax.tree.leaves((weight, out.value, out.grads))]
    is_bad = functools.reduce(jnp.logical_or, flags)
    is_bad = max_over(is_bad.astype(jnp.int32), varying_axes(is_bad)) > 0  # on any device
    return out._replace(weight=jnp.where(is_bad, jnp.zeros_like(weight), weight))


def _with_rows(names: Sequence[str], args: Sequence[Any], split: Split) -> list[str]:
    """The reductions of gradients; one by what is split has a row for each example."""
    is_split = [i in split.batches for i in split.differentiated for _ in jax.tree.leaves(args[i])]
    pairs = zip(names, is_split, strict=True)
    return ["concatenate" if has_rows else name for name, has_rows in pairs]
