"""A summary of a run in a few lines, and a threshold suggested from its norms."""

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from .._checks import check_percentile, refuse_traced, shortened
from .._errors import public, type_error, value_error
from .._types import HostArray
from ._incident import Incident
from ._log import read_rows
from ._rows import Names, Outcome, Rows

_CAUSES = {
    "non-finite": Outcome.SKIPPED_NONFINITE,
    "large norm": Outcome.SKIPPED_LARGE_NORM,
    "large loss": Outcome.SKIPPED_LARGE_LOSS,
}


class Totals:
    """The scalars of all rows of a run, and the mean share of each unit in the gradient."""

    def __init__(self, names: Names):
        self.names = names
        self.parts: list[Rows] = []
        self.shares, self.num_shares = np.zeros(len(names.units)), 0

    def add(self, rows: Rows) -> None:
        """Add rows with steps after those of all earlier rows."""
        whole = {"norms": rows.norms[:, :, :1], "nonfinite": rows.nonfinite[:, :1]}
        self.parts.append(rows._replace(**whole, taps=rows.taps[:, :0]))
        norms = rows.norms[rows.has(Outcome.HAS_UNITS), 0]
        norms = norms[np.isfinite(norms).all(1) & (norms[:, 0] > 0)]
        self.shares += np.sum((norms[:, 1:] / norms[:, :1]) ** 2, axis=0)
        self.num_shares += len(norms)

    def rewind(self, step: int) -> None:
        """Drop the rows from a step on."""
        self.parts = [part.take(part.step < step) for part in self.parts]

    def summary(self, incidents: Sequence[Incident]) -> str:
        """Return at most ten lines of text."""
        if not sum(len(part.step) for part in self.parts):
            return "no steps"
        rows = Rows.concatenate(self.parts)
        lines = [_fates(rows), *_clips(rows, self.names)]
        if rows.has(Outcome.HAS_LOSS).any():
            loss = rows.loss[rows.has(Outcome.HAS_LOSS)]
            lowest = np.min(loss, initial=np.inf, where=np.isfinite(loss))
            lines.append(
                f"loss: {loss[0]:.4g} at first, {loss[-1]:.4g} at last, {lowest:.4g} at best"
            )
        norms = gradient_norms(rows)
        usual = norms[np.isfinite(norms) & (norms > 0)]
        if usual.size:
            lines.append(
                f"gradient norm: median {np.median(usual):.3g}, largest {usual.max():.3g}, "
                f"non-finite in {np.sum(~np.isfinite(norms))} steps"
            )
        if self.num_shares and self.names.units:
            order = np.argsort(-self.shares)[:3]
            places = [
                f"{self.names.units[i]} {self.shares[i] / self.num_shares:.0%}" for i in order
            ]
            lines.append(f"largest shares of the squared gradient norm: {', '.join(places)}")
        counts = Counter(kind for x in incidents for kind in x.kinds)
        kinds = ", ".join(f"{count} {kind}" for kind, count in counts.most_common(5))
        lines.append(f"incidents: {len(incidents)}" + (f" ({kinds})" if incidents else ""))
        if incidents:
            lines.append(f"the last: {incidents[-1]}")
        if usual.size:
            lines.append(f"suggested max_norm: {np.median(usual):.2g}, the median")
        return "\n".join(lines)


def _fates(rows: Rows) -> str:
    """Describe how many steps were applied, held and skipped, and why."""
    flags = {"applied": Outcome.APPLIED, "held": Outcome.HELD, "skipped": Outcome.SKIPPED}
    counts = {word: int(rows.has(flag).sum()) for word, flag in flags.items()}
    causes = {word: int(rows.has(flag).sum()) for word, flag in _CAUSES.items()}
    text = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    why = ", ".join(f"{count} {word}" for word, count in causes.items() if count)
    steps = f"steps {rows.step[0]} to {rows.step[-1]}"
    return f"{steps}: {text}" + (f" ({why})" if why else "")


def _clips(rows: Rows, names: Names) -> list[str]:
    """Describe how often each clip clipped a step that was applied."""
    factors = rows.factors[rows.has(Outcome.APPLIED)]
    if not factors.size:
        return []
    shares = [
        f"{name.partition('/')[2] or 'clip'} {share:.0%}"
        for name, share in zip(names.clips, np.mean(factors < 1, axis=0), strict=True)
    ]
    return [f"clipped steps: {', '.join(shares)}"]


def gradient_norms(rows: Rows) -> HostArray:
    """Return the norms of all gradients."""
    return rows.norms[rows.has(Outcome.HAS_GRADIENT), 0, 0]


@public
def suggest_max_norm(norms: Any, percentile: float = 50.0) -> float:
    """Suggest a `max_norm` as a percentile of the gradient norms of a run.

    The default is the median, which performed best among five percentiles in docs/study.md. A
    threshold at the median clips half of the steps, so consider a larger learning rate. The 90th
    percentile clips only outliers.

    Args:
        norms: Rows of a `Monitor`, the path of a log, or an array of norms of any shape. Non-finite
            norms are ignored.
        percentile: Percentage of steps that should not be clipped, from 0 to 100.

    Returns:
        The percentile of the finite norms, a positive number.

    Raises:
        ValueError: If no norm is finite, if the percentile of the norms is not positive, or if
            `percentile` is outside [0, 100].
        TypeError: If called inside jit, or if `norms` are not real numbers.

    Examples:
        >>> import gradclip_jax as gcx
        >>> gcx.diagnostics.suggest_max_norm([1.0, 2.0, 3.0, float("nan")], percentile=100.0)
        3.0
    """
    refuse_traced("norms", norms)
    check_percentile("percentile", percentile)
    if isinstance(norms, (str, os.PathLike)):
        norms = read_rows(norms)[0]
    try:
        values = np.asarray(gradient_norms(norms) if isinstance(norms, Rows) else norms, np.float64)
    except (TypeError, ValueError):
        rule, hint = "an array of real numbers", "Pass for example `monitor.read(state).rows`."
        raise type_error("norms", rule, shortened(norms), hint) from None
    finite = values[np.isfinite(values)]
    result = float(np.percentile(finite, percentile)) if finite.size else 0.0
    if not result > 0:
        got = f"{values.size} values, of which {np.sum(finite > 0)} are positive and finite"
        hint = "Record steps with finite gradients first, or pass a higher percentile."
        raise value_error("norms", "norms with a positive percentile", got, hint)
    return result
