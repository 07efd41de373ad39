"""A clip whose thresholds come from the history of each leaf: its largest magnitude, its norm."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._checks import check_axis_name, check_inexact, check_number, check_state
from .._states import increment_where
from .._types import Array, AxisName, Number, Tree
from ..clipping._layout import leaf_slots
from ..clipping._norm import is_measured, measured_leaves, unit_norms
from ..clipping._scale import Factor, clip_factor, scale_leaf, scaled_to
from ._average import hypotenuse
from ._moment import bias_correction, check_decays, where_finite


class LevelsState(NamedTuple):
    """Decaying averages of each leaf, int32[leaves] and float32[leaves].

    Attributes:
        steps: steps so far, saturating.
        largest: of the largest magnitude.
        norm: of the norm.
        root_square: the root of that of the squared norm, which cannot overflow.
    """

    steps: Array
    largest: Array
    norm: Array
    root_square: Array


def stable_spam_clip(
    max_decay: Number = 0.999,
    norm_decay: Number = 0.7,
    square_decay: Number = 0.9,
    eps: Number = 1e-8,
    *,
    axis_name: AxisName = None,
) -> optax.GradientTransformation:
    """Scales spikes down and normalises each leaf by the history of its norm (Stable-SPAM).

    AdaClip: T is the bias-corrected average of the largest magnitude of the leaf, this step's
    included; elements above it are multiplied by T / max|g|. AdaGN: the leaf is then scaled to
    the norm `a / (sqrt(b) + eps)`, the bias-corrected averages of its norm and squared norm,
    about 1. **It rescales every step**, also one without spikes: made for use before Adam, which
    does not mind. Where the authors' code resets Adam it also resets the bias correction but
    not the averages, which turns clipping off for hundreds of steps; not followed here.

    Args:
        max_decay: of the largest magnitude (gamma 3 of the paper), 0 to 1.
        norm_decay: of the norm (gamma 1), 0 to 1.
        square_decay: of the squared norm (gamma 2), 0 to 1.
        eps: > 0.
        axis_name: as for `clip_by_global_norm`.

    Returns:
        An Optax transformation; a leaf that is not finite leaves its averages as they were.

    Raises:
        ValueError: a number is out of range.
        TypeError: an argument is no number; when traced, a leaf is not inexact.

    Examples:
        >>> import jax.numpy as jnp, gradclip_jax as gcx
        >>> clip = gcx.stable_spam_clip()
        >>> updates, _ = clip.update(jnp.array([30.0, 40.0]), clip.init(jnp.zeros(2)))
        >>> [round(x, 4) for x in updates.tolist()]
        [0.6, 0.8]

    References:
        Huang et al., 2025, arXiv 2502.17055.
    """
    name = "stable_spam_clip"
    check_decays(name, max_decay=max_decay, norm_decay=norm_decay, square_decay=square_decay)
    check_number(name, "eps", eps, "The authors' code uses 1e-8.")
    axes = check_axis_name(name, axis_name)

    def norms(leaves: list[Array], ord: float) -> Array:
        return unit_norms(leaves, leaf_slots(leaves), ord, axes)

    def init(params: Tree) -> LevelsState:
        kinds = (jnp.int32, jnp.float32, jnp.float32, jnp.float32)
        return LevelsState(*(jnp.zeros(len(measured_leaves(params)), kind) for kind in kinds))

    def update(updates: Tree, state: Any, params: Tree | None = None) -> tuple[Tree, LevelsState]:
        check_inexact(name, "updates", updates)
        check_state(name, state, LevelsState)
        leaves = measured_leaves(updates)
        count = increment_where(state.steps)
        steps = count.astype(jnp.float32)

        peaks = norms(leaves, np.inf)
        largest = max_decay * state.largest + (1 - max_decay) * peaks.astype(jnp.float32)
        bound = (largest / bias_correction(max_decay, steps)).astype(peaks.dtype)
        leaves = [
            jnp.where(jnp.abs(x).astype(top.dtype) > top, scale_leaf(x, Factor(*parts)), x)
            for x, top, *parts in zip(leaves, bound, *clip_factor(peaks, bound), strict=True)
        ]

        lengths = norms(leaves, 2.0)
        seen = lengths.astype(jnp.float32)
        norm = norm_decay * state.norm + (1 - norm_decay) * seen
        kept, added = jnp.sqrt(square_decay), jnp.sqrt(1 - square_decay)
        root_square = hypotenuse(kept * state.root_square, added * seen)
        root = root_square / jnp.sqrt(bias_correction(square_decay, steps)) + eps
        # Not `a / b / c`, which XLA makes `a / (b * c)`: that overflows from norms of 1e19 on.
        wanted = norm / bias_correction(norm_decay, steps) * (1 / root)
        factor = scaled_to(lengths, wanted.astype(lengths.dtype))
        by_leaf = zip(leaves, *factor, strict=True)
        scaled = iter([scale_leaf(x, Factor(*parts)) for x, *parts in by_leaf])
        out = jax.tree.map(lambda x: next(scaled) if is_measured(x) else x, updates)
        proposed = LevelsState(count, largest, norm, root_square)
        return out, LevelsState(*where_finite(peaks, proposed, state))

    return optax.GradientTransformation(init, update)
