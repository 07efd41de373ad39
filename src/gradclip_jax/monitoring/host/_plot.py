"""Plots of training runs. Matplotlib is imported only when a plot is drawn."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..._errors import public, type_error, value_error
from ..._types import HostArray
from .._layout import MEASURED, Outcome
from ._detect import Incident
from ._log import LogSource
from ._monitor import Monitor, read_log
from ._policy import Report
from ._rows import Rows
from ._summary import has_micro_batches

_MAX_UNITS = 40
_MAX_CAPTIONS = 12
_MAX_POINTS = 4000
"""Maximum number of intervals for which a line shows the lowest and the highest value."""

_RED, _MISSING = "tab:red", "0.92"


class _Panel(NamedTuple):
    """One plot: a line for values [steps], or a heat map for values [steps, units]."""

    title: str
    steps: HostArray
    values: HostArray


@public
def plot_log(log: LogSource | Monitor) -> Any:
    """Plot the loss of a training run, and heat maps with one row per leaf or layer.

    | in the plot | meaning |
    | --- | --- |
    | heat maps | norms of at most 40 leaves or layers; first those with incidents |
    | colors | logarithmic, from the 1st to the 99th percentile, until the next measurement |
    | red | a non-finite value |
    | gray | no measurement, such as the update of a micro-batch that an accumulation only adds |
    | lines instead of heat maps | the log has no norms of leaves or layers |
    | vertical lines, triangles | an incident, or the first one of a streak, which is shaded |

    The text below the plot describes the first 6 and the last 6 streaks, each by its incident with
    the most kinds of faults. The figure is 900 pixels wide.

    This function requires Matplotlib: `pip install "gradclip_jax[plots]"`.

    Args:
        log: Path of a training log, the lines of a log as dictionaries, or a `Monitor`.

    Returns:
        A `matplotlib.figure.Figure`, which can be saved with `figure.savefig("run.png")`.

    Raises:
        ValueError: If `log` has neither a loss nor a norm.
        TypeError: If `log` is neither a path nor lines nor a monitor.

    Examples:
        >>> import gradclip_jax as gcx
        >>> log = [{"loss": 2.0, "gradient_norm/wi": 1.0, "gradient_norm/wo": 2.0}] * 3
        >>> [axes.get_title(loc="left") for axes in gcx.diagnostics.plot_log(log).axes[:2]]
        ['loss', 'gradient norm']
    """
    from matplotlib.figure import Figure

    if isinstance(log, (Report, Rows)):
        rule, hint = "a path, lines or a monitor", "Pass the monitor: `plot_log(monitor)`."
        raise type_error("log", rule, type(log).__name__, hint)
    monitor = log if isinstance(log, Monitor) else read_log(log)
    rows, names = monitor.rows, np.array(monitor.names.units)
    incidents = [x for x in monitor.incidents if x.step in rows.step]
    # The sort is stable, so the other units stay in the order of the model.
    shown = np.argsort(~np.isin(names, [x.leaf for x in incidents]), kind="stable")[:_MAX_UNITS]
    panels = list(_panels(rows, shown))
    if not panels:
        hint = "Log `loss` or `gradient_norm`."
        raise value_error("log", "a log with numbers", "rows without a loss and norms", hint)
    heights = [max(1.2, 0.14 * np.size(panel.values[0])) for panel in panels]
    streaks = _streaks(incidents)
    captions = _captions(streaks)
    size = 9, sum(heights) + 0.5 * len(heights) + 0.3 * len(captions) + 0.5
    figure = Figure(size, dpi=100, layout="constrained")
    axes = figure.subplots(len(panels), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axis, panel in zip(axes, panels, strict=True):
        axis.set_title(panel.title, loc="left", fontsize=9)
        if panel.values.ndim == 1:
            _draw_line(axis, panel)
        else:
            _draw_heat_map(axis, panel, rows, names[shown])
        axis.tick_params("x", labelsize=8)
        _mark_incidents(axis, streaks, hides_values=panel.values.ndim == 2)
    axes[-1].set_xlim(rows.step[0], rows.end)
    axes[-1].set_xlabel("step", fontsize=8)
    # A dollar sign in a leaf name must not start math.
    figure.supxlabel("\n".join(captions), x=0.01, ha="left", fontsize=8, parse_math=False)
    return figure


def _panels(rows: Rows, shown: HostArray) -> Iterator[_Panel]:
    """Yield a panel for the loss and for each kind of norm, without missing rows."""
    has_loss = rows.has(Outcome.HAS_LOSS)
    if has_loss.any():
        yield _Panel("loss", rows.step[has_loss], rows.loss[has_loss])
    for i, (name, flag) in enumerate(MEASURED.items()):
        is_known, title = rows.has(flag), f"{name} norm"
        if name == "gradient" and has_micro_batches(rows):
            title += " of micro-batches"
        if name == "update":
            is_known &= rows.closes_window
        if shown.size:
            is_known &= rows.has(Outcome.HAS_UNITS)
        if is_known.any():
            columns = 1 + shown if shown.size else 0
            yield _Panel(title, rows.step[is_known], rows.norms[is_known, i][:, columns])


def _draw_line(axis: Any, panel: _Panel) -> None:
    """Draw finite values as a line, and a mark at the lower edge for each non-finite value."""
    is_finite = np.isfinite(panel.values)
    steps, values = panel.steps[is_finite], panel.values[is_finite]
    if len(steps) > 2 * _MAX_POINTS:
        starts = np.linspace(0, len(steps), _MAX_POINTS, endpoint=False).astype(int)
        low, high = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
        steps, values = np.repeat(steps[starts], 2), np.stack([low, high], 1).ravel()
    axis.plot(steps, values, linewidth=1, marker="." if len(steps) < 50 else None)
    axis.tick_params("y", which="both", labelsize=8)
    # On a logarithmic axis, a line to a zero value runs off the lower edge of the plot.
    if np.any(values > 0) and not np.any(values < 0):
        axis.set_yscale("log")
    bad = panel.steps[~is_finite]
    options = {"transform": axis.get_xaxis_transform(), "color": _RED, "linestyle": ""}
    axis.plot(bad, np.full(len(bad), 0.03), marker="|", markersize=8, **options)


def _draw_heat_map(axis: Any, panel: _Panel, rows: Rows, labels: HostArray) -> None:
    """Draw one row for each label, with finite values as colors and other values as red bars."""
    is_finite = np.isfinite(panel.values)
    positive = panel.values[is_finite & (panel.values > 0)]
    low, high = np.percentile(positive, [1, 99]) if positive.size else (1.0, 10.0)
    values = np.where(is_finite, np.maximum(panel.values, low), np.nan).T
    edges = np.append(panel.steps, rows.end), np.arange(len(labels) + 1) - 0.5
    options = {"norm": "log", "vmin": low, "vmax": max(high, low * 1.01), "rasterized": True}
    mesh = axis.pcolormesh(*edges, values, **options)
    # Draw each measurement one step wide, because the next one may be many steps later.
    widths = np.append(np.diff(rows.step), 1)[np.isin(rows.step, panel.steps)]
    for unit in np.flatnonzero(~is_finite.all(axis=0)):
        bad = ~is_finite[:, unit]
        spans = np.stack([panel.steps[bad], widths[bad]], 1)
        # The outline is visible even if a step is narrower than a pixel.
        axis.broken_barh(spans, (unit - 0.5, 1), color=_RED, linewidth=0.8, rasterized=True)
    axis.set_facecolor(_MISSING)
    colors = axis.figure.colorbar(mesh, ax=axis, pad=0.01, aspect=10)
    colors.ax.tick_params(which="both", labelsize=7)
    axis.set_yticks(range(len(labels)), labels, fontsize=6, parse_math=False)
    axis.invert_yaxis()


def _streaks(incidents: Sequence[Incident]) -> list[Sequence[Incident]]:
    """Split incidents into streaks; the beginning of the first one may be missing."""
    starts = [i for i, x in enumerate(incidents) if x.streak == 1 or i == 0]
    stops = [*starts, len(incidents)][1:]
    return [incidents[start:stop] for start, stop in zip(starts, stops, strict=False)]


def _mark_incidents(axis: Any, streaks: list[Sequence[Incident]], *, hides_values: bool) -> None:
    """Draw a line at the first step of each streak, and shade the streak or mark its start."""
    if hides_values:
        starts, options = [x[0].step for x in streaks], {"color": _RED, "linestyle": ""}
        options |= {"transform": axis.get_xaxis_transform(), "clip_on": False}
        (marks,) = axis.plot(starts, np.ones(len(starts)), marker=7, markersize=4, **options)
        marks.set_in_layout(False)  # if there are no marks, the layout would fail
        return
    for first, *_, last in ([*x, x[-1]] for x in streaks):
        axis.axvline(first.step, color=_RED, linewidth=0.8, alpha=0.7)
        axis.axvspan(first.step, last.step, color=_RED, alpha=0.12, linewidth=0)


def _captions(streaks: list[Sequence[Incident]]) -> list[str]:
    """Describe the first and the last streaks of incidents in one sentence each."""
    found = [max(x, key=lambda incident: len(incident.kinds)) for x in streaks]
    captions = [textwrap.fill(str(x), 140) for x in found]
    if (num_omitted := len(captions) - _MAX_CAPTIONS) > 0:
        half = _MAX_CAPTIONS // 2
        captions[half:-half] = [f"... {num_omitted} more"]
    return captions
