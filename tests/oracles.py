"""What the right answer is: float64 NumPy, written from the definitions. No JAX in here.

A tree is a list of arrays, the leaves in order. Everything is exact to about 1e-15, so what a
test sees beyond that is the error of the library.
"""

import math
from collections.abc import Sequence

import ml_dtypes
import numpy as np

EXACT_BELOW = 2_000_000  # elements that `math.fsum` adds up in a fraction of a second


def wide(x) -> np.ndarray:
    """The values of an array in float64 or complex128; exact for every dtype."""
    x = np.asarray(x)
    is_complex = np.issubdtype(x.dtype, np.complexfloating)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return x.astype(np.complex128 if is_complex else np.float64)


def vector_norm(vector, ord: float = 2.0) -> float:
    """`(sum |x|^ord)^(1/ord)` of one vector, `max |x|` for inf; NaN and inf as they come."""
    magnitudes = np.abs(wide(vector)).ravel()
    peak = float(magnitudes.max(initial=0.0))
    if peak == 0.0 or not math.isfinite(peak):
        return peak
    if math.isinf(ord):
        return peak
    # Divided by a power of two, which is exact, so that float64 does not overflow either.
    shift = math.frexp(peak)[1]
    powers = np.ldexp(magnitudes, -shift) ** ord
    total = math.fsum(powers) if powers.size < EXACT_BELOW else float(np.sum(powers))
    return math.ldexp(total ** (1.0 / ord), shift)


def ravel(leaves: Sequence) -> np.ndarray:
    """All leaves as one vector."""
    return np.concatenate([wide(x).ravel() for x in leaves]) if len(leaves) else np.zeros(0)


def global_norm(leaves: Sequence, ord: float = 2.0) -> float:
    return vector_norm(ravel(leaves), ord)


def unit_norms(x, axes: Sequence[int], ord: float = 2.0) -> np.ndarray:
    """One norm for each position along the other axes; the given axes are kept as 1."""
    x = wide(x)
    axes = tuple(a % x.ndim for a in axes)
    out = np.empty([1 if a in axes else n for a, n in enumerate(x.shape)])
    for place in np.ndindex(*out.shape):
        unit = tuple(slice(None) if a in axes else i for a, i in enumerate(place))
        out[place] = vector_norm(x[unit], ord)
    return out


def clip_factor(norm, max_norm):
    """`min(1, max_norm / norm)`, elementwise."""
    norm, max_norm = np.broadcast_arrays(np.float64(norm), np.float64(max_norm))
    return np.where(norm <= max_norm, 1.0, max_norm / np.where(norm == 0, 1.0, norm))


def clip_by_global_norm(leaves: Sequence, max_norm: float, ord: float = 2.0) -> list[np.ndarray]:
    factor = clip_factor(global_norm(leaves, ord), max_norm)
    return [wide(x) * factor for x in leaves]


def clip_by_leaf_norm(leaves: Sequence, max_norm: float, ord: float = 2.0) -> list[np.ndarray]:
    return [wide(x) * clip_factor(vector_norm(x, ord), max_norm) for x in leaves]


def clip_by_group_norm(
    leaves: Sequence, labels: Sequence, max_norms: dict, ord: float = 2.0
) -> list[np.ndarray]:
    """Labels that `max_norms` leaves out are not clipped."""
    pairs, factors = list(zip(leaves, labels, strict=True)), {}
    for name in labels:
        norm = global_norm([x for x, label in pairs if label == name], ord)
        factors[name] = clip_factor(norm, max_norms.get(name, math.inf))
    return [wide(x) * factors[label] for x, label in pairs]


def rms(x) -> float:
    """`sqrt(mean |x|^2)`."""
    return vector_norm(x) / math.sqrt(np.size(x))


def clip_by_block_rms(leaves: Sequence, threshold: float) -> list[np.ndarray]:
    return [wide(x) * clip_factor(rms(x), threshold) for x in leaves]


def adaptive_grad_clip(
    grads: Sequence, params: Sequence, clipping: float, eps: float, axes: Sequence[Sequence[int]]
) -> list[np.ndarray]:
    """`g_i * min(1, clipping * max(norm(w_i), eps) / norm(g_i))`, Brock et al., 2021, eq. 3."""
    clipped = []
    for g, w, over in zip(grads, params, axes, strict=True):
        threshold = clipping * np.maximum(unit_norms(w, over), eps)
        clipped.append(wide(g) * clip_factor(unit_norms(g, over), threshold))
    return clipped


def eps(dtype) -> float:
    """The distance from 1 to the next number of a dtype, also of the types NumPy lacks."""
    return float(ml_dtypes.finfo(np.dtype(dtype)).eps)


def ulps(actual, exact) -> float:
    """The largest distance from the exact values, in units in the last place of `actual`.

    An exact zero, infinity or NaN has to be met exactly; a miss is an infinite distance.
    """
    actual, exact = np.asarray(actual), np.asarray(exact, np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        spacing = np.spacing(np.abs(exact).astype(actual.dtype)).astype(np.float64)
        distance = np.abs(actual.astype(np.float64) - exact) / spacing
        rounded = exact.astype(actual.dtype)
    special = (exact == 0) | ~np.isfinite(rounded)
    met = (actual == rounded) | (np.isnan(actual) & np.isnan(exact))
    return float(np.max(np.where(special, np.where(met, 0.0, np.inf), distance), initial=0.0))
