"""Split a batch into micro-batches, and restore the order of its examples."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import (
    as_positions,
    call_user,
    check_count,
    check_flag,
    check_length,
    describe,
    dtype_of,
    is_traced,
    leaf_path,
    listed,
    shortened,
)
from .._errors import type_error, value_error
from .._types import Array, Count, Number, Tree
from ..norms._leaves import is_inexact

_SCALAR: Final = jax.tree.structure(0)


class Split(NamedTuple):
    """Positions of the arguments that are split or differentiated, and the number of micro-batches.

    Attributes:
        parts: Number of micro-batches.
        batches: Positions of the arguments that are split along the first axis of their leaves.
        keys: Positions of random keys.
        differentiated: Positions of the differentiated arguments.
        takes_one: Whether the gradient is for a single argument instead of a tuple of arguments.
        real: Number of micro-batches to run; an integer, or a traced array.
        size: Number of examples in a micro-batch; 0 without a batch.
    """

    parts: int
    batches: tuple[int, ...]
    keys: tuple[int, ...]
    differentiated: tuple[int, ...]
    takes_one: bool
    real: int | Array
    size: int = 0

    @property
    def num_run(self) -> int:
        """Static number of micro-batches in the loop."""
        return self.parts if is_traced(self.real) else int(self.real)

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

    def arguments(self, args: Sequence[Tree], index: Array | int) -> list[Tree]:
        """Return the arguments of one micro-batch."""
        chosen = list(args)
        for i in self.batches:
            chosen[i] = jax.tree.map(lambda x: every_nth(x, index, self.parts), chosen[i])
        for i in self.keys:
            chosen[i] = jax.tree.map(
                lambda key: jax.random.split(key, self.parts)[index], chosen[i]
            )
        return chosen

    def rows_per_example(self, shape: Sequence[int]) -> int:
        """Return how many rows of an output belong to each example, or 0 if it has no such rows."""
        if not (shape and self.batches):
            return 0
        if self.size == 0:
            return int(shape[0] == 0)
        return shape[0] // self.size if shape[0] % self.size == 0 else 0

    def warn_of_unsplit(self, args: Sequence[Tree], kwargs: Mapping[str, Tree]) -> None:
        """Warn if an argument that is not split has as many rows as the batch."""
        named = {f"args[{i}]": x for i, x in enumerate(args)}
        for i in (*self.batches, *self.keys, *self.differentiated):
            named.pop(f"args[{i}]", None)
        num_rows = self.size * self.parts
        for name, tree in {**named, **kwargs}.items():
            leaves = [x for x in jax.tree.leaves(tree) if not _is_raw_key(x)]
            if num_rows > 1 and any(np.shape(x)[:1] == (num_rows,) for x in leaves):
                message = (
                    f"{name} has as many rows as the batch, {num_rows}, but every micro-batch or "
                    "example receives all of them. If it belongs to the batch, pass it by position "
                    "and add its position to `batch_argnums`."
                )
                warnings.warn(message, stacklevel=2)


def _is_raw_key(x: Any) -> bool:
    """Return whether an array may be the result of `jax.random.PRNGKey`."""
    return dtype_of(x) == np.uint32 and np.shape(x) in ((2,), (4,))


def batch_size(batches: Mapping[str, Tree]) -> int:
    """Return the number of examples in trees of arrays with a leading batch axis.

    Raises:
        ValueError: If the leaves have different lengths, with the path of one leaf of each length.
    """
    sizes = {
        np.shape(x)[:1]: f"{describe(x)} at {leaf_path(place, path)}"
        for place, batch in batches.items()
        for path, x in jax.tree.leaves_with_path(batch)
    }
    if len(sizes) != 1 or () in sizes:
        rule = "arrays of equal length, with a leading batch axis"
        hint = "Pass one row per example in every leaf; split a key with `jax.random.split`."
        raise value_error("batch", rule, ", ".join(sizes.values()) or "no leaves", hint)
    return next(iter(sizes))[0]


def bind_split(
    args: Sequence[Tree],
    parts: Count,
    argnums: int | Sequence[int],
    batch_argnums: int | Sequence[int],
    rng_argnums: int | Sequence[int] = (),
    real: Number | None = None,
) -> Split:
    """Return how the arguments of a call are split, or raise if this is impossible."""
    positions = ("batch_argnums", batch_argnums), ("rng_argnums", rng_argnums), ("argnums", argnums)
    hint = "Pass positions as for `jax.grad`."
    batches, keys, chosen = (as_positions(name, places, hint) for name, places in positions)
    if not chosen:
        raise value_error("argnums", "at least one position", shortened(argnums), hint)
    given = (*batches, *keys, *chosen)
    needed = 1 + max(*given, -1 - min(given, default=0), -1)
    if len(args) < needed:
        hint = "Pass the parameters and the batch by position, not by keyword."
        rule = f"at least {needed} positional arguments"
        got = f"{len(args)} for " + ", ".join(f"{name}={x}" for name, x in positions)
        raise type_error("args", rule, got, hint)
    batches, keys, chosen = (tuple(i % len(args) for i in x) for x in (batches, keys, chosen))
    for i in chosen:
        _check_differentiable(f"args[{i}]", args[i])
    real = parts if real is None else real
    real = jnp.asarray(real).astype(jnp.int32) if is_traced(real) else int(real)
    for i in keys:
        dtypes = [dtype_of(x) for x in jax.tree.leaves(args[i])]
        if any(x != np.uint32 and not jnp.issubdtype(x, jax.dtypes.prng_key) for x in dtypes):
            got = f"{shortened(args[i])} at args[{i}]"
            hint = "Pass for example `jax.random.key(0)`."
            raise type_error("rng_argnums", "positions of random keys", got, hint)
    split = Split(int(parts), batches, keys, chosen, not np.ndim(argnums), real)
    both = sorted(set(split.batches) & set(split.differentiated))
    if both:
        rule, hint = "disjoint from `batch_argnums`", "Pass different positions."
        raise value_error("argnums", rule, str(both[0]), hint)
    if not split.batches:
        return split
    size = batch_size({f"args[{i}]": args[i] for i in split.batches})
    if size % split.parts:
        rule = f"divisible by num_microbatches={split.parts} along the first axis"
        hint = "Change the batch size, or pad the batch with examples of weight 0."
        raise value_error("batch", rule, f"{size} examples", hint)
    return split._replace(size=size // split.parts)


def _check_differentiable(argument: str, tree: Tree) -> None:
    """Raise, as `jax.grad` does, if a leaf is neither floating-point nor complex."""
    leaves = jax.tree.leaves_with_path(tree)
    bad = [
        f"{describe(x)} at {leaf_path(argument, path)}" for path, x in leaves if not is_inexact(x)
    ]
    if bad:
        rule = "a tree of floating or complex leaves"
        hint = (
            "Pass other leaves in another argument, for example after "
            "`nnx.split(model, nnx.Param, ...)` or `eqx.partition`."
        )
        raise type_error(argument, rule, listed(bad), hint)


def in_one_form(fun: Callable[..., Any], has_weight: bool, has_aux: bool) -> Callable[..., Any]:
    """Normalize the output of `fun` to `(value, (weight, aux))`; missing parts are None."""
    check_flag("has_weight", has_weight)
    check_flag("has_aux", has_aux)
    is_pair = has_weight or has_aux

    def call(*args: Any, **kwargs: Any) -> Any:
        output = call_user("fun", "fun", fun, *args, **kwargs)
        is_valid = not is_pair or (isinstance(output, tuple) and len(output) == 2)
        value, rest = output if is_pair and is_valid else (output, None)
        if not is_valid or jax.tree.structure(value) != _SCALAR or np.ndim(value):
            rule = "a function that returns a scalar, or a pair with `has_aux` or `has_weight`"
            hint = "Return a mean, `(mean, aux)`, `(mean, weight)` or `(mean, (weight, aux))`."
            raise type_error("fun", rule, shortened(output), hint)
        if not (has_weight and has_aux):
            rest = (rest, None) if has_weight else (None, rest)
        return value, rest

    return call


def check_parts(parts: Count, real: Number | None) -> None:
    """Check the numbers of micro-batches and of real micro-batches, which may be traced."""
    check_length("num_microbatches", parts, "Pass 1 to use the whole batch at once.")
    if real is not None:
        hint = "Pass None to run all micro-batches."
        check_count("num_real_microbatches", real, hint, low=0, high=int(parts))


def in_order(rows: Array, per_example: int = 1) -> Array:
    """Reorder rows that are stacked by micro-batch to the example order of the batch."""
    shape = rows.shape[2:]
    if per_example > 1:
        rows = rows.reshape(len(rows), -1, per_example, *shape)
    return jnp.swapaxes(rows, 0, 1).reshape(-1, *shape)


def every_nth(x: Array, index: Array | int, parts: int) -> Array:
    """Select every `parts`-th example from `index`, without communication between devices."""
    split = jnp.reshape(x, (len(x) // parts, parts, *np.shape(x)[1:]))
    return lax.dynamic_index_in_dim(split, index, axis=1, keepdims=False)
