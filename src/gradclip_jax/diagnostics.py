"""Diagnostics of a training run, for use outside jit between steps.

| function | result |
| --- | --- |
| `read_log` | incidents and a summary of a log, including logs of other trainers |
| `plot_log` | plot of a log, or of rows of a `Monitor` |
| `suggest_max_norm` | a `max_norm` based on the norms of a run |
| `nonfinite_leaves` | leaves that contain NaN or infinity |
| `accumulation_stats` | numbers of micro-batches and windows |
| `noise_scale` | gradient noise scale from logged norms |
| `verify_step` | whether a device computes wrong results, and which |

Use `gcx.metrics` to log values at every step, and `gcx.Monitor` to find out what went wrong.
"""

from .accumulation._noise_scale import noise_scale as noise_scale
from .accumulation._window import AccumulationStats as AccumulationStats
from .accumulation._window import accumulation_stats as accumulation_stats
from .guarding._raise_if_failed import nonfinite_leaves as nonfinite_leaves
from .monitoring._layout import Outcome as Outcome
from .monitoring.host._detect import Incident as Incident
from .monitoring.host._monitor import read_log as read_log
from .monitoring.host._plot import plot_log as plot_log
from .monitoring.host._policy import Report as Report
from .monitoring.host._summary import suggest_max_norm as suggest_max_norm
from .monitoring.host._verify_step import Verification as Verification
from .monitoring.host._verify_step import verify_step as verify_step
