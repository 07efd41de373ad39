"""A summary of a run in a few lines, and a threshold suggested from its norms."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .._checks import check_number
from .._errors import public, value_error
from .._types import HostArray
from ._incident import Incident
from ._log import WORDS
from ._rows import Names, Outcome, Rows


def summarize(rows: Rows, last: Rows, names: Names, incidents: Sequence[Incident]) -> str:
    """Describe a run in at most ten lines.

    Args:
        rows: All rows, without units.
        last: The last rows, with units.
        names: Names of the units and clips.
        incidents: All incidents.
    """
    if not len(rows.step):
        return "no steps"
    fates = _listed({word: rows.has(flag).sum() for word, flag in WORDS.items()})
    clipped = np.sum(rows.factors[rows.has(Outcome.APPLIED)] < 1, axis=0)
    by_clip = _listed(dict(zip(names.clips, clipped, strict=True)))
    kinds = _listed(Counter(kind for x in incidents for kind in x.kinds))
    lines = [
        f"steps {rows.step[0]} to {rows.step[-1]}: {fates}",
        *([f"clipped steps: {by_clip}"] if names.clips else []),
        f"incidents: {len(incidents)} ({kinds})",
        *(f"the last: {x}" for x in incidents[-1:]),
    ]
    of_units = _gradient_norms(last.take(last.has(Outcome.HAS_UNITS)))
    of_units = of_units[np.isfinite(of_units).all(1) & (of_units[:, 0] > 0)]
    if of_units[:, 1:].size:
        shares = np.mean((of_units[:, 1:] / of_units[:, :1]) ** 2, axis=0)
        largest = [f"{names.units[i]} {shares[i]:.0%}" for i in np.argsort(-shares)[:3]]
        lines.append(f"largest shares of the squared gradient norm: {', '.join(largest)}")
    norms = _gradient_norms(rows)[:, 0]
    usual = norms[np.isfinite(norms) & (norms > 0)]
    if usual.size:
        median, high = np.percentile(usual, [50, 99])
        text = f"largest {usual.max():.3g}, non-finite in {np.sum(~np.isfinite(norms))} steps"
        threshold = float(f"{3 * high:.2g}")
        skipped = f"{np.sum(~(norms <= threshold))} of {len(norms)} steps"
        guard = f"skip_spikes(optimizer, norm={threshold:g})"
        lines += [
            f"gradient norm: median {median:.3g}, {text}",
            f"suggested max_norm: {median:.2g}, the median",
            f"suggested guard: {guard}, which would have skipped {skipped}",
        ]
    return "\n".join(lines)


def _gradient_norms(rows: Rows) -> HostArray:
    """Return the norms of all gradients, of the whole tree and of each unit."""
    return rows.norms[rows.has(Outcome.HAS_GRADIENT), 0]


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {word}" for word, count in counts.items() if count) or "none"


@public
def suggest_max_norm(norms: Any, percentile: float = 50.0) -> float:
    """Suggest a `max_norm` as a percentile of the gradient norms of a run.

    The default is the median, which performed best among five percentiles in docs/study.md. A
    threshold at the median clips half of the steps, so consider a larger learning rate. The 90th
    percentile clips only outliers.

    Args:
        norms: Rows of a `Monitor`, such as those of `read_log`, or an array of norms of any shape.
            Non-finite norms are ignored.
        percentile: Percentage of steps that should not be clipped, from 0 to 100.

    Returns:
        The percentile of the finite norms, a positive number.

    Raises:
        ValueError: If no norm is finite, if the percentile of the norms is not positive, or if
            `percentile` is outside [0, 100].
        TypeError: If called inside jit.

    Examples:
        >>> import gradclip_jax as gcx
        >>> gcx.diagnostics.suggest_max_norm([1.0, 2.0, 3.0, float("nan")], percentile=100.0)
        3.0
    """
    check_number("percentile", percentile, "Pass 50 for the median.", "[1, 100]")
    is_rows = isinstance(norms, Rows)
    values = np.asarray(_gradient_norms(norms)[:, 0] if is_rows else norms, np.float64)
    finite = values[np.isfinite(values)]
    result = float(np.percentile(finite, percentile)) if finite.size else 0.0
    if not result > 0:
        got = f"{values.size} values, of which {np.sum(finite > 0)} are positive and finite"
        hint = "Record steps with finite gradients first, or pass a higher percentile."
        raise value_error("norms", "norms with a positive percentile", got, hint)
    return result
