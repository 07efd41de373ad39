"""Compute per-example gradient norms."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from .._errors import public
from .._types import Array, Labels
from ._losses import Loss, by_label, groups_of
from ._sum import sums_and_norms


@public
def norms(
    fun: Callable[..., Any],
    *,
    argnums: int | Sequence[int] = 0,
    batch_argnums: int | Sequence[int] = 1,
    has_aux: bool = False,
    has_weight: bool = False,
    param_labels: Labels | None = None,
) -> Callable[..., Array | dict[Hashable, Array]]:
    """Compute the gradient norm of each example without materializing per-example gradients.

    `norms[i] = |grad fun(params, batch[i])|`, equal to the norms of `jax.vmap(jax.grad(fun))` to
    1e-5. The gradient of a weight is the product of the layer's inputs and output gradients. The
    norm is computed from inputs and output gradients if they are smaller than their product.

    | example | norm |
    | --- | --- |
    | tokens that cancel; a norm above 1e19 or below 1.8e-12 | exact; this example is materialized |
    | a gradient with a NaN | NaN; the norms of other examples do not change |
    | an empty batch | an empty vector |
    | integer leaves of the parameters | ignored |

    Call the returned function inside `jax.jit`.

    Args:
        fun: Loss function of a single example, as in `value_and_grad`; weight and auxiliary data
            are ignored.
        argnums: See `value_and_grad`.
        batch_argnums: See `value_and_grad`.
        has_aux: See `value_and_grad`.
        has_weight: See `value_and_grad`.
        param_labels: See `value_and_grad`.

    Returns:
        A function that takes the arguments of `fun` for a batch and returns a vector of norms,
        float32[B] (float64 if a leaf has 64 bits), or with `param_labels` a mapping from label to
        such a vector.

    Raises:
        TypeError: If `fun` is not callable or its value is not a real scalar.
        ValueError: If the batch leaves have different numbers of examples.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> def loss(w, x):
        ...     return jnp.dot(w, x)
        >>> norms = gcx.per_example.norms(loss)(jnp.ones(2), jnp.array([[3.0, 4.0], [0.0, 2.0]]))
        >>> [round(norm, 3) for norm in norms.tolist()]
        [5.0, 2.0]

    References:
        Goodfellow 2015, arXiv 1510.01799; Li et al. 2022, arXiv 2110.05679.
    """
    loss = Loss(fun, argnums, batch_argnums, has_aux, has_weight)

    def run(*args: Any, **kwargs: Any) -> Array | dict[Hashable, Array]:
        examples = loss.bind(args, kwargs)
        groups = groups_of(examples, param_labels)
        outputs = examples.outputs(examples.batch)
        _, rows = sums_and_norms(outputs, examples.leaves, list(groups.values()), None)
        return by_label(groups, rows)

    return run
