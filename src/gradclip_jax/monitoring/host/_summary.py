"""Describe the gradient norms of a run, and suggest thresholds."""

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..._checks import check_concrete, check_number
from ..._errors import public, type_error, value_error
from ..._format import shortened
from ..._types import HostArray
from .._layout import Names, Outcome
from ._detect import Incident
from ._lines import WORDS
from ._rows import Rows

_MICRO_BATCHES = (
    "for a suggested max_norm, watch windows: accumulate_gradients(watch(optimizer), every)"
)


def summary_of(rows: Rows, names: Names, incidents: Sequence[Incident]) -> list[str]:
    """Return a summary of at least one row and its incidents, as lines of text."""
    counts = {word: rows.has(flag).sum() for word, flag in WORDS.items()}
    kinds = Counter(kind for x in incidents for kind in x.kinds)
    lines = [
        f"steps {rows.step[0]} to {rows.step[-1]}: {_listed(counts)}",
        f"incidents: {len(incidents)} ({_listed(kinds)})",
    ]
    is_clipped = np.any(rows.factors[rows.has(Outcome.APPLIED)] < 1, axis=1)
    if names.clips and is_clipped.size and is_clipped.mean() in (0, 1):
        lines.append(f"max_norm: {'every' if is_clipped[0] else 'no'} step is clipped")
    of_units = _usual_norms(rows.take(rows.has(Outcome.HAS_UNITS)))
    if of_units[:, 1:].size:
        shares = np.mean((of_units[:, 1:] / of_units[:, :1]) ** 2, axis=0)
        largest = [f"{names.units[i]} {shares[i]:.0%}" for i in np.argsort(-shares)[:3]]
        lines.append(f"largest shares of the squared gradient norm: {', '.join(largest)}")
    return lines + _norm_lines(rows)


def _norm_lines(rows: Rows) -> list[str]:
    """Return lines that describe the gradient norms of the whole tree, and suggest thresholds."""
    usual = _usual_norms(rows)[:, 0]
    if not usual.size:
        return []
    norms = rows.norms[rows.has(Outcome.HAS_GRADIENT), 0, 0]
    median, high = np.percentile(usual, [50, 99])
    numbers = (
        f"median {median:.3g}, largest {usual.max():.3g}, "
        f"non-finite in {np.sum(~np.isfinite(norms))} steps"
    )
    if has_micro_batches(rows):
        return [f"gradient norm of micro-batches: {numbers}", _MICRO_BATCHES]
    threshold = float(f"{3 * high:.2g}")
    num_skipped = np.sum(~(norms <= threshold))
    return [
        f"gradient norm: {numbers}",
        f"suggested max_norm: {median:.2g}, the median",
        f"suggested guard: skip_spikes(optimizer, norm={threshold:g}), which would have skipped "
        f"{num_skipped} of {len(norms)} steps",
    ]


@public
def suggest_max_norm(norms: Any, percentile: float = 50.0) -> float:
    """Suggest a `max_norm` as a percentile of the gradient norms of a run.

    The default is the median, which performed best among five percentiles in docs/study.md. A
    threshold at the median clips half of the steps, so consider a larger learning rate. A
    90th-percentile threshold clips only outliers.

    Args:
        norms: Rows of a `Monitor`, such as those of `read_log`, or an array of norms of any shape.
            Norms that are 0 or not finite are ignored.
        percentile: Percentage of steps that should not be clipped, from 1 to 100.

    Returns:
        The percentile of the norms, a positive number.

    Raises:
        ValueError: If all norms are ignored, if a `watch` around an accumulation measured them for
            micro-batches, or if `percentile` is outside [1, 100].
        TypeError: If called inside jit, or if `norms` is neither rows nor an array.

    Examples:
        >>> import gradclip_jax as gcx
        >>> gcx.diagnostics.suggest_max_norm([1.0, 2.0, 3.0, float("nan")], percentile=100.0)
        3.0
    """
    check_number("percentile", percentile, "Pass 50 for the median.", "[1, 100]")
    values = _usual_norms(norms)[:, 0] if isinstance(norms, Rows) else _as_array(norms)
    if isinstance(norms, Rows) and has_micro_batches(norms):
        rule, got = "the norms that the clip receives", "norms of micro-batches"
        hint = "Watch windows: `accumulate_gradients(watch(optimizer), every)`."
        raise value_error("norms", rule, got, hint)
    positive = values[np.isfinite(values) & (values > 0)]
    if not positive.size:
        hint = "Record steps with finite gradients first."
        raise value_error("norms", "norms that are not all 0 or non-finite", shortened(norms), hint)
    return float(np.percentile(positive, percentile))


def has_micro_batches(rows: Rows) -> bool:
    """Return whether gradients were measured around an accumulation."""
    is_accumulated = rows.has(Outcome.ACCUMULATED) & rows.has(Outcome.HAS_GRADIENT)
    return bool(np.any(is_accumulated & np.isfinite(rows.norms[:, 0, 0])))


def _usual_norms(rows: Rows) -> HostArray:
    """Return the gradient norms in rows where all are finite and that of the tree is not 0."""
    norms = rows.norms[rows.has(Outcome.HAS_GRADIENT), 0]
    return norms[np.isfinite(norms).all(axis=1) & (norms[:, 0] > 0)]


def _as_array(norms: Any) -> HostArray:
    """Convert norms to a NumPy array."""
    hint = "Pass `monitor.rows`, or `read_log(path).rows` for a file."
    check_concrete("norms", norms, hint)
    if not isinstance(norms, str):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            array = np.asarray(jax.device_get(norms))
            if array.dtype.kind not in "bcmM":
                return array.astype(float)
    raise type_error("norms", "rows or an array of norms", type(norms).__name__, hint)


def _listed(counts: Mapping[str, int]) -> str:
    """Return the words with a nonzero count, or "none"."""
    return ", ".join(f"{count} {word}" for word, count in counts.items() if count) or "none"
