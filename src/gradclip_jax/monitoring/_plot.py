"""Plots of training runs. Matplotlib is imported only when a plot is drawn."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np

from .._errors import public
from .._types import HostArray
from ._log import LogSource
from ._monitor import Monitor, read_log
from ._rows import MEASURED, Outcome

_MAX_UNITS, _MAX_CAPTIONS = 40, 12


@public
def plot_log(log: LogSource | Monitor) -> Any:
    """Plot the loss of a training run, and heat maps with one row per leaf or layer.

    The heat maps show the norms of gradient, update and parameters of at most 40 leaves or layers,
    those with incidents first. The color scale is logarithmic, from the 1st to the 99th percentile.
    Non-finite values are red. A log without norms of units is plotted as lines.

    Incidents are marked by vertical lines. The last 12 streaks are described below the plot.

    The figure is 900 pixels wide. It requires matplotlib: `pip install "gradclip_jax[plots]"`.

    Args:
        log: Path of a log of any trainer, its lines as dictionaries, or a monitor, whose `rows` are
            plotted.

    Returns:
        A `matplotlib.figure.Figure`, which can be saved with `figure.savefig("run.png")`.

    Raises:
        ValueError: If `log` has neither a loss nor a norm.

    Examples:
        >>> import gradclip_jax as gcx
        >>> log = [{"loss": 2.0, "gradient_norm/wi": 1.0, "gradient_norm/wo": 2.0}] * 3
        >>> [axes.get_title(loc="left") for axes in gcx.diagnostics.plot_log(log).axes[:2]]
        ['loss', 'gradient norm']
    """
    from matplotlib.figure import Figure

    monitor = log if isinstance(log, Monitor) else read_log(log)
    rows, names = monitor.rows, np.array(monitor.names.units)
    incidents = [x for x in monitor.incidents if x.step in rows.step]
    # A stable sort: the other units stay in the order of the model.
    shown = np.argsort(~np.isin(names, [x.leaf for x in incidents]), kind="stable")[:_MAX_UNITS]
    panels = [("loss", Outcome.HAS_LOSS, rows.loss)]
    for i, (name, flag) in enumerate(MEASURED.items()):
        panels.append((f"{name} norm", flag, rows.norms[:, i, 1 + shown if shown.size else 0]))
    panels = [x for x in panels if rows.has(x[1]).any()]
    heights = [max(1.2, 0.14 * np.size(values[0])) for _, _, values in panels]
    captions = [textwrap.fill(str(x), 140) for x in incidents if x.streak == 1][-_MAX_CAPTIONS:]
    size = 9, sum(heights) + 0.5 * len(heights) + 0.3 * len(captions) + 0.5
    figure = Figure(size, dpi=100, layout="constrained")
    axes = figure.subplots(len(panels), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axis, (title, flag, values) in zip(axes, panels, strict=True):
        axis.set_title(title, loc="left", fontsize=9)
        is_known = rows.has(flag) & (rows.has(Outcome.HAS_UNITS) | (values.ndim == 1))
        _draw(axis, rows.step[is_known], values[is_known], names[shown])
        for incident in incidents:
            axis.axvline(incident.step, color="tab:red", linewidth=0.8, alpha=0.7)
    axes[-1].set_xlabel("step", fontsize=8)
    figure.supxlabel("\n".join(captions), x=0.01, ha="left", fontsize=8)
    return figure


def _draw(axis: Any, steps: HostArray, values: HostArray, labels: HostArray) -> None:
    """Draw a line, or a heat map with a row for each label."""
    if values.ndim == 1:
        axis.plot(steps, values, linewidth=1)
        axis.set_yscale("linear" if np.any(values <= 0) else "log")
        return
    values = np.where(np.isfinite(values), values, np.nan).T
    positive = values[values > 0]
    low, high = np.percentile(positive, [1, 99]) if positive.size else (1.0, 10.0)
    edges = np.append(steps, steps[-1] + 1), np.arange(len(labels) + 1) - 0.5
    options = {"norm": "log", "vmin": low, "vmax": max(high, low * 1.01), "rasterized": True}
    mesh = axis.pcolormesh(*edges, np.maximum(values, low), **options)
    axis.set_facecolor("tab:red")  # behind values that are not finite
    axis.figure.colorbar(mesh, ax=axis, pad=0.01, aspect=10)
    axis.set_yticks(range(len(labels)), labels, fontsize=6)
    axis.invert_yaxis()
