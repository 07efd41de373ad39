"""Plots of training runs. Matplotlib is imported only when a plot is drawn."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .._errors import public
from .._types import HostArray
from ._log import LogSource
from ._monitor import Monitor, read_log
from ._rows import KINDS, MEASURED, Names, Outcome, Rows

_MAX_ROWS, _MAX_CAPTIONS = 40, 12


@public
def plot_log(log: LogSource | Monitor) -> Any:
    """Plot the loss of a training run, and heat maps with one row per leaf, layer or tap.

    The heat maps show the norms of gradient, update and parameters of at most 40 leaves or layers,
    those with incidents first, and the RMS of the activations at each tap, if the log contains
    them. The color scale is logarithmic, from the 1st to the 99th percentile. Non-finite values are
    red. A log without norms of units is plotted as lines.

    Incidents are marked by vertical lines. The first of each streak has a number, and is described
    below the plot.

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
    incidents = [x for x in monitor.incidents if x.step in monitor.rows.step]
    panels = _panels(monitor.rows, monitor.names, [x.leaf for x in incidents])
    panels = [panel for panel in panels if panel[1].size]
    numbered = list(enumerate((x for x in incidents if x.streak == 1), 1))[-_MAX_CAPTIONS:]
    captions = [textwrap.fill(f"{i}  {x}", 140, subsequent_indent="    ") for i, x in numbered]
    heights = [max(1.2, 0.14 * len(labels)) for _, _, _, labels in panels]
    size = 9, sum(heights) + 0.5 * len(heights) + 0.3 * len(captions) + 0.5
    figure = Figure(size, dpi=100, layout="constrained")
    axes = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axis, (title, steps, values, labels) in zip(axes, panels, strict=True):
        axis.set_title(title, loc="left", fontsize=9)
        _draw(axis, steps, values, labels)
        for incident in incidents:
            axis.axvline(incident.step, color="tab:red", linewidth=0.8, alpha=0.7)
    for axis in figure.axes:
        axis.tick_params(labelsize=6, which="both")
    for i, incident in numbered:
        place = incident.step, 1.02
        axes[0].text(*place, i, transform=axes[0].get_xaxis_transform(), color="tab:red", size=7)
    axes[-1].set_xlabel("step", fontsize=8)
    figure.supxlabel("\n".join(captions), x=0.01, ha="left", fontsize=8)
    return figure


def _panels(
    rows: Rows, names: Names, leaves: Sequence[str]
) -> Iterator[tuple[str, HostArray, HostArray, Sequence[str]]]:
    """Yield the title, steps, values and labels of each panel; a line has no labels.

    `leaves` are the units to show first.
    """
    has_loss, has_taps = rows.has(Outcome.HAS_LOSS), rows.has(Outcome.HAS_TAPS)
    yield "loss", rows.step[has_loss], rows.loss[has_loss], ()
    order = sorted(range(len(names.units)), key=lambda i: names.units[i] not in leaves)[:_MAX_ROWS]
    labels, columns = [names.units[i] for i in order], [1 + i for i in order]
    for i, (kind, flag) in enumerate(zip(KINDS, MEASURED, strict=True)):
        shown = rows.take(rows.has(flag) & (rows.has(Outcome.HAS_UNITS) | (not labels)))
        values = shown.norms[:, i, columns] if labels else shown.norms[:, i, 0]
        yield f"{kind} norm", shown.step, values, labels
    rms = rows.taps[has_taps, :_MAX_ROWS, 0, 1]
    yield "RMS of activations", rows.step[has_taps], rms, names.taps[:_MAX_ROWS]


def _draw(axis: Any, steps: HostArray, values: HostArray, labels: Sequence[str]) -> None:
    """Draw a heat map with a row for each label, or a line if there are no labels."""
    import matplotlib

    if not labels:
        axis.plot(steps, values, linewidth=1)
        axis.set_yscale("linear" if np.any(values <= 0) else "log")
        return
    values = np.where(np.isfinite(values), values, np.nan).T
    positive = values[values > 0]
    low, high = np.percentile(positive, [1, 99]) if positive.size else (1.0, 10.0)
    edges = np.append(steps, steps[-1] + 1), np.arange(len(labels) + 1) - 0.5
    options = {"norm": "log", "vmin": low, "vmax": max(high, low * 1.01), "rasterized": True}
    colors = matplotlib.colormaps["viridis"].with_extremes(bad="tab:red")
    mesh = axis.pcolormesh(*edges, np.maximum(values, low), cmap=colors, **options)
    axis.figure.colorbar(mesh, ax=axis, pad=0.01, aspect=10)
    axis.set_yticks(range(len(labels)), labels)
    axis.invert_yaxis()
