"""Statistics of activations and of their cotangents, from inside a model: `gcx.taps`.

| function | purpose |
| --- | --- |
| `make_probes` | the probes of a model: one small array for each tap |
| `tap` | the identity, which measures its argument and the cotangent of its argument |
| `metrics` | mean, RMS, kurtosis and share of non-finite elements of each tap, to log |
| `names` | the names of the taps, in the order of the forward pass |
| `first_nonfinite` | the tap at which NaN or infinity begins |
| `first_nonfinite_index` | the same as indices, inside jit |

A backward pass returns gradients only, so the statistics are returned as the gradient with respect
to a probe. They are sums (of x, x^2, x^4 and counts), and are added wherever gradients are added:
over repeated calls of a tap, micro-batches, examples and devices. `metrics` returns ratios of them,
which do not change if the sums are averaged instead.
"""

from .monitoring._taps import (
    FirstNonfinite,
    first_nonfinite,
    first_nonfinite_index,
    make_probes,
    metrics,
    names,
    tap,
)

__all__ = [
    "FirstNonfinite",
    "first_nonfinite",
    "first_nonfinite_index",
    "make_probes",
    "metrics",
    "names",
    "tap",
]
