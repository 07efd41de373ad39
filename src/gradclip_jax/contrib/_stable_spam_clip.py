"""Stable-SPAM: each leaf clipped and normalised by the history of its magnitude and norm."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax

from .._checks import check_axis_name, check_decays, check_number, check_state
from .._errors import public, type_error
from .._leaves import flatten, measured_leaves
from .._states import increment_where
from .._types import Array, AxisName, Number, Tree
from ..adaptive._averages import bias_correction, hypotenuse, where_finite
from ..clipping._formula import scale_factor, scale_leaf
from ..clipping._norm import leaf_units, unit_norms


class LeafAverageState(NamedTuple):
    """Exponential moving averages of each leaf, int32[leaves] and float32[leaves].

    Attributes:
        step_count: steps so far, saturating.
        largest: of the largest magnitude.
        norm: of the norm.
        root_square: square root of that of the squared norm, which cannot overflow.
    """

    step_count: Array
    largest: Array
    norm: Array
    root_square: Array


@public
def stable_spam_clip(
    max_decay: Number = 0.999,
    norm_decay: Number = 0.7,
    square_decay: Number = 0.9,
    eps: Number = 1e-8,
    *,
    axis_name: AxisName = None,
) -> optax.GradientTransformation:
    """Scales spikes down and normalises each leaf by the history of its norm (Stable-SPAM).

    AdaClip: T is the bias-corrected average of the largest magnitude of the leaf, with this step;
    elements above it are multiplied by T / max|g|. AdaGN: the leaf is then scaled to the norm
    `a / (sqrt(b) + eps)`, about 1, with the bias-corrected averages of its norm and squared norm.
    **It rescales every step**, also one without spikes: use it before Adam, which is invariant to
    scale. The authors' code resets the bias correction without the averages, which turns
    clipping off for hundreds of steps; here neither is reset.

    | leaf | effect |
    | --- | --- |
    | all zeros | unchanged |
    | a NaN or infinite element | the leaf becomes NaN, its averages stay as they were |

    Args:
        max_decay: of the largest magnitude (gamma 3 of the paper), at least 0 and below 1.
        norm_decay: of the norm (gamma 1), at least 0 and below 1.
        square_decay: of the squared norm (gamma 2), at least 0 and below 1.
        eps: added to the root of the squared norm, in the unit of the gradients, > 0.
        axis_name: mapped axes over which the leaves are sharded, where types do not name them.

    Returns:
        An Optax transformation with a `LeafAverageState`.

    Raises:
        ValueError: a number is out of range.
        TypeError: an argument is no number; when traced, a leaf is not inexact.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> clip = gcx.contrib.stable_spam_clip()
        >>> updates, _ = clip.update(jnp.array([30.0, 40.0]), clip.init(jnp.zeros(2)))
        >>> [round(x, 4) for x in updates.tolist()]
        [0.6, 0.8]

    References:
        Huang et al., 2025, arXiv 2502.17055: Stable-SPAM, GradientStabilizer since version 3.
    """
    check_decays(max_decay=max_decay, norm_decay=norm_decay, square_decay=square_decay)
    check_number("eps", eps, "The authors' code uses 1e-8.")
    axes = check_axis_name(axis_name)

    def norms(leaves: list[Array], ord: float) -> Array:
        of_leaves = unit_norms(leaves, leaf_units(leaves), ord, axes)
        return jnp.stack(of_leaves) if of_leaves else jnp.zeros(0)

    def init(params: Tree) -> LeafAverageState:
        dtypes = (jnp.int32, jnp.float32, jnp.float32, jnp.float32)
        num_leaves = len(measured_leaves(params))
        return LeafAverageState(*(jnp.zeros(num_leaves, dtype) for dtype in dtypes))

    def update(
        updates: Tree, state: Any, params: Tree | None = None
    ) -> tuple[Tree, LeafAverageState]:
        flat = flatten("updates", updates)
        check_state(state, LeafAverageState)
        if state.norm.shape != (len(flat.arrays),):
            rule, hint = "the state of a tree with these leaves", "Call `init(params)` first."
            got = f"the state of a tree with {state.norm.size} leaves"
            raise type_error("state", rule, got, hint)
        count = increment_where(state.step_count)
        steps = count.astype(jnp.float32)
        leaves = flat.arrays
        peaks = norms(leaves, np.inf)
        # Double `where`: 0 * nan in the unused branch would give NaN derivatives.
        finite = jnp.isfinite(peaks)
        peaks = jnp.where(finite, peaks, 0)
        leaves = [jnp.where(ok, x, jnp.zeros_like(x)) for ok, x in zip(finite, leaves, strict=True)]

        largest = max_decay * state.largest + (1 - max_decay) * peaks.astype(jnp.float32)
        leaves = _scale_elements(leaves, peaks, largest / bias_correction(max_decay, steps))
        clipped_norms = norms(leaves, 2.0)
        measured = clipped_norms.astype(jnp.float32)
        norm = norm_decay * state.norm + (1 - norm_decay) * measured
        old_weight, new_weight = jnp.sqrt(square_decay), jnp.sqrt(1 - square_decay)
        root_square = hypotenuse(old_weight * state.root_square, new_weight * measured)
        root = root_square / jnp.sqrt(bias_correction(square_decay, steps)) + eps
        # Not `a / b / c`: a compiler makes `a / (b * c)` of it, which overflows from 1e19 on.
        target = norm / bias_correction(norm_decay, steps) * (1 / root)
        leaves = _scale_to(leaves, clipped_norms, target, finite)
        out = flat.replace(leaves)
        return out, where_finite(finite, LeafAverageState(count, largest, norm, root_square), state)

    return optax.GradientTransformation(init, update)


def _scale_elements(leaves: list[Array], peaks: Array, bounds: Array) -> list[Array]:
    """Elements above the bound of their leaf, times bound / largest magnitude."""
    bounds = bounds.astype(peaks.dtype)
    return [
        jnp.where(jnp.abs(x).astype(bound.dtype) > bound, scale_leaf(x, factor), x)
        for x, bound, factor in zip(leaves, bounds, scale_factor(peaks, bounds), strict=True)
    ]


def _scale_to(leaves: list[Array], norms: Array, targets: Array, finite: Array) -> list[Array]:
    """Each leaf with its target as its norm; NaN where it was not finite."""
    # A norm of zero is not scaled.
    factors = jnp.where(norms > 0, targets.astype(norms.dtype) / jnp.where(norms > 0, norms, 1), 1)
    return [
        jnp.where(ok, scale_leaf(x, factor), jnp.nan)
        for ok, x, factor in zip(finite, leaves, factors, strict=True)
    ]
