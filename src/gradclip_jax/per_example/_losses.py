"""Calls of a per-example loss: binding of arguments, differentiation and splitting of batches."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import check_callable, describe, leaf_path
from .._errors import type_error, value_error
from .._leaves import is_measured, measured_leaves
from .._mesh import vary, varying_axes, zeros_of_type
from .._run_if import trace
from .._tree_checks import broadcast_prefix
from .._types import Array, Labels, Tree
from ..accumulation._split import (
    Split,
    counted_from_zero,
    every_nth,
    in_one_form,
    in_order,
    positions,
    run_if_real,
)
from ._evaluate import evaluate
from ._lazy import Lazy


class Outputs(NamedTuple):
    """Outputs and gradients of one example, or of a batch along the first axis.

    Attributes:
        value: Value of the loss.
        weight: Weight that the loss returned, float32; 1 without `has_weight`.
        aux: Auxiliary output, or None.
        grads: Gradient of each differentiated leaf, a lazy or an ordinary array.
    """

    value: Array
    weight: Array
    aux: Any
    grads: list[Array | Lazy]


@dataclasses.dataclass(frozen=True)
class Loss:
    """The loss of one example, with the arguments of `value_and_grad` that describe it."""

    fun: Callable[..., Any]
    argnums: int | Sequence[int] = 0
    batch_argnums: int | Sequence[int] = 1
    has_aux: bool = False
    has_weight: bool = False

    def __post_init__(self) -> None:
        check_callable("fun", self.fun, "Pass the loss of one example.")

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any], parts: int = 1) -> "Examples":
        """Check the arguments of a call and split them into parameters and batch."""
        groups = positions(self.batch_argnums), (), positions(self.argnums)
        split = Split(parts, *groups, takes_one=isinstance(self.argnums, int))
        split = counted_from_zero(split, args)
        both = sorted(set(split.batches) & set(split.differentiated))
        if both:
            rule, hint = "disjoint from `batch_argnums`", "Pass different positions."
            raise value_error("argnums", rule, str(both[0]), hint)
        batch = tuple(args[i] for i in split.batches)
        sizes: dict[int, str] = {}
        for i, tree in zip(split.batches, batch, strict=True):
            for path, x in jax.tree_util.tree_leaves_with_path(tree):
                sizes.setdefault(np.shape(x)[0], leaf_path(f"args[{i}]", path))
        if len(sizes) != 1:
            got = ", ".join(f"{size} at {place}" for size, place in sizes.items()) or "no leaves"
            rule, hint = "arrays with equal first axes", "Pass one row per example in every leaf."
            raise value_error("batch", rule, got, hint)
        return Examples(self, split, list(args), kwargs, jax.tree.map(jnp.asarray, batch))


class Examples(NamedTuple):
    """The arguments of one call: parameters and a batch of examples.

    Attributes:
        loss: The loss that is called.
        split: Positions of the differentiated and of the batched arguments.
        args: Positional arguments.
        kwargs: Keyword arguments.
        batch: Arguments whose leaves have a leading batch axis.
    """

    loss: Loss
    split: Split
    args: list[Any]
    kwargs: dict[str, Any]
    batch: tuple[Tree, ...]

    @property
    def params(self) -> Tree:
        """Return the differentiated arguments, in the structure of the gradient."""
        return self.split.differentiated_of(self.args)

    def rebuild(self, new: Sequence[Any], other: Callable[[Any], Any] = lambda x: x) -> Tree:
        """Replace the differentiated leaves, and map all other leaves with `other`."""
        leaves = iter(new)
        return jax.tree.map(lambda x: next(leaves) if is_measured(x) else other(x), self.params)

    def paths(self) -> list[str]:
        """Return the paths of the differentiated leaves."""
        pairs = jax.tree_util.tree_leaves_with_path(self.params)
        return [leaf_path("params", path) for path, x in pairs if is_measured(x)]

    def value_of(self, chosen: Sequence[Any], example: tuple[Tree, ...]) -> tuple[Array, Any]:
        """Compute `(value, (weight, aux))` of one example for the given differentiated leaves."""
        args, params = list(self.args), self.rebuild(chosen)
        replaced = (params,) if self.split.takes_one else params
        positions = (*self.split.differentiated, *self.split.batches)
        for i, x in zip(positions, (*replaced, *example), strict=True):
            args[i] = x
        loss = self.loss
        call = in_one_form(loss.fun, loss.has_weight, loss.has_aux)
        try:
            value, (weight, aux) = call(*args, **self.kwargs)
        except Exception as error:
            error.add_note(self._note(example))
            raise
        weight = jnp.asarray(1 if weight is None else weight, jnp.float32)
        if weight.ndim:
            rule, hint = "a function whose weight is a scalar", "Return the weight of one example."
            raise type_error("fun", rule, describe(weight), hint)
        return jnp.asarray(value), (weight, aux)

    def _note(self, example: tuple[Tree, ...]) -> str:
        """Return a note for errors in the loss: shapes of one example, arguments not split."""
        shapes = ", ".join(describe(x) for x in jax.tree.leaves(example))
        note = f"`fun` was called with one example, without a batch axis: {shapes}."
        size = np.shape(jax.tree.leaves(self.batch)[0])[0]
        for i, arg in enumerate(self.args):
            is_whole = i not in (*self.split.batches, *self.split.differentiated)
            if is_whole and any(np.shape(x)[:1] == (size,) for x in jax.tree.leaves(arg)):
                note += f" Argument {i} was not split; if it is batched, add it to `batch_argnums`."
        return note

    def outputs(self, batch: tuple[Tree, ...]) -> Outputs:
        """Compute the outputs of a batch without an all-reduce of per-example gradients."""
        axes = frozenset[str]().union(*map(varying_axes, jax.tree.leaves(batch)))
        chosen = [vary(x, axes) for x in measured_leaves(self.params)]
        return jax.vmap(lambda example: self.outputs_of_one(chosen, example))(batch)

    def outputs_of_one(self, chosen: list[Array], example: tuple[Tree, ...]) -> Outputs:
        """Compute value, weight and lazy gradient of one example."""
        run = jax.value_and_grad(self.value_of, has_aux=True)
        closed, shapes = jax.make_jaxpr(run, return_shape=True)(chosen, example)
        count = len(closed.out_avals) - len(chosen)
        flags = [i >= count for i in range(len(closed.out_avals))]
        outs = evaluate(closed, [*chosen, *jax.tree.leaves(example)], flags)
        value, (weight, aux) = jax.tree.unflatten(jax.tree.structure(shapes[0]), outs[:count])
        return Outputs(value, weight, aux, outs[count:])


def groups_of(params: Tree, param_labels: Labels | None) -> dict[Any, list[int]]:
    """Map each label to the indices of its leaves; without labels, the only label is None."""
    if param_labels is None:
        return {None: list(range(len(measured_leaves(params))))}
    tree = param_labels(params) if callable(param_labels) else param_labels
    labels = broadcast_prefix("param_labels", tree, "params", params)
    of = [k for k, x in zip(labels, jax.tree.leaves(params), strict=True) if is_measured(x)]
    return {label: [i for i, k in enumerate(of) if k == label] for label in dict.fromkeys(of)}


def part_of(tree: Tree, parts: int, index: Array) -> Tree:
    """Select examples index, index + parts, ..., so that every device contributes examples."""
    return jax.tree.map(lambda x: every_nth(x, index, parts), tree)


def sum_parts(
    step: Callable[[Array], tuple[Tree, Tree]], parts: int, real: Any = None
) -> tuple[Tree, Tree]:
    """Run `step` for each real micro-batch; sum its first output and concatenate its second."""
    program = trace(step, jnp.int32(0))

    def body(sums: Tree, index: Array) -> tuple[Tree, Tree]:
        def add(carry: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
            new, rows = program(index)
            return jax.tree.map(jnp.add, carry[0], new), rows

        return run_if_real(real, index, add, (sums, jax.tree.map(zeros_of_type, program.output[1])))

    zeros = jax.tree.map(zeros_of_type, program.output[0])
    sums, rows = lax.scan(body, zeros, jnp.arange(parts, dtype=jnp.int32))
    return sums, jax.tree.map(in_order, rows)
