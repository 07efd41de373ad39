"""Compute per-example gradient norms and list their cost."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._checks import leaf_path
from .._errors import public
from .._leaves import is_measured
from .._types import Array, Labels, Tree
from ..accumulation._split import positions
from ._lazy import Value, as_lazy
from ._losses import Examples, Loss, by_label, groups_of, replace_measured
from ._measure import gram_terms, separate
from ._sum import sums_and_norms


class LeafCost(NamedTuple):
    """Method and cost of computing the per-example gradient norm of one leaf.

    Attributes:
        method: "gram" (Gram matrices of the factors), "product" (the gradient is computed from
            factors, because it is smaller than they are) or "materialized" (computed as by
            `jax.vmap(jax.grad(fun))`, for small leaves and unsupported operations).
        elements: Number of array elements that are materialized per example in addition to the
            factors.
        multiplications: Number of multiplications per example for computing the norm from the
            factors.
    """

    method: str
    elements: int
    multiplications: int


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

    Call the returned function inside `jax.jit`. `explain` lists the method for each leaf.

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
        return by_label(groups, _norms(examples, list(groups.values())))

    return run


@public
def leaf_norms(
    fun: Callable[..., Any],
    *,
    argnums: int | Sequence[int] = 0,
    batch_argnums: int | Sequence[int] = 1,
    has_aux: bool = False,
    has_weight: bool = False,
) -> Callable[..., Tree]:
    """Compute the per-example gradient norm of each leaf.

    Args:
        fun: Loss function of a single example, as in `norms`.
        argnums: See `value_and_grad`.
        batch_argnums: See `value_and_grad`.
        has_aux: See `value_and_grad`.
        has_weight: See `value_and_grad`.

    Returns:
        A function that takes the arguments of `fun` for a batch. Its result has the structure of
        the differentiated arguments; each leaf is float32[B], and None replaces an integer leaf.

    Raises:
        TypeError: If `fun` is not callable or its value is not a real scalar.
        ValueError: If the batch leaves have different numbers of examples.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> def loss(p, x):
        ...     return jnp.dot(p["w"], x) + 2.0 * p["b"]
        >>> params = {"w": jnp.ones(2), "b": jnp.array(0.0)}
        >>> norms = gcx.per_example.leaf_norms(loss)(params, jnp.array([[3.0, 4.0]]))
        >>> round(norms["w"].item(), 3), round(norms["b"].item(), 3)
        (5.0, 2.0)
    """
    loss = Loss(fun, argnums, batch_argnums, has_aux, has_weight)

    def run(*args: Any, **kwargs: Any) -> Tree:
        examples = loss.bind(args, kwargs)
        groups = [[i] for i in range(len(examples.leaves))]
        return replace_measured(examples.params, _norms(examples, groups), lambda _: None)

    return run


@public
def explain(
    fun: Callable[..., Any],
    *,
    argnums: int | Sequence[int] = 0,
    batch_argnums: int | Sequence[int] = 1,
    has_aux: bool = False,
    has_weight: bool = False,
) -> Callable[..., dict[str, LeafCost]]:
    """List the method and cost of the norm computation for each leaf without executing it.

    Args:
        fun: Loss function of a single example, as in `norms`.
        argnums: See `value_and_grad`.
        batch_argnums: See `value_and_grad`.
        has_aux: See `value_and_grad`.
        has_weight: See `value_and_grad`.

    Returns:
        A function that takes the arguments of `fun` for a batch, with `jax.ShapeDtypeStruct`
        allowed in place of arrays, and returns a mapping from leaf paths to `LeafCost`.

    Raises:
        TypeError: If `fun` is not callable or its value is not a real scalar.
        ValueError: If the batch leaves have different numbers of examples.

    Examples:
        >>> import jax, jax.numpy as jnp, gradclip_jax as gcx
        >>> def loss(w, x):
        ...     return jnp.sum(jnp.tanh(x @ w))
        >>> shape = jax.ShapeDtypeStruct
        >>> costs = gcx.per_example.explain(loss)(
        ...     shape((512, 512), jnp.float32), shape((32, 10, 512), jnp.float32)
        ... )
        >>> costs["params"].method, costs["params"].elements
        ('gram', 200)
    """
    loss = Loss(fun, argnums, batch_argnums, has_aux, has_weight)

    def run(*args: Any, **kwargs: Any) -> dict[str, LeafCost]:
        costs: dict[str, LeafCost] = {}

        def visit(chosen: dict[int, Tree]) -> Array:
            examples = loss.bind([chosen.get(i, x) for i, x in enumerate(args)], kwargs)
            # The batch may be empty.
            one = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), examples.batch)
            outputs = examples.outputs_of_one(examples.leaves, one)
            leaves = jax.tree_util.tree_leaves_with_path(examples.params)
            paths = [leaf_path("params", path) for path, x in leaves if is_measured(x)]
            costs.update(zip(paths, map(_cost, outputs.grads), strict=True))
            return outputs.value

        # Trace only differentiated and batched arguments, because the others may not be arrays.
        given = *positions("argnums", argnums), *positions("batch_argnums", batch_argnums)
        traced = {i % len(args) for i in given}
        jax.eval_shape(visit, {i: args[i] for i in traced})
        return costs

    return run


def _norms(examples: Examples, groups: list[list[int]]) -> list[Array]:
    outputs = examples.outputs(examples.batch)
    return sums_and_norms(outputs, examples.leaves, groups, None)[1]


def _cost(value: Value) -> LeafCost:
    of_parts = list(map(_part_cost, separate(value)))
    worst = max(of_parts, key=lambda cost: cost.elements, default=LeafCost("gram", 0, 0))
    return worst._replace(multiplications=sum(cost.multiplications for cost in of_parts))


def _part_cost(part: Value) -> LeafCost:
    lazy = as_lazy(part)
    rows = sum(term.rows for term in lazy.terms)
    if gram_terms(part) is None:
        is_plain = all(len(term.factors) == 1 for term in lazy.terms)
        size = lazy.elements()
        return LeafCost("materialized" if is_plain else "product", size, rows * size)
    factors = max(len(term.factors) for term in lazy.terms)
    return LeafCost("gram", factors * rows**2, rows * lazy.factor_elements())
