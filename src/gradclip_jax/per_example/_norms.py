"""Norms of each example's gradient: global, by group, by leaf; and what they cost."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import jax

from .._checks import leaf_path
from .._types import Array, Labels, Tree
from ..clipping._norm import is_measured
from ._cost import elements, factor_elements, rows
from ._examples import (
    LossOptions,
    as_batch,
    as_loss,
    groups_of,
    lazy_gradient,
    measure,
    on_measured,
)
from ._factors import Lazy
from ._measure import gram_terms, separate


class LeafCost(NamedTuple):
    """How the norm of one leaf's per-example gradient is taken, and what that costs an example.

    Attributes:
        method: "gram" (Gram matrices of its factors), "product" (multiplied out from its factors,
            which are larger) or "written out" (as `jax.vmap` of `jax.grad` does: small, or not
            followed).
        elements: what is written down for the norm beside the factors, in numbers.
        multiplications: for the norm, given the factors.
    """

    method: str
    elements: int
    multiplications: int


def per_example_norms(
    loss_fn: Callable[..., Any],
    *,
    param_labels: Labels | None = None,
    has_aux: bool = False,
    batched: bool = False,
    batch_axis: int = 0,
) -> Callable[[Tree, Tree], Any]:
    """Measures the gradient of each example by itself, without writing the gradients down.

    `norms[i] = |grad loss_fn(params, batch[i])|`, equal to that of `jax.vmap(jax.grad(loss_fn))`
    for every loss. What the gradient of a weight is made of (activations, and the gradient of the
    layer's output) is kept instead of the gradient itself wherever that is smaller.

    | example | norm |
    | --- | --- |
    | gradient beyond 1e19, or below 1e-19 | exact: no square overflows or underflows |
    | a NaN in its gradient | NaN; the other examples are not touched |
    | batch of no examples | an empty vector |
    | integer leaves of `params` | left out |

    Call it under `jax.jit`. `per_example_costs` shows which leaves are followed.

    Args:
        loss_fn: `(params, example) -> value`, the loss of one example, a real scalar. Examples
            must not mix: no batch statistics, no negatives from the batch.
        param_labels: a prefix tree of `params` of group labels, or a function `params -> labels`.
        has_aux: whether `loss_fn` returns `(value, aux)`; `aux` is dropped.
        batched: whether `loss_fn` takes a batch instead; it is called with batches of one.
        batch_axis: the axis of each leaf of `batch` that counts examples.

    Returns:
        A function `(params, batch) -> norms`, where the norms are float32[B] (float64
        with a 64 bit leaf), or with `param_labels` a mapping from label to such a vector.

    Raises:
        TypeError: `loss_fn` cannot be called, or its value is no real scalar.
        ValueError: the leaves of `batch` differ in their number of examples.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> def loss(w, x):
        ...     return jnp.dot(w, x)
        >>> norms = gcx.per_example_norms(loss)(jnp.ones(2), jnp.array([[3.0, 4.0], [0.0, 2.0]]))
        >>> norms.tolist()
        [5.0, 2.0]

    References:
        Goodfellow 2015, arXiv 1510.01799; Li et al. 2022, arXiv 2110.05679.
    """
    name = "per_example_norms"
    loss = as_loss(name, loss_fn, has_aux, batched, batch_axis)

    def run(params: Tree, batch: Tree) -> Any:
        examples, _ = as_batch(loss, batch)
        groups = groups_of(name, params, param_labels)
        norms = measure(loss, params, examples, groups)[2]
        return norms[None] if param_labels is None else norms

    return run


def per_example_leaf_norms(
    loss_fn: Callable[..., Any],
    **options: Unpack[LossOptions],
) -> Callable[[Tree, Tree], Tree]:
    """Measures each leaf of each example's gradient: `leaf_norms` of each, in the same pass.

    Args:
        loss_fn: as for `per_example_norms`.
        options: `has_aux`, `batched` and `batch_axis`, as for `per_example_norms`.

    Returns:
        A function `(params, batch) -> norms`, where the norms are a tree like `params`,
        each leaf float32[B]; None in place of an integer leaf.

    Raises:
        TypeError: `loss_fn` cannot be called, or its value is no real scalar.
        ValueError: the leaves of `batch` differ in their number of examples.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> def loss(p, x):
        ...     return jnp.dot(p["w"], x) + 2.0 * p["b"]
        >>> params = {"w": jnp.ones(2), "b": jnp.array(0.0)}
        >>> norms = gcx.per_example_leaf_norms(loss)(params, jnp.array([[3.0, 4.0]]))
        >>> norms["w"].tolist(), norms["b"].tolist()
        ([5.0], [2.0])
    """
    loss = as_loss("per_example_leaf_norms", loss_fn, **options)

    def run(params: Tree, batch: Tree) -> Tree:
        examples, _ = as_batch(loss, batch)
        chosen, rebuild = on_measured(params)
        norms = measure(loss, params, examples, {i: [i] for i in range(len(chosen))})[2]
        return rebuild(norms.values(), lambda _: None)

    return run


def per_example_costs(
    loss_fn: Callable[..., Any],
    **options: Unpack[LossOptions],
) -> Callable[[Tree, Tree], dict[str, LeafCost]]:
    """Lists how the norm of each leaf is taken, from shapes alone: nothing is computed.

    Args:
        loss_fn: as for `per_example_norms`.
        options: `has_aux`, `batched` and `batch_axis`, as for `per_example_norms`.

    Returns:
        A function `(params, batch) -> costs`, a mapping from the path of a leaf to its `LeafCost`.
        Arrays may be given as `jax.ShapeDtypeStruct`.

    Raises:
        TypeError: `loss_fn` cannot be called, or its value is no real scalar.
        ValueError: the leaves of `batch` differ in their number of examples.

    Examples:
        >>> import jax, jax.numpy as jnp, gradclip_jax as gcx
        >>> def loss(w, x):
        ...     return jnp.sum(jnp.tanh(x @ w))
        >>> shape = jax.ShapeDtypeStruct
        >>> costs = gcx.per_example_costs(loss)(
        ...     shape((512, 512), jnp.float32), shape((32, 10, 512), jnp.float32)
        ... )
        >>> costs["params"].method, costs["params"].elements
        ('gram', 200)
    """
    loss = as_loss("per_example_costs", loss_fn, **options)

    def run(params: Tree, batch: Tree) -> dict[str, LeafCost]:
        costs: list[LeafCost] = []

        def one(params: Tree, batch: Tree) -> None:
            examples, _ = as_batch(loss, batch)

            def visit(example: Tree) -> Array:
                value, _, grads = lazy_gradient(loss, params, example)
                costs[:] = map(_cost, grads)
                return value

            jax.vmap(visit)(examples)

        jax.eval_shape(one, params, batch)
        paths = [
            leaf_path("params", path)
            for path, x in jax.tree_util.tree_leaves_with_path(params)
            if is_measured(x)
        ]
        return dict(zip(paths, costs, strict=True))

    return run


def _cost(value: Array | Lazy) -> LeafCost:
    parts = separate(value) if isinstance(value, Lazy) else None
    if parts is None:
        size = math.prod(value.shape)
        return LeafCost("written out", size, size)
    costs = [_part_cost(part) for part in parts]
    worst = max(costs, key=lambda cost: cost.elements, default=LeafCost("gram", 0, 0))
    return worst._replace(multiplications=sum(cost.multiplications for cost in costs))


def _part_cost(part: Lazy) -> LeafCost:
    if gram_terms(part) is None:
        is_plain = all(len(term.factors) == 1 for term in part.terms)
        size = elements(part)
        return LeafCost("written out" if is_plain else "product", size, rows(part) * size)
    factors = max(len(term.factors) for term in part.terms)
    return LeafCost("gram", factors * rows(part) ** 2, rows(part) * factor_elements(part))
