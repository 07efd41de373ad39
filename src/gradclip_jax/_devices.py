"""What a device, a compiler or an older JAX needs otherwise. The numbers are the same on all.

All else in this package is one program for every device, but for how a step is taken
(`_run_if.py`). Figures are of JAX 0.10.2, an H100 and a TPU v5e.
"""

from collections.abc import Sequence
from typing import Final, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from ._checks import is_traced
from ._types import Array, Tree

_Tree = TypeVar("_Tree", bound=Tree)

HAS_TYPES: Final = jax.__version_info__ >= (0, 10)
"""Whether types say over which mesh axes a value is reduced or unreduced, as from JAX 0.10 on."""


def fusion_barrier(x: _Tree) -> _Tree:
    """The same arrays; XLA merges nothing that makes them with what reads them.

    | of what | XLA otherwise |
    | --- | --- |
    | a bfloat16 leaf that is scaled | keeps the float32 copy that its norm was taken of |
    | a bfloat16 factor with two readers | may give one of them more digits |
    | a float16 leaf before its maximum | may leave out that it was rounded to float16 |
    | the sums of all leaves as a vector | computes the sum of it leaf by leaf: one read more |
    """
    return lax.optimization_barrier(x)


def shared(scalars: _Tree) -> _Tree:
    """Scalars that several kernels read, those of a type as one vector; other leaves as they are.

    A GPU merges kernels that read those, and not kernels that read one scalar: 53 launches for
    `skip_nonfinite(adamw)` on PPO's networks, not 62. A TPU would slice each entry by itself.
    """
    leaves, structure = jax.tree.flatten(scalars)
    if not any(map(is_traced, leaves)):
        return scalars
    types = list(map(jax.typeof, leaves))
    for kind in dict.fromkeys(x for x in types if not x.ndim):
        places = [i for i, x in enumerate(types) if x == kind]
        # Twice, for a vector of one is a scalar to XLA.
        vector = lax.platform_dependent(
            jnp.broadcast_to(jnp.stack([leaves[i] for i in places]), (2, len(places))),
            tpu=lambda vector: vector,
            default=fusion_barrier,
        )
        for i, x in zip(places, vector[0], strict=True):
            leaves[i] = x
    return jax.tree.unflatten(structure, leaves)


def joined(scalars: Sequence[Array], *, is_sum: bool) -> Array:
    """The sum, or the maximum, of scalars: off by log n roundings, not by n.

    A GPU merges additions in pairs into one kernel; a TPU executes each of them by itself.
    """

    def at_once(*scalars: Array) -> Array:
        # Without the barrier XLA takes the reduction of the vector apart.
        vector = fusion_barrier(jnp.stack(scalars))
        return jnp.sum(vector, axis=0) if is_sum else jnp.max(vector, axis=0)

    def in_pairs(*scalars: Array) -> Array:
        terms, join = list(scalars), jnp.add if is_sum else jnp.maximum
        while len(terms) > 1:
            pairs = [join(a, b) for a, b in zip(terms[::2], terms[1::2], strict=False)]
            terms = pairs + terms[2 * len(pairs) :]
        return terms[0]

    if len(scalars) == 1:
        return scalars[0]
    return lax.platform_dependent(*scalars, tpu=at_once, default=in_pairs)


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


def where_written(written: Tree, otherwise: Tree) -> Tree:
    """What XLA writes down on a CPU, and elsewhere something that is there.

    A CPU makes an array of what an optimizer reads in several kernels, a GPU and a TPU compute it
    in each: 8 N moved by a window of AdamW, and 9 N if it were kept.
    """
    return lax.platform_dependent(
        written,
        otherwise,
        cpu=lambda written, otherwise: written,
        default=lambda written, otherwise: otherwise,
    )


def summand(x: Array, is_added: Array) -> Array:
    """X where it is added, else -0.0: the gradient of a micro-batch, before it is added up.

    Where all are added the flag is one that XLA does not know to be true. It otherwise merges the
    scatter of an embedding's gradient with the sum over micro-batches; the sum over devices then
    stays in the loop or is wrong: docs/compiler_faults.md.
    """
    # Not 0: XLA on a GPU would copy and read the zeros in which a scan over layers begins.
    return jnp.where(is_added, x, jnp.full_like(x, -0.0))
