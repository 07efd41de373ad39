"""Diagnostics of a training run, for use outside jit between steps.

| function | result |
| --- | --- |
| `norm_history`, `leaf_norm_history` | norms recorded by `record_norms` |
| `suggest_max_norm` | a `max_norm` based on these norms |
| `nonfinite_leaves` | leaves that contain NaN or infinity |
| `accumulation_stats` | numbers of micro-batches and windows |
| `noise_scale` | gradient noise scale from logged norms |
| `unit_names` | names of the leaves or layers in `watch` |
| `verify_step` | leaves and devices for which two runs of a step differ |
| `summarize_log`, `plot_log` | summary and plots of a logged run |

Use `gcx.metrics` to log values at every step, and `gcx.incidents` to list what went wrong.
"""

from .accumulation._noise_scale import noise_scale
from .accumulation._state import AccumulationStats, accumulation_stats
from .monitoring._incident import Incident
from .monitoring._plot import plot_log
from .monitoring._record import leaf_norm_history, norm_history, suggest_max_norm
from .monitoring._report import nonfinite_leaves, unit_names
from .monitoring._summary import summarize_log
from .monitoring._verify import verify_step

__all__ = [
    "AccumulationStats",
    "Incident",
    "accumulation_stats",
    "leaf_norm_history",
    "noise_scale",
    "nonfinite_leaves",
    "norm_history",
    "plot_log",
    "suggest_max_norm",
    "summarize_log",
    "unit_names",
    "verify_step",
]
