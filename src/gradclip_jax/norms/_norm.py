"""Public functions that compute norms of trees and leaves, or combine norms."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import check_ord, is_traced
from .._errors import public, value_error
from .._format import shortened
from .._types import AxisName, Number, Order, Scalar, Tree
from ._groups import leaf_groups
from ._leaves import checked_leaves, is_inexact, norm_dtype
from ._mesh import check_axis_name
from ._reduce import group_norms, norm_of_leaves


@public
@jax.named_scope("global_norm")
def global_norm(tree: Tree, *, ord: Order | None = None, axis_name: AxisName = None) -> Scalar:
    """Compute the norm of all elements of a tree as one vector.

    The norm is the root of the sum of squares, the sum of magnitudes for `ord=1`, or the largest
    magnitude for `ord=inf`.

    | tree | norm |
    | --- | --- |
    | float16 `[300, 400]` | 500, although its squares overflow float16 |
    | float32, a 2-norm up to 1.8e19, no nonzero element below 1e-18 | correct to 1e-6 |
    | float32, elements below 1e-18 | may count as zero in a 2-norm |
    | float32, a 2-norm above 1.8e19 | inf |
    | empty, or only `None`, masked or zero-size leaves | 0 |
    | any NaN | NaN; inf for `ord=inf` |
    | an infinity and no NaN | inf |
    | sharded | the norm of the whole tree; see `axis_name` |
    | sharded, `axis_name=()` | the norm of the shards on this device |

    Sums are computed in float32, or in float64 if a leaf has 64 bits. All derivatives are finite: a
    2-norm that is zero or not finite has a derivative of zero.

    Args:
        tree: Pytree of floating-point or complex leaves, in the units of the gradients.
        ord: Order of the norm: 1, 2 or inf. None means 2.
        axis_name: Mapped axes over which every leaf is sharded, required where the array's type
            does not carry the sharding (`pmap`, or `shard_map` with `check_vma=False`). Omit axes
            over which leaves are equal, such as gradients after `psum` or `pmean`: the norm would
            be too large by the root of the number of devices. `()` computes the norm on each
            device alone, without communication.

    Returns:
        The norm, float32[], or float64[] if a leaf is float64 or complex128.

    Raises:
        TypeError: If a leaf has an integer or boolean dtype; the message contains its path.
        ValueError: If `ord` is not 1, 2 or inf.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> float(gcx.global_norm({"w": jnp.float16([300, 0]), "b": jnp.float16([400])}))
        500.0
    """
    check_axis_name(axis_name)
    leaves = checked_leaves("tree", tree).arrays
    return norm_of_leaves(leaves, check_ord(ord), axis_name)


@public
@jax.named_scope("leaf_norms")
def leaf_norms(tree: Tree, *, ord: Order | None = None, axis_name: AxisName = None) -> Tree:
    """Compute the norm of each leaf; see `global_norm`.

    Args:
        tree: Pytree of floating-point or complex leaves, in the units of the gradients.
        ord: Order of the norm: 1, 2 or inf. None means 2.
        axis_name: See `global_norm`.

    Returns:
        A tree of scalars with the same structure. All scalars are float32, or float64 if any leaf
        is float64 or complex128. The norm of a float0 leaf is 0.

    Raises:
        TypeError: If a leaf has an integer or boolean dtype; the message contains its path.
        ValueError: If `ord` is not 1, 2 or inf.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> norms = gcx.leaf_norms({"w": jnp.array([3.0, 4.0]), "b": jnp.array(-2.0)})
        >>> float(norms["w"]), float(norms["b"])
        (5.0, 2.0)
    """
    check_axis_name(axis_name)
    leaves = checked_leaves("tree", tree).arrays
    norms = iter(group_norms(leaves, leaf_groups(leaves), check_ord(ord), axis_name).arrays)
    zero = jnp.zeros((), norm_dtype(leaves))
    return jax.tree.map(lambda x: next(norms) if is_inexact(x) else zero, tree)


@public
@jax.named_scope("combine_norms")
def combine_norms(norms: Sequence[Number], *, ord: Order | None = None) -> Scalar:
    """Combine the norms of disjoint parts of a model into the norm of the whole model.

    The result is the root of the sum of squares, the sum for `ord=1`, or the largest norm for
    `ord=inf`. Use this function if a model is distributed over several programs, such as pipeline
    stages in separate processes. Each process computes `global_norm` of its part, the processes
    exchange these scalars, and each process clips its part with
    `clip_grad_norm(grads, max_norm, norm=whole)`. A parameter that two stages share must be
    included only once.

    | norms | whole |
    | --- | --- |
    | none | 0 |
    | one is NaN | NaN; inf for `ord=inf` |
    | one is infinite, none is NaN | inf |

    Args:
        norms: Norms of the parts, scalars or arrays >= 0, all of the same order.
        ord: Order of the norms: 1, 2 or inf. None means 2.

    Returns:
        The norm, float32[], or float64[] if a norm is float64.

    Raises:
        TypeError: If a norm is not a floating-point number.
        ValueError: If `ord` is not 1, 2 or inf, or if a norm that is not traced is negative.

    Examples:
        >>> import gradclip_jax as gcx
        >>> float(gcx.combine_norms([3.0, 4.0]))
        5.0
    """
    leaves = checked_leaves("norms", norms, real=True).arrays
    for x in leaves:
        if not is_traced(x) and x.is_fully_addressable and np.any(np.asarray(x) < 0):
            hint = "Pass the results of `global_norm` for each part."
            raise value_error("norms", "at least 0", shortened(norms), hint)
    return norm_of_leaves(leaves, check_ord(ord), None)
