"""Sums of powers that survive overflow and underflow, and the norms that are their roots.

The plain sum is taken first. Only where it has overflowed, or is so small that terms of it may
have been flushed to zero, is it taken again with the elements scaled by the power of two that
brings the largest of the unit to about 1. Scaling by a power of two is exact.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._types import Array

# A sum below `elements * smallest normal number * _MARGIN` may have lost more than half an ulp
# to flushed terms: 2^26 for the ulp of float32, 2^10 for the shards of other devices.
_MARGIN = 2.0**36

_COARSE_BITS = 7

# On CPU, XLA adds large arrays up in parallel, and so exactly enough, since this JAX or before.
ADDS_IN_PARALLEL = jax.__version_info__ >= (0, 10)
# Up to so many elements they are added up in two passes; what fits the cache is read once.
_FEW = 4_096 if ADDS_IN_PARALLEL else 65_536


def magnitude_rank(x: Array, dtype: Any) -> Array:
    """The bits of a magnitude as a float: a number of the same order.

    Zero for zero only, though XLA on most backends takes subnormal numbers for zero; and never
    NaN, which an all-reduce may drop.
    """
    return _bits(x.astype(dtype)).astype(dtype)


def power(x: Array, ord: float, dtype: Any, exponent: Array | None) -> Array:
    """`|x * 2^exponent|^ord`, differentiable at zero."""
    x = x.astype(dtype)
    if exponent is None:
        return _plain_power(x, ord)
    is_subnormal = _bits(x) < (1 << jnp.finfo(dtype).nmant)
    return jnp.where(
        is_subnormal,
        _plain_power(_scaled_subnormal(x, exponent), ord),
        _plain_power(x * _power_of_two(exponent, dtype), ord),
    )


def _plain_power(x: Array, ord: float) -> Array:
    if ord == 2.0:
        return x * x
    if ord == 1.0:
        return jnp.abs(x)
    # An infinite slope times the zero of an unused branch is NaN. So there is none: neither at
    # 0, for p < 1, nor where the power overflows.
    magnitude = jnp.abs(x)
    largest = float(jnp.finfo(x.dtype).max) ** (1 / max(ord, 1.0))
    safe = jnp.where((magnitude > 0) & (magnitude <= largest), magnitude, 1)
    powers = lax.integer_pow(safe, int(ord)) if ord.is_integer() else safe**ord
    powers = jnp.where(magnitude > largest, jnp.inf, jnp.where(magnitude == 0, 0, powers))
    return jnp.where(jnp.isnan(x), jnp.nan, powers)


def exact_sum(terms: Array, axis: int | tuple[int, ...], *, keepdims: bool = False) -> Array:
    """The sum, to about one ulp also of a few thousand equal terms.

    XLA on CPU adds up to 32 terms one after the other, and 32 such sums: 1,024 equal terms err
    by 12 ulp, all roundings to one side. The first 8 bits of each term add up without rounding,
    and of what is left all roundings are 128 times smaller. Of large sums, where the second pass
    would cost, the rows are taken first.
    """
    if terms.size > _FEW:
        return _sum_of_rows(terms, axis, keepdims=keepdims)
    info = jnp.finfo(terms.dtype)
    coarse = lax.reduce_precision(terms, exponent_bits=info.nexp, mantissa_bits=_COARSE_BITS)
    rest = jnp.where(jnp.isfinite(coarse), terms - coarse, 0)
    return jnp.sum(coarse, axis, keepdims=keepdims) + jnp.sum(rest, axis, keepdims=keepdims)


def _sum_of_rows(terms: Array, axis: int | tuple[int, ...], *, keepdims: bool) -> Array:
    """The sum of a large array, where XLA would add thousands of terms one after the other."""
    axes = (axis,) if isinstance(axis, int) else axis
    if ADDS_IN_PARALLEL or (len(axes) == 1 and terms.ndim > 1):
        return jnp.sum(terms, axis, keepdims=keepdims)
    if terms.ndim == 1:
        whole = terms.size // 64 * 64
        rows = jnp.sum(terms[:whole].reshape(-1, 64), axis=1)
        return exact_sum(jnp.concatenate([rows, terms[whole:]]), 0, keepdims=keepdims)
    longest = max(axes, key=lambda i: terms.shape[i])
    rows = jnp.sum(terms, longest)
    others = tuple(i - (i > longest) for i in axes if i != longest)
    total = exact_sum(rows, others)
    return jnp.expand_dims(total, axes) if keepdims else total


def robust_peaks(tops: Array, peak_ranks: Callable[[], Array]) -> Array:
    """Largest magnitudes, where a NaN has counted as infinite and a subnormal number as zero.

    Only then they are looked up again among the ranks, which tell these apart.
    """
    info = jnp.finfo(tops.dtype)

    def again() -> Array:
        ranks = peak_ranks()
        bits = jnp.minimum(ranks, 2.0**info.nmant).astype(_integer(tops.dtype))
        subnormal = lax.bitcast_convert_type(bits, tops.dtype)
        infinity = 2.0**info.nmant * (3 - 2 * info.minexp)
        looked_up = jnp.where(
            ranks > infinity, jnp.nan, jnp.where(ranks < 2.0**info.nmant, subnormal, tops)
        )
        return looked_up.astype(tops.dtype)

    unclear = (tops < info.tiny) | (tops == jnp.inf)
    return lax.cond(jnp.any(unclear), again, lambda: tops)


def robust_norms(
    power_sums: Callable[[Array | None], Array],
    peak_ranks: Callable[[], Array],
    ord: float,
    elements: np.ndarray[Any, Any],
) -> Array:
    """The norm of each unit, from one pass over the data in the ordinary case.

    Args:
        power_sums: sums of powers of the elements times 2^exponent, None for no scaling.
        peak_ranks: the largest `magnitude_rank` of each unit.
        ord: order of the norm, finite.
        elements: how many elements each unit has.
    """
    sums = power_sums(None)
    unsafe = ~_is_safe(sums, elements, ord)

    def again() -> Array:
        peaks = peak_ranks()
        lost = unsafe & (peaks > 0)

        def rescaled() -> Array:
            exponents = _exponent(peaks, sums.dtype)
            norms = _unscaled(_root(power_sums(exponents), ord), exponents)
            return jnp.where(lost, norms, _root(jnp.where(lost, 1, sums), ord))

        # Units that are truly zero cost one more look at their largest element, no more.
        return lax.cond(jnp.any(lost), rescaled, lambda: _root(sums, ord))

    return lax.cond(jnp.any(unsafe), again, lambda: _root(sums, ord))


def _is_safe(total: Array, elements: Any, ord: float) -> Array:
    """Whether a sum is exact enough; NaN is: no scaling mends it."""
    flushed = float(jnp.finfo(total.dtype).tiny) ** min(ord, 1.0)  # what a lost term was at most
    floor = np.asarray(elements * flushed * _MARGIN, total.dtype)
    return jnp.isnan(total) | ((total >= floor) & (total < jnp.inf))


def _root(total: Array, ord: float) -> Array:
    """`total^(1/ord)`, differentiable at zero."""
    regular = (total > 0) & (total < jnp.inf)
    safe = jnp.where(regular, total, 1)
    if ord == 1.0:
        root = safe
    elif ord == 2.0:
        root = jnp.sqrt(safe)
    else:  # one Newton step mends the last digits of the library's power
        root = safe ** (1.0 / ord)
        better = root * (1 + (safe / _plain_power(root, ord) - 1) / ord)
        root = jnp.where(jnp.isfinite(better), better, root)
    return jnp.where(regular, root, total)


def _exponent(peak: Array, dtype: Any) -> Array:
    """The k for which 2^k brings a peak to about 1, within the range of normal exponents."""
    info = jnp.finfo(dtype)
    limit = -info.minexp
    biased = jnp.floor(peak * 2.0**-info.nmant).astype(_integer(dtype))
    return jnp.clip(limit + 1 - biased, -limit, limit)


def _power_of_two(exponent: Array, dtype: Any) -> Array:
    """2^exponent, exactly; zero below the smallest normal number."""
    info = jnp.finfo(dtype)
    biased = jnp.clip(exponent + 1 - info.minexp, 0, 2 - 2 * info.minexp)
    return lax.bitcast_convert_type(biased << info.nmant, dtype)


def _integer(dtype: Any) -> Any:
    return jnp.int64 if jnp.finfo(dtype).bits == 64 else jnp.int32


def _bits(x: Array) -> Array:
    return lax.bitcast_convert_type(jnp.abs(x), _integer(x.dtype))


def _scaled_subnormal(x: Array, exponent: Array) -> Array:
    """The magnitude of `x * 2^exponent`, built from the bits of a subnormal x."""
    info = jnp.finfo(x.dtype)
    return _bits(x).astype(x.dtype) * _power_of_two(exponent + info.minexp - info.nmant, x.dtype)


def _unscaled(norm: Array, exponent: Array) -> Array:
    """`norm * 2^-exponent`, also where the result is subnormal."""
    info = jnp.finfo(norm.dtype)
    result = norm * _power_of_two(-exponent, norm.dtype)
    steps = jnp.round(norm * _power_of_two(info.nmant - info.minexp - exponent, norm.dtype))
    bits = jnp.clip(steps, 0, 1 << info.nmant).astype(_integer(norm.dtype))
    subnormal = lax.bitcast_convert_type(bits, norm.dtype)
    return jnp.where(result < info.tiny, subnormal, result)
