"""Value and gradient of a batch, computed one micro-batch at a time."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend import core
from jax.typing import DTypeLike

from .._checks import (
    check_callable,
    check_choice,
    check_count,
    check_dtype,
    check_transformation,
    dtype_of,
)
from .._errors import public, value_error
from .._mesh import check_placement, sum_over, vary, varying_axes
from .._types import FLOAT32, Array, Count, Number, Tree
from ._outputs import (
    AUX_REDUCTIONS,
    BatchOutputs,
    aux_reductions,
    output_reductions,
    whole_batch,
)
from ._reduction import REDUCTIONS, as_weight
from ._split import Split, bind_split, check_real, in_one_form, micro_arguments, positions

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
            gradient are then weighted means. If `fun` contains a `custom_vjp` or float16, or has
            16-bit gradients, the gradient of every micro-batch is all-reduced.
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
    check_count("num_microbatches", num_microbatches, "Pass 1 to use the whole batch at once.")
    check_real(num_real_microbatches, num_microbatches)
    check_dtype("accumulator_dtype", accumulator_dtype)
    check_choice("reduction", reduction, REDUCTIONS)
    for word in jax.tree.leaves(aux_reduction):
        check_choice("aux_reduction", word, AUX_REDUCTIONS)
    if microbatch_transform is not None and not callable(microbatch_transform):
        check_transformation("microbatch_transform", microbatch_transform)
    given = Split(
        parts=int(num_microbatches),
        batches=positions("batch_argnums", batch_argnums),
        keys=positions("rng_argnums", rng_argnums),
        differentiated=positions("argnums", argnums),
        takes_one=not np.ndim(argnums),
    )
    call = in_one_form(fun, has_weight, has_aux)
    value_and_grad = jax.value_and_grad(call, argnums, has_aux=True)
    sums_once = microbatch_transform is None and not drop_nonfinite

    def run(*args: Any, **kwargs: Any) -> Any:
        split = bind_split(given, args)
        params, parts = split.differentiated_of(args), split.parts
        for i in split.differentiated:
            check_placement(f"args[{i}]", args[i])
        batch = jax.tree.leaves([args[i] for i in split.batches]) if sums_once else []
        axes = frozenset[str]().union(*map(varying_axes, batch))
        # With varying arguments, the loop does not all-reduce gradients.
        varying = jax.tree.map(lambda x: vary(x, axes), params) if axes else params
        local = split.with_differentiated(args, varying)

        def micro_batch(index: Array | int, *, holds_weight: bool = False) -> BatchOutputs:
            chosen = micro_arguments(local, split, index)
            if holds_weight:
                return _weighted(functools.partial(call, **kwargs), split, chosen)
            (value, (weight, aux)), grads = value_and_grad(*chosen, **kwargs)
            if drop_nonfinite and weight is None:
                weight = jnp.float32(1)
            out = BatchOutputs(value, grads, aux, weight)
            if microbatch_transform is not None:
                own = split.differentiated_of(chosen)
                out = out._replace(grads=_transformed(microbatch_transform, grads, own))
            return out

        def whole_aux() -> Tree:
            # Close over the arguments, because they may be flags or models, which are not arrays.
            return jax.eval_shape(lambda: call(*args, **kwargs))[1][1]

        def first_value() -> Tree:
            return call(*micro_arguments(args, split, 0), **kwargs)

        shapes = jax.eval_shape(micro_batch, 0)
        _check_devices(shapes, num_real_microbatches, sums_once)
        # Weighted gradients can be all-reduced once after the loop instead of in each iteration.
        holds_weight = has_weight and parts > 1 and sums_once and not axes
        holds_weight = holds_weight and _fits_weight(shapes) and _scales_with_weight(first_value)
        out = whole_batch(
            functools.partial(micro_batch, holds_weight=holds_weight),
            output_reductions(
                shapes,
                split,
                _grad_names(reduction, params, split),
                accumulator_dtype,
                aux_reductions(aux_reduction, split, shapes.aux, whole_aux),
                holds_weight=holds_weight,
            ),
            shapes,
            parts,
            num_real_microbatches,
            drops_nonfinite=drop_nonfinite,
        )
        value = out.value
        if has_weight and has_aux:
            value = value, (out.weight, out.aux)
        elif has_weight or has_aux:
            value = value, out.weight if has_weight else out.aux
        if not axes:
            return value, out.grads
        return value, jax.tree.map(functools.partial(_all_reduced, axes), out.grads, params)

    return run


def _all_reduced(axes: frozenset[str], grad: Array, arg: Array) -> Array:
    """All-reduce a gradient over the mesh axes over which its argument is replicated."""
    return sum_over(grad, varying_axes(grad) & axes - varying_axes(arg))


def _weighted(call: Callable[..., Any], split: Split, args: Sequence[Tree]) -> BatchOutputs:
    """Compute the value and gradient of a micro-batch, both multiplied by its weight."""

    def of_params(params: Tree) -> tuple[Array, Tree]:
        return call(*split.with_differentiated(args, params))

    value, pull_back, (weight, aux) = jax.vjp(
        of_params, split.differentiated_of(args), has_aux=True
    )
    factor = jnp.asarray(as_weight(weight)).astype(value.dtype)
    (grads,) = pull_back(factor)
    return BatchOutputs(value * factor, grads, aux, weight)


def _fits_weight(shapes: BatchOutputs) -> bool:
    """Return whether the dtypes of value and gradient can represent products with the weight.

    For example, float16 cannot represent a weight of 70,000, and bfloat16 cannot represent 1,001.
    """
    leaves = jax.tree.leaves((shapes.value, shapes.grads))
    is_wide = all(jnp.finfo(x.dtype).bits >= 32 for x in leaves)
    return is_wide and varying_axes(shapes.weight) == varying_axes(shapes.value)


def _scales_with_weight(fun: Callable[[], Tree]) -> bool:
    """Return whether the gradient of a function is proportional to its cotangent.

    A `custom_vjp`, such as that of `clip_cotangent`, may be nonlinear, and dtypes with less than 8
    exponent bits may overflow.
    """
    jaxprs = [jax.make_jaxpr(fun)().jaxpr]
    while jaxprs:
        for eqn in jaxprs.pop().eqns:
            dtypes = [dtype_of(v.aval) for v in eqn.outvars]
            floats = [x for x in dtypes if jnp.issubdtype(x, jnp.floating)]
            if "custom_vjp" in eqn.primitive.name or any(jnp.finfo(x).nexp < 8 for x in floats):
                return False
            inner = [getattr(x, "jaxpr", x) for x in jax.tree.leaves(eqn.params)]
            jaxprs += [x for x in inner if isinstance(x, core.Jaxpr)]
    return True


def _check_devices(shapes: BatchOutputs, real: Number | None, sums_once: bool) -> None:
    """Raise for unequal weights of devices if each micro-batch is all-reduced."""
    if sums_once:
        return
    hint = "All-reduce it first, or use neither `drop_nonfinite` nor `microbatch_transform`."
    rule = "equal on all devices, because each micro-batch is all-reduced"
    axes = frozenset[str]() if real is None else varying_axes(jnp.asarray(real))
    if axes:
        got = f"a value that varies over {sorted(axes)}"
        raise value_error("num_real_microbatches", rule, got, hint)
    if shapes.weight is None:
        return
    for grad in jax.tree.leaves(shapes.grads):
        axes = varying_axes(shapes.weight) - varying_axes(grad)
        if axes:
            got = f"a weight that varies over {sorted(axes)}"
            raise value_error("fun", f"a function whose weight is {rule}", got, hint)


def _transformed(transform: Any, grads: Tree, params: Tree) -> Tree:
    """Apply a function, or a gradient transformation with its initial state, to a gradient."""
    if not hasattr(transform, "update"):
        return transform(grads)
    return transform.update(grads, transform.init(params), params)[0]


def _grad_names(reduction: str, params: Tree, split: Split) -> Tree:
    """Return the reduction of each gradient; gradients of split arguments are concatenated."""
    of_args = (params,) if split.takes_one else params
    chosen: list[Tree] = []
    for i, arg in zip(split.differentiated, of_args, strict=True):
        name = "concatenate" if i in split.batches else reduction
        chosen.append(jax.tree.map(lambda _, name=name: name, arg))
    return chosen[0] if split.takes_one else tuple(chosen)
