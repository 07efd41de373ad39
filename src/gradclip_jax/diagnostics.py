"""What a run has done so far, read on the host between its steps: `gcx.diagnostics`.

| function | answers |
| --- | --- |
| `norm_history`, `leaf_norm_history` | the norms that `record_norms` kept |
| `suggest_max_norm` | which `max_norm` they suggest |
| `nonfinite_leaves` | which leaves hold a NaN or an infinity |
| `accumulation_stats` | how many micro-batches and windows there were |
| `unit_names` | what `watch` calls the leaves or layers |
| `worst_examples` | which examples of a batch have the largest gradients and losses |
| `summarize_log`, `plot_log` | a run in numbers and in pictures, from its log |

What is logged at every step is in `gcx.metrics`, what happened in `gcx.incidents`.
"""

from .accumulation._state import AccumulationStats, accumulation_stats
from .monitoring._incident import Incident
from .monitoring._log import summarize_log
from .monitoring._plot import plot_log
from .monitoring._record import leaf_norm_history, norm_history, suggest_max_norm
from .monitoring._report import nonfinite_leaves, unit_names, worst_examples

__all__ = [
    "AccumulationStats",
    "Incident",
    "accumulation_stats",
    "leaf_norm_history",
    "nonfinite_leaves",
    "norm_history",
    "plot_log",
    "suggest_max_norm",
    "summarize_log",
    "unit_names",
    "worst_examples",
]
