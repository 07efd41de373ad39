"""Trees and comparisons that the tests of both devices share."""

import math

import jax
import jax.numpy as jnp


def tree_of(count, *shape, dtype="float32"):
    return {f"l{i}": jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for i in range(count)}


def size_of(tree):
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


LARGE = tree_of(4, 2048, 2048)
LARGE_BFLOAT16 = tree_of(4, 2048, 2048, dtype="bfloat16")
SMALL = tree_of(100, 64)
NORMS = ["norm", "clip", "leaf norms", "clip by leaf norm", "clip by block RMS"]
RULES = ["zclip", "adagc", "adaptive_grad_clip"]
# For the sums of blocks and of columns, which are written and read again, three for each of Optax's.
SLACK = 0.03
