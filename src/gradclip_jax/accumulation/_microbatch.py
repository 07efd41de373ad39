"""Value and gradient of a batch, computed one micro-batch at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import DTypeLike

from .._checks import call_user, check_callable, check_choice, check_transformation, shapes_of
from .._errors import public, type_error
from .._format import shortened
from .._run_if import like_dtypes
from .._types import FLOAT32, Array, Count, Number, Scalar, Tree
from .._weighted_sum import REDUCTIONS, as_weight, check_dtype, scaled, sum_dtype
from ..norms._mesh import check_equal_on_devices, check_placement, sum_over, vary, varying_axes
from ._outputs import AUX_REDUCTIONS, aux_leaves, empty_outputs, run_micro_batches
from ._split import Split, bind_split, check_parts, with_weight_and_aux

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
    accumulator_dtype: DTypeLike | None = FLOAT32,
    reduction: Literal["mean", "sum"] = "mean",
    aux_reduction: Tree = None,
    microbatch_transform: Transform | None = None,
) -> Callable[..., Any]:
    """Compute `jax.value_and_grad(fun)` with the memory of one micro-batch instead of the batch.

    The returned function splits the batch, runs `fun` on one micro-batch at a time, and averages
    values and gradients. The result is the same as for the whole batch if `fun` is a mean over
    examples, or, with `has_weight`, a weighted mean, for example over tokens. If `fun` compares
    examples with each other, as a contrastive loss or batch normalization does, the result differs,
    and no error is raised. Check that the loss of a batch is the mean of the losses of its halves,
    or split only the encoder, with `jax.lax.map(jax.checkpoint(encode), micro_batches)`.

    Use `accumulate_gradients` to accumulate over several calls; both can be combined.

    | leaf of aux | default without `aux_reduction` |
    | --- | --- |
    | an array with one or more rows per example | the rows of all examples, in their order |
    | a floating-point scalar | the (weighted) mean over micro-batches |
    | anything else, such as a count, a flag or a key | an error that requires `aux_reduction` |

    | micro-batch | result |
    | --- | --- |
    | weight 0, even if its gradient is NaN | contributes 0 to value, gradient and means |
    | beyond `num_real_microbatches` | does not run; if none runs, all results are zero |

    Micro-batch i contains every `num_microbatches`-th example, starting at i. Under `jit`, each
    device therefore splits its own shard of the batch. If an argument is replicated over devices
    that share the batch, its gradient is all-reduced only once, after the last micro-batch (on CPU
    only inside `shard_map`).

    Args:
        fun: Function to differentiate, as for `jax.value_and_grad`. It returns a scalar value,
            `(value, aux)` with `has_aux`, `(value, weight)` with `has_weight`, or
            `(value, (weight, aux))` with both; weight is a scalar >= 0.
        num_microbatches: Number of micro-batches; an integer >= 1.
        num_real_microbatches: Number of micro-batches to run, which may be traced to support
            varying batch sizes without retracing. None runs all of them. The remaining
            micro-batches are padding. They do not contribute to value, gradient, weight or aux, and
            their rows are zeros. A traced number is clamped to [0, `num_microbatches`].
        argnums: Positions of the differentiated arguments, which must not be split.
        has_aux: Whether `fun` returns auxiliary data.
        batch_argnums: Positions of the arguments that are split along the first axis of each leaf.
        rng_argnums: Positions of the arguments that are random keys or pytrees of random keys. Each
            micro-batch receives different keys.
        has_weight: Whether `fun` returns a weight, which is converted to float32; value and
            gradient are then weighted means. The weights of all micro-batches are computed first,
            and each loss is multiplied by the ratio of its weight and the mean weight before it is
            differentiated, so that cotangents inside `fun` are about as large as without weights.
            Host callbacks in `fun` run twice.
        accumulator_dtype: Dtype of the gradient sums; see `accumulate_gradients`.
        reduction: Reduction of values and gradients; see `accumulate_gradients`.
        aux_reduction: Prefix tree of aux, with values "mean" (weighted), "sum", "last",
            "concatenate", or None for the default in the table.
        microbatch_transform: Function or gradient transformation that is applied to the gradient of
            each micro-batch, for example to clip it. Its state is initialized for every
            micro-batch. The gradient of every micro-batch is then all-reduced, so that weights and
            `num_real_microbatches` must be equal on all devices.

    Returns:
        A function like `jax.value_and_grad(fun, argnums, has_aux=has_aux or has_weight)`. In its
        result, the weight is the sum over all micro-batches.

    Raises:
        ValueError: If `num_microbatches` is less than 1, does not divide the batch size, or is less
            than a static `num_real_microbatches`, or if an argument is differentiated and split.
        TypeError: If `fun` is not callable, if its value or weight is not a scalar, or if a leaf of
            aux requires another `aux_reduction`.

    Examples:
        >>> import jax, jax.numpy as jnp, gradclip_jax as gcx
        >>> def loss(w, x):
        ...     return jnp.mean((w * x) ** 2)
        >>> value_and_grad = gcx.microbatched_value_and_grad(loss, 2)
        >>> value, grad = jax.jit(value_and_grad)(1.0, jnp.array([1.0, 2.0, 3.0, 4.0]))
        >>> float(value), float(grad)
        (7.5, 15.0)
    """
    check_callable("fun", fun, "Pass the loss function.")
    check_dtype("accumulator_dtype", accumulator_dtype)
    check_choice("reduction", reduction, REDUCTIONS)
    for word in jax.tree.leaves(aux_reduction):
        check_choice("aux_reduction", word, AUX_REDUCTIONS)
    if callable(microbatch_transform):
        check_callable("microbatch_transform", microbatch_transform, "Pass a function or a clip.")
    elif microbatch_transform is not None:
        check_transformation("microbatch_transform", microbatch_transform)
    check_parts(num_microbatches, num_real_microbatches)
    call = with_weight_and_aux(fun, has_weight, has_aux)
    grad_dtype = functools.partial(sum_dtype, dtype=accumulator_dtype)

    def run(*args: Any, **kwargs: Any) -> Any:
        split = bind_split(
            args, num_microbatches, argnums, batch_argnums, rng_argnums, num_real_microbatches
        )
        split.warn_of_unsplit(args, kwargs)
        for i in split.argnums:
            check_placement(f"args[{i}]", args[i])
        bound = functools.partial(call, **kwargs)
        micro_batches = _bind(bound, split, args, microbatch_transform)
        weights = micro_batches.weights(has_weight)
        value, grads, aux = _reduced(micro_batches, weights, reduction, aux_reduction, grad_dtype)
        if has_weight:
            total_weight = jnp.sum(weights)
            return (value, (total_weight, aux) if has_aux else total_weight), grads
        return (value, aux) if has_aux else value, grads

    return run


class _MicroBatches(NamedTuple):
    """The micro-batches of one call.

    Attributes:
        call: The function to differentiate, which returns `(value, (weight, aux))`.
        split: How the arguments are split.
        args: Arguments of the call. The differentiated ones are cast to a type that varies over
            `axes`, so that the loop over micro-batches does not all-reduce their gradients.
        params: Differentiated arguments, as the user passed them.
        axes: Mesh axes over which gradients are summed after the loop.
        transform: Transformation of the gradient of each micro-batch, or None.
    """

    call: Callable[..., tuple[Scalar, tuple[Tree, Tree]]]
    split: Split
    args: Sequence[Any]
    params: Tree
    axes: frozenset[str]
    transform: Transform | None

    def weights(self, has_weight: bool) -> Array:
        """Return the weight of each micro-batch, 1 by default, and 0 for padding.

        The loss is multiplied by the weight of a micro-batch relative to the mean weight, so the
        weights must be known before the first gradient. XLA removes everything else that `call`
        computes.
        """
        split = self.split

        def weight(index: Array) -> Array:
            _, (weight, _) = self.call(*split.arguments(self.args, index))
            return as_weight(weight)

        indices = jnp.arange(split.num_scanned)
        weights = lax.map(weight, indices) if has_weight else jnp.ones(len(indices), jnp.float32)
        weights = jnp.where(indices < split.num_real, weights, 0)
        return jnp.pad(weights, (0, split.num_parts - split.num_scanned))

    def run(self, index: Array | int, scale: Scalar) -> tuple[tuple[Scalar, Tree], Tree]:
        """Return `(value, aux)` of a micro-batch, and its gradients multiplied by the scale.

        The loss is multiplied by the scale instead of the gradient, because XLA keeps the
        all-reduce of a gradient inside the loop if the gradient is multiplied by a weight
        (JAX 0.12, GPU and TPU). A transformation, however, receives the unscaled gradient.
        """
        split, transform = self.split, self.transform

        def scaled(x: Array) -> Array:
            return x * scale.astype(x.dtype)

        def loss(*args: Any) -> tuple[Scalar, tuple[Scalar, Tree]]:
            value, (_, aux) = self.call(*args)
            value = jnp.asarray(value)
            return scaled(value) if transform is None else value, (value, aux)

        args = split.arguments(self.args, index)
        argnums = split.argnums[0] if split.has_one_argnum else split.argnums
        (_, outputs), grads = jax.value_and_grad(loss, argnums, has_aux=True)(*args)
        if transform is None:
            return outputs, grads
        if isinstance(transform, optax.GradientTransformation):
            params = split.differentiated(args)
            grads, _ = transform.update(grads, transform.init(params), params)
        else:
            name = "microbatch_transform"
            transformed = call_user(name, name, transform, grads)
            if shapes_of(transformed) != shapes_of(grads):
                rule = "a function that returns a tree with the shapes of the gradient"
                hint = "Call a factory, as in `optax.clip(1.0)`."
                raise type_error(name, rule, shortened(transformed), hint)
            grads = transformed
        return outputs, jax.tree.map(scaled, grads)

    def whole_aux(self) -> Tree:
        """Return the shapes of the auxiliary output of the whole batch."""
        # Close over the arguments, because they may be flags or models, which are not arrays.
        return jax.eval_shape(lambda: self.call(*self.args))[1][1]

    def all_reduced(self, grads: Tree) -> Tree:
        """Sum each gradient over the mesh axes along which its parameter is replicated."""

        def all_reduced(grad: Array, param: Array) -> Array:
            return sum_over(grad, varying_axes(grad) & (self.axes - varying_axes(param)))

        return jax.tree.map(all_reduced, grads, self.params)


def _bind(
    call: Callable[..., Any], split: Split, args: Sequence[Tree], transform: Transform | None
) -> _MicroBatches:
    """Split the arguments of a call into micro-batches."""
    params = split.differentiated(args)
    if transform is not None:
        # A transformation needs the gradient of all devices in every iteration of the loop.
        return _MicroBatches(call, split, args, params, frozenset(), transform)
    batch = jax.tree.leaves([args[i] for i in split.batch_argnums])
    axes = frozenset[str]().union(*map(varying_axes, batch))
    varying = jax.tree.map(lambda x: vary(x, axes), params)
    args = split.with_differentiated(args, varying)
    return _MicroBatches(call, split, args, params, axes, None)


def _reduced(
    micro_batches: _MicroBatches,
    weights: Array,
    reduction: str,
    aux_reduction: Tree,
    grad_dtype: Callable[[DTypeLike], DTypeLike],
) -> tuple[Scalar, Tree, Tree]:
    """Run all micro-batches; return their reduced value, gradients and auxiliary output."""
    split = micro_batches.split
    (value_like, aux_like), grads_like = jax.eval_shape(micro_batches.run, 0, jnp.float32(1))
    # A gradient that is all-reduced for each micro-batch needs equal weights on all devices.
    outputs = jax.tree.leaves((value_like, grads_like))
    common = frozenset.intersection(*map(varying_axes, outputs))
    check_equal_on_devices("num_real_microbatches", split.num_real, common, "num_real")
    check_equal_on_devices("weight", weights, common, "weight")

    aux = aux_leaves(aux_reduction, split, aux_like, micro_batches.whole_aux)
    empty = empty_outputs(value_like, grads_like, aux, grad_dtype)
    # The weights are divided by the mean of the positive weights, so that they sum to `count`.
    total_weight, count = jnp.sum(weights), jnp.maximum(jnp.sum(weights > 0), 1)
    mean_weight = jnp.where(total_weight > 0, total_weight, 1) / count.astype(jnp.float32)
    scales = weights / mean_weight
    sums, others = run_micro_batches(micro_batches.run, empty, aux, scales, split)

    value, grads, means = sums.result("mean")
    if reduction == "sum":
        value, grads, _ = scaled(sums.result("sum"), mean_weight)
    grads = like_dtypes(micro_batches.all_reduced(grads), grads_like)
    means = {i: x.astype(aux[i].dtype) for i, x in means.items()}
    by_index = means | others
    aux_tree = jax.tree.unflatten(
        jax.tree.structure(aux_like), [by_index[i] for i in range(len(aux))]
    )
    return value.astype(value_like.dtype), grads, aux_tree
