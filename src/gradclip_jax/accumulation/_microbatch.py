"""Value and gradient of a batch, computed one micro-batch at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import DTypeLike

from .._checks import (
    check_callable,
    check_choice,
    check_dtype,
    check_transformation,
    is_traced,
)
from .._errors import public, value_error
from .._mesh import check_placement, sum_over, vary, varying_axes, zeros_of_type
from .._types import FLOAT32, Array, Count, Number, Scalar, Tree
from ._outputs import (
    AUX_REDUCTIONS,
    MicroOutputs,
    aux_reductions,
    gradient_rows,
    reduced,
    run_micro_batches,
    scaled,
)
from ._reduction import REDUCTIONS, accumulator_dtype, as_weight, divide
from ._split import Split, bind_split, check_parts, in_one_form, micro_arguments, positions

Transform: TypeAlias = optax.GradientTransformation | Callable[[Tree], Tree]
"""A transformation or function that is applied to the gradient of each micro-batch."""


@public
def microbatched_value_and_grad(
    fun: Callable[..., Any],
    num_microbatches: Count,
    *,
    num_real_microbatches: Number | None = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    batch_argnums: int | Sequence[int] = 1,
    rng_argnums: int | Sequence[int] = (),
    has_weight: bool = False,
    accumulator_dtype: DTypeLike = FLOAT32,
    reduction: Literal["mean", "sum"] = "mean",
    aux_reduction: Tree = None,
    microbatch_transform: Transform | None = None,
    drop_nonfinite: bool = False,
) -> Callable[..., Any]:
    """Compute `jax.value_and_grad(fun)` with the memory of one micro-batch instead of the batch.

    The returned function splits the batch, runs `fun` on one micro-batch at a time, and averages
    values and gradients. The result equals that of the whole batch if `fun` is a mean over
    examples, or, with `has_weight`, a weighted mean, for example over tokens. Use
    `accumulate_gradients` to accumulate over several calls; both can be combined.

    | leaf of aux | default without `aux_reduction` |
    | --- | --- |
    | an array with one or more rows per example | the rows of all examples, in their order |
    | a floating-point scalar | the (weighted) mean over micro-batches |
    | anything else, such as a count, a flag or a key | an error that requires `aux_reduction` |

    The aux of all micro-batches is stacked before it is reduced.

    | micro-batch | result |
    | --- | --- |
    | weight 0, even if its gradient is NaN | contributes 0 to value, gradient and means |
    | non-finite, with `drop_nonfinite` | the same; NaN if no other one has a positive weight |
    | beyond `num_real_microbatches` | does not run; if none runs, all results are zero |

    Micro-batch i contains every `num_microbatches`-th example, starting at i. Under `jit`, each
    device therefore splits its own shard of the batch. If the lengths of arguments differ, the
    smallest is the number of examples, and an argument with a multiple of this length has several
    consecutive rows for each example. If an argument is replicated over devices that share the
    batch, its gradient is all-reduced only once, after the last micro-batch (on CPU only inside
    `shard_map`).

    Args:
        fun: Function to differentiate, as for `jax.value_and_grad`. It returns a scalar value,
            `(value, aux)` with `has_aux`, `(value, weight)` with `has_weight`, or
            `(value, (weight, aux))` with both; weight is a scalar >= 0.
        num_microbatches: Number of micro-batches; an integer >= 1.
        num_real_microbatches: Number of micro-batches to run, which may be traced to support
            varying batch sizes without retracing. None runs all of them. The remaining
            micro-batches are padding. They do not contribute to value, gradient, weight or aux, and
            their rows are zeros. A traced number is clamped to [0, `num_microbatches`].
        argnums: Positions of the differentiated arguments. The gradient of an argument that is
            split has one row per example.
        has_aux: Whether `fun` returns auxiliary data.
        batch_argnums: Positions of the arguments that are split along the first axis of each leaf.
        rng_argnums: Positions of random keys; each micro-batch receives a different key.
        has_weight: Whether `fun` returns a weight, which is converted to float32; value and
            gradient are then weighted means. The weights of all micro-batches are computed first,
            and each loss is multiplied by the ratio of its weight and the mean weight before it is
            differentiated, so that cotangents inside `fun` have the size of those of the loss.
            Host callbacks in `fun` run twice.
        accumulator_dtype: Dtype of the gradient sums; see `accumulate_gradients`.
        reduction: Reduction of gradients; see `accumulate_gradients`.
        aux_reduction: Prefix tree of aux, with values "mean" (weighted), "sum", "last",
            "concatenate", or None for the default in the table.
        microbatch_transform: Function or gradient transformation, such as a clip, that is applied
            to the gradient of each micro-batch. Its state is initialized for every micro-batch.
        drop_nonfinite: Whether to ignore micro-batches with a non-finite value or gradient. With
            this option or `microbatch_transform`, the gradient of every micro-batch is all-reduced,
            so that weights and `num_real_microbatches` must be equal on all devices.

    Returns:
        A function like `jax.value_and_grad(fun, argnums, has_aux=has_aux or has_weight)`. It
        returns the total weight.

    Raises:
        ValueError: If `num_microbatches` is less than 1, does not divide the batch size, or is less
            than a static `num_real_microbatches`, or if a leaf of aux requires `aux_reduction`.
        TypeError: If `fun` is not callable, or its value or weight is not a scalar.

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
    check_parts(num_microbatches, num_real_microbatches)
    check_dtype("accumulator_dtype", accumulator_dtype)
    check_choice("reduction", reduction, REDUCTIONS)
    for word in jax.tree.leaves(aux_reduction):
        check_choice("aux_reduction", word, AUX_REDUCTIONS)
    if microbatch_transform is not None and not callable(microbatch_transform):
        check_transformation("microbatch_transform", microbatch_transform)
    split = Split(
        parts=int(num_microbatches),
        batches=positions("batch_argnums", batch_argnums),
        keys=positions("rng_argnums", rng_argnums),
        differentiated=positions("argnums", argnums),
        takes_one=not np.ndim(argnums),
    )
    real = split.parts if num_real_microbatches is None else num_real_microbatches
    options = _Options(
        in_one_form(fun, has_weight, has_aux),
        split,
        jnp.asarray(real).astype(jnp.int32) if is_traced(real) else int(real),
        has_weight,
        accumulator_dtype,
        reduction,
        aux_reduction,
        microbatch_transform,
        drop_nonfinite,
    )

    def run(*args: Any, **kwargs: Any) -> Any:
        value, grads, aux, weight = _evaluate(options, args, kwargs)
        if has_weight and has_aux:
            return (value, (weight, aux)), grads
        if has_weight or has_aux:
            return (value, weight if has_weight else aux), grads
        return value, grads

    return run


class _Options(NamedTuple):
    """The arguments of `microbatched_value_and_grad`.

    Attributes:
        call: The function to differentiate, which returns `(value, (weight, aux))`.
        split: Number of micro-batches, and positions of arguments.
        real: Number of micro-batches to run; an integer, or a traced array.
        has_weight: Whether the function returns a weight.
        accumulator_dtype: Dtype of the gradient sums.
        reduction: Reduction of gradients.
        aux_reduction: Prefix tree of reductions of aux.
        transform: Transformation of the gradient of each micro-batch, or None.
        drops_nonfinite: Whether non-finite micro-batches are ignored.
    """

    call: Callable[..., tuple[Scalar, tuple[Tree, Tree]]]
    split: Split
    real: int | Array
    has_weight: bool
    accumulator_dtype: DTypeLike
    reduction: str
    aux_reduction: Tree
    transform: Transform | None
    drops_nonfinite: bool


def _evaluate(
    options: _Options, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Scalar, Tree, Tree, Scalar | None]:
    """Return the value, gradient, aux and weight of a batch."""
    split, real = bind_split(options.split, args), options.real
    call = functools.partial(options.call, **kwargs)
    for i in split.differentiated:
        check_placement(f"args[{i}]", args[i])
    # If no check or transformation needs the gradient of all devices, differentiate by parameters
    # that vary over devices. The loop then does not all-reduce gradients.
    sums_once = options.transform is None and not options.drops_nonfinite
    batch = jax.tree.leaves([args[i] for i in split.batches]) if sums_once else []
    axes = frozenset[str]().union(*map(varying_axes, batch))
    params = split.differentiated_of(args)
    local = split.with_differentiated(args, jax.tree.map(lambda x: vary(x, axes), params))

    weights = _weights(call, split, args, real) if options.has_weight else None
    micro_batch = functools.partial(_micro_batch, call, split, local, options.transform)
    shapes, grads = jax.eval_shape(micro_batch, 0, None)
    _check_equal_on_devices((shapes.value, grads), weights, real)

    def whole_aux() -> Tree:
        # Close over the arguments, because they may be flags or models, which are not arrays.
        return jax.eval_shape(lambda: call(*args))[1][1]

    def zeros(like: jax.ShapeDtypeStruct) -> Array:
        is_one = split.parts == 1  # a single micro-batch is not rounded
        dtype = accumulator_dtype(like.dtype, options.accumulator_dtype)
        return zeros_of_type(like, None if is_one else dtype)

    def combined(name: str, like: jax.ShapeDtypeStruct, stack: Array) -> Array:
        return reduced(name, like, stack, split, real, scales)

    def summed(total: Array, like: jax.ShapeDtypeStruct, arg: Array) -> Array:
        """Return a gradient, all-reduced over the axes over which its argument is replicated."""
        divisor = scales.sum_divisor() if options.reduction == "sum" else scales.divisor
        grad = divide(total, divisor).astype(like.dtype)
        return sum_over(grad, varying_axes(grad) & axes - varying_axes(arg))

    names = aux_reductions(options.aux_reduction, split, shapes.aux, whole_aux)
    outputs, totals, scales = run_micro_batches(
        micro_batch,
        shapes,
        jax.tree.map(zeros, grads),
        weights,
        split.parts,
        real,
        options.drops_nonfinite,
    )
    by_position = jax.tree.map(summed, totals, grads, {i: args[i] for i in totals})
    rows = functools.partial(gradient_rows, split=split, by=scales)
    by_position |= jax.tree.map(rows, shapes.rows, outputs.rows)
    value = combined("mean", shapes.value, outputs.value)
    aux = jax.tree.map(combined, names, shapes.aux, outputs.aux)
    weight = None if scales.weights is None else jnp.sum(scales.weights)
    return value, split.in_structure_of_gradient(by_position), aux, weight


def _micro_batch(
    call: Callable[..., tuple[Scalar, tuple[Tree, Tree]]],
    split: Split,
    args: Sequence[Any],
    transform: Transform | None,
    index: Array | int,
    scale: Scalar | None,
) -> tuple[MicroOutputs, dict[int, Tree]]:
    """Return the outputs of a micro-batch, and its gradients multiplied by the scale.

    The loss is multiplied by the scale instead of the gradient, because XLA keeps the all-reduce of
    a gradient inside the loop if the gradient is multiplied by a weight (JAX 0.12, GPU and TPU).
    """

    def loss(*args: Any) -> tuple[Scalar, tuple[Scalar, Tree]]:
        value, (_, aux) = call(*args)
        return (value if transform else scaled(value, scale)), (value, aux)

    chosen = micro_arguments(args, split, index)
    argnums = split.differentiated[0] if split.takes_one else split.differentiated
    (_, (value, aux)), grads = jax.value_and_grad(loss, argnums, has_aux=True)(*chosen)
    if transform is not None:  # it receives the gradient of the loss
        grads = _transformed(transform, grads, split.differentiated_of(chosen))
        grads = jax.tree.map(lambda x: scaled(x, scale), grads)
    of_args = (grads,) if split.takes_one else grads
    by_position = dict(zip(split.differentiated, of_args, strict=True))
    rows = {i: by_position.pop(i) for i in split.batches if i in by_position}
    return MicroOutputs(value, rows, aux), by_position


def _weights(
    call: Callable[..., tuple[Scalar, tuple[Tree, Tree]]],
    split: Split,
    args: Sequence[Any],
    real: int | Array,
) -> Array:
    """Return the weight of each micro-batch that runs, and 0 for padding.

    The loss is multiplied by the weight of a micro-batch relative to the mean weight, so the
    weights must be known before the first gradient. XLA removes everything else that `call`
    computes.
    """

    def weight(index: Array) -> Array:
        weight = call(*micro_arguments(args, split, index))[1][0]
        as_weight(weight)  # raises if it is not a real scalar
        return jnp.where(index < real, weight, jnp.zeros_like(weight))

    return lax.map(weight, jnp.arange(split.parts if is_traced(real) else real))


def _check_equal_on_devices(outputs: Tree, weights: Array | None, real: int | Array) -> None:
    """Raise for weights that vary over mesh axes over which the value or a gradient does not."""
    common = frozenset.intersection(*map(varying_axes, jax.tree.leaves(outputs)))
    given = [("num_real_microbatches", "", jnp.asarray(real))]
    if weights is not None:
        given.append(("fun", "a function whose weight is ", weights))
    for argument, subject, x in given:
        axes = sorted(varying_axes(x) - common)
        if axes:
            rule = f"{subject}equal on all devices, like the loss or the gradient of a micro-batch"
            hint = (
                "All-reduce it, or omit `drop_nonfinite` and `microbatch_transform`, which "
                "all-reduce the gradient of every micro-batch."
            )
            raise value_error(argument, rule, f"a value that varies over {axes}", hint)


def _transformed(transform: Any, grads: Tree, params: Tree) -> Tree:
    """Apply a function, or a gradient transformation with its initial state, to a gradient."""
    if not hasattr(transform, "update"):
        return transform(grads)
    return transform.update(grads, transform.init(params), params)[0]
