"""Diagnostics of a training run, for use outside jit between steps.

| function | result |
| --- | --- |
| `read_log` | incidents and a summary of a log, also of another trainer |
| `plot_log` | plot of a log, or of rows of a `Monitor` |
| `suggest_max_norm` | a `max_norm` based on the norms of a run |
| `nonfinite_leaves` | leaves that contain NaN or infinity |
| `accumulation_stats` | numbers of micro-batches and windows |
| `noise_scale` | gradient noise scale from logged norms |
| `verify_step` | leaves and devices for which two runs of a step differ |

Use `gcx.metrics` to log values at every step, and `gcx.Monitor` to learn what went wrong.
"""

from .accumulation._noise_scale import noise_scale
from .accumulation._state import AccumulationStats, accumulation_stats
from .monitoring._incident import Incident
from .monitoring._monitor import Report, read_log
from .monitoring._nonfinite import nonfinite_leaves
from .monitoring._plot import plot_log
from .monitoring._rows import Outcome
from .monitoring._summary import suggest_max_norm
from .monitoring._verify import verify_step

__all__ = [
    "AccumulationStats",
    "Incident",
    "Outcome",
    "Report",
    "accumulation_stats",
    "read_log",
    "noise_scale",
    "nonfinite_leaves",
    "plot_log",
    "suggest_max_norm",
    "verify_step",
]
