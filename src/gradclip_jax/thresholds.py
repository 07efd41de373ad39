"""Rules that set a threshold by themselves: `gcx.thresholds`.

Each can stand where a `max_norm` can, at any granularity and in `skip_large_norm`.
"""

from .adaptive._average import ema as ema
from .adaptive._average import quantile as quantile
from .adaptive._average import zscore as zscore
from .adaptive._history import mean_std as mean_std
from .adaptive._history import percentile as percentile
from .clipping._rule import Rule as Rule
from .clipping._rule import capped as capped
from .clipping._rule import relative_to_params as relative_to_params
