"""From norm and threshold to factor, and from factor to the scaled tree.

A factor is held as its square root, and applied as `(x * root) * root`: threshold / norm may be
smaller than the smallest normal number, and `x / norm * threshold` is compiled to a product with
1 / norm, which is 0 for a norm of 3e38.
"""

import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from .._checks import check_callable, check_choice, is_float0
from .._mesh import is_joinable
from .._types import Array
from .._xla import JOINED, SCALED_TOGETHER, SMALL, fusion_barrier
from ._blocks import grouped
from ._units import (
    Units,
    spread_over_leaves,
    spread_over_stack,
    take_units_in_parts,
    take_units_on_accelerators,
    take_units_on_cpu,
)

Reaction: TypeAlias = Literal["scale", "zero"] | Callable[[Array, Array], Array]
"""What happens to a unit: a name, or `(norm, threshold) -> factor`, elementwise, in [0, 1]."""

Root: TypeAlias = Callable[[Array, Array], Array]
"""`(norm, threshold) -> sqrt(factor)`, elementwise, of finite norms."""


def as_root(function: str, reaction: Any) -> Root:
    """A reaction by name or a user's own, as a function to the square root of the factor."""
    if callable(reaction):
        return functools.partial(_root_of_factor, reaction)
    named: dict[str, Root] = {"scale": scale_root, "zero": _zero_root}
    if not isinstance(reaction, str):
        hint = 'Pass "scale", "zero" or a function (norm, threshold) -> factor.'
        check_callable(function, "reaction", reaction, hint)
    check_choice(function, "reaction", reaction, tuple(named))
    return named[reaction]


def scale_root(norm: Array, threshold: Array) -> Array:
    """The root of `min(1, threshold / norm)`: 0 for a threshold below 0, NaN for NaN."""
    threshold = jnp.maximum(threshold, 0)
    within = norm <= threshold
    # Double `where`: the slope of a root is infinite at 0, and 0 * inf would be NaN.
    safe_norm = jnp.where(within | (norm <= 0), 1, norm)
    safe_threshold = jnp.where(threshold == 0, 1, threshold)
    root = jnp.where(threshold == 0, 0, jnp.sqrt(safe_threshold) / jnp.sqrt(safe_norm))
    return jnp.where(within, 1, root)


def root_of_norms(norms: Array, threshold: Array, root_when_bad: float) -> Array:
    """`scale_root` of norms that may not be finite: each such unit gets the other root."""
    # A norm that is not finite stands aside: its slope would be NaN.
    finite = jnp.isfinite(norms)
    root = scale_root(jnp.where(finite, norms, 1), threshold)
    return jnp.where(finite, root, root_when_bad)


def _zero_root(norm: Array, threshold: Array) -> Array:
    """One up to the threshold, zero above it, NaN for a threshold of NaN."""
    above = jnp.where(jnp.isnan(threshold), jnp.nan, jnp.zeros_like(norm))
    return jnp.where(norm <= jnp.maximum(threshold, 0), 1, above)


def _root_of_factor(factor_of: Callable[..., Any], norm: Array, threshold: Array) -> Array:
    factor = jnp.asarray(factor_of(norm, threshold)).astype(norm.dtype)
    positive = factor > 0
    return jnp.where(positive | jnp.isnan(factor), jnp.sqrt(jnp.where(factor == 0, 1, factor)), 0)


def root_to(norm: Array, wanted: Array) -> Array:
    """The root of `wanted / norm`, up or down; one for a norm of zero, NaN if not finite."""
    is_zero = norm == 0
    safe = jnp.where(is_zero | (wanted <= 0), 1, wanted)
    root = jnp.where(wanted > 0, jnp.sqrt(safe) / jnp.sqrt(jnp.where(is_zero, 1, norm)), 0)
    return jnp.where(is_zero, 1, jnp.where(jnp.isfinite(norm), root, jnp.nan))


def scale_units(leaves: list[Array], roots: Array, units: Units, *, drops: bool) -> list[Array]:
    """Each leaf times the factors of its units, given as their roots: a vector.

    With `drops` a factor of zero gives zero also for what is not finite.
    """
    return lax.platform_dependent(
        leaves,
        roots,
        cpu=functools.partial(_scale_on_cpu, units, drops),
        tpu=functools.partial(_scale_on_tpu, units, drops),
        default=functools.partial(_scale_on_gpu, units, drops),
    )


def _scale_on_cpu(units: Units, drops: bool, leaves: list[Array], roots: Array) -> list[Array]:
    roots = fusion_barrier(roots)
    of_leaves = spread_over_leaves(roots, units, leaves, take_units_on_cpu)
    pairs = zip(leaves, of_leaves, strict=True)
    return [scale_leaf(x, root, keeps=True, drops=drops) for x, root in pairs]


def _scale_on_gpu(units: Units, drops: bool, leaves: list[Array], roots: Array) -> list[Array]:
    if units.size == 1 and None not in units.axes:
        of_leaves = _copies(roots[0], [x.size for x in leaves])
    else:
        of_leaves = spread_over_leaves(roots, units, leaves, take_units_on_accelerators)
    pairs = zip(leaves, of_leaves, strict=True)
    return [scale_leaf(x, root, keeps=False, drops=drops) for x, root in pairs]


def _copies(root: Array, sizes: Sequence[int]) -> list[Array]:
    """The same root for each leaf of so many elements, so that XLA merges kernels that read it.

    It merges those of all small leaves, and those of a few large ones at a time.
    """
    small = sum(size <= SMALL for size in sizes)
    shared = _entries(jnp.broadcast_to(root, (SCALED_TOGETHER,)))
    # Behind a barrier, for XLA would see that the vectors of all are alike.
    roots = lax.optimization_barrier(jnp.broadcast_to(root, (len(sizes) - small,)))
    of_small, of_large = itertools.cycle(shared), iter(_entries(roots))
    return [next(of_small if size <= SMALL else of_large) for size in sizes]


def _entries(roots: Array) -> list[Array]:
    wanted = [(i,) for i in range(roots.size)]
    return take_units_in_parts(roots, wanted, SCALED_TOGETHER)


def _scale_on_tpu(units: Units, drops: bool, leaves: list[Array], roots: Array) -> list[Array]:
    """Small leaves that are alike in a stack: a TPU launches a kernel for each other leaf."""
    roots = lax.optimization_barrier(roots)

    def what_is_alike(i: int) -> Hashable:
        x = leaves[i]
        return (jax.typeof(x), units.axes[i]) if x.size <= SMALL and is_joinable(x) else None

    scaled: dict[int, Array] = {}
    for positions in grouped(range(len(leaves)), what_is_alike, JOINED):
        stack = jnp.stack([leaves[i] for i in positions])
        root = spread_over_stack(roots, units, positions, leaves[positions[0]])
        rows = jnp.unstack(scale_leaf(stack, root, keeps=False, drops=drops))
        scaled |= zip(positions, rows, strict=True)
    return [scaled[i] for i in range(len(leaves))]


@functools.partial(jax.jit, static_argnames=("keeps", "drops"))
def scale_leaf(x: Any, root: Array, *, keeps: bool = True, drops: bool = True) -> Any:
    """`x * root^2`, multiplied in at least float32 and rounded once.

    With `keeps` unchanged bit for bit where the root is one, also a subnormal x, which XLA on a
    CPU takes for zero; with `drops` zero where the root is zero, also for an infinite x. Each
    costs up to 60 % of the time to compile on an H100.
    """
    x = jnp.asarray(x)
    wide = wide_dtype(x.dtype, root.dtype)
    if wide != x.dtype:
        # XLA on a CPU would write the widened leaf down, to share it with the norm.
        x = lax.platform_dependent(x, cpu=lax.optimization_barrier, default=lambda x: x)
    wide_root = root.astype(wide)
    scaled = _rounded(x.astype(wide) * wide_root * wide_root, x.dtype)
    if drops:
        scaled = _select(root == 0, jnp.zeros_like(x), scaled)
    return _select(root == 1, x, scaled) if keeps else scaled


def _select(where: Array, x: Array, y: Array) -> Array:
    # `lax.select` takes a scalar as it is: a third of the trace of `jnp.where`.
    return lax.select(where, x, y) if where.ndim == 0 else jnp.where(where, x, y)


def clamp_leaf(x: Any, low: Any, high: Any) -> Any:
    """X within [low, high], compared in at least float32; a NaN stays NaN."""
    if is_float0(x):
        return x
    x = jnp.asarray(x)
    wide = wide_dtype(x.dtype, jnp.float32)
    low, high = (jnp.asarray(bound).astype(wide) for bound in (low, high))
    clamped = _rounded(jnp.clip(x.astype(wide), low, high), x.dtype)
    return jnp.where((x.astype(wide) < low) | (x.astype(wide) > high), clamped, x)


def wide_dtype(dtype: Any, other: Any = jnp.float32) -> Any:
    """The dtype of 32 bit or more that holds both; JAX promotes no float8, and strict, nothing."""
    bits = max(jnp.finfo(dtype).bits, jnp.finfo(other).bits)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jnp.complex128 if bits == 64 else jnp.complex64
    return jnp.float64 if bits == 64 else jnp.float32


def _rounded(x: Array, dtype: Any) -> Array:
    """X in a narrower dtype; toward zero among its subnormals.

    There rounding to nearest could nearly double a value, and a norm of many such values.
    """
    info = jnp.finfo(dtype)
    if float(info.tiny) <= float(jnp.finfo(x.dtype).tiny):
        return x.astype(dtype)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        parts = (_rounded(part, info.dtype) for part in (x.real, x.imag))
        return lax.complex(*parts)
    spacing = float(info.tiny) * float(info.eps)
    coarse = lax.mul(jnp.trunc(x / spacing), jnp.asarray(spacing, x.dtype))
    return jnp.where(jnp.abs(x) < float(info.tiny), coarse, x).astype(dtype)
