"""Workarounds for specific backends and JAX versions, which do not change results.

Code outside this module does not depend on the backend, except for conditional steps in
`_run_if.py`. Measurements use JAX 0.10.2, compiled for an H100 and a TPU v5e. Each workaround is
needed up to the version that its comment names; measure it again with a newer version.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Final

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType

from ._types import Array

_SMALL: Final = 1 << 14
"""Largest number of elements of a leaf whose summands are stored before they are reduced."""

_LARGE: Final = 1 << 20
"""Smallest number of elements of a matrix whose gradient is row-major although its shape occurs
once."""

_WIDTH: Final = 64
"""Largest number of operands of a concatenation."""

HAS_TYPES: Final = jax.__version_info__ >= (0, 10)
"""Whether array types have `manual_axis_type`, and reduced axes (JAX 0.10 and later)."""


fusion_barrier = lax.optimization_barrier
"""Prevent XLA from fusing the producers of arrays with their consumers.

| arrays | effect of XLA without the barrier (JAX 0.10.2) |
| --- | --- |
| a bfloat16 leaf that is scaled | keeps the float32 copy that was made to compute its norm |
| a bfloat16 factor with two consumers | may use a higher precision for one of them |
| a float16 leaf before its maximum | may omit the rounding to float16 |
| the sums of all leaves as a vector | reduces them leaf by leaf, with one more read |
"""


def device_count(x: Array) -> int:
    """Return the number of devices over which `jit` may shard an array.

    The type of an array shows neither its sharding over automatic mesh axes nor the argument
    `in_shardings` of `jit`.
    """
    mesh = jax.typeof(x).sharding.mesh
    if mesh.empty:
        return jax.device_count()
    return 1 if all(kind == AxisType.Manual for kind in mesh.axis_types) else mesh.size


def _stack_key(x: Array, leaf: int) -> Hashable:
    """Return a key that is equal for arrays that can be stacked: those of the same type.

    An array that may be sharded is only stacked with arrays of the same leaf. If arrays of
    different shardings are stacked, XLA changes the sharding of their producers, and may gather a
    gradient and its moments.
    """
    return jax.typeof(x), leaf if x.ndim and device_count(x) > 1 else None


def groups_of_type(arrays: Sequence[Array]) -> list[list[int]]:
    """Group the indices of arrays that can be stacked, one array for each leaf."""
    groups: dict[Hashable, list[int]] = {}
    for i, x in enumerate(arrays):
        groups.setdefault(_stack_key(x, i), []).append(i)
    return list(groups.values())


def shared(scalar: Array) -> Array:
    """Return a scalar as an element of a vector on GPU.

    XLA merges GPU kernels that read the same vector, but not kernels that read the same scalar.
    This reduces the kernel launches of a training step of an unrolled GPT with clipping by 16 %
    (JAX 0.10.2, H100).
    """
    if scalar.ndim or not isinstance(scalar, Tracer):
        return scalar

    def copied(scalar: Array) -> Array:
        # Use two elements, because XLA simplifies a vector with one element to a scalar.
        return fusion_barrier(jnp.broadcast_to(scalar, 2))[0]

    return lax.platform_dependent(scalar, cuda=copied, rocm=copied, default=jnp.asarray)


def map_arrays(fun: Callable[..., Array], *columns: Sequence[Array]) -> list[Array]:
    """Return `list(map(fun, *columns))` for an elementwise function, using stacks on GPU and TPU.

    A GPU or TPU runs the operations on each scalar as separate kernels. Stacks reduce the kernel
    launches of a training step of a ViT with one norm per leaf by 23 % (JAX 0.10.2, H100). On CPU
    the arrays are not stacked, because XLA would compile one kernel per index of a stack. Compiling
    a step with 300 leaves would take 12 s instead of 3.5 s (JAX 0.10.2).
    """

    def one_by_one(*columns: Sequence[Array]) -> list[Array]:
        return list(map(fun, *columns))

    def stacked(*columns: Sequence[Array]) -> list[Array]:
        results = list(columns[0])
        for places in groups_of_type(columns[0]):
            shape = results[places[0]].shape
            stacks = [[jnp.broadcast_to(x[i], shape) for i in places] for x in columns]
            values = jnp.unstack(fun(*map(jnp.stack, stacks)))
            for i, value in zip(places, values, strict=True):
                results[i] = value
        return results

    if len(columns[0]) < 2:
        return list(map(fun, *columns))
    return lax.platform_dependent(*columns, cpu=one_by_one, default=stacked)


def joined(scalars: Sequence[Array], *, is_sum: bool) -> Array:
    """Return the sum or maximum of n scalars, with an error that grows with log n instead of n.

    On GPU, XLA fuses pairwise additions into one kernel. On TPU, each addition of two scalars
    would be a separate kernel, so the scalars are reduced as a vector (7 % fewer kernel
    launches for a GPT with scanned layers, JAX 0.10.2, TPU v5e).
    """
    if len(scalars) == 1:
        return scalars[0]

    def as_vector(*scalars: Array) -> Array:
        # Without the barrier, XLA replaces the reduction of the vector by scalar additions.
        vector = fusion_barrier(jnp.stack(scalars))
        return jnp.sum(vector, axis=0) if is_sum else jnp.max(vector, axis=0)

    def in_pairs(*scalars: Array) -> Array:
        terms = list(scalars)
        while len(terms) > 1:
            a, b, rest = terms[0], terms[1], terms[2:]
            terms = [*rest, a + b if is_sum else jnp.maximum(a, b)]
        return terms[0]

    return lax.platform_dependent(*scalars, tpu=as_vector, default=in_pairs)


def sums_of_terms(
    sums: Callable[..., list[Array]],
    terms: Callable[..., Sequence[Array]],
    num_terms: int,
    *columns: Sequence[Array],
) -> list[list[Array]]:
    """Return per-leaf sums of several elementwise functions, computed together on GPU.

    `sums(term, *columns)` returns sums of `term(leaf, axes, *others)`, and `terms(leaf, *others)`
    returns an even number of real arrays. `sums` accepts `map_terms` like `totals`.

    On GPU, one complex sum replaces two real sums. It needs only one kernel, and if rows are
    reduced first, XLA fuses it with the kernel that computes the summands, such as the optimizer
    step. A GPT training step with `watch` moves 5 % fewer bytes in 9 % fewer kernel launches on an
    H100. XLA would materialize complex arrays on TPU and compile one more kernel per sum on CPU.

    A kernel that reduces cannot overwrite its inputs, so XLA copies new parameters and moments.
    The summands of small leaves are therefore stored and reduced by a separate kernel, which saves
    11 % of the launches of GPT-2 and PPO and 26 % of those of a model with 150 small layers. The
    stored summands, or sums of rows, of all terms are reduced by the same kernel. If there is only
    one device, this kernel reduces all leaves of the same shape, which saves another 10 % of the
    launches of a GPT.
    """

    # With `jit`, each term is traced once for all leaves of the same shape.
    def at_once(*columns: Sequence[Array]) -> list[list[Array]]:
        @functools.partial(jax.jit, static_argnums=1)
        def summands(x: Array, axes: Sequence[int], *others: Array) -> list[Array]:
            values = terms(x, *others)
            pairs = list(map(lax.complex, values[::2], values[1::2]))
            by_row = len(axes) > 1 and axes[-1] == x.ndim - 1 and x.shape[-1] >= 64
            # Without other columns, as for the gradient alone, no input is overwritten.
            is_small = len(pairs) > 1 and x.size <= _SMALL
            if not is_small:
                over = axes[-1:] if by_row else tuple(axes)
                pairs = [jnp.sum(pair, over, keepdims=True) for pair in pairs]
            return fusion_barrier(pairs) if by_row or is_small else pairs

        gradient, *others = columns
        totals = sums(summands, _row_major(gradient), *others, map_terms=_sums_by_type)
        # The sum of a group without leaves is a scalar 0.
        parts = [[x[i] if x.ndim else x for x in totals] for i in range(num_terms // 2)]
        return [list(map(part, x)) for x in parts for part in (jnp.real, jnp.imag)]

    def one_by_one(*columns: Sequence[Array]) -> list[list[Array]]:
        @functools.partial(jax.jit, static_argnums=(0, 2))
        def term(i: int, x: Array, axes: Sequence[int], *others: Array) -> Array:
            return jnp.sum(terms(x, *others)[i], axis=tuple(axes), keepdims=len(axes) < x.ndim)

        return [sums(functools.partial(term, i), *columns) for i in range(num_terms)]

    return lax.platform_dependent(*columns, cuda=at_once, rocm=at_once, default=one_by_one)


def _sums_by_type(
    summands: Callable[..., list[Array]],
    leaves: Sequence[Array],
    axes: Sequence[Sequence[int]],
    *others: Sequence[Array],
) -> list[Array]:
    """Sum the arrays that `summands(leaf, axes, *others)` returns, those of one type together.

    Return the sums of each leaf as one array.
    """
    terms = list(map(summands, leaves, axes, *others))
    groups: dict[Hashable, list[tuple[int, int]]] = {}
    for i, of_leaf in enumerate(terms):
        for j, x in enumerate(of_leaf):
            groups.setdefault((_stack_key(x, i), axes[i]), []).append((i, j))
    for group in groups.values():
        for start in range(0, len(group), _WIDTH):
            places = group[start : start + _WIDTH]
            stack = jnp.stack([terms[i][j] for i, j in places])
            over = [i + 1 for i in axes[places[0][0]]]
            sums = jnp.sum(stack, over, keepdims=len(over) < stack.ndim - 1)
            for (i, j), x in zip(places, jnp.unstack(sums), strict=True):
                terms[i][j] = x
    return list(map(jnp.stack, terms))


def _row_major(gradients: Sequence[Array]) -> list[Array]:
    """Let XLA store the gradients of large matrices in row-major order.

    XLA may store a gradient in column-major order, because a matrix product returned it so. It then
    transposes the parameter and the moments, and copies them back: 6 % of the kernel launches of a
    GPT with `watch`, and 17 % of the bytes of an LSTM (JAX 0.10.2, H100). A reshape to a vector
    requires no copy in row-major order, so XLA chooses this order. The gradient of a position
    embedding, a matrix whose shape usually occurs once, is a sum over examples, and its order would
    determine that of all activations. XLA would gather a sharded gradient.
    """
    ordered = list(gradients)
    for places in groups_of_type(gradients):
        x = gradients[places[0]]
        is_large = x.size >= _LARGE or (len(places) > 1 and x.size > _SMALL)
        if x.ndim == 2 and is_large and device_count(x) == 1:
            for i in places:
                ordered[i] = fusion_barrier(gradients[i].reshape(-1)).reshape(x.shape)
    return ordered


def concatenated(vectors: Sequence[Array]) -> Array:
    """Concatenate vectors, at most 64 of them in one kernel.

    XLA on GPU compiles one kernel for a concatenation and the operations that compute its operands,
    and the compile time of this kernel grows faster than linearly. The limit reduces trace and
    compile time of a `watch` step with 300 leaves from 45 s to 30 s (JAX 0.10.2, H100).
    """
    while len(vectors) > _WIDTH:
        starts = range(0, len(vectors), _WIDTH)
        vectors = [fusion_barrier(jnp.concatenate(vectors[i : i + _WIDTH])) for i in starts]
    return fusion_barrier(jnp.concatenate(vectors))


def summand(x: Array, is_added: Array) -> Array:
    """Return the gradient of a micro-batch, or -0.0 if the micro-batch is skipped.

    `is_added` must not be a compile-time constant, even if all micro-batches are added. Otherwise
    XLA merges the scatter of an embedding gradient with the sum over micro-batches, which makes
    the result wrong before JAX 0.12, and keeps one all-reduce per micro-batch inside the loop in
    JAX 0.12 (docs/compiler_faults.md).
    """
    # With 0 instead of -0.0, XLA on GPU would copy the zeros that initialize a scan over layers.
    return jnp.where(is_added, x, jnp.full_like(x, -0.0))
