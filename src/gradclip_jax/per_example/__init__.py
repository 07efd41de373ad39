"""Per-example gradient norms, clipping, and differentially private training.

| function | result |
| --- | --- |
| `value_and_grad` | value and mean of clipped per-example gradients, with per-example statistics |
| `norms` | per-example gradient norms, optionally by group of leaves |
| `leaf_norms` | per-example gradient norms of each leaf |
| `explain` | method and cost of the norm computation for each leaf |
| `noisy_mean` | transformation that adds noise to a sum of clipped gradients |
| `sensitivity` | maximum change of that sum when one example changes |
| `noise_scale` | gradient noise scale of one batch |
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
