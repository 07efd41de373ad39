"""Statistics of activations and their cotangents inside a model.

| function | purpose |
| --- | --- |
| `make_probes` | make the probes of a model, one small array for each tap |
| `tap` | return the argument and compute statistics of it and of its cotangent |
| `metrics` | mean, RMS, kurtosis and share of non-finite elements of each tap for logging |
| `names` | names of the taps in the order of the forward pass |
| `first_nonfinite` | names of the taps at which non-finite values begin |

A backward pass returns only gradients, so the statistics are returned as the gradient with respect
to a probe. The statistics are sums of x, x^2 and x^4 and counts, so they can be added, like
gradients, over micro-batches, examples, devices and repeated calls of the same tap. `metrics`
computes ratios of these sums, which do not change if the sums are averaged.
"""

from .monitoring._taps import (
    FirstNonfinite,
    first_nonfinite,
    make_probes,
    metrics,
    names,
    tap,
)

__all__ = [
    "FirstNonfinite",
    "first_nonfinite",
    "make_probes",
    "metrics",
    "names",
    "tap",
]
