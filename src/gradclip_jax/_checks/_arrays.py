"""Checks of arrays and trees of arrays."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import type_error, value_error
from .._types import Tree
from ._format import describe, leaf_path, shortened
from ._values import dtype_of, is_array_like, is_float0, is_traced


def check_array(argument: str, value: object) -> None:
    """Raise if a value is not a concrete or traced array of real floating-point numbers."""
    if not is_array_like(value) or not jnp.issubdtype(dtype_of(value), jnp.floating):
        hint = "Pass a JAX or NumPy array."
        raise type_error(argument, "a floating-point array", shortened(value), hint)


def check_arrays(argument: str, tree: Tree) -> None:
    """Raise if a leaf of a tree is neither an array, nor a number, nor a shape with a dtype."""
    for path, x in jax.tree.leaves_with_path(tree):
        dtype = dtype_of(x)
        kinds = jnp.number, jnp.bool_, jax.dtypes.extended
        is_number = is_float0(x) or any([jnp.issubdtype(dtype, kind) for kind in kinds])
        is_array = is_array_like(x) or hasattr(x, "shape")
        is_wide = isinstance(x, int) and abs(x) >= 2**31
        if not (is_number and is_array) or is_wide:
            got = f"{describe(x)} at {leaf_path(argument, path)}"
            raise type_error(argument, "a tree of arrays", got, "Exclude other leaves.")


def check_values(argument: str, tree: Tree) -> None:
    """Raise if arrays have no values, because they were donated to a step or are abstract."""
    for x in jax.tree.leaves(tree):
        is_abstract = isinstance(x, jax.ShapeDtypeStruct)
        if is_abstract or (isinstance(x, jax.Array) and not is_traced(x) and x.is_deleted()):
            got = "an abstract array" if is_abstract else "a donated array"
            hint = f"Use the {argument} that the step returned."
            raise value_error(argument, "a tree of arrays with values", got, hint)


def check_concrete(argument: str, tree: Tree, hint: str) -> None:
    """Raise if a function that runs on the host is called inside jit or with donated arrays."""
    if any([is_traced(x) or isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(tree)]):
        raise type_error(argument, "passed outside `jit`", "an abstract array", hint)
    check_values(argument, tree)


def shapes_of(tree: Tree) -> Tree:
    """Return a tree with the shape of each leaf as a list, for comparisons of trees."""
    return jax.tree.map(lambda x: list(np.shape(x)), tree)


def check_dtype_kept(argument: str, new: Any, old: Any) -> None:
    """Raise if a floating-point value would replace an integer or a bool in a rule's state."""
    if jnp.issubdtype(dtype_of(new), jnp.inexact) and not jnp.issubdtype(old.dtype, jnp.inexact):
        rule, got = "a rule whose state keeps its dtypes", f"{describe(new)} for {describe(old)}"
        raise type_error(argument, rule, got, "Return floating-point numbers from `init`.")
