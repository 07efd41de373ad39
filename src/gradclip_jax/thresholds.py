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

from .clipping._rules import ema, mean_std, percentile, quantile, zscore
from .clipping._threshold import Rule, capped, relative_to_params

__all__ = [
    "Rule",
    "capped",
    "ema",
    "mean_std",
    "percentile",
    "quantile",
    "relative_to_params",
    "zscore",
]
