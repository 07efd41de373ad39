"""Norms of each example's gradient: global, by group, by leaf; and what they cost."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from .._errors import public
from .._leaves import measured_leaves
from .._types import Array, Labels, Tree
from ..accumulation._split import positions
from ._lazy import Lazy, as_lazy
from ._losses import Examples, Loss, groups_of
from ._measure import gram_terms, separate
from ._sum import GroupNorms, LeafGroups, sums_and_norms


class LeafCost(NamedTuple):
    """How the norm of one leaf's per-example gradient is taken, and what that costs an example.

    Attributes:
        method: "gram" (Gram matrices of its factors), "product" (multiplied out from its factors,
            which are larger) or "materialized" (as `jax.vmap` of `jax.grad` does: small, or not
            followed).
        elements: what is written down for the norm beside the factors, in numbers.
        multiplications: for the norm, given the factors.
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
) -> Callable[..., Any]:
    """Measures the gradient of each example by itself, without writing the gradients down.

    `norms[i] = |grad fun(params, batch[i])|`, that of `jax.vmap(jax.grad(fun))` for every loss to
    1e-5. What the gradient of a weight is made of (activations, and the gradient of the layer's
    output) is kept instead of the gradient itself wherever that is smaller.

    | example | norm |
    | --- | --- |
    | tokens that cancel; gradients beyond 1e19, or below 1e-19 | exact: they are written down |
    | a NaN in its gradient | NaN; the other examples are not touched |
    | batch of no examples | an empty vector |
    | integer leaves of the parameters | left out |

    Call it under `jax.jit`. `explain` shows which leaves are followed.

    Args:
        fun: as for `value_and_grad`; weight and auxiliary data are dropped.
        argnums: as for `value_and_grad`.
        batch_argnums: as for `value_and_grad`.
        has_aux: as for `value_and_grad`.
        has_weight: as for `value_and_grad`.
        param_labels: as for `value_and_grad`.

    Returns:
        A function, called as that of `value_and_grad`, to the norms: float32[B] (float64 with a 64
        bit leaf), or with `param_labels` a mapping from label to such a vector.

    Raises:
        TypeError: `fun` cannot be called, or its value is no real scalar.
        ValueError: leaves differ in their number of examples.

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

    def run(*args: Any, **kwargs: Any) -> Any:
        examples = loss.bind(args, kwargs)
        by_label = _norms(examples, groups_of(examples.params, param_labels))
        return by_label[None] if param_labels is None else by_label

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
    """Measures each leaf of each example's gradient, in the same pass.

    Args:
        fun: as for `norms`.
        argnums: as for `value_and_grad`.
        batch_argnums: as for `value_and_grad`.
        has_aux: as for `value_and_grad`.
        has_weight: as for `value_and_grad`.

    Returns:
        A function, called as that of `value_and_grad`, to a tree like what is differentiated by,
        each leaf float32[B]; None in place of an integer leaf.

    Raises:
        TypeError: `fun` cannot be called, or its value is no real scalar.
        ValueError: leaves differ in their number of examples.

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
        groups: LeafGroups = {i: [i] for i, _ in enumerate(measured_leaves(examples.params))}
        return examples.rebuild(list(_norms(examples, groups).values()), lambda _: None)

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
    """Lists how the norm of each leaf is taken, from shapes alone.

    Args:
        fun: as for `norms`.
        argnums: as for `value_and_grad`.
        batch_argnums: as for `value_and_grad`.
        has_aux: as for `value_and_grad`.
        has_weight: as for `value_and_grad`.

    Returns:
        A function, called as that of `value_and_grad`, to a mapping from the path of a leaf to its
        `LeafCost`. Arrays may be given as `jax.ShapeDtypeStruct`.

    Raises:
        TypeError: `fun` cannot be called, or its value is no real scalar.
        ValueError: leaves differ in their number of examples.

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

        def visit(chosen: dict[int, Any]) -> Array:
            examples = loss.bind([chosen.get(i, x) for i, x in enumerate(args)], kwargs)
            one = jax.tree.map(lambda x: x[0], examples.batch)
            outputs = examples.outputs_of_one(measured_leaves(examples.params), one)
            costs.update(zip(examples.paths(), map(_cost, outputs.grads), strict=True))
            return outputs.value

        # Other arguments may be anything, such as a flag or a model.
        traced = {i % len(args) for i in (*positions(argnums), *positions(batch_argnums))}
        jax.eval_shape(visit, {i: args[i] for i in traced})
        return costs

    return run


def _norms(examples: Examples, groups: LeafGroups) -> GroupNorms:
    outputs = examples.outputs(examples.batch)
    return sums_and_norms(outputs, measured_leaves(examples.params), groups, None)[1]


def _cost(value: Array | Lazy) -> LeafCost:
    of_parts = list(map(_part_cost, separate(value)))
    worst = max(of_parts, key=lambda cost: cost.elements, default=LeafCost("gram", 0, 0))
    return worst._replace(multiplications=sum(cost.multiplications for cost in of_parts))


def _part_cost(part: Array | Lazy) -> LeafCost:
    lazy = as_lazy(part)
    rows = sum(term.rows() for term in lazy.terms)
    if gram_terms(part) is None:
        is_plain = all(len(term.factors) == 1 for term in lazy.terms)
        size = lazy.elements()
        return LeafCost("materialized" if is_plain else "product", size, rows * size)
    factors = max(len(term.factors) for term in lazy.terms)
    return LeafCost("gram", factors * rows**2, rows * lazy.factor_elements())
