"""Gradients of each example: their norms, and the mean or sum of them, each clipped by itself.

| function | what it gives |
| --- | --- |
| `value_and_grad` | value and gradient, each example clipped; norm and factor of each example |
| `norms` | the norm of each example's gradient, or of groups of leaves |
| `leaf_norms` | the norm of each leaf of it |
| `explain` | how these are computed, leaf by leaf |
| `noisy_mean` | noise for a sum of clipped gradients: private training |
| `sensitivity` | how far one example can move that sum |
| `noise_scale` | the gradient noise scale of one batch |
"""

from ._clip import Stats, value_and_grad
from ._norms import LeafCost, explain, leaf_norms, norms
from ._private import noise_scale, noisy_mean, sensitivity

__all__ = [
    "LeafCost",
    "Stats",
    "explain",
    "leaf_norms",
    "noise_scale",
    "noisy_mean",
    "norms",
    "sensitivity",
    "value_and_grad",
]
