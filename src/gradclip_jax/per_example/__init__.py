"""Per-example gradient norms and clipping.

| function | result |
| --- | --- |
| `value_and_grad` | value and mean of clipped per-example gradients, with per-example statistics |
| `norms` | per-example gradient norms, optionally by group of leaves |
"""

from ._clip import Stats, value_and_grad
from ._norms import norms

__all__ = ["Stats", "norms", "value_and_grad"]
