"""Split a batch into micro-batches, and restore the order of its examples."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import (
    call_user,
    check_count,
    check_flag,
    check_length,
    check_positions,
    dtype_of,
    is_traced,
)
from .._errors import type_error, value_error, warn
from .._format import describe, leaf_path, listed, shortened
from .._types import Array, Count, Number, Tree
from ..norms._leaves import is_inexact

_SCALAR: Final = jax.tree.structure(0)


class Split(NamedTuple):
    """How the arguments of a call are split into micro-batches.

    Attributes:
        num_parts: Number of micro-batches.
        num_real: Number of micro-batches to run; an integer, or a traced array.
        argnums: Positions of the differentiated arguments, >= 0.
        batch_argnums: Positions of the arguments that are split along the first axis of each leaf.
        rng_argnums: Positions of random keys.
        has_one_argnum: Whether `argnums` is an integer, so that the gradient is not a tuple.
        part_size: Number of examples in a micro-batch; 0 without a batch.
    """

    num_parts: int
    num_real: int | Array
    argnums: tuple[int, ...]
    batch_argnums: tuple[int, ...]
    rng_argnums: tuple[int, ...]
    has_one_argnum: bool
    part_size: int = 0

    @property
    def num_scanned(self) -> int:
        """Static number of iterations of the loop over micro-batches."""
        return self.num_parts if is_traced(self.num_real) else int(self.num_real)

    @property
    def num_examples(self) -> int:
        """Number of examples in the batch."""
        return self.num_parts * self.part_size

    def differentiated(self, args: Sequence[Tree]) -> Tree:
        """Return the differentiated arguments, in the structure of the gradient."""
        if self.has_one_argnum:
            return args[self.argnums[0]]
        return tuple([args[i] for i in self.argnums])

    def with_differentiated(self, args: Sequence[Tree], new: Tree) -> list[Tree]:
        """Return the arguments after replacing the differentiated arguments."""
        replaced = list(args)
        for i, x in zip(self.argnums, (new,) if self.has_one_argnum else new, strict=True):
            replaced[i] = x
        return replaced

    def arguments(self, args: Sequence[Tree], index: Array | int) -> list[Tree]:
        """Return the arguments of one micro-batch."""

        def examples(x: Array) -> Array:
            return every_nth(x, index, self.num_parts)

        def key(x: Array) -> Array:
            return jax.random.split(x, self.num_parts)[index]

        replaced = list(args)
        for i in self.batch_argnums:
            replaced[i] = jax.tree.map(examples, args[i])
        for i in self.rng_argnums:
            replaced[i] = jax.tree.map(key, replaced[i])
        return replaced

    def rows_per_example(self, shape: Sequence[int]) -> int:
        """Return the number of rows per example in an output; 0 if it has no rows per example."""
        if not (shape and self.batch_argnums):
            return 0
        if self.part_size == 0:
            return int(shape[0] == 0)
        return shape[0] // self.part_size if shape[0] % self.part_size == 0 else 0

    def warn_of_unsplit(self, args: Sequence[Tree], kwargs: Mapping[str, Tree]) -> None:
        """Warn if an argument that is not split has as many rows as the batch."""
        if self.num_examples < 2:
            return
        used = {*self.batch_argnums, *self.rng_argnums, *self.argnums}
        others = {f"args[{i}]": x for i, x in enumerate(args) if i not in used}
        for name, tree in {**others, **kwargs}.items():
            leaves = [x for x in jax.tree.leaves(tree) if not _is_raw_key(x)]
            if any(np.shape(x)[:1] == (self.num_examples,) for x in leaves):
                message = (
                    f"{name} has as many rows as the batch, {self.num_examples}, but every "
                    "micro-batch or example receives all of them. If it belongs to the batch, pass "
                    "it by position and add its position to `batch_argnums`."
                )
                warn(message)


def _is_raw_key(x: Any) -> bool:
    """Return whether an array may be the result of `jax.random.PRNGKey`."""
    return dtype_of(x) == np.uint32 and np.shape(x) in ((2,), (4,))


def bind_split(
    args: Sequence[Tree],
    num_parts: Count,
    argnums: int | Sequence[int],
    batch_argnums: int | Sequence[int],
    rng_argnums: int | Sequence[int] = (),
    num_real: Number | None = None,
) -> Split:
    """Return how the arguments of a call are split, or raise if they cannot be split."""
    split = Split(
        num_parts=int(num_parts),
        num_real=_as_count(num_parts if num_real is None else num_real),
        argnums=_positions("argnums", argnums, len(args)),
        batch_argnums=_positions("batch_argnums", batch_argnums, len(args)),
        rng_argnums=_positions("rng_argnums", rng_argnums, len(args)),
        has_one_argnum=not np.ndim(argnums),
    )
    if not split.argnums:
        hint = "Pass the position of the parameters."
        raise value_error("argnums", "at least one position", shortened(argnums), hint)
    for i in split.argnums:
        _check_differentiable(f"args[{i}]", args[i])
        if i in split.batch_argnums:
            rule, hint = "disjoint from `batch_argnums`", "Pass different positions."
            raise value_error("argnums", rule, str(i), hint)
    for i in split.rng_argnums:
        _check_keys(f"args[{i}]", args[i])
    if not split.batch_argnums:
        return split
    size = batch_size({f"args[{i}]": args[i] for i in split.batch_argnums})
    if size % split.num_parts:
        rule = f"divisible by num_microbatches={split.num_parts} along the first axis"
        hint = "Change the batch size, or pad the batch with examples of weight 0."
        raise value_error("batch", rule, f"{size} examples", hint)
    return split._replace(part_size=size // split.num_parts)


def _positions(argument: str, value: int | Sequence[int], num_args: int) -> tuple[int, ...]:
    """Return positions of arguments, which may be negative, as numbers >= 0, or raise."""
    positions = check_positions(argument, value, "Pass positions as for `jax.grad`.")
    if any(not -num_args <= i < num_args for i in positions):
        rule = f"positional arguments that include `{argument}={value}`"
        hint = "Pass the parameters and the batch by position, not by keyword."
        raise type_error("args", rule, f"{num_args} positional arguments", hint)
    return tuple(i % num_args for i in positions)


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


def _check_keys(argument: str, tree: Tree) -> None:
    """Raise if a leaf is not a random key."""
    for x in jax.tree.leaves(tree):
        dtype = dtype_of(x)
        if dtype != np.uint32 and not jnp.issubdtype(dtype, jax.dtypes.prng_key):
            got = f"{shortened(tree)} at {argument}"
            hint = "Pass for example `jax.random.key(0)`."
            raise type_error("rng_argnums", "positions of random keys", got, hint)


def _as_count(value: Number) -> int | Array:
    """Convert a number of micro-batches to an integer, or a traced number to int32[]."""
    return jnp.asarray(value).astype(jnp.int32) if is_traced(value) else int(value)


def batch_size(batches: Mapping[str, Tree]) -> int:
    """Return the number of examples in arguments whose leaves have a leading batch axis.

    Args:
        batches: Trees of arrays, keyed by names such as `args[1]`.

    Raises:
        ValueError: If leaves have different lengths; the message contains a path for each length.
    """
    leaves = jax.tree.leaves_with_path(batches)
    lengths = {np.shape(x)[:1] for _, x in leaves}
    if len(lengths) != 1 or () in lengths:
        places = {
            np.shape(x)[:1]: f"{describe(x)} at {leaf_path(path[0].key, path[1:])}"
            for path, x in leaves
        }
        rule = "arrays of equal length, with a leading batch axis"
        hint = "Pass one row per example in every leaf; split a key with `jax.random.split`."
        raise value_error("batch", rule, ", ".join(places.values()) or "no leaves", hint)
    ((length,),) = lengths
    return length


def check_parts(num_parts: Count, num_real: Number | None) -> None:
    """Raise if the number of micro-batches is invalid, or less than the number to run."""
    check_length("num_microbatches", num_parts, "Pass 1 to use the whole batch at once.")
    if num_real is not None:
        hint = "Pass None to run all micro-batches."
        check_count("num_real_microbatches", num_real, hint, low=0, high=int(num_parts))


def with_weight_and_aux(
    fun: Callable[..., Any], has_weight: bool, has_aux: bool
) -> Callable[..., Any]:
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
        if has_weight and has_aux:
            return value, rest
        return value, (rest, None) if has_weight else (None, rest)

    return call


def in_order(rows: Array, rows_per_example: int = 1) -> Array:
    """Reorder rows that are stacked by micro-batch to the example order of the batch."""
    shape = rows.shape[2:]
    if rows_per_example > 1:
        rows = rows.reshape(len(rows), -1, rows_per_example, *shape)
    return jnp.swapaxes(rows, 0, 1).reshape(-1, *shape)


def every_nth(x: Array, index: Array | int, n: int) -> Array:
    """Select every n-th example from `index`, without communication between devices."""
    split = jnp.reshape(x, (len(x) // n, n, *np.shape(x)[1:]))
    return lax.dynamic_index_in_dim(split, index, axis=1, keepdims=False)
