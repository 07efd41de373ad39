"""Statistics of activations and their cotangents inside a model.

| function | purpose |
| --- | --- |
| `make_probes` | make the probes of a model, one small array for each tap |
| `tap` | return the argument and compute statistics of it and of its cotangent |
| `metrics` | mean, RMS and share of non-finite elements of each tap for logging |

A backward pass returns only gradients, so the statistics are returned as the gradient with respect
to a probe. The statistics are sums of x and x^2 and counts, so they can be added, like
gradients, over micro-batches, examples, devices and repeated calls of the same tap. `metrics`
computes ratios of these sums, which do not change if the sums are averaged.
"""

from .monitoring._taps import make_probes as make_probes
from .monitoring._taps import metrics as metrics
from .monitoring._taps import tap as tap
