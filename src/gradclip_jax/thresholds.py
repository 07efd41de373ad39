"""Rules that choose the threshold of a clip or guard, from earlier norms or from the parameters.

| rule | threshold |
| --- | --- |
| `zscore` | for outliers only, by their distance from the recent mean |
| `mean_std` | mean plus standard deviations of a window |
| `percentile` | a percentile of a window |
| `quantile` | a quantile, tracked with one number of state |
| `ema` | a multiple of the average of the clipped norms |
| `relative_to_params` | a fraction of the norm of the parameters |
| `capped` | that of another rule, with an upper bound |
| `Rule` | your own |
"""

from .adaptive._rules import ema, mean_std, percentile, quantile, zscore
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
