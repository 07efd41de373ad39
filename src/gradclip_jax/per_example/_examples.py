"""From a loss and a batch to the norms of each example's gradient."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import check_callable, describe, error_message, leaf_path
from .._mesh import max_over, sum_over, vary, varying_axes
from .._tree_checks import broadcast_prefix
from .._types import Array, Labels, Scalar, Tree
from ..clipping._norm import is_measured
from ._evaluate import evaluate
from ._measure import norm, norm_of_arrays


class Loss(NamedTuple):
    """A loss of one example, and what was said of it.

    Attributes:
        function: the public function that an error message names.
        loss_fn: as the user wrote it.
        has_aux: whether it returns `(value, aux)`.
        batched: whether it takes batches; it is then called with batches of one.
    """

    function: str
    loss_fn: Callable[..., Any]
    has_aux: bool = False
    batched: bool = False

    def __call__(self, params: Tree, example: Tree) -> tuple[Scalar, Any]:
        """The value of one example, and its auxiliary output or None."""
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


def as_loss(function: str, loss_fn: Any, has_aux: bool, batched: bool) -> Loss:
    """A loss, checked."""
    check_callable(function, "loss_fn", loss_fn, "Pass the loss of one example.")
    return Loss(function, loss_fn, has_aux, batched)


def as_batch(function: str, batch: Tree, batch_axis: int) -> tuple[Tree, int]:
    """The batch with its examples along the first axis, and how many there are."""
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    sizes: dict[int, str] = {}
    for path, x in leaves:
        axis = batch_axis if batch_axis >= 0 else batch_axis + np.ndim(x)
        place = leaf_path("batch", path)
        if not 0 <= axis < np.ndim(x):
            rule, hint = f"arrays with an axis {batch_axis}", "Give every leaf one row per example."
            raise ValueError(
                error_message(function, "batch", rule, f"{describe(x)} at {place}", hint)
            )
        sizes.setdefault(np.shape(x)[axis], place)
    if len(sizes) != 1:
        got = ", ".join(f"{size} at {place}" for size, place in sizes.items()) or "no leaves"
        hint = "Give every leaf one row per example."
        raise ValueError(
            error_message(function, "batch", "arrays with the same number of examples", got, hint)
        )
    (size,) = sizes
    return jax.tree.map(lambda x: jnp.moveaxis(jnp.asarray(x), batch_axis, 0), batch), size


def on_measured(params: Tree) -> tuple[list[Array], Callable[[list[Array]], Tree]]:
    """The leaves that are differentiated by, and how to put others in their place."""
    leaves, structure = jax.tree.flatten(params)
    places = [i for i, x in enumerate(leaves) if is_measured(x)]

    def rebuild(chosen: list[Array]) -> Tree:
        whole = list(leaves)
        for i, x in zip(places, chosen, strict=True):
            whole[i] = x
        return jax.tree.unflatten(structure, whole)

    return [jnp.asarray(leaves[i]) for i in places], rebuild


def lazy_gradient(loss: Loss, params: Tree, example: Tree) -> tuple[Any, Any, list[Any]]:
    """Value, auxiliary output and the gradient of one example, a lazy array for each leaf."""
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
    """Which measured leaves make up each group; one group, None, of all without labels."""
    leaves = jax.tree.leaves(params)
    if param_labels is None:
        labels: Sequence[Any] = [None] * len(leaves)
    else:
        tree = param_labels(params) if callable(param_labels) else param_labels
        labels = broadcast_prefix(function, "param_labels", tree, "params", params)
    groups: dict[Any, list[int]] = {} if param_labels is not None else {None: []}
    measured = [label for x, label in zip(leaves, labels, strict=True) if is_measured(x)]
    for i, label in enumerate(measured):
        groups.setdefault(label, []).append(i)
    return groups


def batch_axes(batch: Tree) -> frozenset[str]:
    """The axes of `shard_map` over which the examples are spread."""
    return frozenset[str]().union(*map(varying_axes, jax.tree.leaves(batch)))


def localised(params: Tree, axes: frozenset[str]) -> Tree:
    """Parameters whose gradient stays on the device of the example."""
    return jax.tree.map(lambda x: vary(jnp.asarray(x), axes) if is_measured(x) else x, params)


def joint_norms(
    norms: Sequence[Scalar], groups: dict[Any, list[int]], shards: Sequence[frozenset[str]]
) -> dict[Any, Scalar]:
    """The norm of each group from those of its leaves, summed over devices that share a leaf."""

    def joint(members: list[int]) -> Scalar:
        parts: dict[frozenset[str], list[Scalar]] = {}
        for i in members:
            parts.setdefault(shards[i], []).append(norms[i])
        return norm_of_arrays([_over(norm_of_arrays(x), axes) for axes, x in parts.items()])

    return {label: joint(members) for label, members in groups.items()}


def _over(part: Scalar, axes: frozenset[str]) -> Scalar:
    if not axes:
        return part
    top = max_over(part, axes)
    safe = jnp.where((top > 0) & jnp.isfinite(top), top, 1)
    return safe * jnp.sqrt(sum_over(jnp.square(part / safe), axes))


def measure(
    loss: Loss, params: Tree, batch: Tree, groups: dict[Any, list[int]]
) -> tuple[Array, Any, dict[Any, Array]]:
    """Value, auxiliary output and norms of every example."""
    axes = batch_axes(batch)
    shards = [varying_axes(x) - axes for x in jax.tree.leaves(params) if is_measured(x)]
    local = localised(params, axes)

    def one(example: Tree) -> Any:
        value, aux, grads = lazy_gradient(loss, local, example)
        return value, aux, joint_norms([norm(g) for g in grads], groups, shards)

    return jax.vmap(one)(batch)
