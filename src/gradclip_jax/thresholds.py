"""Threshold rules for clipping and guards, based on earlier norms or on the parameters.

| rule | threshold |
| --- | --- |
| `zscore` | only for outliers, lower for larger z-scores |
| `mean_std` | mean of a window plus a multiple of its standard deviation |
| `percentile` | percentile of a window |
| `quantile` | quantile, tracked with one scalar of state |
| `ema` | multiple of the moving average of the clipped norms |
| `relative_to_params` | fraction of the parameter norm |
| `capped` | threshold of another rule, with an upper bound |
| `Rule` | custom rule |
"""

from .clipping._rules import capped as capped
from .clipping._rules import ema as ema
from .clipping._rules import mean_std as mean_std
from .clipping._rules import percentile as percentile
from .clipping._rules import quantile as quantile
from .clipping._rules import relative_to_params as relative_to_params
from .clipping._rules import zscore as zscore
from .clipping._threshold import Rule as Rule
