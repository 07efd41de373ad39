"""Stable-SPAM: clip and normalize each leaf by moving averages of its magnitude and norm."""

from typing import NamedTuple

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
    """Exponential moving averages of the magnitude and norm of each leaf.

    Attributes:
        step_count: Number of steps so far, saturating, int32[leaves].
        largest: Average of the largest gradient magnitude, float32[leaves].
        norm: Average of the gradient norm, float32[leaves].
        root_square: Square root of the average squared norm, float32[leaves]; the squared norm
            itself could overflow.
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
    """Clip spikes and normalize each leaf by moving averages of its norm (Stable-SPAM).

    The first stage (AdaClip) multiplies all elements with magnitudes above T by T / max|g|, where T
    is the bias-corrected moving average of max|g| for the leaf, including the current step. The
    second stage (AdaGN) scales the leaf to a norm of `a / (sqrt(b) + eps)`, which is about 1, where
    a and b are the bias-corrected averages of its norm and squared norm. **Every step is
    rescaled**, even without spikes. Use this transformation before Adam, which is invariant to the
    scale. The authors' code periodically resets the bias correction without the averages, so
    hundreds of steps are not clipped. This implementation resets neither.

    | leaf | effect |
    | --- | --- |
    | all zeros | unchanged |
    | a NaN or infinite element | the leaf becomes NaN; its averages do not change |

    Args:
        max_decay: Decay rate of the average of the largest magnitude (gamma 3 in the paper), at
            least 0 and below 1.
        norm_decay: Decay rate of the average norm (gamma 1), at least 0 and below 1.
        square_decay: Decay rate of the average squared norm (gamma 2), at least 0 and below 1.
        eps: Constant added to the root of the average squared norm, in the unit of the gradients,
            > 0.
        axis_name: Mapped axes over which leaves are sharded, required where the array's type does
            not carry the sharding.

    Returns:
        A gradient transformation with a `LeafAverageState`.

    Raises:
        ValueError: If a number is out of range.
        TypeError: If an argument is not a number, or a leaf is not floating-point or complex.

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
        updates: Tree, state: Tree, params: Tree | None = None
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
        # Replace NaN first, because 0 * nan in the unused branch gives NaN derivatives.
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
        # XLA may rewrite `a / b / c` to `a / (b * c)`, which overflows above 1e19.
        target = norm / bias_correction(norm_decay, steps) * (1 / root)
        leaves = _scale_to(leaves, clipped_norms, target, finite)
        out = flat.replace(leaves)
        return out, where_finite(finite, LeafAverageState(count, largest, norm, root_square), state)

    return optax.GradientTransformation(init, update)


def _scale_elements(leaves: list[Array], peaks: Array, bounds: Array) -> list[Array]:
    """Multiply elements above the bound of their leaf by bound / largest magnitude."""
    bounds = bounds.astype(peaks.dtype)
    return [
        jnp.where(jnp.abs(x).astype(bound.dtype) > bound, scale_leaf(x, factor), x)
        for x, bound, factor in zip(leaves, bounds, scale_factor(peaks, bounds), strict=True)
    ]


def _scale_to(leaves: list[Array], norms: Array, targets: Array, finite: Array) -> list[Array]:
    """Scale each leaf to its target norm; non-finite leaves become NaN."""
    # Do not scale leaves whose norm is zero.
    factors = jnp.where(norms > 0, targets.astype(norms.dtype) / jnp.where(norms > 0, norms, 1), 1)
    return [
        jnp.where(ok, scale_leaf(x, factor), jnp.nan)
        for ok, x, factor in zip(finite, leaves, factors, strict=True)
    ]
