"""Optax: the micro-batches of `microbatched_value_and_grad` in the place of `microbatch`."""

import jax
import jax.numpy as jnp
import numpy as np
from measures import GRADS, error_of_mean
from optax.microbatching import AccumulationType as Type

import gradclip_jax as gcx

WORDS = {Type.SUM: "sum", Type.MEAN: "mean", Type.RUNNING_MEAN: "mean", Type.CONCAT: "concatenate"}


def microbatch(
    fun, argnums, microbatch_size, accumulator=Type.SUM, *, argnames=(), in_axes=0, **options
):
    names = jax.tree.leaves((argnums, argnames))
    axes = np.broadcast_to(in_axes, len(names)).tolist()
    options |= {"has_aux": True, "aux_reduction": jax.tree.map(WORDS.get, accumulator)}

    def run(*args, **kwargs):
        given = dict(enumerate(args)) | kwargs

        def loss(zero, rows):  # the output of `fun` is aux: there is nothing to differentiate
            full = given | dict(zip(names, map(moved, rows, [0] * len(axes), axes), strict=True))
            out = fun(*(full[i] for i in range(len(args))), **{name: full[name] for name in kwargs})
            return zero, out

        rows = [moved(given[name], axis, 0) for name, axis in zip(names, axes, strict=True)]
        size = jax.tree.leaves(rows)[0].shape[0]
        rest = size % (microbatch_size or size)
        number = size + 1 if rest else size // (microbatch_size or size)  # size + 1 raises
        return gcx.microbatched_value_and_grad(loss, number, **options)(0.0, rows)[0][1]

    return run


def moved(tree, source, target):
    return jax.tree.map(lambda x: jnp.moveaxis(x, source, target), tree)


REPLACES = {"optax.microbatching._microbatching:microbatch": microbatch}
TESTS = ["microbatching/_microbatching_test.py"]
PASSED = 37
ROWS = "Only an array with rows for each example can be concatenated."
DIFFERENCES = {"test_in_axes_invariant3": ROWS, "test_in_axes_with_argnames3": ROWS}


def gain(part):
    return error_of_mean(part(lambda row: row[0], 0, 1, Type.MEAN)(GRADS))
