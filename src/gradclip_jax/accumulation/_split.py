"""Split a batch into micro-batches, and restore the order of its examples."""

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import check_count, describe, is_traced, leaf_path, shortened
from .._errors import type_error, value_error
from .._mesh import num_shards
from .._types import Array, Count, Number, Scalar, Tree


class Split(NamedTuple):
    """Positions of the arguments that are split or differentiated, and the number of micro-batches.

    Attributes:
        parts: Number of micro-batches.
        batches: Positions of the arguments that are split along the first axis of their leaves.
        keys: Positions of random keys.
        differentiated: Positions of the differentiated arguments.
        takes_one: Whether the gradient is for a single argument instead of a tuple of arguments.
        sizes: Lengths of the split arrays in a micro-batch, which `bind_split` sets.
    """

    parts: int
    batches: tuple[int, ...]
    keys: tuple[int, ...]
    differentiated: tuple[int, ...]
    takes_one: bool
    sizes: frozenset[int] = frozenset()

    def differentiated_of(self, args: Sequence[Tree]) -> Tree:
        """Return the differentiated arguments, in the structure of the gradient."""
        if self.takes_one:
            return args[self.differentiated[0]]
        return tuple([args[i] for i in self.differentiated])

    def with_differentiated(self, args: Sequence[Tree], new: Tree) -> list[Tree]:
        """Replace the differentiated arguments."""
        chosen = list(args)
        for i, x in zip(self.differentiated, (new,) if self.takes_one else new, strict=True):
            chosen[i] = x
        return chosen

    def in_structure_of_gradient(self, grads: Mapping[int, Tree]) -> Tree:
        """Return gradients by position in the structure of the gradient."""
        if self.takes_one:
            return grads[self.differentiated[0]]
        return tuple([grads[i] for i in self.differentiated])


def batch_size(batches: Mapping[str, Tree]) -> int:
    """Return the number of examples in trees of arrays with a leading batch axis.

    Raises:
        ValueError: If the leaves have different lengths, with the path of one leaf of each length.
    """
    sizes: dict[int | None, str] = {}
    for place, batch in batches.items():
        for path, x in jax.tree.leaves_with_path(batch):
            sizes.setdefault(next(iter(np.shape(x)), None), leaf_path(place, path))
    size = next(iter(sizes), None)
    if size is None or len(sizes) > 1:
        places = [f"{'a scalar' if n is None else n} at {place}" for n, place in sizes.items()]
        got = ", ".join(places) or "no leaves"
        rule, hint = "arrays of equal length", "Pass one row per example in every leaf."
        raise value_error("batch", rule, got, hint)
    return size


def positions(argument: str, argnums: int | Sequence[int]) -> tuple[int, ...]:
    """Return argument positions as a tuple, or raise if they are not integers."""
    given = tuple(argnums) if isinstance(argnums, Sequence) else (argnums,)
    if not all(hasattr(i, "__index__") and not isinstance(i, bool) for i in given):
        rule, hint = "an integer or a sequence of integers", "Pass positions as for `jax.grad`."
        raise type_error(argument, rule, shortened(argnums), hint)
    return tuple(map(int, given))


def bind_split(split: Split, args: Sequence[Tree]) -> Split:
    """Normalize negative positions and set `sizes`; raise if the arguments cannot be split."""
    given = (*split.batches, *split.keys, *split.differentiated)
    needed = 1 + max(*given, -1 - min(given, default=0), -1)
    if len(args) < needed:
        hint = "Pass the parameters and the batch by position, not by keyword."
        raise type_error("args", f"at least {needed} positional arguments", f"{len(args)}", hint)
    named = {name: getattr(split, name) for name in ("batches", "keys", "differentiated")}
    split = split._replace(**{k: tuple(i % len(args) for i in v) for k, v in named.items()})
    sizes = [
        _micro_batch_size(x, leaf_path(f"args[{i}]", path), split.parts)
        for i in split.batches
        for path, x in jax.tree.leaves_with_path(args[i])
    ]
    return split._replace(sizes=frozenset(sizes))


def _micro_batch_size(x: Array, place: str, parts: int) -> int:
    """Return the length of an array in a micro-batch, or raise if it cannot be split."""
    got = f"{describe(x)} at {place}"
    if not np.ndim(x):
        hint = "Pass one row per example; split a shared key with `jax.random.split`."
        raise value_error("batch", "arrays with a leading batch axis", got, hint)
    length, shards = np.shape(x)[0], num_shards(x, axis=0)
    if length % parts:
        rule = f"divisible by num_microbatches={parts} along the first axis"
        hint = "Change the batch size, or pad the batch with examples of weight 0."
        raise value_error("batch", rule, got, hint)
    if length // parts % shards:
        rule = f"divisible by {shards} shards in each micro-batch"
        hint = f"Pass a divisor of {length // shards} as `num_microbatches`."
        raise value_error("batch", rule, got, hint)
    return length // parts


def in_one_form(fun: Callable[..., Any], has_weight: bool, has_aux: bool) -> Callable[..., Any]:
    """Normalize the output of `fun` to `(value, (weight, aux))`; missing parts are None."""

    def call(*args: Any, **kwargs: Any) -> tuple[Scalar, tuple[Tree, Tree]]:
        value: Any = fun(*args, **kwargs)
        rest: Any = None
        if has_weight or has_aux:
            if not (isinstance(value, tuple) and len(value) == 2):
                rule = "a function that returns a pair if `has_weight` or `has_aux` is True"
                hint = "Return `(value, weight)`, `(value, aux)` or `(value, (weight, aux))`."
                raise type_error("fun", rule, "a function with a single output", hint)
            value, rest = value
        if jax.tree.structure(value) != jax.tree.structure(0) or np.ndim(value):
            rule = "a function that returns a scalar value"
            hint = "Return a mean; pass `has_aux` or `has_weight` if the function returns a pair."
            raise type_error("fun", rule, describe(value), hint)
        if not (has_weight and has_aux):
            rest = (rest, None) if has_weight else (None, rest)
        return value, rest

    return call


def micro_arguments(args: Sequence[Tree], split: Split, index: Array | int) -> list[Tree]:
    """Return the arguments of one micro-batch."""
    chosen = list(args)

    def of_micro_batch(x: Array) -> Array:
        rows = rows_per_example(len(x) // split.parts, split.sizes)
        return every_nth(x, index, split.parts, rows)

    for i in split.batches:
        chosen[i] = jax.tree.map(of_micro_batch, chosen[i])
    for i in split.keys:
        if not hasattr(chosen[i], "dtype"):
            rule, hint = "positions of random keys", "Pass one key, and split it inside `fun`."
            raise type_error("rng_argnums", rule, f"a {describe(chosen[i])} at position {i}", hint)
        chosen[i] = jax.random.split(chosen[i], split.parts)[index]
    return chosen


def check_parts(parts: Count, real: Number | None) -> None:
    """Raise unless the number of micro-batches is static, and that of real ones at most as large.

    The number of real micro-batches may be traced.
    """
    if is_traced(parts):
        hint = "Mark it as static under jit, or vary `num_real_microbatches`, which may be traced."
        raise type_error("num_microbatches", "a static integer", "a tracer", hint)
    check_count("num_microbatches", parts, "Pass 1 to use the whole batch at once.")
    if real is None:
        return
    name, hint = "num_real_microbatches", "Pass None to run all micro-batches."
    check_count(name, real, hint, low=0)
    if not is_traced(real) and int(real) > int(parts):
        rule = f"an integer from 0 to num_microbatches={parts}"
        raise value_error(name, rule, int(real), hint)


def in_order(rows: Array, per_example: int = 1) -> Array:
    """Reorder rows that are stacked by micro-batch to the example order of the batch."""
    shape = rows.shape[2:]
    if per_example > 1:
        rows = rows.reshape(len(rows), -1, per_example, *shape)
    return jnp.swapaxes(rows, 0, 1).reshape(-1, *shape)


def rows_per_example(num_rows: int, sizes: Set[int]) -> int:
    """Return how many rows of an array belong to each example, or 0 if this is unknown.

    `sizes` are the lengths of the arguments in a micro-batch. The smallest length is the number of
    examples. An argument whose length is not a multiple of it is independent of the others.
    """
    size = min(sizes, default=0)
    if size and num_rows and num_rows % size == 0:
        return num_rows // size
    return 1 if not size or num_rows in (0, *sizes) else 0


def every_nth(x: Array, index: Array | int, parts: int, per_example: int = 1) -> Array:
    """Select every `parts`-th example from `index`, without communication between devices."""
    num_rows, *shape = x.shape
    block = [per_example] if per_example > 1 else []
    split = jnp.reshape(x, (num_rows // (parts * per_example), parts, *block, *shape))
    chosen = lax.dynamic_index_in_dim(split, index, axis=1, keepdims=False)
    return chosen.reshape(-1, *shape) if block else chosen
