"""What a device needs otherwise than others. Each function gives the same numbers on all.

All else in this package is one program for every device, but for how a step is taken
(`_run_if.py`). Figures are of JAX 0.10.2, an H100 and a TPU v5e.
"""

from collections.abc import Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from ._checks import is_traced
from ._types import Array, Tree

_Tree = TypeVar("_Tree", bound=Tree)


def shared(scalars: _Tree) -> _Tree:
    """Scalars that several kernels read, as entries of one vector.

    A GPU merges kernels that read those, and not kernels that read one scalar: 53 launches for
    `skip_nonfinite(adamw)` on PPO's networks, not 62. A TPU would slice each entry by itself.
    """
    leaves, structure = jax.tree.flatten(scalars)
    if not any(map(is_traced, leaves)):
        return scalars
    # Twice, for a vector of one is a scalar to XLA.
    vector = lax.platform_dependent(
        jnp.broadcast_to(jnp.stack(leaves), (2, len(leaves))),
        tpu=lambda vector: vector,
        default=lax.optimization_barrier,
    )
    return jax.tree.unflatten(structure, list(vector[0]))


def joined(scalars: Sequence[Array], *, is_sum: bool) -> Array:
    """The sum, or the maximum, of scalars: off by log n roundings, not by n.

    A GPU merges additions in pairs into one kernel; a TPU executes each of them by itself.
    """

    def at_once(*scalars: Array) -> Array:
        # Without the barrier XLA takes the reduction of the vector apart.
        vector = lax.optimization_barrier(jnp.stack(scalars))
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

    One sum of both, by rows, stays in the kernel that makes them on an H100, such as that of the
    optimizer; for two XLA copies what that kernel writes. A TPU writes complex numbers down.
    """

    def total(x: Array) -> Array:
        return jnp.sum(x, axis=tuple(axes), keepdims=len(axes) < x.ndim)

    def at_once(a: Array, b: Array) -> Array:
        both = lax.complex(a, b)
        if len(axes) > 1 and a.shape[axes[-1]] >= 64:
            both = lax.optimization_barrier(jnp.sum(both, axes[-1], keepdims=True))
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
