"""Backend- and version-specific workarounds. The results are the same on every backend.

Everything else is one program for every backend, except how a step is skipped (`_run_if.py`).
Figures: JAX 0.10.2, compiled for an H100 and a TPU v5e.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from ._types import Array, Tree

_Tree = TypeVar("_Tree", bound=Tree)

HAS_TYPES: Final = jax.__version_info__ >= (0, 10)
"""Whether the type of an array carries reduced and unreduced mesh axes (JAX 0.10 and later)."""


def fusion_barrier(x: _Tree) -> _Tree:
    """Prevent XLA from fusing the producers of arrays with their consumers.

    | arrays | XLA without the barrier |
    | --- | --- |
    | a bfloat16 leaf that is scaled | keeps the float32 copy that its norm was computed from |
    | a bfloat16 factor with two readers | may give one of them more digits |
    | a float16 leaf before its maximum | may skip the rounding to float16 |
    | the sums of all leaves as a vector | reduces them leaf by leaf, with one more read |
    """
    return lax.optimization_barrier(x)


def shared(scalars: _Tree) -> _Tree:
    """On a GPU, read the scalars of one type from one vector; other leaves are unchanged.

    XLA merges GPU kernels that read the same vector but not kernels that read the same scalar: 16 %
    fewer launches for a clip in an unrolled GPT (JAX 0.10.2, H100).
    """
    leaves, structure = jax.tree.flatten(scalars)
    by_type: dict[Any, list[int]] = {}
    for i, x in enumerate(leaves):
        if isinstance(x, Tracer) and not x.ndim:
            by_type.setdefault(jax.typeof(x), []).append(i)
    for places in by_type.values():
        given = map(leaves.__getitem__, places)
        packed = lax.platform_dependent(*given, cuda=_packed, rocm=_packed, default=_unchanged)
        for i, x in zip(places, packed, strict=True):
            leaves[i] = x
    return jax.tree.unflatten(structure, leaves)


def _packed(*scalars: Array) -> tuple[Array, ...]:
    # Two rows: XLA simplifies a vector of one element to a scalar.
    rows = fusion_barrier(jnp.broadcast_to(jnp.stack(scalars), (2, len(scalars))))
    return tuple(jnp.unstack(rows[0]))


def _unchanged(*scalars: Array) -> tuple[Array, ...]:
    return scalars


def map_arrays(fun: Callable[..., Array], *columns: Sequence[Array]) -> list[Array]:
    """`list(map(fun, *columns))` of an elementwise function; on a TPU of stacks of arrays.

    A TPU runs each operation on a scalar by itself. XLA:CPU would compile one kernel for each index
    of a stack (JAX 0.10.2, a step with 300 leaves: 12 s instead of 3.5 s).
    """

    def one_by_one(*columns: Sequence[Array]) -> list[Array]:
        return list(map(fun, *columns))

    def stacked(*columns: Sequence[Array]) -> list[Array]:
        by_type: dict[Any, list[int]] = {}
        for i, x in enumerate(columns[0]):
            by_type.setdefault(jax.typeof(x), []).append(i)
        results = list(columns[0])
        for kind, places in by_type.items():
            stacks = [[jnp.broadcast_to(x[i], kind.shape) for i in places] for x in columns]
            values = jnp.unstack(fun(*map(jnp.stack, stacks)))
            for i, value in zip(places, values, strict=True):
                results[i] = value
        return results

    if len(columns[0]) < 2:
        return one_by_one(*columns)
    return lax.platform_dependent(*columns, tpu=stacked, default=one_by_one)


def joined(scalars: Sequence[Array], *, is_sum: bool) -> Array:
    """The sum or the maximum of scalars, whose error grows with log n instead of n.

    A GPU merges pairwise additions into one kernel. A TPU runs each addition of two scalars by
    itself, so there the scalars are reduced as a vector (7 % fewer launches for a scanned GPT).
    """
    if len(scalars) == 1:
        return scalars[0]

    def as_vector(*scalars: Array) -> Array:
        # Without the barrier XLA replaces the reduction of the vector by additions of scalars.
        vector = fusion_barrier(jnp.stack(scalars))
        return jnp.sum(vector, axis=0) if is_sum else jnp.max(vector, axis=0)

    def in_pairs(*scalars: Array) -> Array:
        terms = list(scalars)
        while len(terms) > 1:
            a, b, rest = terms[0], terms[1], terms[2:]
            terms = [*rest, a + b if is_sum else jnp.maximum(a, b)]
        return terms[0]

    return lax.platform_dependent(*scalars, tpu=as_vector, default=in_pairs)


def sums_of_two(a: Array, b: Array, axes: Sequence[int]) -> Array:
    """The sums of two real arrays over some axes, as the parts of complex numbers.

    On an H100 it is one kernel and not two. Rows first, it stays in the kernel that makes what is
    added up, such as that of the optimizer, whose results XLA copies for two sums. A TPU writes
    complex numbers down.
    """

    def total(x: Array) -> Array:
        return jnp.sum(x, axis=tuple(axes), keepdims=len(axes) < x.ndim)

    def at_once(a: Array, b: Array) -> Array:
        both = lax.complex(a, b)
        if len(axes) > 1 and axes[-1] == a.ndim - 1 and a.shape[-1] >= 64:
            both = fusion_barrier(jnp.sum(both, axes[-1], keepdims=True))
        return total(both)

    def one_by_one(a: Array, b: Array) -> Array:
        return lax.complex(total(a), total(b))

    return lax.platform_dependent(a, b, cuda=at_once, rocm=at_once, default=one_by_one)


def summand(x: Array, is_added: Array) -> Array:
    """X where it is added, else -0.0: the gradient of a micro-batch, before it is added up.

    Where all are added the flag is one that XLA does not know to be true. It otherwise merges the
    scatter of an embedding's gradient with the sum over micro-batches; the sum over devices then
    stays in the loop or is wrong: docs/compiler_faults.md.
    """
    # Not 0: XLA on a GPU would copy and read the zeros in which a scan over layers begins.
    return jnp.where(is_added, x, jnp.full_like(x, -0.0))
