"""What a CPU compiles for many small leaves: kernels that are alike are compiled once."""

import re

import jax
import jax.numpy as jnp
import pytest

import gradclip_jax as gcx
import hlo

NAMES_AND_SIZES = r"^%\S+ \(.*|, metadata=\{[^}]*\}|%[\w.-]+|\[[\d,]+\]|\{[\d,]*\}"


def count_of_distinct_kernels(function, leaves):
    """How many computations of the compiled program differ in more than names and sizes."""
    tree = {f"{i}": jax.ShapeDtypeStruct((4, 5 + i % 2), jnp.float32) for i in range(leaves)}
    program = re.sub(NAMES_AND_SIZES, "", hlo.compiled(function, tree), flags=re.MULTILINE)
    return len(set(program.split("\n\n")))


@pytest.mark.parametrize(
    "function",
    [
        gcx.leaf_norms,
        lambda tree: gcx.clip_by_leaf_norm(1.0).update(tree, None)[0],
        lambda tree: gcx.adaptive_grad_clip(0.1).update(tree, None, tree)[0],
    ],
    ids=["leaf_norms", "clip_by_leaf_norm", "adaptive_grad_clip"],
)
def test_more_leaves_of_the_same_shapes_need_no_more_kernels(function):
    assert count_of_distinct_kernels(function, 48) <= count_of_distinct_kernels(function, 24) + 6
