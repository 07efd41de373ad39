"""Workarounds for specific backends and JAX versions, which do not change results.

Only this module and `_run_if.py` branch on the backend. In other modules, comments explain where
XLA requires a certain form of an operation. The pages `*-gpu-steps.md` and `workarounds.md` in
`benchmarks/results` compare training steps with and without each workaround. If JAX is newer than
the version in the docstring of a workaround, measure the workaround again.
"""

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Final

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType

from ._types import Array

HAS_TYPES: Final = jax.__version_info__ >= (0, 10)
"""Whether array types have `manual_axis_type`, and reduced axes (JAX 0.10 and later)."""

MAX_STACKED_SIZE: Final = 2**10
"""Largest number of elements of a leaf that is stacked with others before it is reduced.

One kernel reduces the stack, instead of one kernel for each leaf, so that there are fewer kernels
to compile and to launch. With a larger limit, a training step of PPO would move more bytes (JAX
0.10.2).
"""

_MAX_MERGED_SIZE: Final = 2**18
"""Largest number of elements of an array whose GPU kernels are merged with others.

At 4 TB/s, AdamW needs 2 us for this size, about as long as the launch of a kernel.
"""

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
    if not x.ndim:
        return 1
    mesh = jax.typeof(x).sharding.mesh
    if mesh.empty:
        return jax.device_count()
    return 1 if all(kind == AxisType.Manual for kind in mesh.axis_types) else mesh.size


def stackable(
    *columns: Sequence[Array], labels: Sequence[Hashable] = (), max_size: float = math.inf
) -> list[list[int]]:
    """Return lists of the indices of arrays that can be stacked.

    Indices belong to the same list if the arrays have equal types in each column, and if the labels
    are equal. An array in the first column with more than `max_size` elements is not stacked; its
    list has only one index.

    Arrays that may be sharded are not stacked either. If arrays of different shardings are
    stacked, XLA changes the sharding of their producers, and may gather a gradient and its moments.
    """
    indices: dict[Hashable, list[int]] = {}
    for i, arrays in enumerate(zip(*columns, strict=True)):
        key: Hashable = *map(jax.typeof, arrays), *labels[i : i + 1]
        if arrays[0].size > max_size or max(map(device_count, arrays)) > 1:
            key = i
        indices.setdefault(key, []).append(i)
    return list(indices.values())


def stack(arrays: Sequence[Array], indices: Sequence[Sequence[int]]) -> list[Array]:
    """Stack the arrays at each list of indices, as returned by `stackable`.

    If a list contains only one index, the array is returned unchanged.
    """
    stacks: list[Array] = []
    for first, *rest in indices:
        members = [arrays[i] for i in (first, *rest)]
        stacks.append(jnp.stack(members) if rest else arrays[first])
    return stacks


def broadcast_scalar(scalar: Array, arrays: Sequence[Array]) -> list[Array]:
    """Return a copy of the scalar for each array.

    On GPU, the copy for a small array is an element of a vector.

    XLA merges GPU kernels that read the same vector, but not kernels that read the same scalar (JAX
    0.11.2). For large arrays, merged kernels are slower.
    """
    if scalar.ndim or not isinstance(scalar, Tracer):
        return [scalar] * len(arrays)

    def copied(scalar: Array) -> Array:
        # Use two elements, because XLA simplifies a vector with one element to a scalar.
        return fusion_barrier(jnp.broadcast_to(scalar, 2))[0]

    merged = lax.platform_dependent(scalar, cuda=copied, rocm=copied, default=jnp.asarray)
    return [merged if x.size <= _MAX_MERGED_SIZE else scalar for x in arrays]


def map_arrays(fun: Callable[..., Array], *columns: Sequence[Array]) -> list[Array]:
    """Return `list(map(fun, *columns))` for an elementwise function.

    On GPU and TPU, arrays are stacked first.

    A GPU or TPU runs the operations on each scalar as separate kernels. On a CPU, XLA would compile
    one kernel for each index of a stack, which takes several times as long (JAX 0.10.2).
    """
    if len(columns[0]) < 2 or not isinstance(columns[0][0], Tracer):
        return list(map(fun, *columns))

    def one_by_one(*columns: Sequence[Array]) -> list[Array]:
        return list(map(fun, *columns))

    def stacked(*columns: Sequence[Array]) -> list[Array]:
        results = list(columns[0])
        for places in stackable(columns[0]):
            shape = results[places[0]].shape
            stacks = [[jnp.broadcast_to(x[i], shape) for i in places] for x in columns]
            values = jnp.unstack(fun(*map(jnp.stack, stacks)))
            for i, value in zip(places, values, strict=True):
                results[i] = value
        return results

    return lax.platform_dependent(*columns, cpu=one_by_one, default=stacked)


def reduce_arrays(
    reduce: Callable[[Array], Array],
    combine: Callable[[Array, Array], Array],
    arrays: Sequence[Array],
) -> Array:
    """Combine the results of `reduce` for all arrays, using stacks as in `map_arrays`."""
    if len(arrays) == 1:
        return reduce(arrays[0])

    def one_by_one(*arrays: Array) -> Array:
        return _in_pairs(combine, *map(reduce, arrays))

    def stacked(*arrays: Array) -> Array:
        return one_by_one(*stack(arrays, stackable(arrays)))

    def as_vectors(*arrays: Array) -> Array:
        # Without the barrier, XLA replaces the reduction of the vector by scalar operations.
        return one_by_one(*map(fusion_barrier, stack(arrays, stackable(arrays))))

    return lax.platform_dependent(*arrays, cpu=one_by_one, tpu=as_vectors, default=stacked)


def tree_reduce(reduce: Callable[..., Array], arrays: Sequence[Array]) -> Array:
    """Return the elementwise `jnp.sum` or `jnp.max` of n arrays.

    The error grows with log n instead of n. On GPU, XLA fuses pairwise additions into one kernel.
    On TPU, each addition of two scalars would be a separate kernel, so the scalars are reduced as a
    vector (JAX 0.10.2).
    """
    if len(arrays) == 1:
        return arrays[0]

    def as_vector(*arrays: Array) -> Array:
        # Without the barrier, XLA replaces the reduction of the vector by scalar additions.
        return reduce(fusion_barrier(jnp.stack(arrays)), axis=0)

    combine = jnp.add if reduce is jnp.sum else jnp.maximum
    in_pairs = functools.partial(_in_pairs, combine)
    return lax.platform_dependent(*arrays, tpu=as_vector, default=in_pairs)


def _in_pairs(combine: Callable[[Array, Array], Array], *arrays: Array) -> Array:
    """Combine arrays pairwise, in a tree of logarithmic depth."""
    terms = list(arrays)
    while len(terms) > 1:
        a, b, *rest = terms
        terms = [*rest, combine(a, b)]
    return terms[0]


def pair_of_sums(axes: Sequence[int], x: Array, y: Array) -> Array:
    """Return `jnp.stack([jnp.sum(x, axes), jnp.sum(y, axes)], -1)`, where `x` may be a mask.

    XLA on GPU fuses sums over parameters with the optimizer step, but then updates the parameters
    in place only if a single sum reads them, and otherwise copies them (JAX 0.11.2). On GPU, both
    are therefore computed as one complex sum. On TPU, XLA would write the complex array to memory.
    XLA on CPU materializes the terms of a sum of integers or of a mask, unless the reduction has
    two operands (JAX 0.10.2).
    """
    keepdims = len(axes) < x.ndim  # with it, TPUs need fewer kernels (JAX 0.10.2)

    def apart(*terms: Array) -> Array:
        return jnp.stack([jnp.sum(x, axes, y.dtype, keepdims=keepdims) for x in terms], -1)

    def at_once(x: Array, y: Array) -> Array:
        pair = jnp.sum(lax.complex(x.astype(y.dtype), y), axes, keepdims=keepdims)
        return jnp.stack([pair.real, pair.imag], -1)

    def counted(x: Array, y: Array) -> Array:
        ones, zero = x.astype(jnp.int32), jnp.int32(0)
        both = lax.reduce((ones, ones), (zero, zero), lambda a, b: (a[0] + b[0], a[1] + b[1]), axes)
        count, _ = fusion_barrier(both)  # without it, XLA removes the second operand
        count = jnp.expand_dims(count, axes) if keepdims else count
        return jnp.stack([count.astype(y.dtype), jnp.sum(y, axes, keepdims=keepdims)], -1)

    on_cpu = counted if x.dtype == bool else apart
    return lax.platform_dependent(x, y, cuda=at_once, rocm=at_once, cpu=on_cpu, default=apart)


def summand(x: Array, is_added: Array) -> Array:
    """Return the gradient of a micro-batch, or -0.0 if the micro-batch is skipped.

    `is_added` must not be a compile-time constant, even if all micro-batches are added. Otherwise
    XLA merges the scatter of an embedding gradient with the sum over micro-batches, which makes
    the result wrong before JAX 0.12, and keeps one all-reduce per micro-batch inside the loop in
    JAX 0.12 (docs/compiler_faults.md).
    """
    # With 0 instead of -0.0, XLA on GPU would copy the zeros that initialize a scan over layers.
    return jnp.where(is_added, x, jnp.full_like(x, -0.0))
