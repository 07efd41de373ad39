"""Workarounds for XLA, each with the device, the version and the number that justifies it.

What was compiled for an H100 and for a TPU v5e was compiled without one (JAX 0.10.2); the CPU had
two cores.
"""

import jax
import jax.numpy as jnp
from jax import lax

from ._types import Array

# Up to this many elements a leaf is cheaper to copy into a longer vector, and to reduce there,
# than to compile and launch a reduction of its own. On a CPU the copy costs more than it saves
# from 10,000 elements on, up to twice the time of the norm.
SMALL = 8_192

# So many small leaves are joined at once. The norm of 1,000 leaves of 64 elements on an H100: 34
# launches and 1.0 N moved, 7 N from 64 leaves on, because then XLA writes down what it joined.
JOINED = 32

# On a CPU the time to compile a concatenation grows with the square of the number of arrays, and
# each concatenation costs a kernel: least at 1,000 leaves from 384 to 512.
JOINED_ON_CPU = 512

# The length of the rows in which joined leaves are added up on a GPU. In one row of 4,096 to
# 16,384 elements XLA writes the terms down first (H100: 7 N moved, 1.05 N in rows of 128).
ROW = 128

# So many leaves take their factor from one vector. On an H100 XLA merges the scaling of such
# leaves into few kernels, but not if all read one scalar: 23 launches in place of 1,002 for 1,000
# leaves. Up to 200 merge alike, more take longer to compile (4: 5.5 s, 32: 6.4 s).
SCALED_TOGETHER = 4


@jax.jit
def fusion_barrier(x: Array) -> Array:
    """The same values, their arithmetic not compiled anew into every kernel that reads them.

    XLA on a CPU drops an optimization barrier before it fuses, but keeps a branch. The clip of
    1,000 leaves compiles in 0.31 of the time of Optax's with it, in 0.49 without.
    """

    def in_a_branch(x: Array) -> Array:
        return lax.cond(jnp.all(x == 1), jnp.ones_like, lambda x: x, x)

    return lax.platform_dependent(x, cpu=in_a_branch, default=lax.optimization_barrier)
