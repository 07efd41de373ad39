"""From a loss and a batch to the norms of each example's gradient."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import check_callable, describe, error_message, leaf_path
from .._mesh import max_over, sum_over, vary, varying_axes
from .._tree_checks import broadcast_prefix
from .._types import Array, Labels, Scalar, Tree
from ..clipping._norm import is_measured, measured_leaves
from ._evaluate import evaluate
from ._measure import local_norm, norm


class LossOptions(TypedDict, total=False):
    """How a loss is called; see `per_example_norms`."""

    has_aux: bool
    batched: bool
    batch_axis: int


class Loss(NamedTuple):
    """A loss of one example, and how it is called.

    Attributes:
        function: the public function that an error message names.
        loss_fn: as the user wrote it.
        has_aux: whether it returns `(value, aux)`.
        batched: whether it takes batches; it is then called with batches of one.
        batch_axis: the axis of a batch that counts examples.
    """

    function: str
    loss_fn: Callable[..., Any]
    has_aux: bool
    batched: bool
    batch_axis: int

    def __call__(self, params: Tree, example: Tree) -> tuple[Scalar, Any]:
        """Computes the value of one example, and its auxiliary output or None."""
        if self.batched:
            example = jax.tree.map(lambda x: x[None], example)
        out = self.loss_fn(params, example)
        value, aux = out if self.has_aux else (out, None)
        if self.batched:
            value = jnp.reshape(value, ()) if np.size(value) == 1 else value
            aux = jax.tree.map(lambda x: x[0] if np.shape(x)[:1] == (1,) else x, aux)
        value = jnp.asarray(value)
        if value.ndim or not jnp.issubdtype(value.dtype, jnp.floating):
            rule = "a function whose value for one example is a real scalar"
            hint = "Return the loss of the example; reduce over its own axes."
            raise TypeError(error_message(self.function, "loss_fn", rule, describe(value), hint))
        return value, aux


def as_loss(
    function: str, loss_fn: Any, has_aux: bool = False, batched: bool = False, batch_axis: int = 0
) -> Loss:
    """Checks a loss."""
    check_callable(function, "loss_fn", loss_fn, "Pass the loss of one example.")
    return Loss(function, loss_fn, has_aux, batched, batch_axis)


def as_batch(loss: Loss, batch: Tree) -> tuple[Tree, int]:
    """Moves the examples to the first axis, and counts them."""
    hint = "Give every leaf one row per example."
    sizes: dict[int, str] = {}
    for path, x in jax.tree_util.tree_leaves_with_path(batch):
        place, ndim = leaf_path("batch", path), np.ndim(x)
        if not -ndim <= loss.batch_axis < ndim:
            rule, got = f"arrays with an axis {loss.batch_axis}", f"{describe(x)} at {place}"
            raise ValueError(error_message(loss.function, "batch", rule, got, hint))
        sizes.setdefault(np.shape(x)[loss.batch_axis], place)
    if len(sizes) != 1:
        got = ", ".join(f"{size} at {place}" for size, place in sizes.items()) or "no leaves"
        rule = "arrays with the same number of examples"
        raise ValueError(error_message(loss.function, "batch", rule, got, hint))
    (size,) = sizes
    return jax.tree.map(lambda x: jnp.moveaxis(jnp.asarray(x), loss.batch_axis, 0), batch), size


def on_measured(params: Tree) -> tuple[list[Array], Callable[..., Tree]]:
    """Returns the leaves that are differentiated by, and a function that replaces them."""

    def rebuild(new: Sequence[Any], other: Callable[[Any], Any] = lambda x: x) -> Tree:
        found = iter(new)
        return jax.tree.map(lambda x: next(found) if is_measured(x) else other(x), params)

    return measured_leaves(params), rebuild


def lazy_gradient(loss: Loss, params: Tree, example: Tree) -> tuple[Any, Any, list[Any]]:
    """Computes value, auxiliary output and lazy gradient of one example."""
    chosen, rebuild = on_measured(params)

    def gradient(chosen: list[Array], example: Tree) -> Any:
        def of_chosen(chosen: list[Array]) -> Any:
            return loss(rebuild(chosen), example)

        (value, aux), grads = jax.value_and_grad(of_chosen, has_aux=True)(chosen)
        return grads, value, aux

    closed, shapes = jax.make_jaxpr(gradient, return_shape=True)(chosen, example)
    count, inputs = len(chosen), [*chosen, *jax.tree.leaves(example)]
    flags = [i < count for i in range(len(closed.jaxpr.outvars))]
    outs = evaluate(closed, inputs, flags, [i >= count for i in range(len(inputs))])
    value, aux = jax.tree.unflatten(jax.tree.structure(shapes[1:]), outs[count:])
    return value, aux, outs[:count]


def groups_of(function: str, params: Tree, param_labels: Labels | None) -> dict[Any, list[int]]:
    """Sorts the measured leaves into groups; without labels into one, None."""
    leaves = jax.tree.leaves(params)
    if param_labels is None:
        return {None: list(range(len(measured_leaves(params))))}
    tree = param_labels(params) if callable(param_labels) else param_labels
    labels = broadcast_prefix(function, "param_labels", tree, "params", params)
    measured = [label for x, label in zip(leaves, labels, strict=True) if is_measured(x)]
    groups: dict[Any, list[int]] = {}
    for i, label in enumerate(measured):
        groups.setdefault(label, []).append(i)
    return groups


def batch_axes(batch: Tree) -> frozenset[str]:
    """Names the axes of `shard_map` over which the examples are spread."""
    return frozenset[str]().union(*map(varying_axes, jax.tree.leaves(batch)))


def localised(params: Tree, axes: frozenset[str]) -> Tree:
    """Marks parameters so that their gradient stays on the device of the example."""
    return jax.tree.map(lambda x: vary(jnp.asarray(x), axes) if is_measured(x) else x, params)


def measure(
    loss: Loss, params: Tree, batch: Tree, groups: dict[Any, list[int]]
) -> tuple[Array, Any, dict[Any, Array]]:
    """Computes value, auxiliary output and norms of every example."""
    axes = batch_axes(batch)
    shards = [varying_axes(x) - axes for x in measured_leaves(params)]
    local = localised(params, axes)

    def one(example: Tree) -> Any:
        value, aux, grads = lazy_gradient(loss, local, example)
        norms = [norm(g) for g in grads]
        return value, aux, {k: _group_norm(norms, shards, group) for k, group in groups.items()}

    return jax.vmap(one)(batch)


def _group_norm(
    norms: Sequence[Scalar], shards: Sequence[frozenset[str]], group: list[int]
) -> Scalar:
    """Joins the norms of leaves to that of a group, over the devices that share a leaf."""
    parts: dict[frozenset[str], list[Scalar]] = {}
    for i in group:
        parts.setdefault(shards[i], []).append(norms[i])
    return local_norm([_norm_over(local_norm(part), axes) for axes, part in parts.items()])


def _norm_over(part: Scalar, axes: frozenset[str]) -> Scalar:
    if not axes:
        return part
    top = max_over(part, axes)
    safe = jnp.where((top > 0) & jnp.isfinite(top), top, 1)
    return safe * jnp.sqrt(sum_over(jnp.square(part / safe), axes))
