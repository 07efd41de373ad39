"""Bind the arguments of a per-example loss, differentiate it and split batches."""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import check_callable, check_flag
from .._errors import type_error, value_error
from .._format import describe
from .._run_if import run_step, trace
from .._types import Array, Labels, Number, Tree
from ..accumulation._split import (
    Split,
    bind_split,
    every_nth,
    in_order,
    with_weight_and_aux,
)
from ..norms._mesh import vary, varying_axes, zeros_of_type
from ..norms._prefix import labels_of
from ._evaluate import evaluate
from ._factored import Value

Example: TypeAlias = tuple[Tree, ...]
"""The arguments at `batch_argnums`, for one example or a batch."""

ValueAndRest: TypeAlias = tuple[Array, tuple[Array, Tree]]
"""`(value, (weight, aux))` of one example."""


class Outputs(NamedTuple):
    """Loss outputs and gradients of one example, or of a batch along the leading axis.

    Attributes:
        value: Value of the loss.
        weight: Weight returned by the loss, float32; 1 without `has_weight`.
        aux: Auxiliary output, or None.
        grads: Gradient of each differentiated leaf, as an array or as a product of factors.
    """

    value: Array
    weight: Array
    aux: Tree
    grads: list[Value]


@dataclasses.dataclass(frozen=True)
class Loss:
    """A per-example loss function with the `value_and_grad` arguments that describe it."""

    fun: Callable[..., Any]
    argnums: int | Sequence[int]
    batch_argnums: int | Sequence[int]
    has_aux: bool
    has_weight: bool

    def __post_init__(self) -> None:
        check_callable("fun", self.fun, "Pass a function that returns the loss of one example.")
        for name in ("has_aux", "has_weight"):
            check_flag(name, getattr(self, name))

    def bind(self, args: Sequence[Tree], kwargs: dict[str, Any], parts: int = 1) -> "Examples":
        """Check the arguments of a call, and separate the parameters from the batch."""
        split = bind_split(args, parts, self.argnums, self.batch_argnums)
        if not split.batch_argnums:
            hint = "Pass the position of an argument with a batch axis."
            raise value_error("batch_argnums", "at least one position", "()", hint)
        split.warn_of_unsplit(args, kwargs)
        params = split.differentiated(args)
        call = with_weight_and_aux(self.fun, self.has_weight, self.has_aux)

        def value_of(leaves: list[Array], example: Example) -> ValueAndRest:
            new = jax.tree.unflatten(jax.tree.structure(params), leaves)
            chosen = split.with_differentiated(args, new)
            for i, x in zip(split.batch_argnums, example, strict=True):
                chosen[i] = x
            try:
                value, (weight, aux) = call(*chosen, **kwargs)
            except Exception as error:
                error.add_note(_note(split, args, example))
                raise
            weight = jnp.asarray(1 if weight is None else weight, jnp.float32)
            if weight.ndim:
                rule = "a function that returns a scalar weight"
                raise type_error("fun", rule, describe(weight), "Return the weight of one example.")
            return jnp.asarray(value), (weight, aux)

        batch = jax.tree.map(jnp.asarray, tuple([args[i] for i in split.batch_argnums]))
        leaves = list(map(jnp.asarray, jax.tree.leaves(params)))
        return Examples(value_of, params, leaves, batch)


def _note(split: Split, args: Sequence[Tree], example: Example) -> str:
    """Explain an error in the loss function by listing the shapes of one example."""
    shapes = ", ".join(describe(x) for x in jax.tree.leaves(example))
    note = (
        f"`fun` was called with one example, without a batch axis: {shapes}. If it needs a batch, "
        "pass `lambda params, x: fun(params, x[None])`."
    )
    for i, arg in enumerate(args):
        is_whole = i not in (*split.batch_argnums, *split.argnums)
        if is_whole and any(np.shape(x)[:1] == (split.num_examples,) for x in jax.tree.leaves(arg)):
            note += f" Argument {i} was not split; if it is batched, add it to `batch_argnums`."
    return note


class Examples(NamedTuple):
    """The loss function, parameters and batch of a single call.

    Attributes:
        value_of: Function `(leaves, example) -> (value, (weight, aux))`.
        params: Differentiated arguments, with the same pytree structure as the gradient.
        leaves: Differentiated leaves.
        batch: Arguments whose leaves have a leading batch axis.
    """

    value_of: Callable[[list[Array], Example], ValueAndRest]
    params: Tree
    leaves: list[Array]
    batch: Example

    def outputs(self, batch: Example) -> Outputs:
        """Compute the outputs of a batch without an all-reduce of per-example gradients."""
        axes = frozenset[str]().union(*map(varying_axes, jax.tree.leaves(batch)))
        leaves = [vary(x, axes) for x in self.leaves]
        return jax.vmap(functools.partial(self.outputs_of_one, leaves))(batch)

    def outputs_of_one(self, leaves: list[Array], example: Example) -> Outputs:
        """Compute the loss and the weight of one example, and the factors of its gradient."""
        run = jax.value_and_grad(self.value_of, has_aux=True)
        closed, shapes = jax.make_jaxpr(run, return_shape=True)(leaves, example)
        count = len(closed.out_avals) - len(leaves)
        is_grad = [i >= count for i in range(len(closed.out_avals))]
        outs = evaluate(closed, [*leaves, *jax.tree.leaves(example)], is_grad)
        value, (weight, aux) = jax.tree.unflatten(jax.tree.structure(shapes[0]), outs[:count])
        return Outputs(value, weight, aux, outs[count:])


def groups_of(examples: Examples, param_labels: Labels | None) -> dict[Hashable, list[int]]:
    """Return the leaf indices of each label; None is the only label without `param_labels`."""
    if param_labels is None:
        return {None: list(range(len(examples.leaves)))}
    labels = labels_of(param_labels, "params", examples.params)
    groups: dict[Hashable, list[int]] = {}
    for i, label in enumerate(labels):
        groups.setdefault(label, []).append(i)
    return groups


def by_label(labels: Iterable[Hashable], rows: Sequence[Array]) -> Array | dict[Hashable, Array]:
    """Map each label to the array of its group, or return the only array if there are no labels."""
    rows_of = dict(zip(labels, rows, strict=True))
    return rows[0] if None in rows_of else rows_of


def part_of(tree: Tree, parts: int, index: Array) -> Tree:
    """Select every `parts`-th example starting at `index`, which keeps all devices busy."""
    return jax.tree.map(lambda x: every_nth(x, index, parts), tree)


def sum_parts(
    step: Callable[[Tree], tuple[Tree, Tree]], batch: Tree, parts: int, real: Number | None
) -> tuple[Tree, Tree]:
    """Run `step` on each micro-batch, sum its first outputs and concatenate its second outputs."""
    if parts == 1 and real is None:
        return step(batch)
    run, (like, _) = trace(lambda index: step(part_of(batch, parts, index)), jnp.int32(0))

    def body(sums: Tree, index: Array) -> tuple[Tree, Tree]:
        def add(sums: Tree) -> tuple[Tree, Tree]:
            new, rows = run(index)
            return rows, jax.tree.map(jnp.add, sums, new)

        is_real = True if real is None else index < jnp.asarray(real, jnp.int32)
        rows, sums = run_step(is_real, add, sums)
        return sums, rows

    zeros = jax.tree.map(zeros_of_type, like)
    sums, rows = lax.scan(body, zeros, jnp.arange(parts, dtype=jnp.int32))
    return sums, jax.tree.map(in_order, rows)
