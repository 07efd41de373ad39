"""Workarounds for XLA, each with the device, the version and the number that justifies it.

What was compiled for an H100 and for a TPU v5e was compiled without one (JAX 0.10.2); the CPU had
two cores.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._types import Array, Tree

# Up to this many elements a leaf is cheaper to copy into a longer vector, and to reduce there,
# than to compile and launch a reduction of its own. On a CPU the copy costs more than it saves
# from 10,000 elements on, up to twice the time of the norm.
SMALL = 8_192

# So many small leaves are joined at once. The norm of 1,000 leaves of 64 elements on an H100: 34
# launches and 2.9 N moved, 7 N from 64 leaves on, because then XLA writes down what it joined.
JOINED = 32

# From so many leaves of one length on, a TPU launches less for their sum if they are stacked.
STACKED = 4

# On a CPU the time to compile a concatenation grows with the square of the number of arrays, and
# each concatenation costs a kernel: least at 1,000 leaves from 384 to 512.
JOINED_ON_CPU = 512

# From so many elements on joined leaves are added up on a GPU in rows of 128: in one row of 4,096
# to 16,384 XLA writes the terms down first (H100: 7 N moved, 1.05 N in rows of 128).
LONG_ROW = 4_096
ROW = 128

# The sums of so many leaves are put side by side by one kernel, three of each leaf. Of more XLA on
# a GPU first copies those of each leaf by a kernel of its own: 589 launches in place of 409 for the
# norm of 200 matrices of 768 x 768 on an H100 (Optax: 403).
SUMS_TOGETHER = 31

# On an H100 XLA merges the kernels of leaves that take their factor from one vector, but not if all
# read one scalar: 23 launches in place of 1,002 to scale 1,000 small leaves. Of large leaves only
# so many share a vector: a merged kernel of much arithmetic compiles slowly. For GPT-2 124M with
# bfloat16 matrices `skip_nonfinite(clip + AdamW)` takes 33 s so, 77 s where all share one.
SCALED_TOGETHER = 4

# So many leaves with factors of their own take them from one vector: XLA on a GPU merges the
# kernels of up to 200. The leaf clip of 400 leaves of 64 on an H100: 416 launches and 19 s to
# compile from one vector, 28 and 3.4 s so.
READ_TOGETHER = 100


def rows_on_cpu(table: Array) -> list[Array]:
    """The entries of a table along its first axis.

    XLA on a CPU compiles a kernel of its own, in 23 ms, for each constant place that a kernel
    reads from; kernels that differ in nothing are compiled once. So the places are numbers that
    it cannot know: both branches name the same entries of a table that stands there twice.
    Scaling 100 leaves by as many entries: 2.3 s with slices, 0.35 s so; the columns of 200
    matrices of 16 shapes: 26 and 3 s.
    """
    count, rest = len(table), table.shape[1:]
    width = math.isqrt(count - 1) + 1
    height = -(-count // width)
    padded = jnp.pad(table, [(0, height * width - count), *((0, 0) for _ in rest)])
    twice = jnp.tile(padded.reshape(height, width, *rest), (2, 2, *(1 for _ in rest)))

    def places(row: int, column: int) -> tuple[list[Any], list[Any]]:
        down = [np.uint32(row + i) for i in range(height)]
        return down, [np.uint32(column + i) for i in range(width)]

    is_one = table.reshape(-1)[0] == 1
    down, across = lax.cond(is_one, lambda: places(0, 0), lambda: places(height, width))
    zeros = [np.uint32(0) for _ in rest]

    def entry(i: int) -> Array:
        place = (down[i // width], across[i % width], *zeros)
        return lax.dynamic_slice(twice, place, (1, 1, *rest)).reshape(rest)

    return [entry(i) for i in range(count)]


@jax.jit
def fusion_barrier(x: Array) -> Array:
    """The same values, their arithmetic not compiled anew into every kernel that reads them.

    XLA on a CPU drops an optimization barrier before it fuses, but keeps a branch. The clip of
    1,000 leaves compiles in 0.31 of the time of Optax's with it, in 0.49 without.
    """

    def in_a_branch(x: Array) -> Array:
        return lax.cond(jnp.all(x == 1), jnp.ones_like, lambda x: x, x)

    return lax.platform_dependent(x, cpu=in_a_branch, default=lax.optimization_barrier)


def barrier_on_gpu(x: Tree) -> Tree:
    """The same values, behind a barrier on a GPU alone.

    The three sums of a norm behind a matrix product are then one kernel on an H100: 3.0 N in place
    of 5.0 N more than without the norm. A TPU v5e fuses the sums with the product, and the
    scaling with the next one, unless there is a barrier (0 N more in place of 1 N); and where
    sums are joined in parts, a barrier is 96 kernels more there for GPT-2 124M.
    """
    return lax.platform_dependent(
        x, cpu=lambda x: x, tpu=lambda x: x, default=lax.optimization_barrier
    )
